"""The figures of `benchmarks/stages/cpu.py` and `additivity.py`."""

from math import comb

import pytest

from tests.support.benchmark_scripts import benchmark_scripts


@pytest.fixture(scope="module")
def scripts():
    with benchmark_scripts("stages", "cpu", "additivity") as modules:
        yield modules


def test_figures_of_predictions(scripts):
    rounds = [[1.0, 1.0, 1.1, 1.1], [2.0, 2.1, 2.0, 2.1], [2.02, 2.02, 2.02, 2.02], [4.0] * 4]
    record = {"predicted": [1.05, 1.0, 2.0, 8.0], "seconds": rounds, "stages": [1] * 4}
    own = scripts.additivity.figures(record)
    halves = [0.0, 2.1 / 2.0 - 1, 0.0, 0.0]
    assert own["noise"] == pytest.approx(sorted(halves)[2] + 0.85 * max(halves))
    # medians 1.05, 2.05, 2.02, 4: all but the second and the third are further apart
    assert own["compared"] == pytest.approx(5 / 6)
    assert own["right"] == pytest.approx(4 / 5)  # not the first two
    assert own["right_of_all"] == pytest.approx(4 / 6)
    assert own["error"] == pytest.approx((0 + 1.05 / 2.05 + 0.02 / 2.02 + 1) / 4, abs=1e-6)
    assert (own["fastest"], own["slowest"]) == pytest.approx((1050, 4000))


@pytest.mark.parametrize("size", [1, 5, 6, 9, 25, 60])
def test_intervals_hold_the_median_as_often_as_they_say(scripts, size):
    low, high = scripts.cpu.interval([float(value) for value in range(size)])
    assert low + high == size - 1
    outside = 2 * sum(comb(size, k) for k in range(int(low) + 1)) / 2**size
    assert outside <= 0.05 or low == 0
    assert outside + 2 * comb(size, int(low) + 1) / 2**size > 0.05  # none is narrower


def test_ratios_are_of_the_same_round(scripts):
    seconds = {"sequential": [1.0, 2.0, 4.0], "ios": [0.5, 1.0, 2.0], "one thread": [0.9, 1.0, 5.0]}
    record = {"seconds": seconds}
    assert scripts.cpu.ratio(record, "ios") == "0.500 (0.500 to 0.500)"
    assert scripts.cpu.best_plain(record) == "one thread"
    assert scripts.cpu.ratio(record, "ios", "one thread") == "0.556 (0.400 to 1.000)"
