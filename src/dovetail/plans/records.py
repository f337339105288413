"""Plans: where each op runs, in what order, and what that promises.

A placement is an array [ops] of device indices. Entries of source ops carry no choice: inputs are
on the host, what is updated lives with its update, the rest wherever it is read.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from dovetail.errors import FileFormatError, MachineError
from dovetail.graph import Graph
from dovetail.graph.duplicates import Copies, duplicate, shareable
from dovetail.machine import Machine
from dovetail.machine.files import machine_to_dict
from dovetail.runtime.files import read_json, write_atomically
from dovetail.runtime.formats import (
    FILE_NAME,
    FINITE,
    Number,
    Numbers,
    Version1,
    WholeNumbers,
    file_fields,
    file_model,
    first_complaint,
    to_file,
)
from dovetail.units import (
    BEYOND_ANY_BYTES,
    format_bytes,
    format_capacity,
    format_seconds,
    printable,
)

Placement = NDArray[np.int32]  # [ops]
OBJECTIVES = ("step", "load", "latency")
_PACKED: dict[str, Any] = {FILE_NAME: None}
"""Metadata of a field that files hold in another form, or not at all."""
_Seconds = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=0)]
OPTIMAL_GAP = 1e-5
"""A gap this small is rounding, for which bounds leave a margin; searches end at it."""
SEARCH_PROOFS = (
    "CP-SAT",
    "ideals (dynamic programme)",
    "every placement",
    "share of one device (MILP)",
)
"""Lower bounds by these proofs take a search to check again; all others take a moment."""


@dataclass(frozen=True)
class Stage:
    """Ops of one device that run together, for `seconds` in all."""

    ops: tuple[int, ...]
    seconds: _Seconds


@dataclass(frozen=True)
class Schedule:
    """Stages of one device, in running order."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Source:
    """The origin of a plan's graph, so that it can be captured again.

    model      the MODEL text, e.g. "zoo:rnnlm?layers=2"; of a saved graph its file's name
    training   the optimizer's text, e.g. "adam"; "" for inference
    shapes     of the step's inputs, in order; of one tower's where there are replicas
    replicas   towers that the captured step was replicated to; 1: not at all
    asynchronous   each tower updates by itself
    constants  (name, value as text) of the model's arguments that are no tensors: the plan is for
               these values alone
    """

    model: str
    training: str
    shapes: tuple[tuple[int, ...], ...]
    torch_version: str
    replicas: Annotated[int, Field(ge=1)] = 1
    asynchronous: bool = False
    constants: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement with its orders, and as promises: value, bound, memory.

    placement          [ops] device indices
    orders             per device its ops in running order, or None: by priority, then index
    schedules          per device a Schedule, or None. A device has an order or a schedule, which
                       counts where both are there
    pins               (pattern, device name) as the user gave them
    caps               (device name, bytes) likewise
    machine            the machine planned for, with the rates the promises were computed from
    compute_seconds    [ops, devices] the costs the promises were computed from
    value              predicted seconds of the objective
    baselines          method -> value, None where infeasible, in the order tried
    contiguous         asked for: devices can be ordered so that no forward edge goes back
    sent_bytes         [tensors] as in `Costs`; None: the tensors' own bytes
    found_seconds      method -> when it first found its value, from the start of the search
    whole              patterns of the modules that are each on one device
    made_for           the format: "device-map", "split-points", or "" for none in particular
    min_gain           share by which more devices had to be better than fewer
    copies             of shared computations that the planned graph has: `graph.duplicates`
    notes              sentences for the user: why it is as it is
    graph              the graph it was made for, where it was planned or opened in this process;
                       not saved
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
    peak_memory_bytes: tuple[int, ...]
    groups: _Count
    planning_seconds: _Seconds
    interrupted: bool = False
    schedules: tuple[Schedule | None, ...] | None = None
    pins: tuple[tuple[str, str], ...] = ()
    caps: tuple[tuple[str, int], ...] = ()
    baselines: dict[str, float | None] = field(default_factory=dict)
    contiguous: bool = False
    sent_bytes: NDArray[np.float64] | None = field(default=None, metadata=_PACKED)
    found_seconds: dict[str, float] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    made_for: Annotated[str, Field(pattern="^(|device-map|split-points)$")] = ""
    min_gain: Annotated[float, Field(ge=0)] = 0.0
    copies: tuple[Copies, ...] = ()
    notes: tuple[str, ...] = ()
    graph: Graph | None = field(default=None, repr=False, metadata=_PACKED)

    @property
    def gap(self) -> float:
        """The most that the value can be above the optimum: (value - bound) / bound; inf: no
        bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else float("inf")

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all. Raises `UnwritableError`."""
        save_plan(self, path)

    def __str__(self) -> str:
        """A table of the methods, best first, and of the memory each device needs."""
        proof = f"; bound by {self.bound_proof}" if self.lower_bound > 0 else ""
        rows = [
            f"{self.source.model or 'graph'} on {self.machine.name}: {self.objective} "
            f"{format_value(self, self.value)} by {self.placer}{', contiguous' * self.contiguous}, "
            f"{describe_gap(self)}{proof}"
        ]
        feasible = [(v, name) for name, v in self.baselines.items() if v is not None]
        rows += [
            f"  {name:<14}{format_value(self, v):>10}"
            + (f"{v / self.value:8.2f} x" if self.value > 0 else "")
            for v, name in sorted(feasible)
        ]
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
    """The graph that the plan is for, of the graph of its step: with the plan's copies. A graph of
    another step comes back as it is; `check` says so."""
    if not plan.copies or graph.fingerprint == plan.graph_fingerprint:
        return graph
    may_be_copied = shareable(graph)
    for copies in plan.copies:
        if max((*copies.ops, *copies.readers), default=0) >= len(graph):
            return graph
        if not may_be_copied[list(copies.ops)].all():
            return graph
    return duplicate(graph, plan.copies).graph


def format_value(plan: Plan, value: float) -> str:
    """A value of the plan's objective; where costs were given, in full and in milliseconds, as the
    published instances have them."""
    return f"{value * 1e3:.6g} ms" if plan.costs_source == "given" else format_seconds(value)


def describe_gap(plan: Plan) -> str:
    """ "within 3.1 % of optimal", "optimal", "at most 2.5 x the optimum", or "no bound"."""
    if plan.value == 0:
        return "optimal"
    if not np.isfinite(plan.gap):
        return "no bound"
    if plan.gap >= 1:
        return f"at most {1 + plan.gap:.3g} x the optimum"
    return "optimal" if plan.gap <= OPTIMAL_GAP else f"within {100 * plan.gap:.3g} % of optimal"


# Plans as JSON: everything that the promises were computed from, so that they can be checked.
#
#   {"format": "dovetail.plan", "version": 1, ...the fields of `Plan`, but `graph` is a fingerprint,
#    "costs": {"source": "measured", "rows": [[seconds on each device, null: cannot]],
#              "index": [row of each op], "sent_bytes": [of each tensor] or null}}
#
# Ops with equal signatures cost the same: of the costs each distinct row is written once.


class _CostsFile(BaseModel):
    model_config = FINITE
    source: Literal["analytic", "measured", "given"]
    rows: list[list[Number | None]]
    index: WholeNumbers
    sent_bytes: Numbers | None = None


_PlanFile = file_model(
    Plan, FINITE, format=Literal["dovetail.plan"], version=Version1, costs=_CostsFile
)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, whole or not at all. Raises `UnwritableError`."""
    rows, index = np.unique(plan.compute_seconds, axis=0, return_inverse=True)
    file = {
        "format": "dovetail.plan",
        "version": 1,
        **to_file(plan),
        "machine": machine_to_dict(plan.machine),
        "costs": {
            "source": plan.costs_source,
            "rows": [[s if np.isfinite(s) else None for s in row] for row in rows.tolist()],
            "index": index.ravel().tolist(),
            "sent_bytes": to_file(plan.sent_bytes),
        },
    }
    write_atomically(path, json.dumps(file, separators=(",", ":"), allow_nan=False))


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises `FileFormatError` or `MachineError`. Promises: `pipeline.verify`."""
    raw = read_json(path)
    try:
        file: Any = _PlanFile.model_validate(raw)
        sent_bytes = file.costs.sent_bytes
        plan = Plan(
            **{field.name: getattr(file, field.name) for field, _ in file_fields(Plan)},
            compute_seconds=_seconds(file.costs, len(file.machine.devices)),
            costs_source=file.costs.source,
            sent_bytes=None if sent_bytes is None else np.array(sent_bytes, np.float64),
        )
        placement, devices = plan.placement, len(plan.machine.devices)
        if len(plan.compute_seconds) != len(placement):
            raise ValueError("costs.index: not one entry an op of the placement")
        if len(placement) and not 0 <= placement.min() <= placement.max() < devices:
            raise ValueError("placement: names a device that is not there")
        for name in ("orders", "schedules", "peak_memory_bytes"):
            value = getattr(plan, name)
            if value is not None and len(value) != devices:
                raise ValueError(f"{name}: not one entry a device")
    except ValidationError as error:
        raise FileFormatError(str(path), first_complaint(error)) from None
    except (ValueError, OverflowError, MachineError) as error:
        raise FileFormatError(str(path), str(error)) from None
    return plan


def _seconds(costs: _CostsFile, devices: int) -> NDArray[np.float64]:
    """[ops, devices]"""
    if any(len(row) != devices for row in costs.rows):
        raise ValueError("costs.rows: not one entry a device")
    if costs.index and not 0 <= min(costs.index) <= max(costs.index) < len(costs.rows):
        raise ValueError("costs.index points outside the rows")
    rows = [[np.inf if s is None else s for s in row] for row in costs.rows]
    return np.array(rows, dtype=np.float64).reshape(-1, devices)[costs.index]
