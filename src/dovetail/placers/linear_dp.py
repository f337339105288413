"""Contiguous stages along one order of the groups: the best that any of several orders allows.

A dynamic programme over the prefixes of a topological order: `contiguity.best_chain` on a lattice
whose only ideals are these prefixes. Orders go depth first (of the groups that are ready, one that
became so last), from the inputs and, turned round, from the outputs, or by levels; random ones
follow, new at each call.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423, section 5 (a Hamiltonian path, found by a
depth-first search, leaves one ideal per prefix).
Differences: several orders, not one; any kinds of devices, and pins; more than `MAX_CELLS` elements
are cut into cells of about equal work; transfers are counted as if all went over the host, and what
the orders yield is compared by the evaluator, which also says whether it fits: where not, rooms
shrink and it is done again. A group without forward ops goes where the largest load stays least,
unless backward edges give it a place in the order (`contiguity.forward_order`). Unless contiguity
is asked for, also stages where a group that may not be there weighs nothing, and goes to its
fastest device. For other objectives than `load` it is a guess: the stages of least load.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import Budget, Score
from dovetail.placers.contiguity import (
    LOOSE,
    MOST_ENTRIES,
    DeviceKinds,
    ElementOrder,
    Lattice,
    StageChain,
    best_chain,
    elements_of,
    is_star,
    kinds_of,
    order_of,
    topological,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.simulator import group_loads
from dovetail.simulator.flat import Float64, Int32

MAX_CELLS = 512
"""An order of more elements is cut into this many cells of about equal work."""
SHRINKS = 2
"""Searches for each way of counting bytes: one, and one more with less room."""
FIXED_ORDERS = 6
"""Orders that are tried even beyond the budget; `_endless_orders` yields them first."""
RANDOM_ORDERS = 24
"""Random orders at each call, at most."""
MOST_CANDIDATES = 8
"""Chains, the best by the estimate, that the evaluator judges."""
ESTIMATE_SLACK = 1.25
"""Chains whose estimate is up to this many times the best are still evaluated."""
ORDER_STEPS = 1_000_000
"""All orders together take at most this many steps (elements and edges)."""


class StageLimits(NamedTuple):
    """What a search for stages is handed.

    kinds        devices, and their room
    group_bytes  [groups] what they hold
    strict       a group is only where it may be
    """

    kinds: DeviceKinds
    group_bytes: Float64
    strict: bool = True


Search = Callable[[StageLimits], list[GroupPlacement]]


def linear_dp(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """The best plan of all orders by the evaluator; ties: of the first. The fixed orders are tried
    even beyond the budget; each step of the programme is charged as one op of an evaluation."""
    order = order_of(problem)
    orders = list(orders_of(order, np.random.default_rng([problem.seed, budget.next_round()])))

    def search(limits: StageLimits) -> list[GroupPlacement]:
        chains = along_orders(problem, budget, (order, orders), limits)
        chains = chains[:1] if is_exact(problem) else chains
        return [to_placement(problem, chain, element_of) for chain, element_of in chains]

    scored_placements = []
    for devices in problem.device_sets:
        for strict in (True, False):
            if strict or not (problem.contiguous or problem.allowed[:, devices].all()):
                scored_placements += fitted(problem, budget, (devices, strict), search)
    return min(scored_placements, key=lambda pair: pair[0])[1]


def is_exact(problem: PlacementProblem) -> bool:
    """The loads of stages are the objective."""
    return problem.objective == "load" and is_star(problem)


def fitted(
    problem: PlacementProblem, budget: Budget, where: tuple[list[int], bool], search: Search
) -> list[tuple[Score, GroupPlacement]]:
    """The placements that `search` finds, with their scores; at least one.

    Where the evaluator finds a device over its capacity, the search runs again with less room, and
    then with more of what groups make counted as theirs. Where no room is enough, it is ignored.

    where   (devices, strict)
    """
    devices, strict = where
    scored_placements: list[tuple[Score, GroupPlacement]] = []
    # Resident bytes come first, as they are: they are the least a group holds, and bounds rely on
    # a search with exactly these bytes.
    held = problem.load.resident_bytes
    for sizes in (held, problem.group_bytes, problem.made_bytes):
        room = problem.capacities.astype(np.float64)
        for _ in range(SHRINKS):
            kinds = usable_kinds(problem, devices, room)
            placements = search(StageLimits(kinds, np.asarray(sizes, np.float64), strict))
            if not placements:
                break
            scores = budget.score(problem, placements[0][None], always=True)
            scores += budget.score(problem, np.stack(placements))[1:]
            scored_placements += zip(scores, placements, strict=True)
            score, placement = min(scored_placements[-len(scores) :], key=lambda pair: pair[0])
            if not 0 < score.lacking_bytes < np.inf:
                return scored_placements
            share = problem.capacities / np.maximum(budget.peaks(placement), 1)
            for members in map(list, kinds.members):
                if share[members].min() < 1:
                    room[members] *= 0.95 * share[members].min()
    if not scored_placements:
        unlimited = usable_kinds(problem, devices, np.full(problem.devices, np.inf))
        placements = search(StageLimits(unlimited, problem.load.resident_bytes, False))[:1]
        placements = placements or [problem.fastest]
        scored_placements += zip(
            budget.score(problem, placements[0][None], always=True), placements, strict=True
        )
    return scored_placements


def usable_kinds(problem: PlacementProblem, devices: list[int], room_bytes: Float64) -> DeviceKinds:
    """Kinds of device; where the table would be too large, every device one of its own."""
    kinds = kinds_of(problem, devices, room_bytes)
    if np.prod([len(members) + 1.0 for members in kinds.members]) > MOST_ENTRIES // MAX_CELLS:
        kinds = kinds_of(problem, devices, room_bytes, alone=True)
    return kinds


def step_evaluations(problem: PlacementProblem) -> float:
    """What a step of a programme costs: an evaluation takes about one for every op and read."""
    return 1 / (len(problem.graph) + len(problem.graph.input_tensors))


def along_orders(
    problem: PlacementProblem,
    budget: Budget,
    space: tuple[ElementOrder, list[Int32]],
    limits: StageLimits,
) -> list[tuple[StageChain, Int32]]:
    """The best chain of each order with what [groups] is its element, best first: of orders better
    than those before, or where loads of stages are an estimate, not much worse. Random orders end
    with the budget."""
    order, orders = space
    exact = is_exact(problem)
    whole = elements_of(problem, order.element_of, limits.kinds, limits.group_bytes, limits.strict)
    chains: list[tuple[StageChain, Int32]] = []
    ceiling = np.inf
    for number, sequence in enumerate(orders):
        if number >= FIXED_ORDERS and budget.exhausted:
            break
        elements, element_of = whole, order.element_of
        if order.elements > MAX_CELLS:
            cells = _cells(whole.work_seconds.min(axis=1), sequence)
            element_of = np.where(element_of == LOOSE, LOOSE, cells[element_of])
            elements = elements_of(
                problem, element_of, limits.kinds, limits.group_bytes, limits.strict
            )
            sequence = np.arange(len(elements.held_bytes), dtype=np.int32)
        chain, _ = best_chain(
            elements,
            _path(sequence),
            limits.kinds,
            ceiling=ceiling,
            budget=budget,
            step_evaluations=step_evaluations(problem),
            always=True,
        )
        if chain is not None:
            chains.append((chain, element_of))
            ceiling = min(ceiling, chain.value * (1.0 if exact else ESTIMATE_SLACK))
    return sorted(chains, key=lambda pair: pair[0].value)[:MOST_CANDIDATES]


def to_placement(problem: PlacementProblem, chain: StageChain, element_of: Int32) -> GroupPlacement:
    """Groups on the devices of their stages; loose ones, in descending work, each where the largest
    load is then least and what they hold fits; ties: the lowest device."""
    placement = problem.fastest.copy()
    taken = element_of != LOOSE
    placement[taken] = np.array(chain.devices, np.int32)[chain.stages[element_of[taken]]]
    placement = problem.settle(placement)
    model = problem.load
    loose = problem.free[~taken[problem.free]]
    held = np.bincount(
        placement[taken], weights=model.resident_bytes[taken], minlength=problem.devices
    )
    for group in loose[
        np.argsort(-problem.work_seconds[loose].min(axis=1), kind="stable")
    ].tolist():
        choices = np.flatnonzero(problem.allowed[group])
        trials = np.repeat(placement[None], len(choices), axis=0)
        trials[:, group] = choices
        room = held[choices] + model.resident_bytes[group] <= problem.capacities[choices]
        loads = group_loads(model, trials)
        # The other devices' loads decide between devices that are not the fullest.
        ranked = np.lexsort((loads.sum(axis=1), loads.max(axis=1), ~room))
        placement = trials[ranked[0]]
        held[placement[group]] += model.resident_bytes[group]
    return placement


def orders_of(order: ElementOrder, rng: np.random.Generator) -> Iterator[Int32]:
    """Topological orders of the elements, within `ORDER_STEPS` but at least two: six fixed ones,
    then random ones."""
    steps = order.elements + len(order.edges)
    most = max(2, min(FIXED_ORDERS + RANDOM_ORDERS, ORDER_STEPS // max(steps, 1)))
    yield from itertools.islice(_endless_orders(order, rng), most)


def _endless_orders(order: ElementOrder, rng: np.random.Generator) -> Iterator[Int32]:
    edges, turned = order.edges, order.edges[:, ::-1]
    ascending = np.arange(order.elements)
    yield topological(order.elements, edges, ascending)
    yield topological(order.elements, turned, ascending)[::-1]
    yield np.argsort(_levels(order.elements, edges), kind="stable").astype(np.int32)
    yield np.argsort(-_levels(order.elements, turned), kind="stable").astype(np.int32)
    yield topological(order.elements, edges, ascending[::-1])
    yield topological(order.elements, turned, ascending[::-1])[::-1]
    while True:
        yield topological(order.elements, edges, rng.permutation(order.elements))
        yield topological(order.elements, turned, rng.permutation(order.elements))[::-1]


def _levels(count: int, edges: NDArray[np.integer]) -> NDArray[np.int64]:
    """[elements] longest path from the start, in edges."""
    levels = np.zeros(count, np.int64)
    sequence = topological(count, edges, np.arange(count))
    rank = np.empty(count, np.int64)
    rank[sequence] = np.arange(count)
    for before, after in edges[np.argsort(rank[edges[:, 0]], kind="stable")].tolist():
        levels[after] = max(levels[after], levels[before] + 1)
    return levels


def _cells(work_seconds: Float64, sequence: Int32) -> Int32:
    """[elements] cell of each: `MAX_CELLS` runs of the order, of about equal work and count."""
    finite = np.where(np.isfinite(work_seconds), work_seconds, 0.0)[sequence]
    share = finite / max(finite.sum(), 1e-300) + 1 / len(sequence)
    cells = np.empty(len(sequence), np.int32)
    cells[sequence] = np.minimum(np.cumsum(share) / 2 * MAX_CELLS, MAX_CELLS - 1).astype(np.int32)
    return np.unique(cells, return_inverse=True)[1].astype(np.int32)


def _path(sequence: Int32) -> Lattice:
    """The prefixes of an order."""
    count = len(sequence)
    ranks = np.empty(count, np.int32)
    ranks[sequence] = np.arange(count)
    ideals = np.arange(count + 1)
    return Lattice(
        add_offsets=np.append(ideals, count).astype(np.int64),
        adds=np.ascontiguousarray(sequence, np.int32),
        leads=ideals[1:].astype(np.int32),
        parents=(ideals - 1).astype(np.int32),
        lasts=np.concatenate([[-1], sequence]).astype(np.int32),
        ranks=ranks,
    )
