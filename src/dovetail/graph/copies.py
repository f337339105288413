"""Tells which ops of a graph are copies of others, by their names and kinds alone.

So this works for a graph that was saved and loaded too. `transforms` makes such graphs.

    tower.2/lstm.0/addmm          module tower.2.lstm.0        what tower 2 runs for itself
    average/lstm.0.bias           kind "dovetail.average"      the mean of N tensors, one a tower
    lstm.0.bias/adam              synchronous towers           the one update
    lstm.0.bias/adam/tower.2      asynchronous towers          the update by tower 2's gradient
    micro.2/lstm.0/addmm          module lstm.0                what micro-batch 2 runs
    micro.2/lstm.0/addmm/again    module lstm.0                the same, recomputed
    accumulate.2/lstm.0.bias      kind "dovetail.accumulate"   its gradient added to those before
    arange/copy.1                 its origin's kind            a shared computation's first copy
"""

import re

import numpy as np

from dovetail.graph.records import Bool, Graph, Int32, Phase
from dovetail.runtime.compiling import kernel

AVERAGE = "dovetail.average"
"""The kind of an op that averages one tensor of each tower or micro-batch. Every graph of several
has one, which averages the losses."""
ACCUMULATE = "dovetail.accumulate"
"""The kind of an op that adds a micro-batch's gradient to those of the micro-batches before it."""
WRITTEN = "dovetail.written_"
"""The kind of an update begins so if it first writes what the model has written over the
parameter."""
ADD = "aten.add"
"""The kind of an op that may sum gradients of several stages."""
# More digits than these are no tower's number, and Python refuses to convert very many.
_OF_TOWER = re.compile(r"tower\.([0-9]{1,9})/")
_OF_MICRO_BATCH = re.compile(r"^micro\.[0-9]+/")
_COPY = re.compile(r"(.*)/copy\.\d+$", re.DOTALL)


def tower_count(graph: Graph) -> int:
    """Return the number of towers; 1 for a graph that was not replicated."""
    return max(1, 1 + int(towers_of(graph).max(initial=0)))


def towers_of(graph: Graph) -> Int32:
    """Return [ops] the tower that has the op or input for itself; -1: all towers share it, as they
    share updates."""
    if AVERAGE not in graph.kinds:
        return np.full(len(graph), -1, dtype=np.int32)
    matches = map(_OF_TOWER.match, graph.names)
    return np.array([int(match[1]) if match else -1 for match in matches], dtype=np.int32)


def is_of_first_micro_batch(graph: Graph) -> Bool:
    """Return [ops] False for what another micro-batch than the first has for itself, and for ops
    that are computed again. In a graph without micro-batches it is True."""
    is_first = np.ones(len(graph), dtype=bool)
    for op, (name, module) in enumerate(zip(graph.names, graph.modules, strict=True)):
        micro_batch = _OF_MICRO_BATCH.match(name)
        # A module may be named micro, too, where there are none.
        if micro_batch is not None and not name.startswith(f"{module}/"):
            is_first[op] = micro_batch[0] == "micro.0/" and not name.endswith("/again")
    return is_first


def names_in_one(graph: Graph) -> tuple[str, ...]:
    """Return [ops] the name that each op has in one micro-batch's graph; its own in a graph without
    micro-batches, and for accumulations."""
    if ACCUMULATE not in graph.kinds:
        return graph.names
    return tuple(_OF_MICRO_BATCH.sub("", name).removesuffix("/again") for name in graph.names)


def sums_of_gradients(graph: Graph) -> Bool:
    """Return [ops] True for ops that add two gradients for an update, or for another such op.

    With some stages they run once a step, and with others once for each micro-batch.
    """
    sums = np.zeros(len(graph), dtype=bool)
    updates = graph.phases == Phase.UPDATE
    outputs = set(graph.outputs.tolist())
    for op in reversed(np.flatnonzero(graph.phases == Phase.BACKWARD).tolist()):
        parts = graph.inputs_of(op)
        if graph.kinds[op] != ADD or len(parts) != 2:
            continue
        (result,) = graph.outputs_of(op)
        readers = graph.consumers_of(result)
        sums[op] = (
            all(graph.shapes[part] == graph.shapes[result] for part in parts.tolist())
            and result not in outputs
            and len(readers) > 0
            and bool((updates | sums)[readers].all())
            and bool((graph.phases[graph.producers[parts]] == Phase.BACKWARD).all())
        )
    return sums


def origins_in(graph: Graph) -> Int32:
    """Return [ops] the op that each op is a copy of, by its name; its own index if it is none."""
    origins = np.arange(len(graph), dtype=np.int32)
    for op in np.flatnonzero(graph.phases == Phase.FORWARD).tolist():
        match = _COPY.match(graph.names[op])
        origin = graph.index.get(match[1], -1) if match else -1
        if origin >= 0 and graph.signatures[origin] == graph.signatures[op]:
            origins[op] = origin
    return origins


# Which ops may be copied: computations that many parts of a network share and that any device can
# repeat, such as positions, rotary cosines and attention masks.
#
#     arange ─► cos ─┬─► layer 0          arange ─► cos ─► layer 0
#                    └─► layer 1          arange ─► cos ─► layer 1
#
# These ops read inputs, constants and buffers, but no parameter and no buffer that the step writes.
# They draw no random numbers, and no gradient goes through them. So a copy beside each reader gives
# the same bits, and the readers need not be on one device.


_RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal_|uniform|exponential|poisson")
_OWNED = ("parameter", "state")


def shareable(graph: Graph) -> Bool:
    """Return [ops] True for forward ops that may be repeated beside each reader.

    Takes O(ops + reads).
    """
    kinds, of_op = np.unique(np.array(graph.kinds), return_inverse=True)
    random = np.array([_RANDOM.search(kind) is not None for kind in kinds])[of_op.reshape(-1)]
    owned = np.isin(kinds, _OWNED)[of_op.reshape(-1)]
    written = np.zeros(int(graph.storages.max(initial=-1)) + 1, dtype=bool)
    written[graph.storages[graph.overwrites]] = True
    writes = np.zeros(len(graph), dtype=bool)
    writes[graph.producers[written[graph.storages]]] = True
    has_gradient = np.zeros(len(graph), dtype=bool)
    has_gradient[graph.gradient_of[graph.gradient_of >= 0]] = True
    forward = (graph.phases == Phase.FORWARD) & ~has_gradient & ~random
    may_be_copied = np.where(graph.is_source, ~owned & ~writes, forward)
    _leave_out_readers(may_be_copied, graph.input_offsets, graph.producers[graph.input_tensors])
    return may_be_copied & ~graph.is_source


@kernel
def _leave_out_readers(chosen: Bool, input_offsets: Int32, makers: Int32) -> None:
    """Leave out what reads something that is left out; ops come after those that they read."""
    for op in range(len(chosen)):
        for read in range(input_offsets[op], input_offsets[op + 1]):
            if not chosen[makers[read]]:
                chosen[op] = False


def spread_out(graph: Graph) -> Bool:
    """Return [ops] True for shareable ops that modules other than their own read."""
    is_shareable = shareable(graph)
    modules = np.unique(np.array(graph.modules), return_inverse=True)[1].reshape(-1)
    producers = graph.producers[graph.input_tensors]
    elsewhere = modules[producers] != modules[graph.readers]
    read_elsewhere = np.zeros(len(graph), dtype=bool)
    read_elsewhere[producers[elsewhere & ~graph.is_source[graph.readers]]] = True
    return is_shareable & read_elsewhere
