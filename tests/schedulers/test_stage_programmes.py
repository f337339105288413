import itertools
import random

import pytest

from dovetail.errors import TooManyStatesError
from dovetail.schedulers.dos import dos
from dovetail.schedulers.ios import endings_of, ios
from dovetail.schedulers.records import KernelBlock, groups_of, members
from dovetail.schedulers.scheduling import greedy, sequential
from dovetail.schedulers.states import estimate, states_of
from tests.support.dags import occupancy, random_block, random_seconds


def diamond():
    #     0
    #   /   \
    #  1     2
    #   \   /
    #     3
    return KernelBlock((0, 0b1, 0b1, 0b110))


def schedules(block, allowed):
    """Every partition of the ops into stages, each stage `allowed`, no edge backwards."""
    ops = len(block)

    def grow(done):
        if done == block.everything:
            yield ()
            return
        left = [op for op in range(ops) if not done >> op & 1]
        for size in range(1, len(left) + 1):
            for chosen in itertools.combinations(left, size):
                stage = sum(1 << op for op in chosen)
                if all(not block.predecessors[op] & ~(done | stage) for op in chosen) and allowed(
                    stage
                ):
                    for rest in grow(done | stage):
                        yield (stage, *rest)

    return grow(0)


def cheapest(block, timer, allowed):
    known = {}

    def seconds(stage):
        if stage not in known:
            known[stage] = timer([stage])[0].seconds
        return known[stage]

    memo = {}

    def best(done):
        if done == block.everything:
            return 0.0
        if done not in memo:
            memo[done] = min(
                seconds(stage) + best(done | stage) for stage in next_stages(block, done, allowed)
            )
        return memo[done]

    return best(0)


def next_stages(block, done, allowed):
    left = block.everything & ~done
    stage = left
    while stage:
        if all(not block.predecessors[op] & ~(done | stage) for op in members(stage)) and allowed(
            stage
        ):
            yield stage
        stage = (stage - 1) & left


def independent(block):
    return lambda stage: all(not block.predecessors[op] & stage for op in members(stage))


def pruned(block, group_ops, groups):
    def allowed(stage):
        found = groups_of(block, stage)
        return len(found) <= groups and all(g.bit_count() <= group_ops for g in found)

    return allowed


@pytest.mark.parametrize("seed", range(200))
def test_dos_and_ios_equal_exhaustive_search(seed):
    rng = random.Random(seed)
    block = random_block(rng, rng.randrange(1, 9), rng.choice((0.15, 0.35, 0.6)))
    timer = random_seconds(seed)
    group_ops, groups = rng.randrange(1, 5), rng.randrange(1, 4)
    assert dos(block, timer).seconds == pytest.approx(cheapest(block, timer, independent(block)))
    assert ios(block, timer, group_ops=group_ops, groups=groups).seconds == pytest.approx(
        cheapest(block, timer, pruned(block, group_ops, groups))
    )


def test_the_search_of_the_tests_sees_every_schedule():
    block, timer = diamond(), random_seconds(3)
    whole = list(schedules(block, lambda stage: True))
    assert len(whole) == len(set(whole)) == 12
    by_hand = min(sum(t.seconds for t in timer(stages)) for stages in whole)
    assert by_hand == pytest.approx(cheapest(block, timer, lambda stage: True))


def test_endings_of_the_diamond():
    block = diamond()
    whole = states_of(block)[-1]
    assert set(endings_of(block, whole, 4, 4)) == {0b1000, 0b1010, 0b1100, 0b1110, 0b1111}
    assert set(endings_of(block, whole, 2, 4)) == {0b1000, 0b1010, 0b1100}


@pytest.mark.parametrize("seed", range(40))
def test_every_ending_comes_once_and_none_is_missed(seed):
    rng = random.Random(seed)
    block = random_block(rng, 8, 0.25)
    group_ops, groups = rng.randrange(1, 5), rng.randrange(1, 5)
    for state in states_of(block):
        found = list(endings_of(block, state, group_ops, groups))
        assert len(found) == len(set(found))
        wanted, ending = set(), state.ops
        while ending:
            closed = all(not block.successors[op] & state.ops & ~ending for op in members(ending))
            if closed and pruned(block, group_ops, groups)(ending):
                wanted.add(ending)
            ending = (ending - 1) & state.ops
        assert set(found) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_on_large_blocks_every_op_runs_once_and_no_edge_goes_back(seed):
    rng = random.Random(seed)
    block = random_block(rng, 24, 0.2)
    timer = occupancy(block, [rng.random() for _ in range(24)])
    for found, group_ops, groups in (
        (dos(block, timer), 1, 24),
        (ios(block, timer, group_ops=2, groups=3), 2, 3),
        (sequential(block, timer), 1, 1),
        (greedy(block, timer), 1, 24),
    ):
        done = 0
        for stage in found.stages:
            assert not stage & done
            done |= stage
            assert all(not block.predecessors[op] & ~done for op in members(stage))
            assert pruned(block, group_ops, groups)(stage)
        assert done == block.everything


@pytest.mark.parametrize("seed", range(20))
def test_more_freedom_is_never_slower(seed):
    rng = random.Random(seed)
    block = random_block(rng, 12, 0.3)
    timer = occupancy(block, [rng.random() for _ in range(12)])
    exact = dos(block, timer).seconds
    assert ios(block, timer, group_ops=1, groups=12).seconds == pytest.approx(exact)
    assert ios(block, timer, group_ops=3, groups=12).seconds <= exact + 1e-12
    assert exact <= min(greedy(block, timer).seconds, sequential(block, timer).seconds) + 1e-12
    assert dos(block, timer, window=4).seconds >= exact - 1e-12


def test_states_are_in_bijection_with_stages_of_independent_ops():
    block = random_block(random.Random(5), 10, 0.3)
    found = dos(block, random_seconds(0))
    assert found.states == found.timed == len(states_of(block))
    assert estimate(block) == pytest.approx(found.states, rel=0.1)


def test_a_wide_block_is_refused_with_an_estimate_and_a_window_opens_it():
    block = KernelBlock((0,) * 30)
    with pytest.raises(TooManyStatesError, match="30 ops") as raised:
        dos(block, random_seconds(0), most=10_000)
    assert raised.value.states == pytest.approx(2**30, rel=0.5)
    assert raised.value.limit == 10_000
    found = dos(block, random_seconds(0), window=4)
    assert sum(found.stages) == block.everything
    assert found.states <= 30 * 2**3


def test_a_window_leaves_out_what_runs_far_ahead():
    block = KernelBlock((0,) * 8)
    for state in states_of(block, window=3):
        lacking = [op for op in range(8) if not state.ops >> op & 1]
        assert not lacking or state.ops.bit_length() - 1 < lacking[0] + 3


def test_an_edge_backwards_is_refused():
    with pytest.raises(ValueError, match="op 1"):
        KernelBlock((0, 0b10))
