"""Plans: where each op runs, in what order, and what that promises.

A placement is an array [ops] of device indices. Entries of source ops carry no choice: inputs are
on the host, what is updated lives with its update, the rest wherever it is read.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from dovetail.errors import FileFormatError, MachineError
from dovetail.graph import Graph
from dovetail.graph.duplicates import Copies, duplicate, shareable
from dovetail.graph.files import first_complaint
from dovetail.machine import Machine
from dovetail.machine.files import machine_from_dict, machine_to_dict
from dovetail.runtime.files import read_json, write_atomically
from dovetail.units import (
    BEYOND_ANY_BYTES,
    format_bytes,
    format_capacity,
    format_seconds,
    printable,
)

Placement = NDArray[np.int32]  # [ops]
OBJECTIVES = ("step", "load", "latency")
OPTIMAL_GAP = 1e-5
"""A gap of so little is the margin that bounds leave for rounding; searches end at it."""
SEARCH_PROOFS = (
    "CP-SAT",
    "ideals (dynamic programme)",
    "every placement",
    "share of one device (MILP)",
)
"""Proofs of a lower bound that take a search again; all others take a moment."""


@dataclass(frozen=True)
class Stage:
    """Ops of one device that run together, for `seconds` in all."""

    ops: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """Stages of one device, in running order."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Source:
    """Where a plan's graph came from, so that it can be captured again.

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
    replicas: int = 1
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
    graph_fingerprint: str
    machine: Machine
    placement: Placement
    orders: tuple[tuple[int, ...], ...] | None
    compute_seconds: NDArray[np.float64]
    costs_source: str
    placer: str
    seed: int
    objective: str
    value: float
    lower_bound: float
    bound_proof: str
    peak_memory_bytes: tuple[int, ...]
    groups: int
    planning_seconds: float
    interrupted: bool = False
    schedules: tuple[Schedule | None, ...] | None = None
    pins: tuple[tuple[str, str], ...] = ()
    caps: tuple[tuple[str, int], ...] = ()
    baselines: dict[str, float | None] = field(default_factory=dict)
    contiguous: bool = False
    sent_bytes: NDArray[np.float64] | None = None
    found_seconds: dict[str, float] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    made_for: str = ""
    min_gain: float = 0.0
    copies: tuple[Copies, ...] = ()
    notes: tuple[str, ...] = ()
    graph: Graph | None = field(default=None, repr=False)

    @property
    def gap(self) -> float:
        """How far the value may be above the optimum: (value - bound) / bound; inf: no bound."""
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
        known = [(v, name) for name, v in self.baselines.items() if v is not None]
        rows += [
            f"  {name:<14}{format_value(self, v):>10}"
            + (f"{v / self.value:8.2f} x" if self.value > 0 else "")
            for v, name in sorted(known)
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
    may = shareable(graph)
    for one in plan.copies:
        if max((*one.ops, *one.readers), default=0) >= len(graph) or not may[list(one.ops)].all():
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
# {"format": "dovetail.plan", "version": 1, "source": {...}, "graph": FINGERPRINT,
#  "machine": {...as in a machine's TOML...}, "placement": [device of each op],
#  "orders": [[ops of device 0], ...] or null, "schedules": [null or stages, ...] or null,
#  "costs": {"source": "measured", "rows": [[seconds on each device, null: cannot]],
#            "index": [row of each op], "sent_bytes": [of each tensor] or null},
#  "placer", "seed", "objective", "value", "lower_bound", "bound_proof", "peak_memory_bytes",
#  "groups", "planning_seconds", "interrupted", "pins", "caps", "baselines", "found_seconds",
#  "contiguous", "whole": [patterns of modules kept whole], "made_for", "min_gain", "notes",
#  "copies": [{"ops", "readers"} of the graph without copies]}


_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
_Seconds = Field(ge=0)


class _Source(BaseModel):
    model_config = _STRICT
    model: str
    training: str
    shapes: tuple[tuple[int, ...], ...]
    torch_version: str
    replicas: int = Field(1, ge=1)
    asynchronous: bool = False
    constants: tuple[tuple[str, str], ...] = ()


class _Stage(BaseModel):
    model_config = _STRICT
    ops: tuple[int, ...]
    seconds: float = _Seconds


class _Copies(BaseModel):
    model_config = _STRICT
    ops: tuple[NonNegativeInt, ...]
    readers: tuple[NonNegativeInt, ...]


class _Costs(BaseModel):
    model_config = _STRICT
    source: Literal["analytic", "measured", "given"]
    rows: list[list[float | None]]
    index: list[int]
    sent_bytes: list[float] | None = None


class _Plan(BaseModel):
    model_config = _STRICT
    format: Literal["dovetail.plan"]
    version: Literal[1]
    source: _Source
    graph: str
    machine: dict[str, Any]
    placement: list[int]
    orders: tuple[tuple[int, ...], ...] | None
    schedules: tuple[tuple[_Stage, ...] | None, ...] | None
    costs: _Costs
    placer: str
    seed: int = Field(ge=0)
    objective: Literal["step", "load", "latency"]
    value: float = _Seconds
    lower_bound: float = _Seconds
    bound_proof: str
    peak_memory_bytes: tuple[int, ...]
    groups: int = Field(ge=0)
    planning_seconds: float = _Seconds
    interrupted: bool
    pins: tuple[tuple[str, str], ...]
    caps: tuple[tuple[str, int], ...]
    baselines: dict[str, float | None]
    found_seconds: dict[str, float] = {}
    contiguous: bool = False
    whole: tuple[str, ...] = ()
    made_for: Literal["", "device-map", "split-points"] = ""
    min_gain: float = Field(0.0, ge=0)
    notes: tuple[str, ...] = ()
    copies: tuple[_Copies, ...] = ()


_PLAIN = (
    "placer", "seed", "objective", "value", "lower_bound", "bound_proof", "peak_memory_bytes",
    "groups", "planning_seconds", "interrupted", "pins", "caps", "baselines", "orders",
    "found_seconds", "contiguous", "whole", "made_for", "min_gain", "notes",
)  # fmt: skip


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, whole or not at all. Raises `UnwritableError`."""
    rows, index = np.unique(plan.compute_seconds, axis=0, return_inverse=True)
    file = {
        "format": "dovetail.plan",
        "version": 1,
        "source": vars(plan.source),
        "graph": plan.graph_fingerprint,
        "machine": machine_to_dict(plan.machine),
        "placement": plan.placement.tolist(),
        "schedules": plan.schedules
        and [s and [vars(stage) for stage in s.stages] for s in plan.schedules],
        "costs": {
            "source": plan.costs_source,
            "rows": [[s if np.isfinite(s) else None for s in row] for row in rows.tolist()],
            "index": index.ravel().tolist(),
            "sent_bytes": None if plan.sent_bytes is None else plan.sent_bytes.tolist(),
        },
        "copies": [vars(one) for one in plan.copies],
        **{name: getattr(plan, name) for name in _PLAIN},
    }
    write_atomically(path, json.dumps(file, separators=(",", ":"), allow_nan=False))


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises `FileFormatError` or `MachineError`. Promises: `pipeline.verify`."""
    raw = read_json(path)
    try:
        file = _Plan.model_validate(raw)
        machine = machine_from_dict(file.machine)
        seconds = _seconds(file.costs, len(machine.devices))
        placement = np.array(file.placement, dtype=np.int32)
        if len(seconds) != len(placement):
            raise ValueError("costs.index: not one entry an op of the placement")
        if len(placement) and not 0 <= placement.min() <= placement.max() < len(machine.devices):
            raise ValueError("placement: names a device that is not there")
    except ValidationError as error:
        raise FileFormatError(str(path), first_complaint(error)) from None
    except (ValueError, OverflowError, MachineError) as error:
        raise FileFormatError(str(path), str(error)) from None
    for name in ("orders", "schedules", "peak_memory_bytes"):
        value = getattr(file, name)
        if value is not None and len(value) != len(machine.devices):
            raise FileFormatError(str(path), f"{name}: not one entry a device")
    return Plan(
        source=Source(**file.source.model_dump()),
        graph_fingerprint=file.graph,
        machine=machine,
        placement=placement,
        compute_seconds=seconds,
        costs_source=file.costs.source,
        sent_bytes=None if file.costs.sent_bytes is None else np.array(file.costs.sent_bytes),
        schedules=_schedules(file.schedules),
        copies=tuple(Copies(one.ops, one.readers) for one in file.copies),
        **{name: getattr(file, name) for name in _PLAIN},
    )


def _seconds(costs: _Costs, devices: int) -> NDArray[np.float64]:
    if any(len(row) != devices for row in costs.rows):
        raise ValueError("costs.rows: not one entry a device")
    if costs.index and not 0 <= min(costs.index) <= max(costs.index) < len(costs.rows):
        raise ValueError("costs.index points outside the rows")
    rows = [[np.inf if s is None else s for s in row] for row in costs.rows]
    return np.array(rows, dtype=np.float64).reshape(-1, devices)[costs.index]


def _schedules(
    files: tuple[tuple[_Stage, ...] | None, ...] | None,
) -> tuple[Schedule | None, ...] | None:
    if files is None:
        return None
    return tuple(
        None if stages is None else Schedule(tuple(Stage(s.ops, s.seconds) for s in stages))
        for stages in files
    )
