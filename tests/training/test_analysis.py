"""Staleness, implicit momentum, temporal efficiency."""

import math

import numpy as np
import pytest

from benchmarks.data_parallel.momentum import fit_momentum, implicit_momentum
from dovetail.training.analysis import staleness, temporal_efficiency
from dovetail.training.history import History
from dovetail.training.records import Evaluation, Outcome, Row
from dovetail.training.step_times import StepTimes


def row(clock, worker, stale):
    return Row(clock, worker, clock, stale, 1, 1, 0.0, 0.0, clock, clock - 1, clock)


def test_staleness_leaves_out_the_first_n_commits_and_is_told_per_worker():
    rows = [row(i, i % 2, stale) for i, stale in enumerate((9, 9, 1, 2, 3, 4, 1, 10))]
    together, of_worker = staleness(rows, 2)
    assert (together.commits, together.mean, together.p50, together.max) == (6, 3.5, 2.5, 10)
    assert together.p95 == pytest.approx(8.5)
    assert {worker: found.mean for worker, found in of_worker.items()} == {0: 5 / 3, 1: 16 / 3}


def test_a_run_of_no_more_than_n_commits_has_no_staleness():
    together, of_worker = staleness([row(1, 0, 0)], 2)
    assert together.commits == 0
    assert math.isnan(together.mean)
    assert of_worker == {}


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_memoryless_steps_give_an_implicit_momentum_of_1_minus_1_over_n(workers):
    """Both terms of equation 1.1: the momentum, and what is left of the learning rate."""
    found = implicit_momentum(workers, StepTimes("exponential"), replicas=3000, steps=60)
    assert found.momentum == pytest.approx(found.theory, abs=0.02)
    assert found.theory_rate == 0.02 / workers
    assert found.rate == pytest.approx(found.theory_rate, rel=0.1)
    assert found.mean_staleness == pytest.approx(workers - 1, rel=0.02)


def test_regular_steps_give_less_momentum_though_the_same_staleness():
    found = implicit_momentum(2, StepTimes("jitter"))
    assert found.momentum < 0.15
    assert found.mean_staleness == pytest.approx(1.0, rel=0.02)


def test_one_worker_has_neither_momentum_nor_staleness():
    found = implicit_momentum(1, StepTimes("exponential"), replicas=3, rate=0.1, steps=60)
    assert found.momentum == pytest.approx(0.0, abs=1e-9)
    assert found.mean_staleness == 0
    np.testing.assert_allclose(found.trajectory, 0.9 ** np.arange(61))


def test_the_fit_finds_the_momentum_that_made_a_trajectory():
    x = [1.0, 0.9]
    for _ in range(40):
        x.append(x[-1] + 0.7 * (x[-1] - x[-2]) - 0.05 * x[-1])
    assert fit_momentum(np.array(x)) == pytest.approx((0.7, 0.05))


def test_temporal_efficiency_is_the_ratio_of_the_areas_up_to_the_shorter_time():
    #  a  0 to .8 in 2, then level        area to 4: .8 + 1.6 = 2.4
    #  b  0 to .8 in 4, then to 1 in 8    area to 4: 1.6
    a, b = ([2.0, 4.0], [0.8, 0.8]), ([4.0, 8.0], [0.8, 1.0])
    assert temporal_efficiency(*a, *b) == pytest.approx(1.5)
    assert temporal_efficiency(*b, *a) == pytest.approx(1 / 1.5)
    assert temporal_efficiency(*a, *a) == 1.0
    # Cut between two evaluations: b to 3 has .5 x 3 x .6.
    assert temporal_efficiency([3.0], [0.6], *b) == pytest.approx(1.0)
    assert temporal_efficiency(*a, [4.0], [0.0]) == math.inf


def test_the_time_to_a_target_is_the_first_evaluation_there():
    seen = tuple(
        Evaluation(i, i, float(i), {"accuracy": value})
        for i, value in enumerate((0.1, 0.97, 0.96, 0.99))
    )
    history = History(Outcome(np.zeros(0), 0, 0, 0.0, evaluations=seen))
    assert history.seconds_to("accuracy", 0.97) == 1.0
    assert history.seconds_to("accuracy", 0.98) == 3.0
    assert history.seconds_to("accuracy", 1.0) is None
