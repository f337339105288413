import itertools
import random

import pytest

from dovetail.schedulers.records import KernelBlock, StageTiming, groups_of
from dovetail.schedulers.scheduling import greedy
from reproductions.elsewhere import distinct_stages, random_stages
from tests.support.dags import random_block


def chain(ops):
    return KernelBlock(tuple(1 << op - 1 if op else 0 for op in range(ops)))


@pytest.mark.parametrize(("groups", "ops"), [(1, 1), (1, 4), (3, 1), (8, 3)])
def test_every_op_runs_once_after_all_that_it_reads_and_within_the_limits(groups, ops):
    rng = random.Random(5)
    for size, share in itertools.product((1, 2, 9, 40), (0.0, 0.1, 0.4)):
        block = random_block(rng, size, share)
        done = 0
        for stage in random_stages(block, rng, groups, ops):
            assert stage and not stage & done
            found = groups_of(block, stage)
            assert len(found) <= groups
            assert max(group.bit_count() for group in found) <= ops
            done |= stage
            for op in range(size):
                assert not stage >> op & 1 or not block.predecessors[op] & ~done
        assert done == block.everything


def test_a_seed_gives_one_schedule_and_others_others():
    block = random_block(random.Random(1), 30, 0.1)
    drawn = [tuple(random_stages(block, random.Random(seed), 4, 2)) for seed in (*range(50), 0)]
    assert drawn[-1] == drawn[0]
    assert len(set(drawn)) == 50


def test_draws_reach_from_one_op_after_another_to_all_that_is_ready():
    block = random_block(random.Random(2), 40, 0.06)
    least = len(greedy(block, lambda stages: [StageTiming(1.0)] * len(stages)).stages)
    rng = random.Random(3)
    counts = [len(random_stages(block, rng, 8, 1)) for _ in range(200)]
    assert max(counts) >= 38
    assert min(counts) <= least + 3
    assert len(set(counts)) > 10


def test_groups_are_chains_where_they_may_be():
    drawn = [random_stages(chain(12), random.Random(seed), 4, 3) for seed in range(60)]
    assert all(stage.bit_count() <= 3 for stages in drawn for stage in stages)
    assert {len(stages) for stages in drawn} >= {4, 8}


def test_groups_that_one_op_reads_become_one():
    block = KernelBlock((0, 0, 0b11))
    stages = [random_stages(block, random.Random(seed), 2, 2) for seed in range(200)]
    assert all(0b111 not in of_draw for of_draw in stages)
    stages = [random_stages(block, random.Random(seed), 2, 3) for seed in range(200)]
    assert any(0b111 in of_draw for of_draw in stages)


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_a_limit_below_one_op_is_refused(limits):
    with pytest.raises(ValueError, match="hold no op"):
        random_stages(chain(2), random.Random(0), *limits)


def test_a_narrow_network_has_fewer_schedules():
    assert sorted(distinct_stages(chain(2), 9, random.Random(0), 8, 3)) == [(1, 2), (3,)]
