"""Multilevel placement: plans a small graph, then refines on ever larger ones.

    groups ──coarsen──► … ──coarsen──► units      every level is a graph of merged ops, on which
       ▲                                 │         placements of large graphs are simulated ten
    refine ◄──── … ◄────refine◄────── plan         times as fast or more

1. Coarsen groups by heavy edges until `COARSEST` units are left, and merge their ops. If the merged
   graph of single groups is small enough, it serves all levels; else each level has its own.
2. If there is no placement yet, run the baselines at every level, and with repeated modules as
   units. The result that is best on the true graph is the first incumbent.
3. In cycles, coarsen again, but join only groups that the incumbent puts on one device, so that the
   incumbent is one of the coarse placements (a V-cycle). Improve it by local search that moves
   whole units, level by level with smaller units. A result that is better on the true graph is the
   next incumbent.
4. Local search on the true graph spends the rest of the budget.

Paper: Walshaw, "Multilevel refinement for combinatorial optimisation problems", Annals of
Operations Research 131, 2004, https://doi.org/10.1023/B:ANOR.0000039525.80601.15.
Differences: levels differ by a factor of `GROWTH` in units, not 2, since each may need a graph of
its own. Step 2 plans at all levels, not at the coarsest alone. Refinement is local search with all
its moves, not only along boundaries.

Budget: an evaluation on a merged graph is charged (ops of the merged graph) / (ops of the true
graph). With a budget of evaluations no decision looks at the clock. Memory: if a placement lacks
bytes on the true graph, the capacities for merged graphs shrink by the bytes by which the merged
graph underestimated the peaks.
"""

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.costs import Costs
from dovetail.graph import HOST, Graph, Groups, Phase
from dovetail.graph.records import csr_offsets
from dovetail.graph.topological import topological_order
from dovetail.placers.baselines import BASELINES, try_baselines
from dovetail.placers.budget import Budget, Score
from dovetail.placers.contiguity import longest_paths
from dovetail.placers.local_search import local_search
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator import Simulator

# ── Merging: a small graph stands for a large one, the ops of each unit merged into few ─────────
#
# A *unit* is a set of groups that go to one device together. Ops are merged where they agree in
#
#     (window, unit, phase, step)
#
# window   of the earliest time at which an op could start, with every op on its fastest device and
#          no transfers: the critical path is cut into equal windows
# step     step(o) = max over predecessors p of o in its window of
#                    step(p) + (1 if p has another unit or phase, else 0)
#
# Along every edge the window never falls, within one window the step never falls, and if both stay
# then unit and phase stay too. So the ops of one merged op never wait for each other through
# another merged op: the merged graph is acyclic whatever the units are. A merged op starts only
# when all inputs of its ops are there, and its outputs are there only when all its ops have ended.
# Windows bound how much later that is than in the true graph. There are as many windows as keep the
# merged graph below a number of ops.
#
# Seconds are summed. All tensors that one merged op sends to the same set of merged ops become one
# tensor. Its bytes are their sum, and for each transfer that is saved the bytes that take as long
# as a latency are added. Tensors inside a merged op disappear, so peaks of memory count only what
# is kept between merged ops. Parameters, state and tensors that several merged ops read keep their
# homes.
#
# Source: own work. For random placements of synthetic networks of 100,000 ops, with devices that
# choose ops by lowest index alone, values were 0 to 3 % off with as many windows as `MOST_OPS`
# allows, and up to 7 % off with one window. With devices that choose by rank, values were up to
# 20 % off, because merged ops wait as one (4,000 ops in training).

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

MOST_WINDOWS, FEWER_WINDOWS = 512, 8
"""The number of windows that is tried first, and the divisor that gives the next number to try."""


def merged_problem(problem: PlacementProblem, unit_of: Int32, most_ops: int) -> PlacementProblem:
    """Return the problem of placing units on a graph of about `most_ops` merged ops.

    unit_of   [groups] unit of each group; units are numbered from 0 in order of their first groups

    A placement of units stands for the placement `placement[unit_of]` of groups. Values and peaks
    are estimates of those on the true graph. O(ops + reads x log reads).
    """
    graph, unit_of_op = problem.graph, unit_of[problem.groups.of_op]

    # 1. Merged ops (nodes), in the most of the windows tried that give at most `most_ops`. One
    # window is accepted with any number of nodes.
    real = np.flatnonzero(~graph.is_source)
    before_ops = np.concatenate([graph.producers[graph.input_tensors], graph.control[:, 0]])
    after_ops = np.concatenate([graph.readers, graph.control[:, 1]])[~graph.is_source[before_ops]]
    before_ops = before_ops[~graph.is_source[before_ops]]
    offsets = csr_offsets(after_ops, len(graph))
    befores = before_ops[np.argsort(after_ops, kind="stable")].astype(np.int32)
    least = problem.costs.compute_seconds.min(axis=1)
    starts = np.zeros(len(graph))
    keys = (unit_of_op * len(Phase) + graph.phases).astype(np.int64)
    _earliest_starts(offsets, befores, least, starts)
    longest = float((starts + least).max())
    windows = MOST_WINDOWS
    while True:
        window = np.minimum(starts / longest * windows if longest > 0 else 0 * starts, windows - 1)
        window = window.astype(np.int64)
        steps = np.zeros(len(graph), np.int64)
        _steps(offsets, befores, window, keys, steps)
        codes = window * (int(keys.max()) + 1) + keys
        codes = codes * (int(steps.max()) + 1) + steps
        _, lowest, of_real = np.unique(codes[real], return_index=True, return_inverse=True)
        if len(lowest) <= most_ops or windows == 1:
            break
        windows //= FEWER_WINDOWS
    count = len(lowest)
    node_of = np.full(len(graph), -1, np.int64)  # [ops] -1: a source
    node_of[real] = of_real.reshape(-1)
    # Of the ready nodes, the one with the lowest first op goes next, so that nodes stand as nearly
    # in the order of their ops as possible.
    before, after = node_of[before_ops], node_of[after_ops]
    edges = np.unique(before[before != after] * count + after[before != after])
    edges = np.stack([edges // count, edges % count], axis=1)
    rank = np.empty(count, np.int64)
    rank[topological_order(count, edges, real[lowest].tolist())] = np.arange(count)
    node_of[real] = rank[node_of[real]]
    first_ops = np.empty(count, np.int64)  # [nodes] the lowest op of each
    first_ops[rank] = real[lowest]

    # 2. Tensors. `makers` [tensors of the true graph] is the node that makes each. Tensors of
    # sources have numbers above the n nodes: n for inputs, n + 1 for tensors resident on every
    # device that reads them, and n + 2 + w for a tensor that node w overwrites.
    homes = graph.residences[graph.producers].astype(np.int64)
    overwritten = count + 2 + node_of[np.maximum(homes, 0)]
    of_sources = np.where(homes >= 0, overwritten, count + (homes != HOST))
    from_source = graph.is_source[graph.producers]
    makers = np.where(from_source, of_sources, node_of[graph.producers])
    is_written = np.flatnonzero(makers >= count + 2)
    read = np.append(graph.input_tensors, is_written).astype(np.int64)
    # The node that overwrites a tensor counts as a reader of it, also if none of its ops reads it.
    readers = np.append(node_of[graph.readers], makers[is_written] - count - 2)
    outside = makers[read] != readers
    pairs = np.unique(read[outside] * count + readers[outside])
    read, readers = pairs // count, pairs % count
    is_output = np.zeros(graph.tensors, dtype=bool)
    is_output[graph.outputs] = True
    is_output &= ~from_source
    # All tensors of one maker with the same readers become one. Sets of readers are compared by
    # hash: every node has a random 64-bit word, and a set's hash is the sum of its words, which
    # wraps around. Maker and `is_output` enter the hash too.
    words = np.random.default_rng(0).integers(2**63, size=2 * count + 2, dtype=np.uint64)
    hashes = words[makers % len(words)] * np.uint64(3) + is_output.astype(np.uint64)
    np.add.at(hashes, read, words[readers])
    is_seen = is_output.copy()
    is_seen[read] = True
    seen = np.flatnonzero(is_seen)
    _, first, inverse = np.unique(hashes[seen], return_index=True, return_inverse=True)
    first = seen[first]
    # Merged tensors stand by their owners, those of sources first.
    by_owner = np.lexsort((first, makers[first], makers[first] < count))
    place_of = np.empty(len(first), np.int64)
    place_of[by_owner] = np.arange(len(by_owner))
    first = first[by_owner]
    owners = makers[first]
    merged_of = np.full(graph.tensors, -1, np.int64)
    merged_of[seen] = place_of[inverse.reshape(-1)]
    # A view of a tensor that is kept anyway, or that belongs to a source, occupies nothing more.
    roots = np.where(graph.bases < 0, np.arange(graph.tensors), graph.bases)
    while (roots[roots] != roots).any():
        roots = roots[roots]
    root_stays = is_seen[roots] | from_source[roots]
    kept_bytes = np.where((graph.bases >= 0) & root_stays, 0, graph.tensor_bytes)
    occupied_bytes = np.bincount(merged_of[seen], weights=kept_bytes[seen]).astype(np.int64)
    several = (np.bincount(merged_of[seen]) - 1) * _latency_bytes(problem)
    sent_bytes = several + np.bincount(merged_of[seen], weights=problem.sent_bytes[seen])
    reads = np.unique(readers * len(first) + merged_of[read])
    readers, read = reads // len(first), reads % len(first)

    # 3. The graph. Source ops come first, one for each tensor of sources, then nodes. The graph
    # wants tensors in the order of their producers. The new value of a parameter comes after all
    # other tensors of the node that writes it.
    source_owners = owners[owners >= count]
    sources = len(source_owners)
    written = np.flatnonzero(owners[:sources] >= count + 2)
    writers = owners[written] - count - 2
    producers = np.concatenate([np.arange(sources), sources + owners[sources:], sources + writers])
    order = np.argsort(producers, kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order))
    storages = np.arange(len(order), dtype=np.int32)
    storages[place[len(owners) :]] = written
    overwrites = np.zeros(len(order), dtype=bool)
    overwrites[place[len(owners) :]] = True
    phases = np.zeros(sources + count, np.int8)
    phases[sources:] = graph.phases[first_ops]
    before, after = node_of[graph.control.T]
    control = np.unique(before[before != after] * count + after[before != after])
    source_kinds = ["input" if owner == count else "parameter" for owner in source_owners.tolist()]
    merged = Graph(
        names=tuple(map(str, range(sources + count))),
        kinds=(*source_kinds, *("merged",) * count),
        signatures=("",) * (sources + count),
        modules=("",) * sources + tuple(graph.modules[op] for op in first_ops.tolist()),
        phases=phases,
        shapes=((),) * len(order),
        strides=((),) * len(order),
        dtypes=("uint8",) * len(order),
        input_offsets=csr_offsets(sources + readers, sources + count),
        control=sources + np.stack([control // count, control % count], axis=1),
        producers=producers[order],
        tensor_bytes=np.append(occupied_bytes, occupied_bytes[written])[order],
        storages=storages,
        overwrites=overwrites,
        outputs=place[np.flatnonzero(is_output[first])],
        input_tensors=place[read],
    )

    # 4. Costs and units.
    columns = problem.costs.compute_seconds[real].T
    sums = [np.bincount(node_of[real], weights=c, minlength=count) for c in columns]
    seconds = np.concatenate([np.zeros((sources, problem.devices)), np.stack(sums, axis=1)])
    costs = Costs(seconds, "given", np.append(sent_bytes, sent_bytes[written])[order])
    # A source op has the unit of an op that reads it. Reversed, so that of several readers of a
    # source the first one is written last, and stays.
    units = np.zeros(sources + count, np.int32)
    units[sources:] = unit_of_op[first_ops]
    readers, read = readers[::-1], read[::-1]
    units[read[read < sources]] = units[sources + readers[read < sources]]
    units[written] = units[sources + writers]

    allowed = _allowed_devices(problem, unit_of)
    simulator = Simulator(
        merged, problem.machine, costs, capacities=problem.capacities, ranked=problem.ranked
    )
    return PlacementProblem(
        graph=merged,
        machine=problem.machine,
        costs=costs,
        groups=Groups(units, len(allowed)),
        allowed=allowed,
        capacities=problem.capacities,
        objective=problem.objective,
        evaluate=lambda placements: simulator.evaluate(placements, problem.objective),
        seed=problem.seed,
        trace=simulator.timeline,
        ranked=problem.ranked,
    )


def under_units(problem: PlacementProblem, unit_of: Int32) -> PlacementProblem:
    """Return the problem of placing units on the same graph. unit_of [groups]: see
    `merged_problem`."""
    allowed = _allowed_devices(problem, unit_of)
    groups = Groups(unit_of[problem.groups.of_op], len(allowed))
    return replace(problem, groups=groups, allowed=allowed, coarser=())


def _allowed_devices(problem: PlacementProblem, unit_of: Int32) -> NDArray[np.bool_]:
    """Return [units, devices] True where all groups of a unit may go."""
    allowed = np.ones((int(unit_of.max()) + 1, problem.devices), dtype=bool)
    np.logical_and.at(allowed, unit_of, problem.allowed)
    return allowed


def _latency_bytes(problem: PlacementProblem) -> float:
    """Return the bytes that a link moves in the time of its latency, on average."""
    links = problem.machine.links
    beyond = [link.latency_seconds * link.bandwidth_bytes_per_second for link in links]
    return float(np.mean(beyond)) if beyond else 0.0


@kernel
def _earliest_starts(offsets: Int32, befores: Int32, seconds: Float64, starts: Float64) -> None:
    """Fill `starts` [ops] with the earliest start of each op.

    Every op is on its fastest device, and transfers take no time.

    offsets, befores   CSR: the ops that run before each op, by data or control
    """
    for op in range(len(starts)):
        start = 0.0
        for i in range(offsets[op], offsets[op + 1]):
            start = max(start, starts[befores[i]] + seconds[befores[i]])
        starts[op] = start


@kernel
def _steps(offsets: Int32, befores: Int32, windows: Int64, keys: Int64, steps: Int64) -> None:
    """Fill `steps` [ops] by the recurrence for `step` above.

    keys   [ops] equal for ops of the same unit and phase
    """
    for op in range(len(steps)):
        step = 0
        for i in range(offsets[op], offsets[op + 1]):
            before = befores[i]
            if windows[before] == windows[op]:
                step = max(step, steps[before] + (keys[before] != keys[op]))
        steps[op] = step


# ── Coarsening: groups are joined to ever fewer units, hundreds instead of many thousands ────────
#
# By heavy edges: in rounds, the units at the two ends of an edge become one unit, edges of the
# highest rating first and each unit at most once a round, until few enough are left. An edge
# between units u and v is rated
#
#     bytes(u, v)^2 / (seconds(u) seconds(v))
#
# where a transfer's latency is counted as bytes too. Paper: Holtgrewe, Sanders and Schulz,
# "Engineering a scalable high quality graph partitioner", IPDPS 2010,
# https://arxiv.org/abs/0910.2004 (the rating expansion*2).
#
# Acyclic: with level(u) the length of the longest path of forward ops to a unit, u and v are joined
# only if their levels differ by at most one, and not where an edge between those two levels would
# join two pairs. So no cycle arises that was not there. Paper: Herrmann et al., "Multilevel
# algorithms for acyclic partitioning of directed acyclic graphs", SIAM Journal on Scientific
# Computing 41(4), 2019, https://doi.org/10.1137/18M1176865 (its coarsening).
#
# By repeated modules: all groups in one repetition of a module, such as "layers.3" of
# "layers.3.attention.query", are one unit from the start.
#
# Differences: groups that wait for each other in a circle have one level. If rounds stall, levels
# are ignored: windows and steps keep the merged ops acyclic anyway. Edges join only units with the
# same choice of devices.

LARGEST_SHARE = 2.0
"""Units do not join into one with more than this many times an even share of the work."""
LARGEST_MEMORY = 1 / 8
"""Units do not join into one with more than this share of the smallest device's memory."""
LEAST_FALL = 0.05
"""A round has stalled if it lowers the number of units by less than this share."""
LOOSE = -2
"""Level of a unit that no forward edge touches: it may join any unit."""
_REPEATED = re.compile(r"^(.*\.)?\d+(?=\.|$)")


def coarsen(
    problem: PlacementProblem, most: int, labels: NDArray[np.integer] | None = None
) -> list[Int32]:
    """Return ever coarser levels, each as [groups] the unit of every group.

    The first level has every group as its own unit. The last has at most `most` units, or as few as
    rounds reach. Units are numbered in the order of their first groups.

    labels   [groups] only groups of one label are joined; None: any

    O(rounds x edges x log edges).
    """
    # The units of a round, at first the groups: [units] a choice, of which units must have the same
    # to be joined, their seconds, and the bytes that stay for long; the distinct pairs [edges, 2]
    # of units with the bytes between them; and the distinct pairs with an edge between forward ops.
    _, choice = np.unique(problem.allowed, axis=0, return_inverse=True)
    if labels is not None:
        _, choice = np.unique([choice.reshape(-1), labels], axis=1, return_inverse=True)
    choice = choice.reshape(-1)
    real = [device.kind != "host" for device in problem.machine.devices]
    work = np.where(np.isfinite(problem.work_seconds), problem.work_seconds, np.nan)
    seconds = np.nan_to_num(np.nanmin(work[:, real], axis=1))
    sizes = problem.group_bytes.astype(np.float64)
    befores, afters, weights = problem.edges
    ends, weights = _sum_weights(befores, afters, weights + _latency_bytes(problem))
    forward = problem.load.edges
    # No unit becomes larger than this.
    most_seconds = max(float(seconds.max()), LARGEST_SHARE * float(seconds.sum()) / most)
    most_bytes = max(float(sizes.max()), LARGEST_MEMORY * float(problem.capacities[real].min()))

    levels = [np.arange(problem.groups.count, dtype=np.int32)]
    strict = True
    while len(choice) > most:
        count = len(choice)
        # The floor keeps the rating of units without work finite.
        floor = seconds.mean() / 10 + 1e-12
        rating = weights**2 / ((seconds + floor)[ends]).prod(axis=1)
        order = np.lexsort((ends[:, 1], ends[:, 0], -rating)).astype(np.int32)
        level = np.full(count, LOOSE, np.int32)
        if strict:
            # A level is the length of the longest forward path. Units that wait for each other in a
            # circle have one level. Units that no forward edge touches stay `LOOSE`.
            before, after = forward.T
            ones = coo_array((np.ones(len(before), np.int8), (before, after)), (count,) * 2)
            circles, circle = connected_components(ones, connection="strong")
            between = np.unique(circle[forward], axis=0)
            longest = longest_paths(circles, between[between[:, 0] != between[:, 1]])
            touched = np.unique(forward)
            level[touched] = longest[circle[touched]]
        forwards = forward[np.argsort(forward[:, 0], kind="stable")]
        backwards = forward[np.argsort(forward[:, 1], kind="stable")]
        mates = np.full(count, -1, np.int32)
        _match(
            np.ascontiguousarray(ends[order]),
            choice.astype(np.int64),
            seconds,
            sizes,
            np.array([most_seconds, most_bytes]),
            level,
            csr_offsets(forwards[:, 0], count),
            np.ascontiguousarray(forwards[:, 1], np.int32),
            csr_offsets(backwards[:, 1], count),
            np.ascontiguousarray(backwards[:, 0], np.int32),
            mates,
        )
        # [units] the unit of the next round that each becomes part of.
        numbers = np.arange(count)
        lower = np.where((mates >= 0) & (mates < numbers), mates, numbers)
        joined = (np.cumsum(lower == numbers) - 1).astype(np.int32)[lower]
        fewer = int(joined.max()) + 1
        if count - fewer < LEAST_FALL * count:
            if not strict:
                break
            strict = False
            continue
        levels.append(joined[levels[-1]])
        choices = choice
        choice = np.empty(fewer, choices.dtype)
        choice[joined] = choices
        forward = joined[forward]
        forward = np.unique(forward[forward[:, 0] != forward[:, 1]], axis=0)
        ends, weights = _sum_weights(joined[ends[:, 0]], joined[ends[:, 1]], weights)
        seconds, sizes = _sums(joined, seconds, fewer), _sums(joined, sizes, fewer)
    return levels


def by_modules(problem: PlacementProblem) -> Int32:
    """Return [groups] units: one for all groups whose heaviest op is in the same repetition of a
    module.

    Groups in no repeated module stay apart, and so do groups with different choices of devices.
    """
    graph, of_op = problem.graph, problem.groups.of_op
    seconds = problem.costs.compute_seconds.min(axis=1)
    order = np.lexsort((np.arange(len(graph)), -seconds, of_op))
    heaviest = order[np.append(True, np.diff(of_op[order]) != 0)]
    names: dict[tuple[str, bytes], int] = {}
    unit = np.empty(problem.groups.count, np.int32)
    for group, op in enumerate(heaviest.tolist()):
        repetition = _REPEATED.match(graph.modules[op])
        name = repetition[0] if repetition else f"group {group}"
        unit[group] = names.setdefault((name, problem.allowed[group].tobytes()), len(names))
    return unit


def _sum_weights(a: Int32, b: Int32, weights: Float64) -> tuple[Int32, Float64]:
    """Return the distinct pairs, lower end first, and their summed weights. Loops are dropped."""
    low, high = np.minimum(a, b).astype(np.int64), np.maximum(a, b).astype(np.int64)
    count = int(high.max(initial=0)) + 1
    apart = low != high
    codes, inverse = np.unique((low * count + high)[apart], return_inverse=True)
    sums = _sums(inverse.reshape(-1), weights[apart], len(codes))
    return np.stack([codes // count, codes % count], axis=1).astype(np.int32), sums


def _sums(owners: NDArray[np.integer], values: Float64, count: int) -> Float64:
    return np.asarray(np.bincount(owners, weights=values, minlength=count), dtype=np.float64)


@kernel
def _match(  # noqa: PLR0917 (kernel)
    ends: Int32,
    choice: NDArray[np.int64],
    seconds: Float64,
    sizes: Float64,
    limits: Float64,
    levels: Int32,
    after_offsets: Int32,
    afters: Int32,
    before_offsets: Int32,
    befores: Int32,
    mates: Int32,
) -> None:
    """Fill `mates` [units] with the unit that each is joined with; those left at -1 stay alone.

    Greedy along `ends` [edges, 2], which stand in the order of their ratings.
    """
    for edge in range(len(ends)):
        a, b = ends[edge, 0], ends[edge, 1]
        if mates[a] >= 0 or mates[b] >= 0 or choice[a] != choice[b]:
            continue
        if seconds[a] + seconds[b] > limits[0] or sizes[a] + sizes[b] > limits[1]:
            continue
        if levels[a] > levels[b]:
            a, b = b, a
        if levels[a] != LOOSE and levels[a] != levels[b]:
            crosses = levels[b] > levels[a] + 1
            crosses = crosses or _may_close_cycle(a, b, after_offsets, afters, levels, mates)
            if crosses or _may_close_cycle(b, a, before_offsets, befores, levels, mates):
                continue
        mates[a] = b
        mates[b] = a


@inlined
def _may_close_cycle(
    unit: int, mate: int, offsets: Int32, neighbours: Int32, levels: Int32, mates: Int32
) -> bool:
    """Whether a neighbour on the mate's level is joined with a unit on this unit's level.

    Joining this unit with the mate could then close a cycle through that pair.
    """
    paired = False
    for i in range(offsets[unit], offsets[unit + 1]):
        neighbour = neighbours[i]
        partner = mates[neighbour]
        if partner >= 0 and levels[neighbour] == levels[mate] and levels[partner] == levels[unit]:
            paired = True
            break
    return paired


# ── The search over levels ──────────────────────────────────────────────────────────────────────

COARSEST = 60
"""The coarsest level has at most this many units, if so few can be reached."""
GROWTH = 4
"""Each level has at least this many times the units of the next coarser one."""
MOST_OPS = 4000
"""A merged graph has at most this many ops, unless its units need more."""
FINE_OPS = 32000
"""The merged graph of the groups themselves serves every level if it has at most this many ops."""
CYCLE_SHARE = 0.45
"""One cycle spends this share of what is left of the budget."""
MOST_CYCLES = 3
"""At most this many cycles come before local search on the true graph."""
OBJECTIVES = ("step", "load")
"""The objectives that a merged graph can estimate."""


def multilevel(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best placement at the budget's end.

    This is plain local search if contiguity is asked for, if at most `COARSEST` groups have a
    choice, or if a merged graph cannot estimate the objective.
    """
    few = len(problem.free) <= COARSEST
    if problem.contiguous or problem.objective not in OBJECTIVES or few:
        return local_search(problem, budget)
    # [devices] The most bytes by which merged graphs underestimated peaks.
    shifts = np.zeros(problem.devices)
    finest: PlacementProblem | None = None

    def score_of(placement: GroupPlacement) -> Score:
        return budget.score(problem, placement[None], always=True)[0]

    def merge_units(units: Int32) -> PlacementProblem:
        """Return the problem of placing these units on a merged graph. That of single groups is the
        most accurate, so it is used if it is small enough."""
        nonlocal finest
        if finest is None:
            finest = merged_problem(problem, np.arange(len(units), dtype=np.int32), MOST_OPS)
        small, is_large = finest, len(finest.graph) > FINE_OPS
        if int(units.max()) + 1 < len(units):
            small = (
                merged_problem(problem, units, MOST_OPS) if is_large else under_units(small, units)
            )
        room = np.maximum(problem.capacities - shifts, 0).astype(np.int64)
        return replace(small, capacities=room)

    def part_for(share: float, small: PlacementProblem) -> Budget:
        """Return a separate budget for a merged graph, with a share of the whole budget.

        It is separate because the budget's ledger is keyed by placement, and placements of units
        are not placements of groups. A Ctrl-C that interrupts the whole budget interrupts it too.
        """
        evaluations = share * budget.evaluations * len(problem.graph) / len(small.graph)
        part = Budget(
            seconds=min(share * budget.seconds, budget.left_seconds),
            evaluations=evaluations if evaluations == np.inf else max(1.0, float(int(evaluations))),
            clock=budget.clock,
            threads=budget.threads,
        )

        def relay(_share: float, _value: float) -> None:
            part.interrupted |= budget.interrupted

        part.progress = relay
        return part

    def charge(part: Budget, small: PlacementProblem) -> None:
        """Charge what a part spent to the whole budget, in evaluations of the true graph."""
        budget.charge(part.spent * len(small.graph) / len(problem.graph))
        budget.interrupted |= part.interrupted

    if budget.ledger.best is None:
        # The best placement that baselines find at any level, or with repeated modules as units.
        placements = []
        levels = _space_levels(coarsen(problem, COARSEST))
        modules = by_modules(problem)
        if int(modules.max()) + 1 < len(modules):
            levels.append(modules)
        for units in levels:
            small = merge_units(units)
            part = part_for(1 - budget.fraction, small)
            try_baselines(small, part)
            charge(part, small)
            assert part.ledger.best is not None, "the baselines were evaluated"
            placements.append(part.ledger.best[1][units])
        best = min(placements, key=score_of)
    else:
        best = budget.ledger.best[1]

    # Each local search on a merged graph has another seed.
    refined = 0
    for _ in range(MOST_CYCLES):
        if budget.exhausted:
            break
        levels = _space_levels(coarsen(problem, COARSEST, best))
        share = CYCLE_SHARE * (1 - budget.fraction)
        for units in levels:
            if budget.exhausted:
                break
            # It starts from the best placement, which puts each unit on one device.
            small = merge_units(units)
            refined += 1
            small = replace(small, seed=small.seed + refined)
            part = part_for(share / len(levels), small)
            of_units = np.empty(small.groups.count, np.int32)
            of_units[units] = best
            score = part.score(small, of_units[None], always=True)[0]
            # Noted under every baseline's name, so that local search constructs none and starts
            # here.
            for name in BASELINES:
                part.note(name, score, of_units)
            of_units_refined = local_search(small, part)
            charge(part, small)
            placement = of_units_refined[units]
            # If memory lacks on the true graph, later merged graphs get less.
            if score_of(placement).lacking_bytes > 0:
                under = budget.ledger.peaks(placement) - part.ledger.peaks(of_units_refined)
                shifts = np.maximum(shifts, under)
            best = min(best, placement, key=score_of)
    return best if budget.exhausted else local_search(problem, budget)


def _space_levels(levels: list[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    """Return levels from coarse to fine, with a factor of `GROWTH` or more between their units.

    The last level has every group apart.
    """
    spaced = [levels[-1]] if len(levels) > 1 else []
    for units in reversed(levels[1:-1]):
        count = int(units.max()) + 1
        if GROWTH * (int(spaced[-1].max()) + 1) <= count <= len(units) / GROWTH:
            spaced.append(units)
    return [*spaced, levels[0]]
