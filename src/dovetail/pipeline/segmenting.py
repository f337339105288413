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
from dataclasses import dataclass, replace

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
MOST_BYTES = 2**20
"""Updates wait until their gradients have so many bytes, which a core's own cache still holds."""


def with_segments(
    plan: Plan, step: Captured, *, compile_seconds: float, progress: TellProgress
) -> tuple[Plan, Plan]:
    """(the plan with a note on its segments, the same with those compiled that are faster so).
    Both are the same object if no segment is faster or the plan with them does not fit into memory,
    and `plan` itself if it has stages already.

    compile_seconds   limit of compiling. What is compiled by then is used, and kept for next time
    """
    devices = plan.machine.devices
    # GPUs need no compiler of C++.
    compiles = has_compiler() or any(d.torch_device for d in devices)
    if plan.schedules or not compiles:
        return plan, plan
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
    schedules = []
    for number in range(len(devices)):
        seconds = plan.compute_seconds[:, number]
        schedules.append(_schedule(segments[number], seconds, codes[targets[number]]))
    compiled_ops = [s.ops for schedule in schedules for s in schedule.stages if s.compiled]
    of_updates = [ops for ops in compiled_ops if captured.graph.phases[ops[0]] == Phase.UPDATE]
    count, updates = len(compiled_ops) - len(of_updates), sum(map(len, of_updates))
    plan = _noted(plan, _summary_of(segments, codes))
    if not compiled_ops:
        return plan, plan
    try:
        segmented = with_schedules(plan, captured.graph, schedules)
    except OutOfMemoryError as error:
        plan = _noted(plan, f"no segment runs compiled: what segments hold does not fit ({error})")
        return plan, plan
    told = f"{count} segments run compiled"
    return plan, _noted(segmented, told + f", and {updates} updates fused" * bool(updates))


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
    waits, sends = _waits(graph, placement, order, device), _sends(graph, placement, device)
    lazy = _lazy_storages(graph, program)
    run, updates = _OpenSegment(captured), _OpenUpdates(captured)
    for op in order:
        if op in waits or op in updates.needed_by:
            yield from updates.close_after(run)
        if has_fused_update(graph, program, op):
            if op in waits:
                yield from run.close()
            updates.add(op)
            if op in sends or updates.bytes >= MOST_BYTES:
                yield from updates.close_after(run)
            continue
        touched = [*graph.inputs_of(op).tolist(), *graph.outputs_of(op)]
        fits = may_be_fused(graph, program, op) and lazy.isdisjoint(graph.storages[touched])
        if run.ops and (op in waits or not fits or piece_of[op] != piece_of[run.ops[-1]]):
            yield from run.close()
        if not fits:
            yield _Segment((op,), None)
            continue
        run.ops.append(op)
        if op in sends or len(run.ops) == MOST_OPS:
            yield from run.close()
    yield from updates.close_after(run)
    yield from run.close()


class _OpenSegment:
    """The ops of a segment that is not closed yet."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self.ops: list[int] = []

    def close(self) -> Iterator[_Segment]:
        graph, program = self._captured.graph, self._captured.program
        views = _views_of_inputs(graph, self.ops)
        for op in views:
            yield _Segment((op,), None)
        rest = tuple(op for op in self.ops if op not in views)
        if len(rest) > 1:
            yield _Segment(rest, FusedCall.of(graph, program, rest)[0])
        elif rest:
            yield _Segment(rest, None)
        self.ops.clear()


class _OpenUpdates:
    """Updates that wait for each other.

    bytes       of their gradients
    needed_by   the ops that must come after them
    """

    def __init__(self, captured: Captured) -> None:
        self._graph, self._program = captured.graph, captured.program
        self._ops: list[int] = []
        self._followers: dict[int, list[int]] = {}
        for before, op in self._graph.control.tolist():
            self._followers.setdefault(before, []).append(op)
        self.bytes = 0
        self.needed_by = set[int]()

    def add(self, op: int) -> None:
        written = self._graph.outputs_of(op)
        self._ops.append(op)
        # A gradient has the size of its parameter, which is the first tensor that is written.
        self.bytes += int(self._graph.tensor_bytes[written[0]])
        self.needed_by.update(self._followers.get(op, ()))
        for tensor in written:
            self.needed_by.update(self._graph.consumers_of(tensor).tolist())

    def close_after(self, run: _OpenSegment) -> Iterator[_Segment]:
        """Close the run, which may make their gradients, and then these updates."""
        if not self._ops:
            return
        yield from run.close()
        together = tuple(self._ops)
        yield _Segment(together, FusedCall.of(self._graph, self._program, together)[0])
        self._ops.clear()
        self.needed_by.clear()
        self.bytes = 0


def _lazy_storages(graph: Graph, program: Program) -> set[int]:
    """The storages that some tensor views negated or conjugated. Of such a view torch's own ops
    compute what is meant, but compiled code reads what is in memory."""
    return {
        int(graph.storages[tensor])
        for op, call in enumerate(program.calls)
        if call is not None and str(call.target) in ("aten._neg_view.default", "aten._conj.default")
        for tensor in graph.outputs_of(op)
    }


def _views_of_inputs(graph: Graph, run: Sequence[int]) -> list[int]:
    """The ops of a run that make views of what the run reads, and whose views others read as well:
    a piece of code returns new tensors alone. They need no other op of the run."""
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
    return views[::-1]


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


def _sends(graph: Graph, placement: NDArray[np.int32], device: int) -> set[int]:
    """The ops of the device for which another device waits."""
    readers, makers = graph.readers, graph.producers[graph.input_tensors]
    across = (placement[makers] == device) & (placement[readers] != device)
    sends = set(makers[across].tolist())
    return sends | {
        before
        for before, op in graph.control.tolist()
        if placement[before] == device and placement[op] != device
    }


def _schedule(
    segments: Sequence[_Segment], seconds: NDArray[np.float64], codes: dict[str, Compiled]
) -> Schedule:
    """The stages of a device: compiled segments, and all other ops by themselves."""
    stages = []
    for segment in segments:
        of_ops = seconds[list(segment.ops)]
        compiled = codes.get(segment.fused.key) if segment.fused is not None else None
        if compiled is not None and compiled.is_faster:
            stages.append(Stage(segment.ops, float(of_ops.sum() * compiled.share), compiled=True))
        else:
            stages += [
                Stage((op,), float(cost)) for op, cost in zip(segment.ops, of_ops, strict=True)
            ]
    return Schedule(tuple(stages))


def _summary_of(
    segments: Sequence[Sequence[_Segment]], codes: dict[CompileTarget, dict[str, Compiled]]
) -> str:
    """A sentence on how many distinct segments are faster compiled, and on the others."""
    asked = {s.fused.key for of_device in segments for s in of_device if s.fused is not None}
    by_key = {key: code for of_target in codes.values() for key, code in of_target.items()}
    failed = [code.reason for code in by_key.values() if code.reason]
    faster = sum(code.is_faster for code in by_key.values())
    told = f"of {len(asked)} distinct segments and updates {faster} are faster compiled or fused"
    if missing := len(asked - by_key.keys()):
        told += f", and {missing} were not reached within the limit of --compile-budget"
    return told + (f", and {len(failed)} cannot be compiled ({failed[0]})" if failed else "")


def _noted(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))
