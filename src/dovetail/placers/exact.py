"""Exact placement by CP-SAT: a plan, a bound, and a proof where the budget reaches for one.

What a placement costs is what the evaluator says. CP-SAT solves a relaxation of it, whose optimum
no placement beats, and the two meet by logic-based Benders decomposition:

    repeat: placement, bound = CP-SAT, with objective < best value so far
            infeasible: the best so far is optimal; none so far: no placement fits
            evaluate the placement, and rule it out

`load`: `exact_load`, whose relaxation is the objective itself but for memory, and, where a first
round leaves a gap, the bound of `exact_share`. `step`: `exact_step`, where ops and transfers are
intervals. `latency`: `exact_latency`. Where placements are few (`can_enumerate`), evaluating every
one is the faster proof, and is used if the budget reaches for it.

Papers: Hooker & Ottosson, "Logic-based Benders decomposition", Mathematical Programming 96 (2003),
https://doi.org/10.1007/s10107-003-0375-9, section 3; Perron & Didier, CP-SAT,
https://developers.google.com/optimization/cp/cp_solver. Differences: cuts are plain no-goods, one
placement (and its copies over alike devices) at a time, since the evaluator's order is no optimum.

A budget in evaluations buys `DETERMINISTIC_SECONDS` of CP-SAT for each, on one thread, so that the
same budget gives the same plan; a budget of seconds uses `budget.threads`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from ortools.sat.python import cp_model

from dovetail.errors import NoPlanFitsError, TooManyIntervalsError
from dovetail.placers.budget import Budget
from dovetail.placers.exact_latency import latency_master
from dovetail.placers.exact_load import load_master
from dovetail.placers.exact_master import Master
from dovetail.placers.exact_share import share_bound
from dovetail.placers.exact_step import intervals_needed, step_master
from dovetail.placers.exhaustive import can_enumerate, every_placement
from dovetail.placers.problem import GroupPlacement, Problem

MOST_INTERVALS = 40_000
"""Of the `step` model: beyond it CP-SAT spends minutes before its first bound."""
MOST_HOPS = 60_000
"""Of the `load` model, nets x devices: building it takes no more than some 20 s, which no budget
cuts short."""
DETERMINISTIC_SECONDS = 1e-3
"""CP-SAT's deterministic seconds that one evaluation of a budget buys."""
FIRST_EVALUATIONS = 2000.0
"""What CP-SAT may spend on `load` before `exact_share`: what is easy needs no more."""
SHARE_OF_SHARE = 0.6
"""Share of the budget that `exact_share` may have."""
NEVER = 2**31
"""Rounds that no search has."""
ROUNDING = 1e-9
"""Relative: what sums in another order may differ by."""
POLL_SECONDS = 0.05


def exact(
    problem: Problem,
    budget: Budget,
    *,
    enumerate_after: int = 0,
) -> GroupPlacement:
    """The best placement, proven if the budget reaches; else the best known when it ends.

    enumerate_after   rounds of CP-SAT before every placement may be evaluated instead

    Every bound proven goes to `budget.prove`. Raises `NoPlanFitsError` where no placement fits
    into memory, which is then proven, and `TooManyIntervalsError` for a model of more than
    `MOST_INTERVALS` or `MOST_HOPS`.
    """
    search = _Search(problem, budget)
    budget.score(problem, problem.fastest[None], always=True)
    if not enumerate_after and search.enumerate():
        return search.answer()
    build = _builder(problem)
    search.prepare(build)
    if problem.objective == "load":
        search.round(FIRST_EVALUATIONS)
        if not search.settled:
            search.bound_by_share()
    rounds, most_evaluations = 0, np.inf
    if enumerate_after < NEVER and can_enumerate(problem, budget):
        most_evaluations = problem.placements  # a round may cost what evaluating all does
    while not (search.settled or budget.exhausted):
        search.prepare(build)
        went_on = search.round(most_evaluations)
        rounds += 1
        if enumerate_after < NEVER and (rounds >= enumerate_after or not went_on):
            went_on = not (search.settled or search.enumerate()) and went_on
        if not went_on:
            break
    return search.answer()


def _builder(problem: Problem) -> Callable[[Problem, float], Master]:
    if problem.objective == "load":
        hops = len(problem.load.net_sources) * problem.devices
        if hops > MOST_HOPS:
            raise TooManyIntervalsError(hops, MOST_HOPS)
        return load_master
    if problem.objective == "latency":
        return latency_master
    if (needed := intervals_needed(problem)) > MOST_INTERVALS:
        raise TooManyIntervalsError(needed, MOST_INTERVALS)
    return step_master


@dataclass(eq=False)
class _Search:
    """What a call of `exact` knows.

    master    the model, once it is built
    scale_seconds   the value that it was built for
    ruled_out   placements that were evaluated
    closed    nothing better than the best is left, up to a tolerance
    proof     why no placement fits, where that is proven
    """

    problem: Problem
    budget: Budget
    master: Master | None = None
    scale_seconds: float = np.inf
    ruled_out: list[GroupPlacement] = field(default_factory=list)
    closed: bool = False
    proof: str = ""

    @property
    def settled(self) -> bool:
        """Proven, up to the model's resolution."""
        if self.closed or self.budget.closed:
            return True
        if self.master is None or self.budget.bound is None or not np.isfinite(self.limit_seconds):
            return False
        gap_seconds = self.limit_seconds - self.budget.bound.seconds
        return gap_seconds <= self.master.resolution_seconds + ROUNDING * self.limit_seconds

    def prepare(self, build: Callable[[Problem, float], Master]) -> None:
        """Build the model, again where the best value is far from what it was built for."""
        known = self.budget.score(self.problem, self.problem.fastest[None])[0].value
        scale_seconds = self.limit_seconds if np.isfinite(self.limit_seconds) else known
        far = max(scale_seconds, self.scale_seconds) > 2 * min(scale_seconds, self.scale_seconds)
        if self.master is None or far:
            self.scale_seconds = scale_seconds
            self.master = build(self.problem, scale_seconds)
            for placement in self.ruled_out:
                self.master.forbid(placement)

    @property
    def limit_seconds(self) -> float:
        """The best value so far; inf where nothing fits yet."""
        best = self.budget.best
        return np.inf if best is None or best[0].lacking_bytes else best[0].value

    def answer(self) -> GroupPlacement:
        if self.proof:
            raise NoPlanFitsError(self.proof)
        return self.problem.fastest if self.budget.best is None else self.budget.best[1]

    def enumerate(self) -> bool:
        """Evaluate every placement; False if they are many or the budget does not reach."""
        if not can_enumerate(self.problem, self.budget):
            return False
        scores = self.budget.score(self.problem, every_placement(self.problem))
        if not all(np.isfinite(score.lacking_bytes) for score in scores):
            return False
        self._conclude("every placement", 0.0)
        return True

    def _conclude(self, proof: str, tolerance_seconds: float) -> None:
        """Nothing is better than the best so far by more than a tolerance."""
        self.closed = True
        if np.isfinite(self.limit_seconds):
            self.budget.prove(self.limit_seconds - tolerance_seconds, proof)
        else:
            self.proof = proof

    def bound_by_share(self) -> None:
        budget = self.budget
        part = budget.slice(
            seconds=SHARE_OF_SHARE * budget.left_seconds, evaluations=SHARE_OF_SHARE * budget.left
        )
        in_background(budget, lambda: share_bound(self.problem, part), lambda: None)

    def round(self, most_evaluations: float) -> bool:
        """Solve for the worth of some evaluations, evaluate what was found and rule it out; False
        if that came to nothing."""
        assert self.master is not None, "built before the first round"
        master, budget = self.master, self.budget
        self._tighten(master)
        seen = _Seen(master)
        solver = _solver(self.problem, budget, most_evaluations)
        status: list[cp_model.CpSolverStatus] = []
        in_background(
            budget, lambda: status.append(solver.solve(master.model, seen)), solver.stop_search
        )
        if not status:
            return False
        if not budget.timed:
            budget.charge(solver.deterministic_time / DETERMINISTIC_SECONDS)
        if status[0] == cp_model.INFEASIBLE:
            self._conclude("CP-SAT", master.resolution_seconds + ROUNDING * self.limit_seconds)
            return False
        assert status[0] != cp_model.MODEL_INVALID, master.model.validate()
        bound_seconds = solver.best_objective_bound * master.unit_seconds * (1 - ROUNDING)
        if bound_seconds > 0:
            budget.prove(min(bound_seconds, self.limit_seconds), "CP-SAT")
        return self._rule_out(seen.placements)

    def _tighten(self, master: Master) -> None:
        """Look only for what is better than the best, and start from it."""
        budget, model = self.budget, master.model
        if np.isfinite(self.limit_seconds):
            less_seconds = self.limit_seconds * (1 - ROUNDING) - master.resolution_seconds
            model.add(master.objective <= int(less_seconds / master.unit_seconds))
        if budget.bound is not None:
            model.add(master.objective >= master.units(budget.bound.seconds * (1 - ROUNDING)))
        if budget.best is not None:
            master.hint(budget.best[1])

    def _rule_out(self, placements: list[GroupPlacement]) -> bool:
        assert self.master is not None, "built before the first round"
        scores = self.budget.score(self.problem, np.array(placements)) if placements else []
        for placement, score in zip(placements, scores, strict=True):
            if np.isfinite(score.lacking_bytes):
                self.master.forbid(placement)
                self.ruled_out.append(placement)
        return any(np.isfinite(score.lacking_bytes) for score in scores)


class _Seen(cp_model.CpSolverSolutionCallback):
    """Keeps the placement of every solution, in the order found."""

    def __init__(self, master: Master) -> None:
        super().__init__()
        self._master = master
        self.placements: list[GroupPlacement] = []

    def on_solution_callback(self) -> None:
        placement = self._master.problem.fastest.copy()
        for group in self._master.problem.free.tolist():
            for device, literal in self._master.at[group].items():
                if self.boolean_value(literal):
                    placement[group] = device
        self.placements.append(placement)


def _solver(problem: Problem, budget: Budget, most_evaluations: float) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.random_seed = problem.seed % 2**31
    parameters.catch_sigint_signal = False
    parameters.num_workers = budget.threads if budget.timed else 1
    if budget.timed:
        parameters.max_time_in_seconds = budget.left_seconds
    most_evaluations = min(most_evaluations, budget.left)
    if np.isfinite(most_evaluations):
        parameters.max_deterministic_time = most_evaluations * DETERMINISTIC_SECONDS
    return solver


def in_background(budget: Budget, work: Callable[[], object], stop: Callable[[], object]) -> None:
    """Run `work` in a thread, so that a Ctrl-C is seen here and `stop`s it.

    What cannot be stopped is left behind, to end at its own limit.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    patience = 40
    while thread.is_alive() and patience > 0:
        try:
            thread.join(POLL_SECONDS)
        except KeyboardInterrupt:
            budget.interrupted = True
        if budget.interrupted:
            stop()
            patience -= 1
    if failures:
        raise failures[0]
