"""Programs of ranks that run plans on several hosts, all of them on this machine."""

import itertools
import json
import math
import os
import signal
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import torch

from dovetail.executors import Workers, run
from dovetail.executors.hosts import deal
from dovetail.frontends import Adam, example_values, initial_values, resolve, run_step
from dovetail.machine import Device, Link, Machine
from dovetail.runtime.ranks import Ranks, place_of_ranks
from tests.support.listening import _bound, _inodes
from tests.support.placing import plan_for, random_order, random_placement
from tests.support.played_cuda import played
from tests.support.played_gpus import cpu, gpu

STEPS = 3
RATES = {"float32": 1e10, "float64": 1e10}
LOOPBACK = "0100007F:"
"""How /proc writes an address of the loopback interface."""
LSTM = "zoo:rnnlm?layers=2&hidden=16&steps=3&batch=4&vocabulary=50"


def core_devices(count, hosts=()):
    """So many CPU devices of one core, on these hosts; the same cores again and again where there
    are not enough."""
    cores = sorted(os.sched_getaffinity(0))
    return tuple(
        Device(
            f"cpu{i}", "cpu", "test", 1 << 33, RATES, 1e10, 1e-6, (cores[i % len(cores)],),
            host=hosts[i] if hosts else "",
        )
        for i in range(count)
    )  # fmt: skip


def machine_of(*devices):
    """The devices, each linked with every other."""
    pairs = permutations([device.name for device in devices], 2)
    return Machine(
        "ranks", devices, devices[0].name, tuple(Link(a, b, 1e9, 1e-5) for a, b in pairs)
    )


def drawn_plan(captured, machine, seed):
    graph, devices = captured.graph, len(machine.devices)
    placement = random_placement(graph, seed, devices)
    orders = random_order(graph, placement, seed) if seed % 2 else "by index"
    if seed % 2:
        orders += ((),) * (devices - len(orders))
    return plan_for(captured, placement, orders, machine)


def join(host):
    return Ranks(place_of_ranks(host))


def differing(captured, machine, seeds, ranks):
    """Runs random placements, and returns what differs on this rank from one process, by name.

    Losses are compared on all ranks, weights and the optimizer's state on rank 0.
    """
    torch.set_num_threads(1)
    inputs, targets = example_values(captured)
    values = initial_values(captured, 7)
    losses = [run_step(captured, values, inputs, targets, seed=7, step=i) for i in range(STEPS)]
    mine = [d for d, r in enumerate(deal(machine, ranks.hosts)) if r == ranks.rank]
    found = []
    with Workers(machine, mine) as workers:
        for seed in seeds:
            plan = drawn_plan(captured, machine, seed)
            with run(plan, captured, seed=7, workers=workers, ranks=ranks) as network:
                # What other ranks than the first give does not count.
                given = [t if ranks.rank == 0 else torch.zeros_like(t) for t in (*inputs, *targets)]
                listening = listens()
                mine = [network.step(*given) for _ in range(STEPS)]
                state = network.state_dict() | network.optimizer_state_dict()
            found += [f"{seed} loss" for a, b in zip(mine, losses, strict=True) if not a.equal(b)]
            found += [
                f"listens on {where}" for where in listening if not where.startswith(LOOPBACK)
            ]
            assert listening, "gloo listens"
            if ranks.rank == 0:
                found += [f"{seed} {name}" for name in unequal(captured, state, values)]
    return found


def unequal(captured, state, values):
    """Names of those parameters, buffers and states that differ from `values`."""
    for op, source in enumerate(captured.program.sources):
        if source is None or source.role not in ("parameter", "buffer", "state"):
            continue
        if not torch.equal(state[source.name], values[captured.graph.outputs_of(op)[0]]):
            yield source.name


def an_lstm():
    return resolve(LSTM, train=Adam(lr=1e-3))


def program(body):
    """A program of the ranks, which prints what `result` is as JSON."""
    return (
        "import json, os, signal, sys, time, torch\n"
        "from tests.support.hosts import *\n"
        "from tests.executors.test_placed import training_step\n"
        "from dovetail.runtime.forking import start_fork_server\n"
        "rank = int(os.environ['RANK'])\n"
        "start_fork_server(('torch', 'dovetail.executors.worker'))\n"
        + body
        + "\nprint(json.dumps(result), flush=True)\n"
    )


def differing_pipelines(captured, ranks):
    """Runs on the ranks a pipeline that recomputes at random places, towers of micro-batches, and
    on more than two of them a pipeline of each schedule. Returns what differs on this rank from one
    process, by name."""
    # The ranks of most programs plan nothing, and start sooner without placers.
    from dovetail.methods import PIPELINE_SCHEDULES
    from dovetail.pipeline.opening import planned
    from dovetail.pipeline.pipelining import plan_pipeline
    from dovetail.pipeline.requests import PlanRequest

    torch.set_num_threads(1)
    machine = machine_of(*core_devices(ranks.ranks))
    # Nothing is measured for a machine without cores.
    elsewhere = replace(machine, devices=tuple(replace(d, cores=()) for d in machine.devices))
    cases = [("1f1b", 4, 1, True), ("1f1b", 2, ranks.ranks, False)]
    if ranks.ranks > 2:
        cases += [(schedule, 4, 1, False) for schedule in PIPELINE_SCHEDULES]
    found = []
    for schedule, count, towers, recomputes in cases:
        name = f"{schedule} {count} x {towers} {'again' * recomputes}"
        request = PlanRequest(
            captured, elsewhere, micro_batches=count, schedule=schedule, budget="40e"
        )
        plan = plan_pipeline(request, replicas=towers)
        # How long it took differs from rank to rank.
        plan = replace(plan, machine=machine, planning_seconds=0.0)
        step = planned(plan, captured)
        if recomputes:
            stages = plan.micro_batches
            again = replace(stages, recompute=(True,) * len(stages.devices))
            step = again.apply(captured)
            plan = drawn_plan(step, machine, 1)
        inputs, targets = example_values(step)
        values = initial_values(step, 7)
        losses = [run_step(step, values, inputs, targets, seed=7, step=i) for i in range(STEPS)]
        with run(plan, step, seed=7, ranks=ranks) as network:
            mine = [network.step(*inputs, *targets) for _ in range(STEPS)]
            state = network.state_dict() | network.optimizer_state_dict()
        found += [f"{name} loss" for a, b in zip(mine, losses, strict=True) if not a.equal(b)]
        if ranks.rank == 0:
            found += [f"{name} {other}" for other in unequal(step, state, values)]
        found += [f"{name} is on one device"] * (len(set(plan.placement.tolist())) < 2)
    return found


def gpu_machines():
    """Machines of two hosts that the CPU plays, by what they have."""
    found = {
        "a CPU and a GPU each": [cpu(0), gpu(0), cpu(1), gpu(1)],
        "GPUs alone": [gpu(0), gpu(1), gpu(2)],
    }
    return {
        name: machine_of(
            *(replace(d, host=f"box{int(i >= len(devices) / 2)}") for i, d in enumerate(devices))
        )
        for name, devices in found.items()
    }


@played()
def differing_on_gpus(captured, ranks):
    """Runs random placements on played GPUs of two hosts, also when launches are graphs. Returns
    what differs from the same plan in one process, on rank 0, and between how many pairs of GPUs
    tensors went straight."""
    torch.set_num_threads(1)
    found, pairs, count = [], 0, STEPS + 2
    inputs, targets = example_values(captured)
    for name, machine in gpu_machines().items():
        for seed in (1,) if name == "GPUs alone" else (0, 1):
            plan = drawn_plan(captured, machine, seed)
            with_nccl = name == "GPUs alone" or not seed
            # That one rank has no NCCL is enough.
            os.environ["DOVETAIL_NCCL"] = "1" if with_nccl or ranks.rank else "0"
            with run(plan, captured, seed=7, ranks=ranks) as network:
                pairs += len(network.bridge.part.direct)
                assert with_nccl == bool(network.bridge.part.direct)
                mine = [network.step(*inputs, *targets) for _ in range(count)]
                network.timeline()
                state = network.state_dict() | network.optimizer_state_dict()
            if ranks.rank:
                continue
            with run(plan, captured, seed=7) as network:
                losses = [network.step(*inputs, *targets) for _ in range(count)]
                network.timeline()
                alone = network.state_dict() | network.optimizer_state_dict()
            kind = f"{name} {seed}"
            found += [f"{kind} loss" for a, b in zip(mine, losses, strict=True) if not a.equal(b)]
            found += [f"{kind} {key}" for key in alone if not state[key].equal(alone[key])]
    return found, pairs


def resumed(captured, ranks, folder):
    """Whether a plan on other devices goes on from a checkpoint as the first one does: (step that
    it goes on from, losses that differ, names of what differs in the end on this rank)."""
    inputs, targets = example_values(captured)
    plans = [
        drawn_plan(captured, machine_of(*core_devices(2)), 0),
        drawn_plan(captured, machine_of(*core_devices(3, ("box0", "box1", "box0"))), 1),
    ]
    with run(plans[0], captured, seed=7, ranks=ranks) as network:
        network.keep_checkpoints(folder, 2)
        network.step(*inputs, *targets)
        network.step(*inputs, *targets)
        network.keep_checkpoints(folder, 100)
        expected = [network.step(*inputs, *targets) for _ in range(2)]
        state = network.state_dict() | network.optimizer_state_dict()
    with run(plans[1], captured, seed=7, ranks=ranks) as network:
        step = network.resume(folder)
        begun = network.state_dict(), network.optimizer_state_dict()
        if ranks.rank:
            begun = blank_state(captured, begun[0])
        found = [network.step(*inputs, *targets) for _ in range(2)]
        after = network.state_dict() | network.optimizer_state_dict()
        # What is loaded is rank 0's, and comes back from where it lives.
        network.load_state_dict(begun[0])
        network.load_optimizer_state_dict(begun[1])
        loaded = network.state_dict() | network.optimizer_state_dict()
    pairs = [(state, after), (begun[0] | begun[1], loaded)] if ranks.rank == 0 else []
    names = [name for a, b in pairs for name in a if not a[name].equal(b[name])]
    return step, [i for i in range(2) if not found[i].equal(expected[i])], names


def blank_state(captured, held):
    """Parameters and buffers, and the optimizer's state, of the right shapes, and no number that
    counts. What the graph does not use is taken from `held`."""
    graph, sources = captured.graph, captured.program.sources
    blank = {
        source.name: torch.full(graph.shapes[tensor], 7, dtype=getattr(torch, graph.dtypes[tensor]))
        for op, source in enumerate(sources)
        if source is not None
        for tensor in graph.outputs_of(op)
    }
    own_names = {n: captured.program.aliases.get(n, n) for n in captured.module.state_dict()}
    names = [source.name for source in sources if source is not None and source.role == "state"]
    of_module = {n: blank[own] if own in blank else held[n] for n, own in own_names.items()}
    return of_module, {name: blank[name] for name in names}


@played()
def until_lost(captured, ranks, fault, gpus=False):
    """Runs steps for ever on two or more ranks, of which rank 1 has a fault at the fifth; with
    `gpus` on two ranks of a played GPU each. Prints the processes of this rank first."""
    on_gpus = replace(gpu(0), host="box0"), replace(gpu(1), host="box1")
    devices = on_gpus if gpus else core_devices(ranks.ranks)
    plan = drawn_plan(captured, machine_of(*devices), 0)
    inputs, targets = example_values(captured)
    with run(plan, captured, ranks=ranks) as network:
        assert gpus == bool(network.bridge.part.direct)
        print(json.dumps([os.getpid(), *children()]), flush=True)
        for number in itertools.count():
            if ranks.rank == 1 and number == 5:
                fault()
            network.step(*inputs, *targets)


def until_hung(captured, ranks, stops):
    """Runs steps for ever on two ranks, of which a device of rank 1 hangs from the fifth on: it is
    stopped, or an op of it does not return. Prints the processes of this rank first."""
    machine = machine_of(*core_devices(ranks.ranks))
    graph = captured.graph
    chosen = graph.kinds.index("aten.sigmoid")
    calls = list(captured.program.calls)
    calls[chosen] = replace(calls[chosen], target=sigmoid_or_hang)
    captured = replace(captured, program=replace(captured.program, calls=tuple(calls)))
    inputs, targets = example_values(captured)
    placement = np.zeros(len(graph), dtype=np.int32)
    placement[chosen] = 1
    plan = plan_for(captured, placement, "by index", machine)
    # An op that hangs has the longer to end, the more seconds are predicted.
    plan = replace(plan, compute_seconds=np.full_like(plan.compute_seconds, 0.05))
    with run(plan, captured, ranks=ranks) as network:
        print(json.dumps([os.getpid(), *children()]), flush=True)
        for number in itertools.count():
            if number == 5 and stops and ranks.rank == 1:
                os.kill(network.workers.pids[0], signal.SIGSTOP)
            elif number == 5 and not stops:
                inputs[0][:] = math.nan
            network.step(*inputs, *targets)


@played()
def until_raised(captured, ranks):
    """Runs steps for ever on a played GPU of each of two ranks, of which rank 1's raises in the
    second step, when rank 0's waits for it."""
    devices = replace(gpu(0), host="box0"), replace(gpu(1), host="box1")
    chosen = captured.graph.kinds.index("aten.sigmoid")
    calls = list(captured.program.calls)
    calls[chosen] = replace(calls[chosen], target=sigmoid_or_raise)
    captured = replace(captured, program=replace(captured.program, calls=tuple(calls)))
    inputs, targets = example_values(captured)
    placement = np.zeros(len(captured.graph), dtype=np.int32)
    placement[chosen] = 1
    plan = plan_for(captured, placement, "by index", machine_of(*devices))
    with run(plan, captured, ranks=ranks) as network:
        assert network.bridge.part.direct
        print(json.dumps([os.getpid(), *children()]), flush=True)
        network.step(*inputs, *targets)
        inputs[0][:] = math.nan
        network.step(*inputs, *targets)


def sigmoid_or_raise(x):
    """What `until_raised` runs in place of a sigmoid."""
    if x.isnan().any():
        raise ValueError("not a number")
    return x.sigmoid()


def sigmoid_or_hang(x):
    """What `until_hung` runs in place of a sigmoid."""
    if x.isnan().any():
        time.sleep(3600)
    return x.sigmoid()


def listens():
    """Addresses on which this process listens, in hex, as in /proc."""
    mine = _inodes(os.getpid())
    return sorted({where for _, where, inode in _bound() if inode in mine})


def children():
    """Processes that this one has started."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def is_there(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
