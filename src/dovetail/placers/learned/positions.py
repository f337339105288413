"""Where each op stands in its network: see `features` for what the positions are for.

Times and levels are longest paths over the ops in their order, in O(ops + reads).
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph, Phase

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

OP_POSITIONS = ("order", "level", "module", "parameter")
_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True)
class OpPlaces:
    """positions   [OP_POSITIONS][ops] 0 to 1
    columns      [columns][ops] starts, ends, critical, level_depth, level_width, level_place,
                 parameters_before, layer: see `features.NUMBER_NAMES`
    longest_seconds   the longest path through the graph
    """

    positions: tuple[Float64, ...]
    columns: tuple[Float64, ...]
    longest_seconds: float


def op_places(graph: Graph, seconds: Float64) -> OpPlaces:
    """Positions of all ops; `seconds` [ops] is the work of each."""
    starts, ends, after = _times(graph, seconds)
    longest = max(float(ends.max(initial=0.0)), 1e-300)
    forward = _forward(graph)
    partner = _partners(graph, forward)
    levels = _levels(graph, forward)[partner]
    order = _cumulated(np.flatnonzero(forward), seconds, len(graph))[partner]
    by_level = np.lexsort((partner, levels))
    module_keys = _module_ranks(graph, partner)
    parameter, parameters_before = _parameter_ranks(graph, partner)
    width, place = _within_levels(levels, seconds)
    return OpPlaces(
        positions=(
            order,
            _cumulated(by_level, seconds, len(graph)),
            _cumulated(np.lexsort((partner, module_keys)), seconds, len(graph)),
            _cumulated(np.lexsort((partner, parameter)), seconds, len(graph)),
        ),
        columns=(
            starts / longest,
            ends / longest,
            (starts + seconds + after) / longest,
            levels / max(1, int(levels.max(initial=0))),
            width,
            place,
            parameters_before,
            _layers(graph),
        ),
        longest_seconds=longest,
    )


def _cumulated(ops: Int64, seconds: Float64, count: int) -> Float64:
    """[count] share of these ops' seconds before the middle of each, in their order; others 0."""
    work = seconds[ops]
    total = max(float(work.sum()), 1e-300)
    places = np.zeros(count)
    places[ops] = (np.cumsum(work) - work / 2) / total
    return places


def _times(graph: Graph, seconds: Float64) -> tuple[Float64, Float64, Float64]:
    """[ops] earliest start and end without transfers, and the longest path after the end."""
    offsets = graph.input_offsets.tolist()
    inputs = graph.producers[graph.input_tensors].tolist()
    costs = seconds.tolist()
    ends, starts = [0.0] * len(graph), [0.0] * len(graph)
    for op, cost in enumerate(costs):
        start = 0.0
        for before in inputs[offsets[op] : offsets[op + 1]]:
            if ends[before] > start:
                start = ends[before]
        starts[op], ends[op] = start, start + cost
    after = [0.0] * len(graph)
    for op in range(len(graph) - 1, -1, -1):
        tail = after[op] + costs[op]
        for before in inputs[offsets[op] : offsets[op + 1]]:
            if after[before] < tail:
                after[before] = tail
    return np.array(starts), np.array(ends), np.array(after)


def _forward(graph: Graph) -> NDArray[np.bool_]:
    """[ops] the forward pass; without one, all that runs."""
    forward = graph.phases == Phase.FORWARD
    return np.asarray(forward if forward.any() else ~graph.is_source)


def _partners(graph: Graph, forward: NDArray[np.bool_]) -> Int64:
    """[ops] the forward op whose place each takes: itself; of which it is the gradient; else the
    first partner among what it reads. A source's is its first reader's, and so an update's, which
    reads its parameter, is no later."""
    offsets = graph.input_offsets.tolist()
    inputs = graph.producers[graph.input_tensors].tolist()
    is_forward, gradients = forward.tolist(), graph.gradient_of.tolist()
    is_source = graph.is_source.tolist()
    first = np.full(len(graph), len(graph), dtype=np.int64)
    np.minimum.at(first, graph.producers[graph.input_tensors], graph.readers)
    first_reader = first.tolist()
    partners = [-1] * len(graph)
    for op in range(len(graph)):
        if is_forward[op]:
            partners[op] = op
        elif gradients[op] >= 0 and is_forward[gradients[op]]:
            partners[op] = gradients[op]
        elif is_source[op]:
            reader = first_reader[op]
            if reader < len(partners) and is_forward[reader]:
                partners[op] = reader
        else:
            read = inputs[offsets[op] : offsets[op + 1]]
            # Sums of gradients belong to what is summed last, which comes first in the network.
            partners[op] = min((partners[b] for b in read if partners[b] >= 0), default=-1)
    found = np.array(partners, dtype=np.int64)
    lost = int(np.flatnonzero(forward)[0]) if forward.any() else 0
    return np.where(found < 0, lost, found)


def _levels(graph: Graph, forward: NDArray[np.bool_]) -> Int64:
    """[ops] longest path in ops from the start of the forward pass."""
    offsets = graph.input_offsets.tolist()
    inputs = graph.producers[graph.input_tensors].tolist()
    is_forward = forward.tolist()
    levels = [0] * len(graph)
    for op in np.flatnonzero(forward).tolist():
        level = 0
        for before in inputs[offsets[op] : offsets[op + 1]]:
            if is_forward[before] and levels[before] >= level:
                level = levels[before] + 1
        levels[op] = level
    return np.array(levels, dtype=np.int64)


def _within_levels(levels: Int64, seconds: Float64) -> tuple[Float64, Float64]:
    """[ops] log10 of its level's work by the mean level's, and the share of that before it."""
    work = np.bincount(levels, weights=seconds)
    width = np.log10(np.maximum(work, 1e-300) / max(float(work.mean()), 1e-300))
    order = np.argsort(levels, kind="stable")
    sums = np.cumsum(seconds[order])
    before = np.concatenate([[0.0], np.cumsum(work)])[levels[order]]
    place = np.empty(len(levels))
    place[order] = (sums - seconds[order] / 2 - before) / np.maximum(work[levels[order]], 1e-300)
    return np.clip(width, -3.0, 3.0)[levels], np.clip(place, 0.0, 1.0)


def _module_ranks(graph: Graph, partner: Int64) -> Int64:
    """[ops] rank of each op's module by where its first forward op stands."""
    codes = {module: code for code, module in enumerate(dict.fromkeys(graph.modules))}
    of_op = np.array([codes[module] for module in graph.modules], dtype=np.int64)
    of_op = of_op[partner]
    first = np.full(len(codes), len(graph), dtype=np.int64)
    np.minimum.at(first, of_op, partner)
    return first[of_op]


def _parameter_ranks(graph: Graph, partner: Int64) -> tuple[Int64, Float64]:
    """([ops] place of the first forward op of each op's family, [ops] share of parameter bytes
    that families before it have). A family is the ops that read one parameter, the largest that
    they read, and what follows on them until the next."""
    producers = graph.producers[graph.input_tensors]
    is_parameter = np.array([kind == "parameter" for kind in graph.kinds])
    reads = np.flatnonzero(is_parameter[producers])
    order = reads[np.argsort(graph.tensor_bytes[graph.input_tensors[reads]], kind="stable")]
    family = np.full(len(graph), -1, dtype=np.int64)
    family[graph.readers[order]] = producers[order]  # of several the largest comes last
    offsets, inputs = graph.input_offsets.tolist(), producers.tolist()
    families = family.tolist()
    for op in np.flatnonzero(family < 0).tolist():
        read = inputs[offsets[op] : offsets[op + 1]]
        families[op] = max((families[b] for b in read), default=-1)
    of_op = np.array(families, dtype=np.int64)[partner] + 1
    first = np.full(len(graph) + 1, len(graph), dtype=np.int64)
    np.minimum.at(first, of_op, partner)
    sizes = np.bincount(graph.producers, weights=graph.tensor_bytes, minlength=len(graph))
    sizes = np.concatenate([[0.0], np.where(is_parameter, sizes, 0.0)])
    by_first = np.argsort(first, kind="stable")
    before = np.empty(len(sizes))
    before[by_first] = np.cumsum(sizes[by_first]) - sizes[by_first] / 2
    return first[of_op], before[of_op] / max(float(sizes.sum()), 1.0)


def _layers(graph: Graph) -> Float64:
    """[ops] the outermost index in the module's path, among those of its container, 0 to 1."""
    found: dict[str, tuple[str, int]] = {}
    last: dict[str, int] = {}
    for module in set(graph.modules):
        match = _INDEX.search(module)
        if match is not None:
            container, index = module[: match.start()], int(match[1])
            found[module] = (container, index)
            last[container] = max(last.get(container, 0), index)
    places = {m: (index + 0.5) / (last[c] + 1) for m, (c, index) in found.items()}
    return np.array([places.get(module, -1.0) for module in graph.modules])
