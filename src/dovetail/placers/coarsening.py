"""Groups joined to ever fewer units, so that a search sees a few hundred instead of many thousands.

By heavy edges: units at the two ends of an edge become one, heaviest edges first, each unit at most
once a round, until few enough are left. An edge between units u and v is rated

    bytes(u, v)^2 / (seconds(u) seconds(v))

where bytes include what the latency of a transfer is worth. Paper: Holtgrewe, Sanders and Schulz,
"Engineering a scalable high quality graph partitioner", IPDPS 2010,
https://arxiv.org/abs/0910.2004 (the rating expansion*2).

Acyclic: with level(u) the length of the longest path of forward ops to a unit, u and v are joined
only if their levels differ by at most one, and not where an edge between those two levels would
join two pairs. So no cycle arises that was not there. Paper: Herrmann et al., "Multilevel
algorithms for acyclic partitioning of directed acyclic graphs", SIAM Journal on Scientific
Computing 41(4), 2019, https://doi.org/10.1137/18M1176865 (its coarsening).

By repeated modules: groups at the same position of a repeated module path, "layers.3" of
"layers.3.attention.query", are one unit from the start.

Differences: where groups wait for each other in a circle, its groups count as of one level. Where
rounds stall the levels are let go: whether the ops stay acyclic is seen to when they are merged
(`placers.merging`). Edges join only units with the same choice of devices, and no unit grows beyond
`LARGEST_SHARE` of an even share of the work, or `LARGEST_MEMORY` of the smallest device.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.graph.records import csr_offsets
from dovetail.placers.problem import Problem
from dovetail.simulator.compiling import inlined, kernel

Int32 = NDArray[np.int32]
Float64 = NDArray[np.float64]

LARGEST_SHARE = 2.0
LARGEST_MEMORY = 1 / 8
LEAST_FALL = 0.05
"""A round that joins fewer units than this share has stalled."""
LOOSE = -2
"""Level of a unit without forward ops between others: it may join any."""
_REPEATED = re.compile(r"^(.*\.)?\d+(?=\.|$)")


def coarsen(problem: Problem, most: int, labels: NDArray[np.integer] | None = None) -> list[Int32]:
    """Ever coarser units, each [groups] the unit of every group, numbered by first group: from
    every group its own to at most `most` units, or as few as can be.

    `labels` [groups]: only groups of one label are joined. O(rounds x edges x log edges).
    """
    groups = problem.groups.count
    _, choice = np.unique(problem.allowed, axis=0, return_inverse=True)
    if labels is not None:
        _, choice = np.unique([choice.reshape(-1), labels], axis=1, return_inverse=True)
    units = _Units.of(problem, choice.reshape(-1), most)
    levels = [np.arange(groups, dtype=np.int32)]
    strict = True
    while units.count > most:
        joined = units.join(strict)
        if units.count - int(joined.max()) - 1 < LEAST_FALL * units.count:
            if not strict:
                break
            strict = False
            continue
        units = units.under(joined)
        levels.append(joined[levels[-1]])
    return levels


def by_modules(problem: Problem) -> Int32:
    """[groups] unit: groups whose heaviest op lies in the same repetition of a repeated module are
    one; others stay apart, and so do those with different choices of devices."""
    graph, of_op = problem.graph, problem.groups.of_op
    seconds = problem.costs.compute_seconds.min(axis=1)
    order = np.lexsort((np.arange(len(graph)), -seconds, of_op))
    heaviest = order[np.append(True, np.diff(of_op[order]) != 0)]
    names: dict[tuple[str, bytes], int] = {}
    unit = np.empty(problem.groups.count, np.int32)
    for group, op in enumerate(heaviest.tolist()):
        found = _REPEATED.match(graph.modules[op])
        name = found[0] if found else f"group {group}"
        unit[group] = names.setdefault((name, problem.allowed[group].tobytes()), len(names))
    return unit


@dataclass(frozen=True, eq=False)
class _Units:
    """The graph of units of one round.

    ends, weights    [edges, 2], [edges] distinct pairs with a < b, and bytes between them
    forward          [edges, 2] distinct (before, after) of forward ops
    choice           [units] id of what the unit may not be joined across
    seconds, sizes   [units] work, bytes that stay
    limits           (seconds, bytes) of the largest unit
    """

    ends: Int32
    weights: Float64
    forward: Int32
    choice: NDArray[np.integer]
    seconds: Float64
    sizes: Float64
    limits: tuple[float, float]

    @property
    def count(self) -> int:
        return len(self.choice)

    @staticmethod
    def of(problem: Problem, choice: NDArray[np.integer], most: int) -> "_Units":
        befores, afters, weights = problem.edges
        links = problem.machine.links
        beyond = [link.latency_seconds * link.bandwidth_bytes_per_second for link in links]
        work = np.where(np.isfinite(problem.work_seconds), problem.work_seconds, np.nan)
        real = [device.kind != "host" for device in problem.machine.devices]
        seconds = np.nan_to_num(np.nanmin(work[:, real], axis=1))
        sizes = problem.group_bytes.astype(np.float64)
        roomy = problem.capacities[real]
        return _Units(
            *_summed(befores, afters, weights + (np.mean(beyond) if beyond else 0.0)),
            problem.load.edges,
            choice,
            seconds,
            sizes,
            (
                max(float(seconds.max()), LARGEST_SHARE * float(seconds.sum()) / most),
                max(float(sizes.max()), LARGEST_MEMORY * float(roomy.min())),
            ),
        )

    def join(self, strict: bool) -> Int32:
        """[units] the unit of the next round that each becomes part of."""
        floor = self.seconds.mean() / 10 + 1e-12
        rating = self.weights**2 / ((self.seconds + floor)[self.ends]).prod(axis=1)
        order = np.lexsort((self.ends[:, 1], self.ends[:, 0], -rating)).astype(np.int32)
        mates = np.full(self.count, -1, np.int32)
        levels = self._levels() if strict else np.full(self.count, LOOSE, np.int32)
        forward = self.forward[np.argsort(self.forward[:, 0], kind="stable")]
        backward = self.forward[np.argsort(self.forward[:, 1], kind="stable")]
        _match(
            np.ascontiguousarray(self.ends[order]),
            self.choice.astype(np.int64),
            self.seconds,
            self.sizes,
            np.array(self.limits),
            levels,
            csr_offsets(forward[:, 0], self.count),
            np.ascontiguousarray(forward[:, 1], np.int32),
            csr_offsets(backward[:, 1], self.count),
            np.ascontiguousarray(backward[:, 0], np.int32),
            mates,
        )
        own = np.arange(self.count)
        first = np.where((mates >= 0) & (mates < own), mates, own)
        return (np.cumsum(first == own) - 1).astype(np.int32)[first]

    def under(self, joined: Int32) -> "_Units":
        """The units that they become."""
        count = int(joined.max()) + 1
        choice = np.empty(count, self.choice.dtype)
        choice[joined] = self.choice
        forward = joined[self.forward]
        forward = np.unique(forward[forward[:, 0] != forward[:, 1]], axis=0)
        return _Units(
            *_summed(joined[self.ends[:, 0]], joined[self.ends[:, 1]], self.weights),
            forward,
            choice,
            _sums(joined, self.seconds, count),
            _sums(joined, self.sizes, count),
            self.limits,
        )

    def _levels(self) -> Int32:
        """[units] length of the longest forward path to each; units that wait for each other in
        a circle have one level."""
        befores, afters = self.forward.T
        ones = coo_array((np.ones(len(befores), np.int8), (befores, afters)), (self.count,) * 2)
        circles, circle = connected_components(ones, connection="strong")
        between = np.unique(circle[self.forward], axis=0)
        between = between[between[:, 0] != between[:, 1]].astype(np.int32)
        levels = np.zeros(circles, np.int32)
        _longest_paths(
            csr_offsets(between[:, 0], circles),
            np.ascontiguousarray(between[:, 1]),
            np.bincount(between[:, 1], minlength=circles).astype(np.int32),
            np.zeros(circles, np.int32),
            levels,
        )
        found = levels[circle]
        touched = np.zeros(self.count, dtype=bool)
        touched[self.forward] = True
        found[~touched] = LOOSE
        return found


def _summed(a: Int32, b: Int32, weights: Float64) -> tuple[Int32, Float64]:
    """Distinct pairs, the lower first, with their weights summed; without loops."""
    low, high = np.minimum(a, b).astype(np.int64), np.maximum(a, b).astype(np.int64)
    count = int(high.max(initial=0)) + 1
    apart = low != high
    codes, inverse = np.unique((low * count + high)[apart], return_inverse=True)
    sums = _sums(inverse.reshape(-1), weights[apart], len(codes))
    return np.stack([codes // count, codes % count], axis=1).astype(np.int32), sums


def _sums(owners: NDArray[np.integer], values: Float64, count: int) -> Float64:
    return np.asarray(np.bincount(owners, weights=values, minlength=count), dtype=np.float64)


@kernel
def _longest_paths(
    offsets: Int32, targets: Int32, waits: Int32, ready: Int32, levels: Int32
) -> None:
    """Fill `levels` [nodes] of an acyclic graph; `waits` counts predecessors, `ready` is room."""
    first = last = 0
    for node in range(len(levels)):
        if waits[node] == 0:
            ready[last] = node
            last += 1
    while first < last:
        node = ready[first]
        first += 1
        for i in range(offsets[node], offsets[node + 1]):
            after = targets[i]
            levels[after] = max(levels[after], levels[node] + 1)
            waits[after] -= 1
            if waits[after] == 0:
                ready[last] = after
                last += 1


@kernel
def _match(  # noqa: PLR0913 (kernel)
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
    """Fill `mates` [units], -1: alone, greedily along `ends` [edges, 2]."""
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
            crosses = crosses or _paired(a, b, after_offsets, afters, levels, mates)
            if crosses or _paired(b, a, before_offsets, befores, levels, mates):
                continue
        mates[a] = b
        mates[b] = a


@inlined
def _paired(
    unit: int, mate: int, offsets: Int32, others: Int32, levels: Int32, mates: Int32
) -> bool:
    """Is a neighbour on the mate's level joined with one on this unit's?"""
    found = False
    for i in range(offsets[unit], offsets[unit + 1]):
        other = others[i]
        there = mates[other]
        if there >= 0 and levels[other] == levels[mate] and levels[there] == levels[unit]:
            found = True
            break
    return found
