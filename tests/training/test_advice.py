"""Advice: what is measured, what is simulated, and what is recommended, and when a run diverges."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import UsageError
from dovetail.training import advice
from dovetail.training.advice import (
    StepMeasurement,
    TrainingCandidate,
    measure,
    measured_of,
    suggest,
    window_of,
)
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.divergence import LossWatch, diverging, remedy, stable_rule
from dovetail.training.learner import Gradient
from dovetail.training.records import Job
from dovetail.training.rules import RULES, make_rule
from tests.support.histories import make_history

QUICK = StepMeasurement((0.01, 0.012, 0.008, 0.011), transfer_seconds=0.0005)


class LeastSquares:
    """y = w x of one million possible samples, each with noise; steps of plain descent."""

    def __init__(self, rate):
        rng = np.random.default_rng(0)
        self.inputs = rng.normal(size=(2000, 6))
        self.targets = self.inputs @ np.arange(6.0)
        self.learning_rate = rate

    def gradient(self, theta, indices, epoch):
        inputs = self.inputs[indices]
        error = inputs @ theta - self.targets[indices]
        return Gradient(2 * inputs.T @ error / len(indices), float(np.mean(error**2)), len(indices))

    def update(self, theta, gradient, epoch):
        return -self.learning_rate * gradient

    def rate(self, epoch):
        return self.learning_rate


def assignment(rate=0.02, workers=8, rule="agn", window=10, **changes):
    job = Job("r", 6, 2000, 2, 8, window, workers, 0, "float64")
    return Assignment(
        replace(job, **changes), make_rule(rule), np.zeros(6), lambda worker: LeastSquares(rate)
    )


@pytest.fixture(scope="module")
def advised():
    return suggest(assignment(), QUICK, budget_seconds=40)


def test_advice_is_the_same_for_the_same_measured_times(advised):
    calls = []
    first = suggest(assignment(), QUICK, budget_seconds=40, progress=lambda *c: calls.append(c))
    assert repr(first) == repr(advised)
    assert first.steps >= advice.FEWEST_STEPS
    fractions = [share for _, share in calls]
    assert fractions == sorted(fractions)
    assert len(fractions) == len(first.evidence)


def test_what_is_recommended_was_the_first_stable_one_to_the_level(advised):
    found = advised
    (chosen,) = [e for e in found.evidence if e.candidate == found.chosen]
    assert chosen.stable
    assert chosen.loss <= found.level
    stable = [e for e in found.evidence if e.stable]
    reached = [e for e in stable if math.isfinite(e.seconds)]
    assert chosen.seconds <= (1 + advice.EVEN) * min(e.seconds for e in reached)
    assert len(reached) >= len(stable) / 2
    alone = next(e for e in found.evidence if e.candidate.workers == 1)
    assert chosen.seconds < alone.seconds


def test_a_rate_at_which_sums_diverge_excludes_them_by_evidence():
    found = suggest(assignment(rate=0.06), QUICK, budget_seconds=40)
    of = {(e.candidate.rule, e.candidate.workers, e.candidate.window): e for e in found.evidence}
    window = window_of(QUICK)
    assert "the loss went from" in of["downpour", 8, window].diverged
    assert of["agn", 8, window].diverged == ""
    assert found.chosen != TrainingCandidate("downpour", 8, window)


def test_where_steps_are_too_dear_known_limits_and_computed_speeds_decide():
    slow = StepMeasurement((2.0, 2.2), transfer_seconds=0.1)
    found = suggest(assignment(), slow, budget_seconds=40)
    assert found.steps == 0
    assert math.isnan(found.level)
    assert found.chosen.rule == "adag-agn"
    assert found.chosen.workers == 8
    limits = {e.candidate: e.limit for e in found.evidence}
    assert "8 x 4 updates" in limits[TrainingCandidate("downpour", 8, 4)]
    assert limits[TrainingCandidate("downpour", 8, 1)] == ""
    rates = {e.candidate: e.samples_per_second for e in found.evidence}
    assert rates[TrainingCandidate("sync", 1, 1)] == pytest.approx(8 / 2.2, rel=0.05)
    assert rates[TrainingCandidate("sync", 8, 1)] < rates[TrainingCandidate("downpour", 8, 1)]


def test_workers_that_take_longer_to_start_than_they_save_do_not_pay():
    slow = StepMeasurement((2.0, 2.2), transfer_seconds=0.1, start_seconds=5.0)
    # 2 epochs of 250 steps: 525 s for one worker, of which 8 workers save most.
    assert suggest(assignment(), slow, budget_seconds=40).against == ""
    few = suggest(assignment(samples=16), slow, budget_seconds=40)
    assert few.chosen.workers == 8
    # 2 epochs of 2 steps: 8.4 s, of which 7.2 s can be saved, and 5 s are less.
    assert few.against == ""
    late = suggest(assignment(samples=16), replace(slow, start_seconds=30.0), budget_seconds=40)
    assert late.against.startswith("many workers do not pay for 2 epochs: 8 workers would save 7.")
    assert "of the 8.4 s" in late.against
    assert "30 s to start" in late.against
    assert "from some 9 epochs on" in late.against


def test_nothing_is_said_of_a_gain_that_is_not_known():
    alone, many = TrainingCandidate("sync", 1, 1), TrainingCandidate("agn", 4, 10)
    job = assignment().job
    for seconds in (0.0, math.nan):
        evidence = tuple(
            advice.Evidence(candidate, math.nan, 1.0, seconds) for candidate in (alone, many)
        )
        found = advice.Advice(replace(QUICK, start_seconds=9.0), many, evidence, 1.0, 200, "")
        assert advice._against(job, found) == ""


def test_where_one_worker_is_the_best_that_is_said_first():
    shared = StepMeasurement((2.0, 2.2), transfer_seconds=0.01, cores=1)
    found = suggest(assignment(), shared, budget_seconds=40)
    assert "no rule with up to 8 beats one worker" in found.against
    assert suggest(assignment(workers=1), shared, budget_seconds=40).against == ""


def test_a_middling_budget_simulates_fewer_workers_counts():
    found = suggest(assignment(), QUICK, budget_seconds=30)
    assert found.steps >= advice.FEWEST_STEPS
    assert {e.candidate.workers for e in found.evidence} == {1, 8}


def test_workers_beyond_the_cores_are_no_faster():
    shared = replace(QUICK, cores=2)
    assert shared.times(8).mean_seconds == pytest.approx(4 * QUICK.mean_seconds)
    assert shared.times(2).mean_seconds == pytest.approx(QUICK.mean_seconds)


@pytest.mark.parametrize(
    ("transfer_seconds", "window"), [(0.0, 4), (0.004, 4), (0.009, 10), (0.03, 40), (9.0, 40)]
)
def test_the_window_grows_with_the_price_of_a_transfer(transfer_seconds, window):
    assert window_of(StepMeasurement((0.01,), transfer_seconds)) == window


def test_times_are_taken_from_the_rows_without_the_first_steps():
    rows = make_history(30, workers=1).outcome.rows
    slow_start = tuple(
        replace(row, begin_seconds=row.begin_seconds - 50.0 * (i < 3)) for i, row in enumerate(rows)
    )
    found = measured_of(slow_start)
    assert found.mean_seconds == pytest.approx(0.4)  # .8 s, two steps each
    assert found.transfer_seconds == pytest.approx(0.2)
    assert measured_of(rows[:1]).transfer_seconds == pytest.approx(0.1)
    with pytest.raises(UsageError, match="no step"):
        measured_of(())


def test_measuring_runs_a_few_steps_of_one_worker():
    found = measure(assignment(), load_backend("threads"), 5.0, cores=3)
    assert len(found.step_seconds) == advice.MEASURED_STEPS - advice.WARM_UP_STEPS
    assert found.cores == 3
    assert min(found.step_seconds) > 0


def run_of(rule, rate, **changes):
    job = assignment(rate, rule=rule, **changes)
    return load_backend("simulated")(job, Watcher()).rows


@pytest.mark.parametrize(("workers", "window"), [(8, 10), (20, 4)])
def test_sums_of_windows_diverge_and_the_rule_that_is_named_does_not(workers, window):
    shape = {"workers": workers, "window": window, "epochs": 8}
    found = diverging(run_of("downpour", 0.06, **shape), workers)
    assert found is not None
    assert "the loss" in found.detail
    named = stable_rule("downpour", window, workers)
    assert f"use {named}: " in remedy("downpour", window, workers)
    assert diverging(run_of(named, 0.06, **shape), workers) is None


def losses(values):
    rows = make_history(len(values)).outcome.rows
    return [replace(row, loss=float(loss)) for row, loss in zip(rows, values, strict=True)]


def test_a_loss_that_falls_or_only_jumps_is_no_divergence():
    rng = np.random.default_rng(0)
    falling = np.exp(-np.arange(400) / 100) * rng.uniform(0.7, 1.3, 400)
    assert diverging(losses(falling)) is None
    spikes = np.where(np.arange(400) % 50 == 49, 30.0, 1.0)
    assert diverging(losses(spikes)) is None
    assert diverging(losses(rng.normal(size=400))) is None  # of a policy: around zero


def test_a_loss_that_grows_is_divergence_however_the_rows_are_batched():
    growing = losses(np.concatenate([np.full(60, 2.0), 2 * 1.1 ** np.arange(60)]))
    whole = diverging(growing)
    watch = LossWatch()
    seen = [watch.add([row]) for row in growing]
    found = [one for one in seen if one is not None]
    assert found == [whole]
    assert 60 < whole.clock < 120
    assert watch.found == whole


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_divergence_at_once(loss):
    assert diverging(losses([2.0, 2.0, loss])).clock == 3


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_remedy_that_names_a_rule_or_the_rate(rule):
    for window, workers in ((1, 2), (10, 8), (10, 40), (None, 4)):
        other = stable_rule(rule, window, workers)
        assert other == "" or (other in RULES and other != rule)
        assert (f"use {other}" if other else "learning rate") in remedy(rule, window, workers)


def test_a_long_start_is_not_counted_as_measuring():
    asked = []

    def late(assignment, watcher):
        asked.append(watcher.should_stop([{}]))
        rows = make_history(40, workers=1).outcome.rows
        watcher.rows(rows[:2])
        asked.append(watcher.should_stop([{}]))
        watcher.rows(rows[2:])
        asked.append(watcher.should_stop([{}]))
        return make_history(40, workers=1).outcome

    assert len(measure(assignment(), late, 5.0).step_seconds) == 40 - advice.WARM_UP_STEPS
    assert asked == [False, False, True]


def test_a_machine_that_became_slower_ends_the_search_and_says_so(advised):
    moments = iter([0.0] + [30.0] * 3 + [70.0])
    found = suggest(assignment(), QUICK, budget_seconds=40, clock=lambda: next(moments))
    assert len(found.evidence) == 4
    assert f"after 4 of {len(advised.evidence)} candidates" in found.why
