"""Lower bounds: seconds that no placement beats, with the name of what proves them.

Critical path. The earliest end of op o on device d, if every predecessor were wherever suits o
best and no device or channel were ever busy:

    L(o, d) = c(o, d) + max over reads (o' -> o) of  min over d' of  L(o', d') + send(d', d)

With the simulator's own order of floating-point operations, which are monotone, the bound holds to
the last bit.

Load balance. However the ops are split, with weights y >= 0 that sum to 1,

    max_d load(d) >= sum_d y_d load(d) >= sum_o min_d y_d c(o, d)

Every y proves a bound; the best y are the dual values of the linear programme that splits ops
among devices fractionally. Colocated ops move as one. For speed the programme sees ops of nearly
the same proportions between devices merged; the proof sums every class exactly.

Plans with stages run ops together, which costs other than `Costs` says: no bound here covers them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from dovetail.costs import Costs
from dovetail.errors import NoDeviceError
from dovetail.graph import HOST, Graph
from dovetail.graph.records import csr_offsets
from dovetail.machine import Machine
from dovetail.simulator.compiling import inlined, kernel
from dovetail.simulator.flat import Flat, Float64, Int32, flatten

Bool = NDArray[np.bool_]

# Sums of floats round; a bound may not. Far above n * 2**-53 for every n that fits in memory.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class LowerBound:
    """No placement takes less than `seconds`; `proof` says why."""

    seconds: float
    proof: str


def lower_bound(
    graph: Graph,
    machine: Machine,
    costs: Costs,
    objective: str = "step",
    allowed: Bool | None = None,
) -> LowerBound:
    """The best bound we can prove on `objective`; `allowed` [ops, devices] narrows the choice.

    Raises `NoDeviceError` for an op that no device may run.
    """
    flat = flatten(graph, machine, costs)
    seconds = flat.compute_seconds.copy()
    if allowed is not None:
        seconds[~np.asarray(allowed, bool)] = np.inf
    seconds[graph.is_source] = 0.0
    stuck: Bool = np.asarray(~np.isfinite(seconds).any(axis=1))
    classes = _colocated(graph, seconds)
    stuck |= np.asarray(~np.isfinite(classes).any(axis=1))[_class_of(graph)]
    if stuck.any():
        raise NoDeviceError(graph.names[int(np.flatnonzero(stuck)[0])])
    bounds = [LowerBound(load_balance_seconds(classes), "load balance (LP)")]
    if objective == "step":
        bounds.append(LowerBound(critical_path_seconds(flat, seconds), "critical path"))
    else:
        largest = float(classes.min(axis=1).max(initial=0.0)) * (1 - _ROUNDING)
        bounds.append(LowerBound(largest, "largest op"))
    return max(bounds, key=lambda bound: bound.seconds)


def critical_path_seconds(flat: Flat, seconds: Float64) -> float:
    """Longest chain of ops and sends, each op on the device that suits the chain best."""
    ends = np.zeros((flat.ops, flat.devices))
    for op, home in zip(flat.sources.tolist(), flat.source_homes.tolist(), strict=True):
        if home == HOST:  # an input: on the host and nowhere else
            ends[op] = np.inf
            ends[op, flat.host] = 0.0
    befores = np.argsort(flat.control_targets, kind="stable").astype(np.int32)
    offsets = csr_offsets(flat.control_targets, flat.ops)
    owners = np.repeat(np.arange(flat.ops, dtype=np.int32), np.diff(flat.control_offsets))
    _earliest_ends(flat, seconds, offsets, owners[befores], ends)
    return float(ends.min(axis=1).max(initial=0.0, where=flat.is_source == 0))


@kernel
def _earliest_ends(
    flat: Flat, seconds: Float64, offsets: Int32, befores: Int32, ends: Float64
) -> None:
    """Fill `ends` [ops, devices] of ops that are no sources; `befores` is CSR by `offsets`."""
    for op in range(flat.ops):
        if flat.is_source[op]:
            continue
        for device in range(flat.devices):
            start = 0.0
            for i in range(flat.input_offsets[op], flat.input_offsets[op + 1]):
                tensor = flat.input_tensors[i]
                if not flat.resident[tensor]:
                    before = flat.producers[tensor]
                    size_bytes = flat.tensor_bytes[tensor]
                    start = max(start, _arrival(flat, ends[before], device, size_bytes))
            for i in range(offsets[op], offsets[op + 1]):
                start = max(start, _arrival(flat, ends[befores[i]], device, 0))
            ends[op, device] = start + seconds[op, device]


@inlined
def _arrival(flat: Flat, ends: Float64, device: int, size_bytes: int) -> float:
    """Earliest time that something could be on `device`, made anywhere."""
    earliest: float = ends[device]
    for there in range(flat.devices):
        if there == device:
            continue
        link, time = flat.link_of[there, device], ends[there]
        if link < 0:
            hop = flat.link_of[there, flat.host]
            time += flat.link_latencies[hop] + size_bytes / flat.link_bandwidths[hop]
            link = flat.link_of[flat.host, device]
        time += flat.link_latencies[link] + size_bytes / flat.link_bandwidths[link]
        earliest = min(earliest, time)
    return earliest


def load_balance_seconds(classes: Float64) -> float:
    """Seconds that some device must compute; `classes` [classes, devices] move whole.

    inf in a row means not there.
    """
    classes = classes[classes.min(axis=1) > 0]  # what is free somewhere burdens nobody
    if not len(classes):
        return 0.0
    weights = _dual_weights(_merged(classes))
    with np.errstate(invalid="ignore"):  # 0 * inf: not there, whatever the weight
        weighted = np.where(np.isfinite(classes), classes * weights, np.inf)
    return float(weighted.min(axis=1).sum()) * (1 - _ROUNDING)


def _dual_weights(rows: Float64) -> Float64:
    """[devices] weights that prove the most, by HiGHS; they sum to 1 at most."""
    count, devices = rows.shape
    scale = float(rows[np.isfinite(rows)].max())
    row, device = np.nonzero(np.isfinite(rows))
    column = np.arange(len(row))
    shares = coo_array((np.ones(len(row)), (row, column)), shape=(count, len(row) + 1))
    loads = coo_array(
        (
            np.concatenate([rows[row, device] / scale, -np.ones(devices)]),
            (
                np.concatenate([device, np.arange(devices)]),
                np.concatenate([column, np.full(devices, len(row))]),
            ),
        ),
        shape=(devices, len(row) + 1),
    )
    objective = np.zeros(len(row) + 1)
    objective[-1] = 1.0
    found = linprog(  # type: ignore[call-overload]  # sparse matrices are fine, stubs differ
        objective, A_ub=loads, b_ub=np.zeros(devices), A_eq=shares, b_eq=np.ones(count)
    )
    duals = np.zeros(devices) if found.ineqlin is None else -found.ineqlin.marginals
    weights = np.maximum(duals, 0.0)
    return weights / weights.sum() if weights.sum() > 0 else np.full(devices, 1 / devices)


def _merged(classes: Float64) -> Float64:
    """Rows of nearly the same proportions (1 part in 50) summed: they split alike."""
    with np.errstate(divide="ignore", over="ignore"):
        ratio = np.log(classes / classes.min(axis=1, keepdims=True)) * 50
    keys = np.where(np.isfinite(ratio), np.rint(np.minimum(ratio, 1e6)), -1).astype(np.int32)
    order = np.lexsort(keys.T)
    new = np.concatenate([[True], (keys[order][1:] != keys[order][:-1]).any(axis=1)])
    return np.add.reduceat(classes[order], np.flatnonzero(new), axis=0)


def _class_of(graph: Graph) -> NDArray[np.int64]:
    """[ops] ops with one colocation id are one class, others each their own."""
    own = np.arange(len(graph)) + int(graph.colocation.max(initial=-1)) + 1
    keys = np.where(graph.colocation >= 0, graph.colocation, own)
    return np.unique(keys, return_inverse=True)[1].reshape(-1)


def _colocated(graph: Graph, seconds: Float64) -> Float64:
    """[classes, devices] seconds of each class on each device."""
    class_of = _class_of(graph)
    classes = np.zeros((int(class_of.max(initial=-1)) + 1, seconds.shape[1]))
    np.add.at(classes, class_of, seconds)
    return classes
