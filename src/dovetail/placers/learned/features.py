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

import re
import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph, Phase
from dovetail.placers.budget import Budget
from dovetail.placers.etf import etf_schedule
from dovetail.placers.expert import expert
from dovetail.placers.learned.records import Float32, ProblemView
from dovetail.placers.list_scheduling import limits_of, tasks_of
from dovetail.placers.problem import PlacementProblem

# Where each op stands in its network: see `features` for what the positions are for.
#
# Times and levels are longest paths over the ops in their order, in O(ops + reads).


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


# What several features need of a problem, in seconds and bytes, and how they become numbers.


LIMIT = 3.0
"""Relative numbers are cut to 10^-3 to 10^3."""
WAVES = 4


class ProblemFigures:
    """What several columns need, in seconds and bytes."""

    def __init__(self, problem: PlacementProblem) -> None:
        graph, of_op = problem.graph, problem.groups.of_op
        self.problem, self.graph, self.of_op = problem, graph, of_op
        op_seconds = np.where(
            np.isfinite(problem.costs.compute_seconds), problem.costs.compute_seconds, np.inf
        ).min(axis=1)
        self.op_seconds = np.where(graph.is_source | np.isinf(op_seconds), 0.0, op_seconds)
        finite = np.isfinite(problem.work_seconds) & problem.allowed
        slowest = np.where(finite, problem.work_seconds, 0.0).max(axis=1, keepdims=True)
        self.seconds = np.where(finite, problem.work_seconds, slowest)  # [groups, devices]
        best = np.where(finite, problem.work_seconds, np.inf).min(axis=1)
        self.work = np.where(np.isfinite(best), best, 0.0)  # [groups]
        sources, destinations, edge_bytes = problem.edges
        order = np.lexsort((sources, destinations))
        self.edges = (
            sources[order].astype(np.int64),
            destinations[order].astype(np.int64),
            edge_bytes[order],
        )
        self.edge_mean = float(edge_bytes.mean()) if len(edge_bytes) else 1.0
        self.links = link_rates(problem)
        self.places: OpPlaces = op_places(graph, self.op_seconds)

    def sums(self, of_ops: NDArray[np.generic]) -> Float64:
        """[groups]"""
        sums = np.bincount(self.of_op, weights=of_ops, minlength=self.problem.groups.count)
        return np.asarray(sums, dtype=np.float64)

    def means(self, of_ops: Float64, weights: Float64) -> Float64:
        """[groups] weighted; 0.5 where nothing weighs."""
        total = self.sums(weights)
        means = self.sums(of_ops * weights) / np.maximum(total, 1e-300)
        return np.where(total > 0, means, 0.5)

    @cached_property
    def fast(self) -> NDArray[np.bool_]:
        """[devices] at least a quarter of the best speed."""
        return np.asarray(self.speeds >= 0.25 * self.speeds.max())

    @cached_property
    def speeds(self) -> Float64:
        """[devices] 1: as fast as the best device for all that it may run; 0: runs nothing."""
        allowed = self.problem.allowed
        best = np.where(allowed, self.work[:, None], 0.0).sum(axis=0)
        own = np.where(allowed, self.seconds, 0.0).sum(axis=0)
        return np.where(allowed.any(axis=0), best / np.maximum(own, 1e-300), 0.0)


def relative(values: NDArray[np.generic], reference: float) -> Float32:
    """log10(values / reference), cut; what is 0 counts as least."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        logs = np.log10(np.asarray(values, dtype=np.float64) / max(reference, 1e-300))
    logs = np.nan_to_num(logs, nan=0.0, posinf=LIMIT, neginf=-LIMIT)
    return np.clip(logs, -LIMIT, LIMIT).astype(np.float32)


def waves(positions: Float64) -> Float64:
    """[..., 2 x WAVES] sines and cosines of 1/2, 1, 2 and 4 periods over 0 to 1."""
    angles = positions[..., None] * np.pi * 2.0 ** np.arange(WAVES)
    both = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return np.asarray(both.reshape(*positions.shape, 2 * WAVES))


def link_rates(problem: PlacementProblem) -> tuple[Float64, Float64, NDArray[np.bool_], Float64]:
    """[devices, devices] seconds a byte, latency in seconds, whether direct, links on the channel;
    through the host where there is no link. The diagonal is 0."""
    machine = problem.machine
    index, host, count = machine.link_index, machine.host_index, len(machine.devices)
    on_channel: dict[str, int] = {}
    for link in machine.links:
        on_channel[link.channel] = on_channel.get(link.channel, 0) + 1
    per_byte, latency = np.zeros((count, count)), np.zeros((count, count))
    shared = np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            hops = [index[a, b]] if index[a, b] >= 0 else [index[a, host], index[host, b]]
            links = [machine.links[hop] for hop in hops]
            per_byte[a, b] = sum(1 / link.bandwidth_bytes_per_second for link in links)
            latency[a, b] = sum(link.latency_seconds for link in links)
            shared[a, b] = max(on_channel[link.channel] for link in links)
    return per_byte, latency, index >= 0, shared


# Devices and links as a policy sees them: relative to what the graph needs.
#
# Columns are named in `DEVICE_NAMES` and `LINK_NAMES`. Devices that are alike in all else are told
# apart by their place among their like, and by their interval on the scale of positions: see
# `features`.


WAVE_NAMES = tuple(f"{part}{k}" for k in range(WAVES) for part in ("sin", "cos"))
DEVICE_NAMES: tuple[str, ...] = (
    "speed", "flops", "bandwidth", "overhead", "memory", "memory_need",
    "cpu", "gpu", "host", "is_host", "allowed", "fast",
    "out_bandwidth", "in_bandwidth",
    "like_place", "like_share", "centre", "width",
    *WAVE_NAMES,
    "count",
)  # fmt: skip
"""Columns of `ProblemView.devices`.

speed                   work of all groups that it may run: the best device's seconds by its own
flops, bandwidth        by the machine's best; memory by the machine's largest that runs anything
overhead                seconds an op costs anyhow, by the mean op's work
memory_need             what the graph keeps by what the device has
allowed                 share of groups that it may run
fast                    1: at least a quarter of the best speed
out_, in_bandwidth      mean over links, in mean edges a mean group's work
like_place, like_share  place among devices that are alike, and one by their number
centre, width           its interval on the scale of positions; the slow have none: 1 and 0
sin0 .. cos3            waves of the centre
count                   log10 of devices that run anything
"""
LINK_NAMES: tuple[str, ...] = ("same", "direct", "seconds", "latency", "shared", "distance")
"""Columns of `ProblemView.links`: the device itself; a link of its own (else through the host);
seconds of a mean edge and the latency by a mean group's work; links on its channel; difference of
their centres."""
DEVICE_NUMBERS, LINK_NUMBERS = len(DEVICE_NAMES), len(LINK_NAMES)


@dataclass(frozen=True)
class Scale:
    """[devices] each device's interval on the scale of positions, and its place among its like."""

    centre: Float64
    width: Float64
    like_place: Float64
    like_share: Float64


def scale_of(view: ProblemFigures) -> Scale:
    machine, speeds = view.problem.machine, view.speeds
    weights = np.where(view.fast, speeds, 0.0)
    order = np.lexsort((np.arange(len(speeds)), -np.round(speeds, 3)))
    width = weights / max(weights.sum(), 1e-300)
    centre = np.ones(len(speeds))
    centre[order] = np.cumsum(width[order]) - width[order] / 2
    centre = np.where(width > 0, centre, 1.0)
    like = [
        (d.kind, d.model, d.memory_bytes, tuple(sorted(d.flops_per_second.items())))
        for d in machine.devices
    ]
    counts = np.array([like.count(one) for one in like], dtype=np.float64)
    before = np.array([like[:i].count(one) for i, one in enumerate(like)])
    return Scale(centre, width, (before + 0.5) / counts, 1 / counts)


def look_at_devices(view: ProblemFigures) -> tuple[Float32, Float32]:
    """([devices, DEVICE_NUMBERS], [devices, devices, LINK_NUMBERS])"""
    problem, machine = view.problem, view.problem.machine
    scale, allowed = scale_of(view), problem.allowed
    runs = allowed.any(axis=0)
    # Without int8, whose rates no policy was trained on and which no graph's costs use.
    inexact = [
        [rate for dtype, rate in d.flops_per_second.items() if dtype != "int8"]
        for d in machine.devices
    ]
    flops = np.array([max(rates, default=0.0) for rates in inexact])
    bandwidth = np.array([d.bandwidth_bytes_per_second for d in machine.devices])
    overhead = np.array([d.op_overhead_seconds for d in machine.devices])
    ops = max(1, int((~view.graph.is_source).sum()))
    memory = problem.capacities.astype(np.float64)
    kept = float(problem.group_bytes.sum())
    unit = max(float(view.work.mean()), 1e-300)
    per_byte, latency, direct, shared = view.links
    edge_seconds = per_byte * view.edge_mean + latency
    others = max(1, len(machine.devices) - 1)
    columns = [
        relative(view.speeds, 1.0),
        relative(flops, float(flops.max())),
        relative(bandwidth, float(bandwidth[runs].max(initial=0.0))),
        relative(overhead, view.op_seconds.sum() / ops),
        relative(memory, float(memory[runs].max(initial=0.0))),
        relative(kept / np.maximum(memory, 1.0), 1.0),
        *([d.kind == kind for d in machine.devices] for kind in ("cpu", "gpu", "host")),
        np.arange(len(machine.devices)) == machine.host_index,
        allowed.mean(axis=0),
        view.fast,
        relative(unit / np.maximum(edge_seconds.sum(axis=1) / others, 1e-300), 1.0),
        relative(unit / np.maximum(edge_seconds.sum(axis=0) / others, 1e-300), 1.0),
        scale.like_place,
        scale.like_share,
        scale.centre,
        scale.width,
        waves(scale.centre),
        np.full(len(machine.devices), np.log10(max(1, int(runs.sum())))),
    ]
    count = len(machine.devices)
    numbers = np.concatenate([np.reshape(c, (count, -1)) for c in columns], axis=1)
    links = np.stack(
        [
            np.eye(count),
            direct,
            np.where(np.eye(count) > 0, -LIMIT, relative(edge_seconds, unit)),
            np.where(np.eye(count) > 0, -LIMIT, relative(latency, unit)),
            np.log10(np.maximum(shared, 1.0)),
            scale.centre[None] - scale.centre[:, None],
        ],
        axis=2,
    )
    return np.nan_to_num(numbers.astype(np.float32)), np.nan_to_num(links.astype(np.float32))


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
"""Columns of `ProblemView.numbers`.

work, flops, accessed_bytes, ops        of the group, by the mean group's; work is that of the
                                        fastest device that may run it
forward, backward, update               shares of the group's work
parameter_bytes, kept_bytes, made_bytes by the mean; parameters and state, and of the problem its
                                        `group_bytes` and `made_bytes`
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
"""Columns of `ProblemView.numbers` and of `cuts` that hold it."""


def look(problem: PlacementProblem) -> ProblemView:
    """The problem as policies see it. O(ops + reads + groups x devices)."""
    view = ProblemFigures(problem)
    offsets, buckets, shares = _kinds(problem)
    sources, destinations, _ = view.edges
    free = np.zeros(problem.groups.count, dtype=bool)
    free[problem.free] = True
    devices, links = look_at_devices(view)
    return ProblemView(
        kind_offsets=offsets,
        kind_buckets=buckets,
        kind_shares=shares,
        shapes=_shapes(problem),
        numbers=_numbers(view),
        sources=sources,
        destinations=destinations,
        seconds=relative(view.seconds, view.work.mean()),
        allowed=problem.allowed,
        free=free,
        settled=problem.fastest,
        devices=devices,
        links=links,
    )


def column(name: str) -> int:
    """The index in `ProblemView.numbers` of a column of that name."""
    return NUMBER_NAMES.index(name)


def cuts(view: ProblemView) -> Float32:
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


def _numbers(view: ProblemFigures) -> Float32:
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


def _advised(view: ProblemFigures) -> list[Float64]:
    """[groups] the middle of the interval of the device that each method chose; -1: of none. The
    methods are `etf` over the fastest devices, and `expert`."""
    scale, problem = scale_of(view), view.problem
    middles = np.append(np.where(scale.width > 0, scale.centre, -1.0), -1.0)
    limits = limits_of(problem, len(problem.device_sets) - 1)
    listed = etf_schedule(tasks_of(problem), limits).placed
    return [middles[listed], middles[expert(problem, Budget())]]


def _whole(view: ProblemFigures, rate: float) -> tuple[float, ...]:
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


def _kinds(problem: PlacementProblem) -> tuple[Int64, Int64, Float32]:
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


def cut_placements(view: ProblemView, *, advice: bool = True) -> NDArray[np.int32]:
    """[positions, groups] each position cut into contiguous parts: the nearest interval; of advice
    that is the adviser's own placement. `advice`: with those."""
    chosen = [i for i, position in enumerate(POSITIONS) if advice or position not in ADVICE]
    distance = cuts(view)[:, :, [2 * len(POSITIONS) + i for i in chosen]]
    distance = np.where(view.allowed[:, :, None], distance, np.inf)
    return np.where(view.free, distance.argmin(axis=1).T, view.settled).astype(np.int32)


def _shapes(problem: PlacementProblem) -> Float32:
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
