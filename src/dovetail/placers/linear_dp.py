"""Finds the best contiguous stages along each of several topological orders of the groups.

For one order, a dynamic programme runs over its prefixes: `contiguity.best_chain` on a lattice
whose only ideals are these prefixes. An order is depth first (of the ready groups, the one that
became ready last comes next) or by levels. Each kind starts from the inputs or, reversed, from the
outputs. Random orders follow, which are new at each call.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423, section 5 (a Hamiltonian path, found by a
depth-first search, leaves one ideal per prefix).
Differences: it tries several orders, not one. It serves any kinds of devices, and pins. An order of
more than `MAX_CELLS` elements is cut into cells of about equal work. The programme counts transfers
as if all went over the host; the evaluator then compares the plans of the orders. If the evaluator
finds that memory lacks, the search runs again with less room. A group without forward ops goes
where the largest load stays least, unless backward edges give it a place in the order
(`contiguity.forward_order`). Unless contiguity is asked for, it also tries stages with groups that
may not be on the stage's device: such a group weighs nothing there and goes to its fastest device.
For other objectives than `load` the plan is a guess, namely the stages of least load.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from dovetail.placers.budget import Budget, Score
from dovetail.placers.contiguity import (
    LOOSE,
    MOST_ENTRIES,
    ContiguousChain,
    DeviceKinds,
    ElementOrder,
    Lattice,
    best_chain,
    elements_of,
    is_star,
    kinds_of,
    longest_paths,
    order_of,
    topological,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.simulator import group_loads
from dovetail.simulator.flat import Float64, Int32

MAX_CELLS = 512
"""An order of more elements than this is cut into this many cells of about equal work."""
SHRINKS = 2
"""Number of searches for each way of counting bytes: one with all room, and one with less."""
FIXED_ORDERS = 6
"""This many orders, those that are not random, are tried even beyond the budget."""
RANDOM_ORDERS = 24
"""At most this many random orders are tried at each call."""
MOST_CANDIDATES = 8
"""The evaluator judges at most this many chains, the best by estimated load."""
ESTIMATE_SLACK = 1.25
"""If loads are only estimates, a chain is kept if its load is up to this many times the best."""
ORDER_STEPS = 1_000_000
"""The orders together take at most this many steps; one order takes elements + edges."""


class ChainLimits(NamedTuple):
    """What limits a search for stages.

    kinds        devices by kind, and their room
    group_bytes  [groups] bytes that each group is counted with
    strict       a group is only in stages whose device it may be on
    """

    kinds: DeviceKinds
    group_bytes: Float64
    strict: bool = True


Search = Callable[[ChainLimits], list[GroupPlacement]]


def linear_dp(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best plan of all orders, judged by the evaluator; ties: the earlier one.

    The fixed orders are tried even beyond the budget. Each step of the programme is charged as one
    op of an evaluation.
    """
    order = order_of(problem)
    rng = np.random.default_rng([problem.seed, budget.ledger.next_round()])
    orders = list(orders_of(order, rng))

    def search(limits: ChainLimits) -> list[GroupPlacement]:
        chains = along_orders(problem, budget, (order, orders), limits)
        # If the loads are exact, the first chain is the best, and evaluating others tells nothing.
        chains = chains[:1] if is_exact(problem) else chains
        return [to_placement(problem, chain, element_of) for chain, element_of in chains]

    scored_placements = []
    for devices in problem.device_sets:
        for strict in (True, False):
            if strict or not (problem.contiguous or problem.allowed[:, devices].all()):
                scored_placements += fitted(problem, budget, (devices, strict), search)
    return min(scored_placements, key=lambda pair: pair[0])[1]


def is_exact(problem: PlacementProblem) -> bool:
    """Whether the loads that the programme computes for stages are exactly the objective."""
    return problem.objective == "load" and is_star(problem)


def fitted(
    problem: PlacementProblem, budget: Budget, where: tuple[list[int], bool], search: Search
) -> list[tuple[Score, GroupPlacement]]:
    """Return the placements that `search` finds, with their scores; at least one.

    If the evaluator finds a device over its capacity, the search runs again with less room, and
    then with more bytes counted for each group. If no search finds a plan, one more search ignores
    memory.

    where   (devices that may be used, `ChainLimits.strict`)
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
            placements = search(ChainLimits(kinds, np.asarray(sizes, np.float64), strict))
            if not placements:
                break
            # The first placement is scored even beyond the budget, so that there is a result.
            scores = budget.score(problem, placements[0][None], always=True)
            scores += budget.score(problem, np.stack(placements))[1:]
            scored_placements += zip(scores, placements, strict=True)
            score, placement = min(scored_placements[-len(scores) :], key=lambda pair: pair[0])
            if not 0 < score.lacking_bytes < np.inf:
                return scored_placements
            share = problem.capacities / np.maximum(budget.ledger.peaks(placement), 1)
            # Devices of one kind share one room. It shrinks by the worst overrun of the kind, and
            # by 5 % more, because another plan will not overrun by exactly the same share.
            for members in map(list, kinds.members):
                if share[members].min() < 1:
                    room[members] *= 0.95 * share[members].min()
    if not scored_placements:
        unlimited = usable_kinds(problem, devices, np.full(problem.devices, np.inf))
        placements = search(ChainLimits(unlimited, problem.load.resident_bytes, False))[:1]
        placements = placements or [problem.fastest]
        scored_placements += zip(
            budget.score(problem, placements[0][None], always=True), placements, strict=True
        )
    return scored_placements


def usable_kinds(problem: PlacementProblem, devices: list[int], room_bytes: Float64) -> DeviceKinds:
    """Return the devices by kind, or each as a kind of its own if the table would be too large."""
    kinds = kinds_of(problem, devices, room_bytes)
    if np.prod([len(members) + 1.0 for members in kinds.members]) > MOST_ENTRIES // MAX_CELLS:
        kinds = kinds_of(problem, devices, room_bytes, alone=True)
    return kinds


def step_evaluations(problem: PlacementProblem) -> float:
    """Return what one step of a programme is charged, as a share of an evaluation: an evaluation
    takes about one step for every op and read."""
    return 1 / (len(problem.graph) + len(problem.graph.input_tensors))


def along_orders(
    problem: PlacementProblem,
    budget: Budget,
    space: tuple[ElementOrder, list[Int32]],
    limits: ChainLimits,
) -> list[tuple[ContiguousChain, Int32]]:
    """Return (chain, [groups] element of each group) for the best chains of the orders, best first.

    An order adds its best chain only if that is better than those of earlier orders or, if the
    loads are estimates, at most `ESTIMATE_SLACK` times the best. Random orders end with the budget.
    """
    order, orders = space
    exact = is_exact(problem)
    whole = elements_of(problem, order.element_of, limits.kinds, limits.group_bytes, limits.strict)
    chains: list[tuple[ContiguousChain, Int32]] = []
    ceiling = np.inf
    for number, sequence in enumerate(orders):
        if number >= FIXED_ORDERS and budget.exhausted:
            break
        elements, element_of = whole, order.element_of
        if order.elements > MAX_CELLS:
            # At most `MAX_CELLS` runs of the order, balanced in work and in number of elements. The
            # shares of work and of count sum to 1 each, hence the division by 2 below. The count
            # keeps elements without work from all falling into one cell.
            seconds = whole.work_seconds.min(axis=1)
            finite = np.where(np.isfinite(seconds), seconds, 0.0)[sequence]
            share = finite / max(finite.sum(), 1e-300) + 1 / len(sequence)
            upto = np.cumsum(share) / 2 * MAX_CELLS
            cells = np.empty(len(sequence), np.int32)
            cells[sequence] = np.minimum(upto, MAX_CELLS - 1).astype(np.int32)
            # Heavy elements leave cells empty; renumbering closes the gaps. Cells are numbered
            # along the sequence, so the order of the cells is 0, 1, 2, ...
            cells = np.unique(cells, return_inverse=True)[1].astype(np.int32)
            element_of = np.where(element_of == LOOSE, LOOSE, cells[element_of])
            elements = elements_of(
                problem, element_of, limits.kinds, limits.group_bytes, limits.strict
            )
            sequence = np.arange(len(elements.held_bytes), dtype=np.int32)
        # The lattice whose ideals are the prefixes of the order.
        ideals = np.arange(len(sequence) + 1)
        prefixes = Lattice(
            add_offsets=np.append(ideals, len(sequence)).astype(np.int64),
            adds=np.ascontiguousarray(sequence, np.int32),
            leads=ideals[1:].astype(np.int32),
            parents=(ideals - 1).astype(np.int32),
            lasts=np.concatenate([[-1], sequence]).astype(np.int32),
            ranks=np.argsort(sequence).astype(np.int32),
        )
        chain, _ = best_chain(
            elements,
            prefixes,
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


def to_placement(
    problem: PlacementProblem, chain: ContiguousChain, element_of: Int32
) -> GroupPlacement:
    """Return a chain as a placement: groups go to the devices of their stages.

    Loose groups, which stand in no stage, follow in descending work. Each goes to a device that has
    room for it, where the largest load is then least, then the sum of loads; ties: the lowest
    device.
    """
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
    """Return topological orders of the elements: six fixed ones, then random ones.

    There are as many as `ORDER_STEPS` allows, but at least two.
    """
    count, edges, turned = order.elements, order.edges, order.edges[:, ::-1]

    def endless() -> Iterator[Int32]:
        ascending = np.arange(count)
        yield topological(count, edges, ascending)
        yield topological(count, turned, ascending)[::-1]
        yield np.argsort(longest_paths(count, edges), kind="stable").astype(np.int32)
        yield np.argsort(-longest_paths(count, turned), kind="stable").astype(np.int32)
        yield topological(count, edges, ascending[::-1])
        yield topological(count, turned, ascending[::-1])[::-1]
        while True:
            # Random ones are depth first, from either end in turn.
            yield topological(count, edges, rng.permutation(count))
            yield topological(count, turned, rng.permutation(count))[::-1]

    steps = count + len(edges)
    most = max(2, min(FIXED_ORDERS + RANDOM_ORDERS, ORDER_STEPS // max(steps, 1)))
    return itertools.islice(endless(), most)
