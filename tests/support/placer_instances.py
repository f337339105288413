"""Small graphs, machines and an evaluator for placer tests: a simulator that fits on a screen."""

from dataclasses import dataclass

import numpy as np

from dovetail.costs import Costs
from dovetail.errors import MissingLibraryError
from dovetail.graph import Graph, Groups, Phase
from dovetail.machine import Device, Link, Machine
from dovetail.placers import PLACERS, make_problem
from dovetail.placers.scotch import load_scotch

LATENCY_SECONDS, BANDWIDTH = 0.05, 100.0


@dataclass(frozen=True, eq=False)
class FakeEvaluation:
    values: np.ndarray
    peak_memory_bytes: np.ndarray
    feasible: np.ndarray


def build_graph(reads, *, sizes=None, modules=None, phases=None, sources=(), **fields):
    """Op i reads the one output of each op in reads[i] and makes sizes[i] bytes; `sources` maps
    an op to its kind."""
    ops = len(reads)
    sources = dict(sources)
    phases = list(phases or [Phase.FORWARD] * ops)
    for op in sources:
        phases[op] = Phase.SOURCE
    offsets = np.cumsum([0] + [len(r) for r in reads])
    parts = {
        "names": tuple(f"op{i}" for i in range(ops)),
        "kinds": tuple(sources.get(i, "work") for i in range(ops)),
        "signatures": ("",) * ops,
        "modules": tuple(modules or [""] * ops),
        "phases": phases,
        "flops": [1] * ops,
        "accessed_bytes": [1] * ops,
        "colocation": [-1] * ops,
        "gradient_of": [-1] * ops,
        "device_kinds": ((),) * ops,
        "producers": range(ops),
        "shapes": ((1,),) * ops,
        "strides": ((1,),) * ops,
        "dtypes": ("float32",) * ops,
        "tensor_bytes": sizes if sizes is not None else [4] * ops,
        "storages": range(ops),
        "overwrites": [False] * ops,
        "input_offsets": offsets,
        "input_tensors": [t for r in reads for t in r],
        "outputs": [ops - 1],
        "control": np.empty((0, 2)),
    }
    parts |= fields
    lists = {k: np.array(v) if isinstance(v, (list, range)) else v for k, v in parts.items()}
    return Graph(**lists)


def build_machine(count, *, memory_bytes=10**9, kinds=None, host=False):
    kinds = kinds or ["gpu"] * count
    devices = [
        Device(f"{kind}{i}", kind, kind, memory_bytes, {"float32": 1.0}, 1.0, 0.0)
        for i, kind in enumerate(kinds)
    ]
    if host:
        devices.append(Device("host", "host", "host", 10**12, {}, 1.0, 0.0))
    names = [device.name for device in devices]
    links = tuple(
        Link(a, b, BANDWIDTH, LATENCY_SECONDS, f"{a}->{b}") for a in names for b in names if a != b
    )
    return Machine("toy", tuple(devices), names[-1] if host else names[0], links)


def fake_evaluator(graph, costs, capacities):
    """Ops in index order, free links, every output and received copy kept to the end."""
    seconds = costs.compute_seconds

    def evaluate(placements):
        assert placements.dtype == np.int32 and placements.flags.c_contiguous
        batch, ops = placements.shape
        rows = np.arange(batch)
        ends = np.zeros((batch, ops))
        free = np.zeros((batch, len(capacities)))
        memory = np.zeros((batch, len(capacities)), dtype=np.int64)
        for op in range(ops):
            here = placements[:, op]
            size = graph.tensor_bytes[op]
            if graph.is_source[op]:
                memory[rows, here] += 0 if graph.kinds[op] == "input" else size
                continue
            starts = free[rows, here]
            for tensor in graph.inputs_of(op):
                there = placements[:, graph.producers[tensor]]
                moves = (there != here) & ~graph.is_source[graph.producers[tensor]]
                wait = LATENCY_SECONDS + graph.tensor_bytes[tensor] / BANDWIDTH
                starts = np.maximum(starts, ends[:, graph.producers[tensor]] + moves * wait)
            ends[:, op] = free[rows, here] = starts + seconds[op, here]
            memory[rows, here] += size
        return FakeEvaluation(ends.max(axis=1), memory, (memory <= capacities).all(axis=1))

    return evaluate


def build_problem(graph, machine, *, groups=None, seconds=None, caps=(), evaluate=None, **options):
    """Every op a group of its own and one second anywhere, unless given."""
    ops, devices = len(graph), len(machine.devices)
    if groups is None:
        groups = Groups(np.arange(ops, dtype=np.int32), ops)
    table = np.ones((ops, devices)) if seconds is None else np.array(seconds, dtype=float)
    table[:, [device.kind == "host" for device in machine.devices]] = np.inf
    table[graph.is_source] = 0.0
    costs = Costs(table, "given")
    capacities = np.array([device.memory_bytes for device in machine.devices])
    for name, cap_bytes in caps:
        index = machine.device_index(name)
        capacities[index] = min(capacities[index], cap_bytes)
    if evaluate is None:
        evaluate = fake_evaluator(graph, costs, capacities)
    return make_problem(graph, machine, costs, evaluate, groups=groups, caps=caps, **options)


def random_problem(rng, *, groups=None, devices=None, memory_share=None, **options):
    """A random graph in topological order. `memory_share`: each device may hold that share of all
    bytes, so that plans must spread."""
    count = groups or int(rng.integers(3, 9))
    devices = devices or int(rng.integers(2, 4))
    ops = count * 2
    reads = [
        sorted({int(j) for j in rng.integers(0, i, size=rng.integers(1, 4))}) if i else []
        for i in range(ops)
    ]
    modules = [f"layers.{i * 4 // ops}.{'ab'[i % 2]}" for i in range(ops)]
    sizes = rng.integers(1, 200, size=ops)
    graph = build_graph(reads, sizes=sizes, modules=modules)
    of_op = np.sort(np.concatenate([np.arange(count), rng.integers(0, count, size=ops - count)]))
    seconds = rng.uniform(0.2, 2.0, size=(ops, 1)) * rng.uniform(0.7, 1.5, size=(1, devices))
    memory = 10**9 if memory_share is None else int(memory_share * sizes.sum())
    machine = build_machine(devices, memory_bytes=memory)
    of_groups = Groups(of_op.astype(np.int32), count)
    return build_problem(graph, machine, groups=of_groups, seconds=seconds, **options)


def usable_placers():
    """Names of all methods but those whose library is absent here."""
    try:
        load_scotch()
    except MissingLibraryError:
        return [name for name in PLACERS if name not in ("scotch", "mincut")]
    return list(PLACERS)
