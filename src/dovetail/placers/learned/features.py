"""What a policy sees of a problem: numbers only, none of which names a graph, a size or a machine.

    Problem ──► per op ──► per group [groups, NUMBERS]      ┐
            └─► per device, per pair of devices             ├──► View
                relative to what this graph needs           ┘

Everything is relative to the graph's own totals, in logarithms to base ten, clipped and finite, so
that one policy serves graphs of any size on any machine. RL17's embedding (type, padded output
shapes, one-hot adjacency) and GDP's (type, shape, adjacency) are part of it: `kind_*`, `shapes`,
`sources` and `destinations`. Columns are named in `NUMBER_NAMES`, `DEVICE_NAMES`, `LINK_NAMES`.

A policy that decides every group by itself can only agree with itself through what the groups have
in common. *Positions* serve that, each a share of the work that lies before, 0 to 1, such that
equal cuts of a position are parts of equal work:

    order       in the order in which the forward pass runs; a gradient has its forward op's place
    level       by longest path from the inputs, then order: what may run at the same time is close
    module      modules by their first op: the steps of one unrolled layer stand together
    parameter   likewise, by the largest parameter that an op reads, or inherits from what it reads
    schedule    the middle of the interval of the device that a list schedule (`etf`) gives it,
                where that is a fast one; else -1. Not a share of work, but on the same scale
    expert      likewise, of the device that RL17's expert would choose (`expert`)

and devices stand on the same scale, each with an interval whose width is its share of the speed of
all fast devices: `cuts` says where each group's positions lie to each device's interval. Waves of
1/2 to 4 periods of positions and of the intervals' centres let a product of two linear maps find
that as well.

Differences: RL17 and GDP embed types, shapes and adjacency alone; costs, phases, positions (two of
which are a classical method's advice), devices and links are ours. A type is a hash into `BUCKETS`,
so that no vocabulary is to be kept.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.placers.learned.device_features import (
    DEVICE_NAMES,
    DEVICE_NUMBERS,
    LINK_NAMES,
    LINK_NUMBERS,
    WAVE_NAMES,
    look_at_devices,
    scale_of,
)
from dovetail.placers.learned.looking import LIMIT, Float64, Looking, relative, waves
from dovetail.placers.learned.positions import OP_POSITIONS
from dovetail.placers.learned.records import Float32, Int64, View
from dovetail.placers.problem import Problem

VERSION = 1
"""Of the columns: a policy file of another version does not fit."""
BUCKETS = 512
OUTPUTS, DIMENSIONS = 2, 4
SHAPES = OUTPUTS * DIMENSIONS
"""The two largest outputs of a group, four axes each (the first ones), missing ones 0."""
POSITIONS = (*OP_POSITIONS, "schedule", "expert")
NUMBER_NAMES: tuple[str, ...] = (
    "work", "work_share", "flops", "accessed_bytes", "ops",
    "forward", "backward", "update",
    "parameter_bytes", "parameter_share", "kept_bytes", "made_bytes",
    "in_bytes", "out_bytes", "in_edges", "out_edges", "traffic",
    "starts", "ends", "critical",
    "level_depth", "level_width", "level_place", "parameters_before", "layer",
    *POSITIONS,
    *(f"{position}_{wave}" for position in POSITIONS for wave in WAVE_NAMES),
    "graph_groups", "graph_traffic", "graph_memory", "graph_parallelism", "graph_training",
)  # fmt: skip
"""Columns of `View.numbers`.

work, flops, accessed_bytes, ops        of the group, by the mean group's; work is that of the
                                        fastest device that may run it
forward, backward, update               shares of the group's work
parameter_bytes, kept_bytes, made_bytes by the mean; parameters and state, `Problem.group_bytes`
                                        and `made_bytes`
in_bytes, out_bytes, in_edges, out_edges   between groups, by the mean
traffic                                 seconds to send its edges by the seconds of its work
starts, ends                            earliest start and end of its ops in a step without
                                        transfers on devices without number; critical: the longest
                                        path through it. All by the longest path
level_depth                             forward longest path in ops, 0 to 1
level_width, level_place                work of its level by the mean level's; share of that before
parameters_before                       share of parameter bytes before it in `parameter` order
layer                                   the outermost index in its modules' paths, 0 to 1; -1: none
graph_*                                 the same in every row: log10 of groups; seconds to send all
                                        by all work; all memory by that of the largest fast
                                        device; work by longest path; whether it trains
"""
NUMBERS = len(NUMBER_NAMES)
CUTS = 3 * len(POSITIONS)
ADVICE = tuple(position for position in POSITIONS if position not in OP_POSITIONS)
"""Positions that are classical planners' choices of a device."""
ADVICE_NUMBERS = [i for i, name in enumerate(NUMBER_NAMES) if name.split("_")[0] in ADVICE]
ADVICE_CUTS = [i for i in range(CUTS) if POSITIONS[i % len(POSITIONS)] in ADVICE]
"""Columns of `View.numbers` and of `cuts` that hold it."""


def look(problem: Problem) -> View:
    """The problem as policies see it. O(ops + reads + groups x devices)."""
    view = Looking(problem)
    offsets, buckets, shares = _kinds(problem)
    sources, destinations, edge_bytes = view.edges
    free = np.zeros(problem.groups.count, dtype=bool)
    free[problem.free] = True
    devices, links = look_at_devices(view)
    return View(
        kind_offsets=offsets,
        kind_buckets=buckets,
        kind_shares=shares,
        shapes=_shapes(problem),
        numbers=_numbers(view),
        sources=sources,
        destinations=destinations,
        edge_bytes=relative(edge_bytes, view.edge_mean),
        seconds=relative(view.seconds, view.work.mean()),
        allowed=problem.allowed,
        free=free,
        settled=problem.fastest,
        devices=devices,
        links=links,
    )


def column(name: str) -> int:
    """The index in `View.numbers` of a column of that name."""
    return NUMBER_NAMES.index(name)


def cuts(view: View) -> Float32:
    """[groups, devices, CUTS] where each position lies to each device's interval: whether within,
    the signed distance from its centre in widths, and the distance, both cut to 3."""
    first = column(POSITIONS[0])
    positions = view.numbers[:, None, first : first + len(POSITIONS)]
    centre, width = (
        view.devices[:, [DEVICE_NAMES.index(name)]][None] for name in ("centre", "width")
    )
    distance = (positions - centre) / np.maximum(width, 1e-2)
    distance = np.clip(np.where(width > 0, distance, LIMIT), -LIMIT, LIMIT)
    inside = np.abs(distance) <= 0.5
    parts = np.concatenate([inside, distance, np.abs(distance)], axis=2)
    return parts.astype(view.numbers.dtype)


def _by_mean(values: NDArray[np.generic]) -> Float32:
    return relative(values, float(np.mean(values.astype(np.float64))))


def _numbers(view: Looking) -> Float32:
    """[groups, NUMBERS]"""
    graph, problem, places = view.graph, view.problem, view.places
    groups = problem.groups.count
    phases = [view.sums(np.where(graph.phases == p, view.op_seconds, 0.0)) for p in (1, 2, 3)]
    busy = np.maximum(np.sum(phases, axis=0), 1e-300)
    parameters = view.sums(_parameter_bytes(graph))
    sources, destinations, edge_bytes = view.edges
    sent = np.bincount(sources, weights=edge_bytes, minlength=groups)
    got = np.bincount(destinations, weights=edge_bytes, minlength=groups)
    rate = float(view.links[0].sum() / max(1, np.count_nonzero(view.links[0])))
    # Every op weighs a little, so that groups of ops that cost nothing have a place too.
    weights = view.op_seconds + np.where(graph.is_source, 0.0, 1e-9 * view.op_seconds.mean())
    positions = np.stack(
        [*(view.means(p, weights) for p in places.positions), *_advised(view)], axis=1
    )
    columns = [
        _by_mean(view.work),
        view.work / max(view.work.sum(), 1e-300),
        _by_mean(view.sums(graph.flops)),
        _by_mean(view.sums(graph.accessed_bytes)),
        _by_mean(view.sums(~graph.is_source)),
        *(phase / busy for phase in phases),
        _by_mean(parameters),
        parameters / max(parameters.sum(), 1.0),
        _by_mean(problem.group_bytes),
        _by_mean(problem.made_bytes),
        _by_mean(got),
        _by_mean(sent),
        _by_mean(np.bincount(destinations, minlength=groups)),
        _by_mean(np.bincount(sources, minlength=groups)),
        relative((got + sent) * rate / np.maximum(view.work, 1e-300), 1.0),
        *(view.means(of_ops, weights) for of_ops in places.columns),
        positions,
        waves(positions).reshape(groups, -1),
        *(np.full(groups, value) for value in _whole(view, rate)),
    ]
    numbers = np.concatenate([np.reshape(c, (groups, -1)) for c in columns], axis=1)
    return np.nan_to_num(numbers.astype(np.float32))


def _advised(view: Looking) -> list[Float64]:
    """[groups] the middle of the interval of the device that each method chose; -1: of none."""
    scale = scale_of(view)
    middles = np.append(np.where(scale.width > 0, scale.centre, -1.0), -1.0)
    return [middles[view.listed], middles[view.expected]]


def _whole(view: Looking, rate: float) -> tuple[float, ...]:
    """The columns graph_*: of the graph as a whole."""
    problem, work = view.problem, max(float(view.work.sum()), 1e-300)
    largest = float(problem.capacities[view.fast].max(initial=1))
    return (
        float(np.log10(problem.groups.count)),
        float(relative(np.array(view.edges[2].sum() * rate), work)),
        float(relative(problem.group_bytes.sum(), largest)),
        float(relative(np.array(work), max(view.places.longest_seconds, 1e-300))),
        float(problem.graph.training),
    )


def _parameter_bytes(graph: Graph) -> Float64:
    """[ops] bytes of each parameter and of each optimizer's state, at its source."""
    owned = graph.is_source & (graph.residences >= 0)
    owned |= np.array([kind in ("parameter", "state") for kind in graph.kinds])
    sizes = np.bincount(graph.producers, weights=graph.tensor_bytes, minlength=len(graph))
    return np.where(owned, sizes, 0.0)


def _kinds(problem: Problem) -> tuple[Int64, Int64, Float32]:
    """CSR of the kinds of op in each group; a group of sources alone has the sources'."""
    graph, of_op = problem.graph, problem.groups.of_op
    hashes = {kind: zlib.crc32(kind.encode()) % BUCKETS for kind in set(graph.kinds)}
    buckets = np.array([hashes[kind] for kind in graph.kinds], dtype=np.int64)
    runs = np.bincount(of_op, weights=~graph.is_source, minlength=problem.groups.count) > 0
    counted = ~graph.is_source | ~runs[of_op]
    pairs, counts = np.unique(of_op[counted] * BUCKETS + buckets[counted], return_counts=True)
    rows = pairs // BUCKETS
    sizes = np.bincount(rows, weights=counts, minlength=problem.groups.count)
    offsets = np.searchsorted(rows, np.arange(problem.groups.count + 1)).astype(np.int64)
    return offsets, (pairs % BUCKETS).astype(np.int64), (counts / sizes[rows]).astype(np.float32)


def cut_placements(view: View, *, advice: bool = True) -> NDArray[np.int32]:
    """[positions, groups] each position cut into contiguous parts: the nearest interval; of advice
    that is the adviser's own placement. `advice`: with those."""
    chosen = [i for i, position in enumerate(POSITIONS) if advice or position not in ADVICE]
    distance = cuts(view)[:, :, [2 * len(POSITIONS) + i for i in chosen]]
    distance = np.where(view.allowed[:, :, None], distance, np.inf)
    return np.where(view.free, distance.argmin(axis=1).T, view.settled).astype(np.int32)


def _shapes(problem: Problem) -> Float32:
    """[groups, SHAPES] axes of the largest outputs, as log10(1 + size) / 3."""
    graph, of_op = problem.graph, problem.groups.of_op
    made = np.flatnonzero(~graph.is_source[graph.producers] & (graph.phases[graph.producers] < 2))
    if not len(made):
        made = np.arange(graph.tensors)
    owners = of_op[graph.producers[made]]
    order = np.lexsort((made, -graph.tensor_bytes[made], owners))
    owners, made = owners[order], made[order]
    first = np.searchsorted(owners, np.arange(problem.groups.count))
    place = np.arange(len(made)) - first[owners]
    found = np.zeros((problem.groups.count, OUTPUTS, DIMENSIONS), np.float32)
    distinct: dict[tuple[int, ...], list[float]] = {}
    for output in range(OUTPUTS):
        at = np.flatnonzero(place == output)
        rows = []
        for tensor in made[at].tolist():
            shape = graph.shapes[tensor]
            if shape not in distinct:
                axes = [float(np.log10(1 + size)) / 3 for size in shape[:DIMENSIONS]]
                distinct[shape] = axes + [0.0] * (DIMENSIONS - len(axes))
            rows.append(distinct[shape])
        if rows:
            found[owners[at], output] = rows
    return found.reshape(problem.groups.count, SHAPES)


__all__ = [
    "ADVICE", "ADVICE_CUTS", "ADVICE_NUMBERS", "BUCKETS", "CUTS", "DEVICE_NAMES",
    "DEVICE_NUMBERS", "LINK_NAMES", "LINK_NUMBERS", "NUMBERS", "NUMBER_NAMES", "POSITIONS",
    "SHAPES", "VERSION", "column", "cut_placements", "cuts", "look", "waves",
]  # fmt: skip
