"""Lower bounds: seconds that no placement beats, with the name of what proves them.

    step      critical path, without and with forced sends; load balance; head, load and tail
    load      load balance; closure; both; largest op
    latency   critical path, sends and queues left out

Load balance is with memory where memory is scarce. Each holds for every placement that the user
permits: only ops with one colocation id, and sources with the ops that write them, move together.

Plans with stages run ops together, which costs other than `Costs` says: no bound here covers them.

Cost: O(reads x devices^2 + ops x log ops), and a linear programme of merged classes. Beyond
`MOST_CLOSURE_CLASSES` classes there is no closure.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import NoDeviceError
from dovetail.graph import Graph
from dovetail.machine import Machine
from dovetail.simulator.closure import closure_balance_seconds, closure_seconds, closures
from dovetail.simulator.critical_path import (
    earliest_ends,
    head_load_tail,
    longest_seconds,
    without_sends,
)
from dovetail.simulator.flat import Flat, Float64, flatten
from dovetail.simulator.forced import forced_ends, forced_tails
from dovetail.simulator.load_balance import (
    ROUNDING,
    class_burdens,
    class_seconds,
    classes_of,
    load_balance_prices,
    proven_seconds,
)
from dovetail.simulator.load_model import load_model, resident_bytes

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]

MOST_CLOSURE_CLASSES = 20_000


@dataclass(frozen=True)
class LowerBound:
    """No placement takes less than `seconds`; `proof` says why."""

    seconds: float
    proof: str


@dataclass(frozen=True, eq=False)
class _Case:
    """What the bounds of one call look at: seconds [ops, devices] where each op may be, else inf;
    of_op [ops] its class; classes [classes, devices] seconds, sizes [classes] bytes, capacities
    [devices] bytes."""

    graph: Graph
    machine: Machine
    costs: Costs
    flat: Flat
    seconds: Float64
    of_op: Int64
    classes: Float64
    sizes: Float64
    capacities: Float64


def lower_bound(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    objective: str = "step",
    allowed: Bool | None = None,
    *,
    capacities: NDArray[np.integer] | None = None,
) -> LowerBound:
    """The best bound we can prove on `objective`.

    `allowed` [ops, devices] narrows the choice; `capacities` [devices] bytes, by default each
    device's memory. Raises `NoDeviceError` for an op that no device may run.
    """
    bounds = lower_bounds(graph, machine, costs, objective, allowed, capacities=capacities)
    return max(bounds, key=lambda bound: bound.seconds)


def lower_bounds(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    objective: str = "step",
    allowed: Bool | None = None,
    *,
    capacities: NDArray[np.integer] | None = None,
) -> list[LowerBound]:
    """Every bound on `objective` that `lower_bound` chooses from. Arguments and errors are its."""
    flat = flatten(graph, machine, costs)
    seconds = flat.compute_seconds.copy()
    if allowed is not None:
        seconds[~np.asarray(allowed, bool)] = np.inf
    seconds[graph.is_source] = 0.0
    of_op = classes_of(graph)
    classes = class_seconds(of_op, seconds)
    stuck = np.asarray(~np.isfinite(classes).any(axis=1))[of_op] & ~graph.is_source
    if stuck.any():
        raise NoDeviceError(graph.names[int(np.flatnonzero(stuck)[0])])
    memory = [device.memory_bytes for device in machine.devices]
    case = _Case(
        graph, machine, costs, flat, seconds, of_op, classes,
        resident_bytes(graph, of_op, len(classes)),
        np.array(memory if capacities is None else capacities, np.float64),
    )  # fmt: skip
    if objective == "latency":
        ends = earliest_ends(*without_sends(flat, seconds))
        return [LowerBound(longest_seconds(flat, ends), "critical path")]
    bounds = _load_balance(case)
    return bounds + (_of_step(case) if objective == "step" else _of_load(case, bounds))


def _load_balance(case: _Case) -> list[LowerBound]:
    plain = load_balance_prices(case.classes)
    bounds = [LowerBound(proven_seconds(case.classes, plain), "load balance (LP)")]
    if case.sizes.sum() > case.capacities.min():
        limits = case.sizes, case.capacities
        prices = load_balance_prices(case.classes, *limits)
        proven = proven_seconds(case.classes, prices, *limits)
        bounds.append(LowerBound(proven, "load balance with memory (LP)"))
    return bounds


def _of_step(case: _Case) -> list[LowerBound]:
    path = longest_seconds(case.flat, earliest_ends(case.flat, case.seconds))
    ops = np.flatnonzero(case.flat.is_source == 0)
    seconds = case.seconds[ops]
    ends = forced_ends(case.flat, case.seconds)[ops]
    tails = forced_tails(case.flat, case.seconds)[ops]
    with np.errstate(invalid="ignore"):  # inf - inf: not there
        starts = np.where(np.isfinite(seconds), ends - seconds, np.inf)
    forced = float((ends + tails).min(axis=1).max(initial=0.0))
    burdens = class_burdens(seconds, load_balance_prices(seconds))
    window = head_load_tail(starts.min(axis=1), burdens, tails.min(axis=1))
    return [
        LowerBound(path, "critical path"),
        LowerBound(forced * (1 - ROUNDING), "critical path with forced sends"),
        LowerBound(window * (1 - ROUNDING), "head, load and tail"),
    ]


def _of_load(case: _Case, bounds: list[LowerBound]) -> list[LowerBound]:
    largest = float(case.classes.min(axis=1).max(initial=0.0)) * (1 - ROUNDING)
    if len(case.classes) > MOST_CLOSURE_CLASSES:
        return [LowerBound(largest, "largest op")]
    model = load_model(
        case.graph,
        case.machine,
        replace(case.costs, compute_seconds=case.seconds),
        group_of=case.of_op,
        allowed=np.isfinite(case.classes),
        capacities=case.capacities.astype(np.int64),
    )
    proven = max(largest, *(bound.seconds for bound in bounds))
    found = closures(model, proven)
    closed = LowerBound(closure_seconds(found), "closure (min cut)")
    proven = max(proven, closed.seconds)
    balanced = closure_balance_seconds(model, found, proven)
    bounds = [LowerBound(largest, "largest op"), closed]
    if balanced > proven:
        bounds.append(LowerBound(balanced, "closure (min cut) and load balance"))
    return bounds
