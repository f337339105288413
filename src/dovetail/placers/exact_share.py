"""A bound on `load` from one device of each kind: what the best of them may do.

Let every group have a weight p(g) >= 0, of sum 1. In a plan of largest load L the devices of kind
c, k(c) of them and alike, hold disjoint sets of groups; take of each kind the set that weighs most.
All sets together weigh 1. So no plan has largest load L where

    share(p, L) = max sum_c k(c) p(S(c))    with disjoint sets S(c), load(S(c)) <= L,
                                            bytes(S(c)) <= capacity(c)

is less than 1. That has one device where the whole problem has k: nothing is symmetric, and a
mixed-integer solver proves much in it. `load` counts a net that enters or leaves the set at its
cheapest hop. First p are seconds, and L the least that makes share(p, L) >= 1. Then p is bettered
for an L half way to the best plan: the sets found so far give the linear programme

    min sum_c k(c) s(c)    with p(S) <= s(c) for each set S of kind c found so far, sum p = 1

whose p are mixed half and half with the best so far; where its optimum is 1 or more no p refutes L.

This is the dual of the formulation by sets of groups, solved by cutting planes: Vanderbeck, "On
Dantzig-Wolfe decomposition in integer programming and ways to perform branching", Operations
Research 48 (2000), https://doi.org/10.1287/opre.48.1.111.12453, section 2, with p as multipliers.
Differences: no branching; stabilised by mixing, within a box about the best p.
HiGHS solves in floating point to a feasibility of 1e-6; bounds are lowered by `MARGIN`.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array

from dovetail.placers.budget import Budget
from dovetail.placers.exact_master import necessary_bytes
from dovetail.placers.problem import Problem

MARGIN = 2e-6
NODE_EVALUATIONS = 10.0
"""Evaluations of a budget that one node of a search tree costs."""
CLOSE_ENOUGH = 1e-3
"""Relative gap that weights are not bettered for."""
BOX = 0.8
"""How far weights may move at once, relative to themselves and to an equal share."""
RELATIVE_GAP = 1e-3
"""Of the solver: what is left open is lost to the bound."""

Float64 = NDArray[np.float64]


@dataclass
class _Rows:
    """A sparse system lower <= A v <= upper under construction, rows of (column, value)."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        self.rows += [len(self.lower)] * len(terms)
        self.columns += [column for column, _ in terms]
        self.values += [value for _, value in terms]
        self.lower.append(lower)
        self.upper.append(upper)

    def matrix(self, columns: int) -> coo_array:
        shape = (len(self.lower), columns)
        return coo_array((self.values, (self.rows, self.columns)), shape=shape)


def share_bound(problem: Problem, budget: Budget) -> None:
    """Prove what can be proven within `budget`, each bound as it is found.

    A budget in evaluations pays `NODE_EVALUATIONS` a node of the search trees.
    """
    shares = _Shares(problem)
    if not shares.kinds or shares.sum_seconds <= 0:
        return
    weights = shares.seconds / shares.sum_seconds
    _prove(budget, shares.least_load(weights, budget))
    low, high = _interval(budget)
    pool: list[tuple[float, list[Float64]]] = []
    target, best = (low + high) / 2, np.inf
    best_weights = weights
    while np.isfinite(high) and high - low > CLOSE_ENOUGH * high and not budget.exhausted:
        share, sets = shares.most_share(weights, target, budget)
        if share < best:
            best, best_weights = share, weights
        pool += [] if sets is None else [(target, sets)]
        if share < 1 - MARGIN:
            _prove(budget, target)
            low, target, best = target, (target + high) / 2, np.inf
        within = [of_pool for reached, of_pool in pool if reached <= target]
        if sets is None or not within:
            return
        least, weights = shares.better_weights(within, best_weights)
        if least >= 1:
            high, target, best = target, (low + target) / 2, np.inf


def _prove(budget: Budget, seconds: float) -> None:
    low, high = _interval(budget)
    seconds = min(seconds * (1 - MARGIN), high)
    if seconds > low:
        budget.prove(seconds, "share of one device (MILP)")


def _interval(budget: Budget) -> tuple[float, float]:
    """The best bound and the best value, inf if nothing fits yet."""
    best, bound = budget.best, budget.bound
    high = np.inf if best is None or best[0].lacking_bytes else best[0].value
    return 0.0 if bound is None else bound.seconds, high


class _Shares:
    """The mixed-integer programme, whatever the weights.

    seconds    [groups] on the device that takes each fastest; `sum_seconds` is the unit of load
    first      first column of each kind; column 0 is L
    """

    def __init__(self, problem: Problem) -> None:
        self.kinds = [_Kind(problem, of_kind) for of_kind in _kinds(problem)]
        seconds = np.where(problem.allowed, problem.load.work_seconds, np.inf).min(axis=1)
        self.seconds, self.sum_seconds = seconds, float(seconds.sum())
        self.groups = problem.groups.count
        self.first: list[int] = []
        self._system = _Rows()
        columns = 1
        for kind in self.kinds if self.sum_seconds > 0 else []:
            self.first.append(columns)
            columns += _add_kind(kind, columns, self.sum_seconds, self._system)
        for group in range(self.groups):
            self._system.add([(column + group, 1.0) for column in self.first], 0.0, 1.0)
        self._columns = columns

    def least_load(self, weights: Float64, budget: Budget) -> float:
        """Seconds that the largest load has at least by these weights."""
        objective = np.zeros(self._columns)
        objective[0] = 1.0
        bound, _ = self._solve(objective, (-self._share(weights), np.inf), budget)
        return bound * self.sum_seconds

    def most_share(
        self, weights: Float64, load_seconds: float, budget: Budget
    ) -> tuple[float, list[Float64] | None]:
        """What the share of a load is at most, and the set of each kind that has about that."""
        limit = load_seconds / self.sum_seconds
        bound, columns = self._solve(self._share(weights), (None, limit), budget)
        if columns is None:
            return -bound, None
        return -bound, [np.rint(columns[i : i + self.groups]) for i in self.first]

    def better_weights(self, pool: list[list[Float64]], centre: Float64) -> tuple[float, Float64]:
        """The least share that any weights give the sets of a pool, and weights between `centre`
        and the best of those within a box about it."""
        count = len(self.kinds)
        objective = np.concatenate([np.zeros(self.groups), [kind.count for kind in self.kinds]])
        rows = np.array([
            np.concatenate([of_kind, -np.eye(count)[c]])
            for sets in pool
            for c, of_kind in enumerate(sets)
        ])  # fmt: skip
        one = np.concatenate([np.ones(self.groups), np.zeros(count)])[None]
        free = [(0.0, None)] * (self.groups + count)
        width = BOX * centre
        box = [*zip(centre - width, centre + width + BOX / self.groups, strict=True)]
        found = [
            linprog(objective, A_ub=rows, b_ub=np.zeros(len(rows)), A_eq=one, b_eq=[1], bounds=b)
            for b in (free, box + free[:count])
        ]
        least, moved = found[0].fun, found[1].x
        assert least is not None and moved is not None, "bounded, and the centre is feasible"
        return float(least), (centre + moved[: self.groups]) / 2

    def _share(self, weights: Float64) -> Float64:
        """[columns] minus what a set weighs, over all devices of its kind."""
        columns = np.zeros(self._columns)
        for first, kind in zip(self.first, self.kinds, strict=True):
            columns[first : first + self.groups] = -kind.count * weights
        return columns

    def _solve(
        self, objective: Float64, limits: tuple[Float64 | None, float], budget: Budget
    ) -> tuple[float, Float64 | None]:
        """The bound on the least objective, and the best columns found; with a share of at least 1
        by limits[0], if given, and a load of limits[1] at most."""
        system, share = self._system, limits[0]
        matrix = system.matrix(self._columns)
        constraints = [LinearConstraint(matrix, system.lower, system.upper)]
        if share is not None:
            constraints.append(LinearConstraint(share[None], 1.0, np.inf))
        most = np.concatenate([[limits[1]], *(kind.most for kind in self.kinds)])
        nodes = int(min(budget.left / NODE_EVALUATIONS, 10**9)) if not budget.timed else 10**9
        found = milp(
            objective,
            integrality=np.concatenate([[0], *(kind.whole for kind in self.kinds)]),
            bounds=Bounds(np.zeros(self._columns), most),
            constraints=constraints,
            options={
                "time_limit": float(budget.left_seconds) * (0.5 if share is None else 1.0),
                "node_limit": max(nodes, 1),
                "mip_rel_gap": RELATIVE_GAP,
            },
        )
        if not budget.timed:
            budget.charge(NODE_EVALUATIONS * (1 + int(found.mip_node_count or 0)))
        bound = found.mip_dual_bound
        if bound is None and found.status == 0:
            bound = found.fun
        return float(bound) if bound is not None and np.isfinite(bound) else -np.inf, found.x


class _Kind:
    """Devices that the bound does not tell apart.

    enters, leaves   [nets] seconds at least, if it is made elsewhere and read here, or the reverse
    whole, most      [columns] of its variables: is it an integer, and its upper bound
    """

    def __init__(self, problem: Problem, devices: list[int]) -> None:
        self.problem, self.device, self.count = problem, devices[0], len(devices)
        self.enters, self.leaves = _crossings(problem, self.device)
        groups, nets = problem.groups.count, len(self.enters)
        self.whole = np.concatenate([np.ones(groups), np.zeros(2 * nets)]).astype(np.int8)
        may = problem.allowed[:, self.device].astype(np.float64)
        self.most = np.concatenate([may, np.ones(2 * nets)])


def _add_kind(kind: _Kind, first: int, sum_seconds: float, system: _Rows) -> int:
    """Rows of one kind's set, whose columns begin at `first`; return how many it has."""
    load, groups, device = kind.problem.load, kind.problem.groups.count, kind.device
    into = first + groups
    out = into + len(kind.enters)
    work = np.where(kind.problem.allowed[:, device], load.work_seconds[:, device], 0.0)
    terms = [(0, -1.0)]
    terms += [(first + g, float(work[g] / sum_seconds)) for g in np.flatnonzero(work).tolist()]
    for net in range(len(kind.enters)):
        source = int(load.net_sources[net])
        for target in load.net_targets[load.net_offsets[net] : load.net_offsets[net + 1]].tolist():
            row = [(first + target, -1.0)]
            if source >= 0:
                row.append((first + source, 1.0))
            if kind.enters[net] > 0:
                system.add([(into + net, 1.0), *row], 0.0, np.inf)
            if kind.leaves[net] > 0:
                negated = [(column, -value) for column, value in row]
                system.add([(out + net, 1.0), *negated], 0.0, np.inf)
        if kind.enters[net] > 0:
            terms.append((into + net, float(kind.enters[net] / sum_seconds)))
        if kind.leaves[net] > 0:
            terms.append((out + net, float(kind.leaves[net] / sum_seconds)))
    system.add(terms, -np.inf, 0.0)
    stay = necessary_bytes(kind.problem)[0] / max(1.0, float(load.capacities[device]))
    system.add([(first + g, float(stay[g])) for g in np.flatnonzero(stay).tolist()], 0.0, 1.0)
    return len(kind.most)


def _kinds(problem: Problem) -> list[list[int]]:
    """Devices that count, the alike together; none where a device that does not count may be
    used, since what it holds nobody pays for."""
    counted = problem.load.counted.astype(bool)
    if problem.allowed[:, ~counted].any():
        return []
    kinds: dict[tuple[bytes, ...], list[int]] = {}
    for device in np.flatnonzero(counted & problem.allowed.any(axis=0)).tolist():
        enters, leaves = _crossings(problem, device)
        work = problem.load.work_seconds[:, device]
        parts = (work, enters, leaves, problem.load.capacities[device])
        kinds.setdefault(tuple(np.asarray(part).tobytes() for part in parts), []).append(device)
    return list(kinds.values())


def _crossings(problem: Problem, device: int) -> tuple[Float64, Float64]:
    """[nets] seconds that `device` pays at least for a net that enters it, and for one that leaves
    it."""
    load = problem.load
    hops = (
        load.net_sends[:, None, None] * load.latency_seconds
        + load.net_bytes[:, None, None] * load.seconds_per_byte
    )
    hops[hops < 1e-18] = 0.0  # links that cost nothing have a bandwidth nevertheless
    others = [d for d in range(load.devices) if d != device]
    enters, leaves = np.zeros(len(hops)), np.zeros(len(hops))
    for net in range(len(hops)):
        source = int(load.net_sources[net])
        homes = [load.host] if source < 0 else others
        into = [a if load.linked[a, device] else load.host for a in homes]
        enters[net] = min((float(hops[net, a, device]) for a in into), default=0.0)
        away = [d if load.linked[device, d] else load.host for d in others]
        if source >= 0:
            leaves[net] = min((float(hops[net, device, d]) for d in away), default=0.0)
    return enters, leaves
