"""Lists what can be planned for a request, and keeps what was found.

    kind           its candidates              apply                    their step
    as it is       as it is                    unless one of the next   as it was captured
                                               two applies
    pipeline       pipeline                    objective pipeline       micro-batches in stages
    shared batch   whole batch, 2 towers, ...  `replicas` auto          parts of the batch
    other forms    with channels last, ...     `auto` on cores here     captured again in that form
    all cores      here                        the text here/n          the best of these, on all
                                                                        cores as one device

The table of kinds, `requests.CANDIDATES`, says which options each takes, and so which options
exclude each other. Each candidate is found by one search: of places (`searching`), of places and
stages together (`staging`), or of a pipeline's stages (`pipelining`). All have one budget together
(`shares`). What the step takes in compiled code, and what its user would run without a plan,
is known only where it is measured: see `planning`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from dovetail.errors import DovetailError, InfeasibleError, UsageError
from dovetail.frontends import Captured
from dovetail.graph import Phase
from dovetail.graph.kernels import CONVOLUTION
from dovetail.graph.source import Transform
from dovetail.machine import Machine, names_here
from dovetail.methods import imported
from dovetail.pipeline.pipelining import gpus_or_cpus, plan_pipeline, towers_devices
from dovetail.pipeline.requests import AUTO, CANDIDATES, PlanRequest
from dovetail.pipeline.searching import has_gpus, prefixed, search_to_fit
from dovetail.pipeline.sources import TellProgress, notes_of_machine, replicated
from dovetail.placers import Limits
from dovetail.plans import Plan
from dovetail.transforms import Form, Parts, applied, batch_of, the
from dovetail.transforms.copying import Replica
from dovetail.units import HERE, HERE_CPU, format_seconds

AS_IT_IS = "as it is"
AS_COMPILED = "as compiled"
"""The name of the budget's share for the search with the costs of compiled code, which is made for
the best candidate: `planning.with_compiled`."""
CHUNKS = (1, 4, 8)
"""The numbers of chunks of time steps in which fused recurrent kernels are tried on several
devices. On one device a layer is one kernel."""
FILLS = (1, 2, 4)
"""A pipeline on D devices is tried with D times so many micro-batches: the share of its fill and
drain is about (D - 1) / (micro-batches + D - 1)."""
ON_ONE_DEVICE = (2, 4, 8)
"""Numbers of micro-batches that are tried on one device for each tower, where whole parts need more
memory than there is."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Something that can be planned for a request.

    name      what rows and notes call it
    request   makes the request that is searched. It may capture the step again, and raise
    search    finds the plan of that request: its ops are placed, or it is cut into a pipeline's
              stages
    parts     the number of parts of the batch: of nearly equal plans that with fewest is taken, of
              equal ones the first
    rival     it stands beside the best of the others, and is not among them

    With the costs of compiled code (`planning.with_compiled`) the best one's `request` is searched
    again, by `searching.search_plan` and not by its `search`.
    """

    name: str
    request: Callable[[], PlanRequest]
    search: Callable[[PlanRequest, TellProgress], Any] = search_to_fit
    parts: int = 1
    rival: bool = False


class Valued(Protocol):
    """What a search finds for a candidate: a plan, or what the plans of several phases are made
    of."""

    @property
    def value(self) -> float: ...
    @property
    def interrupted(self) -> bool: ...


Found = TypeVar("Found", bound=Valued)


class TriedCandidates(Generic[Found]):
    """The candidates that were planned. A Ctrl-C leaves the best of these.

    plans         name -> plan; None: it does not fit
    candidates    name -> the candidate that was planned last
    requests      name -> the request of the plan
    failures      name -> why it could not be planned
    interrupted   a Ctrl-C arrived
    """

    def __init__(self) -> None:
        self.plans: dict[str, Found | None] = {}
        self.candidates: dict[str, Candidate] = {}
        self.requests: dict[str, PlanRequest] = {}
        self.failures: dict[str, str] = {}
        self.interrupted = False
        self._error: DovetailError | None = None

    def add(self, candidate: Candidate, progress: TellProgress) -> None:
        """Plan a candidate. A plan that it had is replaced by one that is no worse."""
        name = candidate.name
        tell = prefixed(f"{name}: ", progress) if self.candidates else progress
        self.candidates[name] = candidate
        try:
            request = candidate.request()
            plan: Found = candidate.search(request, tell)
        except InfeasibleError as error:
            self._error, self.interrupted = self._error or error, error.interrupted
            self.plans.setdefault(name, None)
            return
        # It fails in this candidate only, such as a pin on an op that another form does not have.
        except DovetailError as error:
            self._error = self._error or error
            self.failures[name] = str(error).splitlines()[0]
            return
        except KeyboardInterrupt:
            if not any(self.plans.values()):
                raise
            self.interrupted = True
            return
        self.interrupted = plan.interrupted
        before = self.plans.get(name)
        if before is None or plan.value <= before.value:
            self.plans[name], self.requests[name] = plan, request

    def plan(self, name: str) -> Found | None:
        """The plan of a candidate; None if there is none."""
        return self.plans.get(name)

    def best(self, gain: float) -> str:
        """The name of the candidate with fewest parts that is within this share of the best.
        Raises the first error if there is no plan."""
        values = {
            name: plan.value
            for name, plan in self.plans.items()
            if plan is not None and not self.candidates[name].rival
        }
        if not values:
            assert self._error is not None, "there is a candidate, and it failed"
            raise self._error
        parts = {name: self.candidates[name].parts for name in values}
        # Forms of one step have equally many parts, and the fastest is taken.
        several = len(set(parts.values())) > 1
        worth = min(values.values()) / (1 - gain if several else 1)
        return min(
            (name for name, value in values.items() if value <= worth),
            key=lambda name: (parts[name], values[name]),
        )


class Tried(TriedCandidates[Plan]):
    """The candidates that were planned, of one step."""

    def told(self, best: str) -> Plan:
        """The best candidate's plan, with what the user should know of the others.

        Ways to share a batch are rows, and the bound is the least of theirs. The bound of another
        one is proven again only by planning all of them.
        """
        chosen = self.plans[best]
        assert chosen is not None, "it is the best"
        chosen = replace(chosen, interrupted=chosen.interrupted or self.interrupted)
        among = [name for name in self.candidates if not self.candidates[name].rival]
        if len(among) == 1:
            return chosen
        if all(self.candidates[name].parts == 1 for name in among):
            texts = []
            for name in among:
                plan = self.plan(name)
                value = "does not fit" if plan is None else format_seconds(plan.value)
                failed = self.failures.get(name)
                texts.append(f"{name} {value}" if failed is None else f"{name}: {failed}")
            return chosen.noted(f"the step as predicted: {', '.join(texts)}")
        plans = [plan for name in among if (plan := self.plan(name)) is not None]
        weakest = min(plans, key=lambda plan: plan.lower_bound)
        rows = {
            name: None if plan is None else plan.value
            for name, plan in self.plans.items()
            if not self.candidates[name].rival
        }
        notes = [f"{name}: {failed}" for name, failed in self.failures.items()]
        parts = self.candidates[best].parts
        if parts > 1:
            notes.append(
                f"the batch is shared by {best}: loss and gradients are the means of its {parts} "
                "parts"
            )
        is_own = weakest is self.plans[best]
        return replace(
            chosen,
            baselines={**chosen.baselines, **rows},
            lower_bound=weakest.lower_bound,
            bound_proof=chosen.bound_proof if is_own else "every way to share the batch",
        ).noted(*notes)


def candidates(request: PlanRequest, tried: Tried) -> Iterator[Candidate]:
    """Yield what can be planned for a request, in the order in which it is tried.

    tried   what was found of those before; later ones follow from it

    Raises `UsageError` for a batch that is to be shared and cannot be split, and the first error if
    a later candidate would follow from a plan and there is none.
    """
    limits = shares(request)
    for name, kind in sorted(CANDIDATES.items(), key=lambda entry: entry[1].last):
        if kind.applies(request):
            makes = imported(kind.makes) if isinstance(kind.makes, str) else kind.makes
            yield from makes(replace(request, budget=limits[name]), tried)


def shares(request: PlanRequest) -> dict[str, Limits]:
    """Divide the budget of a request: kind of candidates, or `AS_COMPILED` -> its share, in
    proportion to the parts that it wants. A kind that alone wants some has all of it, and so has
    one that wants none, as it needs no search."""
    parts = {
        name: kind.budget_parts(request) if kind.applies(request) else 0
        for name, kind in CANDIDATES.items()
    }
    parts[AS_COMPILED] = int(searches_as_compiled(request))
    every = sum(parts.values())
    return {
        name: request.limits if taken in (0, every) else request.limits.divided(every, taken)
        for name, taken in parts.items()
    }


def as_it_is(request: PlanRequest, _tried: Tried) -> Iterator[Candidate]:
    """Yield the step as it was captured."""
    yield Candidate(AS_IT_IS, lambda: request, _search_of(request))


def in_micro_batches(request: PlanRequest, _tried: Tried) -> Iterator[Candidate]:
    """Yield the pipeline of micro-batches, of which the step is one."""
    yield Candidate("pipeline", lambda: request, plan_pipeline)


def _search_of(request: PlanRequest) -> Callable[[PlanRequest, TellProgress], Plan]:
    """What places the ops of a request, and chooses stages with their places if it asks for
    them."""
    if not request.stages:
        return search_to_fit
    from dovetail.pipeline.staging import with_stages

    return partial(search_to_fit, choose_stages=with_stages)


def is_here(request: PlanRequest) -> bool:
    """True if the request is for a text here or here/n, and not for a machine that was described
    otherwise."""
    return isinstance(request.machine, str) and names_here(request.machine or HERE)


def searches_as_compiled(request: PlanRequest) -> bool:
    """True if a placement is searched for with the costs of compiled segments too: by `auto` for
    several devices of this machine, where segments are compiled."""
    step = request.step
    return (
        request.is_by_auto
        and isinstance(step, Captured)
        and is_here(request)
        and len(request.asked_machine.devices) > 1
        and request.compile_seconds > 0
        and request.resolved_objective == "step"
        and not (request.stages or request.format)
    )


# --- Other forms of the same step ---


def forms_of(request: PlanRequest) -> dict[str, Form]:
    """The forms in which the step is tried beside its own, by name.

    Recurrent layers have the form of their fused kernels, networks with convolutions that of
    channels last in memory. What a step costs in another form is known where it is measured, and
    the other forms are of kernels of CPUs.
    """
    step, machine = request.step, request.asked_machine
    if (
        not isinstance(step, Captured)
        or step.plain is None
        or the(Form, step.transforms) is not None
    ):
        return {}
    if not CANDIDATES["other forms"].applies(request) or not machine.local or has_gpus(machine):
        return {}
    forms: dict[str, Form] = {}
    several = len(machine.devices) > 1
    most = step.fused_steps if several else min(1, step.fused_steps)
    for count in CHUNKS:
        if count <= most:
            of_each = "one fused kernel" if count == 1 else f"{count} fused kernels"
            forms[f"with {of_each} a recurrent layer"] = Form(recurrent_chunks=count)
    graph = step.graph
    has_images = any(
        kind == CONVOLUTION and any(len(graph.shapes[t]) == 4 for t in graph.inputs_of(op))
        for op, kind in enumerate(graph.kinds)
    )
    if has_images:
        forms["with channels last"] = Form(channels_last=True)
    return forms


def in_other_forms(request: PlanRequest, tried: Tried) -> Iterator[Candidate]:
    """Yield the other forms of a step, if no way to share its batch was better."""
    forms, plan = forms_of(request), tried.plan(AS_IT_IS) or tried.plan(str(WHOLE))
    if not forms or plan is None:
        return
    if tried.candidates[tried.best(request.resolved_gain)].parts > 1:
        return
    if request.replicas:
        request = replace(request, replicas="", schedule=AUTO, recompute=AUTO)
    # On one device the number of threads is chosen for each form. Several are measured once, and
    # what there is to say of that holds for all forms.
    several = len(plan.machine.devices) > 1
    machine = plan.machine if several else request.machine
    told = notes_of_machine(plan.notes) if several else ()
    share, step = request.limits.divided(len(forms)), request.planned_step

    def in_form(form: Transform) -> PlanRequest:
        return replace(request, step=form.apply(step), machine=machine, budget=share)

    def search(asked: PlanRequest, progress: TellProgress) -> Plan:
        return search_to_fit(asked, progress).noted(*told)

    for of_form, form in forms.items():
        yield Candidate(of_form, partial(in_form, form), search)


# --- Ways to share a batch ---


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


def sharings(step: Captured, batch: int, machine: Machine) -> Iterator[Sharing]:
    """The ways that are tried to share a step's batch on a machine, the whole batch first.

    There are up to as many towers as devices. With several micro-batches each tower has an equal
    number of like devices, two or more. A step that writes buffers has no several towers of several
    micro-batches: micro-batches write them one after another, and towers at once.
    """
    devices = len(gpus_or_cpus(machine))
    writes = bool(Replica(step.graph).buffer_updates.any())

    def splits(towers: int) -> bool:
        try:
            towers_devices(machine, towers)
        except UsageError:
            return False
        return True

    for towers in range(1, devices + 1):
        if batch % towers:
            continue
        yield Sharing(towers)
        each = devices // towers
        if each < 2 or not splits(towers) or (writes and towers > 1):
            continue
        for fill in FILLS:
            if batch % (towers * each * fill) == 0:
                yield Sharing(towers, each * fill)


def shared(request: PlanRequest, tried: Tried) -> Iterator[Candidate]:
    """Yield all ways to share the batch, which have half of the budget together; then the best of
    them again, with the other half. Ways that are tried besides, where memory is short, take half
    of that other half.

    All plans are of the same examples, so their seconds of a step compare. What differs from the
    whole batch: the loss is the mean of the parts' losses, batch norm takes the statistics of a
    part, and random draws are a part's own, as in every data-parallel training.
    """
    step = request.planned_step
    assert isinstance(step, Captured), "the request has checked that"
    machine, batch = request.asked_machine, batch_of(step)
    ways = list(sharings(step, batch, machine))
    most_towers = ways[-1].towers
    if len(ways) > 1:
        # A step that cannot be split is refused before anything is searched.
        _part_of(step, ways[1].parts)
    share, again = request.limits.divided(2 * len(ways)), request.limits.divided(2)
    waiting = [(sharing, share) for sharing in ways]
    named: dict[str, Sharing] = {}
    while waiting:
        sharing, share = waiting.pop(0)
        named[str(sharing)] = sharing
        yield _sharing_candidate(request, step, sharing, share)
        if sharing != Sharing(most_towers):
            continue
        # Where forward ops do not fit on the GPUs, if there are some, each part is made smaller.
        plan, fits = tried.plan(str(sharing)), False
        if plan is not None and plan.graph is not None:
            forward = plan.graph.phases == Phase.FORWARD
            fits = bool(np.isin(plan.placement[forward], gpus_or_cpus(plan.machine)).all())
        if not fits:
            counts = [count for count in ON_ONE_DEVICE if batch % (most_towers * count) == 0]
            if counts:
                share, again = request.limits.divided(4 * len(counts)), request.limits.divided(4)
            waiting += [(Sharing(most_towers, count), share) for count in counts]
    best = named[tried.best(request.resolved_gain)]
    yield _sharing_candidate(request, step, best, again)


def _part_of(step: Captured, parts: int) -> Captured:
    """The step of one of so many parts of the batch."""
    if parts == 1:
        return step
    return applied(step, (*(t for t in step.transforms if isinstance(t, Form)), Parts(parts)))


def _sharing_candidate(
    request: PlanRequest, step: Captured, sharing: Sharing, limits: Limits
) -> Candidate:
    """The candidate of one way to share the batch: its towers' graph is placed as any other, and
    with micro-batches each tower is a pipeline on its own devices."""

    def placed() -> PlanRequest:
        shared = replicated(_part_of(step, sharing.parts), sharing.towers)
        return replace(
            request, step=shared, replicas="", schedule=AUTO, recompute=AUTO, budget=limits
        )

    def piped() -> PlanRequest:
        return replace(
            request, step=_part_of(step, sharing.parts), replicas="", budget=limits,
            micro_batches=sharing.micro_batches, objective="pipeline", gap=0.0, min_gain=None,
        )  # fmt: skip

    if sharing.micro_batches == 1:
        return Candidate(str(sharing), placed, parts=sharing.parts)
    search = partial(plan_pipeline, replicas=sharing.towers)
    return Candidate(str(sharing), piped, search, sharing.parts)


# --- All cores as one device ---


def on_all_cores(request: PlanRequest, tried: Tried) -> Iterator[Candidate]:
    """Yield the rival of a plan on several devices of cores: the same step on all cores as one
    device."""
    machine = request.asked_machine
    if not is_here(request) or len(machine.devices) == 1 or has_gpus(machine):
        return
    best = tried.best(request.resolved_gain)
    if tried.candidates[best].parts > 1:
        return
    asked = tried.requests[best]
    names = "contiguous", "seed", "whole", "format", "stages", "model", "deadline"
    like = {name: getattr(asked, name) for name in names}
    asks = partial(PlanRequest, asked.step, HERE_CPU, placer="single", **like)
    yield Candidate(
        HERE, partial(asks, objective=asked.resolved_objective), _search_of(asked), rival=True
    )
