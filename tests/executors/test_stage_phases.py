import random

import pytest

from dovetail.errors import RaceError
from dovetail.executors.stages.phases import (
    AloneSeconds,
    SchedulePhase,
    barriers,
    joined,
    phases_of,
    predicted,
    spread,
    whole,
)
from dovetail.schedulers.dataflow import Streams, dataflow
from dovetail.schedulers.races import check_races, happens_before
from dovetail.schedulers.records import KernelBlock, groups_of, members
from dovetail.schedulers.results import KernelStage
from reproductions.elsewhere import random_stages
from tests.support.dags import random_block

ALONE = AloneSeconds([2.0] * 8, [1.0] * 8, 2.5)
"""Three in a row pay for going to all threads and back, two do not."""


def stage(*groups, merged=False):
    return KernelStage(tuple(map(tuple, groups)), 1.0, merged)


def kinds(phases):
    return [(phase.streams is not None, phase.kernels) for phase in phases]


def test_ops_alone_run_with_all_threads_where_a_run_of_them_pays_for_it():
    both = stage([3], [4])
    assert kinds(phases_of([stage([0]), stage([1]), both], ALONE, 2)) == [(True, (0, 1, 3, 4))]
    long = [stage([0]), stage([1]), stage([2])]
    assert kinds(phases_of([*long, both], ALONE, 2)) == [(False, (0, 1, 2)), (True, (3, 4))]
    assert kinds(phases_of([both, *long, stage([5], [6]), stage([7])], ALONE, 2)) == [
        (True, (3, 4)),
        (False, (0, 1, 2)),
        (True, (5, 6, 7)),
    ]
    assert kinds(phases_of([stage([0, 1, 2])], ALONE, 2)) == [(False, (0, 1, 2))]


def test_what_is_predicted_counts_each_stage_and_each_change():
    stages = [stage([0]), stage([1]), stage([2]), stage([3], [4]), stage([5, 6], merged=True)]
    phases = phases_of(stages, ALONE, 2)
    assert kinds(phases) == [(False, (0, 1, 2)), (True, (3, 4, 5, 6))]
    assert predicted(phases, stages, ALONE) == 3 * 1.0 + 1.0 + 1.0 + 2.5


def test_more_groups_than_streams_are_spread_by_their_seconds():
    seconds = [1.0, 5.0, 2.0, 2.0, 3.0]
    assert spread([[0], [1], [2, 3], [4]], seconds, 2) == [[1, 0], [2, 3, 4]]
    assert spread([[0], [1]], seconds, 1) == [[1, 0]]
    assert spread([[1]], seconds, 3) == [[1], [], []]


def test_a_stage_waits_for_all_of_the_one_before():
    found = barriers([[[0], [1]], [[2], []], [[3], [4, 5]]])
    assert found.orders == ((0, 2, 3), (1, 4, 5))
    assert set(found.waits) == {(1, 2), (2, 4)}


def test_a_step_without_kernels_has_no_phases():
    assert whole(0) == []
    check_races(KernelBlock(()), joined([]))


@pytest.mark.parametrize("seed", range(60))
def test_phases_of_any_stages_keep_every_edge(seed):
    rng = random.Random(seed)
    block = random_block(rng, rng.randrange(1, 30), rng.choice([0.05, 0.15, 0.4]))
    count = len(block)
    stages = [
        stage(*([*members(group)] for group in groups_of(block, ops)))
        for ops in random_stages(block, rng, 6, 4)
    ]
    one = [rng.random() + 0.1 for _ in range(count)]
    alone = AloneSeconds(one, [s * rng.uniform(0.3, 1.1) for s in one], rng.choice([0.0, 0.5, 9.0]))
    streams = rng.randrange(1, 5)
    phases = phases_of(stages, alone, streams)
    check_races(block, joined(phases))
    assert sorted(k for phase in phases for k in phase.kernels) == list(range(count))
    for phase in phases:
        if phase.streams is not None:
            assert len(phase.streams.orders) <= streams
            assert sorted(k for order in phase.streams.orders for k in order) == sorted(
                phase.kernels
            )
    # A stage ends before the next begins, whatever the edges say.
    earlier = happens_before(block, joined(phases))
    done = 0
    for own in stages:
        assert all(not done & ~earlier[kernel] for kernel in own.kernels)
        done |= sum(1 << kernel for kernel in own.kernels)


FORK = KernelBlock((0, 0b1, 0b1, 0b110))


@pytest.mark.parametrize(
    ("phases", "rule"),
    [
        ([SchedulePhase((0, 1, 3))], 1),
        ([SchedulePhase((0, 1, 2)), SchedulePhase((2, 3))], 1),
        ([SchedulePhase((0, 1)), SchedulePhase((3, 2))], 3),
        ([SchedulePhase((0,)), SchedulePhase((1, 2, 3), Streams(((1, 3), (2,)), ()))], 3),
        ([SchedulePhase((0, 1, 2, 3), Streams(((0, 1, 3), (2,)), ((0, 2), (3, 2), (2, 3))))], 2),
    ],
    ids=["left out", "twice", "reader first", "no wait", "deadlock"],
)
def test_phases_that_could_collide_are_refused(phases, rule):
    with pytest.raises(RaceError) as raised:
        check_races(FORK, joined(phases))
    assert raised.value.rule == rule


def test_streams_without_barriers_are_one_phase():
    found, _ = dataflow(FORK, [1.0] * 4, 2)
    check_races(FORK, joined([SchedulePhase((0, 1, 2, 3), found)]))
    assert joined([SchedulePhase((0, 1, 2, 3), found)]) == found
