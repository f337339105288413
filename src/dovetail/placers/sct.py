"""Small communication times: list scheduling that keeps favourite children beside their parents.

Of the ops that read op i, one can follow it at once on the same device: its favourite child. A
linear programme that assumes any number of devices chooses it. x_ij is 0 if j is the favourite
child of i, else 1:

    minimise w      s_i + p_i + c_ij x_ij <= s_j      for every i before j
                    s_i + p_i             <= w
                    sum over j of x_ij    >= children of i - 1
                    sum over i of x_ij    >= parents of j - 1          s >= 0,  0 <= x <= 1

where p are the seconds of ops, c those of sends, and s the starts. A child with x_ij < 1/2 is the
favourite. Because of the sums, an op has at most one favourite child and is the favourite of at
most one parent. The schedule is then that of `etf` with one change. A device that has just run i is
*awake* if it could start the favourite child, and no other device could start it sooner. An awake
device waits for that child and meanwhile takes only *urgent* ops, those that any device could start
by now.

Papers: Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors
with small communication delays", ETFA 1995, https://doi.org/10.1109/ETFA.1995.496777; with memory,
m-SCT of Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020,
https://arxiv.org/abs/2301.08695.
Differences: p and c are means over the devices of the last of `PlacementProblem.device_sets` (the
papers' devices are alike). Sends within a group take no time, because groups stay together. Ops
that can share no device are never favourites. Of solutions within 1/1000 of each other, the one
that saves more seconds of sends is taken. A device waits at most as long as the send to the child
takes. The favourite child goes before urgent ops if it can start. Ties of starts fall to devices
that are not awake. If more than `MOST_EDGES` sends go between groups, or the solver finds no
solution within `MOST_ITERATIONS`, favourite children are chosen greedily, the longest sends first.
Unlike devices, groups and memory are treated as in `etf`.
"""

from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from dovetail.placers.budget import Budget
from dovetail.placers.etf import Favourites, etf_schedule
from dovetail.placers.list_scheduling import (
    GroupLimits,
    Tasks,
    best_of_sets,
    limits_of,
    longest_paths,
    mean_seconds,
    mean_transfer,
    tasks_of,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import kernel
from dovetail.simulator.flat import Int8, Int32

MOST_EDGES = 8_000
"""The linear programme is solved only if at most this many sends go between groups."""
MOST_ITERATIONS = 10_000
"""Limit on the iterations of the dual simplex, which take some seconds. It is not a limit of time,
so that a problem has the same solution on every run."""
SAVING_WEIGHT = 1e-3
"""Weight in the objective of the sum of x, in which sends count by their share of all seconds. The
other term is w, as a share of the longest path, with weight 1."""
ROUNDING = 1e-6
"""The solver's x may be off by this much, so an x just below 1/2 does not count as below."""


def sct(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the better of the schedules over all devices and over those of the fastest model."""
    tasks = tasks_of(problem)
    favourites = favourites_of(tasks, limits_of(problem, len(problem.device_sets) - 1))
    return best_of_sets(
        problem, budget, lambda limits: etf_schedule(tasks, limits, favourites).placed
    )


def favourites_of(tasks: Tasks, limits: GroupLimits, most_edges: int = MOST_EDGES) -> Favourites:
    """Return the favourite child of each op, and how long a device may wait for it: the seconds of
    the send to it."""
    latency, per_byte = mean_transfer(tasks, limits)
    sends = latency + per_byte * tasks.before_bytes
    counts = np.diff(tasks.before_offsets)
    afters = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    before_groups, after_groups = tasks.of_op[tasks.befores], tasks.of_op[afters]
    sends[before_groups == after_groups] = 0.0
    together = (limits.choices[before_groups] & limits.choices[after_groups]).any(axis=1)
    may = together & (sends > 0)
    edges = np.flatnonzero(may)
    chosen = None
    if 0 < len(edges) <= most_edges:
        # The linear programme. The columns are x of the sends that `may`, then s of the ops, then
        # w. Times are shares of the longest path, so that all numbers are of like size.
        op_seconds = mean_seconds(tasks, limits)
        paths = np.zeros(len(op_seconds))
        longest_paths(tasks, op_seconds, sends, paths)
        span, befores, ops = paths.max(), tasks.befores, len(op_seconds)
        count, columns = len(edges), len(edges) + ops + 1
        x, s, w = np.arange(count), count + np.arange(ops), np.full(ops, columns - 1)
        every, each, ones = np.arange(len(befores)), np.arange(ops), np.ones

        def block(rows: int, *entries: tuple[object, object, object]) -> Any:
            """Return a sparse [rows, columns] array from entries of (values, rows, columns)."""
            values, row, column = (np.concatenate(part) for part in zip(*entries, strict=True))
            return sparse.coo_array((values, (row, column)), shape=(rows, columns))

        order = block(
            len(befores),
            (ones(len(befores)), every, s[befores]),
            (-ones(len(befores)), every, s[afters]),
            (sends[edges] / span, edges, x),
        )
        ends = block(ops, (ones(ops), each, s), (-ones(ops), each, w))
        of_parents = block(ops, (-ones(count), befores[edges], x))
        of_children = block(ops, (-ones(count), afters[edges], x))
        # A send that cannot be one to a favourite child has no x: it takes its seconds in any case.
        waits = op_seconds[befores] + np.where(may, 0.0, sends)
        most = [1.0 - np.bincount(by[edges], minlength=ops) for by in (befores, afters)]
        # `Any`, because the stubs of `linprog` know no sparse matrices.
        solve: Any = linprog
        solved = solve(
            np.concatenate(
                [SAVING_WEIGHT * sends[edges] / sends[edges].sum(), np.zeros(ops), [1.0]]
            ),
            A_ub=sparse.vstack([order, ends, of_parents, of_children]).tocsr(),
            b_ub=np.concatenate(
                [-waits / span, -op_seconds / span, *(np.minimum(m, 0.0) for m in most)]
            ),
            bounds=np.stack(
                [np.zeros(columns), np.repeat([1.0, np.inf], [count, ops + 1])], axis=1
            ),
            method="highs-ds",
            options={"maxiter": MOST_ITERATIONS},
        )
        if solved.status == 0:
            chosen = edges[solved.x[:count] < 0.5 - ROUNDING]
    if chosen is None:
        # Greedily, the longest sends first, so that no two share a parent and no two share a child.
        edges = edges[np.argsort(-sends[edges], kind="stable")]
        taken = np.zeros((2, len(tasks.of_op)), np.int8)
        is_chosen = np.zeros(len(edges), np.int8)
        _match(tasks.befores[edges], afters[edges], taken, is_chosen)
        chosen = edges[is_chosen == 1]
    parents, children = tasks.befores[chosen], afters[chosen]
    favourite = np.full(len(tasks.of_op), -1, np.int32)
    favourite[parents] = children
    patience = np.zeros(len(tasks.of_op))
    patience[parents] = sends[chosen]
    return Favourites(favourite, patience)


@kernel
def _match(parents: Int32, children: Int32, taken: Int8, chosen: Int8) -> None:
    """Set `chosen` [sends] to 1 for each send whose parent and child are free yet.

    taken   [2, ops] 1 for ops that have a favourite child (row 0), or are one (row 1)
    """
    for i in range(len(parents)):
        if taken[0, parents[i]] == 0 and taken[1, children[i]] == 0:
            taken[0, parents[i]] = taken[1, children[i]] = chosen[i] = 1
