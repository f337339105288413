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
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph, Phase
from dovetail.placers.budget import Budget
from dovetail.placers.etf import etf_schedule
from dovetail.placers.expert import expert
from dovetail.placers.learned.records import Float32, Int64, ProblemView
from dovetail.placers.list_scheduling import limits_of, tasks_of
from dovetail.placers.problem import PlacementProblem

Float64 = NDArray[np.float64]
LIMIT = 3.0
"""Relative numbers are cut to 10^-3 to 10^3."""
WAVES = 4
OP_POSITIONS = ("order", "level", "module", "parameter")
VERSION = 1
"""Of the columns: a policy file of another version does not fit."""
BUCKETS = 512
OUTPUTS, DIMENSIONS = 2, 4
SHAPES = OUTPUTS * DIMENSIONS
"""The two largest outputs of a group, four axes each (the first ones), missing ones 0."""
POSITIONS = (*OP_POSITIONS, "schedule", "expert")
WAVE_NAMES = tuple(f"{part}{k}" for k in range(WAVES) for part in ("sin", "cos"))
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
class OpPlaces:
    """Where each op stands in its network.

    positions   [OP_POSITIONS][ops] 0 to 1
    columns     [columns][ops] starts, ends, critical, level_depth, level_width, level_place,
                parameters_before, layer: see `NUMBER_NAMES`
    longest_seconds   the longest path through the graph
    """

    positions: tuple[Float64, ...]
    columns: tuple[Float64, ...]
    longest_seconds: float


def op_places(graph: Graph, seconds: Float64) -> OpPlaces:
    """Positions of all ops; `seconds` [ops] is the work of each. O(ops + reads)."""
    count = len(graph)
    producers = graph.producers[graph.input_tensors]
    inputs = producers.tolist()
    reads = [inputs[begin:end] for begin, end in pairwise(graph.input_offsets.tolist())]

    def shares_before(ops: Int64) -> Float64:
        """[ops] share of these ops' work before the middle of each, in their order; others 0."""
        work = seconds[ops]
        places = np.zeros(count)
        places[ops] = (np.cumsum(work) - work / 2) / max(float(work.sum()), 1e-300)
        return places

    # Earliest start and end of each op without transfers, and the longest path after its end.
    costs = seconds.tolist()
    start_list, end_list, after_list = ([0.0] * count for _ in range(3))
    for op, cost in enumerate(costs):
        start_list[op] = max((end_list[before] for before in reads[op]), default=0.0)
        end_list[op] = start_list[op] + cost
    for op in range(count - 1, -1, -1):
        tail = after_list[op] + costs[op]
        for before in reads[op]:
            if after_list[before] < tail:
                after_list[before] = tail
    starts, ends, after = np.array(start_list), np.array(end_list), np.array(after_list)
    longest = max(float(ends.max(initial=0.0)), 1e-300)

    # Each op takes the place of a forward op, its partner: itself; that whose gradient it is; else
    # the first partner among what it reads. A source's is its first reader's, and so an update's,
    # which reads its parameter, is no later. Without a forward pass all that runs counts as one.
    forward = np.asarray(graph.phases == Phase.FORWARD)
    if not forward.any():
        forward = ~graph.is_source
    forward_ops = np.flatnonzero(forward)
    is_forward, gradients = forward.tolist(), graph.gradient_of.tolist()
    is_source = graph.is_source.tolist()
    first_reader = np.full(count, count, dtype=np.int64)
    np.minimum.at(first_reader, producers, graph.readers)
    partners = [-1] * count
    for op, reader in enumerate(first_reader.tolist()):
        if is_forward[op]:
            partners[op] = op
        elif gradients[op] >= 0 and is_forward[gradients[op]]:
            partners[op] = gradients[op]
        elif is_source[op]:
            if reader < count and is_forward[reader]:
                partners[op] = reader
        else:
            # Sums of gradients belong to what is summed last, which comes first in the network.
            partners[op] = min((partners[b] for b in reads[op] if partners[b] >= 0), default=-1)
    partner = np.array(partners, dtype=np.int64)
    partner = np.where(partner < 0, int(forward_ops[0]) if len(forward_ops) else 0, partner)

    # Levels: the longest path in ops from the start of the forward pass; the work of a level by the
    # mean level's, and the share of that before an op.
    level_list = [0] * count
    for op in forward_ops.tolist():
        level_list[op] = max((level_list[b] + 1 for b in reads[op] if is_forward[b]), default=0)
    levels = np.array(level_list, dtype=np.int64)[partner]
    level_work = np.bincount(levels, weights=seconds)
    width = np.log10(np.maximum(level_work, 1e-300) / max(float(level_work.mean()), 1e-300))
    order = np.argsort(levels, kind="stable")
    sums = np.cumsum(seconds[order])
    earlier = np.concatenate([[0.0], np.cumsum(level_work)])[levels[order]]
    place = np.empty(count)
    place[order] = (sums - seconds[order] / 2 - earlier) / np.maximum(
        level_work[levels[order]], 1e-300
    )

    # Modules, by where the first forward op of each stands.
    codes = {module: code for code, module in enumerate(dict.fromkeys(graph.modules))}
    module = np.array([codes[name] for name in graph.modules], dtype=np.int64)[partner]
    first_of_module = np.full(len(codes), count, dtype=np.int64)
    np.minimum.at(first_of_module, module, partner)

    # Families, likewise. A family is the ops that read one parameter, the largest that they read,
    # and what follows on them until the next; 0 is that of none.
    is_parameter = np.array([kind == "parameter" for kind in graph.kinds])
    of_parameters = np.flatnonzero(is_parameter[producers])
    by_size = np.argsort(graph.tensor_bytes[graph.input_tensors[of_parameters]], kind="stable")
    of_parameters = of_parameters[by_size]
    largest = np.full(count, -1, dtype=np.int64)
    largest[graph.readers[of_parameters]] = producers[of_parameters]  # the largest comes last
    families = largest.tolist()
    for op in np.flatnonzero(largest < 0).tolist():
        families[op] = max((families[before] for before in reads[op]), default=-1)
    family = np.array(families, dtype=np.int64)[partner] + 1
    first_of_family = np.full(count + 1, count, dtype=np.int64)
    np.minimum.at(first_of_family, family, partner)
    sizes = np.bincount(graph.producers, weights=graph.tensor_bytes, minlength=count)
    sizes = np.concatenate([[0.0], np.where(is_parameter, sizes, 0.0)])
    by_first = np.argsort(first_of_family, kind="stable")
    bytes_before = np.empty(len(sizes))
    bytes_before[by_first] = np.cumsum(sizes[by_first]) - sizes[by_first] / 2

    # The outermost index in each module's path, among those of its container.
    indices: dict[str, tuple[str, int]] = {}
    last: dict[str, int] = {}
    for name in set(graph.modules):
        match = re.search(r"(?:^|\.)(\d+)(?=\.|$)", name)
        if match is not None:
            container, index = name[: match.start()], int(match[1])
            indices[name] = (container, index)
            last[container] = max(last.get(container, 0), index)
    layers = {name: (i + 0.5) / (last[container] + 1) for name, (container, i) in indices.items()}

    return OpPlaces(
        positions=(
            shares_before(forward_ops)[partner],
            shares_before(np.lexsort((partner, levels))),
            shares_before(np.lexsort((partner, first_of_module[module]))),
            shares_before(np.lexsort((partner, first_of_family[family]))),
        ),
        columns=(
            starts / longest,
            ends / longest,
            (starts + seconds + after) / longest,
            levels / max(1, int(levels.max(initial=0))),
            np.clip(width, -3.0, 3.0)[levels],
            np.clip(place, 0.0, 1.0),
            bytes_before[family] / max(float(sizes.sum()), 1.0),
            np.array([layers.get(name, -1.0) for name in graph.modules]),
        ),
        longest_seconds=longest,
    )


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


def _by_mean(values: NDArray[np.generic]) -> Float32:
    return relative(values, float(np.mean(values.astype(np.float64))))


def look(problem: PlacementProblem) -> ProblemView:
    """The problem as policies see it. O(ops + reads + groups x devices)."""
    graph, machine, of_op = problem.graph, problem.machine, problem.groups.of_op
    allowed, groups, count = problem.allowed, problem.groups.count, len(machine.devices)
    runs_op = ~graph.is_source

    def sums(of_ops: NDArray[np.generic]) -> Float64:
        """[groups]"""
        return np.asarray(np.bincount(of_op, weights=of_ops, minlength=groups), dtype=np.float64)

    # Work in seconds: of ops on their fastest device; of groups on each device, where one may not
    # be that of its slowest; of groups on their fastest device.
    costs = problem.costs.compute_seconds
    op_seconds = np.where(np.isfinite(costs), costs, np.inf).min(axis=1)
    op_seconds = np.where(graph.is_source | np.isinf(op_seconds), 0.0, op_seconds)
    finite = np.isfinite(problem.work_seconds) & allowed
    slowest = np.where(finite, problem.work_seconds, 0.0).max(axis=1, keepdims=True)
    seconds = np.where(finite, problem.work_seconds, slowest)  # [groups, devices]
    work = np.where(finite, problem.work_seconds, np.inf).min(axis=1)
    work = np.where(np.isfinite(work), work, 0.0)  # [groups]
    total_work, mean_work = max(float(work.sum()), 1e-300), max(float(work.mean()), 1e-300)

    # Edges between groups, and what links take: [devices, devices] seconds a byte, latency in
    # seconds, links on the channel. Through the host where there is no link; the diagonal is 0.
    producers, consumers, edge_bytes = problem.edges
    mean_bytes = float(edge_bytes.mean()) if len(edge_bytes) else 1.0
    order = np.lexsort((producers, consumers))
    sources, destinations = producers[order].astype(np.int64), consumers[order].astype(np.int64)
    edge_bytes = edge_bytes[order]
    on_channel: dict[str, int] = {}
    for link in machine.links:
        on_channel[link.channel] = on_channel.get(link.channel, 0) + 1
    per_byte, latency, shared = (np.zeros((count, count)) for _ in range(3))
    index, host = machine.link_index, machine.host_index
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            hops = [index[a, b]] if index[a, b] >= 0 else [index[a, host], index[host, b]]
            links = [machine.links[hop] for hop in hops]
            per_byte[a, b] = sum(1 / link.bandwidth_bytes_per_second for link in links)
            latency[a, b] = sum(link.latency_seconds for link in links)
            shared[a, b] = max(on_channel[link.channel] for link in links)
    mean_per_byte = float(per_byte.sum() / max(1, np.count_nonzero(per_byte)))

    # Devices on the scale of positions. A speed of 1: as fast as the best device for all that it
    # may run; of 0: it runs nothing. Fast devices have at least a quarter of the best speed.
    best = np.where(allowed, work[:, None], 0.0).sum(axis=0)
    own = np.where(allowed, seconds, 0.0).sum(axis=0)
    speeds = np.where(allowed.any(axis=0), best / np.maximum(own, 1e-300), 0.0)
    fast = np.asarray(speeds >= 0.25 * speeds.max())
    width = np.where(fast, speeds, 0.0)
    width = width / max(width.sum(), 1e-300)
    by_speed = np.lexsort((np.arange(count), -np.round(speeds, 3)))
    centre = np.ones(count)
    centre[by_speed] = np.cumsum(width[by_speed]) - width[by_speed] / 2
    centre = np.where(width > 0, centre, 1.0)

    # Groups' positions are means over their ops, of which each weighs a little, so that groups of
    # ops that cost nothing have a place too. Advice: the middle of the interval of the device that
    # a method chose, -1 of none; the methods are `etf` over the fastest devices, and `expert`.
    places = op_places(graph, op_seconds)
    weights = op_seconds + np.where(graph.is_source, 0.0, 1e-9 * op_seconds.mean())
    weight = sums(weights)
    positions, placed = (
        [np.where(weight > 0, sums(c * weights) / np.maximum(weight, 1e-300), 0.5) for c in columns]
        for columns in (places.positions, places.columns)
    )
    middles = np.append(np.where(width > 0, centre, -1.0), -1.0)
    limits = limits_of(problem, len(problem.device_sets) - 1)
    listed = etf_schedule(tasks_of(problem), limits).placed
    positions += [middles[listed], middles[expert(problem, Budget())]]
    position = np.stack(positions, axis=1)  # [groups, POSITIONS]

    # The kinds of op in each group, CSR; a group of sources alone has the sources'.
    hashes = {kind: zlib.crc32(kind.encode()) % BUCKETS for kind in set(graph.kinds)}
    buckets = np.array([hashes[kind] for kind in graph.kinds], dtype=np.int64)
    counted = runs_op | ~(np.bincount(of_op, weights=runs_op, minlength=groups) > 0)[of_op]
    pairs, counts = np.unique(of_op[counted] * BUCKETS + buckets[counted], return_counts=True)
    rows = pairs // BUCKETS
    sizes = np.bincount(rows, weights=counts, minlength=groups)

    # Axes of each group's largest outputs, as log10(1 + size) / 3.
    made = np.flatnonzero(runs_op[graph.producers] & (graph.phases[graph.producers] < 2))
    if not len(made):
        made = np.arange(graph.tensors)
    owners = of_op[graph.producers[made]]
    by_size = np.lexsort((made, -graph.tensor_bytes[made], owners))
    owners, made = owners[by_size], made[by_size]
    nth = np.arange(len(made)) - np.searchsorted(owners, np.arange(groups))[owners]
    shapes = np.zeros((groups, OUTPUTS, DIMENSIONS), np.float32)
    distinct: dict[tuple[int, ...], list[float]] = {}
    at = np.flatnonzero(nth < OUTPUTS)
    for tensor in made[at].tolist():
        shape = graph.shapes[tensor]
        if shape not in distinct:
            axes = [float(np.log10(1 + size)) / 3 for size in shape[:DIMENSIONS]]
            distinct[shape] = axes + [0.0] * (DIMENSIONS - len(axes))
    of_tensors = [distinct[graph.shapes[tensor]] for tensor in made[at].tolist()]
    shapes[owners[at], nth[at]] = np.reshape(of_tensors, (-1, DIMENSIONS))

    # The columns of `NUMBER_NAMES`.
    phases = [sums(np.where(graph.phases == phase, op_seconds, 0.0)) for phase in (1, 2, 3)]
    busy = np.maximum(np.sum(phases, axis=0), 1e-300)
    # Parameters and optimizer's states count at their sources.
    owned = graph.is_source & (graph.residences >= 0)
    owned |= np.array([kind in ("parameter", "state") for kind in graph.kinds])
    of_producer = np.bincount(graph.producers, weights=graph.tensor_bytes, minlength=len(graph))
    parameters = sums(np.where(owned, of_producer, 0.0))
    sent = np.bincount(sources, weights=edge_bytes, minlength=groups)
    got = np.bincount(destinations, weights=edge_bytes, minlength=groups)
    whole = (
        float(np.log10(groups)),
        float(relative(np.array(edge_bytes.sum() * mean_per_byte), total_work)),
        float(relative(problem.group_bytes.sum(), float(problem.capacities[fast].max(initial=1)))),
        float(relative(np.array(total_work), max(places.longest_seconds, 1e-300))),
        float(graph.training),
    )
    of_groups = [
        _by_mean(work),
        work / total_work,
        _by_mean(sums(graph.flops)),
        _by_mean(sums(graph.accessed_bytes)),
        _by_mean(sums(runs_op)),
        *(phase / busy for phase in phases),
        _by_mean(parameters),
        parameters / max(parameters.sum(), 1.0),
        _by_mean(problem.group_bytes),
        _by_mean(problem.made_bytes),
        _by_mean(got),
        _by_mean(sent),
        _by_mean(np.bincount(destinations, minlength=groups)),
        _by_mean(np.bincount(sources, minlength=groups)),
        relative((got + sent) * mean_per_byte / np.maximum(work, 1e-300), 1.0),
        *placed,
        position,
        waves(position).reshape(groups, -1),
        *(np.full(groups, value) for value in whole),
    ]

    # The columns of `DEVICE_NAMES`. Without int8, whose rates no policy was trained on and which no
    # graph's costs use.
    runs = allowed.any(axis=0)
    inexact = [
        [rate for dtype, rate in d.flops_per_second.items() if dtype != "int8"]
        for d in machine.devices
    ]
    flops = np.array([max(rates, default=0.0) for rates in inexact])
    bandwidth = np.array([d.bandwidth_bytes_per_second for d in machine.devices])
    overhead = np.array([d.op_overhead_seconds for d in machine.devices])
    memory = problem.capacities.astype(np.float64)
    edge_seconds = per_byte * mean_bytes + latency
    others = max(1, count - 1)
    like = [
        (d.kind, d.model, d.memory_bytes, tuple(sorted(d.flops_per_second.items())))
        for d in machine.devices
    ]
    like_before = np.array([like[:i].count(device) for i, device in enumerate(like)])
    like_counts = np.array([like.count(device) for device in like], dtype=np.float64)
    of_devices = [
        relative(speeds, 1.0),
        relative(flops, float(flops.max())),
        relative(bandwidth, float(bandwidth[runs].max(initial=0.0))),
        relative(overhead, op_seconds.sum() / max(1, int(runs_op.sum()))),
        relative(memory, float(memory[runs].max(initial=0.0))),
        relative(float(problem.group_bytes.sum()) / np.maximum(memory, 1.0), 1.0),
        *([d.kind == kind for d in machine.devices] for kind in ("cpu", "gpu", "host")),
        np.arange(count) == host,
        allowed.mean(axis=0),
        fast,
        relative(mean_work / np.maximum(edge_seconds.sum(axis=1) / others, 1e-300), 1.0),
        relative(mean_work / np.maximum(edge_seconds.sum(axis=0) / others, 1e-300), 1.0),
        (like_before + 0.5) / like_counts,
        1 / like_counts,
        centre,
        width,
        waves(centre),
        np.full(count, np.log10(max(1, int(runs.sum())))),
    ]
    # The columns of `LINK_NAMES`.
    itself = np.eye(count)
    of_links = np.stack(
        [
            itself,
            index >= 0,
            np.where(itself > 0, -LIMIT, relative(edge_seconds, mean_work)),
            np.where(itself > 0, -LIMIT, relative(latency, mean_work)),
            np.log10(np.maximum(shared, 1.0)),
            centre[None] - centre[:, None],
        ],
        axis=2,
    )

    def table(columns: list[Any], rows: int) -> Float32:
        """[rows, columns], finite."""
        joined = np.concatenate([np.reshape(c, (rows, -1)) for c in columns], axis=1)
        return np.nan_to_num(joined.astype(np.float32))

    free = np.zeros(groups, dtype=bool)
    free[problem.free] = True
    return ProblemView(
        kind_offsets=np.searchsorted(rows, np.arange(groups + 1)).astype(np.int64),
        kind_buckets=(pairs % BUCKETS).astype(np.int64),
        kind_shares=(counts / sizes[rows]).astype(np.float32),
        shapes=shapes.reshape(groups, SHAPES),
        numbers=table(of_groups, groups),
        sources=sources,
        destinations=destinations,
        seconds=relative(seconds, work.mean()),
        allowed=allowed,
        free=free,
        settled=problem.fastest,
        devices=table(of_devices, count),
        links=np.nan_to_num(of_links.astype(np.float32)),
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


def cut_placements(view: ProblemView, *, advice: bool = True) -> NDArray[np.int32]:
    """[positions, groups] each position cut into contiguous parts: the nearest interval; of advice
    that is the adviser's own placement. `advice`: with those."""
    chosen = [i for i, position in enumerate(POSITIONS) if advice or position not in ADVICE]
    distance = cuts(view)[:, :, [2 * len(POSITIONS) + i for i in chosen]]
    distance = np.where(view.allowed[:, :, None], distance, np.inf)
    return np.where(view.free, distance.argmin(axis=1).T, view.settled).astype(np.int32)
