"""Load balance: what some device must compute, however the ops are split.

Ops with one colocation id move together, as a *class* c of s(c, d) seconds on device d and b(c)
bytes of parameters and state, which a device holds for as long as it has the class. Splitting
classes fractionally, a linear programme:

    minimise t    where   sum over d of x(c, d) = 1                      for every class
                          sum over c of x(c, d) s(c, d) <= t             for every device
                          sum over c of x(c, d) b(c) <= capacity(d)      for every device

Its dual is what we trust. With any weights y >= 0 that sum to 1 and any prices z >= 0 of memory,

    max_d load(d) >= sum_d y_d load(d) + z_d (memory(d) - capacity(d))
                  >= sum over c of  min_d (y_d s(c, d) + z_d b(c))  -  sum_d z_d capacity(d)

so that neither the solver's tolerance nor what is done for its speed can spoil the proof: devices
that are alike are one *type* with a count, and classes of nearly the same proportions are merged
in the programme, while the proof sums every class exactly.

Bytes are those that no placement avoids: what is resident everywhere counts once, with its first
reader.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from dovetail.graph import Graph
from dovetail.simulator.flat import Float64

Int64 = NDArray[np.int64]

ROUNDING = 1e-9
"""Sums of floats round; a bound may not. Far above n * 2**-53 for every n that fits in memory."""
_FINEST = 50.0
"""Classes are merged where logarithms of their proportions agree to 1 / this."""
_MOST_ROWS = 20_000
"""Of the programme; beyond it proportions are rounded coarser."""


class Prices(NamedTuple):
    """Dual values: `weights` [devices] of loads, summing to 1, and seconds per byte [devices]."""

    weights: Float64
    seconds_per_byte: Float64


class _Types(NamedTuple):
    """Devices that are alike: first [types] an example, counts [types], of_device [devices]."""

    first: Int64
    counts: Int64
    of_device: Int64


def classes_of(graph: Graph) -> Int64:
    """[ops] ops with one colocation id are one class, others each their own, numbered by value. A
    source has the class of the op that writes it, else of its first reader."""
    own = np.arange(len(graph)) + int(graph.colocation.max(initial=-1)) + 1
    keys = np.where(graph.colocation >= 0, graph.colocation, own)
    is_source = graph.is_source
    from_source = is_source[graph.producers[graph.input_tensors]]
    sources, readers = graph.producers[graph.input_tensors][from_source], graph.readers[from_source]
    first = np.full(len(graph), len(graph))
    np.minimum.at(first, sources, readers)
    home = np.where(first < len(graph), first, np.arange(len(graph)))
    home = np.where(graph.residences >= 0, graph.residences, home)
    keys = np.where(is_source, np.where(home == np.arange(len(graph)), own, keys[home]), keys)
    return np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)


def class_seconds(of_op: Int64, seconds: Float64) -> Float64:
    """[classes, devices] summed seconds [ops, devices]; inf where an op may not be."""
    count = int(of_op.max(initial=-1)) + 1
    return np.stack([np.bincount(of_op, weights=c, minlength=count) for c in seconds.T], axis=1)


def load_balance_seconds(
    seconds: Float64, sizes: Float64 | None = None, capacities: Float64 | None = None
) -> float:
    """Seconds that some device must compute; classes [classes, devices] move whole, inf in a row
    means not there. With `sizes` [classes] and `capacities` [devices], bytes, also with memory."""
    return proven_seconds(
        seconds, load_balance_prices(seconds, sizes, capacities), sizes, capacities
    )


def proven_seconds(
    seconds: Float64,
    prices: Prices,
    sizes: Float64 | None = None,
    capacities: Float64 | None = None,
) -> float:
    """What `prices` prove, all but rounding: a bound, whoever found them."""
    burden = class_burdens(seconds, prices, sizes).sum() * (1 - ROUNDING)
    if capacities is not None:
        burden -= (prices.seconds_per_byte * capacities).sum() * (1 + ROUNDING)
    return max(0.0, float(burden))


def class_burdens(seconds: Float64, prices: Prices, sizes: Float64 | None = None) -> Float64:
    """[classes] the least that each adds to the weighted loads, wherever it goes."""
    with np.errstate(invalid="ignore"):  # 0 * inf: not there, whatever the weight
        weighted = seconds * prices.weights
    if sizes is not None:
        weighted = weighted + sizes[:, None] * prices.seconds_per_byte
    least: Float64 = np.where(np.isfinite(seconds), weighted, np.inf).min(axis=1)
    return least


def load_balance_prices(
    seconds: Float64, sizes: Float64 | None = None, capacities: Float64 | None = None
) -> Prices:
    """Prices that prove the most, by HiGHS; equal weights where it finds none."""
    devices = seconds.shape[1]
    equal = Prices(np.full(devices, 1 / devices), np.zeros(devices))
    if sizes is None or capacities is None:
        sizes, capacities = np.zeros(len(seconds)), np.full(devices, np.inf)
    burdens = (seconds.min(axis=1) > 0) | (sizes > 0)
    types = _types(seconds, capacities)
    rows = seconds[burdens][:, types.first]
    finite = np.isfinite(rows)
    if not (rows[finite] > 0).any():
        return equal
    most_seconds = float(np.where(finite, rows, 0).max(axis=1).sum())
    most_bytes = max(float(sizes.sum()), 1.0)
    merged = _merged(np.column_stack([rows / most_seconds, sizes[burdens] / most_bytes]))
    room = capacities[types.first] / most_bytes
    found = _duals(merged[:, :-1], merged[:, -1], types.counts, room)
    if found is None:
        return equal
    weights, per_byte = found
    total = float((weights * types.counts).sum())
    if not total > 0:
        return equal
    per_byte = per_byte * (most_seconds / most_bytes / total)
    return Prices((weights / total)[types.of_device], per_byte[types.of_device])


def _types(seconds: Float64, capacities: Float64) -> _Types:
    index: dict[tuple[bytes, float], int] = {}
    of_device = [
        index.setdefault((column.tobytes(), float(room)), len(index))
        for column, room in zip(seconds.T, capacities, strict=True)
    ]
    first = [of_device.index(t) for t in range(len(index))]
    return _Types(np.array(first), np.bincount(of_device), np.array(of_device))


def _duals(
    seconds: Float64, sizes: Float64, counts: Int64, room: Float64
) -> tuple[Float64, Float64] | None:
    """Dual values of loads and of memory [types]; None where no split fits."""
    count, types = seconds.shape
    row, kind = np.nonzero(np.isfinite(seconds))
    column = np.arange(len(row))
    time = len(row)  # the variable t
    shares = coo_array((np.ones(len(row)), (row, column)), shape=(count, time + 1))
    tight = np.flatnonzero(room < sizes.sum())  # where memory can matter at all
    memory_row = np.full(types, -1)
    memory_row[tight] = types + np.arange(len(tight))
    held = memory_row[kind] >= 0
    limits = coo_array(
        (
            np.concatenate([seconds[row, kind], -counts.astype(float), sizes[row[held]]]),
            (
                np.concatenate([kind, np.arange(types), memory_row[kind[held]]]),
                np.concatenate([column, np.full(types, time), column[held]]),
            ),
        ),
        shape=(types + len(tight), time + 1),
    )
    objective = np.zeros(time + 1)
    objective[-1] = 1.0
    available = np.concatenate([np.zeros(types), (counts * room)[tight]])
    found = linprog(  # type: ignore[call-overload]  # sparse matrices are fine, stubs differ
        objective, A_ub=limits, b_ub=available, A_eq=shares, b_eq=np.ones(count)
    )
    if found.ineqlin is None or found.ineqlin.marginals is None:
        return None
    duals = np.maximum(-found.ineqlin.marginals, 0.0)
    per_byte = np.zeros(types)
    per_byte[tight] = duals[types:]
    return duals[:types], per_byte


def _merged(rows: Float64) -> Float64:
    """Rows of nearly the same proportions summed: they split alike."""
    finite = np.isfinite(rows)
    most = np.where(finite, rows, 0.0).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(rows / most)  # <= 0; -inf: nothing
    ratio = np.where(finite, np.maximum(ratio, -20.0), 1.0)
    grain = _FINEST
    while True:
        keys = np.rint(ratio * grain).astype(np.int32)
        order = np.lexsort(keys.T)
        new = np.concatenate([[True], (keys[order][1:] != keys[order][:-1]).any(axis=1)])
        if new.sum() <= _MOST_ROWS or grain < 1:
            return np.add.reduceat(rows[order], np.flatnonzero(new), axis=0)
        grain /= 4
