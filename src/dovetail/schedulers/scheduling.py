"""Turns a stage problem (kernels and what their stages cost) into a schedule, by any scheduler.

The baselines `sequential` and `greedy` are here; the other schedulers have a file each.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dovetail.schedulers.blocks import Narrowed, Part, cut, narrowed, whole
from dovetail.schedulers.dataflow import Streams, dataflow
from dovetail.schedulers.dos import dos
from dovetail.schedulers.ios import GROUP_OPS, GROUPS, ios
from dovetail.schedulers.merge import merge
from dovetail.schedulers.records import (
    BlockSchedule,
    KernelBlock,
    OpSet,
    StageTimer,
    StageTiming,
    groups_of,
    members,
)
from dovetail.schedulers.results import KernelStage


def sequential(block: KernelBlock, timer: StageTimer) -> BlockSchedule:
    """Return a stage for each op, in block order, as a network runs without a scheduler. O(ops)."""
    stages = tuple(1 << op for op in range(len(block)))
    return BlockSchedule(stages, tuple(timer(stages)), 0, 0, len(stages))


def greedy(block: KernelBlock, timer: StageTimer) -> BlockSchedule:
    """Return stages each of which runs every op whose predecessors ran in earlier stages.

    Parallel executors of common frameworks do the same. O(ops x stages).

    Paper: the baseline "greedy" of Y. Ding et al., "IOS: Inter-Operator Scheduler for CNN
    Acceleration", MLSys 2021, https://arxiv.org/abs/2011.01302, section 6.2.
    """
    stages: list[OpSet] = []
    done = 0
    while done != block.everything:
        stage = sum(
            1 << op
            for op, before in enumerate(block.predecessors)
            if not done >> op & 1 and not before & ~done
        )
        stages.append(stage)
        done |= stage
    return BlockSchedule(tuple(stages), tuple(timer(stages)), 0, 0, len(stages))


MOST_STATES = {"dos": 50_000, "ios": 5_000}
"""Each scheduler searches parts of at most this many states. `ios` gets fewer because it compares
hundreds of endings for each state, where `dos` compares some 40."""


@dataclass(frozen=True)
class StageProblem:
    """The kernels to schedule, and their costs.

    signatures     [kernels] equal for kernels that cost the same
    timer          a function: stages of the block -> their timings
    bounded        the timer for the stages that `dos` and `ios` compare. If a stage cannot beat its
                   kernels run one by one, it may return their seconds without measuring
    keys           [kernels] kernels with the same key may be merged; a kernel with None merges with
                   none
    streams        how many kernels the device can run at once
    seconds        [kernels] seconds of each kernel by itself on one stream
    wait_seconds   seconds until another stream sees that a kernel has ended
    group_ops, groups   most kernels in a group, and most groups in a stage, for `ios`: the paper's
                   r and s
    """

    block: KernelBlock
    signatures: Sequence[str]
    timer: StageTimer
    bounded: StageTimer
    keys: Sequence[Hashable | None]
    streams: int
    seconds: Sequence[float]
    wait_seconds: float = 0.0
    group_ops: int = GROUP_OPS
    groups: int = GROUPS


@dataclass(frozen=True)
class SchedulerResult:
    """The result of a scheduler: stages in running order, or streams without barriers.

    seconds         predicted seconds of the whole schedule
    stages          empty for a scheduler that returns streams
    streams         None for a scheduler that returns stages
    blocks          the kernels of each part that was scheduled on its own
    block_seconds   [blocks] predicted seconds of each part
    states, transitions   how many the search has seen, over all parts that it searched
    pruning         what the search left out, in words; "" if it left out nothing
    """

    seconds: float
    stages: tuple[KernelStage, ...] = ()
    streams: Streams | None = None
    blocks: tuple[tuple[int, ...], ...] = ()
    block_seconds: tuple[float, ...] = ()
    states: int = 0
    transitions: int = 0
    pruning: str = ""


Scheduler = Callable[[StageProblem], SchedulerResult]


# --- The schedulers of the table `methods.SCHEDULERS` ---


def schedule_sequential(problem: StageProblem) -> SchedulerResult:
    """Return a stage for each kernel."""
    return by_parts(problem, lossless(problem), lambda part, t, _: sequential(part.block, t))


def schedule_greedy(problem: StageProblem) -> SchedulerResult:
    """Return stages of all kernels that are ready."""
    return by_parts(problem, lossless(problem), lambda part, t, _: greedy(part.block, t))


def schedule_merge(problem: StageProblem) -> SchedulerResult:
    """Return stages of one kernel, or of like kernels that run as one where that is faster."""

    def search(part: Part, timer: StageTimer, _window: int) -> BlockSchedule:
        return merge(part.block, timer, [problem.keys[op] for op in part.ops])

    return by_parts(problem, lossless(problem), search)


def schedule_dos(problem: StageProblem) -> SchedulerResult:
    """Return the best stages of independent kernels, by DOS's dynamic programme."""
    parts = narrowed(problem.block, MOST_STATES["dos"])
    # Measuring stages is most of the search's cost, and a stage that cannot beat its kernels one by
    # one is never better than what the search has anyway. So the bounded timer is enough here.
    compared = replace(problem, timer=problem.bounded)
    return by_parts(compared, parts, lambda part, t, w: dos(part.block, t, window=w))


def schedule_ios(problem: StageProblem) -> SchedulerResult:
    """Return the best stages of few groups, by IOS's dynamic programme."""
    parts = narrowed(problem.block, MOST_STATES["ios"])
    search = partial(ios, group_ops=problem.group_ops, groups=problem.groups)
    compared = replace(problem, timer=problem.bounded)
    return by_parts(compared, parts, lambda part, t, w: search(part.block, t, window=w))


def lossless(problem: StageProblem) -> Narrowed:
    """Return the parts between ops that lie on all paths. Their search has no window, so it leaves
    out nothing."""
    parts = tuple(cut(problem.block))
    return Narrowed(parts, (0,) * len(parts))


def schedule_dataflow(problem: StageProblem) -> SchedulerResult:
    """Return streams without stages, in which a kernel starts when its inputs are there."""
    streams, seconds = dataflow(
        problem.block, problem.seconds, problem.streams, problem.wait_seconds
    )
    return SchedulerResult(seconds, streams=streams)


def by_parts(
    problem: StageProblem,
    division: Narrowed,
    search: Callable[[Part, StageTimer, int], BlockSchedule],
) -> SchedulerResult:
    """Search each part, and join the schedules one after another. Equal parts are searched once.

    division   the parts, and the window of each
    search     a function (part, timer, window) -> the part's schedule
    """
    by_key: dict[Hashable, BlockSchedule] = {}
    stages: list[KernelStage] = []
    seconds = []
    states = transitions = 0
    for part, window in zip(division.parts, division.windows, strict=True):
        # Parts of one key have stages that cost the same. Merge keys name tensors, so they differ
        # from part to part. Each is replaced by the place of its first kernel: what matters is
        # which kernels of the part share a key.
        first: dict[Hashable, int] = {}
        merging = tuple(
            None if problem.keys[op] is None else first.setdefault(problem.keys[op], place)
            for place, op in enumerate(part.ops)
        )
        alike = (part.block, tuple(problem.signatures[op] for op in part.ops), merging)
        if alike not in by_key:

            def time(stages: Sequence[OpSet], part: Part = part) -> Sequence[StageTiming]:
                # The problem's timer numbers ops as the whole block does.
                return problem.timer([whole(part, stage) for stage in stages])

            by_key[alike] = search(part, time, window)
            states += by_key[alike].states
            transitions += by_key[alike].transitions
        schedule = by_key[alike]
        seconds.append(schedule.seconds)
        for stage, timing in zip(schedule.stages, schedule.timings, strict=True):
            groups = groups_of(part.block, stage)
            stage_groups = tuple(tuple(part.ops[op] for op in members(group)) for group in groups)
            # A merged stage runs as one kernel, so all its kernels are shown as one group.
            if timing.merged:
                stage_groups = (tuple(kernel for group in stage_groups for kernel in group),)
            stages.append(KernelStage(stage_groups, timing.seconds, timing.merged))
    return SchedulerResult(
        sum(seconds),
        tuple(stages),
        None,
        tuple(part.ops for part in division.parts),
        tuple(seconds),
        states,
        transitions,
        division.pruning,
    )
