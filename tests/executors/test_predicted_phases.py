"""What stages take as the phases that they run in."""

import pytest

from dovetail.executors.stages.phases import (
    AloneSeconds,
    SchedulePhase,
    phases_of,
    predicted,
    whole,
)
from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.results import KernelStage

#                    kernel   0    1    2    3
ALONE = AloneSeconds((10.0, 4.0, 4.0, 2.0), (6.0, 3.0, 3.0, 3.0), 1.0)


def stage(*groups, seconds=0.0, merged=False):
    return KernelStage(groups, seconds, merged)


def test_one_after_another_with_all_threads_or_on_one():
    stages = [stage((kernel,), seconds=99.0) for kernel in range(4)]
    assert predicted(whole(4), stages, ALONE) == 15.0
    alone = [SchedulePhase((0, 1, 2, 3), Streams(((0, 1, 2, 3),), ()))]
    assert predicted(alone, stages, ALONE) == 20.0  # one stream: nobody to hand over to


@pytest.mark.parametrize(
    ("switching", "phases", "seconds"),
    # all threads win 4 for kernel 0, and lose 1 for kernel 3
    [(1.0, ["whole", "streams"], 6 + 5 + 2 + 1), (5.0, ["streams"], 10 + 5 + 2 + 5)],
)
def test_as_the_phases_were_made(switching, phases, seconds):
    alone = AloneSeconds(ALONE.one_thread, ALONE.all_threads, switching)
    stages = [stage((0,)), stage((1,), (2,), seconds=5.0), stage((3,))]
    found = phases_of(stages, alone, 2)
    assert ["whole" if phase.streams is None else "streams" for phase in found] == phases
    assert predicted(found, stages, alone) == seconds


def test_each_phase_of_streams_is_gone_to_and_come_back_from():
    alone = AloneSeconds((4.0, 4.0, 9.0, 4.0, 4.0), (3.0, 3.0, 5.0, 3.0, 3.0), 0.5)
    stages = [stage((0,), (1,), seconds=5.0), stage((2,)), stage((3,), (4,), seconds=5.0)]
    assert predicted(phases_of(stages, alone, 2), stages, alone) == 5 + 5 + 5 + 2 * 0.5


def test_a_chain_by_itself_takes_what_its_kernels_do():
    stages = [stage((0, 1), seconds=99.0), stage((2, 3), seconds=99.0)]
    assert predicted(whole(4), stages, ALONE) == 15.0


def test_merged_stages():
    stages = [stage((1, 2), seconds=4.0, merged=True)]
    assert predicted([SchedulePhase((1, 2))], stages, ALONE) == 3.0  # all threads: 6/8 of the time
    assert predicted([SchedulePhase((1, 2), Streams(((1, 2),), ()))], stages, ALONE) == 4.0
