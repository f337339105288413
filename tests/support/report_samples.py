"""Graphs, machines, plans and timelines for the tests of reports, made by hand."""

import numpy as np

from dovetail.graph import Graph
from dovetail.graph.records import Phase
from dovetail.graph.source import Source
from dovetail.machine import Device, Link, Machine
from dovetail.plans import Plan
from dovetail.timeline import Timeline

CPU = {"kind": "cpu", "model": "here", "memory_bytes": 2**20, "bandwidth_bytes_per_second": 1e10}
EVIL = "</script><img src=x onerror=alert(1)>"


def make_graph(ops, control=()):
    """ops: (name, phase, inputs by op index[, module, gradient_of]); each makes 64 bytes."""
    rows = [(*op, *("", -1)[len(op) - 3 :]) for op in ops]
    reads = [list(dict.fromkeys(row[2])) for row in rows]
    count = len(rows)
    return Graph(
        names=tuple(row[0] for row in rows),
        kinds=tuple("parameter" if r[1] == Phase.SOURCE else "aten.mm" for r in rows),
        signatures=tuple("" for _ in rows),
        modules=tuple(row[3] for row in rows),
        phases=np.array([row[1] for row in rows]),
        flops=np.full(count, 1000),
        accessed_bytes=np.full(count, 192),
        colocation=np.full(count, -1),
        gradient_of=np.array([row[4] for row in rows]),
        device_kinds=((),) * count,
        producers=np.arange(count),
        shapes=((4, 4),) * count,
        strides=((4, 1),) * count,
        dtypes=("float32",) * count,
        tensor_bytes=np.full(count, 64),
        storages=np.arange(count),
        overwrites=np.zeros(count, dtype=bool),
        input_offsets=np.cumsum([0] + [len(r) for r in reads]),
        input_tensors=np.array([t for r in reads for t in r]),
        outputs=np.array([count - 1]),
        control=np.array(list(control), dtype=np.int32).reshape(-1, 2),
    )


def make_machine(devices=2, name="box"):
    names = [f"cpu{i}" for i in range(devices)]
    return Machine(
        name=name,
        devices=tuple(
            Device(n, flops_per_second={"float32": 1e11}, op_overhead_seconds=1e-6, **CPU)
            for n in names
        ),
        host="cpu0",
        links=tuple(
            Link(a, b, 1e10, 1e-6, f"{a}->{b}") for a in names for b in names if a != b
        ),
    )  # fmt: skip


def make_timeline(machine, spans, transfers=(), memory=None, step=None):
    """spans: (op, device, start, end); transfers: (tensor, op, source, destination, start, end)."""
    spans = sorted(spans, key=lambda span: (span[2], span[0]))
    channels = machine.channels
    of = {(link.source, link.destination): channels.index(link.channel) for link in machine.links}
    rows = [
        (*t, of[machine.device_names[t[2]], machine.device_names[t[3]]])
        for t in sorted(transfers, key=lambda t: t[4])
    ]
    op = np.array(spans, dtype=np.float64).reshape(-1, 4).T
    sent = np.array(rows, dtype=np.float64).reshape(-1, 7).T
    whole = [
        c.astype(np.int32) for c in (op[0], op[1], sent[0], sent[1], sent[2], sent[3], sent[6])
    ]
    memory = memory or [([], [])] * len(machine.devices)
    return Timeline(
        devices=machine.device_names,
        channels=channels,
        ops=whole[0],
        op_devices=whole[1],
        op_starts=op[2],
        op_ends=op[3],
        transfer_tensors=whole[2],
        transfer_ops=whole[3],
        transfer_sources=whole[4],
        transfer_destinations=whole[5],
        transfer_channels=whole[6],
        transfer_starts=sent[4],
        transfer_ends=sent[5],
        memory_times=tuple(np.array(t, dtype=np.float64) for t, _ in memory),
        memory_bytes=tuple(np.array(b, dtype=np.int64) for _, b in memory),
        step_seconds=float(max([*op[3], *sent[5]], default=0.0) if step is None else step),
    )


def make_plan(graph, machine, placement, **changes):
    seconds = np.where(graph.is_source[:, None], 0.0, 1e-3) * np.ones((1, len(machine.devices)))
    fields = {
        "source": Source("zoo:sample?layers=2", "adam", ((4, 4),), "2.13.0"),
        "graph_fingerprint": graph.fingerprint,
        "machine": machine,
        "placement": np.array(placement, dtype=np.int32),
        "orders": None,
        "compute_seconds": seconds,
        "costs_source": "analytic",
        "placer": "etf",
        "seed": 7,
        "objective": "step",
        "value": 4e-3,
        "lower_bound": 3.2e-3,
        "bound_proof": "load balance (LP)",
        "peak_memory_bytes": (600_000, 300_000, 0, 0)[: len(machine.devices)],
        "groups": 3,
        "planning_seconds": 1.5,
        "baselines": {"single": 6e-3, "expert": None, "etf": 4e-3},
    }
    return Plan(**(fields | changes))


def run_in_order(graph, machine, placement, seconds):
    """A timeline of a plain list schedule: ops in index order, transfers first come first served.

    Not the simulator's rules; it only has to look like a step and keep every dependency.
    """
    free = [0.0] * len(machine.devices)
    line_free: dict[tuple[int, int], float] = {}
    ready: dict[tuple[int, int], float] = {}
    spans, transfers = [], []
    for op in np.flatnonzero(~graph.is_source).tolist():
        device = int(placement[op])
        start = free[device]
        for tensor in graph.inputs_of(op).tolist():
            made = int(graph.producers[tensor])
            home = int(placement[made])
            if graph.is_source[made]:
                continue
            if home != device and (tensor, device) not in ready:
                begin = max(ready[tensor, home], line_free.get((home, device), 0.0))
                end = begin + 2e-6
                transfers.append((tensor, made, home, device, begin, end))
                line_free[home, device] = ready[tensor, device] = end
            start = max(start, ready[tensor, device])
        free[device] = end = start + float(seconds[op])
        spans.append((op, device, start, end))
        for tensor in graph.outputs_of(op):
            ready[tensor, device] = end
    return make_timeline(machine, spans, transfers)


def training_chain(modules, repeats=1):
    """A training step of a chain of modules: forward, backward, update; a branch in each."""
    ops, forward, last = [], [], -1
    for m in range(modules):
        name = f"block.{m // 4}.layer_{m % 4}"
        ops.append((f"{name}/weight", Phase.SOURCE, [], name))
        weight = len(ops) - 1
        for r in range(repeats):
            reads = [weight] + ([last] if last >= 0 else [])
            ops.append((f"{name}/mm_{r}", Phase.FORWARD, reads, name))
            ops.append((f"{name}/tanh_{r}", Phase.FORWARD, [len(ops) - 1], name))
            ops.append((f"{name}/gate_{r}", Phase.FORWARD, [len(ops) - 2], name))
            ops.append((f"{name}/mul_{r}", Phase.FORWARD, [len(ops) - 2, len(ops) - 1], name))
            last = len(ops) - 1
            forward.append(range(last - 3, last + 1))
    weights = [i for i, op in enumerate(ops) if op[1] == Phase.SOURCE]
    for of in reversed(forward):
        name = ops[of[0]][3]
        for f in reversed(of):
            ops.append((f"{ops[f][0]}_backward", Phase.BACKWARD, [last, f], name, f))
            last = len(ops) - 1
        if of[0] - 1 in weights:
            ops.append((f"{name}/adam", Phase.UPDATE, [last, of[0] - 1], name))
    return make_graph(ops)
