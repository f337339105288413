"""Plans as JSON: everything that the promises were computed from, so that they can be checked.

{"format": "dovetail.plan", "version": 1, "source": {...}, "graph": FINGERPRINT,
 "machine": {...as in a machine's TOML...}, "placement": [device of each op],
 "orders": [[ops of device 0], ...] or null, "schedules": [null or stages, ...] or null,
 "costs": {"source": "measured", "rows": [[seconds on each device, null: cannot]],
           "index": [row of each op], "sent_bytes": [of each tensor] or null},
 "placer", "seed", "objective", "value", "lower_bound", "bound_proof", "peak_memory_bytes",
 "groups", "planning_seconds", "interrupted", "pins", "caps", "baselines", "found_seconds",
 "contiguous", "whole": [patterns of modules kept whole], "made_for", "min_gain", "notes",
 "copies": [{"ops", "readers"} of the graph without copies]}
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from dovetail.errors import FileFormatError, MachineError
from dovetail.graph.duplicates import Copies
from dovetail.graph.files import first_complaint
from dovetail.machine.files import machine_from_dict, machine_to_dict
from dovetail.plans.records import Plan, Schedule, Source, Stage
from dovetail.runtime.atomic import write_atomically
from dovetail.runtime.reading import read_json

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
