"""Moves of the local search: each takes a group placement and returns a changed copy, or None.

Every move only touches groups with a choice and only puts them where they may be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.critical import CriticalPath
from dovetail.placers.problem import GroupPlacement, Problem

GroupSet = NDArray[np.int32]
MODULE_SHARE = 0.8
"""A module or cluster is one thing to move if it holds at most this share of the groups."""
CLUSTER_GROUPS = 256
"""Largest cluster, so that building them stays O(edges x this)."""
CLUSTER_EDGES = 20_000
"""Edges that make clusters, the heaviest ones."""


@dataclass(frozen=True, eq=False)
class Landscape:
    """What moves look things up in.

    neighbours       per group, the groups with a choice that it exchanges tensors with
    edges            (from, to) with a choice at either end, and `pull`: the share of bytes
    modules          sets of groups that lie in one module
    clusters         sets of groups that heavy tensors join: every union that arises when groups
                     are joined along edges from the heaviest to the lightest
    path             critical path of the placement that moves start from, if it is known
    """

    problem: Problem
    free: GroupSet
    neighbours: tuple[GroupSet, ...]
    edges: NDArray[np.int32]  # [edges, 2]
    pull: NDArray[np.float64]  # [edges]
    modules: tuple[GroupSet, ...]
    clusters: tuple[GroupSet, ...]
    path: CriticalPath | None = None


Move = Callable[[GroupPlacement, Landscape, np.random.Generator], GroupPlacement | None]


@lru_cache(maxsize=1)
def landscape(problem: Problem) -> Landscape:
    """Built once a problem. O(ops x module depth + reads)."""
    sources, destinations, sizes = problem.edges
    can = np.zeros(problem.groups.count, dtype=bool)
    can[problem.free] = True
    near: list[set[int]] = [set() for _ in range(problem.groups.count)]
    for a, b in zip(sources.tolist(), destinations.tolist(), strict=True):
        near[a].add(b)
        near[b].add(a)
    kept = can[sources] | can[destinations]
    weights = sizes[kept] + sizes.mean() if len(sizes) else sizes
    return Landscape(
        problem=problem,
        free=problem.free,
        neighbours=tuple(
            np.array([g for g in sorted(groups) if can[g]], dtype=np.int32) for groups in near
        ),
        edges=np.stack([sources[kept], destinations[kept]], axis=1),
        pull=weights / max(weights.sum(), 1e-300),
        modules=_module_sets(problem, can),
        clusters=_cluster_sets(problem, can),
    )


def relocate(
    placement: GroupPlacement, groups: GroupSet, device: int, problem: Problem
) -> GroupPlacement:
    """`groups` on `device`, but for those that may not be there."""
    moved = placement.copy()
    moved[groups[problem.allowed[groups, device]]] = device
    return moved


def one_group(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """One group to another device."""
    group = land.free[rng.integers(len(land.free))]
    return relocate(placement, group[None], _other(placement, group, land, rng), land.problem)


def with_neighbours(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """One group and some of its neighbours to one device."""
    group = land.free[rng.integers(len(land.free))]
    near = land.neighbours[group]
    some = near[rng.random(len(near)) < rng.choice((0.3, 0.6, 1.0))]
    device = _other(placement, group, land, rng)
    return relocate(placement, np.append(some, group), device, land.problem)


def swap(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """Two groups change places."""
    a, b = land.free[rng.integers(len(land.free), size=2)]
    allowed = land.problem.allowed
    if not (allowed[a, placement[b]] and allowed[b, placement[a]]):
        return None
    moved = placement.copy()
    moved[a], moved[b] = placement[b], placement[a]
    return moved


def window(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """A run of groups, in order of their first ops, to one device."""
    count = len(land.free)
    length = min(count, 2 + int(count / 2 * rng.random() ** 3))
    start = rng.integers(count - length + 1)
    device = int(rng.integers(land.problem.devices))
    return relocate(placement, land.free[start : start + length], device, land.problem)


def boundary(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """One side of a boundary between two devices grows over the other, along the order."""
    here = placement[land.free]
    at = np.flatnonzero(here[1:] != here[:-1])
    if not len(at):
        return None
    edge = int(at[rng.integers(len(at))])
    length = 1 + int(rng.geometric(0.3))
    if rng.random() < 0.5:
        span, device = slice(max(0, edge + 1 - length), edge + 1), int(here[edge + 1])
    else:
        span, device = slice(edge + 1, edge + 1 + length), int(here[edge])
    return relocate(placement, land.free[span], device, land.problem)


def module(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """All groups of one module to one device."""
    if not land.modules:
        return None
    groups = land.modules[rng.integers(len(land.modules))]
    return relocate(placement, groups, int(rng.integers(land.problem.devices)), land.problem)


def cluster(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """All groups that heavy tensors join to one device, e.g. the sums of one gradient."""
    if not land.clusters:
        return None
    groups = land.clusters[rng.integers(len(land.clusters))]
    return relocate(placement, groups, int(rng.integers(land.problem.devices)), land.problem)


def follow(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """Some groups each to the device that they exchange most bytes with."""
    if not len(land.edges):
        return None
    pulled = np.zeros(land.problem.allowed.shape)
    for ends, others in (land.edges.T, land.edges.T[::-1]):
        np.add.at(pulled, (ends, placement[others]), land.pull)
    pulled[~land.problem.allowed] = -1
    some = land.free[rng.random(len(land.free)) < rng.choice((0.1, 0.3, 1.0))]
    moved = placement.copy()
    moved[some] = pulled[some].argmax(axis=1)
    return moved


def cut_edge(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """One end of an edge that crosses devices joins the other; heavy edges first."""
    crosses = placement[land.edges[:, 0]] != placement[land.edges[:, 1]]
    weights = np.cumsum(land.pull * crosses)
    if not len(weights) or weights[-1] <= 0:
        return None
    edge = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
    mover, stays = land.edges[edge][:: 1 if rng.random() < 0.5 else -1]
    if rng.random() < 0.5:
        return relocate(placement, mover[None], int(placement[stays]), land.problem)
    near = land.neighbours[mover]
    along = near[placement[near] == placement[mover]]
    along = along[rng.random(len(along)) < 0.5]
    return relocate(placement, np.append(along, mover), int(placement[stays]), land.problem)


def unload(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """A group of the busiest device to the least busy one."""
    problem = land.problem
    seconds = problem.work_seconds[np.arange(len(placement)), placement]
    loads = np.bincount(placement, weights=seconds, minlength=problem.devices)
    groups = land.free[placement[land.free] == loads.argmax()]
    if not len(groups):
        return None
    group = groups[rng.integers(len(groups))]
    options = np.where(problem.allowed[group], loads + problem.work_seconds[group], np.inf)
    return relocate(placement, group[None], int(options.argmin()), problem)


def critical_group(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """A group of the critical path to another device, the longest ones first."""
    group = _critical(land, rng)
    if group is None:
        return None
    alone = np.array([group], dtype=np.int32)
    return relocate(placement, alone, _other(placement, group, land, rng), land.problem)


def critical_send(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """One end of a send on the critical path joins the other, perhaps with its neighbours."""
    path = land.path
    if path is None or not len(path.producers):
        return None
    send = rng.integers(len(path.producers))
    mover, stays = path.producers[send], path.readers[send]
    if rng.random() < 0.5:
        mover, stays = stays, mover
    near = land.neighbours[mover]
    along = near[(placement[near] == placement[mover]) & (near != stays)]
    along = along[rng.random(len(along)) < rng.choice((0.0, 0.5))]
    return relocate(placement, np.append(along, mover), int(placement[stays]), land.problem)


def make_room(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """A group that is not on the critical path leaves the device that the path waits for."""
    path = land.path
    if path is None or path.crowded.sum() <= 0:
        return None
    odds = np.cumsum(path.crowded)
    device = int(np.searchsorted(odds, rng.random() * odds[-1], side="right"))
    here = np.setdiff1d(land.free[placement[land.free] == device], path.groups)
    if not len(here):
        return None
    group = here[rng.integers(len(here))]
    return relocate(placement, group[None], _other(placement, group, land, rng), land.problem)


def critical_swap(
    placement: GroupPlacement, land: Landscape, rng: np.random.Generator
) -> GroupPlacement | None:
    """A group of the critical path changes places with a group of another device."""
    a = _critical(land, rng)
    if a is None:
        return None
    others = land.free[placement[land.free] != placement[a]]
    if not len(others):
        return None
    b = others[rng.integers(len(others))]
    allowed = land.problem.allowed
    if not (allowed[a, placement[b]] and allowed[b, placement[a]]):
        return None
    moved = placement.copy()
    moved[a], moved[b] = placement[b], placement[a]
    return moved


def _critical(land: Landscape, rng: np.random.Generator) -> np.int32 | None:
    """A group with a choice on the critical path, drawn by its seconds there."""
    if land.path is None:
        return None
    can = land.problem.allowed[land.path.groups].sum(axis=1) > 1
    odds = np.cumsum(land.path.seconds * can)
    if not len(odds) or odds[-1] <= 0:
        return None
    return np.int32(land.path.groups[np.searchsorted(odds, rng.random() * odds[-1], side="right")])


MOVES: tuple[Move, ...] = (
    one_group,
    with_neighbours,
    swap,
    window,
    boundary,
    module,
    cluster,
    follow,
    cut_edge,
    unload,
    critical_group,
    critical_send,
    make_room,
    critical_swap,
)


def _other(
    placement: GroupPlacement, group: np.int32, land: Landscape, rng: np.random.Generator
) -> int:
    """Another device that `group` may be on."""
    options = land.problem.allowed[group].copy()
    options[placement[group]] = False
    return int(rng.choice(np.flatnonzero(options)))


def _module_sets(problem: Problem, can: NDArray[np.bool_]) -> tuple[GroupSet, ...]:
    """Distinct sets of 2 groups or more that lie in one module, outermost first."""
    inside: dict[str, set[int]] = {}
    pairs = dict.fromkeys(zip(problem.graph.modules, problem.groups.of_op.tolist(), strict=True))
    for path, group in pairs:
        parts = path.split(".") if path and can[group] else []
        for depth in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:depth]), set()).add(group)
    most = MODULE_SHARE * len(problem.free)
    sets = {tuple(sorted(groups)) for groups in inside.values() if 2 <= len(groups) <= most}
    return tuple(np.array(groups, dtype=np.int32) for groups in sorted(sets))


def _cluster_sets(problem: Problem, can: NDArray[np.bool_]) -> tuple[GroupSet, ...]:
    """Kruskal's unions of 2 to `CLUSTER_GROUPS` groups, in order of making."""
    sources, destinations, sizes = problem.edges
    clusters: list[list[int]] = [[group] for group in range(len(can))]
    found: list[GroupSet] = []
    for edge in np.lexsort((destinations, sources, -sizes))[:CLUSTER_EDGES].tolist():
        a, b = clusters[sources[edge]], clusters[destinations[edge]]
        if a is b or not (can[sources[edge]] and can[destinations[edge]]):
            continue
        if len(a) + len(b) > min(CLUSTER_GROUPS, MODULE_SHARE * len(problem.free)):
            continue
        union = sorted(a + b)
        for group in union:
            clusters[group] = union
        found.append(np.array(union, dtype=np.int32))
    return tuple(found)
