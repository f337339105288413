"""Chooses how a training step's batch is shared: by how many data-parallel towers, in how many
micro-batches, and where all of it runs.

    batch ──► parts (towers x micro-batches) ──► step of one part ──► plan of all parts ──► the best

Each pair of numbers is a candidate. With one micro-batch the towers' graph is placed as any other;
with several each tower is a pipeline on its own devices. All plans are of the same examples, so
their seconds of a step compare.

What differs from the whole batch: the loss is the mean of the parts' losses, batch norm takes the
statistics of a part, and random draws are a part's own, as in every data-parallel training.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError, InfeasibleError, UsageError
from dovetail.executors import PlacedNetwork, PlainNetwork
from dovetail.executors.hosts import HostsNetwork
from dovetail.executors.stages.choosing import fastest
from dovetail.frontends import Captured
from dovetail.graph import Phase
from dovetail.machine import Machine, parse_machine
from dovetail.pipeline.pipelining import computing_devices, plan_pipeline, towers_devices
from dovetail.pipeline.requests import AUTO, PlanRequest, ScheduleRequest
from dovetail.pipeline.sources import TellProgress, replicated, transforms_of
from dovetail.pipeline.using import run
from dovetail.plans import Plan
from dovetail.schedulers.results import SEQUENTIAL
from dovetail.transforms import Parts, applied, batch_of
from dovetail.transforms.copying import Replica
from dovetail.units import HERE, format_seconds

FILLS = (1, 2, 4)
"""A pipeline on D devices is tried with D times so many micro-batches: the share of its fill and
drain is about (D - 1) / (micro-batches + D - 1)."""
ON_ONE_DEVICE = (2, 4, 8)
"""Numbers of micro-batches that are tried on one device for each tower, where whole parts need more
memory than there is."""
Find = Callable[[PlanRequest, TellProgress], Plan]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Sharing:
    """How a batch is shared; `str()` is the name of a plan's row."""

    towers: int = 1
    micro_batches: int = 1

    @property
    def parts(self) -> int:
        """The number of equal parts of the batch."""
        return self.towers * self.micro_batches

    def __str__(self) -> str:
        words = [f"{self.towers} towers"] if self.towers > 1 else []
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        return " of ".join(words) or "whole batch"


WHOLE = Sharing()


@dataclass(frozen=True)
class Planners:
    """The two ways to plan a request of one graph.

    search   by prediction alone
    find     as a plan without replicas: with other forms of the step, compiled and measured here
    """

    search: Find
    find: Find


def plan_batch(request: PlanRequest, planners: Planners, progress: TellProgress) -> Plan:
    """The fastest plan over all ways to share the batch.

    All candidates are compared by prediction, with the budget of one search together. Of those that
    are within the request's `min_gain` of the best, the one with fewest parts is searched for again
    with a budget of its own. On this machine it is then measured beside the whole batch's plan. The
    bound is the least of all candidates' bounds. A candidate that cannot be planned is left out,
    and the plan's notes say why.

    Raises `UsageError` for a step whose batch cannot be split, and what planning the first
    candidate raises if none can be planned.
    """
    began, step = time.perf_counter(), request.planned_step
    assert isinstance(step, Captured), "the request has checked that"
    machine = request.machine
    if isinstance(machine, str):
        machine = parse_machine(machine or HERE)
    batch = batch_of(step)
    waiting = list(sharings(step, batch, machine))
    most_towers = waiting[-1].towers
    if len(waiting) > 1:
        # A step that cannot be split is refused before anything is searched.
        _part_of(step, waiting[1].parts)
    part = replace(request, budget=request.limits.divided(len(waiting)))
    tried = _TriedSharings()
    while waiting and not tried.interrupted:
        sharing = waiting.pop(0)
        tried.add(sharing, partial(_planned, part, sharing, planners.search, progress))
        if sharing == Sharing(most_towers) and not tried.fits_alone(sharing):
            counts = [count for count in ON_ONE_DEVICE if batch % (most_towers * count) == 0]
            waiting += [Sharing(most_towers, count) for count in counts]
    chosen = tried.simplest(request.resolved_gain)
    if not tried.interrupted:
        tried.add(chosen, partial(_planned, request, chosen, planners.find, progress))
        if chosen != WHOLE and machine.local and tried.plans.get(WHOLE) is not None:
            tried.add(WHOLE, partial(_planned, request, WHOLE, planners.find, progress))
            chosen = _measured_best(tried, chosen, step, progress)
    return replace(tried.told(chosen), planning_seconds=time.perf_counter() - began)


class _TriedSharings:
    """The candidates that were planned.

    plans    the plan of each; None: it does not fit
    """

    def __init__(self) -> None:
        self.plans: dict[Sharing, Plan | None] = {}
        self.notes: list[str] = []
        self.interrupted = False
        self._error: DovetailError | None = None

    def add(self, sharing: Sharing, plan_it: Callable[[], Plan]) -> None:
        """Plan a candidate. A plan that it had is replaced by one that is no worse, or that is
        measured."""
        try:
            plan = plan_it()
        except InfeasibleError as error:
            self._error, self.interrupted = self._error or error, error.interrupted
            self.plans.setdefault(sharing, None)
            return
        except DovetailError as error:
            self._error = self._error or error
            self.notes.append(f"{sharing}: {str(error).splitlines()[0]}")
            return
        except KeyboardInterrupt:
            if not any(self.plans.values()):
                raise
            self.interrupted = True
            return
        self.interrupted = plan.interrupted
        before = self.plans.get(sharing)
        if before is None or plan.measured or plan.value <= before.value:
            self.plans[sharing] = plan

    def fits_alone(self, sharing: Sharing) -> bool:
        """True if the candidate was planned, and its forward ops are on GPUs where there are
        some."""
        plan = self.plans.get(sharing)
        if plan is None or plan.graph is None:
            return False
        forward = plan.graph.phases == Phase.FORWARD
        return bool(np.isin(plan.placement[forward], computing_devices(plan.machine)).all())

    def simplest(self, gain: float) -> Sharing:
        """Of the candidates that are within this share of the best, the one with fewest parts.
        Raises the first error if there is no plan."""
        values = {sharing: plan.value for sharing, plan in self.plans.items() if plan is not None}
        if not values:
            assert self._error is not None, "there is a candidate, and it failed"
            raise self._error
        worth = min(values.values()) / (1 - gain)
        return min(
            (sharing for sharing, value in values.items() if value <= worth),
            key=lambda sharing: (sharing.parts, values[sharing]),
        )

    def told(self, chosen: Sharing) -> Plan:
        """The chosen plan, with the rows of all candidates and the least of their bounds. Another
        candidate's bound is proven again only by planning all of them."""
        plan = self.plans[chosen]
        assert plan is not None
        plans = {sharing: other for sharing, other in self.plans.items() if other is not None}
        weakest = min(plans.values(), key=lambda other: other.lower_bound)
        rows = {
            str(sharing): None if other is None else other.value
            for sharing, other in self.plans.items()
        }
        notes = list(self.notes)
        if chosen.parts > 1:
            notes.append(
                f"the batch is shared by {chosen}: loss and gradients are the means of its "
                f"{chosen.parts} parts"
            )
        return replace(
            plan,
            baselines={**plan.baselines, **rows},
            interrupted=plan.interrupted or self.interrupted,
            lower_bound=weakest.lower_bound,
            bound_proof=plan.bound_proof if weakest is plan else "every way to share the batch",
            notes=(*plan.notes, *notes),
        )


def _measured_best(
    tried: _TriedSharings, chosen: Sharing, step: Captured, progress: TellProgress
) -> Sharing:
    """The way to share that is faster as measured side by side here: the chosen one, if it is
    beyond doubt, or else the whole batch."""
    timers, doing = {}, "measuring the shared batch beside the whole one"
    with ExitStack() as stack:
        for name, sharing in ((SEQUENTIAL, WHOLE), (SHARED, chosen)):
            plan = tried.plans[sharing]
            assert plan is not None
            network: PlacedNetwork | PlainNetwork | HostsNetwork = run(plan, step)
            stack.enter_context(network)
            network.feed()
            timers[name] = partial(_seconds, network.step_seconds)
        winner, seconds = fastest(
            timers, ScheduleRequest.rounds, lambda done: progress(doing, done, None)
        )
    whole, shared = (format_seconds(median(seconds[name])) for name in (SEQUENTIAL, SHARED))
    tried.notes.append(f"measured side by side: {WHOLE} {whole}, {chosen} {shared}")
    return chosen if winner == SHARED else WHOLE


SHARED = "shared"


def _seconds(step_seconds: Callable[[int], Float64]) -> float:
    """Seconds of one step."""
    return float(step_seconds(2)[0])


def sharings(step: Captured, batch: int, machine: Machine) -> Iterator[Sharing]:
    """The ways that are tried to share a step's batch on a machine, the whole batch first.

    There are up to as many towers as devices. With several micro-batches each tower has an equal
    number of like devices, two or more. A step that writes buffers has no several towers of several
    micro-batches: micro-batches write them one after another, and towers at once.
    """
    devices = len(computing_devices(machine))
    writes = bool(Replica(step.graph).buffer_updates.any())
    for towers in range(1, devices + 1):
        if batch % towers:
            continue
        yield Sharing(towers)
        each = devices // towers
        if each < 2 or not _splits(machine, towers) or (writes and towers > 1):
            continue
        for fill in FILLS:
            if batch % (towers * each * fill) == 0:
                yield Sharing(towers, each * fill)


def _splits(machine: Machine, towers: int) -> bool:
    try:
        towers_devices(machine, towers)
    except UsageError:
        return False
    return True


def _part_of(step: Captured, parts: int) -> Captured:
    """The step of one of so many parts of the batch."""
    return step if parts == 1 else applied(step, (*transforms_of(step), Parts(parts)))


def _planned(request: PlanRequest, sharing: Sharing, find: Find, progress: TellProgress) -> Plan:
    """The plan of one way to share the batch."""

    def tell(doing: str, share: float, best: float | None) -> None:
        progress(f"{sharing}: {doing}", share, best)

    step = request.planned_step
    assert isinstance(step, Captured), "the request has checked that"
    tell("capturing its part", 0.0, None)
    part = _part_of(step, sharing.parts)
    if sharing.micro_batches == 1:
        shared = replicated(part, sharing.towers)
        return find(replace(request, step=shared, replicas="", schedule=AUTO, recompute=AUTO), tell)
    piped = replace(
        request, step=part, replicas="", micro_batches=sharing.micro_batches,
        objective="pipeline", gap=0.0, min_gain=None,
    )  # fmt: skip
    return plan_pipeline(piped, tell, replicas=sharing.towers)
