"""Plans a step: what can be planned is searched, and the best of it raced.

    request ─► candidates ─► search of each (predicted) ─► best ─► race (measured) ─► plan
       │           ▲                   │                                               │ ▲
       │           └───── tried ◄──────┘                                               ▼ │
       └────────────────────── found before, in the cache ◄────────────────────────────────┘

A budget of seconds is that of all of it. Its phases ask one `Deadline` how long they may take.

`find_plan` is the whole flow. The functions below it stand in the order in which it calls them.
"""

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.costs import Costs
from dovetail.errors import DovetailError, InfeasibleError
from dovetail.frontends import Captured
from dovetail.frontends.runners import runner_kind
from dovetail.graph.cells import cells_of
from dovetail.graph.kernels import compiled_ties
from dovetail.graph.synthetic import layered
from dovetail.machine import Machine, parse_machine
from dovetail.pipeline.candidates import (
    AS_COMPILED,
    WHOLE,
    Tried,
    candidates,
    is_here,
    searches_as_compiled,
    shares,
)
from dovetail.pipeline.kept import is_better, keep, kept_path, kept_plan
from dovetail.pipeline.opening import planned, timeline_of, with_promises
from dovetail.pipeline.requests import SHARES, PlanRequest, with_fields_of
from dovetail.pipeline.searching import has_gpus, lower_caps, prefixed, search_plan
from dovetail.pipeline.sources import SENTENCE, Notes, Step, TellProgress, prepare_runner, silent
from dovetail.placers import Limits
from dovetail.plans import Plan, capacities_of, planned_graph
from dovetail.runtime.compiling import working_clock
from dovetail.runtime.timers import Deadline, clock
from dovetail.transforms import duplicate
from dovetail.units import HERE, HERE_CPU, format_seconds

if TYPE_CHECKING:
    from dovetail.pipeline.segmenting import Segmented

LEAST_SECONDS = 0.2
"""A search has at least so long, also where measuring has taken the whole budget."""
FOUND_BEFORE = "found before, and kept in the cache; --again searches on from it"
FOUND_NO_BETTER = "searched again: nothing better than this was found"
NOT_REACHED = "not reached within"
SEGMENTS_SHARE = 2 / 3
"""The share of the time for compiling segments that the plan's have, where it has a rival."""
HOPELESS = 1.5
"""A plan for all cores as one device is not compiled and measured beside a plan on several devices
if it is predicted, op by op, to take this many times as long."""


@with_fields_of(PlanRequest)
def plan(
    step: Step, machine: str | Machine = "", *, progress: TellProgress = silent, **options: Any
) -> Plan:
    """Find how to run `step` fastest on `machine`.

    machine    a `Machine`, or its text: "here", "here/1", "here/2", "box.toml", "4 x k80 +
               haswell". By default an instance's own, and else "here", of whose cores an op uses as
               many as are measured to be best for this step
    options    fields of `PlanRequest`, whose docstring says what each means
    progress   is told what is being done

    A plan on the text here or here/n is measured beside the step as its user would run it, eager
    and by `torch.compile`: see `pipeline.ways`. Where that cannot be measured, a plan on here/n
    without pins and caps has `here`, all cores as one device, among its baselines. If one of these
    is faster than what `auto` found, it is the plan that is returned, and its machine is `here`. A
    machine with cores that was described otherwise keeps its rates.

    A plan that was found within a budget of seconds is kept in the cache, and is the result of the
    same request from then on. `again` searches on.

    From the start of the search on, a first Ctrl-C ends it with the best plan so far,
    `interrupted`. Raises `InvalidError`, or `InfeasibleError` if nothing fits.
    """
    return find_plan(PlanRequest(step, machine, **options), progress)


def find_plan(
    request: PlanRequest, progress: TellProgress = silent, *, began: float | None = None
) -> Plan:
    """Find the plan of a request. See `plan`.

    began   when the command began, by `runtime.timers.clock`; None: now
    """
    before_seconds = 0.0 if began is None else clock() - began
    began = clock() - before_seconds
    path, known, kind = kept_path(request), None, runner_kind()
    if path is not None:
        assert isinstance(request.step, Captured), "others are not kept"
        known = kept_plan(path, request.step)
        if known is not None and not request.again:
            return known.noted(FOUND_BEFORE)
        if known is not None:
            # The same seed would search the same again.
            request = replace(request, seed=known.seed + 1)
    # What the request has no use for leaves its share to the others.
    on_cores = is_here(request) and isinstance(request.step, Captured)
    is_raced = on_cores and request.resolved_objective == "step" and not request.format
    uses = {
        "measuring": on_cores, "searching": True, "compiling": is_raced and request.compile_seconds,
        "comparing": is_raced,
    }  # fmt: skip
    parts = {name: share for name, share in SHARES.items() if uses[name]}
    # By a clock that leaves out what numba compiles once for a machine.
    deadline = Deadline(
        request.whole_seconds, parts, began=working_clock() - before_seconds, clock=working_clock
    )
    deadline.spent["capturing"] = before_seconds

    def tell(doing: str, fraction: float, best: float | None) -> None:
        """Tell of the progress of all of it, where that has an end."""
        if np.isfinite(deadline.seconds) and fraction != SENTENCE:
            fraction = min(1.0, 1 - deadline.left_seconds / deadline.seconds)
        progress(doing, fraction, best)

    if on_cores:
        meanwhile = compile_search if len(request.asked_machine.devices) > 1 else lambda: None
        with deadline.phase("setting up"):
            # The notes of what is measured say what became of it.
            left = deadline.left_seconds
            prepare_runner(tell, Notes(), meanwhile=meanwhile, left_seconds=left)
    limits = request.limits
    seconds = max(deadline.left_seconds * parts["searching"] / sum(parts.values()), LEAST_SECONDS)
    limits = limits._replace(seconds=min(limits.seconds, seconds))
    request = replace(request, deadline=deadline, budget=limits)

    tried, plan = Tried(), None
    try:
        for candidate in candidates(request, tried):
            # In half of the time there must be something to compile and to compare. The rival is
            # most often on the way to what is fastest, so it may still come a little later.
            least = deadline.seconds / (3 if candidate.rival else 2)
            if on_cores and deadline.left_seconds < least and any(tried.plans.values()):
                on = "on all cores as one device" if candidate.rival else candidate.name
                deadline.missed.append(f"the step {on}")
                continue
            tried.add(candidate, tell)
            if tried.interrupted:
                break
        best = tried.best(request.resolved_gain)
        plan = tried.told(best)
        if not plan.interrupted:
            plan = _raced(request, tried, best, plan, tell)
    # Ctrl-C outside a search: what was found stays.
    except KeyboardInterrupt:
        if plan is None and not any(tried.plans.values()):
            if known is None:
                raise
            return replace(known, interrupted=True)
        plan = plan or tried.told(tried.best(request.resolved_gain))
        plan = replace(plan, interrupted=True)
    except DovetailError as error:
        if known is None:
            raise
        return known.noted(f"searched again, which failed: {error.line}")
    plan = with_times(plan, deadline, clock() - began)
    if known is not None and is_better(known, plan):
        # The next search goes on from the seed of this one.
        plan = replace(known, interrupted=plan.interrupted, seed=request.seed)
        plan = plan.noted(FOUND_NO_BETTER)
    # A plan that waited for the runner had less time than the next process will have.
    if path is not None and kind == runner_kind():
        assert isinstance(request.step, Captured), "others are not kept"
        keep(plan, path, may_race=is_raced and request.step.plain is not None)
    return plan


def compile_search() -> None:
    """Search on a small graph, by which the code of searches is compiled and kept on disk."""
    # What fails here fails where it is asked for as well, and says so there.
    with suppress(DovetailError):
        small = PlanRequest(layered(300, training=True), "2 x k80 + haswell", budget="40e")
        search_plan(small, silent)


def with_times(plan: Plan, deadline: Deadline, planning_seconds: float) -> Plan:
    """The plan with what planning took, and first of all what it did not reach in time."""
    plan = replace(plan, planning_seconds=planning_seconds)
    if not np.isfinite(deadline.seconds):
        return plan
    taken, whole = deadline.clock() - deadline.began, format_seconds(deadline.seconds)
    spent = {name: s for name, s in deadline.spent.items() if s >= 1e-3}
    told = ", ".join(f"{name} {format_seconds(s)}" for name, s in spent.items())
    if planning_seconds - taken > 1:
        told += f"; besides {format_seconds(planning_seconds - taken)} for what is set up once"
    plan = plan.noted(f"of a budget of {whole} planning took {format_seconds(taken)}: {told}")
    if not deadline.missed:
        return plan
    missed = ", ".join(dict.fromkeys(deadline.missed))
    first = f"{NOT_REACHED} {whole}: {missed}; --again goes on from here"
    return replace(plan, notes=(first, *plan.notes))


def _raced(
    request: PlanRequest, tried: Tried, best: str, plan: Plan, progress: TellProgress
) -> Plan:
    """The best candidate's plan, or what is faster: a rival, or the step as its user would run it.
    Where nothing can be measured, rivals are compared as predicted."""
    rival, asked = tried.plan(HERE), tried.requests[best]
    if HERE in tried.candidates:
        row = {HERE: None if rival is None else rival.value}
        plan = replace(plan, baselines={**plan.baselines, **row})
    # The seconds of stages are predicted less well than those of ops, so a plan with stages must be
    # measured to be faster than its rival.
    if asked.stages and rival is not None and asked.placer == "auto":
        from dovetail.pipeline.staging import quicker

        step = asked.planned_step
        assert isinstance(step, Captured), "the request has checked that"
        what = f"on {HERE}, all cores as one device"
        winner, told = quicker(rival, what, [plan], step, progress)
        if winner is not plan:
            plan = replace(rival, baselines={**rival.baselines, **plan.baselines})
        plan = plan.noted(told)
    # Towers of micro-batches are a pipeline, whose value is the seconds of a step as well.
    is_step = request.resolved_objective == "step"
    if is_here(request) and is_step and not request.format:
        plan = _measured(request, tried, best, plan, progress)
    if plan.measured or asked.stages or rival is None:
        return plan
    # By `auto`, a plan on several devices must be better by the least gain that the user asks of
    # such a plan.
    several = sum(map(bool, plan.orders or ())) > 1
    worth = rival.value * (1 - plan.min_gain) if several else rival.value
    if request.placer != "auto" or plan.value <= worth:
        return plan
    # The weaker bound holds on both machines.
    weaker = min((plan, rival), key=lambda candidate: candidate.lower_bound)
    return replace(
        rival,
        placer=HERE,
        baselines=plan.baselines,
        found_seconds=plan.found_seconds,
        lower_bound=weaker.lower_bound,
        bound_proof=weaker.bound_proof,
    )


def _measured(
    request: PlanRequest, tried: Tried, best: str, plan: Plan, progress: TellProgress
) -> Plan:
    """The fastest, as measured here side by side, of the plan, its rival, and the step as its user
    would run it. The plan itself if its step does not run."""
    from dovetail.pipeline.segmenting import LATE_SEGMENTS, Segmented, with_segments
    from dovetail.pipeline.ways import LEAST_COMPILE_SECONDS, OWN_SHARE, fastest_way

    # A step of parts of a batch is compared with that of the whole batch, as the user has it.
    shared = tried.candidates[best].parts > 1
    asked = replace(tried.requests[best], machine=request.machine)
    step = request.planned_step if shared else asked.planned_step
    whole = tried.plan(str(WHOLE)) if shared else plan
    if not isinstance(step, Captured) or whole is None:
        return plan
    deadline = request.deadline or Deadline()
    replaces = request.placer == "auto" and not (request.pins or request.caps)
    name, rival = (str(WHOLE), whole) if shared else (HERE, tried.plan(HERE))
    rivals: dict[str, Segmented] = {}
    is_hopeless = rival is not None and rival.value > HOPELESS * plan.value
    if replaces and not asked.stages and rival is not None and not is_hopeless:
        if not shared:
            rival = replace(
                rival,
                placer=HERE,
                min_gain=plan.min_gain,
                baselines=plan.baselines,
                found_seconds=plan.found_seconds,
            )
        rivals[name] = Segmented(rival, rival)

    def in_segments(limit_seconds: float) -> tuple[Segmented, dict[str, Segmented]]:
        """The plan and its rivals, with segments that are compiled within so many seconds."""
        pair, pairs, began = Segmented(plan, plan), dict(rivals), clock()
        share = limit_seconds * (SEGMENTS_SHARE if rivals else 1.0)
        if plan.objective == "step":
            has_time = limit_seconds >= LEAST_COMPILE_SECONDS
            if has_time:
                limits = shares(request)[AS_COMPILED]
                pair = with_compiled(plan, asked, share, progress, limits=limits)
            if not has_time or any(LATE_SEGMENTS in note for note in pair.by_ops.notes):
                deadline.missed.append("some compiled segments")
        left_seconds = limit_seconds - min(clock() - began, share)
        for other, (rival, _) in rivals.items():
            if rival.value > HOPELESS * pair.compiled.value:
                del pairs[other]
            elif left_seconds >= LEAST_COMPILE_SECONDS:
                tell = prefixed(f"{other}: ", progress)
                pairs[other] = with_segments(
                    rival, step, compile_seconds=left_seconds, progress=tell
                )
        return pair, pairs

    if deadline.is_over and replaces:
        deadline.missed.append("the comparison with the module as it is")
    # The user's own ways have all cores, or the first GPU.
    if has_gpus(plan.machine):
        gpu = next(device for device in plan.machine.devices if device.kind == "gpu")
        machine = Machine(plan.machine.name, (gpu,), gpu.name)
    else:
        on_one = len(plan.machine.devices) == 1
        machine = plan.machine if on_one else parse_machine(HERE_CPU)
    with deadline.phase("compiling") as part:
        limit_seconds = part.within(request.compile_seconds)
    return fastest_way(
        Segmented(plan, plan),
        step,
        machine,
        rivals=rivals,
        in_segments=in_segments if request.compile_seconds else None,
        whole=whole,
        replaces=replaces,
        compile_seconds=limit_seconds,
        # Most often it is what was missed before.
        own_share=1.0 if request.again else OWN_SHARE,
        progress=progress,
        deadline=deadline,
    )


def with_compiled(
    chosen: Plan,
    request: PlanRequest,
    limit_seconds: float,
    progress: TellProgress,
    *,
    limits: Limits,
) -> "Segmented":
    """The better of two placements, op by op and with compiled segments: that of `chosen`, and one
    that is searched for with the costs that ops have in its compiled segments. These differ from
    kind to kind: pointwise ops gain most.

    request         its step was captured, and `chosen` is a plan of it
    limit_seconds   limit of compiling
    limits          of the search
    """
    from dovetail.pipeline.segmenting import Segmented, compiled_seconds, with_segments

    began, step = clock(), request.planned_step
    assert isinstance(step, Captured), "only such steps have segments"
    plans = with_segments(chosen, step, compile_seconds=limit_seconds, progress=progress)
    plan, segmented = plans
    left_seconds = limit_seconds - (clock() - began)
    if segmented is plan or left_seconds <= 0 or not searches_as_compiled(request):
        return plans
    graph, with_its_copies = step.graph, planned(plan, step).graph
    seconds = plan.compute_seconds
    if plan.copies:
        seconds = seconds[duplicate(graph, plan.copies).copy_of < 0]
    compiled = compiled_seconds(segmented, with_its_copies, graph, seconds)
    try:
        found = search_plan(
            replace(request, machine=plan.machine, budget=limits),
            prefixed("with the costs of compiled segments: ", progress),
            Costs(compiled, plan.costs_source, None),
            ties=compiled_ties(graph, cells_of(graph)),
        )
    except InfeasibleError:
        return plans
    if found.interrupted:
        raise KeyboardInterrupt
    # What was found by other costs promises what it takes by those of `chosen`.
    if found.copies:
        seconds = seconds[duplicate(graph, found.copies).origins]
    other = replace(
        found,
        compute_seconds=seconds,
        baselines=chosen.baselines,
        found_seconds=chosen.found_seconds,
        planning_seconds=chosen.planning_seconds + found.planning_seconds,
        notes=chosen.notes,
    )
    timeline = timeline_of(other, graph)
    other = with_promises(other, planned_graph(other, graph), timeline, timeline.step_seconds)
    capacities = capacities_of(other.machine, dict(other.caps))
    if (np.array(other.peak_memory_bytes) > capacities).any() or lower_caps(other, request):
        return plans
    rivals = with_segments(other, step, compile_seconds=left_seconds, progress=progress)
    again, before = (format_seconds(value) for value in (rivals.compiled.value, segmented.value))
    told = f"placed again with the costs of compiled segments: {again} predicted, {before} before"
    best = rivals if rivals.compiled.value < segmented.value else plans
    by_ops = best.by_ops.noted(told)
    has_segments = best.by_ops is not best.compiled
    return Segmented(by_ops, best.compiled.noted(told) if has_segments else by_ops)
