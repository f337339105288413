"""Recommends a rule, a number of workers and a window for a model here: measures, then simulates.

    measure    a few real steps of one worker on the backend: step and transfer times
    candidates rules x workers x windows, the windows by how dear a transfer is
    simulate   each of them with the user's own model on part of its data, in virtual time that is
               drawn from the measured steps
    choose     the first to a loss that half of those that do not diverge reach

Given the measured times the advice is deterministic: the budget buys a number of steps. Where it
buys too few, rules are judged by the known limits of their stability, and their speed is computed.
"""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from dovetail.errors import DivergedError, UsageError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Assignment, Backend, Watcher
from dovetail.training.divergence import diverging, remedy
from dovetail.training.history import History
from dovetail.training.records import Outcome, Row, Vector
from dovetail.training.rules import RULES, make_rule
from dovetail.training.rules.contract import Rule
from dovetail.training.step_times import StepTimes

MEASURED_STEPS, WARM_UP_STEPS = 60, 5
"""Steps of the measuring run, and how many of them are dropped as they load and compile."""
LOOK_SECONDS = 1.0
"""Seconds between two looks whether the measuring run has taken long enough."""
MEASURING_SHARE = 0.25
"""The share of the budget that measuring may take."""
WINDOWS = (4, 10, 40)
"""Windows that are considered, beside 1."""
DEAR = 0.1
"""A window is long enough when a transfer takes no more than this share of its computation."""
FEWEST_STEPS = 150
"""A simulated run needs so many steps for its losses to tell rules apart."""
EVALUATIONS, EVALUATED_BATCHES = 10, 6
"""Evaluations of a simulated run, and batches of each."""
EVENT_SECONDS, VECTOR_PASSES, PASSED_BYTES_PER_SECOND = 5e-4, 6, 4e9
"""The rough cost of handling a simulated commit, so that a budget is kept: seconds of an event, and
passes over the vector at a speed."""
OVERRUN = 1.5
"""No further candidate is simulated after so many times the budget. Only then does the advice
depend on more than the measured times."""
EVEN = 0.02
"""Times closer than this share count as equal; fewer workers win then, and the rule that stands
first."""
STABLE_MEANS = 20
"""AGN is stable up to so many workers: at 40 it loses 28 points on digits."""
SERVER_SHARE = 1 / 3
"""The share of a transfer that is taken to be the server's own work, which workers queue for."""
SUGGESTED = ("sync", "downpour", "agn", "adag-agn", "dynsgd", "aeasgd", "averaging")
"""Names of the rules that are tried, the simpler first."""
STABLE_UPDATES = 20
"""Rules that add updates bear so many of them from one point (n x lambda, for lambda > 1): DOWNPOUR
loses nothing on digits at 2 workers and windows of 10, 9 points at 10 workers, and all at 20. A
short simulated run does not always show it."""

ReportProgress = Callable[[str, float], None]
"""report(what is being done, fraction of it)."""


@dataclass(frozen=True)
class StepMeasurement:
    """How long a step and a transfer take here.

    step_seconds       of local steps, one after the other
    transfer_seconds   between two windows: commit, its application, pull
    cores              that workers share; None: each has its own machine
    """

    step_seconds: tuple[float, ...]
    transfer_seconds: float
    cores: int | None = None

    def __post_init__(self) -> None:
        if not self.step_seconds or min(self.step_seconds) <= 0:
            raise UsageError("step_seconds", "no step was measured; give more data or time")

    @property
    def mean_seconds(self) -> float:
        """Mean seconds of a step."""
        return math.fsum(self.step_seconds) / len(self.step_seconds)

    def times(self, workers: int) -> StepTimes:
        """The distribution of step times of so many workers, who share the cores."""
        slower = 1.0 if self.cores is None else max(1.0, workers / self.cores)
        return StepTimes("trace", trace=tuple(slower * seconds for seconds in self.step_seconds))


@dataclass(frozen=True)
class TrainingCandidate:
    """A way to train that may be recommended."""

    rule: str
    workers: int
    window: int


@dataclass(frozen=True)
class Evidence:
    """What is known of a candidate; nan where nothing was measured.

    loss         the best loss of the center, on a part of the data
    seconds      until the loss fell to the common level, in virtual time
    diverged     how it diverged in its simulated run; "" if it did not
    limit        why it is known to diverge in longer runs; "" if it is not
    """

    candidate: TrainingCandidate
    samples_per_second: float
    loss: float = math.nan
    seconds: float = math.nan
    staleness: float = math.nan
    diverged: str = ""
    limit: str = ""

    @property
    def stable(self) -> bool:
        """True if nothing is known against it."""
        return not (self.diverged or self.limit)


@dataclass(frozen=True)
class Advice:
    """What to use, and why.

    level   the loss that `seconds` count to; nan if nothing was simulated
    steps   of each simulated run; 0: there was no time for any
    """

    measured: StepMeasurement
    chosen: TrainingCandidate
    evidence: tuple[Evidence, ...]
    level: float
    steps: int
    why: str


@dataclass(frozen=True)
class _Tried:
    """A simulated run: losses [evaluations] of the center at virtual seconds."""

    candidate: TrainingCandidate
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    outcome: Outcome | None
    diverged: str

    @property
    def best(self) -> float:
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return min(finite, default=math.nan)

    def seconds_to(self, level: float) -> float:
        """When the loss fell to the level, linear between evaluations; nan if it never did."""
        for i, loss in enumerate(self.losses):
            if loss <= level:
                if i == 0:
                    return self.seconds[0]
                share = (self.losses[i - 1] - level) / (self.losses[i - 1] - loss)
                return self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])
        return math.nan


def silent(_doing: str, _fraction: float) -> None:
    """A `ReportProgress` that shows nothing."""


def measure(
    assignment: Assignment,
    backend: Backend,
    budget_seconds: float = 15.0,
    cores: int | None = None,
) -> StepMeasurement:
    """Times of a few steps of one worker on the backend, with a commit after each.

    cores   that workers will share, see `StepMeasurement`

    The budget counts from the first step on: the time that the backend takes to start is not in
    it. Raises what the backend raises.
    """
    job = assignment.job
    samples = MEASURED_STEPS * job.batch
    if job.samples is not None:
        samples = min(samples, job.samples)
    short = replace(job, run=uuid.uuid4().hex, samples=samples, epochs=1, workers=1, window=1)
    trial = replace(assignment, job=short, rule=make_rule("agn"), storage=None, order=None)
    rows: list[Row] = []

    def enough(_figures: list[dict[str, float]]) -> bool:
        return bool(rows) and rows[-1].seconds - rows[0].begin_seconds >= budget_seconds

    watcher = Watcher(
        every_seconds=min(LOOK_SECONDS, budget_seconds),
        evaluate=lambda *_: {},
        should_stop=enough,
        rows=rows.extend,
    )
    return measured_of(backend(trial, watcher).rows, cores)


def measured_of(rows: Sequence[Row], cores: int | None = None) -> StepMeasurement:
    """The times in the rows of one worker; its first steps, which load and compile, are dropped
    where there are others. Raises `UsageError` without any row."""
    kept = rows[WARM_UP_STEPS:] if len(rows) > 2 * WARM_UP_STEPS else rows
    steps = tuple(
        max((row.end_seconds - row.begin_seconds) / max(row.steps, 1), 1e-9) for row in kept
    )
    gaps = [b.begin_seconds - a.end_seconds for a, b in pairwise(kept)]
    if not gaps:
        gaps = [row.seconds - row.end_seconds for row in kept]
    return StepMeasurement(steps, max(float(np.median(gaps)) if gaps else 0.0, 0.0), cores)


def suggest(
    assignment: Assignment,
    measured: StepMeasurement,
    *,
    rules: Sequence[Rule] | None = None,
    evaluate: Callable[[Vector], float] | None = None,
    budget_seconds: float = 60.0,
    progress: ReportProgress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> Advice:
    """Advice for a job: its `workers` are the most to use.

    rules      candidates, bound; `SUGGESTED` at their defaults otherwise
    evaluate   the loss of a center; otherwise that of some batches of the job's own data
    """
    job = assignment.job
    by_name = {rule.name: rule for rule in rules or map(make_rule, SUGGESTED)}
    window, vector_bytes = window_of(measured), assignment.theta.nbytes
    listed = candidates(tuple(by_name), job.workers, window)
    steps = affordable_steps(measured, len(listed), budget_seconds, vector_bytes)
    if steps < FEWEST_STEPS:
        # The same rules, but without the runs of half the workers.
        fewer = candidates(tuple(by_name), job.workers, window, halves=False)
        fewer_steps = affordable_steps(measured, len(fewer), budget_seconds, vector_bytes)
        listed, steps = (fewer, fewer_steps) if fewer_steps >= FEWEST_STEPS else (listed, 0)
    if job.samples is None or not steps:
        return _by_what_is_known(measured, listed, job.batch)
    loss_of = evaluate or _center_loss(assignment)
    tried: list[_Tried] = []
    began = clock()
    for i, candidate in enumerate(listed):
        if tried and clock() - began > OVERRUN * budget_seconds:
            # The machine is slower than when it was measured.
            break
        progress(f"simulating {describe(candidate)}", i / len(listed))
        part = _part(assignment, by_name[candidate.rule], candidate, steps)
        tried.append(_simulate(part, candidate, measured, loss_of))
    judged = _judged(measured, tried, steps)
    if len(tried) == len(listed):
        return judged
    left = f"; time was up after {len(tried)} of {len(listed)} candidates"
    return replace(judged, why=judged.why + left)


def window_of(measured: StepMeasurement) -> int:
    """The shortest of `WINDOWS` whose computation makes a transfer cheap, else the longest."""
    for window in WINDOWS:
        if measured.transfer_seconds <= DEAR * window * measured.mean_seconds:
            return window
    return WINDOWS[-1]


def candidates(
    rules: Iterable[str], workers: int, window: int, halves: bool = True
) -> list[TrainingCandidate]:
    """The candidates: one worker alone; then each rule with all workers, and with half of them; at
    a window of 1 too where the rule means something else there."""
    counts = sorted({workers, max(workers // 2, 1) if halves else workers} - {1})
    listed = [TrainingCandidate("sync", 1, 1)]
    for rule in rules:
        windows = {"sync": (1,), "downpour": (1, window), "adag-agn": (1, window)}
        listed += [
            TrainingCandidate(rule, count, steps)
            for count in counts
            for steps in windows.get(rule, (window,))
        ]
    return listed


def affordable_steps(
    measured: StepMeasurement, runs: int, budget_seconds: float, vector_bytes: int
) -> int:
    """Local steps that the budget buys for each of so many simulated runs, over all workers. A
    simulated step takes the real step's computation and the handling of an event and a vector."""
    handling_seconds = EVENT_SECONDS + VECTOR_PASSES * vector_bytes / PASSED_BYTES_PER_SECOND
    step_seconds = measured.mean_seconds + handling_seconds
    evaluating = EVALUATIONS * EVALUATED_BATCHES
    return max(0, int(budget_seconds / (runs * step_seconds)) - evaluating)


def describe(candidate: TrainingCandidate) -> str:
    """ "agn, 4 workers, window 10"."""
    plural = "s" * (candidate.workers > 1)
    return f"{candidate.rule}, {candidate.workers} worker{plural}, window {candidate.window}"


def _center_loss(assignment: Assignment) -> Callable[[Vector], float]:
    """A function of the center: its mean loss over some batches, which are spread over the data."""
    learner, job = assignment.learner(0), assignment.job
    assert job.samples is not None
    count = min(job.samples, EVALUATED_BATCHES * job.batch)
    spread = np.unique(np.linspace(0, job.samples - 1, count).round().astype(np.int64))
    batches = np.array_split(spread, max(1, len(spread) // job.batch))

    def loss_of(theta: Vector) -> float:
        gradients = [learner.gradient(theta.copy(), batch, 0) for batch in batches]
        return sum(g.loss * g.samples for g in gradients) / sum(g.samples for g in gradients)

    return loss_of


def _part(
    assignment: Assignment, rule: Rule, candidate: TrainingCandidate, steps: int
) -> Assignment:
    """The candidate's run on the samples of so many steps: part of an epoch, or whole epochs."""
    job = assignment.job
    assert job.samples is not None
    wanted = steps * job.batch
    part = replace(
        job,
        run="advice",
        samples=min(job.samples, wanted),
        epochs=max(1, round(wanted / job.samples)),
        workers=candidate.workers,
        window=candidate.window,
    )
    return replace(assignment, job=part, rule=rule, storage=None, order=None)


def _simulate(
    part: Assignment,
    candidate: TrainingCandidate,
    measured: StepMeasurement,
    loss_of: Callable[[Vector], float],
) -> _Tried:
    apply_seconds = SERVER_SHARE * measured.transfer_seconds
    world: dict[str, Any] = {
        "times": measured.times(candidate.workers),
        "latency_seconds": (measured.transfer_seconds - apply_seconds) / 2,  # there, and back
        "apply_seconds": apply_seconds,
    }
    seconds, losses = [0.0], [loss_of(part.theta)]

    def evaluate(theta: Vector, _clock: int, _samples: int, now: float) -> dict[str, float]:
        seconds.append(now)
        losses.append(loss_of(theta))
        return {"loss": losses[-1]}

    def hopeless(_figures: list[dict[str, float]]) -> bool:
        return not math.isfinite(losses[-1])

    assert part.job.samples is not None
    every = max(1, part.job.samples * part.job.epochs // EVALUATIONS)
    watcher = Watcher(every_samples=every, evaluate=evaluate, should_stop=hopeless)
    outcome, diverged = None, ""
    try:
        outcome = load_backend("simulated", **world)(part, watcher)
        divergence = diverging(outcome.rows, candidate.workers)
        diverged = "" if divergence is None else divergence.detail
    except DivergedError as error:
        diverged = error.detail
    if not diverged and not math.isfinite(losses[-1]):
        diverged = f"the loss is {losses[-1]}"
    return _Tried(candidate, tuple(seconds), tuple(losses), outcome, diverged)


def _judged(measured: StepMeasurement, tried: Sequence[_Tried], steps: int) -> Advice:
    """Advice by the simulated runs: the first to the level; where all diverge, the one of the least
    loss."""
    stable = [
        run
        for run in tried
        if not (run.diverged or _known_limit(run.candidate)) and math.isfinite(run.best)
    ]
    level = float(np.median([run.best for run in stable])) if stable else math.nan
    evidence = tuple(_evidence(run, level) for run in tried)
    reached = [e for e in evidence if e.stable and math.isfinite(e.seconds)]
    if not reached:
        least = min(evidence, key=lambda e: e.loss if math.isfinite(e.loss) else math.inf)
        chosen = least.candidate
        return Advice(measured, chosen, evidence, level, steps, "all diverged: "
                      + remedy(chosen.rule, chosen.window, chosen.workers))  # fmt: skip
    fastest = min(e.seconds for e in reached)
    even = [e for e in reached if e.seconds <= (1 + EVEN) * fastest]
    # `min` keeps the first of equals, the simpler rule.
    chosen = min(even, key=lambda e: e.candidate.workers).candidate
    alone = next(e for e in evidence if e.candidate.workers == 1)
    why = f"the first to a loss of {level:.4g}, which half of the stable candidates reach"
    if chosen.workers > 1 and math.isfinite(alone.seconds):
        why += f"; {alone.seconds / fastest:.2g} times as fast as one worker"
    return Advice(measured, chosen, evidence, level, steps, why)


def _evidence(run: _Tried, level: float) -> Evidence:
    seconds = math.nan if run.diverged else run.seconds_to(level)
    rate = staleness = math.nan
    if run.outcome is not None:
        history = History(run.outcome)
        staleness = history.staleness.mean
        rate = run.outcome.samples / run.outcome.seconds if run.outcome.seconds else math.nan
    limit = _known_limit(run.candidate)
    return Evidence(run.candidate, rate, run.best, seconds, staleness, run.diverged, limit)


def _by_what_is_known(
    measured: StepMeasurement, listed: Sequence[TrainingCandidate], batch: int
) -> Advice:
    """Advice without simulated runs: the fastest of the rules that are known to be stable."""
    evidence = tuple(
        Evidence(
            candidate,
            _samples_per_second(measured, candidate, batch),
            staleness=0.0 if candidate.rule in ("sync", "averaging") else candidate.workers - 1.0,
            limit=_known_limit(candidate),
        )
        for candidate in listed
    )
    stable = [e for e in evidence if e.stable]
    fastest = max(e.samples_per_second for e in stable)
    even = [e for e in stable if e.samples_per_second >= (1 - EVEN) * fastest]
    preferred = [e for e in even if e.candidate.rule == "adag-agn"] or even
    chosen = min(preferred, key=lambda e: e.candidate.workers).candidate
    why = (
        "the most samples a second of the rules that are known to be stable there; a step takes "
        "too long to simulate any within the budget"
    )
    return Advice(measured, chosen, evidence, math.nan, 0, why)


def _known_limit(candidate: TrainingCandidate) -> str:
    """Why a candidate is known to diverge in longer runs; "" where nothing is known against it."""
    updates = candidate.workers * candidate.window
    if RULES[candidate.rule].adds_sums and candidate.window > 1 and updates > STABLE_UPDATES:
        return f"{candidate.workers} x {candidate.window} updates are added from one point"
    if candidate.rule == "agn" and candidate.workers > STABLE_MEANS:
        return f"{candidate.workers} windows are added from one point"
    return ""


def _samples_per_second(
    measured: StepMeasurement, candidate: TrainingCandidate, batch: int
) -> float:
    """Speed of a candidate, computed from the measured times. In rules that gather, all wait for
    the slowest worker; the server takes one commit after the other."""
    times = measured.times(candidate.workers)
    rng = np.random.default_rng(0)
    drawn = times.draw(rng, (200, candidate.workers, candidate.window)).sum(axis=2)
    waits = candidate.rule in ("sync", "averaging")
    window_seconds = float((drawn.max(axis=1) if waits else drawn.mean(axis=1)).mean())
    busy_seconds = candidate.workers * measured.transfer_seconds * SERVER_SHARE
    samples = candidate.workers * candidate.window * batch
    return samples / max(window_seconds + measured.transfer_seconds, busy_seconds)
