"""Measures costs: each distinct op signature is timed once per kind of device and cached.

Devices of one kind (same processor, same numbers of cores and threads) are timed at the same time,
each with its share of the signatures. That is twice as fast on two devices. Each device also has
the share of memory and caches that it will have when a plan keeps the others busy. So a device that
has nothing left to measure repeats what another device measures.
"""

import gc
import os
import platform
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.costs.analytic import analytic_costs
from dovetail.costs.cache import CostCache, MeasuredCost
from dovetail.costs.messages import (
    FailedCall,
    OpTimes,
    TimedCalls,
    TimedEntry,
    TimedStep,
    random_tensor,
    timed_passes,
)
from dovetail.costs.records import Costs
from dovetail.errors import CostError, MachineError, ModelError, ProcessDiedError, ProcessError
from dovetail.frontends import Captured, Program
from dovetail.frontends.checks import CHECK
from dovetail.frontends.instructions import RunOp
from dovetail.frontends.interpret import example_values, initial_values, last_uses
from dovetail.frontends.program import distinct_refs
from dovetail.frontends.runners import Runner, Stream, make_runner, runner_kind
from dovetail.graph import HOST, Graph
from dovetail.machine import Device, Machine
from dovetail.machine.local import available_bytes
from dovetail.runtime.cuda import cuda_maker
from dovetail.runtime.neighbours import Neighbours, Spinning, disturbs, is_calm
from dovetail.runtime.processes import Worker, launch, ready
from dovetail.runtime.ranks import host_name
from dovetail.runtime.setup import set_up
from dovetail.runtime.shared import Block
from dovetail.runtime.timers import (
    Deadline,
    Repeats,
    clock,
    summarise,
    time_call,
    time_rounds,
    time_steps,
)
from dovetail.runtime.waiting import SPIN_NS, address_of, publish, wait

# The process that measures. It is pinned to a device's cores and set up like an executor's worker,
# and its `MeasuredCores` answers what is asked.


HOP_BYTES = (4096, 262144, 4194304)
"""A link's latency and bandwidth are fitted to messages of these sizes."""
_HOPS = 60
"""Messages of each size that are sent to and fro in a game."""
_GAMES, _LEAST_GAMES, _BETWEEN_GAMES_SECONDS = 6, 2, 0.05
"""Games of messages and the pause after each, so that one bad moment of the host does not count.
Behind a deadline `_LEAST_GAMES` are enough."""
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 400
"""Bounds on the rounds in which the calls of a batch are timed."""
_BUDGET_SECONDS = 1.0
"""A batch gets no further rounds after this time, unless it has too few."""
_MOST_COPIES, _COLD_BYTES = 8, 2**23
"""A call's cold tensors come in as many copies as fill `_COLD_BYTES`, but at most so many."""
_PACE_LOOPS = 2000
"""Python loops that measure a core's pace."""
_FLAG_BYTES = 256
"""Bytes before the payload, which hold two flags and an abort flag."""


def time_calls(
    entries: list[TimedEntry],
    best_seconds: float,
    patience_seconds: float,
    look: Callable[[], object] = lambda: None,
) -> TimedCalls | FailedCall:
    """Time calls in turn, round after round, on random inputs, bound as an executor binds them.

    Calls take turns because a call that follows itself finds its code in the nearest cache, which
    in a network it does not. Tensors that a network holds from step to step are not in the caches
    there, so they come in several copies that take turns. Rounds on a disturbed core do not count,
    until such rounds have taken `patience_seconds`.

    best_seconds   the best `pace_seconds` known of this kind of core
    look           is called before each round

    Returns a `FailedCall` for the first call that raises.
    """
    runs = [_bind_inputs(entry) for entry in entries]  # [calls][copies]
    # The first run of each call is not timed: it warms up, and shows whether the call works.
    for index, copies in enumerate(runs):
        try:
            for run in copies:
                run()
        except Exception:
            return FailedCall(index, traceback.format_exc())
    neighbours = Neighbours(os.sched_getaffinity(0))
    began = clock()

    def look_and_pace() -> float:
        look()
        return pace_seconds()

    def run_round(turn: int) -> list[float]:
        # Each call has the copy of its cold tensors whose turn it is.
        return [copies[turn % len(copies)]() for copies in runs]

    rounds = time_rounds(
        run_round,
        Repeats(_MOST_ROUNDS, _LEAST_ROUNDS, _BUDGET_SECONDS),
        pace=look_and_pace,
        best_seconds=best_seconds,
        patience_seconds=patience_seconds,
        clock=clock,
    )
    others_cores = neighbours.settled() or 0.0
    gc.collect()
    timings = list(map(summarise, rounds.seconds))
    return TimedCalls(
        timings, rounds.pace_seconds, rounds.waited_seconds, clock() - began, others_cores
    )


def pace_seconds() -> float:
    """Return the seconds of a fixed piece of Python, which show how fast the core runs just now.

    When a neighbour works, a core of a shared machine runs at two thirds of its speed for many
    seconds at a time. Kernels slow down unequally then, so the slowness cannot be divided out.
    """
    start = clock()
    for _ in range(_PACE_LOOPS):
        pass
    return clock() - start


def copies_for(cold_bytes: int) -> int:
    """Return how many copies of its cold tensors a call gets: enough to overflow the nearest
    caches, between 1 and `_MOST_COPIES`."""
    return max(1, min(_MOST_COPIES, _COLD_BYTES // cold_bytes)) if cold_bytes else 1


def _bind_inputs(entry: TimedEntry) -> list[Callable[[], float]]:
    """Return functions that run the entry's call and return its seconds, one for each copy of its
    cold tensors.

    The call runs as in an executor, by a runner. It frees its results, as it does there, and the
    time of that is part of the cost.
    """
    hot = {t: random_tensor(x, entry.layouts) for t, x in entry.layouts.items()}
    cold_bytes = sum(hot[tensor].untyped_storage().nbytes() for tensor in entry.cold)
    count = 1 + max((*entry.layouts, *entry.call.results), default=0)
    frees = tuple(tensor for tensor in entry.call.results if tensor >= 0)
    runs: list[Callable[[], float]] = []
    for _ in range(copies_for(cold_bytes)):
        runner = make_runner(count)
        runner.seeds = [0]
        for tensor, value in hot.items():
            runner.set(tensor, value.clone() if tensor in entry.cold else value)
        stream = runner.stream([RunOp(0, frees, entry.call, 0 if entry.call.random else -1)])
        runs.append(partial(_stamped_seconds, runner, stream))
    return runs


def _stamped_seconds(runner: Runner, stream: Stream) -> float:
    """Run a stream of one instruction, and return the seconds that this takes by itself."""
    runner.run(stream, stamps=_STAMPS_ADDRESS)
    return float(_STAMPS[1] - _STAMPS[0]) / 1e9


_STAMPS = np.zeros(2, dtype=np.int64)
_STAMPS_ADDRESS = address_of(_STAMPS)


def measure_rates() -> dict[str, Any]:
    """Return this device's measured rates, under the names of `Device`'s fields.

    FLOP/s by dtype come from a matrix product of 1024, bytes/s from a copy of 64 MB that is read
    and written, and the overhead from an op that does next to nothing.
    """
    flops_per_second = {}
    for name in ("float32", "float64", "bfloat16"):
        a = torch.rand(1024, 1024).to(getattr(torch, name))
        seconds = time_call(lambda a=a: a @ a).median_seconds  # type: ignore[misc]
        flops_per_second[name] = 2 * 1024**3 / seconds
    source = torch.rand(2**24)
    target = torch.empty_like(source)
    tiny = torch.ones(8)
    return {
        "flops_per_second": flops_per_second,
        "bandwidth_bytes_per_second": 2
        * source.nbytes
        / time_call(lambda: target.copy_(source)).median_seconds,
        "op_overhead_seconds": time_call(
            lambda: torch.ops.aten.add.Tensor(tiny, tiny)
        ).median_seconds,
    }


class MeasuredCores:
    """A device's cores, which are measured from a process on them.

    The process is set up like an executor's worker, so that its threads spin where those would.
    """

    def __init__(self, threads: int) -> None:
        set_up(threads)
        self._spinning = Spinning(os.sched_getaffinity(0), threads)
        self.block: Block | None = None
        # Executors run calls in this mode too, without autograd's bookkeeping. The process is in it
        # as long as it lives.
        self._mode = torch.inference_mode()
        self._mode.__enter__()

    def time_calls(
        self, entries: list[TimedEntry], best_seconds: float, patience_seconds: float
    ) -> TimedCalls | FailedCall:
        return time_calls(entries, best_seconds, patience_seconds, self._spinning.look)

    def time_step(self, step: TimedStep, beside: tuple[int, ...]) -> OpTimes | FailedCall:
        return time_step(step, beside)

    rates = staticmethod(measure_rates)

    def map(self, descriptor: int) -> None:
        """Take the block in which messages go to and fro with another device."""
        self.block = Block(descriptor)

    def play(self, first: bool, round_base: int) -> dict[int, float]:
        """Send and receive all messages over the block; return median one-way seconds by message
        size.

        A message is sent as an executor sends it: a copy into a slot, then a flag. In a plan the
        consumer's op reads the slot in place, from the other core's cache. The op's measured cost
        does not include that, so a hop here includes one such read.

        Only the first player measures; the second returns {}. `round_base` must be above all values
        that the flags had before, because a wait ends when a flag has reached its value.
        """
        assert self.block is not None
        flags = self.block.view(0, (_FLAG_BYTES // 8,), np.int64)
        own_flag, peer_flag, abort = (
            address_of(flags, 8 * i) for i in ((0, 1, 2) if first else (1, 0, 2))
        )
        seconds = {}
        half = max(HOP_BYTES)

        def hop(data: torch.Tensor, outgoing: torch.Tensor, incoming: torch.Tensor) -> float:
            nonlocal round_base
            round_base += 1
            began = clock()
            if not first:
                wait(peer_flag, round_base, abort, SPIN_NS)
                data.copy_(incoming)
            outgoing.copy_(data)
            publish(own_flag, round_base)
            if first:
                wait(peer_flag, round_base, abort, SPIN_NS)
                data.copy_(incoming)
            return (clock() - began) / 2

        for size in HOP_BYTES:
            outgoing, incoming = (
                torch.from_numpy(self.block.view(_FLAG_BYTES + offset, (size,), np.uint8))
                for offset in ((0, half) if first else (half, 0))
            )
            data = torch.ones(size, dtype=torch.uint8)
            samples = time_steps(partial(hop, data, outgoing, incoming), Repeats(_HOPS), warm_ups=0)
            if first:
                seconds[size] = summarise(samples).median_seconds
        return seconds


# ---- Ops within a step ----
#
# An op that is timed by itself finds its inputs and its results' memory in the caches. In a step it
# does not: products and sums of a megabyte took 1.2 to 1.4 times as long there, small elementwise
# ops twice. So the whole step runs, on all devices at once, and the runner stamps every op.


LONG_SECONDS, _SHORT_SECONDS = 5.0, 0.05
"""A step that takes longer than `LONG_SECONDS` by data sheet is not timed as a whole. One that
takes less than `_SHORT_SECONDS` is, even if the time for measuring is over: a plan needs costs."""


def time_step(step: TimedStep, beside: tuple[int, ...] = ()) -> OpTimes | FailedCall:
    """Run a step repeatedly, and time its ops. Returns a `FailedCall` for an op that raises.

    beside   ids of processes that time the step at the same time: a GPU's uses any core
    """
    runner = make_runner(step.tensors)
    for tensor, value in step.values.items():
        runner.set(tensor, value)
    stream = runner.stream()
    for op, call in step.calls.items():
        seed = -1
        if call.random:
            seed = len(runner.seeds)
            runner.seeds.append(seed)
        stream.add(RunOp(op, step.frees.get(op, ()), call, seed))
    stamps = np.zeros((len(step.calls), 2), dtype=np.int64)

    def stamped() -> NDArray[np.float64]:
        runner.run(stream, stamps=address_of(stamps.reshape(-1)))
        seconds: NDArray[np.float64] = (stamps[:, 1] - stamps[:, 0]) / 1e9
        return seconds

    others = [pid for pid in beside if pid != os.getpid()]
    neighbours = Neighbours(os.sched_getaffinity(0), others)
    try:
        samples = timed_passes(partial(runner.run, stream), stamped, step.seconds)
    except Exception:
        return FailedCall(runner.failed, traceback.format_exc())
    gc.collect()
    return OpTimes(np.array(samples), neighbours.settled() or 0.0)


PROTOCOL = 7
"""The version of the measurement, which is part of every cache key. Raise it when the measurement
changes."""
_BATCH_OPS = 64
"""The most ops that a worker times in one batch."""
_BATCH_BYTES = 2**28
"""The most bytes of the tensors of a batch with more than one op."""
_PATIENCE_SECONDS = 20.0
"""The longest time, in all, that a device waits for its core to be undisturbed."""
_NEIGHBOURS_SECONDS = 5.0
"""The longest time, in all, that a device spends on measuring disturbed batches again. A program
that disturbs for longer will probably go on."""

Progress = Callable[[float], None]
"""Called with the share of the work that is done, 0 to 1."""


def device_key(device: Device, machine: Machine) -> str:
    """Return a cache key with everything that a measurement on this device depends on."""
    peers = sum(
        _kind(other) == _kind(device) and other.host == device.host for other in machine.devices
    )
    return (
        f"{device.model} | {_threads_of(device)} | {peers} at once | torch {torch.__version__} "
        f"| {runner_kind()} | protocol {PROTOCOL}"
    )


def measured_costs(
    graph: Graph,
    program: Program | None,
    machine: Machine,
    cache: CostCache,
    *,
    progress: Progress = lambda _fraction: None,
    beside: Callable[[float], None] = lambda _cores: None,
    deadline: Deadline | None = None,
) -> Costs:
    """Return costs [ops, devices] in measured seconds; ops in the cache are not measured again.

    beside    called with the number of cores that other programs used while some ops were measured,
              if that `disturbs`. The cache keeps the costs of those ops apart (`BESIDE`), until
              they can be measured on calm cores
    deadline  of measuring. Ops that it does not reach have costs by data sheet, times the median of
              what the measured ones took of theirs. These are not kept
    program   None, for a graph from a file, works only if the cache has every signature; else
              `CostError` names the first op that it lacks
    """
    seconds = np.zeros((len(graph), len(machine.devices)))
    ops = np.flatnonzero(~graph.is_source)
    cold = _cold_tensors(graph)
    keys = [_signature_key(graph, cold, op) for op in ops.tolist()]
    keys_of, deadline = dict(zip(ops.tolist(), keys, strict=True)), deadline or Deadline()
    first: dict[str, int] = {}
    for op, key in keys_of.items():
        first.setdefault(key, op)
    for kind, devices in _kinds(machine).items():
        device_name = device_key(devices[0], machine)
        device_costs = cache.costs(device_name, first)
        runs = graph.runs_on(devices[0].kind)
        unknown = [key for key in first if key not in device_costs]
        busy_costs, busy_cores = _beside_others(cache, device_name, unknown)
        cores = [core for device in devices for core in device.cores]
        if busy_costs and (program is None or deadline.is_over or not is_calm(cores)):
            device_costs = busy_costs | device_costs
            beside(busy_cores)
        missing = [op for key, op in first.items() if key not in device_costs and runs[op]]
        if missing and program is None:
            raise CostError(
                graph.names[missing[0]],
                "it was never measured here, and a saved graph holds no calls to measure; "
                "name the model instead of its graph",
            )
        if missing and program is not None:
            # Progress is told before the workers start, because starting them takes a while.
            progress(1 - len(missing) / len(first))
            entries = {op: _entry(graph, program, cold, op) for op in missing}
            measuring = _measure(graph, entries, devices, cache, beside, deadline)
            for measured, others_cores in measuring:
                by_key = {_signature_key(graph, cold, op): cost for op, cost in measured.items()}
                _keep(cache, device_name, by_key, others_cores)
                device_costs |= by_key
                progress(1 - sum(key not in device_costs for key in first) / len(first))
            # What the deadline did not reach.
            if any(keys_of[op] in busy_costs.keys() - device_costs.keys() for op in missing):
                device_costs = busy_costs | device_costs
                beside(busy_cores)
            late = [op for op in missing if keys_of[op] not in device_costs]
            if late:
                place = machine.device_index(devices[0].name)
                by_sheet = analytic_costs(graph, machine).compute_seconds[:, place]
                ratios = [
                    device_costs[key].seconds / by_sheet[op]
                    for key, op in first.items()
                    if key in device_costs and 0 < by_sheet[op] < np.inf
                ]
                scale = float(np.median(ratios)) if ratios else 1.0
                device_costs |= {
                    keys_of[op]: MeasuredCost(scale * float(by_sheet[op]), 0.0) for op in late
                }
                told = f"the costs of {len(late):,} of {len(first):,} kinds of ops"
                deadline.missed.append(f"{told}, which are by data sheet")
        column = np.array(
            [device_costs[key].seconds if key in device_costs else np.inf for key in keys]
        )
        for d, device in enumerate(machine.devices):
            if device.kind == "host":
                seconds[ops, d] = np.inf
            elif _kind(device) == kind:
                seconds[ops, d] = column
                seconds[~graph.runs_on(device.kind) & ~graph.is_source, d] = np.inf
    return Costs(seconds, "measured")


def costs_in_step(
    step: Captured | Graph,
    machine: Machine,
    cache: CostCache,
    *,
    progress: Progress = lambda _fraction: None,
    beside: Callable[[float], None] = lambda _cores: None,
    deadline: Deadline | None = None,
) -> Costs | None:
    """Return costs [ops, devices] in seconds that ops take within the step. None if the step takes
    too long, or cannot run on every device at once, for lack of memory, of weights or of kinds of
    device, or since an op fails; or for a graph without a program, unless the cache has its costs.

    Ops of one signature cost the same: the median over all of them and all steps. The cache keeps
    costs for this step alone, since they depend on the ops around. `beside` and `deadline` are as
    in `measured_costs`; a tenth of what is left is too long for one step.
    """
    graph = step if isinstance(step, Graph) else step.graph
    seconds = np.zeros((len(graph), len(machine.devices)))
    ops = np.flatnonzero(~graph.is_source)
    cold = _cold_tensors(graph)
    keys = [_signature_key(graph, cold, op) for op in ops.tolist()]
    kinds = _kinds(machine)
    within = f"step {graph.fingerprint}"
    names = {kind: f"{device_key(of[0], machine)} | {within}" for kind, of in kinds.items()}
    costs = {kind: cache.costs(name, keys) for kind, name in names.items()}
    deadline, busy_cores = deadline or Deadline(), None
    if any(key not in known for known in costs.values() for key in keys):
        busy = {kind: _beside_others(cache, name, keys) for kind, name in names.items()}
        if all(key in known for known, _ in busy.values() for key in keys):
            busy_cores = max(cores for _, cores in busy.values())
    cores = [core for device in machine.devices for core in device.cores]
    is_settled = isinstance(step, Graph) or deadline.is_over
    if busy_cores is not None and (is_settled or not is_calm(cores)):
        costs = {kind: known for kind, (known, _) in busy.items()}
        beside(busy_cores)
    if any(key not in known for known in costs.values() for key in keys):
        most_seconds = min(LONG_SECONDS, max(_SHORT_SECONDS, deadline.within(inf, 0.1)))
        if isinstance(step, Graph) or not _may_run_everywhere(graph, machine, most_seconds):
            return None
        # A step that other programs disturbed is timed once more, and the calmer of both counts.
        progress(0.0)
        calmest: tuple[list[OpTimes], float] | None = None
        for done in (0.5, 1.0):
            timed = _run_everywhere(step, machine, deadline.within(inf, 0.4))
            if timed is None:
                break
            others_cores = max(reply.others_cores for reply in timed)
            if calmest is None or others_cores < calmest[1]:
                calmest = timed, others_cores
            if not disturbs(others_cores) or deadline.is_over:
                break
            progress(done)
        if calmest is None:
            return None
        replies, others_cores = calmest
        if disturbs(others_cores):
            beside(others_cores)
        for kind in kinds:
            samples: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
            for device, reply in zip(_measured_devices(machine), replies, strict=True):
                if _kind(device) == kind:
                    for place, key in enumerate(keys):
                        samples[key].append(reply.seconds[:, place])
            timings = {key: summarise(np.concatenate(of).tolist()) for key, of in samples.items()}
            costs[kind] = {
                key: MeasuredCost(timing.median_seconds, timing.spread)
                for key, timing in timings.items()
            }
            _keep(cache, names[kind], costs[kind], others_cores)
    for d, device in enumerate(machine.devices):
        if device.kind == "host":
            seconds[:, d] = np.inf
        else:
            seconds[ops, d] = [costs[_kind(device)][key].seconds for key in keys]
        seconds[~graph.runs_on(device.kind), d] = np.inf
    seconds[graph.is_source] = 0.0
    return Costs(seconds, "measured")


BESIDE = " | beside others"
"""Ends the device key of costs that were measured while other programs used the cores."""


def _keep(
    cache: CostCache, device: str, costs: dict[str, MeasuredCost], others_cores: float
) -> None:
    """Keep costs under a device's key, those of busy cores apart, with how busy they were."""
    if disturbs(others_cores):
        device += BESIDE
        cache.add_probe(device, {"others_cores": others_cores})
    cache.add_costs(device, costs)


def _beside_others(
    cache: CostCache, device: str, keys: Iterable[str]
) -> tuple[dict[str, MeasuredCost], float]:
    """(the costs that were measured on busy cores, how many cores others used)."""
    cores = (cache.probe(device + BESIDE) or {}).get("others_cores")
    if not isinstance(cores, float):
        return {}, 0.0
    return cache.costs(device + BESIDE, keys), cores


def _may_run_everywhere(graph: Graph, machine: Machine, most_seconds: float | None = None) -> bool:
    """True if the step is not long, every op may run on every device, and all its tensors fit into
    memory twice for each device: once here or on the way, and once there."""
    costs = analytic_costs(graph, machine).compute_seconds[~graph.is_source]
    limit_seconds = LONG_SECONDS if most_seconds is None else most_seconds
    if np.where(np.isfinite(costs), costs, 0.0).sum(axis=0).max() > limit_seconds:
        return False
    devices, step_bytes = _measured_devices(machine), int(graph.tensor_bytes.sum())
    runs = all(bool(graph.runs_on(device.kind).all()) for device in devices)
    fits = all(step_bytes <= d.memory_bytes for d in devices if d.torch_device)
    return runs and fits and 2 * step_bytes * len(devices) <= available_bytes()


def timed_step(captured: Captured) -> TimedStep:
    """The step to time, on its first weights and its examples. Raises `ModelError` if these are
    fake and cannot be drawn."""
    graph, program = captured.graph, captured.program
    values = initial_values(captured)
    inputs, targets = example_values(captured)
    given = {f"input.{i}": value for i, value in enumerate(inputs)}
    given |= {f"target.{i}": value for i, value in enumerate(targets)}
    for op, source in enumerate(program.sources):
        if source is not None and source.role == "input":
            values[graph.outputs_of(op)[0]] = given[source.name]
    calls = {op: call for op, call in enumerate(program.calls) if call is not None}
    # Values of sources stay for the next step.
    frees = {
        op: tuple(t for t in tensors if not graph.is_source[graph.producers[t]])
        for op, tensors in enumerate(last_uses(graph))
    }
    return TimedStep(calls, frees, values, graph.tensors)


def _run_everywhere(
    captured: Captured, machine: Machine, limit_seconds: float
) -> list[OpTimes] | None:
    """[devices] times of the step's ops, with all devices at work at once; None if one fails, or if
    weights or examples are fake and cannot be drawn."""
    try:
        step = replace(timed_step(captured), seconds=limit_seconds)
    except ModelError:
        return None
    with ExitStack() as stack:
        devices = _measured_devices(machine)
        workers = [stack.enter_context(start_worker(device)) for device in devices]
        for worker in workers:
            worker.receive()
        pids = tuple(worker.pid for worker in workers)
        for worker in workers:
            worker.begin("time_step", step, pids)
        try:
            replies: list[OpTimes | FailedCall] = [worker.receive() for worker in workers]
        except ProcessDiedError:  # op by op takes less memory
            return None
    times = [reply for reply in replies if isinstance(reply, OpTimes)]
    return times if len(times) == len(replies) else None


def _measured_devices(machine: Machine) -> list[Device]:
    """The devices that are measured, all at once: those of this host that run anything, and of
    those that share a GPU the first."""
    found: dict[str, Device] = {}
    for device in machine.devices:
        if device.kind != "host" and device.host in ("", host_name()):
            found.setdefault(device.torch_device or device.name, device)
    return list(found.values())


def check_measurable(machine: Machine) -> None:
    """Raise `MachineError` for a device of another host that is unlike all devices of this one:
    what ops cost there cannot be measured here."""
    kinds = _kinds(machine)
    for device in machine.devices:
        if device.kind != "host" and _kind(device) not in kinds:
            raise MachineError(
                f"device {device.name!r} of host {device.host!r} is a {device.model} "
                f"({_threads_of(device)}), and host {host_name()!r} has none like it in "
                f"{machine.name}, so what ops cost there cannot be measured here"
            )


def _threads_of(device: Device) -> str:
    if device.torch_device:
        return "GPU"
    cores, threads = len(device.cores), device.op_threads
    return f"{cores} cores" if threads == cores else f"{threads} threads on {cores} cores"


def _kind(device: Device) -> tuple[str, int, int]:
    return device.model, len(device.cores), device.op_threads


def _kinds(machine: Machine) -> dict[tuple[str, int, int], list[Device]]:
    kinds = defaultdict(list)
    for device in _measured_devices(machine):
        kinds[_kind(device)].append(device)
    return kinds


def _measure(
    graph: Graph,
    entries: dict[int, TimedEntry],
    devices: list[Device],
    cache: CostCache,
    beside: Callable[[float], None],
    deadline: Deadline,
) -> Iterator[tuple[dict[int, MeasuredCost], float]]:
    """Time these entries on all devices, and yield batch by batch (op -> measured cost, cores that
    other programs used meanwhile).

    A worker that is free gets the next batch, or none behind the deadline. A batch that other
    programs disturbed is measured again later, until that has taken `_NEIGHBOURS_SECONDS`.
    """
    # Batches are taken from the end of the list.
    todo = list(reversed(_batches(graph, entries, len(devices))))
    # An undisturbed core's pace depends on the processor and on Python.
    python = f"{sys.implementation.name} {platform.python_version()}"
    core = f"{devices[0].model} | {python}"
    best_seconds = cache.pace(core)
    with ExitStack() as stack:
        idle = [stack.enter_context(start_worker(device)) for device in devices]
        patience = dict.fromkeys(idle, deadline.within(_PATIENCE_SECONDS, 0.2))
        again_seconds = dict.fromkeys(idle, deadline.within(_NEIGHBOURS_SECONDS, 0.2))
        for worker in idle:
            worker.receive()
        working: dict[Worker, list[int]] = {}
        repeating: set[Worker] = set()
        is_first = True
        while todo or working:
            if deadline.is_over and not is_first:
                todo.clear()
                if not working:
                    break
            is_first = False
            for worker in idle:
                if todo:
                    batch = working[worker] = todo.pop()
                    allowed = patience[worker]
                else:
                    # Nothing is left for this worker. It repeats another one's batch and its reply
                    # is not used: it only keeps its device busy, as in a plan.
                    batch, allowed = next(iter(working.values())), 0.0
                    repeating.add(worker)
                timed = [entries[op] for op in batch]
                worker.begin("time_calls", timed, best_seconds, allowed)
            idle = ready([*working, *repeating])
            for worker in idle:
                reply: TimedCalls | FailedCall = worker.receive()
                if worker in repeating:
                    repeating.remove(worker)
                    continue
                batch = working.pop(worker)
                if isinstance(reply, FailedCall):
                    name = graph.names[batch[reply.index]]
                    error = ProcessError(worker.name, reply.traceback)
                    raise CostError(name, f"its call failed: {error.said}") from error
                patience[worker] -= reply.waited_seconds
                best_seconds = min(best_seconds, reply.pace_seconds)
                cache.add_pace(core, best_seconds)
                if disturbs(reply.others_cores):
                    beside(reply.others_cores)
                    if again_seconds[worker] > 0:
                        again_seconds[worker] -= reply.seconds
                        # In front, so that it comes last.
                        todo.insert(0, batch)
                        continue
                measured = {
                    op: MeasuredCost(timing.median_seconds, timing.spread)
                    for op, timing in zip(batch, reply.timings, strict=True)
                }
                yield measured, reply.others_cores
        # Nobody needs what these workers still measure.
        for worker in repeating:
            worker.close(kill=True)


def start_worker(device: Device) -> Worker:
    """Start a worker for the device. The caller receives its reply that it is set up."""
    if device.torch_device:
        worker = launch("dovetail.costs.gpus:MeasuredGpu", name=device.name)
        worker.begin("make", device.torch_device, cuda_maker())
        return worker
    threads = device.op_threads
    entry = "dovetail.costs.measured:MeasuredCores"
    worker = launch(entry, cores=device.cores, threads=threads, name=device.name)
    worker.begin("make", threads)
    return worker


def _batches(graph: Graph, entries: dict[int, TimedEntry], workers: int) -> list[list[int]]:
    """Return the ops in graph order, cut into batches that are neither too long nor too large."""
    most = max(1, min(_BATCH_OPS, -(-len(entries) // workers)))
    batches: list[list[int]] = [[]]
    held = 0
    for op, entry in entries.items():
        size = _held_bytes(graph, op, entry)
        if len(batches[-1]) == most or (batches[-1] and held + size > _BATCH_BYTES):
            batches.append([])
            held = 0
        batches[-1].append(op)
        held += size
    return batches


def _held_bytes(graph: Graph, op: int, entry: TimedEntry) -> int:
    """Return the bytes of all tensors with which the op is timed: inputs, cold copies, outputs."""
    inputs = int(graph.tensor_bytes[graph.inputs_of(op)].sum())
    cold = int(graph.tensor_bytes[sorted(entry.cold)].sum())
    outputs = int(graph.tensor_bytes[list(graph.outputs_of(op))].sum())
    return inputs + copies_for(cold) * cold + outputs


def _cold_tensors(graph: Graph) -> NDArray[np.bool_]:
    """Return [tensors] True for those that are held from step to step.

    A step uses much other memory before it reads them again, so they are not in the caches then.
    """
    held = graph.is_source[graph.producers] & (graph.residences[graph.producers] != HOST)
    return np.isin(graph.storages, graph.storages[held])


def _signature_key(graph: Graph, cold: NDArray[np.bool_], op: int) -> str:
    """Return the op's signature with the positions of its cold inputs, which change its cost."""
    places = " ".join(map(str, np.flatnonzero(cold[graph.inputs_of(op)]).tolist()))
    return graph.signatures[op] + (f" | cold {places}" if places else "")


def _entry(graph: Graph, program: Program, cold: NDArray[np.bool_], op: int) -> TimedEntry:
    """Return the op's call with all that is needed to time it."""
    call = program.calls[op]
    assert call is not None, graph.names[op]
    layouts = {
        t: (graph.shapes[t], graph.strides[t], graph.dtypes[t])
        for t in distinct_refs((call.args, call.kwargs))
    }
    # A check would not pass on random numbers; the copy that it returns costs as much.
    if call.target is CHECK:
        call = replace(call, target=torch.ops.aten.clone.default, args=call.args[:1])
    return TimedEntry(call, layouts, frozenset(t for t in layouts if cold[t]))


# The probe, which measures the rates of this machine's devices and of the links between them.
#
# It takes a few seconds, most of them to start processes. The cache keeps the rates.


_BLOCK_BYTES = 256 + 2 * max(HOP_BYTES)
"""Bytes of the flags and of one slot for each direction."""


def probed_machine(
    machine: Machine,
    cache: CostCache,
    *,
    fresh: bool = False,
    beside: Callable[[float], None] = lambda _cores: None,
    deadline: Deadline | None = None,
) -> Machine:
    """Return the machine with measured rates, from the cache unless `fresh`.

    Devices are measured at the same time, because they will work at the same time. Links between
    sets of cores are assumed to be alike: the one between the first two is measured for all. Links
    of GPUs are measured each way, those to the host with pinned memory. Of rates that were
    measured while other programs used these cores, `beside` is called with the number of cores that
    those used; once the cores are calm they are measured again. Near the deadline fewer messages
    are sent to and fro.
    """
    measured = _measured_devices(machine)[0]
    key = f"{machine.name} | {machine.fingerprint} | {device_key(measured, machine)} | links"
    rates, deadline = None if fresh else cache.probe(key), deadline or Deadline()
    if rates is not None:
        try:
            known, busy_cores = _with_rates(machine, rates), rates.get("others_cores", 0.0)
            cores = [core for device in machine.devices for core in device.cores]
            if not busy_cores or deadline.is_over or not is_calm(cores):
                if busy_cores:
                    beside(busy_cores)
                return known
        except (KeyError, TypeError, ValueError, MachineError):
            pass  # the row does not fit, perhaps from another version: measure again
    rates, others_cores = _measure_rates(machine, deadline)
    if disturbs(others_cores):
        beside(others_cores)
        rates["others_cores"] = others_cores
    cache.add_probe(key, rates)
    return _with_rates(machine, rates)


def _with_rates(machine: Machine, rates: dict[str, Any]) -> Machine:
    devices = tuple(
        replace(device, **measured)
        for device, measured in zip(machine.devices, rates["devices"], strict=True)
    )
    links = tuple(
        replace(link, **measured)
        for link, measured in zip(machine.links, rates["links"], strict=True)
    )
    return replace(machine, devices=devices, links=links)


def fit_link(hop_seconds: dict[int, float]) -> dict[str, float]:
    """Return the latency and bandwidth with the least squared *relative* error over the measured
    sizes: (latency + bytes / bandwidth) / seconds = 1. Neither is negative."""
    sizes = np.array(sorted(hop_seconds), dtype=np.float64)
    seconds = np.array([hop_seconds[int(size)] for size in sizes])
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    # If the fit gives no positive pair, take the smallest message as latency and the rest of the
    # largest one as bandwidth.
    if latency <= 0 or per_byte <= 0:
        latency = seconds[0]
        per_byte = max(seconds[-1] - seconds[0], 1e-12) / sizes[-1]
    return {"latency_seconds": float(latency), "bandwidth_bytes_per_second": float(1 / per_byte)}


def _measure_rates(machine: Machine, deadline: Deadline) -> tuple[dict[str, Any], float]:
    """Return (rates of devices and links, cores that other programs used meanwhile)."""
    measured = _measured_devices(machine)
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(device)) for device in measured]
        for worker in workers:
            worker.receive()
        cores = [core for device in machine.devices for core in device.cores]
        neighbours = Neighbours(cores, [worker.pid for worker in workers])
        for worker in workers:
            worker.begin("rates")
        of_worker = {_name_of(d): w.receive() for d, w in zip(measured, workers, strict=True)}
        devices = [of_worker.get(_name_of(device), {}) for device in machine.devices]
        on_cores = [w for d, w in zip(measured, workers, strict=True) if d.cores]
        hops: dict[str, float] = {}
        if len(on_cores) > 1:
            # Messages between the first two sets of cores. The least median of several games
            # counts, for the caches of a shared host are at times those of its other guests.
            first, second = on_cores[:2]
            block = Block.create(_BLOCK_BYTES)
            for worker in (first, second):
                worker.ask("map", files=(block.descriptor,))
            games: list[dict[int, float]] = []
            for number in range(1 + _GAMES):
                if number > _LEAST_GAMES and deadline.is_over:
                    break
                # Each game starts above all flag values of the one before.
                for worker in (first, second):
                    worker.begin("play", worker is first, number * 10**6)
                games.append(first.receive())
                second.receive()
                time.sleep(_BETWEEN_GAMES_SECONDS)
            block.close()
            # The first game warms up.
            hops = fit_link({size: min(game[size] for game in games[1:]) for size in HOP_BYTES})
        # (source, destination) -> the link's rates, of all pairs with a GPU. Every set of cores,
        # and a host, has the same memory.
        copies: dict[tuple[str, str], dict[str, float]] = {}
        gpus = [device.torch_device for device in measured if device.torch_device]
        others = ["host", *(device.name for device in measured if not device.torch_device)]
        for device, worker in zip(measured, workers, strict=True):
            if not device.torch_device:
                continue
            # One after the other: they share the way to the host's memory.
            copied = worker.ask("links", gpus)
            rates = {name: fit_link(seconds) for name, seconds in copied.items()}
            for other in gpus:
                copies[device.torch_device, other] = rates[other]
            for other in others:
                copies[device.torch_device, other] = rates["from"]
                copies[other, device.torch_device] = rates["to"]
        ends = [
            (machine.device_index(link.source), machine.device_index(link.destination))
            for link in machine.links
        ]
        links = [
            copies.get((_name_of(machine.devices[a]), _name_of(machine.devices[b])), hops)
            for a, b in ends
        ]
        return {"devices": devices, "links": links}, neighbours.settled() or 0.0


def _name_of(device: Device) -> str:
    """What a device is measured as: devices that share a GPU are measured as one."""
    return device.torch_device or device.name
