"""Proves lower bounds: seconds that no placement beats, with the name of the proof.

    step      critical path, without and with forced sends; load balance; head, load and tail
    load      load balance; closure; both; largest op
    latency   critical path without sends and queues

Load balance takes memory into account if memory is scarce. Each bound holds for every placement
that the user permits. Only ops with one colocation id move together, and sources with the ops that
write them.

Plans with stages run ops together, which costs something else than `Costs` says, so no bound here
covers them.

Cost: O(reads x devices^2 + ops x log ops), and a linear programme over merged classes. Closure is
left out beyond `MOST_CLOSURE_CLASSES` classes.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

from dovetail.costs import Costs
from dovetail.errors import NoDeviceError
from dovetail.graph import HOST, Graph
from dovetail.graph.records import csr_offsets
from dovetail.machine import Machine
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.critical_path import (
    earliest_ends,
    head_load_tail,
    longest_seconds,
    without_sends,
)
from dovetail.simulator.flat import Float64, Int8, Int32, Int64, StepModel, flatten
from dovetail.simulator.loads import LoadModel, load_model, resident_bytes

# ── Earliest ends with forced sends: what would arrive too late from elsewhere is computed here ──
#
# Paper: Papadimitriou and Yannakakis, "Towards an architecture-independent analysis of parallel
# algorithms", SIAM Journal on Computing 19, 1990, https://doi.org/10.1137/0219021: their bound on
# start times. For op v on device d, let away(u) be a time before which v does not start if its
# ancestor u is *not* on d:
#
#     away(u) = max over reads (u -> x) of   arrive(u, x)                              if x is v
#                                            min { arrive(u, x) + c(x, d) + path(x)    x is on d,
#                                                  away(x) }                           x is not
#
#     arrive(u, x) = min over d' != d of end(u, d') + send(d', d)
#     path(x)      = longest chain of least seconds between x and v
#
# If v starts at t, every u with away(u) > t is on d. One op runs there at a time, so t is at least
# `serial`, the end of these ops in order of their own earliest starts on d. The least t that meets
# both conditions is
#
#     start(v, d) = min over k of  max { serial(the k ops of largest away),  the next largest away }
#
#                      ┌ b ┐       b and c together on d: 2 s; one of them away: 1 s and a send
#                    a ┤   ├ v     bound without sends: 1 s
#                      └ c ┘
#
# Differences: ops, devices and sends may differ from each other, and ops are not copied. At most
# `MOST_FORCED` ancestors are looked at for each op and device, the nearest ones.
#
# Cost: O(ops x devices x (MOST_FORCED^2 + reads of MOST_FORCED ops)).

MOST_FORCED = 64
"""The search looks at this many ancestors of an op at most, the nearest ones."""


class WaitEdges(NamedTuple):
    """Which op waits for which, in CSR form by the op that waits.

    An op has a higher index than the ops that it waits for.

    offsets             [ops + 1] into befores and sizes
    befores             [edges] op that is waited for
    sizes               [edges] bytes that travel
    latency_seconds     [devices, devices] of an empty send from row to column, both hops of two
    seconds_per_byte    [devices, devices]
    twins               [devices] first device that is like this one; all ends are equal on both
    """

    offsets: Int32
    befores: Int32
    sizes: Float64
    latency_seconds: Float64
    seconds_per_byte: Float64
    twins: Int32


class _AncestorWorkspace(NamedTuple):
    """What is known of the ancestors of one op on one device.

    stamps, away, path       [ops] the others are valid where `stamps` has this op and device
    front                    [] ancestors that were seen and not yet looked at, ascending
    of_away, starts, seconds [] away, earliest start and seconds of those looked at, by falling away
    order                    [] the first of these, by start
    """

    stamps: Int64
    away: Float64
    path: Float64
    front: Int32
    of_away: Float64
    starts: Float64
    seconds: Float64
    order: Int32


def forced_ends(flat: StepModel, seconds: Float64) -> Float64:
    """[ops, devices] earliest end of each op on each device, up to rounding."""
    ends = np.zeros((flat.ops, flat.devices))
    inputs = flat.sources[flat.source_homes == HOST]
    ends[inputs] = np.inf
    ends[inputs, flat.host] = 0.0
    edges = _edges(flat, seconds)
    _fill(edges, flat.is_source, seconds, seconds.min(axis=1), _room(flat.ops), ends)
    return ends


def forced_tails(flat: StepModel, seconds: Float64) -> Float64:
    """[ops, devices] least seconds from each op's end there to the step's end, up to rounding.

    These are the earliest starts of the same step run backwards.
    """
    edges = _edges(flat, seconds)
    owners = np.repeat(np.arange(flat.ops, dtype=np.int32), np.diff(edges.offsets))
    order = np.argsort(flat.ops - 1 - edges.befores, kind="stable")
    backwards = WaitEdges(
        csr_offsets(flat.ops - 1 - edges.befores, flat.ops),
        np.asarray(flat.ops - 1 - owners[order], np.int32),
        edges.sizes[order],
        np.ascontiguousarray(edges.latency_seconds.T),
        np.ascontiguousarray(edges.seconds_per_byte.T),
        edges.twins,
    )
    ends = np.zeros((flat.ops, flat.devices))
    turned = np.ascontiguousarray(seconds[::-1])
    is_source = np.ascontiguousarray(flat.is_source[::-1])
    _fill(backwards, is_source, turned, turned.min(axis=1), _room(flat.ops), ends)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(seconds), ends[::-1] - seconds, np.inf)


def _room(ops: int) -> _AncestorWorkspace:
    """A workspace for one op at a time."""
    return _AncestorWorkspace(
        np.full(ops, -1, np.int64),
        np.zeros(ops),
        np.zeros(ops),
        np.zeros(ops, np.int32),
        np.zeros(MOST_FORCED),
        np.zeros(MOST_FORCED),
        np.zeros(MOST_FORCED),
        np.zeros(MOST_FORCED, np.int32),
    )


def _edges(flat: StepModel, seconds: Float64) -> WaitEdges:
    """The edges of reads and of control, those of what is resident everywhere left out."""
    read = flat.input_tensors
    readers = np.repeat(np.arange(flat.ops, dtype=np.int32), np.diff(flat.input_offsets))
    moves = flat.resident[read] == 0
    first = np.repeat(np.arange(flat.ops, dtype=np.int32), np.diff(flat.control_offsets))
    afters = np.concatenate([readers[moves], flat.control_targets])
    befores = np.concatenate([flat.producers[read[moves]], first])
    sizes = np.concatenate([flat.sent_bytes[read[moves]], np.zeros(len(first))])
    order = np.argsort(afters, kind="stable")
    latency, per_byte = (
        _by_pair(flat, of_link) for of_link in (flat.link_latencies, 1 / flat.link_bandwidths)
    )
    return WaitEdges(
        csr_offsets(afters, flat.ops),
        np.asarray(befores[order], np.int32),
        sizes[order],
        latency,
        per_byte,
        _twins(flat.host, seconds, latency, per_byte),
    )


def _twins(host: int, seconds: Float64, *of_pairs: Float64) -> Int32:
    """[devices] the first device that could change places with each without any other change."""
    devices = seconds.shape[1]
    twins = np.arange(devices, dtype=np.int32)
    for device in range(devices):
        for other in range(device):
            swapped = np.arange(devices)
            swapped[[device, other]] = other, device
            alike = host not in (device, other) and bool(
                (seconds[:, device] == seconds[:, other]).all()
                and all((of[np.ix_(swapped, swapped)] == of).all() for of in of_pairs)
            )
            if alike:
                twins[device] = other
                break
    return twins


def _by_pair(flat: StepModel, of_link: Float64) -> Float64:
    """[devices, devices] sums of `of_link` over the hops from row to column; 0 on the diagonal."""
    by_pair = np.zeros((flat.devices, flat.devices))
    for source in range(flat.devices):
        for destination in range(flat.devices):
            direct = flat.link_of[source, destination]
            if direct >= 0:
                by_pair[source, destination] = of_link[direct]
            elif source != destination:
                hops = flat.link_of[source, flat.host], flat.link_of[flat.host, destination]
                by_pair[source, destination] = of_link[hops[0]] + of_link[hops[1]]
    return by_pair


@kernel
def _fill(
    edges: WaitEdges,
    is_source: Int8,
    seconds: Float64,
    least: Float64,
    ancestors: _AncestorWorkspace,
    ends: Float64,
) -> None:
    """Fill `ends` [ops, devices], except for sources; `least` [ops] are seconds at best."""
    for op in range(len(seconds)):
        if is_source[op]:
            continue
        for device in range(seconds.shape[1]):
            if edges.twins[device] < device:
                ends[op, device] = ends[op, edges.twins[device]]
            elif seconds[op, device] < np.inf:
                start = _start(edges, seconds, least, ancestors, ends, op, device)
                ends[op, device] = start + seconds[op, device]
            else:
                ends[op, device] = np.inf


@inlined
def _arrival(edges: WaitEdges, ends: Float64, edge: int, device: int) -> float:
    """The earliest time that what an edge carries can be on `device`, if it was made elsewhere."""
    before, size = edges.befores[edge], edges.sizes[edge]
    earliest = np.inf
    for source in range(ends.shape[1]):
        if source != device:
            time = ends[before, source] + edges.latency_seconds[source, device]
            earliest = min(earliest, time + size * edges.seconds_per_byte[source, device])
    return earliest


@kernel
def _start(
    edges: WaitEdges,
    seconds: Float64,
    least: Float64,
    ancestors: _AncestorWorkspace,
    ends: Float64,
    op: int,
    device: int,
) -> float:
    """The earliest start of an op on a device, by the recurrence above."""
    # `base` bounds the start even if every op it reads is where that suits it best.
    base, waiting = 0.0, 0
    stamp = op * ends.shape[1] + device
    for edge in range(edges.offsets[op], edges.offsets[op + 1]):
        away = _arrival(edges, ends, edge, device)
        base = max(base, min(away, ends[edges.befores[edge], device]))
        waiting = _note(ancestors, stamp, edges.befores[edge], away, 0.0, waiting)
    count = 0
    while waiting and count < MOST_FORCED:
        # The highest index goes first. All ops that read it were looked at by then, so its `away`
        # and `path` are final.
        waiting -= 1
        near = ancestors.front[waiting]
        # An op that may be away up to `base` forces nothing, nor do its ancestors through it.
        if ancestors.away[near] <= base:
            continue
        _insert(
            ancestors,
            count,
            ancestors.away[near],
            ends[near, device] - seconds[near, device],
            seconds[near, device],
        )
        count += 1
        device_path = seconds[near, device] + ancestors.path[near]
        for edge in range(edges.offsets[near], edges.offsets[near + 1]):
            away = min(_arrival(edges, ends, edge, device) + device_path, ancestors.away[near])
            path = least[near] + ancestors.path[near]
            waiting = _note(ancestors, stamp, edges.befores[edge], away, path, waiting)
    return max(base, _crossing(ancestors, count))


@inlined
def _note(
    ancestors: _AncestorWorkspace, stamp: int, op: int, away: float, path: float, waiting: int
) -> int:
    """Raise `away` and `path` of an op; put a new op into the front, and return its length."""
    if ancestors.stamps[op] == stamp:
        ancestors.away[op] = max(ancestors.away[op], away)
        ancestors.path[op] = max(ancestors.path[op], path)
        return waiting
    ancestors.stamps[op] = stamp
    ancestors.away[op], ancestors.path[op] = away, path
    place = waiting
    while place > 0 and ancestors.front[place - 1] > op:
        ancestors.front[place] = ancestors.front[place - 1]
        place -= 1
    ancestors.front[place] = op
    return waiting + 1


@inlined
def _insert(
    ancestors: _AncestorWorkspace, count: int, away: float, start: float, seconds: float
) -> None:
    """Insert an op into the `count` ops that stand by falling `of_away`."""
    place = count
    while place > 0 and ancestors.of_away[place - 1] < away:
        ancestors.of_away[place] = ancestors.of_away[place - 1]
        ancestors.starts[place] = ancestors.starts[place - 1]
        ancestors.seconds[place] = ancestors.seconds[place - 1]
        place -= 1
    ancestors.of_away[place] = away
    ancestors.starts[place] = start
    ancestors.seconds[place] = seconds


@kernel
def _crossing(ancestors: _AncestorWorkspace, count: int) -> float:
    """The least over k of the larger of the first k ops' `serial` and the next op's `of_away`."""
    earliest = np.inf
    for k in range(count + 1):
        serial = 0.0
        for i in range(k):
            serial = (
                max(serial, ancestors.starts[ancestors.order[i]])
                + ancestors.seconds[ancestors.order[i]]
            )
        following = ancestors.of_away[k] if k < count else 0.0
        earliest = min(earliest, max(serial, following))
        # `serial` only grows with k, so no later k gives less.
        if serial >= following:
            break
        place = k
        while place > 0 and ancestors.starts[ancestors.order[place - 1]] > ancestors.starts[k]:
            ancestors.order[place] = ancestors.order[place - 1]
            place -= 1
        ancestors.order[place] = k
    return earliest


# ── Load balance: what some device must compute, however the ops are split ──────────────────────
#
# Ops with one colocation id move together, as a *class* c. It takes s(c, d) seconds on device d
# and b(c) bytes of parameters and state, which a device holds for as long as it has the class. If
# classes could be split, the least load would be that of a linear programme:
#
#     minimise t    where   sum over d of x(c, d) = 1                      for every class
#                           sum over c of x(c, d) s(c, d) <= t             for every device
#                           sum over c of x(c, d) b(c) <= capacity(d)      for every device
#
# The proof rests on its dual. With any weights y >= 0 that sum to 1 and any prices z >= 0 of
# memory,
#
#     max_d load(d) >= sum_d y_d load(d) + z_d (memory(d) - capacity(d))
#                   >= sum over c of  min_d (y_d s(c, d) + z_d b(c))  -  sum_d z_d capacity(d)
#
# So neither the solver's tolerance nor the shortcuts for its speed can spoil the proof. In the
# programme, devices that are alike form one *type* with a count, and classes of nearly the same
# proportions are merged. The proof sums every class exactly.
#
# Bytes are those that no placement avoids: what is resident everywhere counts once, with its first
# reader.


ROUNDING = 1e-9
"""Bounds are lowered by this share, because sums of floats round. It is far above n * 2**-53 for
every n that fits in memory."""
_FINEST = 50.0
"""Classes are merged if the logarithms of their proportions agree to within 1 / this."""
_MOST_ROWS = 20_000
"""The programme has at most about this many rows. With more classes, proportions are rounded more
coarsely."""


class Prices(NamedTuple):
    """Dual values: `weights` [devices] of loads, summing to 1, and seconds per byte [devices]."""

    weights: Float64
    seconds_per_byte: Float64


def classes_of(graph: Graph) -> Int64:
    """[ops] number of each op's class.

    Ops with one colocation id form a class, and every other op is a class of its own. A source has
    the class of the op that writes it, or else of its first reader.
    """
    own_class = np.arange(len(graph)) + int(graph.colocation.max(initial=-1)) + 1
    keys = np.where(graph.colocation >= 0, graph.colocation, own_class)
    is_source = graph.is_source
    from_source = is_source[graph.producers[graph.input_tensors]]
    sources, readers = graph.producers[graph.input_tensors][from_source], graph.readers[from_source]
    first = np.full(len(graph), len(graph))
    np.minimum.at(first, sources, readers)
    home = np.where(first < len(graph), first, np.arange(len(graph)))
    home = np.where(graph.residences >= 0, graph.residences, home)
    keys = np.where(is_source, np.where(home == np.arange(len(graph)), own_class, keys[home]), keys)
    return np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)


def class_seconds(of_op: Int64, seconds: Float64) -> Float64:
    """[classes, devices] sums of seconds [ops, devices]; inf where an op may not be."""
    count = int(of_op.max(initial=-1)) + 1
    return np.stack([np.bincount(of_op, weights=c, minlength=count) for c in seconds.T], axis=1)


def load_balance_seconds(
    seconds: Float64, sizes: Float64 | None = None, capacities: Float64 | None = None
) -> float:
    """Seconds that some device must compute, for every placement of whole classes.

    `seconds` is [classes, devices]; inf means that the class may not be there. If `sizes` [classes]
    and `capacities` [devices] are given, in bytes, memory counts too.
    """
    return proven_seconds(
        seconds, load_balance_prices(seconds, sizes, capacities), sizes, capacities
    )


def proven_seconds(
    seconds: Float64,
    prices: Prices,
    sizes: Float64 | None = None,
    capacities: Float64 | None = None,
) -> float:
    """The bound that `prices` prove, lowered for rounding. Any prices prove a bound."""
    burden = class_burdens(seconds, prices, sizes).sum() * (1 - ROUNDING)
    if capacities is not None:
        burden -= (prices.seconds_per_byte * capacities).sum() * (1 + ROUNDING)
    return max(0.0, float(burden))


def class_burdens(seconds: Float64, prices: Prices, sizes: Float64 | None = None) -> Float64:
    """[classes] the least that each class adds to the weighted loads, wherever it goes."""
    # Where a class may not be, a weight of 0 gives 0 * inf; the mask below removes it.
    with np.errstate(invalid="ignore"):
        weighted = seconds * prices.weights
    if sizes is not None:
        weighted = weighted + sizes[:, None] * prices.seconds_per_byte
    least: Float64 = np.where(np.isfinite(seconds), weighted, np.inf).min(axis=1)
    return least


def load_balance_prices(
    seconds: Float64, sizes: Float64 | None = None, capacities: Float64 | None = None
) -> Prices:
    """The prices that prove the most, found by HiGHS; equal weights if it finds none."""
    devices = seconds.shape[1]
    equal = Prices(np.full(devices, 1 / devices), np.zeros(devices))
    if sizes is None or capacities is None:
        sizes, capacities = np.zeros(len(seconds)), np.full(devices, np.inf)
    burdens = (seconds.min(axis=1) > 0) | (sizes > 0)
    # Devices of one type have equal seconds for every class, and equal memory: `type_of` [devices],
    # and the number and the first device of each type.
    index: dict[tuple[bytes, float], int] = {}
    type_of = [
        index.setdefault((column.tobytes(), float(room)), len(index))
        for column, room in zip(seconds.T, capacities, strict=True)
    ]
    counts, first = np.bincount(type_of), np.array([type_of.index(t) for t in range(len(index))])
    rows = seconds[burdens][:, first]
    finite = np.isfinite(rows)
    # Like devices with room for everything have equal prices, and no programme says better.
    alike = len(counts) == 1 and float(capacities[first[0]]) >= float(sizes.sum())
    if alike or not (rows[finite] > 0).any():
        return equal
    # Seconds and bytes are scaled to at most 1, because they differ by many orders of magnitude.
    most_seconds = float(np.where(finite, rows, 0).max(axis=1).sum())
    most_bytes = max(float(sizes.sum()), 1.0)
    merged = _merge_rows(np.column_stack([rows / most_seconds, sizes[burdens] / most_bytes]))
    duals = _duals(merged[:, :-1], merged[:, -1], counts, capacities[first] / most_bytes)
    if duals is None:
        return equal
    weights, per_byte = duals
    total = float((weights * counts).sum())
    if not total > 0:
        return equal
    per_byte = per_byte * (most_seconds / most_bytes / total)
    return Prices((weights / total)[type_of], per_byte[type_of])


def _duals(
    seconds: Float64, sizes: Float64, counts: Int64, room: Float64
) -> tuple[Float64, Float64] | None:
    """Dual values [types] of loads and of memory; None if the solver finds none."""
    count, types = seconds.shape
    row, kind = np.nonzero(np.isfinite(seconds))
    column = np.arange(len(row))
    # The variables are the shares x(c, type), in order of `row` and `kind`, and last the time t.
    time = len(row)
    shares = coo_array((np.ones(len(row)), (row, column)), shape=(count, time + 1))
    # Memory can only matter on a device that could not hold everything.
    tight = np.flatnonzero(room < sizes.sum())
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
    # Most machines need no programme, and the import takes a third of a second.
    from scipy.optimize import linprog

    solution = linprog(  # type: ignore[call-overload]  # sparse matrices are fine, stubs differ
        objective, A_ub=limits, b_ub=available, A_eq=shares, b_eq=np.ones(count)
    )
    if solution.ineqlin is None or solution.ineqlin.marginals is None:
        return None
    # The solver's marginals of upper limits are negative or 0, up to its tolerance.
    duals = np.maximum(-solution.ineqlin.marginals, 0.0)
    per_byte = np.zeros(types)
    per_byte[tight] = duals[types:]
    return duals[:types], per_byte


def _merge_rows(rows: Float64) -> Float64:
    """Sums of rows of nearly the same proportions, because such classes split alike."""
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


# ── Closure: with a group, its device must also have whatever costs more to send than to compute ─
#
# The device d that has group g has some set S of groups with it. It pays for the work of S, for
# every net that comes into S, and for every net that leaves S:
#
#     load(d) >= min over S with g in S of
#                sum over h in S of work(h, d) + sum of in(net, d) + sum of out(net, d)
#
# Each sum is a cut in a directed graph (Picard, "Maximal Closure of a Graph and Applications to
# Combinatorial Problems", Management Science 22, 1976; nets as in Lawler, "Cutsets and Partitions
# of Hypergraphs", Networks 3, 1973), so the minimum is a maximum flow from g to the sink:
#
#     h ──work──► sink            h is in S: its work
#     reader ──∞──► ◯ ──in──► source of the net        a reader is in S, the source is not
#     source of the net ──out──► ◯ ──∞──► reader       the source is in S, a reader is not
#
# Every plan has g somewhere, so the largest load is at least the largest over g of the least cut
# over devices. In a plan whose largest load is below T, no group is on a device where its cut is T
# or more. So if load balance over the devices that are left reaches T, there is no such plan.
#
# Differences: a send counts by the fastest link of its device. Capacities are whole numbers,
# rounded down, for scipy's maximum flow.


_WHOLE = 2**30 - 1
"""The capacity that stands for infinity, and for `top` seconds and more."""
_MOST_VISITS = 4_000_000
"""Flows are computed until nodes times flows reaches this, which takes some seconds."""


class DeviceNets(NamedTuple):
    """Work and sends as one kind of device sees them.

    work_seconds              [groups] inf: the group may not be there
    in_seconds, out_seconds   [nets] the least that the device pays to read, or to send, a net once
    copies                    number of devices of this kind
    """

    work_seconds: Float64
    in_seconds: Float64
    out_seconds: Float64
    capacity_bytes: float
    copies: int


class Closures(NamedTuple):
    """The closure bounds of a load model.

    kinds          the kinds of devices
    of_device      [devices] index of each device's kind; -1: its load does not count
    cuts_seconds   [groups, kinds] least load of a device of that kind that has the group
    """

    kinds: list[DeviceNets]
    of_device: Int64
    cuts_seconds: Float64


def closures(model: LoadModel, at_least: float = 0.0) -> Closures:
    """The closure bounds of all groups.

    Cuts are computed for groups that could load a device by more than `at_least` seconds, the
    heaviest first, for as long as `_MOST_VISITS` allows. For all others the bound is their work.
    """
    kinds, of_device = kinds_of_devices(model)
    cuts = np.stack([kind.work_seconds for kind in kinds], axis=1)
    most_cuts = np.stack([own_seconds(model, kind) for kind in kinds], axis=1)
    # A group without sends has a cut equal to its work, which is known already.
    most_cuts[most_cuts <= cuts * (1 + ROUNDING)] = -np.inf
    most_cuts[~np.isfinite(cuts) | (most_cuts <= at_least)] = -np.inf
    top = float(most_cuts.max(initial=-np.inf))
    if top > 0:
        networks = [_network(model, kind, top) for kind in kinds]
        flows = max(1, _MOST_VISITS // networks[0].shape[0])
        order = np.argsort(-most_cuts, axis=None, kind="stable")[:flows]
        for group, kind in zip(*np.unravel_index(order, most_cuts.shape), strict=True):
            if most_cuts[group, kind] > 0:
                # The least cut between the group and the sink.
                sink = networks[kind].shape[0] - 1
                flow = maximum_flow(networks[kind], int(group), sink).flow_value
                least = float(flow) * (top / _WHOLE) * (1 - ROUNDING)
                cuts[group, kind] = max(cuts[group, kind], least)
    return Closures(kinds, of_device, cuts * (1 - ROUNDING))


def closure_seconds(closed_groups: Closures) -> float:
    """Seconds that the load of some device reaches in every placement of the groups."""
    return float(closed_groups.cuts_seconds.min(axis=1).max(initial=0.0))


def closure_balance_seconds(model: LoadModel, closed_groups: Closures, proven: float) -> float:
    """As `closure_seconds`, joined with load balance; never less than `proven`, a bound already.

    A group that is too much for one kind of device burdens another kind. The bound is the largest T
    such that load balance reaches T if groups are kept off the devices on which their cut reaches
    T. It is found by bisection, to 1 in 10,000 of the largest cut.
    """
    devices = np.flatnonzero(closed_groups.of_device >= 0)
    cuts = closed_groups.cuts_seconds[:, closed_groups.of_device[devices]]
    work, room = model.work_seconds[:, devices], model.capacities[devices]
    low, high = proven, float(cuts.max(initial=0.0, where=np.isfinite(cuts)))
    grain = 1e-4 * high
    while high - low > grain:
        middle = low + (high - low) / 2
        left = np.where(cuts < middle, work, np.inf)
        stuck = not np.isfinite(left).any(axis=1).all()
        if stuck or load_balance_seconds(left, model.resident_bytes, room) >= middle:
            low = middle
        else:
            high = middle
    return low


def kinds_of_devices(model: LoadModel) -> tuple[list[DeviceNets], Int64]:
    """(kinds of the devices that count, [devices] kind of each device or -1 if it does not count).

    Devices of one kind have equal work, sends and memory.
    """
    kinds: dict[tuple[object, ...], DeviceNets] = {}
    of_device = np.full(model.devices, -1)
    for device in np.flatnonzero(model.counted).tolist():
        columns = model.work_seconds[:, device].copy(), *_net_seconds(model, device)
        room = float(model.capacities[device])
        key = room, *(column.tobytes() for column in columns)
        alike = kinds.get(key)
        kinds[key] = DeviceNets(*columns, room, alike.copies + 1 if alike else 1)
        of_device[device] = list(kinds).index(key)
    return list(kinds.values()), of_device


def own_seconds(model: LoadModel, kind: DeviceNets) -> Float64:
    """[groups] load of a device of this kind that has the group and nothing else."""
    owners = np.repeat(np.arange(len(model.net_sources)), np.diff(model.net_offsets))
    seconds = kind.work_seconds + np.bincount(
        model.net_targets, weights=kind.in_seconds[owners], minlength=model.groups
    )
    is_made = model.net_sources >= 0
    return seconds + np.bincount(
        model.net_sources[is_made], weights=kind.out_seconds[is_made], minlength=model.groups
    )


def _net_seconds(model: LoadModel, device: int) -> tuple[Float64, Float64]:
    """[nets] least seconds of one hop into the device and of one out of it."""

    def hop(source: int, destination: int) -> Float64:
        latency = float(model.latency_seconds[source, destination])
        per_byte = float(model.seconds_per_byte[source, destination])
        return model.net_sends * latency + model.net_bytes * per_byte

    nets = len(model.net_sources)
    elsewhere = [d for d in range(model.devices) if d != device]
    comes = [hop(d, device) for d in elsewhere if model.linked[d, device]]
    goes = [hop(device, d) for d in elsewhere if model.linked[device, d]]
    zero = np.zeros(nets)
    into = np.min(comes, axis=0) if comes else zero
    out = np.min(goes, axis=0) if goes else zero
    from_host = zero if device == model.host else hop(model.host, device)
    return np.where(model.net_sources < 0, from_host, into), out


def _network(model: LoadModel, kind: DeviceNets, top: float) -> csr_array:
    """The capacities of the graph drawn above.

    Its nodes are the groups, two for each net, and the sink, which is last. All capacities of `top`
    seconds or more count as infinite.
    """
    groups, nets = model.groups, len(model.net_sources)
    owners = np.repeat(np.arange(nets), np.diff(model.net_offsets))
    readers = model.net_targets
    came, gone, sink = groups + np.arange(nets), groups + nets + np.arange(nets), groups + 2 * nets
    made_nets = np.flatnonzero(model.net_sources >= 0)
    whole = np.full(len(readers), np.inf)
    home = np.where(model.net_sources >= 0, model.net_sources, sink)
    of_made = np.flatnonzero(model.net_sources[owners] >= 0)
    arcs = [
        (np.arange(groups), np.full(groups, sink), kind.work_seconds),
        (readers, came[owners], whole),
        (came, home, kind.in_seconds),
        (model.net_sources[made_nets], gone[made_nets], kind.out_seconds[made_nets]),
        (gone[owners[of_made]], readers[of_made], whole[: len(of_made)]),
    ]
    tails, heads, seconds = (np.concatenate(part) for part in zip(*arcs, strict=True))
    capacity = np.minimum(seconds * (_WHOLE / top), _WHOLE).astype(np.int32)
    is_open = capacity > 0
    ends = tails[is_open].astype(np.int32), heads[is_open].astype(np.int32)
    return coo_array((capacity[is_open], ends), shape=(sink + 1, sink + 1)).tocsr()


# ── The bounds of each objective ────────────────────────────────────────────────────────────────

Bool = NDArray[np.bool_]
MOST_CLOSURE_CLASSES = 20_000
"""With more classes than this the closure bounds are left out, because they would take too long."""


@dataclass(frozen=True)
class LowerBound:
    """A bound: no placement takes less than `seconds`, and `proof` names the reason."""

    seconds: float
    proof: str


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
    """Every bound on `objective` that `lower_bound` chooses from, with its arguments and errors."""
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
    if objective == "latency":
        path = longest_seconds(flat, earliest_ends(*without_sends(flat, seconds)))
        return [LowerBound(path, "critical path")]

    # Load balance, also with memory if a device may be too small.
    memory = [device.memory_bytes for device in machine.devices]
    room = np.array(memory if capacities is None else capacities, np.float64)
    sizes = resident_bytes(graph, of_op, len(classes))
    plain = load_balance_prices(classes)
    bounds = [LowerBound(proven_seconds(classes, plain), "load balance (LP)")]
    if sizes.sum() > room.min():
        prices = load_balance_prices(classes, sizes, room)
        proven = proven_seconds(classes, prices, sizes, room)
        bounds.append(LowerBound(proven, "load balance with memory (LP)"))

    # On one device nothing can be above the sum.
    if objective == "step" and flat.devices == 1:
        return bounds
    if objective == "step":
        path = longest_seconds(flat, earliest_ends(flat, seconds))
        ops = np.flatnonzero(flat.is_source == 0)
        ends, tails = forced_ends(flat, seconds)[ops], forced_tails(flat, seconds)[ops]
        seconds = seconds[ops]
        # Where an op may not be, this is inf - inf; the mask gives inf.
        with np.errstate(invalid="ignore"):
            starts = np.where(np.isfinite(seconds), ends - seconds, np.inf)
        forced = float((ends + tails).min(axis=1).max(initial=0.0))
        burdens = class_burdens(seconds, load_balance_prices(seconds))
        window = head_load_tail(starts.min(axis=1), burdens, tails.min(axis=1))
        return [
            *bounds,
            LowerBound(path, "critical path"),
            LowerBound(forced * (1 - ROUNDING), "critical path with forced sends"),
            LowerBound(window * (1 - ROUNDING), "head, load and tail"),
        ]

    # The objective is load.
    largest = float(classes.min(axis=1).max(initial=0.0)) * (1 - ROUNDING)
    bounds.append(LowerBound(largest, "largest op"))
    if len(classes) > MOST_CLOSURE_CLASSES:
        return bounds
    model = load_model(
        graph,
        machine,
        replace(costs, compute_seconds=seconds),
        group_of=of_op,
        allowed=np.isfinite(classes),
        capacities=room.astype(np.int64),
    )
    proven = max(bound.seconds for bound in bounds)
    closed_groups = closures(model, proven)
    bounds.append(LowerBound(closure_seconds(closed_groups), "closure (min cut)"))
    proven = max(bound.seconds for bound in bounds)
    balanced = closure_balance_seconds(model, closed_groups, proven)
    if balanced > proven:
        bounds.append(LowerBound(balanced, "closure (min cut) and load balance"))
    return bounds
