"""Small communication times: list scheduling that keeps favourite children beside their parents.

Of the ops after op i one may follow it at once on the same device: its favourite child. Which, says
a linear programme on any number of devices, with x_ij = 0 for the favourite child j of i, else 1:

    minimise w      s_i + p_i + c_ij x_ij <= s_j      for every i before j
                    s_i + p_i             <= w
                    sum over j of x_ij    >= children of i - 1
                    sum over i of x_ij    >= parents of j - 1          s >= 0,  0 <= x <= 1

p seconds of an op, c seconds of a send, s starts. A child with x_ij < 1/2 is the favourite; the
sums leave at most one to each op, and each op the favourite of at most one. Then `etf`, but a
device that has just run i is *awake* if it could start the favourite child, and no other device
sooner: it waits for that child, and meanwhile takes *urgent* ops only, those that any device could
start by now.

Papers: Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors
with small communication delays", ETFA 1995, https://doi.org/10.1109/ETFA.1995.496777; with memory,
m-SCT of Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020,
https://arxiv.org/abs/2301.08695.
Differences: p and c are means over the devices of the last of `PlacementProblem.device_sets` (the
papers' devices are alike). Sends within a group take no time, because groups stay together. Ops
that can share no device are never favourites. Of solutions within 1/1000 of each other, the one
that saves more seconds of sends is taken. A device waits at most as long as the send to the child
takes; the favourite child goes before urgent ops if it can start; ties of starts fall to devices
that are not awake. Where more than `MOST_EDGES` sends go between groups, or the solver finds no
solution within `MOST_ITERATIONS`, favourite children come from the heaviest sends, heaviest first.
Unlike devices, groups and memory: as in `etf`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
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
from dovetail.simulator.flat import Float64, Int8, Int32

MOST_EDGES = 8_000
"""Sends between groups up to which the linear programme is solved."""
MOST_ITERATIONS = 10_000
"""Of the dual simplex: some seconds. Not a limit of time, so that a problem has one solution."""
SAVING_WEIGHT = 1e-3
"""Of all seconds of sends that are saved, against w as a share of the longest path."""
ROUNDING = 1e-6
"""What the solver may be off."""


def sct(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """The better of schedules over all devices and over the fastest model of device only."""
    tasks = tasks_of(problem)
    favourites = favourites_of(tasks, limits_of(problem, len(problem.device_sets) - 1))
    return best_of_sets(
        problem, budget, lambda limits: etf_schedule(tasks, limits, favourites).placed
    )


def favourites_of(tasks: Tasks, limits: GroupLimits, most_edges: int = MOST_EDGES) -> Favourites:
    """Favourite children, and what the sends to them take."""
    latency, per_byte = mean_transfer(tasks, limits)
    sends = latency + per_byte * tasks.before_bytes
    ops = np.arange(len(tasks.of_op), dtype=np.int32)
    afters = np.repeat(ops, np.diff(tasks.before_offsets))
    before_groups, after_groups = tasks.of_op[tasks.befores], tasks.of_op[afters]
    sends[before_groups == after_groups] = 0.0
    together = (limits.choices[before_groups] & limits.choices[after_groups]).any(axis=1)
    may = together & (sends > 0)
    chosen = None
    if may.any() and may.sum() <= most_edges:
        chosen = _solve(tasks, mean_seconds(tasks, limits), sends, afters, may)
    if chosen is None:
        chosen = _heaviest(tasks, sends, afters, may)
    parents, children = tasks.befores[chosen], afters[chosen]
    favourite = np.full(len(tasks.of_op), -1, np.int32)
    favourite[parents] = children
    patience = np.zeros(len(tasks.of_op))
    patience[parents] = sends[chosen]
    return Favourites(favourite, patience)


def _solve(
    tasks: Tasks, op_seconds: Float64, sends: Float64, afters: Int32, may: NDArray[np.bool_]
) -> NDArray[np.intp] | None:
    """Indices of the sends to favourite children, by the linear programme; None: not solved.

    Columns: x of the sends that `may`, then s of the ops, then w; times over the longest path.
    """
    paths = np.zeros(len(op_seconds))
    longest_paths(tasks, op_seconds, sends, paths)
    span, befores, ops = paths.max(), tasks.befores, len(op_seconds)
    edges = np.flatnonzero(may)
    count, columns = len(edges), len(edges) + ops + 1
    x, s, w = np.arange(count), count + np.arange(ops), np.full(ops, columns - 1)
    every, each, ones = np.arange(len(befores)), np.arange(ops), np.ones

    def block(rows: int, *entries: tuple[object, object, object]) -> Any:
        """A sparse [rows, columns] from (values, rows, columns)."""
        values, row, column = (np.concatenate(part) for part in zip(*entries, strict=True))
        return sparse.coo_array((values, (row, column)), shape=(rows, columns))

    order = block(
        len(befores),
        (ones(len(befores)), every, s[befores]),
        (-ones(len(befores)), every, s[afters]),
        (sends[edges] / span, edges, x),
    )
    ends = block(ops, (ones(ops), each, s), (-ones(ops), each, w))
    children = block(ops, (-ones(count), befores[edges], x))
    parents = block(ops, (-ones(count), afters[edges], x))
    waits = op_seconds[befores] + np.where(may, 0.0, sends)
    most = [1.0 - np.bincount(by[edges], minlength=ops) for by in (befores, afters)]
    solve: Any = linprog  # its stubs know no sparse matrices
    solved = solve(
        np.concatenate([SAVING_WEIGHT * sends[edges] / sends[edges].sum(), np.zeros(ops), [1.0]]),
        A_ub=sparse.vstack([order, ends, children, parents]).tocsr(),
        b_ub=np.concatenate(
            [-waits / span, -op_seconds / span, *(np.minimum(m, 0.0) for m in most)]
        ),
        bounds=np.stack([np.zeros(columns), np.repeat([1.0, np.inf], [count, ops + 1])], axis=1),
        method="highs-ds",
        options={"maxiter": MOST_ITERATIONS},
    )
    return np.asarray(edges[solved.x[:count] < 0.5 - ROUNDING]) if solved.status == 0 else None


def _heaviest(
    tasks: Tasks, sends: Float64, afters: Int32, may: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Indices of sends, the heaviest first, of which no two share a parent or a child."""
    edges = np.flatnonzero(may)
    edges = edges[np.argsort(-sends[edges], kind="stable")]
    taken = np.zeros((2, len(tasks.of_op)), np.int8)
    chosen = np.zeros(len(edges), np.int8)
    _match(tasks.befores[edges], afters[edges], taken, chosen)
    return np.asarray(edges[chosen == 1])


@kernel
def _match(parents: Int32, children: Int32, taken: Int8, chosen: Int8) -> None:
    for i in range(len(parents)):
        if taken[0, parents[i]] == 0 and taken[1, children[i]] == 0:
            taken[0, parents[i]] = taken[1, children[i]] = chosen[i] = 1
