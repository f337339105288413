"""Small graphs and machines by hand, one output per op."""

from dataclasses import dataclass

import numpy as np

from dovetail.graph import Graph, Phase
from dovetail.graph.source import Source
from dovetail.machine import Device, Link, Machine
from dovetail.plans import Plan


@dataclass(frozen=True)
class Op:
    name: str
    reads: tuple[str, ...] = ()
    kind: str = "test.op"
    phase: int = Phase.FORWARD
    output_bytes: int = 8
    flops: int = 1
    accessed_bytes: int = 8
    module: str = ""
    colocation: int = -1
    gradient_of: str = ""
    device_kinds: tuple[str, ...] = ()
    view_of: str = ""  # shares the storage of this op's output
    overwrites: str = ""  # likewise, and writes over it
    dtype: str = "float32"


def source(name, kind="parameter", output_bytes=8, **fields):
    return Op(name, (), kind, Phase.SOURCE, output_bytes, flops=0, accessed_bytes=0, **fields)


def graph_of(*ops, outputs=(), control=()):
    """A Graph of `Op`s, each with one output tensor."""
    index = {op.name: i for i, op in enumerate(ops)}
    storages = list(range(len(ops)))
    for i, op in enumerate(ops):
        if op.view_of or op.overwrites:
            storages[i] = storages[index[op.view_of or op.overwrites]]
    reads = [[index[r] for r in op.reads] for op in ops]
    return Graph(
        names=tuple(op.name for op in ops),
        kinds=tuple(op.kind for op in ops),
        signatures=tuple(f"{op.kind} {op.output_bytes}" for op in ops),
        modules=tuple(op.module for op in ops),
        phases=np.array([op.phase for op in ops]),
        flops=np.array([op.flops for op in ops]),
        accessed_bytes=np.array([op.accessed_bytes for op in ops]),
        colocation=np.array([op.colocation for op in ops]),
        gradient_of=np.array([index[op.gradient_of] if op.gradient_of else -1 for op in ops]),
        device_kinds=tuple(op.device_kinds for op in ops),
        producers=np.arange(len(ops)),
        shapes=tuple((op.output_bytes // 4,) for op in ops),
        strides=((1,),) * len(ops),
        dtypes=tuple(op.dtype for op in ops),
        tensor_bytes=np.array([op.output_bytes for op in ops]),
        storages=np.array(storages),
        overwrites=np.array([bool(op.overwrites) for op in ops]),
        input_offsets=np.cumsum([0, *map(len, reads)]),
        input_tensors=np.array([t for r in reads for t in r]),
        outputs=np.array([index[name] for name in outputs]),
        control=np.array([(index[a], index[b]) for a, b in control]).reshape(-1, 2),
    )


def machine_of(
    count=2, memory_bytes=10**9, bandwidth=1e9, latency=1e-6, flops_per_second=1e9, overhead=0.0
):
    """`count` equal CPUs "d0", "d1", … with a link, each its own channel, between every two."""
    devices = tuple(
        Device(f"d{i}", "cpu", "test", memory_bytes, {"float32": flops_per_second}, 1e12, overhead)
        for i in range(count)
    )
    names = [device.name for device in devices]
    links = tuple(
        Link(a, b, bandwidth, latency, f"{a}->{b}") for a in names for b in names if a != b
    )
    return Machine(f"{count} tests", devices, "d0", links)


def plan_by_hand(graph, machine, placement, **fields):
    """A plan of a step whose every op takes one second; the fields that are not given promise
    nothing."""
    count = len(machine.devices)
    promised = {
        "source": Source("test", "", (), ""),
        "graph_fingerprint": graph.fingerprint,
        "orders": None,
        "compute_seconds": np.ones((len(graph), count)),
        "costs_source": "given",
        "placer": "hand",
        "seed": 0,
        "objective": "step",
        "value": 1.0,
        "lower_bound": 0.0,
        "bound_proof": "none",
        "peak_memory_bytes": (0,) * count,
        "groups": 0,
        "planning_seconds": 0.0,
    }
    placement = np.array(placement, np.int32)
    return Plan(machine=machine, placement=placement, **promised | fields)
