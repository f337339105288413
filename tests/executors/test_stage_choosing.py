import random
from itertools import product

import pytest

from dovetail.executors.stages import choosing
from dovetail.executors.stages.choosing import choose, measure, ratios_of, upper_limit


@pytest.mark.parametrize("count", range(1, 13))
def test_the_upper_limit_is_the_least_order_statistic_above_the_median_in_95_of_100(count):
    def share_above(place):
        """Of all ways to fall above or below the median, those with value `place` not below it."""
        ways = list(product((0, 1), repeat=count))
        return sum(sum(below) <= place for below in ways) / len(ways)

    place = upper_limit([float(i) for i in range(count)])
    if count < 5:
        assert place == count - 1
        return
    assert share_above(int(place)) >= 0.95
    assert share_above(int(place) - 1) < 0.95


def test_the_upper_limit_takes_values_in_any_order():
    values = [0.5, 3.0, 1.0, 9.0, 2.0, 0.1, 0.2, 4.0]
    assert upper_limit(values) == upper_limit(sorted(values)) == 4.0


@pytest.mark.parametrize("seed", range(40))
def test_only_what_is_faster_beyond_doubt_is_chosen(seed):
    rng = random.Random(seed)
    rounds = rng.choice([5, 9, 15])
    base = [rng.uniform(0.9, 1.1) for _ in range(rounds)]
    seconds = {"sequential": base}
    for name in "abc":
        gain = rng.choice([0.8, 0.97, 1.0, 1.1])
        seconds[name] = [s * gain * rng.uniform(0.9, 1.1) for s in base]
    chosen = choose(seconds)
    doubtless = {
        name
        for name, own in seconds.items()
        if name != "sequential" and upper_limit(ratios_of(own, base)) < 1
    }
    assert chosen in (doubtless or {"sequential"})
    for name in doubtless:
        ratio = sorted(ratios_of(seconds[name], base))[rounds // 2]
        assert sorted(ratios_of(seconds[chosen], base))[rounds // 2] <= ratio


def test_of_equals_sequential_is_chosen():
    same = [1.0, 2.0, 3.0, 2.0, 1.0, 2.0]
    assert choose({"sequential": same, "greedy": same}) == "sequential"
    assert choose({"sequential": same}) == "sequential"


def test_a_machine_that_slows_down_changes_no_choice():
    base = [1.0, 1.0, 5.0, 9.0, 20.0, 1.0, 2.0]
    assert choose({"sequential": base, "dos": [0.9 * s for s in base]}) == "dos"
    assert choose({"sequential": base, "dos": [1.1 * s for s in base]}) == "sequential"


def test_rounds_draw_the_order_and_take_medians(monkeypatch):
    monkeypatch.setattr(choosing, "_calls", lambda _timer: 3)
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
    assert measure(timers, 2, told.append) == {"a": (2.0, 2.0), "b": (5.0, 5.0)}
    orders = [random.Random(number).sample(["a", "b"], 2) for number in range(2)]
    assert ran == [name for order in orders for name in order for _ in range(4)]
    assert told == [0.5, 1.0]


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (0.01, 3), (1e-6, 20), (0.0, 20)])
def test_short_steps_are_called_more_often(seconds, calls):
    assert choosing._calls(lambda: seconds) == calls
