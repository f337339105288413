import pytest

from dovetail.runtime.timers import summarise, time_call


class FakeClock:
    """A clock that only calls move forward."""

    def __init__(self, seconds):
        self.now, self.seconds, self.calls = 0.0, seconds, 0

    def __call__(self):
        return self.now

    def call(self):
        self.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1


def test_a_long_call_is_one_sample_each():
    fake = FakeClock([5.0, 1.0])  # the first call is slow: it warms up
    timing = time_call(fake.call, samples=4, budget_seconds=100, clock=fake)
    assert timing.median_seconds == timing.minimum_seconds == 1.0
    assert (timing.samples, timing.calls, timing.spread) == (4, 1, 0.0)


def test_a_short_call_is_repeated_until_a_sample_is_long_enough():
    fake = FakeClock([1e-6])
    timing = time_call(fake.call, samples=3, sample_seconds=1e-3, clock=fake)
    assert timing.calls == 1000
    assert timing.median_seconds == pytest.approx(1e-6)


def test_the_budget_ends_sampling_after_three_samples():
    fake = FakeClock([10.0])
    assert time_call(fake.call, samples=50, budget_seconds=1, clock=fake).samples == 3


def test_one_disturbed_sample_does_not_move_the_median():
    timing = summarise([1.0, 1.0, 1.0, 50.0, 1.0])
    assert timing.median_seconds == 1.0
    assert timing.minimum_seconds == 1.0


def test_the_spread_is_the_interquartile_range_over_the_median():
    assert summarise([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 3)
    assert summarise([2.0]).spread == 0.0
