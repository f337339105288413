import math
import random
from itertools import product

import pytest

from dovetail.runtime.timers import Repeats, in_turns, race, upper_limit


def fastest(timers, rounds, *progress):
    return race("sequential", timers, rounds, *progress, calls=1)


@pytest.mark.parametrize("count", range(1, 15))
def test_the_upper_limit_is_the_least_order_statistic_that_is_hardly_ever_below_the_median(count):
    def share_above(place):
        """Of all ways to fall above or below the median, those with value `place` not below it."""
        ways = list(product((0, 1), repeat=count))
        return sum(sum(below) <= place for below in ways) / len(ways)

    place = upper_limit([float(i) for i in range(count)])
    enough = 1 - 0.05 / 3  # three looks, one in 20 for all of them
    if count < 6:
        assert place == math.inf
        assert share_above(count - 1) < enough
        return
    assert share_above(int(place)) >= enough
    assert place == 0 or share_above(int(place) - 1) < enough


def test_the_upper_limit_takes_values_in_any_order():
    values = [0.5, 3.0, 1.0, 9.0, 2.0, 0.1, 0.2, 4.0]
    assert upper_limit(values) == upper_limit(sorted(values)) == 9.0


class Clockwork:
    """Timers of steps whose seconds are drawn; how often each was asked."""

    def __init__(self, **seconds_of):
        self.asked = dict.fromkeys(seconds_of, 0)
        self.timers = {name: self._timer(name, draw) for name, draw in seconds_of.items()}

    def rounds(self, name):
        return self.asked[name] / 2  # one call that does not count, and one that does

    def _timer(self, name, draw):
        def time():
            self.asked[name] += 1
            return draw()

        return time


def noisy(seconds, noise, seed):
    rng = random.Random(seed)
    return lambda: seconds * rng.uniform(1 - noise, 1 + noise)


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_is_chosen_and_shown_to_be_faster_in_rounds_of_its_own(seed):
    work = Clockwork(
        sequential=noisy(1.0, 0.05, seed),
        greedy=noisy(0.8, 0.05, seed + 100),
        dos=noisy(0.6, 0.05, seed + 200),
    )
    chosen, seconds = fastest(work.timers, 5)
    assert chosen == "dos"
    assert {name: work.rounds(name) for name in work.timers} == {
        "sequential": 15,
        "greedy": 5,
        "dos": 15,
    }
    # Those that decided are told; they were not those that picked it.
    assert {name: len(own) for name, own in seconds.items()} == {
        "sequential": 10,
        "greedy": 5,
        "dos": 10,
    }


def test_where_nothing_is_faster_sequential_is_kept_without_more_rounds():
    work = Clockwork(sequential=lambda: 1.0, greedy=lambda: 1.1, dos=lambda: 1.0)
    assert fastest(work.timers, 5)[0] == "sequential"
    assert work.rounds("greedy") == work.rounds("sequential") == 5
    assert fastest({"sequential": work.timers["sequential"]}, 5)[0] == "sequential"


@pytest.mark.parametrize("rounds", [1, 2, 5, 9])
def test_equals_are_seldom_taken_for_faster_however_few_rounds_there_are(rounds):
    wrong = 0
    for seed in range(400):
        work = Clockwork(
            sequential=noisy(1.0, 0.2, f"{seed} sequential"),
            greedy=noisy(1.0, 0.2, f"{seed} greedy"),
            dos=noisy(1.0, 0.2, f"{seed} dos"),
        )
        wrong += fastest(work.timers, rounds)[0] != "sequential"
    assert wrong / 400 < 0.06


def test_what_is_a_little_faster_is_found_with_more_rounds():
    lengths = []
    for seed in range(100):
        work = Clockwork(
            sequential=noisy(1.0, 0.3, f"{seed} sequential"),
            dataflow=noisy(0.88, 0.3, f"{seed} dataflow"),
        )
        told = []
        chosen, seconds = fastest(work.timers, 20, told.append)
        if chosen == "dataflow":
            lengths.append(len(seconds["dataflow"]))
        assert told == sorted(told)
        assert 0 < told[0] < told[-1] <= 1
    assert len(lengths) > 85
    assert lengths.count(40) < 75
    assert set(lengths) == {40, 80, 120}


def test_a_machine_that_slows_down_changes_no_choice():
    def slowing(share):
        calls = iter(range(1000))
        return lambda: share * (1 + next(calls) // 4)

    work = Clockwork(sequential=slowing(1.0), dos=slowing(0.9))
    assert fastest(work.timers, 5)[0] == "dos"
    work = Clockwork(sequential=slowing(1.0), dos=slowing(1.1))
    assert fastest(work.timers, 5)[0] == "sequential"


def test_rounds_draw_the_order_and_take_medians():
    ran = []
    told = []

    def timer(name, seconds):
        def time():
            ran.append(name)
            return seconds.pop(0)

        return time

    # A call that does not count, then three.
    timers = {
        "a": timer("a", [99.0, 1.0, 9.0, 2.0] * 2),
        "b": timer("b", [99.0, 5.0, 5.0, 4.0] * 2),
    }
    assert in_turns(timers, Repeats(2), told.append, calls=3) == {"a": (2.0, 2.0), "b": (5.0, 5.0)}
    orders = [random.Random(number).sample(["a", "b"], 2) for number in range(2)]
    assert ran == [name for order in orders for name in order for _ in range(4)]
    assert told == [0.5, 1.0]


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (0.01, 3), (1e-6, 20), (0.0, 20)])
def test_short_steps_are_called_more_often(seconds, calls):
    asked = []
    in_turns({"a": lambda: asked.append(1) or seconds}, Repeats(1))
    # Three calls tell how long a step takes, and one warms up in the round.
    assert len(asked) == 3 + 1 + calls


def test_rounds_end_with_the_time_but_not_before_there_are_enough():
    now, told = [0.0], []

    def timer():
        now[0] += 4.0
        return 1.0

    def rounds(seconds):
        told.clear()
        repeats = Repeats(10, 3, seconds)
        times = in_turns({"a": timer}, repeats, told.append, calls=1, clock=lambda: now[0])
        return len(times["a"])

    assert (rounds(0.0), rounds(30.0), rounds(1e9)) == (3, 4, 10)
    assert rounds(30.0) == 4 and told == pytest.approx([8 / 30, 16 / 30, 24 / 30, 1.0])


def test_what_is_hopeless_runs_one_round_and_the_last_one_left_no_other():
    timers = {4: lambda: 1.0, 2: lambda: 1.4, 1: lambda: 1.6}
    found = in_turns(timers, Repeats(5), calls=1, warm_ups=0, hopeless=1.5)
    assert {name: len(own) for name, own in found.items()} == {4: 5, 2: 5, 1: 1}
    found = in_turns(timers, Repeats(5), calls=1, warm_ups=0, hopeless=1.2)
    assert {name: len(own) for name, own in found.items()} == {4: 1, 2: 1, 1: 1}
