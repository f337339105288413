"""Plans: where each op runs, in what order, and what that promises.

A placement is an array [ops] of device indices. Entries of source ops carry no choice: inputs are
on the host, what is updated lives with its update, the rest wherever it is read.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.graph.duplicates import Copies, duplicate
from dovetail.graph.sharing import shareable
from dovetail.machine import Machine
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
        from dovetail.plans.files import save_plan  # files reads these records

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
