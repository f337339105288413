"""The online estimate of implicit momentum, on a quadratic in virtual time."""

import heapq

import numpy as np
import pytest

from dovetail.training.momentum import FEWEST, LAG, WARM, Momentum, adds_plainly
from dovetail.training.rules import RULES, make_rule


def estimates(workers, draw, commits=3000, rate=0.02):
    """Estimates commit by commit, of workers that push noisy gradients of x^2 / 2, coordinates of
    very different scales."""
    rng = np.random.default_rng(3)
    scales = np.exp(1.5 * rng.standard_normal(1024))
    theta = rng.standard_normal(1024) * scales * (rate / 2) ** 0.5
    momentum = Momentum(theta)
    events = [(draw(rng), worker, 0, theta.copy()) for worker in range(workers)]
    heapq.heapify(events)
    found = []
    for clock in range(1, commits + 1):
        now, worker, base_clock, base = heapq.heappop(events)
        update = -rate * (base + scales * rng.standard_normal(base.size))
        theta = theta + update
        momentum.version(clock)[:] = theta[momentum.coordinates]
        found.append(momentum.add(base_clock, update[momentum.coordinates]))
        heapq.heappush(events, (now + draw(rng), worker, clock, theta.copy()))
    return np.array(found)


@pytest.mark.parametrize(("workers", "error"), [(4, 0.12), (8, 0.06)])
def test_memoryless_workers_add_a_momentum_of_one_less_one_nth(workers, error):
    found = estimates(workers, lambda rng: rng.exponential())
    assert np.isnan(found[: FEWEST - 1]).all()
    assert np.mean(found[-1000:]) == pytest.approx(1 - 1 / workers, abs=error)


def test_two_workers_that_take_turns_add_none():
    # The reference's figure for 20 % jitter is .03, where memoryless ones have .5.
    found = estimates(2, lambda rng: max(0.1, 1 + 0.2 * rng.standard_normal()))
    assert np.mean(found[-1000:]) < 0.3


def test_one_worker_alone_has_none():
    found = estimates(1, lambda rng: 1.0, commits=400)[FEWEST + LAG :]
    assert np.abs(found).max() < 1e-9


def test_a_restored_estimate_goes_on_as_the_old_one():
    old, theta = Momentum(np.zeros(5)), np.zeros(5)
    rng = np.random.default_rng(1)
    new = None
    for clock in range(1, FEWEST + 100):
        theta = theta + rng.standard_normal(5)
        update = rng.standard_normal(5)
        for each in (old, new) if new is not None else (old,):
            each.version(clock)[:] = theta
        expected = old.add(clock - 2, update)
        if new is not None:
            assert repr(new.add(clock - 2, update)) == repr(expected)
        if clock == WARM + 50:
            new = Momentum(np.ones(5))
            new.restore(*old.save())
    assert np.isfinite(expected)


def test_only_rules_that_add_what_was_computed_at_the_center_have_an_estimate():
    plain = {name for name in RULES if adds_plainly(make_rule(name), np.float32)}
    assert plain == {"downpour", "agn", "ssp"}
