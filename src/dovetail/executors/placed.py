"""Runs a loaded plan: parameters lie in shared memory or on GPUs, and the devices' processes run
the steps.

    parent                   shared block                       worker of a device
    step(*inputs) ─ copy ──► inputs                             reads its sources in place
                             parameters, state ◄─ updated ───── by the device they live on
                             slots and flags   ◄─────────────►  between devices
    result ◄─────── copy ─── outputs           ◄─ copied ────── after the step

A step on all cores as one device is run by this process itself (`executors.workers`). Where others
run it, this process copies on one thread and ends OpenMP's, so that none spins on their cores.

This process reads and writes parameters only between steps, so that `state_dict` needs no help of
the workers. Sources that live on GPUs are copied from the block when a plan is loaded, and into it
when they are asked for.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.errors import (
    DovetailError,
    OutOfMemoryError,
    PeerLostError,
    ProcessDiedError,
    ProcessError,
    RunError,
    UsageError,
    WorkerDiedError,
    WorkerError,
)
from dovetail.executors.gpus.peers import ConnectPeers, PeerPair
from dovetail.executors.gpus.steps import steps_of
from dovetail.executors.gpus.worker import LoadGpus, ReadSources, SaveSources
from dovetail.executors.shares import (
    Share,
    Shares,
    most_bytes,
    share_out,
    tensor_at,
)
from dovetail.executors.worker import Failed, Load, Step, Unload
from dovetail.executors.workers import DeviceWorker, Workers
from dovetail.frontends.instructions import (
    AwaitFlag,
    BlockSlot,
    ReadSource,
    SendTensor,
    ops_of,
)
from dovetail.frontends.interpret import example_values, held_values, source_value
from dovetail.frontends.program import Call, Captured, Ref
from dovetail.frontends.recording import is_fake
from dovetail.frontends.runners import distinct
from dovetail.frontends.structures import substitute
from dovetail.machine import Machine
from dovetail.machine.local import available_bytes
from dovetail.plans import Plan, check
from dovetail.runtime.neighbours import Neighbours
from dovetail.runtime.processes import Worker, ready
from dovetail.runtime.ranks import RankPlace
from dovetail.runtime.setup import op_threads, rest_openmp
from dovetail.runtime.shared import Block
from dovetail.runtime.timers import clock, summarise
from dovetail.runtime.waiting import address_of, publish
from dovetail.timeline import Timeline


def timeline_of(machine: Machine, shares: tuple[Share, ...], block: Block) -> Timeline:
    """The timeline of the last step, from its stamps in the block. It must have been a timed step.

    A transfer's span is the time that the sending device takes for the copy. Where the machine has
    no link between the two devices, the span is on the channel of the first hop, to the host. Ops
    that ran together all have the span of their stage, as in a simulation. Memory is not recorded.
    """
    spans: list[tuple[int, int, int, int]] = []
    transfers: list[tuple[int, int, int, int, int, int, int]] = []
    begin, end = step_span(shares, block)
    for share in shares:
        shape = (len(share.instructions), 2)
        stamps = block.view(share.stamps, shape, np.int64).tolist()
        for instruction, (start, stop) in zip(share.instructions, stamps, strict=True):
            spans += [(start, op, share.device, stop) for op in ops_of(instruction)]
            if isinstance(instruction, SendTensor):
                to = instruction.destination
                channel = _channel(machine, share.device, to)
                row = (instruction.tensor, instruction.op, share.device, to)
                transfers.append((start, channel, *row, stop))
            if isinstance(instruction, ReadSource):
                channel = _channel(machine, instruction.source, share.device)
                ends = (instruction.source, share.device)
                row = (instruction.tensor, instruction.producer, *ends)
                transfers.append((start, channel, *row, stop))
    # Rows begin with the start, so that sorting them puts spans in order of time.
    op_rows = np.array(sorted(spans), dtype=np.int64).reshape(-1, 4)
    rows = np.array(sorted(transfers), dtype=np.int64).reshape(-1, 7)
    nothing = tuple(np.empty(0) for _ in machine.devices)
    return Timeline(
        devices=machine.device_names,
        channels=machine.channels,
        ops=op_rows[:, 1].astype(np.int32),
        op_devices=op_rows[:, 2].astype(np.int32),
        op_starts=(op_rows[:, 0] - begin) / 1e9,
        op_ends=(op_rows[:, 3] - begin) / 1e9,
        transfer_tensors=rows[:, 2].astype(np.int32),
        transfer_ops=rows[:, 3].astype(np.int32),
        transfer_sources=rows[:, 4].astype(np.int32),
        transfer_destinations=rows[:, 5].astype(np.int32),
        transfer_channels=rows[:, 1].astype(np.int32),
        transfer_starts=(rows[:, 0] - begin) / 1e9,
        transfer_ends=(rows[:, 6] - begin) / 1e9,
        memory_times=nothing,
        memory_bytes=tuple(np.empty(0, dtype=np.int64) for _ in machine.devices),
        step_seconds=(end - begin) / 1e9,
    )


def step_span(shares: tuple[Share, ...], block: Block) -> tuple[int, int]:
    """(start of the first device, end of the last device) of the last step, in ns."""
    rows = [progress_of(share, block) for share in shares]
    return min((row[1] for row in rows), default=0), max((row[2] for row in rows), default=0)


def progress_of(share: Share, block: Block) -> list[int]:
    """[index of the running instruction, -1 between steps; start, end of the last step in ns]."""
    return [int(value) for value in block.view(share.progress, (3,), np.int64)]


def _channel(machine: Machine, source: int, destination: int) -> int:
    """Index of the channel that a send takes, or that its first hop takes."""
    link = int(machine.link_index[source, destination])
    if link < 0:
        link = int(machine.link_index[source, machine.host_index])
    return machine.channels.index(machine.links[link].channel)


TIMED_STEPS = 3
"""A measurement runs this many stamped steps for the timeline, after the steps that count."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """Result of measuring a loaded plan.

    step_seconds   [steps] seconds of each step that counts
    timeline       the stamped step of median length
    others_cores   how many of the plan's cores other programs used meanwhile; 0 where that is not
                   known
    """

    step_seconds: NDArray[np.float64]
    timeline: Timeline
    others_cores: float = 0.0

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.step_seconds))

    @property
    def mean_seconds(self) -> float:
        return float(np.mean(self.step_seconds))

    @property
    def minimum_seconds(self) -> float:
        return float(np.min(self.step_seconds))

    @property
    def spread(self) -> float:
        """Interquartile range, divided by the median."""
        return summarise(self.step_seconds.tolist()).spread


def measure_steps(
    step_seconds: Callable[[], float],
    timeline: Callable[[], Timeline],
    *,
    steps: int,
    warmup: int,
    others_cores: Callable[[], float | None] = lambda: None,
) -> Measurement:
    """Warm up, time `steps` (at least 2) steps and drop the first, then run the stamped steps.

    Paper: the protocol of RL17 (Mirhoseini et al., "Device Placement Optimization with
    Reinforcement Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4). Differences:
    the median is reported, because identical runs differ on a shared machine. The steps that count
    are calls as a user makes them (`seconds_of_call`), and not stamped, because stamping takes
    time.

    `step_seconds()` runs a step and returns its seconds, and `timeline()` returns the timeline of
    one more step. `others_cores()` returns how many cores other programs used meanwhile.
    """
    check_steps(steps)
    for _ in range(warmup):
        step_seconds()
    seconds = time_steps(step_seconds, steps)
    others = others_cores() or 0.0
    timelines = sorted(
        (timeline() for _ in range(TIMED_STEPS)), key=lambda timeline: timeline.step_seconds
    )
    return Measurement(seconds, timelines[TIMED_STEPS // 2], others)


def seconds_of_call(step: Callable[[], object]) -> float:
    """Seconds of one call of `step` as its user has them, who works between steps on torch's own
    threads. Such work leaves threads behind that spin, and a step pays for them."""
    torch.ones(USERS_WORK).add_(1.0)
    began = clock()
    step()
    seconds = clock() - began
    # The next call that is measured must not pay for this step's threads.
    rest_openmp()
    return seconds


USERS_WORK = 1 << 18
"""A user's own work between two steps, as numbers that are added up: enough for eight threads."""


def time_steps(step_seconds: Callable[[], float], steps: int) -> NDArray[np.float64]:
    """[steps - 1] seconds of each of `steps` (at least 2) steps, without the first."""
    check_steps(steps)
    return np.array([step_seconds() for _ in range(steps)][1:])


def check_steps(steps: int) -> None:
    """Raise `UsageError` for so few steps that none would count."""
    if steps < 2:
        raise UsageError("steps", f"is {steps}, but must be at least 2: the first is dropped")


class LoadedStep:
    """A step at work, which can be measured; a context manager. Abstract."""

    def feed(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Set the inputs and targets of the next steps. None stands for the captured examples."""
        raise NotImplementedError

    def timeline(self) -> Timeline:
        """The timeline of one more step, on what was fed last or on the captured examples."""
        raise NotImplementedError

    def _step_on_fed(self) -> Any:
        """Call `step` on what was fed last or on the captured examples."""
        raise NotImplementedError

    def _neighbours(self) -> Neighbours:
        """A watch for other programs on the cores that the step runs on."""
        raise NotImplementedError

    def measure(
        self, *, steps: int = 10, warmup: int = 2, inputs: Sequence[Tensor] | None = None
    ) -> Measurement:
        """Measure by RL17's protocol (see `measure_steps`).

        Steps run on `inputs` (with targets). Without it they run on what was fed last, or on the
        captured examples. They are real steps: in training they change the parameters.
        """
        if inputs is not None:
            self.feed(inputs)
        return measure_steps(
            partial(seconds_of_call, self._step_on_fed),
            self.timeline,
            steps=steps,
            warmup=warmup,
            others_cores=self._neighbours().settled,
        )

    def step_seconds(self, steps: int = 10) -> NDArray[np.float64]:
        """[steps - 1] seconds of each of `steps` steps, without the first.

        These are the seconds that `measure` counts. No timeline is made, so this is cheaper: it
        serves as the reward of a search.
        """
        return time_steps(partial(seconds_of_call, self._step_on_fed), steps)

    def __enter__(self) -> Self:
        return self


DRAIN_SECONDS = 10.0
"""After a failed step, borrowed workers have this long to answer before they are killed."""


@dataclass(frozen=True)
class HostPart:
    """The part of a run that one host of several has (`executors.hosts`).

    shares    of all devices of the plan
    sources   tensors of the sources that this host keeps; None: all
    direct    (source, destination) GPUs of two ranks between which tensors go straight, once
              `connect_peers` was called
    """

    shares: Shares
    sources: Collection[int] | None = None
    direct: Collection[tuple[int, int]] = ()


class PlacedNetwork(LoadedStep):
    """A loaded plan, ready to run steps; a context manager. `executors.run` makes it.

    A failed step closes it. Later calls raise `RunError` with that reason.

    block        of shared memory, which `shares` lay out
    abort        address of its abort flag
    own_shares   those of the devices of this host
    sources      tensor -> where it lies in the block
    by_name      name of a source -> its tensor
    steps        number of steps that were run; random ops draw by it
    fed          inputs and targets that were fed last; None: none were
    """

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        workers: Workers,
        owns_workers: bool,
        seed: int,
        part: HostPart | None = None,
    ) -> None:
        """The plan, loaded on those of its devices that `workers` serve: all of them, or a host's
        part of a run on several."""
        self.plan = plan
        self.captured = captured
        self.workers = workers
        self._owns_workers = owns_workers
        self._seed = seed
        self._closed = ""
        # Threads of the caller's take turns.
        self._one_step = threading.RLock()
        self.steps = 0
        self._key = workers.new_key()
        part = part or HostPart(share_out(plan, captured.graph, captured.program))
        self.shares, self._direct = part.shares, part.direct
        self.own_shares = tuple(s for s in self.shares.shares if s.device in workers.devices)
        needed_bytes = self.shares.size_bytes
        if len(self.own_shares) < len(self.shares.shares):
            needed_bytes = part_bytes(self.own_shares, part)
        # Writing to a block that does not fit would end the process without a message.
        free_bytes = available_bytes()
        if needed_bytes > free_bytes:
            raise OutOfMemoryError(plan.machine.name, needed_bytes, free_bytes)
        for share in self.own_shares:
            device = plan.machine.devices[share.device]
            if device.torch_device:
                gpu_bytes = most_bytes(share, captured.graph, captured.program)
                if gpu_bytes > device.memory_bytes:
                    raise OutOfMemoryError(device.name, gpu_bytes, device.memory_bytes)
        self.block = Block.create(self.shares.size_bytes)
        self.abort = address_of(self.block.view(self.shares.abort, (1,), np.int64))
        self.sources = {
            tensor: tensor_at(self.block, slot)
            for tensor, slot in self.shares.sources.items()
            if part.sources is None or tensor in part.sources
        }
        self._outputs = {
            tensor: distinct(tensor_at(self.block, slot), slot.strides).expand(slot.shape)
            for tensor, slot in self.shares.outputs.items()
        }
        self.by_name = {
            source.name: captured.graph.outputs_of(op)[0]
            for op, source in enumerate(captured.program.sources)
            if source is not None
        }
        self._held = _fill(captured, self.sources, seed)
        self.fed: list[Tensor] | None = None
        self._processes: list[DeviceWorker] = []
        self._of_processes: list[Share] = []
        self._gpus: DeviceWorker | None = None
        # Where a GPU is the host, inputs live there, and each new one must be copied to it.
        self._inputs_on_gpus: frozenset[int] = frozenset()
        self._load()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on the model's own arguments, followed by what its loss takes (positional).

        Returns the loss in training, and otherwise what the model returns, in the model's own
        type. Raises `UsageError` for arguments that do not fit or that were captured as constants
        of another value, and `WorkerError` or `WorkerDiedError` if a device fails.
        """
        tensors = self.captured.signature.tensors(args, kwargs)
        with self._one_step:
            self.feed(tensors)
            self.advance()
            return self.results()

    def feed(self, tensors: Sequence[Tensor] | None = None) -> None:
        self._check_open()
        given = labelled(self.captured, tensors, self._seed)
        with self._copying():
            for source, name, tensor in given:
                if (slot := self.sources.get(self.by_name.get(source, -1))) is not None:
                    check_fits(slot, tensor, name)
                    strides = slot.stride()
                    distinct(slot, strides).copy_(distinct(tensor.detach(), strides))
        if self._inputs_on_gpus:
            self._with_gpus(ReadSources(self._key, self._inputs_on_gpus))
        self.fed = [tensor for _, _, tensor in given]

    def _copying(self) -> AbstractContextManager[None]:
        """Copies within use one thread where the devices have processes of their own: threads that
        OpenMP starts for a copy would then spin on the cores that these processes need."""
        return nullcontext() if self.workers.is_local else op_threads(1)

    def advance(self, timed: bool = False) -> float:
        """Run one step on what was fed last. With `timed`, stamp every instruction for `timeline`.

        Returns seconds, from the first device's start to the last device's end.
        """
        self._check_open()
        if self.fed is None:
            self.feed()
        if not self.workers.is_local:
            rest_openmp()
        self.steps += 1
        request = Step(self._key, self.steps, timed)
        waiting = dict(zip(self._processes, self._of_processes, strict=True))
        try:
            for process, share in waiting.items():
                try:
                    process.send(request)
                except (ProcessDiedError, ProcessError) as error:
                    raise self._failure(share, error) from None
            # Every device replies before the first failure is raised.
            failure: DovetailError | None = None
            while waiting:
                # A single process is waited for directly: the selector in `ready` takes as long as
                # a small step's hand-over.
                several = [process for process in waiting if isinstance(process, Worker)]
                for process in ready(several) if len(several) > 1 else list(waiting):
                    share = waiting[process]
                    try:
                        reply = process.receive()
                    except (ProcessDiedError, ProcessError) as error:
                        # A process that is gone cannot set the flag itself, and the others wait for
                        # it.
                        publish(self.abort, 1)
                        failure = failure or self._failure(share, error)
                    else:
                        if isinstance(reply, Failed):
                            failure = failure or self._error_of(reply, share)
                    del waiting[process]
            if failure is not None:
                raise failure
        except BaseException as error:
            # The step ends on all devices, and this plan is closed. Borrowed workers live on if all
            # of them answer; otherwise they are killed.
            publish(self.abort, 1)
            if not self._owns_workers and not self.workers.closed:
                try:
                    for process in waiting:
                        process.receive(DRAIN_SECONDS)
                    for process in self._processes:
                        process.send(Unload(self._key))
                except (ProcessDiedError, ProcessError, TimeoutError):
                    self.workers.closed = True
            if self._owns_workers or self.workers.closed:
                self.workers.close(kill=True)
            self._release(f"a step failed ({type(error).__name__})")
            raise
        begin, end = step_span(self.own_shares, self.block)
        return (end - begin) / 1e9

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of parameters and buffers, by their names in the plain module's state_dict."""
        self._check_open()
        self.save()
        return {
            name: value.clone()
            for name in self.captured.module.state_dict()
            if (value := self._value_of(name)) is not None
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set parameters and buffers.

        Raises `UsageError` for missing or unknown names and for tensors that do not fit. In that
        case nothing has changed.
        """
        self._check_open()
        self.save()
        values = {
            name: value
            for name in self.captured.module.state_dict()
            if (value := self._value_of(name)) is not None
        }
        _load_values("state_dict", values, state)
        self.reload()

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Copies of the optimizer's state, under names such as "PARAMETER/exp_avg"."""
        self._check_open()
        self.save()
        return {name: value.clone() for name, value in self._optimizer_state().items()}

    def load_optimizer_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the optimizer's state. Raises as `load_state_dict` does.

        Training then goes on as if it had not stopped, except that random ops draw by the number
        of the step in this run.
        """
        self._check_open()
        self.save()
        _load_values("optimizer_state_dict", self._optimizer_state(), state)
        self.reload()

    def _neighbours(self) -> Neighbours:
        cores = [core for device in self.plan.machine.devices for core in device.cores]
        return Neighbours(cores, self.workers.pids)

    def _step_on_fed(self) -> Any:
        self.feed(self.fed)
        self.advance()
        return self.results()

    def timeline(self) -> Timeline:
        self.advance(timed=True)
        return timeline_of(self.plan.machine, self.shares.shares, self.block)

    def close(self) -> None:
        """Release the plan's memory, and end its processes unless they were borrowed."""
        if self._owns_workers:
            self.workers.close()
        elif not self._closed and not self.workers.closed:
            for process in self._processes:
                process.send(Unload(self._key))
        self._release("it was closed")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._owns_workers:
            self.workers.close(kill=True)
        self.close()

    def _load(self) -> None:
        graph = self.captured.graph
        devices = self.plan.machine.devices
        # Of each process the share by which it is named in errors: all GPUs have one process.
        own = self.workers.devices
        on_gpus = [share for share in self.own_shares if self._is_on_gpu(share)]
        self._of_processes = [s for s in self.own_shares if s not in on_gpus[1:]]
        gpus = next((d for d in own if devices[d].torch_device), -1)
        if devices[self.plan.machine.host_index].torch_device:
            self._inputs_on_gpus = frozenset(
                self.by_name[source.name]
                for source in self.captured.program.sources
                if source is not None and source.role == "input"
            )
        try:
            self._processes = self.workers.start(
                tuple(gpus if s in on_gpus else s.device for s in self._of_processes)
            )
            beside = tuple(
                process.pid
                for process, share in zip(self._processes, self._of_processes, strict=True)
                if share in on_gpus
            )
            # All processes get their load before any is waited for, so that they bind it at the
            # same time.
            for process, share in zip(self._processes, self._of_processes, strict=True):
                if share in on_gpus:
                    self._gpus = process
                    ops = [op for each in on_gpus for op in each.ops]
                    number, calls = self._unsent(gpus, ops)
                    random = self.captured.program.random_ops
                    steps = steps_of(
                        self.plan, graph, self.shares.shares, random, own, self._direct
                    )
                    limits: dict[str, int] = {}
                    for device in (devices[d] for d in own):
                        if name := device.torch_device:
                            limits[name] = limits.get(name, 0) + device.memory_bytes
                    load: object = LoadGpus(
                        self._key, tuple(on_gpus), steps,
                        {s.device: devices[s.device].torch_device for s in on_gpus},
                        limits,
                        number, calls, graph.tensors, self._seed,
                    )  # fmt: skip
                else:
                    number, calls = self._unsent(share.device, share.ops)
                    load = Load(self._key, share, number, calls, graph.tensors, self._seed, beside)
                process.send(load)
                process.send_descriptor(self.block.descriptor)
            for process, share in zip(self._processes, self._of_processes, strict=True):
                if isinstance(reply := process.receive(), Failed):
                    raise self._error_of(reply, share)
        except BaseException:
            self.workers.close(kill=True)
            self._release("its devices could not be started")
            raise

    def _is_on_gpu(self, share: Share) -> bool:
        return bool(self.plan.machine.devices[share.device].torch_device)

    def _unsent(self, device: int, ops: Sequence[int]) -> tuple[int, dict[int, Call]]:
        """(key of the program, those calls of the ops that the device's process does not have)."""
        program = self.captured.program
        number, fresh = self.workers.unsent(program, device, ops)
        return number, {op: call for op in fresh if (call := program.calls[op]) is not None}

    def save(self) -> None:
        """Bring what lives on GPUs into the block."""
        self._with_gpus(SaveSources(self._key))

    def reload(self, tensors: Collection[int] | None = None) -> None:
        """Bring what lives on GPUs from the block: all sources, or those of `tensors`."""
        wanted = None if tensors is None else frozenset(tensors)
        self._with_gpus(ReadSources(self._key, wanted))

    def connect_peers(self, place: RankPlace, pairs: Sequence[PeerPair]) -> None:
        """Connect GPUs with those of other ranks, which call this as well. Raises
        `PeerLostError`."""
        if pairs:
            self._with_gpus(ConnectPeers(self._key, place, tuple(pairs)))

    def _with_gpus(self, request: SaveSources | ReadSources | ConnectPeers) -> None:
        """Have the GPUs' process bring their sources and the block into agreement, or connect."""
        if self._gpus is not None:
            self._gpus.send(request)
            if isinstance(reply := self._gpus.receive(), Failed):
                share = next(s for s in self.own_shares if self._is_on_gpu(s))
                raise self._error_of(reply, share)

    def _error_of(self, reply: Failed, share: Share) -> DovetailError:
        """The error for a reply that says that something was raised."""
        device = self._device_name(share)
        if reply.op >= 0 and self.plan.machine.devices[share.device].torch_device:
            # All GPUs have one process.
            device = self.plan.machine.device_names[self.plan.placement[reply.op]]
        if reply.peer is not None:
            return PeerLostError(reply.peer, reply.said)
        if reply.lacking is not None:
            return OutOfMemoryError(device, *reply.lacking)
        return WorkerError(device, self._op_name(reply.op), reply.traceback, reply.said)

    def _failure(self, share: Share, error: ProcessDiedError | ProcessError) -> RunError:
        """The error for a process that is gone, naming the device and the op that was running."""
        name = self._device_name(share)
        index = progress_of(share, self.block)[0]
        op = self._op_name(share.instructions[index].op if index >= 0 else -1)
        # Without this process the others cannot serve a plan either.
        self.workers.closed = True
        if isinstance(error, ProcessError):
            return WorkerError(name, op, error.traceback, error.said)
        return WorkerDiedError(name, op, error.status)

    def _release(self, reason: str) -> None:
        if not self._closed:
            self._closed, self.fed = reason, None
            self.sources.clear()
            self._outputs.clear()
            self.block.close()

    def _check_open(self) -> None:
        """Raise `RunError` if this plan was closed."""
        if self._closed:
            raise RunError(f"this run is closed: {self._closed}; start another with run(plan, ...)")

    def results(self) -> Any:
        """The results of the last step, as copies: the next step writes over the slots."""
        with self._copying():
            values = {tensor: value.clone() for tensor, value in self._outputs.items()}
        return substitute(self.captured.program.outputs, Ref, lambda ref: values[ref.tensor])

    def _value_of(self, name: str) -> Tensor | None:
        """The parameter or buffer itself, not a copy, by any of its names; None if this host does
        not keep it."""
        name = self.captured.program.aliases.get(name, name)
        if name not in self.by_name:
            return self._held[name]
        return self.sources.get(self.by_name[name])

    def _optimizer_state(self) -> dict[str, Tensor]:
        """The tensors of the optimizer's state themselves, not copies, by name."""
        return {
            source.name: value
            for source in self.captured.program.sources
            if source is not None
            and source.role == "state"
            and (value := self.sources.get(self.by_name[source.name])) is not None
        }

    def _device_name(self, share: Share) -> str:
        return self.plan.machine.device_names[share.device]

    def _op_name(self, op: int) -> str:
        return self.captured.graph.names[op] if op >= 0 else ""


def labelled(
    captured: Captured, tensors: Sequence[Tensor] | None, seed: int
) -> list[tuple[str, str, Tensor]]:
    """(name of the source, name for the user, tensor) of each input of a step, and in training of
    each target. Raises `UsageError` if there are too many or too few tensors.

    tensors   None stands for the captured examples, drawn with `seed` if they are fake
    """
    if tensors is None:
        inputs, targets = example_values(captured, seed)
        tensors = (*inputs, *targets)
    sources = captured.signature.sources
    if not captured.graph.training:
        count = len(captured.signature.names)
        if len(tensors) == count + len(captured.targets):
            # Inference has no use for targets.
            tensors = tensors[:count]
        sources = sources[:count]
    if len(tensors) != len(sources):
        needed = ", ".join(name for _, name in sources)
        raise UsageError("step", f"takes {needed}, but got {len(tensors)} tensors")
    return [(*names, tensor) for names, tensor in zip(sources, tensors, strict=True)]


def run(
    plan: Plan, captured: Captured, *, seed: int = 0, workers: Workers | None = None
) -> PlacedNetwork:
    """Load the plan on this machine's devices; return it ready to run.

    `seed` seeds the weights where the captured module is fake, and the numbers of random ops.
    `workers` are processes to share with other plans for the same devices.

    Raises what `plans.check` raises, `OutOfMemoryError` if the block of shared memory is larger
    than the available memory, and `UsageError` for a machine that is not the one we run on.
    """
    check(plan, captured.graph)
    if workers is None:
        return PlacedNetwork(plan, captured, Workers(plan.machine), True, seed)
    if not workers.serves(plan.machine):
        raise UsageError("workers", f"are for other devices than {plan.machine.name}'s")
    workers.check_open()
    return PlacedNetwork(plan, captured, workers, False, seed)


def _fill(captured: Captured, sources: dict[int, Tensor], seed: int) -> dict[str, Tensor]:
    """Write the first value of every source but the inputs.

    Returns copies of the parameters and buffers that the module holds and the graph does not use.
    """
    held = held_values(captured, seed)
    with torch.no_grad():
        for op, source in enumerate(captured.program.sources):
            if source is None or source.role == "input":
                continue
            tensor = captured.graph.outputs_of(op)[0]
            value = held.pop(source.name) if source.role in ("parameter", "buffer") else None
            if tensor not in sources:  # another host's
                continue
            if value is not None:
                sources[tensor].copy_(value)
            elif source.fill is not None:
                sources[tensor].fill_(source.fill)
            else:
                value = source_value(captured.graph, tensor, source)
                strides = captured.graph.strides[tensor]
                distinct(sources[tensor], strides).copy_(distinct(value, strides))
    return {name: value.detach().clone() for name, value in held.items()}


def part_bytes(own: Sequence[Share], part: HostPart) -> int:
    """The bytes of the block that a host of several touches: what its devices send and receive
    through it, the sources that it keeps, and all outputs. The rest takes no memory there."""
    slots = [
        slot
        for tensor, slot in part.shares.sources.items()
        if part.sources is None or tensor in part.sources
    ]
    slots += part.shares.outputs.values()
    for share in own:
        for instruction in share.instructions:
            match instruction:
                case SendTensor(slot=BlockSlot() as slot, destination=destination):
                    ends = share.device, destination
                case AwaitFlag(slot=BlockSlot() as slot, source=source):
                    ends = source, share.device
                case _:
                    continue
            if ends not in part.direct:
                slots.append(slot)
    touched = {slot.offset: slot.sent_bytes for slot in slots if slot.offset >= 0}
    return sum(touched.values())


def _load_values(what: str, values: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Copy each tensor of `given` into the value of the same name, or raise `UsageError`."""
    # All are checked before the first is copied, so that an error leaves everything as it was.
    check_values(what, values, given)
    for name, value in values.items():
        value.copy_(given[name])


def check_values(what: str, values: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Raise `UsageError` unless `given` has a tensor that fits for each value, and no other."""
    missing, unknown = set(values) - set(given), set(given) - set(values)
    if missing or unknown:
        raise UsageError(what, f"lacks {sorted(missing)}, has unknown {sorted(unknown)}")
    for name, value in values.items():
        check_fits(value, given[name], name)


def check_fits(slot: Tensor, tensor: Tensor, name: str) -> None:
    """Raise `UsageError` unless the tensor is dense, real, and of the slot's shape and dtype."""
    if tensor.layout != torch.strided or is_fake(tensor):
        kind = "sparse" if tensor.layout != torch.strided else "without numbers (meta or fake)"
        raise UsageError(name, f"is {kind}; give a dense tensor")
    if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
        raise UsageError(
            name,
            f"is {tensor.dtype} of shape {tuple(tensor.shape)}, but the plan was made for "
            f"{slot.dtype} of shape {tuple(slot.shape)}",
        )
