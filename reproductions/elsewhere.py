"""Runs schedules where they were not made for, and random ones beside the sums of their stages.

    request ──► pipeline.scheduling: the schedules on each device, at each batch size
                  ├─ the schedule made for each batch size, at every batch size   (table 2)
                  ├─ the one made for each device, on every device                (table 1)
                  └─ random schedules, predicted and measured                     (figure 7)

Paper: "Accelerate DNN Inference by Inter-Operator Parallelism" (DOS), 2019. `reproductions.dos`
fills its tables with this. `elsewhere_page.render_comparison` draws what `compare` finds on one
device, for any network:

    found = compare(ComparisonRequest("zoo:squeezenet_1_1?size=64", batches=(1, 4), sampled=10))
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dovetail.costs import CostCache
from dovetail.errors import UsageError
from dovetail.executors.stages.targets import ScheduleTarget
from dovetail.methods import SCHEDULERS
from dovetail.pipeline.requests import ScheduleRequest, check_name, runs_here
from dovetail.pipeline.scheduling import batch_of, schedules_on, step_of
from dovetail.pipeline.sources import TellProgress, silent
from dovetail.runtime.timers import Repeats, in_turns
from dovetail.schedulers.dataflow import replayed
from dovetail.schedulers.records import KernelBlock, OpSet, groups_of, members
from dovetail.schedulers.results import KernelStage, ScheduleCandidate, Schedules
from dovetail.schedulers.scheduling import SchedulerResult

RANDOM = "random"
"""The scheduler's name of a candidate that was drawn at random."""
DRAWS_EACH = 20
"""At most so many draws for each random schedule that is wanted: a narrow network has few."""


@dataclass(frozen=True)
class ComparisonRequest(ScheduleRequest):
    """Which schedules to find and to compare. Raises `UsageError`.

    sampled       random schedules to measure, so that predictions can be compared with them
    specialised   the scheduler whose schedules run at the sizes and on the devices that they were
                  not made for; "": each one's chosen schedule
    """

    sampled: int = 0
    specialised: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.specialised:
            check_name("specialised", self.specialised, self.schedulers or SCHEDULERS)
        if self.sampled < 0:
            raise UsageError("sampled", f"is {self.sampled}; use 0 or more")
        if self.sampled and not any(map(runs_here, self.devices)):
            names = ", ".join(self.devices)
            raise UsageError("sampled", f"random schedules are measured, and {names} cannot be")


@dataclass(frozen=True)
class Specialisation:
    """A table of what schedules cost in settings that they were not made for.

    `seconds[row][column]` is the time on `rows[row]` of the schedule made for `columns[column]`.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Comparison:
    """The schedules of a network on one device, and what they were compared with.

    specialisations   what they cost at batch sizes and on devices that they were not made for
    sampled           [batch sizes] (predicted, measured) seconds of random schedules
    """

    schedules: Schedules
    specialisations: tuple[Specialisation, ...]
    sampled: tuple[tuple[tuple[float, float], ...], ...]


def compare(
    request: ComparisonRequest, *, cache: CostCache | None = None, progress: TellProgress = silent
) -> list[Comparison]:
    """The fastest stages of a network on each device, at each batch size, with what they cost at
    the other sizes and on the other devices, measured on the devices that are here."""
    steps = [step_of(request.model, batch, progress) for batch in request.batches or (0,)]
    by_device: list[Comparison] = []
    by_batch: list[list[tuple[ScheduleTarget, ScheduleCandidate]]] = [[] for _ in steps]
    for device in request.devices:
        schedules, targets = schedules_on(device, steps, request, cache=cache, progress=progress)
        sampled: list[tuple[tuple[float, float], ...]] = [() for _ in targets]
        if request.sampled and runs_here(device):
            for i, target in enumerate(targets):
                rng = random.Random(request.seed)
                drawn = sample(target, request.sampled, rng, request.rounds, progress)
                sampled[i] = tuple(drawn)
        name = request.specialised
        made = [result.candidate(name) if name else result.best for result in schedules.results]
        matrices: tuple[Specialisation, ...] = ()
        # Sizes with other kernels have other schedules.
        if len(targets) > 1 and len({target.block for target in targets}) == 1:
            names = tuple(f"batch {batch_of(target.captured)}" for target in targets)
            rows = tuple(_row(target, made, request.rounds)[0] for target in targets)
            matrices = (Specialisation("batch sizes", names, names, rows),)
        by_device.append(Comparison(schedules, matrices, tuple(sampled)))
        for at_batch, target, candidate in zip(by_batch, targets, made, strict=True):
            at_batch.append((target, candidate))
    across = []
    names = tuple(found.schedules.device for found in by_device)
    for result, at_batch in zip(by_device[0].schedules.results, by_batch, strict=True):
        if len(names) < 2:
            break
        made = [candidate for _, candidate in at_batch]
        of_devices = [_row(target, made, request.rounds) for target, _ in at_batch]
        here = [name for name, (_, known) in zip(names, of_devices, strict=True) if known]
        how = f"measured on {' and '.join(here)}" if here else "predicted"
        how += " and predicted on the others" * (0 < len(here) < len(names))
        title = f"devices at batch {result.batch}, {how}"
        seconds = tuple(of_device for of_device, _ in of_devices)
        across.append(Specialisation(title, names, names, seconds))
    return [
        replace(found, specialisations=(*found.specialisations, *across)) for found in by_device
    ]


def _row(
    target: ScheduleTarget, made: Sequence[ScheduleCandidate], rounds: int
) -> tuple[tuple[float, ...], bool]:
    """The seconds of the schedules on one target, and whether they were measured. They are
    predicted if the device is not here."""
    seen = [reseen(target, candidate) for candidate in made]
    # Schedules that run alike are measured as one, so that noise does not tell them apart.
    programs = [target.program(candidate) for candidate in seen]
    names = [str(programs.index(program)) for program in programs]
    steps = {name: target.step(seen[int(name)]) for name in dict.fromkeys(names)}
    timers = {name: target.timed(step) for name, step in steps.items() if step is not None}
    if not timers:
        return tuple(candidate.predicted_seconds for candidate in seen), False
    seconds = in_turns(timers, Repeats(rounds))
    return tuple(statistics.median(seconds[name]) for name in names), True


def reseen(target: ScheduleTarget, candidate: ScheduleCandidate) -> ScheduleCandidate:
    """A schedule that was made for another target, as this target of the same kernels runs it: its
    seconds are predicted anew, and this target chooses which stages are merged."""
    if not candidate.stages:
        seconds = replayed(
            target.block, candidate.streams, target.problem.seconds, target.problem.wait_seconds
        )
        result = SchedulerResult(seconds, streams=candidate.streams)
        total = target.predicted(candidate.scheduler, result)
        return replace(candidate, predicted_seconds=total, seconds=())
    op_sets = [sum(1 << kernel for kernel in stage.kernels) for stage in candidate.stages]
    repriced = as_candidate(target, op_sets, candidate.scheduler)
    return replace(
        candidate,
        stages=repriced.stages,
        streams=repriced.streams,
        predicted_seconds=repriced.predicted_seconds,
        seconds=(),
    )


def sample(
    target: ScheduleTarget,
    count: int,
    rng: random.Random,
    rounds: int,
    progress: TellProgress = silent,
) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of `count` distinct random schedules, or as many as were found,
    all measured side by side."""
    groups, ops = target.problem.groups, target.problem.group_ops
    drawn = distinct_stages(target.block, count, rng, groups, ops)
    candidates = [as_candidate(target, stages) for stages in drawn]
    timers = {}
    for place, candidate in enumerate(candidates):
        step = target.step(candidate)
        assert step is not None, "only a device that is here runs schedules"
        timers[str(place)] = target.timed(step)
        progress("random schedules", (place + 1) / len(candidates) / 2, None)
    measured = in_turns(
        timers, Repeats(rounds), lambda f: progress("random schedules", 0.5 + f / 2, None)
    )
    return [
        (candidate.predicted_seconds, statistics.median(measured[str(place)]))
        for place, candidate in enumerate(candidates)
    ]


def as_candidate(
    target: ScheduleTarget, stages: Sequence[OpSet], scheduler: str = RANDOM
) -> ScheduleCandidate:
    """A candidate of any stages. Each stage runs by the faster strategy, as groups or merged, and
    the candidate has its predicted seconds."""
    kernel_stages = []
    for stage, timing in zip(stages, target.problem.timer(stages), strict=True):
        groups = tuple(tuple(members(group)) for group in groups_of(target.block, stage))
        if timing.merged:
            groups = (tuple(kernel for group in groups for kernel in group),)
        kernel_stages.append(KernelStage(groups, timing.seconds, timing.merged))
    schedule = SchedulerResult(sum(stage.seconds for stage in kernel_stages), tuple(kernel_stages))
    total = target.predicted(scheduler, schedule)
    return ScheduleCandidate(scheduler, tuple(kernel_stages), target.streams(kernel_stages), total)


def distinct_stages(
    block: KernelBlock, count: int, rng: random.Random, most_groups: int, most_ops: int
) -> list[tuple[OpSet, ...]]:
    """Distinct random schedules of a block: `count` of them, or fewer if no more are found in
    `DRAWS_EACH` draws for each."""
    found: dict[tuple[OpSet, ...], None] = {}
    for _ in range(DRAWS_EACH * count):
        found[tuple(random_stages(block, rng, most_groups, most_ops))] = None
        if len(found) == count:
            break
    return list(found)


def random_stages(
    block: KernelBlock, rng: random.Random, most_groups: int, most_ops: int
) -> list[OpSet]:
    """Return the stages of a random schedule of a block, in running order.

    No stage has more than `most_groups` groups, and no group has more than `most_ops` ops. Random
    schedules are measured to see how well sums over stages predict them.

    A stage is filled with random ops that wait for nothing outside it, within limits that are drawn
    for that stage. The draw is not uniform over all schedules. O(ops x stages). Raises ValueError
    for a limit below 1.
    """
    if min(most_groups, most_ops) < 1:
        raise ValueError(f"{most_groups} groups of {most_ops} ops hold no op")
    # Drawn once per schedule, not per stage: so some schedules are nearly sequential and others run
    # nearly all ready ops at once, instead of all schedules being alike on average.
    wide, deep = rng.random(), rng.random()

    def upto(most: int, share: float) -> int:
        """A number from 1 to `most`: always 1 if `share` is 0, always `most` if it is 1."""
        return 1 + sum(rng.random() < share for _ in range(most - 1))

    stages: list[OpSet] = []
    done = 0
    while done != block.everything:
        limit_of_groups, limit_of_ops = upto(most_groups, wide), upto(most_ops, deep)
        ready = [
            op
            for op, before in enumerate(block.predecessors)
            if not done >> op & 1 and not before & ~done
        ]
        groups: list[OpSet] = []
        stage = 0
        while ready:
            op = ready.pop(rng.randrange(len(ready)))
            # The op joins the groups that it reads. No group can read the op: every op of the stage
            # had all its predecessors in `done` or in the stage before it was added.
            apart = [group for group in groups if not group & block.predecessors[op]]
            joined = 1 << op | sum(group for group in groups if group & block.predecessors[op])
            if joined.bit_count() > limit_of_ops or len(apart) == limit_of_groups:
                continue
            groups = [*apart, joined]
            stage |= 1 << op
            ready += [
                after
                for after in members(block.successors[op])
                if not block.predecessors[after] & ~(done | stage)
            ]
        stages.append(stage)
        done |= stage
    return stages
