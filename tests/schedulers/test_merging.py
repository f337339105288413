import random

import pytest

from dovetail.schedulers.merge import merge
from dovetail.schedulers.records import KernelBlock, StageTiming, members

#       0
#    / / \ \
#   1 2  3  4      1, 2 and 4 are alike
#    \ \ / /
#       5
BLOCK = KernelBlock((0, 1, 1, 1, 1, 0b11110))
KEYS = [None, "a", "a", "b", "a", None]


def timer_of(seconds):
    """A set of ops that is named takes so long, merged; any other op a second."""

    def timer(stages):
        return [
            StageTiming(seconds[stage], merged=True)
            if stage in seconds
            else StageTiming(stage.bit_count())
            for stage in stages
        ]

    return timer


def test_what_is_alike_is_merged_where_that_is_faster():
    found = merge(BLOCK, timer_of({0b10110: 1.5, 0b00110: 1.9, 0b10010: 1.9}), KEYS)
    assert found.stages == (0b1, 0b10110, 0b1000, 0b100000)
    assert [timing.merged for timing in found.timings] == [False, True, False, False]
    assert found.seconds == 4.5


def test_a_pair_is_merged_where_all_would_be_slower():
    found = merge(BLOCK, timer_of({0b10110: 4.0, 0b00110: 2.5, 0b10010: 1.2}), KEYS)
    assert found.stages == (0b1, 0b10010, 0b100, 0b1000, 0b100000)
    assert found.seconds == pytest.approx(5.2)


def test_nothing_is_merged_that_does_not_pay():
    found = merge(BLOCK, timer_of({0b10110: 9.0, 0b00110: 9.0, 0b10010: 9.0}), KEYS)
    assert found.stages == tuple(1 << op for op in range(6))


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_partitions(seed):
    rng = random.Random(seed)
    ops = rng.randrange(2, 7)
    block = KernelBlock((0,) * ops)
    seconds = {s: rng.random() * s.bit_count() for s in range(1, 1 << ops) if s & (s - 1)}

    def partitions(left):
        if not left:
            yield ()
            return
        first = left & -left
        others = left ^ first
        subset = others
        while True:
            for rest in partitions(others ^ subset):
                yield (first | subset, *rest)
            if not subset:
                return
            subset = (subset - 1) & others

    wanted = min(
        sum(seconds.get(part, 1.0) for part in parts) for parts in partitions(block.everything)
    )
    found = merge(block, timer_of(seconds), ["k"] * ops)
    assert found.seconds == pytest.approx(wanted)
    assert sorted(op for stage in found.stages for op in members(stage)) == list(range(ops))
