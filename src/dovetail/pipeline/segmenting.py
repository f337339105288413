"""Cuts what each device does into segments, and compiles those that are faster so.

    order of a device   Await  a b c  Send  d e  update u  f  update v  g       Await  h i
    segments                  └─────┘      └─── d e f g ───────────────┘ └u v┘       └───┘

A segment is a run of ops between which the device neither waits nor sends, so that the plan's
devices wait for each other exactly as before. Long runs are cut further where a cell or a branch of
the network ends (`graph.cells`): networks repeat these, and equal segments share their code. A
segment becomes a compiled stage if its code is measured to be faster than its calls.

Updates that have a fused kernel wait for each other, so that one call does several: until the
device waits for another one, something needs an update, or their gradients are `MOST_BYTES`. Such a
call is a stage as well if it is measured to be faster than the updates by themselves.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import OutOfMemoryError
from dovetail.executors.compiling import Compiled, CompileTarget, compile_all
from dovetail.frontends import Captured
from dovetail.frontends.fused import FusedCall, has_fused_update, may_be_fused
from dovetail.frontends.program import Program
from dovetail.graph import EVERYWHERE, Graph, Phase
from dovetail.graph.cells import cells_of
from dovetail.pipeline.opening import planned, with_schedules
from dovetail.pipeline.sources import TellProgress
from dovetail.plans import Plan, Schedule, Stage, normalise, stages_of
from dovetail.runtime.native import has_compiler
from dovetail.runtime.timers import clock

MOST_OPS = 150
"""A segment has at most so many ops: the time to compile one grows faster than its size."""
LATE_SEGMENTS = "were not reached in the time for compiling"
"""What a plan's note says of them."""
MOST_BYTES = 2**20
"""Updates wait until their gradients have so many bytes, which a core's own cache still holds."""


class Segmented(NamedTuple):
    """A plan op by op, and the same with those segments compiled that are faster so. Both are one
    object if there are none, or if the plan with them does not fit into memory."""

    by_ops: Plan
    compiled: Plan


def with_segments(
    plan: Plan, step: Captured, *, compile_seconds: float, progress: TellProgress
) -> Segmented:
    """The plan with a note on its segments, and with segments; `plan` itself for both if it has
    stages already.

    compile_seconds   limit of compiling. What is compiled by then is used, and kept for next time
    """
    devices = plan.machine.devices
    # GPUs need no compiler of C++.
    compiles = has_compiler() or any(d.torch_device for d in devices)
    if plan.schedules or not compiles:
        return Segmented(plan, plan)
    captured = planned(plan, step)
    segments = [list(_segments(plan, captured, device)) for device in range(len(devices))]
    targets = [CompileTarget.of(device) for device in devices]
    codes: dict[CompileTarget, dict[str, Compiled]] = {}
    ends = clock() + compile_seconds
    for target in dict.fromkeys(targets):
        alike = [d for d, other in enumerate(targets) if other == target]
        weights: Counter[FusedCall] = Counter()
        of_key: dict[str, FusedCall] = {}
        for number in alike:
            for segment in segments[number]:
                if segment.fused is not None:
                    fused = of_key.setdefault(segment.fused.key, segment.fused)
                    weights[fused] += plan.compute_seconds[list(segment.ops), number].sum()
        # Code for several threads is timed on all cores of a device, so one compiler is at work,
        # and so it is on a GPU.
        places = [devices[alike[0]].cores]
        if target.threads == 1 and not target.gpu:
            places = [(core,) for number in alike for core in devices[number].cores]
        codes[target] = compile_all(
            [fused for fused, _ in weights.most_common()],
            target,
            places,
            limit_seconds=max(0.0, ends - clock()),
            progress=lambda done, count: progress(
                f"compiling segments: {done} of {count}", done / count, None
            ),
        )
    # The stages of a device are its compiled segments, and all other ops by themselves.
    schedules = []
    for number, target in enumerate(targets):
        stages: list[Stage] = []
        for segment in segments[number]:
            seconds = plan.compute_seconds[list(segment.ops), number]
            compiled = codes[target].get(segment.fused.key) if segment.fused is not None else None
            if compiled is not None and compiled.is_faster:
                of_all = float(seconds.sum() * compiled.share)
                stages.append(Stage(segment.ops, of_all, compiled=True))
            else:
                of_each = zip(segment.ops, seconds, strict=True)
                stages += [Stage((op,), float(cost)) for op, cost in of_each]
        schedules.append(Schedule(tuple(stages)))
    asked = {s.fused.key for of_device in segments for s in of_device if s.fused is not None}
    by_key = {key: code for of_target in codes.values() for key, code in of_target.items()}
    failed = [code.reason for code in by_key.values() if code.reason]
    faster = sum(code.is_faster for code in by_key.values())
    told = f"of {len(asked)} distinct segments and updates {faster} are faster compiled or fused"
    if missing := len(asked - by_key.keys()):
        told += f", and {missing} {LATE_SEGMENTS}"
    if failed:
        told += f", and {len(failed)} cannot be compiled ({failed[0]})"
    plan = plan.noted(told)
    compiled_ops = [s.ops for schedule in schedules for s in schedule.stages if s.compiled]
    if not compiled_ops:
        return Segmented(plan, plan)
    try:
        segmented = with_schedules(plan, captured.graph, schedules)
    except OutOfMemoryError as error:
        plan = plan.noted(f"no segment runs compiled: what segments hold does not fit ({error})")
        return Segmented(plan, plan)
    of_updates = [ops for ops in compiled_ops if captured.graph.phases[ops[0]] == Phase.UPDATE]
    count, updates = len(compiled_ops) - len(of_updates), sum(map(len, of_updates))
    told = f"{count} segments run compiled"
    told += f", and {updates} updates fused" * bool(updates)
    return Segmented(plan, segmented.noted(told))


def compiled_seconds(
    plan: Plan, planned_graph: Graph, graph: Graph, seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[ops, devices] what the ops of `graph` take as part of compiled segments.

    plan            has compiled segments. They say for each kind of op what share of its seconds it
                    takes: the mean over its ops, of which some may not be compiled
    planned_graph   the plan's graph: `graph` with the plan's copies
    seconds         [ops, devices] of the ops one by one

    What a kind of op takes on one device it takes on all of the same model and number of threads.
    """
    alone: Counter[tuple[str, int, str]] = Counter()
    within: Counter[tuple[str, int, str]] = Counter()
    for number, device in enumerate(plan.machine.devices):
        schedule = (plan.schedules or ())[number]
        for stage in () if schedule is None else schedule.stages:
            of_ops = plan.compute_seconds[list(stage.ops), number]
            share = stage.seconds / max(float(of_ops.sum()), 1e-12) if stage.compiled else 1.0
            for op, cost in zip(stage.ops, of_ops.tolist(), strict=True):
                kind = device.model, device.op_threads, planned_graph.signatures[op]
                alone[kind] += cost
                within[kind] += cost * share
    found = seconds.copy()
    for number, device in enumerate(plan.machine.devices):
        for op, name in enumerate(graph.signatures):
            kind = device.model, device.op_threads, name
            if alone[kind] > 0:
                found[op, number] *= within[kind] / alone[kind]
    return found


@dataclass(frozen=True, eq=False)
class _Segment:
    """Ops of a device that may run as one piece of code, and that piece; None: they may not."""

    ops: tuple[int, ...]
    fused: FusedCall | None


def _segments(plan: Plan, captured: Captured, device: int) -> Iterator[_Segment]:
    """Yield the segments of a device, in running order."""
    graph, program = captured.graph, captured.program
    placement = normalise(plan.placement, graph, plan.machine)
    piece_of = cells_of(graph) * (int(graph.phases.max()) + 1) + graph.phases
    order = [op for stage in stages_of(plan, graph)[device] for op in stage]
    waits, lazy = _waits(graph, placement, order, device), _lazy_storages(graph, program)
    # The ops of the device for which another device waits.
    edges = np.stack([graph.producers[graph.input_tensors], graph.readers], axis=1)
    edges = np.concatenate([edges, graph.control])
    away = (placement[edges[:, 0]] == device) & (placement[edges[:, 1]] != device)
    sends = set(edges[away, 0].tolist())
    followers: dict[int, list[int]] = {}
    for before, op in graph.control.tolist():
        followers.setdefault(before, []).append(op)
    # The ops of a segment that is not closed yet; and updates that wait for each other, the bytes
    # of their gradients, and the ops that must come after them.
    run: list[int] = []
    updates: list[int] = []
    update_bytes, needed_by = 0, set[int]()

    def close_run() -> Iterator[_Segment]:
        # Some ops of the run make views of what it reads, and others read these views as well. A
        # piece of code returns new tensors alone, so they come before it. They need no other op of
        # the run.
        inside, returned = set(run), set(graph.outputs.tolist())
        read = {tensor for op in run for tensor in graph.inputs_of(op).tolist()}
        outer = {int(graph.storages[t]) for t in read if int(graph.producers[t]) not in inside}
        views: list[int] = []
        for op in reversed(run):
            outputs = [t for t in graph.outputs_of(op) if int(graph.storages[t]) in outer]
            readers = {reader for t in outputs for reader in graph.consumers_of(t).tolist()}
            if returned.intersection(outputs) or readers - inside:
                views.append(op)
                inside.discard(op)
        for op in reversed(views):
            yield _Segment((op,), None)
        rest = tuple(op for op in run if op in inside)
        if rest:
            yield _Segment(rest, FusedCall.of(graph, program, rest)[0] if len(rest) > 1 else None)
        run.clear()

    def close_updates() -> Iterator[_Segment]:
        nonlocal update_bytes
        if updates:
            # The run may make their gradients.
            yield from close_run()
            yield _Segment(tuple(updates), FusedCall.of(graph, program, tuple(updates))[0])
            updates.clear()
            needed_by.clear()
            update_bytes = 0

    for op in order:
        if op in waits or op in needed_by:
            yield from close_updates()
        if has_fused_update(graph, program, op):
            if op in waits:
                yield from close_run()
            updates.append(op)
            written = graph.outputs_of(op)
            # A gradient has the size of its parameter, which is the first tensor that is written.
            update_bytes += int(graph.tensor_bytes[written[0]])
            needed_by.update(followers.get(op, ()))
            needed_by.update(r for t in written for r in graph.consumers_of(t).tolist())
            if op in sends or update_bytes >= MOST_BYTES:
                yield from close_updates()
            continue
        touched = [*graph.inputs_of(op).tolist(), *graph.outputs_of(op)]
        fits = may_be_fused(graph, program, op) and lazy.isdisjoint(graph.storages[touched])
        if run and (op in waits or not fits or piece_of[op] != piece_of[run[-1]]):
            yield from close_run()
        if not fits:
            yield _Segment((op,), None)
            continue
        run.append(op)
        if op in sends or len(run) == MOST_OPS:
            yield from close_run()
    yield from close_updates()
    yield from close_run()


def _lazy_storages(graph: Graph, program: Program) -> set[int]:
    """The storages that some tensor views negated or conjugated. Of such a view torch's own ops
    compute what is meant, but compiled code reads what is in memory."""
    return {
        int(graph.storages[tensor])
        for op, call in enumerate(program.calls)
        if call is not None and str(call.target) in ("aten._neg_view.default", "aten._conj.default")
        for tensor in graph.outputs_of(op)
    }


def _waits(
    graph: Graph, placement: NDArray[np.int32], order: Sequence[int], device: int
) -> set[int]:
    """The ops of the order before which the device waits for another device."""
    waits, arrived = set[int](), set[int]()
    controls: dict[int, list[int]] = {}
    for before, op in graph.control.tolist():
        if not graph.is_source[before] and placement[before] != device:
            controls.setdefault(op, []).append(before)
    for op in order:
        needed = {
            tensor
            for tensor in graph.inputs_of(op).tolist()
            if graph.residences[graph.producers[tensor]] != EVERYWHERE
            and placement[graph.producers[tensor]] != device
        }
        # Ops stand as ~op beside tensors, so that the two never collide.
        needed |= {~before for before in controls.get(op, ())}
        if not needed <= arrived:
            waits.add(op)
            arrived |= needed
    return waits
