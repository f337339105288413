"""Random and drawn graphs and machines for the simulator's tests."""

from dataclasses import replace

import numpy as np

from dovetail.costs import Costs
from dovetail.graph import Graph
from dovetail.machine import Device, Link, Machine


class Builder:
    """Builds a graph op by op; `build` makes the record."""

    def __init__(self):
        self.rows, self.tensors, self.control, self.outputs = [], [], [], []
        self.storages = 0

    def op(self, reads=(), sizes=(1,), kind="aten.mm", phase=1, aliases=None, overwrites=False):
        """Add an op; return its tensors. `aliases`: a read tensor whose storage it returns."""
        op, made = len(self.rows), []
        self.rows.append((kind, phase, tuple(reads)))
        for size in sizes:
            storage = self.storages if aliases is None else self.tensors[aliases][2]
            self.storages += aliases is None
            made.append(len(self.tensors))
            self.tensors.append((op, size, storage, overwrites))
        return made

    def source(self, kind="input", size=1):
        return self.op(sizes=(size,), kind=kind, phase=0)[0]

    def build(self, outputs=()):
        ops, tensors = len(self.rows), len(self.tensors)
        zeros = np.zeros(ops, np.int64)
        return Graph(
            names=tuple(f"op{i}" for i in range(ops)),
            kinds=tuple(kind for kind, _, _ in self.rows),
            signatures=("",) * ops,
            modules=("",) * ops,
            phases=np.array([phase for _, phase, _ in self.rows]),
            flops=zeros,
            accessed_bytes=zeros,
            colocation=zeros - 1,
            gradient_of=zeros - 1,
            device_kinds=((),) * ops,
            producers=np.array([t[0] for t in self.tensors]),
            shapes=((),) * tensors,
            strides=((),) * tensors,
            dtypes=("uint8",) * tensors,
            tensor_bytes=np.array([t[1] for t in self.tensors]),
            storages=np.array([t[2] for t in self.tensors]),
            overwrites=np.array([t[3] for t in self.tensors]),
            input_offsets=np.cumsum([0] + [len(reads) for _, _, reads in self.rows]),
            input_tensors=np.array([t for _, _, reads in self.rows for t in reads], np.int32),
            outputs=np.array(outputs, np.int32),
            control=np.array(self.control, np.int32).reshape(-1, 2),
        )


def machine_of(names, links, host=None, memory_bytes=1000):
    """Devices by name; links as (source, destination, latency, bandwidth, channel)."""
    devices = tuple(Device(n, "gpu", "m", memory_bytes, {}, 1.0, 0.0) for n in names)
    return Machine(
        "test", devices, host or names[0], tuple(Link(a, b, w, t, c) for a, b, t, w, c in links)
    )


def all_links(names, latency=1.0, bandwidth=np.inf):
    return [(a, b, latency, bandwidth, f"{a}{b}") for a in names for b in names if a != b]


def random_graph(rng):
    """Up to 14 ops: sources of every kind, views, updates, several outputs, control edges."""
    b = Builder()
    kinds = ["input", "parameter", "constant", "state"]
    for _ in range(rng.integers(1, 5)):
        b.source(str(rng.choice(kinds)), int(rng.integers(0, 4)))
    first = len(b.rows)
    for op in range(first, first + int(rng.integers(1, 11))):
        count = min(len(b.tensors), int(rng.integers(0, 4)))
        reads = sorted(rng.choice(len(b.tensors), count, replace=False).tolist())
        alias = int(rng.choice(reads)) if reads and rng.random() < 0.45 else None
        written = alias is not None and bool(rng.random() < 0.4)
        sizes = rng.integers(0, 4, 1 if alias is not None else rng.integers(0, 3)).tolist()
        b.op(reads, sizes, aliases=alias, overwrites=written, phase=3 if written else 1)
        for before in range(first, op):
            if rng.random() < 0.12:
                b.control.append((before, op))
    count = int(rng.integers(0, 3))
    outputs = rng.choice(len(b.tensors), min(count, len(b.tensors)), replace=False)
    return b.build(outputs)


def random_machine(rng):
    """1 to 4 devices; some pairs only through the host; some links share a channel, and some are
    carried by their source."""
    names = tuple("abcd"[: rng.integers(1, 5)])
    host = str(rng.choice(names))
    links = []
    for a in names:
        for b in names:
            if a == b or (host not in (a, b) and rng.random() < 0.5):
                continue
            channel = str(rng.choice(["bus", a, a + b], p=[0.25, 0.25, 0.5]))
            bandwidth = float(rng.choice([1.0, 2.0, 3.0, np.inf]))
            links.append((a, b, float(rng.choice([0.0, 0.1, 1.0])), bandwidth, channel))
    return machine_of(names, links, host, memory_bytes=8)


def with_messages(rng, machine):
    """The machine with CPUs and GPUs on up to two hosts, whose messages take time of both ends."""
    kinds = rng.choice(["cpu", "gpu"], len(machine.devices))
    hosts = rng.choice(["x", "y"], len(machine.devices))
    devices = tuple(
        replace(device, kind=str(kind), host=str(host))
        for device, kind, host in zip(machine.devices, kinds, hosts, strict=True)
    )
    # Sums of these are exact, whatever their order.
    links = tuple(
        replace(
            link,
            send_seconds=float(rng.choice([0.0, 0.25, 1.0])),
            receive_seconds=float(rng.choice([0.0, 0.5, 1.5])),
        )
        for link in machine.links
    )
    return replace(machine, devices=devices, links=links)


def random_costs(rng, graph, machine):
    """Few distinct values, so that many things happen at one instant; or any."""
    shape = (len(graph), len(machine.devices))
    few = rng.choice([0.0, 1.0, 1.0, 2.0, 0.1], shape)
    return Costs(few if rng.random() < 0.7 else rng.random(shape), "given")
