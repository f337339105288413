"""Earliest ends that count sends: what arrives too late from elsewhere was computed here.

Paper: Papadimitriou and Yannakakis, "Towards an architecture-independent analysis of parallel
algorithms", SIAM Journal on Computing 19, 1990, https://doi.org/10.1137/0219021: their bound on
start times. For op v on device d, let away(u) be a time before which v does not start if its
ancestor u is *not* on d:

    away(u) = max over reads (u -> x) of   arrive(u, x)                              if x is v
                                           min { arrive(u, x) + c(x, d) + path(x)    x is on d,
                                                 away(x) }                           x is not

    arrive(u, x) = min over d' != d of end(u, d') + send(d', d)
    path(x)      = longest chain of least seconds between x and v

If v starts at t, every u with away(u) > t is on d, where one op runs at a time: t is no less than
`serial`, the end of these ops in order of their own earliest starts there. The least t that is no
less than both is

    start(v, d) = min over k of  max { serial(the k ops of largest away),  the next largest away }

                     ┌ b ┐       b and c together on d: 2 s; one of them away: 1 s and a send
                   a ┤   ├ v     without sends counted: 1 s
                     └ c ┘

Differences: ops, devices and sends that are unlike, and no copies of ops. At most `MOST_FORCED`
ancestors are looked at for each op and device, those nearest to it.

Cost: O(ops x devices x (MOST_FORCED^2 + reads of MOST_FORCED ops)).
"""

from typing import NamedTuple

import numpy as np

from dovetail.graph import HOST
from dovetail.graph.records import csr_offsets
from dovetail.simulator.compiling import inlined, kernel
from dovetail.simulator.flat import Flat, Float64, Int8, Int32, Int64

MOST_FORCED = 64


class Edges(NamedTuple):
    """Who waits for whom, with each op after those it waits for. CSR by op.

    offsets             [ops + 1] into befores and sizes
    befores             [edges] op that is waited for
    sizes               [edges] bytes that travel
    latency_seconds     [devices, devices] of an empty send from row to column, both hops of two
    seconds_per_byte    [devices, devices]
    twins               [devices] first device that is like this one: all ends there are the same
    """

    offsets: Int32
    befores: Int32
    sizes: Float64
    latency_seconds: Float64
    seconds_per_byte: Float64
    twins: Int32


class _Found(NamedTuple):
    """What was seen of the ancestors of one op.

    stamps, away, path       [ops] `stamps` says whether the others are of this op
    front                    [] ops that are seen, not yet looked at, ascending
    of_away, starts, seconds [] away, earliest start there and seconds of those looked at
    order                    [] some of these by start
    """

    stamps: Int64
    away: Float64
    path: Float64
    front: Int32
    of_away: Float64
    starts: Float64
    seconds: Float64
    order: Int32


def forced_ends(flat: Flat, seconds: Float64) -> Float64:
    """[ops, devices] earliest end of each op there, all but rounding."""
    ends = np.zeros((flat.ops, flat.devices))
    inputs = flat.sources[flat.source_homes == HOST]
    ends[inputs] = np.inf
    ends[inputs, flat.host] = 0.0
    edges = _edges(flat, seconds)
    _fill(edges, flat.is_source, seconds, seconds.min(axis=1), _room(flat.ops), ends)
    return ends


def forced_tails(flat: Flat, seconds: Float64) -> Float64:
    """[ops, devices] least seconds from each op's end there to the step's end, all but rounding:
    the earliest starts of the step run backwards."""
    edges = _edges(flat, seconds)
    owners = np.repeat(np.arange(flat.ops, dtype=np.int32), np.diff(edges.offsets))
    order = np.argsort(flat.ops - 1 - edges.befores, kind="stable")
    backwards = Edges(
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


def _room(ops: int) -> _Found:
    return _Found(
        np.full(ops, -1, np.int64),
        np.zeros(ops),
        np.zeros(ops),
        np.zeros(ops, np.int32),
        np.zeros(MOST_FORCED),
        np.zeros(MOST_FORCED),
        np.zeros(MOST_FORCED),
        np.zeros(MOST_FORCED, np.int32),
    )


def _edges(flat: Flat, seconds: Float64) -> Edges:
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
    return Edges(
        csr_offsets(afters, flat.ops),
        np.asarray(befores[order], np.int32),
        sizes[order],
        latency,
        per_byte,
        _twins(flat.host, seconds, latency, per_byte),
    )


def _twins(host: int, seconds: Float64, *of_pairs: Float64) -> Int32:
    """[devices] the first device that can change places with each and nothing else changes."""
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


def _by_pair(flat: Flat, of_link: Float64) -> Float64:
    """[devices, devices] sums of `of_link` over the hops from row to column; 0 to oneself."""
    found = np.zeros((flat.devices, flat.devices))
    for source in range(flat.devices):
        for destination in range(flat.devices):
            direct = flat.link_of[source, destination]
            if direct >= 0:
                found[source, destination] = of_link[direct]
            elif source != destination:
                hops = flat.link_of[source, flat.host], flat.link_of[flat.host, destination]
                found[source, destination] = of_link[hops[0]] + of_link[hops[1]]
    return found


@kernel
def _fill(
    edges: Edges,
    is_source: Int8,
    seconds: Float64,
    least: Float64,
    found: _Found,
    ends: Float64,
) -> None:
    """Fill `ends` [ops, devices] of ops that are no sources; `least` [ops] seconds anywhere."""
    for op in range(len(seconds)):
        if is_source[op]:
            continue
        for device in range(seconds.shape[1]):
            if edges.twins[device] < device:
                ends[op, device] = ends[op, edges.twins[device]]
            elif seconds[op, device] < np.inf:
                start = _start(edges, seconds, least, found, ends, op, device)
                ends[op, device] = start + seconds[op, device]
            else:
                ends[op, device] = np.inf


@inlined
def _arrival(edges: Edges, ends: Float64, edge: int, device: int) -> float:
    """Earliest time that what an edge carries is on `device` if it was made elsewhere."""
    before, size = edges.befores[edge], edges.sizes[edge]
    earliest = np.inf
    for there in range(ends.shape[1]):
        if there != device:
            time = ends[before, there] + edges.latency_seconds[there, device]
            earliest = min(earliest, time + size * edges.seconds_per_byte[there, device])
    return earliest


@kernel
def _start(
    edges: Edges,
    seconds: Float64,
    least: Float64,
    found: _Found,
    ends: Float64,
    op: int,
    device: int,
) -> float:
    base, waiting = 0.0, 0
    stamp = op * ends.shape[1] + device
    for edge in range(edges.offsets[op], edges.offsets[op + 1]):
        away = _arrival(edges, ends, edge, device)
        base = max(base, min(away, ends[edges.befores[edge], device]))
        waiting = _note(found, stamp, edges.befores[edge], away, 0.0, waiting)
    count = 0
    while waiting and count < MOST_FORCED:
        waiting -= 1
        near = found.front[waiting]
        if found.away[near] <= base:
            continue
        _insert(
            found,
            count,
            found.away[near],
            ends[near, device] - seconds[near, device],
            seconds[near, device],
        )
        count += 1
        here = seconds[near, device] + found.path[near]
        for edge in range(edges.offsets[near], edges.offsets[near + 1]):
            away = min(_arrival(edges, ends, edge, device) + here, found.away[near])
            path = least[near] + found.path[near]
            waiting = _note(found, stamp, edges.befores[edge], away, path, waiting)
    return max(base, _crossing(found, count))


@inlined
def _note(found: _Found, stamp: int, op: int, away: float, path: float, waiting: int) -> int:
    """Keep the most of `away` and `path`; a new op enters the front. Returns the front's length."""
    if found.stamps[op] == stamp:
        found.away[op] = max(found.away[op], away)
        found.path[op] = max(found.path[op], path)
        return waiting
    found.stamps[op] = stamp
    found.away[op], found.path[op] = away, path
    place = waiting
    while place > 0 and found.front[place - 1] > op:
        found.front[place] = found.front[place - 1]
        place -= 1
    found.front[place] = op
    return waiting + 1


@inlined
def _insert(found: _Found, count: int, away: float, start: float, seconds: float) -> None:
    """Keep the `count` ops by falling `of_away`."""
    place = count
    while place > 0 and found.of_away[place - 1] < away:
        found.of_away[place] = found.of_away[place - 1]
        found.starts[place] = found.starts[place - 1]
        found.seconds[place] = found.seconds[place - 1]
        place -= 1
    found.of_away[place], found.starts[place], found.seconds[place] = away, start, seconds


@kernel
def _crossing(found: _Found, count: int) -> float:
    """Least over k of the larger of what the first k take here and when the next arrives."""
    earliest = np.inf
    for k in range(count + 1):
        serial = 0.0
        for i in range(k):
            serial = max(serial, found.starts[found.order[i]]) + found.seconds[found.order[i]]
        following = found.of_away[k] if k < count else 0.0
        earliest = min(earliest, max(serial, following))
        if serial >= following:
            break
        place = k
        while place > 0 and found.starts[found.order[place - 1]] > found.starts[k]:
            found.order[place] = found.order[place - 1]
            place -= 1
        found.order[place] = k
    return earliest
