import itertools
import random

import pytest

from reproductions.additivity import pairs_ordered_right


def test_pairs_are_right_where_both_orders_agree():
    assert pairs_ordered_right([(1, 10), (2, 20), (3, 15)]) == (2, 3)
    assert pairs_ordered_right([(1, 10), (2, 5)]) == (0, 1)
    assert pairs_ordered_right([(1, 10), (1, 5)]) == (0, 1)  # nothing was predicted


def test_pairs_within_the_noise_and_equal_ones_are_not_compared():
    points = [(1.0, 10.0), (2.0, 10.5), (3.0, 10.0), (0.5, 20.0)]
    assert pairs_ordered_right(points) == (1, 5)
    assert pairs_ordered_right(points, 0.05) == (1, 5)  # of the faster's seconds, just reached
    assert pairs_ordered_right(points, 0.06) == (0, 3)
    assert pairs_ordered_right(points, 2.0) == (0, 0)


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)]])
def test_fewer_than_two_schedules_make_no_pair(points):
    assert pairs_ordered_right(points) == (0, 0)


def test_counts_equal_those_over_all_pairs():
    rng = random.Random(3)
    points = [(rng.randint(1, 9) / 8, rng.randint(1, 9) / 8) for _ in range(40)]
    apart = [
        (a, b)
        for a, b in itertools.combinations(points, 2)
        if a[1] != b[1] and abs(a[1] - b[1]) >= 0.25 * min(a[1], b[1])
    ]
    right = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in apart)
    assert pairs_ordered_right(points, 0.25) == (right, len(apart))


def test_a_negative_noise_is_refused():
    with pytest.raises(ValueError, match="negative"):
        pairs_ordered_right([], -0.1)
