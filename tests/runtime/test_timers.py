import pytest

from dovetail.runtime.timers import (
    Repeats,
    seconds_of,
    summarise,
    time_call,
    time_rounds,
    time_steps,
    times_within,
)


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


def steps_of(fake, repeats, **options):
    return time_steps(lambda: seconds_of(fake.call, clock=fake), repeats, clock=fake, **options)


def test_steps_that_warm_up_do_not_count():
    fake = FakeClock([9.0, 8.0, 1.0, 2.0, 3.0])
    assert steps_of(fake, Repeats(3), warm_ups=2) == [1.0, 2.0, 3.0]
    fake = FakeClock([1.0, 1.0, 1.0, 7.0])
    assert steps_of(fake, Repeats(1), warm_up_seconds=2.5) == [7.0]
    fake = FakeClock([1.0])
    assert steps_of(fake, Repeats(2), warm_ups=0) == [1.0, 1.0]
    assert fake.calls == 2


def test_another_call_may_warm_up():
    fake, warmed = FakeClock([1.0]), []
    assert steps_of(fake, Repeats(2), warm_up=lambda: warmed.append(1), warm_ups=3) == [1.0, 1.0]
    assert (len(warmed), fake.calls) == (3, 2)


def test_steps_end_with_the_time_but_not_before_there_are_enough():
    told = []
    assert len(steps_of(FakeClock([4.0]), Repeats(10, 3, 1.0))) == 3
    assert len(steps_of(FakeClock([4.0]), Repeats(10, 3, 20.0), progress=told.append)) == 5
    assert told == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert len(steps_of(FakeClock([4.0]), Repeats(10, 3, 1e9))) == 10


def test_another_process_may_say_when_steps_end():
    own = []

    def agreed(goes_on):
        own.append(goes_on)
        return len(own) < 4

    assert len(steps_of(FakeClock([1.0]), Repeats(2), agreed=agreed)) == 3
    assert own == [True, True, False, False]


def test_calls_take_turns_and_each_round_is_told_its_number():
    rounds = time_rounds(lambda number: [1.0 + number, 10.0 + number], Repeats(3))
    assert rounds.seconds == [[1.0, 2.0, 3.0], [10.0, 11.0, 12.0]]
    assert rounds.waited_seconds == 0.0


def rounds_at(paces, **options):
    """Rounds of a second each, at these paces of the core; each call takes as long as its pace."""
    now, seen = [0.0], []

    def pace():
        seen.append(paces[min(len(seen), len(paces) - 1)])
        return seen[-1]

    def run_round(_number):
        now[0] += 1.0
        return [seen[-1]]

    return time_rounds(run_round, Repeats(4, 2, 0.0), pace=pace, clock=lambda: now[0], **options)


def test_rounds_on_a_disturbed_core_do_not_count():
    found = rounds_at([9.0, 1.0, 5.0, 1.1, 1.2], patience_seconds=100.0)
    # The first was the best yet, and is judged again.
    assert found.seconds == [[1.0, 1.1]]
    assert (found.pace_seconds, found.waited_seconds) == (1.0, 1.0)


def test_where_the_core_stays_disturbed_all_rounds_count_in_the_end():
    found = rounds_at([2.0], best_seconds=1.0, patience_seconds=7.0)
    assert found.waited_seconds == 7.0
    # No more of them are kept than rounds are asked for at most.
    assert found.seconds == [[2.0] * 4]
    assert found.pace_seconds == 1.0


def test_a_call_is_repeated_as_often_as_fills_the_time():
    assert times_within(1.0, 0.3) == 3
    assert times_within(1.0, 5.0) == 1
    assert times_within(1.0, 0.0, most=20) == 20
    assert times_within(1.0, 5.0, 2, 8) == 2
