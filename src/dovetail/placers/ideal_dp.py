"""Finds the contiguous optimum by a dynamic programme over all ideals of the groups.

An ideal is a set of groups that holds all predecessors of its members. Contiguous stages are the
differences along a chain of ideals, and `contiguity.best_chain` finds the best chain. Adding an
element whose predecessors are all in an ideal gives another ideal. Elements are numbered in
topological order, so each ideal is generated once, from the ideal without its last element. The
ideal up(I, x), which is I with x added, never has to be looked up as a set:

    up(I, x), x > last(I)   a new ideal
    up(I, x), x < last(I)   up(up(I - last(I), x), last(I))

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423, section 5.
Differences: the search looks only for plans better than those of `linear_dp`, which cuts off most
pairs of ideals (see `contiguity`). It serves any number of device kinds, and pins. If the evaluator
finds that memory lacks, the search runs again with less room. It refuses more than `MOST_IDEALS`
ideals.

Exact if all transfers go over a host that has no load, as on published instances, and if only
parameters and state take memory. Otherwise the plan is only as good as that estimate of the loads.
"""

import numpy as np

from dovetail.errors import TooManyIdealsError
from dovetail.graph.records import csr_offsets
from dovetail.placers.budget import Budget
from dovetail.placers.contiguity import (
    MOST_ENTRIES,
    ContiguousChain,
    ElementOrder,
    Lattice,
    best_chain,
    elements_of,
    forward_order,
    kinds_of,
    order_of,
)
from dovetail.placers.linear_dp import (
    ChainLimits,
    along_orders,
    fitted,
    is_exact,
    orders_of,
    step_evaluations,
    to_placement,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Int32

MOST_IDEALS = 100_000
"""More ideals than this are refused, because they would take too much memory."""
PROOF = "ideals (dynamic programme)"
"""Name of this method's lower bounds in plans and reports."""
_SHAVED = 1e-12
"""Proven bounds are lowered by this relative margin, because floating-point sums of the same
numbers differ with the order of addition."""


def ideal_dp(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best contiguous plan; if the budget ends first, the best along the orders of
    `linear_dp`.

    Each step of the programme is charged as one op of an evaluation. If contiguity is asked for and
    the loads are exact, the optimum is handed to the budget as a lower bound. If backward groups
    without forward ops were given a place in the order, the bound is the optimum without them.
    Raises `TooManyIdealsError`.
    """
    order = order_of(problem, merging=True)
    lattice = ideals_of(order)
    rng = np.random.default_rng([problem.seed, budget.ledger.next_round()])
    orders = list(orders_of(order, rng))

    proven: list[float] = []

    def search(limits: ChainLimits) -> list[GroupPlacement]:
        chain, element_of, complete = best_stages(problem, budget, (order, lattice, orders), limits)
        # A bound must come from a search that excludes no plan that fits: one that counts only the
        # bytes that groups hold for sure, with all the room there is. `fitted` runs that one first,
        # so `proven[0]` is it; later searches have less room.
        relaxed = limits.strict and limits.group_bytes is problem.load.resident_bytes
        if relaxed and complete and chain is not None:
            proven.append(chain.value)
        return [] if chain is None else [to_placement(problem, chain, element_of)]

    scored_placements = fitted(problem, budget, (problem.device_sets[0], True), search)
    if problem.contiguous and is_exact(problem) and proven:
        plain = forward_order(problem, mirrored=False, merging=True)
        if (plain.element_of == order.element_of).all():
            budget.ledger.prove(proven[0] * (1 - _SHAVED), PROOF)
        else:
            # Contiguity does not limit groups without forward ops. A search that fixes their place
            # in the order excludes valid plans, so its optimum is no bound: they are left out.
            kinds = kinds_of(problem, problem.device_sets[0], problem.load.capacities)
            orders = list(orders_of(plain, np.random.default_rng(problem.seed)))
            limits = ChainLimits(kinds, problem.load.resident_bytes)
            space = (plain, ideals_of(plain), orders)
            chain, _, complete = best_stages(problem, budget, space, limits)
            if complete and chain is not None:
                budget.ledger.prove(chain.value * (1 - _SHAVED), PROOF)
    return min(scored_placements, key=lambda pair: pair[0])[1]


def best_stages(
    problem: PlacementProblem,
    budget: Budget,
    space: tuple[ElementOrder, Lattice, list[Int32]],
    limits: ChainLimits,
) -> tuple[ContiguousChain | None, Int32, bool]:
    """Return (the best chain, [groups] the element of each group, whether the search was complete).

    space   (order, its ideals, sequences of its elements for `along_orders`)

    A complete search proves that no chain is better. Raises `TooManyIdealsError` if the table of
    ideals x used devices would be too large.
    """
    order, lattice, orders = space
    states = np.prod([len(members) + 1.0 for members in limits.kinds.members])
    if len(lattice.parents) * states > MOST_ENTRIES:
        raise TooManyIdealsError(len(lattice.parents), int(MOST_ENTRIES / states))
    # A good plan along some order costs little, and its value is a ceiling that cuts off most of
    # the search over all ideals.
    seeds = along_orders(problem, budget, (order, orders), limits)
    elements = elements_of(
        problem, order.element_of, limits.kinds, limits.group_bytes, limits.strict
    )
    best, complete = best_chain(
        elements,
        lattice,
        limits.kinds,
        ceiling=seeds[0][0].value if seeds else np.inf,
        budget=budget,
        step_evaluations=step_evaluations(problem),
    )
    if best is None and seeds:
        return *seeds[0], complete
    return best, order.element_of, complete


def ideals_of(order: ElementOrder, most: int = MOST_IDEALS) -> Lattice:
    """Return every ideal, smaller ones first. O(ideals x elements).

    Raises `TooManyIdealsError` if there are more than `most`.
    """
    # The elements before and after each, as CSR.
    before, after = order.edges[np.lexsort(order.edges.T)].T
    before_offsets, befores = csr_offsets(after, order.elements), np.ascontiguousarray(before)
    before, after = order.edges[np.lexsort(order.edges.T[::-1])].T
    after_offsets, afters = csr_offsets(before, order.elements), np.ascontiguousarray(after)
    parents, lasts = np.full(most + 1, -1, np.int32), np.full(most + 1, -1, np.int32)
    offsets, marks = np.zeros(most + 2, np.int64), np.full(order.elements, -1, np.int32)
    room = 4 * (most + order.elements + 1)
    # How many edges there are is known only after the enumeration, so it is repeated with twice the
    # room until they fit.
    while True:
        adds, leads = np.empty(room, np.int32), np.empty(room, np.int32)
        lattice = Lattice(offsets, adds, leads, parents, lasts, marks)
        ideals = _enumerate(before_offsets, befores, after_offsets, afters, lattice, most)
        if ideals > most:
            raise TooManyIdealsError(ideals, most)
        if ideals > 0:
            break
        room *= 2
    edges = int(offsets[ideals])
    return Lattice(
        add_offsets=offsets[: ideals + 1].copy(),
        adds=adds[:edges].copy(),
        leads=leads[:edges].copy(),
        parents=parents[:ideals].copy(),
        lasts=lasts[:ideals].copy(),
        ranks=np.arange(order.elements, dtype=np.int32),
    )


@kernel
def _enumerate(  # noqa: C901  (kernel)
    before_offsets: Int32,
    befores: Int32,
    after_offsets: Int32,
    afters: Int32,
    lattice: Lattice,
    most: int,
) -> int:
    """Fill in the ideals, and the edges from each ideal to those with one element more.

    Returns the number of ideals; a number above `most` if there are more; 0 if the arrays of edges
    are too short. `lattice.ranks` holds marks meanwhile: marks[e] is the ideal that was last marked
    with element e as a member, so that nothing has to be cleared between ideals.
    """
    marks = lattice.ranks
    count, ideal, end = 1, 0, 0
    for element in range(len(marks)):
        marks[element] = -1
    while ideal < count:
        if end + len(marks) > len(lattice.adds):
            return 0
        start, last = end, lattice.lasts[ideal]
        lattice.add_offsets[ideal] = start
        if ideal == 0:
            for element in range(len(marks)):
                if before_offsets[element] == before_offsets[element + 1]:
                    lattice.adds[end] = element
                    end += 1
        else:
            # An element can be added if it could be added to the parent, or if it reads `last` and
            # all else that it reads is in.
            # Members are the last elements of the ideal and of those that it was generated from.
            below = ideal
            while below > 0:
                marks[lattice.lasts[below]] = ideal
                below = lattice.parents[below]
            parent = lattice.parents[ideal]
            for i in range(lattice.add_offsets[parent], lattice.add_offsets[parent + 1]):
                if lattice.adds[i] != last:
                    lattice.adds[end] = lattice.adds[i]
                    end += 1
            for i in range(after_offsets[last], after_offsets[last + 1]):
                ready = True
                for j in range(before_offsets[afters[i]], before_offsets[afters[i] + 1]):
                    if marks[befores[j]] != ideal:
                        ready = False
                if ready:
                    # The list from `start` to `end` stays ascending.
                    at = end
                    while at > start and lattice.adds[at - 1] > afters[i]:
                        lattice.adds[at] = lattice.adds[at - 1]
                        at -= 1
                    lattice.adds[at] = afters[i]
                    end += 1
        lattice.add_offsets[ideal + 1] = end
        for i in range(start, end):
            # An edge to an ideal that another parent generates is filled in below.
            lattice.leads[i] = -1
            if lattice.adds[i] > last:
                if count > most:
                    return count
                lattice.leads[i] = count
                if count < len(lattice.parents):
                    lattice.parents[count] = ideal
                    lattice.lasts[count] = lattice.adds[i]
                count += 1
        ideal += 1
    # By the recurrence on top. Of the two edges that it reads, the parent's is filled in by now,
    # because parents have lower numbers. The other one adds `last`, so it leads to a new ideal and
    # is there already.
    for ideal in range(1, count):
        last, parent = lattice.lasts[ideal], lattice.parents[ideal]
        for i in range(lattice.add_offsets[ideal], lattice.add_offsets[ideal + 1]):
            if lattice.leads[i] < 0:
                beside = _lead(lattice, parent, lattice.adds[i])
                lattice.leads[i] = _lead(lattice, beside, last)
    return count


@inlined
def _lead(lattice: Lattice, ideal: int, element: int) -> int:
    """Return the ideal that adding `element` to an ideal leads to."""
    i = lattice.add_offsets[ideal]
    while lattice.adds[i] != element:
        i += 1
    return int(lattice.leads[i])
