"""Data-parallel towers: from the graph of one replica's training step, that of N replicas.

    synchronous    tower.0/  input ─► forward ─► loss ─► backward ─┐
                   tower.1/  input ─► forward ─► loss ─► backward ─┼─► average ─► the one update
                   tower.2/  input ─► forward ─► loss ─► backward ─┘

    asynchronous   ... backward of each tower ─► update/tower.0 ─► update/tower.1 ─► update/tower.2

All towers read the same parameters, at their value before the step, and a share of the batch each:
the graph given is that of batch / N. Asynchronous, update r reads what update r - 1 wrote, and the
gradient of tower r.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.4, which compares with synchronous and asynchronous
towers. Differences: it does not say what becomes of the buffers that a step writes (running
statistics of batch norm); here, as in TensorFlow's towers, they get tower 0's values, by updates
that are tower 0's own, and what other towers would run for them alone is left out. All
asynchronous towers begin at once, and the first update of a parameter waits until each has read
the old value, where separate processes would drift apart.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from dovetail.errors import UsageError
from dovetail.graph.copies import Copies, rows_of
from dovetail.graph.records import Graph, Int32, Int64, Phase
from dovetail.graph.replica import Replica
from dovetail.graph.towers import AVERAGE, own_module, own_name, update_name


@dataclass(frozen=True, eq=False)
class Replicated:
    """The graph of all towers, and what of one replica's graph each op stands for.

    origins    [ops] the op of one replica that it is or copies; -1: an average. A copy has inputs
               and outputs in its origin's order, tensor for tensor
    towers     [ops] the tower that has it for itself, or whose gradient it updates by; -1: shared
    averaged   [ops] of an average, the tensor of one replica that it is the mean of; else -1
    """

    graph: Graph
    replicas: int
    synchronous: bool
    origins: Int32
    towers: Int32
    averaged: Int32


def replicate(graph: Graph, replicas: int, *, synchronous: bool = True) -> Replicated:
    """`replicas` towers of one replica's training step.

    Tower r's own ops are named "tower.r/..." in module "tower.r....", asynchronous updates
    ".../tower.r" in the parameter's module; all else keeps its name. One op, "average/PARAMETER",
    sums the N gradients that a synchronous update reads and scales by 1 / N; "average/loss" does so
    with the losses. Sources stand first, then tower after tower, then averages and updates.
    Updates of one parameter are colocated. Takes O(replicas x (ops + tensors + reads)).

    Raises `UsageError` for fewer than two replicas, and `ReplicationError` for a graph that trains
    nothing, returns no loss, has towers already, or whose updates do not come last.
    """
    if replicas < 2:
        raise UsageError("replicas", f"is {replicas}; use 2 or more")
    one = Replica(graph)
    one.check()
    copies = Copies(one, rows_of(one, replicas, synchronous), replicas, synchronous)
    return Replicated(
        graph=_graph(copies),
        replicas=replicas,
        synchronous=synchronous,
        origins=copies.rows.origins.astype(np.int32),
        towers=copies.rows.towers.astype(np.int32),
        averaged=copies.rows.averaged.astype(np.int32),
    )


Shape = tuple[int, ...]


def _graph(copies: Copies) -> Graph:
    graph, rows = copies.one.graph, copies.rows
    origins, averages = rows.origins, rows.averaged >= 0
    stands_for = copies.stands_for
    offsets, reads = copies.reads
    elements = np.array([math.prod(shape) for shape in graph.shapes], dtype=np.int64)
    names, modules = _names(copies)
    strides = {t: _dense(graph.shapes[t], graph.strides[t]) for t in set(rows.averaged[averages])}
    owner = averages[copies.producers]
    gradients = graph.gradient_of[origins]
    return Graph(
        names=names,
        kinds=tuple(AVERAGE if o < 0 else graph.kinds[o] for o in origins.tolist()),
        signatures=_signatures(copies, strides),
        modules=modules,
        phases=np.where(
            averages, np.where(rows.returned, Phase.FORWARD, Phase.UPDATE), graph.phases[origins]
        ),
        flops=np.where(averages, copies.replicas * elements[rows.averaged], graph.flops[origins]),
        accessed_bytes=np.where(
            averages,
            (copies.replicas + 1) * graph.tensor_bytes[rows.averaged],
            graph.accessed_bytes[origins],
        ),
        colocation=_colocation(copies).astype(np.int32),
        gradient_of=np.where(
            averages | (gradients < 0), -1, copies.places[copies.views, gradients]
        ),
        device_kinds=tuple(() if o < 0 else graph.device_kinds[o] for o in origins.tolist()),
        producers=copies.producers.astype(np.int32),
        shapes=tuple(graph.shapes[t] for t in stands_for.tolist()),
        strides=tuple(
            strides[t] if mean else graph.strides[t]
            for t, mean in zip(stands_for.tolist(), owner.tolist(), strict=True)
        ),
        dtypes=tuple(graph.dtypes[t] for t in stands_for.tolist()),
        tensor_bytes=graph.tensor_bytes[stands_for],
        storages=_storages(copies).astype(np.int32),
        overwrites=graph.overwrites[stands_for] & ~owner,
        input_offsets=offsets.astype(np.int32),
        input_tensors=reads.astype(np.int32),
        outputs=_outputs(copies).astype(np.int32),
        control=copies.control.astype(np.int32),
    )


def _names(copies: Copies) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """[ops] names and modules."""
    one, graph = copies.one, copies.one.graph
    labels = _labels(one)
    names, modules, taken = [], [], Counter(graph.names)
    columns = zip(*(column.tolist() for column in copies.rows), strict=True)
    for origin, tower, averaged, returned in columns:
        if origin >= 0:
            name, module = graph.names[origin], graph.modules[origin]
            if tower >= 0 and (one.own[origin] or one.buffer_updates[origin]):
                name, module = own_name(tower, name), own_module(tower, module)
            elif tower >= 0:
                name = update_name(tower, name)
        else:
            maker = int(graph.producers[averaged])
            label, module = ("loss", graph.modules[maker]) if returned else labels[averaged]
            name = f"average/{label}"
            while taken[name]:
                name += "_"
            taken[name] += 1
        names.append(name)
        modules.append(module)
    return tuple(names), tuple(modules)


def _labels(one: Replica) -> dict[int, tuple[str, str]]:
    """gradient -> (name of the parameter that is updated by it, module)"""
    graph = one.graph
    parameters = {
        int(graph.storages[t]): graph.names[op]
        for op in np.flatnonzero(graph.is_source).tolist()
        if graph.kinds[op] == "parameter"
        for t in graph.outputs_of(op)
    }
    labels: dict[int, tuple[str, str]] = {}
    for op in np.flatnonzero(one.updates & ~one.buffer_updates).tolist():
        written = (parameters.get(int(graph.storages[t])) for t in graph.outputs_of(op))
        name = next(filter(None, written), graph.names[op])
        for tensor in graph.inputs_of(op).tolist():
            labels.setdefault(tensor, (name, graph.modules[op]))
    return labels


def _dense(shape: Shape, strides: Shape) -> Shape:
    """Strides of a mean: the gradient's own where its elements fill memory, else the default's."""
    expected = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        expected *= size
    return strides


def _signatures(copies: Copies, strides: dict[int, Shape]) -> tuple[str, ...]:
    """[ops] An update whose gradient gets another layout by averaging is no longer the same."""
    one, graph = copies.one, copies.one.graph
    changed = [t for t, dense in strides.items() if dense != graph.strides[t]]
    readers = graph.readers[np.isin(graph.input_tensors, changed)]
    relaid = set(readers[(one.updates & ~one.buffer_updates)[readers]].tolist())
    texts = {}
    for tensor in strides:
        shape, layout = (
            "x".join(map(str, sizes[tensor])) for sizes in (graph.shapes, graph.strides)
        )
        texts[tensor] = f"{AVERAGE}({copies.replicas} x {graph.dtypes[tensor]}[{shape}]({layout}))"
    return tuple(
        texts[t] if o < 0 else graph.signatures[o] + " of a dense mean" * (o in relaid)
        for o, t in zip(copies.rows.origins.tolist(), copies.rows.averaged.tolist(), strict=True)
    )


def _colocation(copies: Copies) -> Int64:
    """[ops] An id that something shared has is one for all towers, else each has its own. Updates
    of one parameter by several towers share one."""
    one, graph, rows = copies.one, copies.one.graph, copies.rows
    given = graph.colocation.astype(np.int64)
    count = int(given.max(initial=-1)) + 1
    together = np.zeros(count + 1, dtype=bool)
    together[given[(given >= 0) & ~one.own]] = True
    if not copies.synchronous:
        written = np.flatnonzero(graph.overwrites & one.updates[graph.producers])
        loose = written[given[graph.producers[written]] < 0]
        given[graph.producers[loose]] = count + one.first_writers[graph.storages[loose]]
    ids = np.where(rows.origins < 0, -1, given[rows.origins])
    apart = (ids >= 0) & one.own[rows.origins] & ~together[np.minimum(ids, count)]
    ids[apart] += (count + len(graph)) * (1 + rows.towers[apart])
    _, compact = np.unique(ids, return_inverse=True)
    return np.where(ids < 0, -1, compact.reshape(-1))


def _storages(copies: Copies) -> Int64:
    """[tensors] What is shared has one storage, all else one for each tower."""
    one, graph = copies.one, copies.one.graph
    count = graph.tensors
    storages = graph.storages[copies.stands_for].astype(np.int64)
    views = copies.views[copies.producers]
    means = np.flatnonzero(copies.rows.averaged[copies.producers] >= 0)
    storages += np.where(one.shared_storages[storages], 0, count * (1 + views))
    storages[means] = count * (1 + copies.replicas) + np.arange(len(means))
    return np.unique(storages, return_inverse=True)[1].reshape(-1)


def _outputs(copies: Copies) -> Int64:
    """The mean of a floating-point output, each tower's own of another, and of what an update
    made its last value."""
    one, graph = copies.one, copies.one.graph
    means = copies.means(returned=True)
    found: list[int] = []
    for tensor in graph.outputs.tolist():
        if means[tensor] >= 0:
            found.append(int(means[tensor]))
        elif one.own[graph.producers[tensor]]:
            found += copies.tensors[:, tensor].tolist()
        else:
            found.append(int(copies.tensors[:, tensor].max()))
    return np.array(found, dtype=np.int64)
