"""Records and files of plans: on which device each op runs, in what order, and what is promised.

A placement is an array [ops] of device indices. Its entries for source ops are no choice: inputs
are on the host, a source that is updated lives with its update, and others live where they are
read.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from dovetail.errors import FileFormatError, MachineError
from dovetail.graph import Graph
from dovetail.graph.files import graph_from, graph_to_dict
from dovetail.graph.source import Source
from dovetail.machine import Machine
from dovetail.machine.files import machine_to_dict
from dovetail.methods import OBJECTIVES
from dovetail.runtime.files import read_json, write_atomically
from dovetail.runtime.formats import (
    FILE_NAME,
    FINITE,
    Number,
    Numbers,
    WholeNumbers,
    file_fields,
    file_model,
    first_complaint,
    to_file,
)
from dovetail.transforms import (
    AnyTransform,
    Copies,
    Form,
    MicroBatches,
    Parts,
    SharedCopies,
    applied_to_graph,
    repeats,
    the,
)
from dovetail.units import (
    BEYOND_ANY_BYTES,
    MOST_BYTES,
    format_bytes,
    format_capacity,
    format_seconds,
    printable,
)

Placement = NDArray[np.int32]  # [ops]
PLACED, EAGER, COMPILED = "placed", "eager", "torch.compile"
REDUCED = "torch.compile reduce-overhead"
"""How a plan runs: its ops on their devices, or the module as it is: plain, or compiled in torch's
default mode or in the one that replays CUDA graphs."""
_ANY_WAY = "^({})$".format("|".join((PLACED, EAGER, COMPILED, REDUCED)).replace(".", "[.]"))
_PACKED: dict[str, Any] = {FILE_NAME: None}
"""The metadata of a field that files hold in another form, or not at all."""
_Seconds = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=0)]
_Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
OPTIMAL_GAP = 1e-5
"""A plan with at most this gap counts as optimal, and searches end at it: bounds leave a margin for
rounding."""
SEARCH_PROOFS = (
    "CP-SAT",
    "ideals (dynamic programme)",
    "every placement",
    "every way to share the batch",
    "share of one device (MILP)",
)
"""Checking a lower bound by one of these proofs again takes a search. The other proofs take a
moment."""


@dataclass(frozen=True)
class Stage:
    """Ops of one device that run together and take `seconds` in all.

    compiled   True: one after another, as one piece of compiled code
    """

    ops: tuple[int, ...]
    seconds: _Seconds
    compiled: bool = False


@dataclass(frozen=True)
class Schedule:
    """Stages of one device, in running order."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement with its orders, and what it promises: value, bound and memory.

    placement          [ops] device indices
    orders             per device its ops in running order, or None: by priority, then index
    schedules          per device a Schedule, or None. If a device has an order and a schedule, the
                       schedule counts
    pins               (pattern, device name) as the user gave them
    caps               (device name, bytes) as the user gave them
    machine            the machine of the plan, with the rates that the promises were computed from
    compute_seconds    [ops, devices] the costs that the promises were computed from
    value              predicted seconds of the objective
    baselines          method -> value, None where infeasible, in the order tried
    contiguous         True if the user asked for devices that can be ordered so that no forward
                       edge goes back
    sent_bytes         [tensors] as in `Costs`; None: the tensors' own bytes
    found_seconds      method -> seconds from the search's start until it first found its value
    whole              patterns of the modules that must each be on one device
    made_for           the format that the plan must fit, such as "device-map"; "": none
    min_gain           share by which more devices had to be better than fewer
    transforms         what made the planned step of the captured one, in order
    notes              sentences that tell the user why the plan is as it is
    way                how it runs: `PLACED`; or else on its one device, where `value` is what was
                       measured, and costs and orders are of the ops one by one
    measured           way -> seconds of a step, measured side by side; empty: nothing was measured
    graph              the plan's graph; None: it was not planned or opened in this process, and its
                       file keeps none
    """

    source: Source
    graph_fingerprint: str = field(metadata={FILE_NAME: "graph"})
    machine: Machine
    placement: Placement
    orders: tuple[tuple[int, ...], ...] | None
    compute_seconds: NDArray[np.float64] = field(metadata=_PACKED)
    costs_source: str = field(metadata=_PACKED)
    placer: str
    seed: _Count
    objective: Annotated[str, Field(pattern=f"^({'|'.join(OBJECTIVES)})$")]
    value: _Seconds
    lower_bound: _Seconds
    bound_proof: str
    peak_memory_bytes: tuple[_Bytes, ...]
    groups: _Count
    planning_seconds: _Seconds
    interrupted: bool = False
    schedules: tuple[Schedule | None, ...] | None = None
    pins: tuple[tuple[str, str], ...] = ()
    caps: tuple[tuple[str, _Bytes], ...] = ()
    baselines: dict[str, float | None] = field(default_factory=dict)
    contiguous: bool = False
    sent_bytes: NDArray[np.float64] | None = field(default=None, metadata=_PACKED)
    found_seconds: dict[str, float] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    made_for: Annotated[str, Field(pattern="^(|device-map|split-points|torchtitan)$")] = ""
    min_gain: Annotated[float, Field(ge=0)] = 0.0
    transforms: tuple[AnyTransform, ...] = ()
    notes: tuple[str, ...] = ()
    way: Annotated[str, Field(pattern=_ANY_WAY)] = PLACED
    measured: dict[str, float] = field(default_factory=dict)
    graph: Graph | None = field(default=None, repr=False, metadata=_PACKED)

    @property
    def gap(self) -> float:
        """The largest share by which the value can be above the optimum: (value - bound) / bound.

        inf if there is no bound.
        """
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else float("inf")

    @property
    def micro_batches(self) -> MicroBatches | None:
        """The micro-batches and stages of a pipeline; None for any other plan."""
        return the(MicroBatches, self.transforms)

    @property
    def repeats(self) -> int:
        """How often the captured step runs in one step of the plan."""
        return repeats(self.transforms)

    @property
    def copies(self) -> tuple[Copies, ...]:
        """Copies of shared computations in the planned graph."""
        shared = the(SharedCopies, self.transforms)
        return () if shared is None else shared.copies

    def noted(self, *notes: str) -> "Plan":
        """Return the plan with these notes behind its own."""
        return replace(self, notes=(*self.notes, *notes))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all. Raises `UnwritableError`."""
        save_plan(self, path)

    def __str__(self) -> str:
        """Return a table of the methods, best first, and of the memory that each device needs."""
        proof = f"; bound by {self.bound_proof}" if self.lower_bound > 0 else ""
        rows = [
            f"{self.source.model or 'graph'} on {self.machine.name}: {self.objective} "
            f"{format_value(self, self.value)} by {self.placer}{', contiguous' * self.contiguous}, "
            f"{describe_gap(self)}{proof}"
        ]
        feasible = [(v, name) for name, v in self.baselines.items() if v is not None]
        width = max([14, *map(len, self.baselines)])
        for v, name in sorted(feasible):
            ratio = ratio_to(self, name, v)
            compared = "" if ratio is None else f"{ratio:8.2f} x"
            measured = " measured" * (name in self.measured)
            rows.append(f"  {name:<{width}}{format_value(self, v):>10}{compared}{measured}")
        rows += [f"  {name:<14}no feasible plan" for name, v in self.baselines.items() if v is None]
        caps = dict(self.caps)
        for device, peak in zip(self.machine.devices, self.peak_memory_bytes, strict=True):
            if device.kind == "host" and not peak:
                continue
            available = min(device.memory_bytes, caps.get(device.name, device.memory_bytes))
            limit = f" of {format_capacity(available)}" if available < BEYOND_ANY_BYTES else ""
            cap = " (cap)" if device.name in caps else ""
            rows.append(f"  {device.name:<14}{format_bytes(peak):>10}{limit}{cap}")
        rows += [f"  {note}" for note in self.notes]
        return printable("\n".join(rows))


def planned_graph(plan: Plan, graph: Graph) -> Graph:
    """Return the plan's graph: the graph of its step with the plan's transforms.

    graph   of the step as it was captured. A plan of the step in another form has its own graph
            with it, where it was planned or opened in this process

    A graph that the transforms do not fit is returned as it is. `check` then says that the plan was
    made for another graph.
    """
    if graph.fingerprint == plan.graph_fingerprint:
        return graph
    captured_again = any(isinstance(t, Form | Parts) for t in plan.transforms)
    if plan.graph is not None and (captured_again or plan.micro_batches is not None):
        return plan.graph
    return applied_to_graph(graph, plan.transforms)


def format_value(plan: Plan, value: float) -> str:
    """Return a value of the plan's objective as text. With given costs it has six digits and is in
    milliseconds, as in the published instances."""
    return f"{value * 1e3:.6g} ms" if plan.costs_source == "given" else format_seconds(value)


def ratio_to(plan: Plan, method: str, value: float) -> float | None:
    """Return a method's value over the plan's. What was measured is compared with what was, and
    what was predicted with that; None where one value is measured and the other is not, or the
    plan's is 0."""
    is_measured = method in plan.measured
    if not is_measured and plan.way != PLACED:
        return None
    own = plan.measured[plan.way] if is_measured else plan.value
    return value / own if own > 0 else None


def describe_gap(plan: Plan) -> str:
    """Return the gap as text: "within 3.1 % of optimal", "optimal", "at most 2.5 x the optimum" or
    "no bound"."""
    if plan.value == 0:
        return "optimal"
    if not np.isfinite(plan.gap):
        return "no bound"
    if plan.gap >= 1:
        return f"at most {1 + plan.gap:.3g} x the optimum"
    return "optimal" if plan.gap <= OPTIMAL_GAP else f"within {100 * plan.gap:.3g} % of optimal"


# Plans as JSON. A file holds all that the promises were computed from, so that they can be checked.
#
#   {"format": "dovetail.plan", "version": 2, ...the fields of `Plan`, but `graph` is a fingerprint,
#    "costs": {"source": "measured", "rows": [[seconds on each device, null: cannot]],
#              "index": [row of each op], "sent_bytes": [of each tensor] or null}}
#
# Ops with equal signatures cost the same, so each distinct row of costs is written once.


class _CostsFile(BaseModel):
    model_config = FINITE
    source: Literal["analytic", "measured", "given"]
    rows: list[list[Number | None]]
    index: WholeNumbers
    sent_bytes: Numbers | None = None


_PlanFile = file_model(
    Plan, FINITE, format=Literal["dovetail.plan"], version=Literal[2], costs=_CostsFile
)
_GRAPH = "planned_graph"
"""Where a plan's file keeps its graph, as a graph's own file has it. It may be left out."""
_MOST_KEPT_OPS = 2**18
"""A larger graph is left out, as what is read of a file has a limit."""


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, whole or not at all. Raises `UnwritableError`."""
    rows, index = np.unique(plan.compute_seconds, axis=0, return_inverse=True)
    file: dict[str, Any] = {
        "format": "dovetail.plan",
        "version": 2,
        **to_file(plan),
        "machine": machine_to_dict(plan.machine),
        "costs": {
            "source": plan.costs_source,
            "rows": [[s if np.isfinite(s) else None for s in row] for row in rows.tolist()],
            "index": index.ravel().tolist(),
            "sent_bytes": to_file(plan.sent_bytes),
        },
    }
    if plan.graph is not None and len(plan.graph) <= _MOST_KEPT_OPS:
        file[_GRAPH] = graph_to_dict(plan.graph)
    write_atomically(path, json.dumps(file, separators=(",", ":"), allow_nan=False))


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises `FileFormatError`, and `GraphError` for an invalid graph that it keeps.

    It checks the file's form alone; `plans.check` checks the rules and `pipeline.verify` the
    promises.
    """
    raw = read_json(path)
    kept = raw.pop(_GRAPH, None) if isinstance(raw, dict) else None
    try:
        file: Any = _PlanFile.model_validate(_of_version_1(raw))
        costs, count = file.costs, len(file.machine.devices)
        if any(len(row) != count for row in costs.rows):
            raise ValueError("costs.rows: not one entry a device")
        if costs.index and not 0 <= min(costs.index) <= max(costs.index) < len(costs.rows):
            raise ValueError("costs.index points outside the rows")
        rows = [[np.inf if s is None else s for s in row] for row in costs.rows]
        plan = Plan(
            **{field.name: getattr(file, field.name) for field, _ in file_fields(Plan)},
            compute_seconds=np.array(rows, dtype=np.float64).reshape(-1, count)[costs.index],
            costs_source=costs.source,
            sent_bytes=None if costs.sent_bytes is None else np.array(costs.sent_bytes, np.float64),
        )
        placement, devices = plan.placement, len(plan.machine.devices)
        if len(plan.compute_seconds) != len(placement):
            raise ValueError("costs.index: not one entry an op of the placement")
        if len(placement) and not 0 <= placement.min() <= placement.max() < devices:
            raise ValueError("placement: names a device that is not there")
        micro = plan.micro_batches
        if micro is not None and max(micro.devices, default=-1) >= devices:
            raise ValueError("transforms: micro-batches: names a device that is not there")
        parts = the(Parts, plan.transforms)
        if parts is not None and parts.count != repeats(plan.transforms):
            raise ValueError("transforms: not as many parts as towers and micro-batches take")
        if len({type(transform) for transform in plan.transforms}) < len(plan.transforms):
            raise ValueError("transforms: two of one kind")
        for name in ("orders", "schedules", "peak_memory_bytes"):
            value = getattr(plan, name)
            if value is not None and len(value) != devices:
                raise ValueError(f"{name}: not one entry a device")
        if plan.measured and plan.way not in plan.measured:
            raise ValueError(f"measured: lacks {plan.way!r}, the plan's way")
    except ValidationError as error:
        raise FileFormatError(str(path), first_complaint(error)) from None
    except (ValueError, OverflowError, MachineError) as error:
        raise FileFormatError(str(path), str(error)) from None
    if kept is None:
        return plan
    graph = graph_from(kept, f"{path}: {_GRAPH}")
    if graph.fingerprint != plan.graph_fingerprint:
        raise FileFormatError(str(path), f"{_GRAPH}: is another graph than the plan's")
    return replace(plan, graph=graph)


def _of_version_1(raw: Any) -> Any:
    """Return a plan's file of version 1 as version 2 has it; any other object as it is.

    Version 1 kept the transforms as fields of the plan and of its source.
    """
    if not isinstance(raw, dict) or raw.get("version") != 1 or raw.get("version") is True:
        return raw
    file, source = dict(raw), raw.get("source")
    source = dict(source) if isinstance(source, dict) else {}
    form = {
        name: source.pop(name) for name in ("recurrent_chunks", "channels_last") if name in source
    }
    parts, replicas = source.pop("parts", 1), source.pop("replicas", 1)
    micro, asynchronous = source.pop("pipelining", None), source.pop("asynchronous", False)
    copies = file.pop("copies", [])
    transforms: list[Any] = [{"kind": "form", **form}] if any(form.values()) else []
    if parts != 1:
        transforms.append({"kind": "parts", "count": parts})
    if isinstance(micro, dict):
        micro = {"count" if key == "micro_batches" else key: micro[key] for key in micro}
        micro = {"kind": "micro-batches", **micro}
    transforms += [] if micro is None else [micro]
    if replicas != 1:
        transforms.append({"kind": "towers", "count": replicas, "asynchronous": asynchronous})
    if copies != []:
        transforms.append({"kind": "copies", "copies": copies})
    return {**file, "version": 2, "source": source, "transforms": transforms}
