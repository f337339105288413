"""Recommends a rule, a number of workers and a window for a model here: measures, then simulates.

    measure    runs a few real steps of one worker on the backend: step and transfer times
    candidates lists rules x workers x windows; the window is long enough to make transfers cheap
    simulate   trains the user's own model by each candidate on part of its data, in virtual time
               that is drawn from the measured steps
    choose     takes the candidate that is first to reach the median of the stable candidates' best
               losses

The advice is deterministic given the measured times, because the budget is converted into a number
of steps and not watched on a clock (but see `OVERRUN`). If the budget buys too few steps to
simulate, rules are judged by the known limits of their stability, and their speed is computed.
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
from dovetail.training.records import Job, Outcome, Row, Vector
from dovetail.training.rules import RULES, make_rule
from dovetail.training.rules.contract import Rule
from dovetail.training.step_times import StepTimes
from dovetail.units import format_seconds

MEASURED_STEPS, WARM_UP_STEPS = 60, 5
"""The measuring run makes `MEASURED_STEPS` steps. The first `WARM_UP_STEPS` are dropped, because
libraries load and kernels compile during them."""
LOOK_SECONDS = 1.0
"""The measuring run is checked against its time limit every so many seconds."""
MEASURING_SHARE = 0.25
"""The share of the budget that measuring may take."""
WINDOWS = (4, 10, 40)
"""Candidates use the shortest of these windows that makes transfers cheap (`window_of`). Some rules
are also tried at a window of 1."""
DEAR = 0.1
"""A window is long enough when a transfer takes no more than this share of its computation."""
FEWEST_STEPS = 150
"""Simulated runs of fewer steps are not made, because their losses do not tell rules apart."""
EVALUATIONS, EVALUATED_BATCHES = 10, 6
"""A simulated run evaluates its center about `EVALUATIONS` times, on `EVALUATED_BATCHES` batches
each time."""
EVENT_SECONDS, VECTOR_PASSES, PASSED_BYTES_PER_SECOND = 5e-4, 6, 4e9
"""These give the rough cost of handling one simulated commit, so that the budget is kept: an event
costs `EVENT_SECONDS`, and the vector is passed over `VECTOR_PASSES` times at this speed."""
OVERRUN = 1.5
"""No further candidate is simulated after so many times the budget. Only then does the advice
depend on more than the measured times."""
EVEN = 0.02
"""Times closer than this share count as equal. Of equals, the candidate with fewer workers wins,
then the one that is listed first."""
STABLE_MEANS = 20
"""AGN counts as stable up to so many workers. On digits it loses 28 points of accuracy at 40."""
SERVER_SHARE = 1 / 3
"""This share of a transfer is assumed to be the server's own work, which workers queue for."""
SUGGESTED = ("sync", "downpour", "agn", "adag-agn", "dynsgd", "aeasgd", "averaging")
"""Names of the rules that are tried. Simpler rules stand first, because the first wins a tie."""
STABLE_UPDATES = 20
"""Rules that add updates count as stable up to so many updates from one point (n x lambda, for
lambda > 1). On digits with windows of 10, DOWNPOUR loses no accuracy at 2 workers, 9 points at 10
workers, and all of it at 20. A short simulated run does not always show this."""

ReportProgress = Callable[[str, float], None]
"""report(doing, fraction): `doing` says what is done now, `fraction` how much of it all is done."""


@dataclass(frozen=True)
class StepMeasurement:
    """How long a step and a transfer take here.

    step_seconds       one entry per local step, of steps that ran one after the other
    transfer_seconds   time between two windows: the commit, its application and the pull
    cores              cores that all workers share; None: each worker has its own machine
    start_seconds      from the run's start to its first step: how long processes take to start
    """

    step_seconds: tuple[float, ...]
    transfer_seconds: float
    cores: int | None = None
    start_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.step_seconds or min(self.step_seconds) <= 0:
            raise UsageError("step_seconds", "no step was measured; give more data or time")

    @property
    def mean_seconds(self) -> float:
        """Mean seconds of a step."""
        return math.fsum(self.step_seconds) / len(self.step_seconds)

    def times(self, workers: int) -> StepTimes:
        """The distribution of step times when so many workers share the cores."""
        # One worker was measured alone. More workers than cores slow each other in proportion.
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
    """The measured and known facts about a candidate; a number is nan where nothing was measured.

    loss         the best loss of the center in the simulated run, on part of the data
    seconds      virtual time until the loss fell to `Advice.level`; nan if it never did
    staleness    mean staleness of the commits
    diverged     how the simulated run diverged; "" if it did not
    limit        why the candidate is known to diverge in longer runs; "" if it is not
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
        """True if the candidate neither diverged nor is known to diverge in longer runs."""
        return not (self.diverged or self.limit)


@dataclass(frozen=True)
class Advice:
    """The chosen candidate, the reason, and the evidence for all candidates.

    level   the loss that ends the count of `Evidence.seconds`; nan if nothing was simulated
    steps   local steps of each simulated run; 0: there was no time for any run
    against   why many workers do not pay for this job; "" if they do, or if that is not known
    """

    measured: StepMeasurement
    chosen: TrainingCandidate
    evidence: tuple[Evidence, ...]
    level: float
    steps: int
    why: str
    against: str = ""


@dataclass(frozen=True)
class _Tried:
    """A simulated run: the center's losses [evaluations], and the virtual seconds of each."""

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
        """Virtual seconds until the loss fell to the level, interpolated linearly between
        evaluations; nan if it never did."""
        for i, loss in enumerate(self.losses):
            if loss <= level:
                if i == 0:
                    return self.seconds[0]
                share = (self.losses[i - 1] - level) / (self.losses[i - 1] - loss)
                return self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])
        return math.nan


def silent(_doing: str, _fraction: float) -> None:
    """Ignores progress; the default `ReportProgress`."""


def measure(
    assignment: Assignment, backend: Backend, budget_seconds: float = 15.0, cores: int | None = None
) -> StepMeasurement:
    """Runs a few steps of one worker on the backend, with a commit after each, and returns their
    times.

    cores   cores that workers will share, see `StepMeasurement`

    The budget counts from the first step on, so the backend's start is not part of it. Raises what
    the backend raises.
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
    """Returns the times in the rows of one worker. The warm-up steps are dropped if enough others
    remain. Raises `UsageError` if there is no row."""
    kept = rows[WARM_UP_STEPS:] if len(rows) > 2 * WARM_UP_STEPS else rows
    # A coarse clock can read 0 seconds for a short step, and a measurement must be above 0.
    steps = tuple(
        max((row.end_seconds - row.begin_seconds) / max(row.steps, 1), 1e-9) for row in kept
    )
    gaps = [b.begin_seconds - a.end_seconds for a, b in pairwise(kept)]
    if not gaps:
        # A single row has no gap. The time from the end of its steps to its answer is the nearest.
        gaps = [row.seconds - row.end_seconds for row in kept]
    # The median, so that a few long pauses do not count as the cost of a transfer.
    start_seconds = max(min((row.begin_seconds for row in rows), default=0.0), 0.0)
    transfer_seconds = max(float(np.median(gaps)) if gaps else 0.0, 0.0)
    return StepMeasurement(steps, transfer_seconds, cores, start_seconds)


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
    """Simulates the candidates for a job and returns the advice. `job.workers` is the largest
    number of workers that is considered. It is also said whether many workers pay at all: what they
    save of this job's time, and what they take to start.

    rules      rules to try, with their options; None: `SUGGESTED` with default options
    evaluate   theta -> its loss; None: the loss on some batches of the job's own data
    """
    job = assignment.job
    by_name = {rule.name: rule for rule in rules or map(make_rule, SUGGESTED)}
    window, vector_bytes = window_of(measured), assignment.theta.nbytes
    listed = candidates(tuple(by_name), job.workers, window)
    steps = affordable_steps(measured, len(listed), budget_seconds, vector_bytes)
    if steps < FEWEST_STEPS:
        # Fewer runs leave more steps to each, so try without the runs that use half the workers.
        fewer = candidates(tuple(by_name), job.workers, window, halves=False)
        fewer_steps = affordable_steps(measured, len(fewer), budget_seconds, vector_bytes)
        listed, steps = (fewer, fewer_steps) if fewer_steps >= FEWEST_STEPS else (listed, 0)
    if job.samples is None or not steps:
        advice = _by_what_is_known(measured, listed, job.batch)
    else:
        loss_of = evaluate or _center_loss(assignment)
        tried: list[_Tried] = []
        began = clock()
        for i, candidate in enumerate(listed):
            if tried and clock() - began > OVERRUN * budget_seconds:
                # The machine is slower than when it was measured.
                break
            progress(f"simulating {describe(candidate)}", i / len(listed))
            # The run has the samples of so many steps: part of an epoch, or a whole number of them.
            samples = steps * job.batch
            part = replace(
                job,
                run="advice",
                samples=min(job.samples, samples),
                epochs=max(1, round(samples / job.samples)),
                workers=candidate.workers,
                window=candidate.window,
            )
            rule = by_name[candidate.rule]
            trial = replace(assignment, job=part, rule=rule, storage=None, order=None)
            tried.append(_simulate(trial, candidate, measured, loss_of))
        advice = _judge(measured, tried, steps)
        if len(tried) < len(listed):
            left = f"; time was up after {len(tried)} of {len(listed)} candidates"
            advice = replace(advice, why=advice.why + left)
    return replace(advice, against=_against(job, advice))


def _against(job: Job, advice: Advice) -> str:
    """Why many workers do not pay for the job; "" if they do, or if that is not known."""
    measured, chosen = advice.measured, advice.chosen
    if job.workers == 1 or job.samples is None:
        return ""
    none_is_faster = f"many workers do not pay: no rule with up to {job.workers} beats one worker"
    if chosen.workers == 1:
        return none_is_faster
    alone = next(e for e in advice.evidence if e.candidate.workers == 1)
    many = next(e for e in advice.evidence if e.candidate == chosen)
    if alone.seconds > 0 and many.seconds > 0:
        faster = alone.seconds / many.seconds
    # Nothing was simulated, or a worker by itself did not get as far.
    elif alone.samples_per_second > 0 and many.samples_per_second > 0:
        faster = many.samples_per_second / alone.samples_per_second
    else:
        return ""
    whole_seconds = job.samples * job.epochs / job.batch * measured.mean_seconds
    saved_seconds = whole_seconds * (1 - 1 / faster)
    if faster <= 1 + EVEN:
        return none_is_faster
    if saved_seconds > measured.start_seconds:
        return ""
    epochs = math.ceil(job.epochs * measured.start_seconds / saved_seconds)
    plural = "s" * (job.epochs > 1)
    return (
        f"many workers do not pay for {job.epochs} epoch{plural}: {chosen.workers} workers would "
        f"save {format_seconds(saved_seconds)} of the {format_seconds(whole_seconds)} that one "
        f"computes, and take {format_seconds(measured.start_seconds)} to start. They pay from some "
        f"{epochs} epochs on; until then train by plain PyTorch"
    )


def window_of(measured: StepMeasurement) -> int:
    """The shortest of `WINDOWS` in which a transfer costs at most `DEAR` of the computation; the
    longest window if none is long enough."""
    for window in WINDOWS:
        if measured.transfer_seconds <= DEAR * window * measured.mean_seconds:
            return window
    return WINDOWS[-1]


def candidates(
    rules: Iterable[str], workers: int, window: int, halves: bool = True
) -> list[TrainingCandidate]:
    """Lists the candidates: one worker alone first, then each rule with half of the workers and
    with all of them. DOWNPOUR and ADAG-AGN are listed at a window of 1 too, `sync` only there."""
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
    """Local steps, over all workers, that the budget buys for each of so many simulated runs. A
    simulated step costs the real step's computation, plus handling one event and one vector."""
    handling_seconds = EVENT_SECONDS + VECTOR_PASSES * vector_bytes / PASSED_BYTES_PER_SECOND
    step_seconds = measured.mean_seconds + handling_seconds
    evaluating = EVALUATIONS * EVALUATED_BATCHES
    return max(0, int(budget_seconds / (runs * step_seconds)) - evaluating)


def describe(candidate: TrainingCandidate) -> str:
    """The candidate as text, such as "agn, 4 workers, window 10"."""
    plural = "s" * (candidate.workers > 1)
    return f"{candidate.rule}, {candidate.workers} worker{plural}, window {candidate.window}"


def _center_loss(assignment: Assignment) -> Callable[[Vector], float]:
    """Returns a function that computes the center's mean loss over some batches. Their samples are
    spread evenly over the data."""
    learner, job = assignment.learner(0), assignment.job
    assert job.samples is not None
    count = min(job.samples, EVALUATED_BATCHES * job.batch)
    spread = np.unique(np.linspace(0, job.samples - 1, count).round().astype(np.int64))
    batches = np.array_split(spread, max(1, len(spread) // job.batch))

    def loss_of(theta: Vector) -> float:
        gradients = [learner.gradient(theta.copy(), batch, 0) for batch in batches]
        return sum(g.loss * g.samples for g in gradients) / sum(g.samples for g in gradients)

    return loss_of


def _simulate(
    trial: Assignment,
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
    seconds, losses = [0.0], [loss_of(trial.theta)]

    def evaluate(theta: Vector, _clock: int, _samples: int, now: float) -> dict[str, float]:
        seconds.append(now)
        losses.append(loss_of(theta))
        return {"loss": losses[-1]}

    def hopeless(_figures: list[dict[str, float]]) -> bool:
        return not math.isfinite(losses[-1])

    assert trial.job.samples is not None
    every = max(1, trial.job.samples * trial.job.epochs // EVALUATIONS)
    watcher = Watcher(every_samples=every, evaluate=evaluate, should_stop=hopeless)
    outcome, diverged = None, ""
    try:
        outcome = load_backend("simulated", **world)(trial, watcher)
        divergence = diverging(outcome.rows, candidate.workers)
        diverged = "" if divergence is None else divergence.detail
    except DivergedError as error:
        diverged = error.detail
    if not diverged and not math.isfinite(losses[-1]):
        diverged = f"the loss is {losses[-1]}"
    return _Tried(candidate, tuple(seconds), tuple(losses), outcome, diverged)


def _judge(measured: StepMeasurement, tried: Sequence[_Tried], steps: int) -> Advice:
    """Chooses by the simulated runs: the candidate that reaches the level first, or the one with
    the least loss if none reaches it."""
    stable = [
        run
        for run in tried
        if not (run.diverged or _known_limit(run.candidate)) and math.isfinite(run.best)
    ]
    # With the median as the level, at least half of the stable candidates reach it, and one that
    # learns little but fast cannot win.
    level = float(np.median([run.best for run in stable])) if stable else math.nan
    evidence = []
    for run in tried:
        rate = staleness = math.nan
        if run.outcome is not None:
            staleness = History(run.outcome).staleness.mean
            rate = run.outcome.samples / run.outcome.seconds if run.outcome.seconds else math.nan
        evidence.append(
            Evidence(
                run.candidate, rate, run.best, math.nan if run.diverged else run.seconds_to(level),
                staleness, run.diverged, _known_limit(run.candidate),
            )
        )  # fmt: skip
    reached = [e for e in evidence if e.stable and math.isfinite(e.seconds)]
    if not reached:
        least = min(evidence, key=lambda e: e.loss if math.isfinite(e.loss) else math.inf)
        chosen = least.candidate
        why = "all diverged: " + remedy(chosen.rule, chosen.window, chosen.workers)
        return Advice(measured, chosen, tuple(evidence), level, steps, why)
    fastest = min(e.seconds for e in reached)
    even = [e for e in reached if e.seconds <= (1 + EVEN) * fastest]
    # Of equals, `min` keeps the first, which is the simpler rule.
    chosen = min(even, key=lambda e: e.candidate.workers).candidate
    alone = next(e for e in evidence if e.candidate.workers == 1)
    why = f"the first to a loss of {level:.4g}, which half of the stable candidates reach"
    if chosen.workers > 1 and math.isfinite(alone.seconds):
        why += f"; {alone.seconds / fastest:.2g} times as fast as one worker"
    return Advice(measured, chosen, tuple(evidence), level, steps, why)


def _by_what_is_known(
    measured: StepMeasurement, listed: Sequence[TrainingCandidate], batch: int
) -> Advice:
    """Chooses without simulated runs: the fastest of the candidates that no known limit excludes.
    If adag-agn is about as fast as the fastest, it is preferred."""
    evidence = []
    for candidate in listed:
        # With rules that gather, all workers wait for the slowest. The server applies one commit
        # after the other, which limits the speed.
        waits = candidate.rule in ("sync", "averaging")
        times = measured.times(candidate.workers)
        rng = np.random.default_rng(0)
        drawn = times.draw(rng, (200, candidate.workers, candidate.window)).sum(axis=2)
        window_seconds = float((drawn.max(axis=1) if waits else drawn.mean(axis=1)).mean())
        busy_seconds = candidate.workers * measured.transfer_seconds * SERVER_SHARE
        round_seconds = max(window_seconds + measured.transfer_seconds, busy_seconds)
        evidence.append(
            Evidence(
                candidate,
                candidate.workers * candidate.window * batch / round_seconds,
                staleness=0.0 if waits else candidate.workers - 1.0,
                limit=_known_limit(candidate),
            )
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
    return Advice(measured, chosen, tuple(evidence), math.nan, 0, why)


def _known_limit(candidate: TrainingCandidate) -> str:
    """Why a candidate is known to diverge in longer runs; "" if no limit is known."""
    updates = candidate.workers * candidate.window
    if RULES[candidate.rule].adds_sums and candidate.window > 1 and updates > STABLE_UPDATES:
        return f"{candidate.workers} x {candidate.window} updates are added from one point"
    if candidate.rule == "agn" and candidate.workers > STABLE_MEANS:
        return f"{candidate.workers} windows are added from one point"
    return ""
