"""Compares a plan with what its user would run without one, and keeps the fastest.

    the plan, op by op and with compiled segments  ─┐
    a rival: all cores as one, or the whole batch   ├─ some steps each, in turn ─► medians ─► plan
    eager            all cores, best threads        │
    torch.compile    all cores, best threads       ─┘

All are measured in the same rounds and on the same cores, as calls of a program that works between
its steps (`executors.loaded.seconds_of_call`): the plan's by this process, as a user calls them,
and each of the user's own ways within a process of its own, so that it can be killed while it
compiles. On a machine with GPUs these run on the first of them, `torch.compile` in its mode
reduce-overhead too. "Best threads" is the number of threads with which an eager step is fastest.
The plan stays if its median ratio to the fastest of the others is below 1, and by the least gain
where it uses several devices. Where nothing can be compared, what runs is the module as it is.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError, RunError, WorkerError
from dovetail.executors import MODES, PlainNetwork, Workers, run
from dovetail.frontends import Captured
from dovetail.machine import Machine
from dovetail.machine.local import available_bytes
from dovetail.pipeline.opening import planned, timeline_of
from dovetail.pipeline.segmenting import Segmented
from dovetail.pipeline.sources import (
    LONG_SECONDS,
    TellProgress,
    candidates_of,
    counted_threads,
    in_order,
    time_threads,
    with_threads,
)
from dovetail.plans import COMPILED, EAGER, PLACED, REDUCED, Plan
from dovetail.runtime.native import has_compiler
from dovetail.runtime.timers import (
    Deadline,
    Repeats,
    Timer,
    clock,
    in_turns,
    ratios_of,
    times_within,
)
from dovetail.transforms import SharedCopies, duplicate, without
from dovetail.units import HERE, format_bytes, format_seconds

_log = logging.getLogger(__name__)
ROUNDS, LEAST_ROUNDS, MEASURING_SECONDS = 32, 3, 20.0
"""There are `ROUNDS` rounds of measuring, but fewer, at least `LEAST_ROUNDS`, where they take
longer than `MEASURING_SECONDS`. A step of seconds takes longer than that even so."""
ROUND_SECONDS, MOST_STEPS = 0.03, 8
"""In a round a way runs steps for about `ROUND_SECONDS`, from 2 to `MOST_STEPS`, of which the later
half counts. Processes take turns, and the second step of one that has slept still took 5 to 12 %
longer than its later ones, of 2 to 4 ms."""
LEAST_COMPILE_SECONDS, _LEAST_SECONDS = 1.0, 0.5
"""In less time than `LEAST_COMPILE_SECONDS` nothing is compiled, so that nothing is started for it.
A race that begins late has `_LEAST_SECONDS` more: one round tells less than two."""
OWN_SHARE = 2 / 3
"""The share of the time for compiling that `torch.compile` may take before segments do: nobody may
be slower with us than with it, but of small ops it may compile for minutes."""
_LOOK_SECONDS = 0.25
"""While something compiles, it is asked this often whether it is done."""


@dataclass(frozen=True)
class _Way:
    """One way to run the step, on so many threads. Plans have 0.

    threads     0 on a GPU too
    way         `PLACED` is the plan; a rival has its own name, such as `HERE`
    segmented   of plans: with compiled segments
    """

    way: str
    threads: int = 0
    segmented: bool = False

    def __str__(self) -> str:
        if self.way not in MODES:
            names = {PLACED: "this plan", HERE: "a plan for all cores as one device"}
            name = names.get(self.way, f"a plan for the {self.way}")
            return name + " with compiled segments" * self.segmented
        if not self.threads:
            return f"{self.way} (on a GPU)"
        return f"{self.way} ({counted_threads(self.threads)})"


def fastest_way(
    plans: Segmented,
    step: Captured,
    machine: Machine,
    *,
    rivals: Mapping[str, Segmented] | None = None,
    in_segments: Callable[[float], tuple[Segmented, Mapping[str, Segmented]]] | None = None,
    whole: Plan | None = None,
    replaces: bool,
    compile_seconds: float,
    own_share: float = OWN_SHARE,
    progress: TellProgress,
    deadline: Deadline | None = None,
) -> Plan:
    """The faster plan, with the user's own ways among its baselines; or, unless the plan is faster
    than all of them or `replaces` is False, a plan to run the fastest of these.

    machine          one device, whose cores the user's own ways have, or a GPU
    plans            the plan op by op, and with compiled segments
    rivals           the same of other plans, by name: for `machine`, where `plans` use several
                     devices, or of the whole batch, where these share it. One is returned if it is
                     faster and `replaces`
    in_segments      returns plans and rivals with segments compiled within so many seconds, from
                     what `torch.compile`, which comes first, has left of the limit
    whole            a plan of `step`, where `plans` are of parts of its batch; None: they are of it
    compile_seconds  limit of all compilations together; 0: nothing is compiled
    own_share        of it for `torch.compile`, where there is something else to compile
    deadline         of the comparison

    The plan's notes say what was measured, what was not, and why not. Where the comparison fails or
    is cut off, the plan is to run the module as it is, eager, if it `replaces`: no plan is trusted
    that was not compared. A step that has no such way keeps its plan op by op. Ctrl-C ends the
    comparison so, `interrupted`.
    """
    plan, _ = plans
    whole = whole or plan
    if step.plain is None:
        why = "the step has several towers, scales its gradients or writes over its inputs"
        return plan.noted(f"eager was not measured: {why}")
    cores = len(machine.devices[0].cores)

    def uncompared(why: str) -> Plan:
        if not replaces:
            return plan.noted(f"eager was not measured: {why}")
        note = f"this plan was not measured beside the module as it is, so that runs: {why}"
        return _plan_of(_Way(EAGER), whole.noted(note), step, with_threads(machine, cores))

    # At the same time there are the plan, with and without segments, the eager step, and the step
    # compiled for up to two numbers of threads, or in two modes.
    placed = _placed_ways(plans, rivals or {})
    has_segments = in_segments is not None and has_compiler()
    held = 1 + len(placed) * (2 if has_segments else 1) + (2 if compile_seconds else 0)
    needed = sum(plan.peak_memory_bytes) * held
    (own_device,) = machine.devices
    free = own_device.memory_bytes if own_device.torch_device else available_bytes()
    deadline = deadline or Deadline()
    if needed > free or deadline.is_over:
        short = f"beside this plan it needs about {format_bytes(needed)}, and {format_bytes(free)}"
        return uncompared(f"{short} are free" if needed > free else "the budget was spent before")
    try:
        with ExitStack() as stack:
            stack.enter_context(deadline.phase("comparing"))
            progress("measuring eager", 0.0, None)
            try:
                eager = PlainNetwork(step, with_threads(machine, cores), apart=True)
                stack.enter_context(eager)

                def seconds_with(threads: int) -> float:
                    eager.set_threads(threads)
                    return float(median(eager.step_seconds(4)))

                # A step that takes long has all cores, and a GPU has 0. The race itself needs some
                # seconds, so hopeless numbers of threads drop out early.
                one_count = eager.begin() > LONG_SECONDS or cores < 2
                tried = (
                    {cores: 0.0}
                    if one_count
                    else time_threads(
                        {count: partial(seconds_with, count) for count in candidates_of(cores)},
                        lambda _done: None,
                        limit_seconds=deadline.within(inf, 0.1),
                    )
                )
                threads = min(tried, key=lambda count: (tried[count], count))
            # What cannot run as it is, or cannot be sent to a process, is no refuge.
            except (DovetailError, OSError) as error:
                return plan.noted(f"eager was not measured: {_cause_of(error)}")
            # Compiled code hands parts to other threads less often than ops do, so that all cores
            # suit it best, and come first: there may be no time for another number.
            counts = dict.fromkeys((cores, threads))
            networks = {_Way(EAGER, count): eager for count in counts}
            with deadline.phase("compiling"):
                began, share = clock(), 1.0 if in_segments is None else own_share
                limit_seconds = share * compile_seconds
                notes = _compile(stack, networks, step, machine, limit_seconds, progress, deadline)
                if in_segments is not None:
                    plans, others = in_segments(compile_seconds - (clock() - began))
                    placed, (plan, _) = _placed_ways(plans, others), plans
            seconds = _in_turns(stack, networks, placed, step, progress, deadline)
    except KeyboardInterrupt:
        return replace(uncompared("interrupted"), interrupted=True)
    # The user is told what failed, and told again when the plan runs.
    except (DovetailError, OSError) as error:
        _log.error("%s cannot be measured: %s", step.source.model or "the step", error)
        return uncompared(_cause_of(error))

    # The plan, a rival, or a plan that runs the fastest of the user's own ways.
    medians = {way: median(of_way) for way, of_way in seconds.items()}

    def fastest(*names: str) -> _Way:
        return min((w for w in medians if w.way in names), key=lambda w: medians[w])

    own, best = fastest(*MODES), fastest(PLACED)
    plan, stands_for = placed[best], PLACED
    # A plan on several devices must win by the least gain that the user asks of such a plan.
    several = sum(map(bool, plan.orders or ())) > 1
    worth = 1 - plan.min_gain if several else 1.0
    best_of: dict[str, float] = {}
    for way, value in medians.items():
        best_of[way.way] = min(value, best_of.get(way.way, value))
    told = ", ".join(f"{way} {format_seconds(value)}" for way, value in medians.items())
    names = dict.fromkeys(way.way for way in placed if way.way != PLACED)
    for name in names if replaces else ():
        rival = fastest(name)
        if median(ratios_of(seconds[best], seconds[rival])) >= worth:
            best, plan, worth, stands_for = rival, placed[rival], 1.0, name
    if stands_for != PLACED:
        # It takes the plan's place, and what is said of the plan is said of it.
        best_of[PLACED] = best_of.pop(stands_for)
    loses = median(ratios_of(seconds[best], seconds[own])) >= worth
    gain = gain_of(seconds, best, own, _Way(EAGER, cores), loses=loses, replaces=replaces)
    baselines = {name: value for name, value in best_of.items() if name != PLACED}
    rows = {**placed[_Way(PLACED)].baselines, **plan.baselines, **baselines}
    plan = replace(plan, baselines=rows, measured=best_of)
    said = (f"measured side by side: {told}", *notes, gain)
    if not replaces or not loses:
        return plan.noted(*said)
    of_step = whole if plan.graph_fingerprint != whole.graph_fingerprint else plan
    noted = replace(
        of_step,
        baselines=rows,
        measured=best_of,
        notes=(*placed[_Way(stands_for)].notes, *said),
    )
    return _plan_of(own, noted, step, with_threads(machine, own.threads))


def gain_of(
    seconds: Mapping[_Way, tuple[float, ...]],
    plan: _Way,
    own: _Way,
    now: _Way,
    *,
    loses: bool,
    replaces: bool,
) -> str:
    """One sentence: whether the plan pays, how much faster it is, and the spread over the rounds.

    own        the fastest of the user's own ways, which the plan is compared with
    now        the way that the user has without doing anything
    loses      the plan does not win, so that `own` runs in its place if it `replaces`
    """
    way, other, said = (plan, own, "it does not pay" if loses else "it pays")
    if loses and replaces:
        if own == now:
            return "it does not pay: nothing is faster than the module as it is, on all threads"
        way, other, said = own, now, "no placement pays, but another way does"
    ratios = ratios_of(seconds[other], seconds[way])
    low, high = np.percentile(ratios, [25, 75])
    return (
        f"{said}: {way} is {median(ratios):.2f} x as fast as {other} "
        f"({low:.2f} to {high:.2f} in the middle half of {len(ratios)} rounds)"
    )


def _placed_ways(plans: Segmented, rivals: Mapping[str, Segmented]) -> dict[_Way, Plan]:
    """Each plan once: op by op, and with compiled segments if there are any."""
    placed: dict[_Way, Plan] = {}
    for name, pair in {PLACED: plans, **rivals}.items():
        for segmented, candidate in enumerate(pair):
            if all(candidate is not other for other in placed.values()):
                placed[_Way(name, segmented=bool(segmented))] = candidate
    return placed


def _compile(
    stack: ExitStack,
    networks: dict[_Way, PlainNetwork],
    step: Captured,
    machine: Machine,
    compile_seconds: float,
    progress: TellProgress,
    deadline: Deadline,
) -> list[str]:
    """Add the step compiled as its user would; return what could not be, each in a sentence.

    stack      ends what is started here
    networks   the module as it is, at work, by its numbers of threads
    """
    # On a GPU the mode that is most often the faster one comes first, within one limit.
    on_gpu = bool(machine.devices[0].torch_device)
    modes = (REDUCED, COMPILED) if on_gpu else (COMPILED,)
    wanted = [_Way(mode, way.threads) for mode in modes for way in networks]
    notes: list[str] = []
    if not compile_seconds:
        wanted, notes = [], [f"{COMPILED} was not measured, as asked"]
    elif compile_seconds < LEAST_COMPILE_SECONDS:
        wanted, notes = [], [f"{COMPILED} was not measured: there was no time left to compile"]
        deadline.missed.append(COMPILED)
    elif not has_compiler() and not machine.devices[0].torch_device:
        note = f"{COMPILED} was not measured: there is no C++ compiler (g++ or clang++)"
        wanted, notes = [], [note]
    # One is compiled after the other, since a compilation uses all cores for a part of its time.
    began = clock()
    for number, way in enumerate(wanted):
        own = with_threads(machine, way.threads)
        network = PlainNetwork(step, own, mode=MODES[way.way], apart=True)
        stack.callback(network.close)
        try:
            network.send_first()
            has_begun = False
            while not has_begun and clock() - began < compile_seconds:
                spent = (clock() - began) / compile_seconds
                progress(f"compiling {way}", spent, None)
                has_begun = network.has_begun(_LOOK_SECONDS)
        except RunError as error:
            notes.append(f"{way} failed: {_cause_of(error)}")
            continue
        if not has_begun:
            network.close()
            late = " and ".join(map(str, wanted[number:]))
            notes.append(
                f"not compiled within {format_seconds(compile_seconds)}, so not measured: "
                f"{late}; torch keeps what it has compiled so far"
            )
            deadline.missed.append(late)
            break
        networks[way] = network
    return notes


def _in_turns(
    stack: ExitStack,
    networks: Mapping[_Way, PlainNetwork],
    placed_ways: Mapping[_Way, Plan],
    step: Captured,
    progress: TellProgress,
    deadline: Deadline,
) -> dict[_Way, tuple[float, ...]]:
    """Way -> [rounds] seconds of a step. `stack` ends what is started here."""
    timers: dict[str, Timer] = {
        str(way): timer_of(network.step_seconds, partial(network.set_threads, way.threads))
        for way, network in networks.items()
    }
    workers: dict[str, Workers] = {}
    for way, plan in placed_ways.items():
        if way.way not in workers:
            workers[way.way] = stack.enter_context(Workers(plan.machine))
        placed = stack.enter_context(run(plan, planned(plan, step), workers=workers[way.way]))
        placed.feed()
        timers[str(way)] = timer_of(placed.step_seconds)
    progress("measuring ways to run the step", 0.0, None)
    limit_seconds = deadline.within(MEASURING_SECONDS)
    latest_seconds = max(deadline.left_seconds, _LEAST_SECONDS)
    seconds = in_turns(
        timers,
        Repeats(ROUNDS, LEAST_ROUNDS, limit_seconds, latest_seconds),
        lambda done: progress("measuring ways to run the step", done, None),
        calls=1,
    )
    return {way: seconds[str(way)] for way in (*networks, *placed_ways)}


def _plan_of(own: _Way, plan: Plan, step: Captured, machine: Machine) -> Plan:
    """The plan to run the step by one of its user's own ways instead of by `plan`.

    Its ops stand in the order of the step. Their costs are those of `plan` on the fastest device of
    each, scaled so that they add up to what the step was measured to take, if it was.
    """
    originals = duplicate(step.graph, plan.copies).copy_of < 0
    fastest = plan.compute_seconds[originals].min(axis=1, keepdims=True)
    single = in_order(step.graph, machine)
    predicted = float(fastest[~step.graph.is_source].sum())
    seconds = plan.measured.get(own.way, predicted)
    replaced = replace(
        plan,
        way=own.way,
        placer=own.way,
        machine=machine,
        value=seconds,
        lower_bound=0.0,
        bound_proof="",
        graph=step.graph,
        graph_fingerprint=step.graph.fingerprint,
        placement=single.placement,
        orders=single.orders,
        schedules=None,
        transforms=without(SharedCopies, plan.transforms),
        compute_seconds=fastest * (seconds / predicted),
        sent_bytes=None,
        peak_memory_bytes=(0,),
    )
    peaks = timeline_of(replaced, step.graph).peak_memory_bytes
    return replace(replaced, peak_memory_bytes=tuple(peaks.tolist()))


def timer_of(
    step_seconds: Callable[[int], NDArray[np.float64]], begin: Callable[[], None] = lambda: None
) -> Timer:
    """A function that runs a round of steps, after `begin`, and returns the median seconds of a
    step."""
    steps = 2

    def seconds_of_round() -> float:
        nonlocal steps
        begin()
        counted = step_seconds(steps)
        seconds = float(median(counted[len(counted) // 2 :]))
        steps = min(MOST_STEPS, 1 + times_within(ROUND_SECONDS, seconds))
        return seconds

    return seconds_of_round


def _cause_of(error: Exception) -> str:
    """What was raised, in one line."""
    if isinstance(error, WorkerError):
        return error.said
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
