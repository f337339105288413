"""Computes the critical path, and the bound that joins heads, tails and load balance.

The earliest end of op o on device d, if every predecessor were where it suits o best and no device
or channel were ever busy, is

    end(o, d) = c(o, d) + max over reads (o' -> o) of
                          min over d' of  end(o', d') + send(d', d)

The largest end is the critical path. It is computed in the simulator's own order of floating-point
operations. These are monotone, so the bound holds to the last bit.

Head, load and tail (Carlier, "The one-machine sequencing problem", European Journal of Operational
Research 11, 1982, section 2). Ops that cannot start before r and after which at least q
must follow are computed between r and makespan - q, so that for all thresholds r and q

    makespan >= r + load_balance({o: head(o) >= r, tail(o) >= q}) + q

Differences: there are many unlike devices instead of one. Load balance is the dual sum of
`class_burdens`, with one set of weights for all thresholds, op by op without colocation. All pairs
of thresholds are tried in O(ops x log ops): ops enter, largest head first, into a tree over tails
that holds the best q + load.
"""

import numpy as np

from dovetail.graph import HOST
from dovetail.graph.records import csr_offsets
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int32, StepModel


def earliest_ends(flat: StepModel, seconds: Float64) -> Float64:
    """[ops, devices] earliest end of each op on each device; for sources 0 where they may be."""
    ends = np.zeros((flat.ops, flat.devices))
    for op, home in zip(flat.sources.tolist(), flat.source_homes.tolist(), strict=True):
        # An input is on the host and nowhere else.
        if home == HOST:
            ends[op] = np.inf
            ends[op, flat.host] = 0.0
    befores = np.argsort(flat.control_targets, kind="stable").astype(np.int32)
    offsets = csr_offsets(flat.control_targets, flat.ops)
    owners = np.repeat(np.arange(flat.ops, dtype=np.int32), np.diff(flat.control_offsets))
    _fill_ends(flat, seconds, offsets, owners[befores], ends)
    return ends


def upward_ranks(flat: StepModel) -> Float64:
    """[ops] longest chain of least seconds from an op's start to the step's end.

    Upward rank of Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity Task
    Scheduling for Heterogeneous Computing", IEEE TPDS 13(3), 2002, section 4.1. Differences: the
    least seconds of an op instead of the mean; sends are left out. O(ops + reads).
    """
    ranks = np.zeros(flat.ops)
    _fill_ranks(flat, flat.compute_seconds.min(axis=1), ranks)
    return ranks


def longest_seconds(flat: StepModel, ends: Float64) -> float:
    """Seconds of the longest chain of ops and sends, each op on the device that suits it best."""
    return float(ends.min(axis=1).max(initial=0.0, where=flat.is_source == 0))


def without_sends(flat: StepModel, seconds: Float64) -> tuple[StepModel, Float64]:
    """The ops on one device, never busy, on which each op takes its least seconds anywhere."""
    one_device = flat._replace(
        devices=1, host=0, link_of=np.full((1, 1), -1, np.int32), compute_seconds=seconds
    )
    return one_device, np.ascontiguousarray(seconds.min(axis=1, keepdims=True))


def head_load_tail(heads: Float64, loads: Float64, tails: Float64) -> float:
    """The largest r + sum of loads(head >= r and tail >= q) + q over all thresholds r and q.

    Arguments are [ops]. Any subset of the ops gives a bound; without ops it is 0.
    """
    if not len(heads):
        return 0.0
    order = np.argsort(-heads, kind="stable").astype(np.int32)
    thresholds, ranks = np.unique(tails, return_inverse=True)
    size = 1 << int(len(thresholds) - 1).bit_length()
    best = np.full(2 * size, -np.inf)
    added = np.zeros(2 * size)
    return float(
        _best_window(
            order, heads, loads, ranks.reshape(-1).astype(np.int32), thresholds, best, added
        )
    )


@kernel
def _fill_ranks(flat: StepModel, seconds: Float64, ranks: Float64) -> None:
    """Fill `ranks` [ops] from the last op to the first, as ops stand after what they wait for."""
    for op in range(flat.ops - 1, -1, -1):
        after = 0.0
        for tensor in range(flat.output_offsets[op], flat.output_offsets[op + 1]):
            for i in range(flat.consumer_offsets[tensor], flat.consumer_offsets[tensor + 1]):
                after = max(after, ranks[flat.consumers[i]])
        for i in range(flat.control_offsets[op], flat.control_offsets[op + 1]):
            after = max(after, ranks[flat.control_targets[i]])
        ranks[op] = seconds[op] + after


@kernel
def _fill_ends(
    flat: StepModel, seconds: Float64, offsets: Int32, befores: Int32, ends: Float64
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
                    size_bytes = flat.sent_bytes[tensor]
                    start = max(start, _arrival(flat, ends[before], device, size_bytes))
            for i in range(offsets[op], offsets[op + 1]):
                start = max(start, _arrival(flat, ends[befores[i]], device, 0.0))
            ends[op, device] = start + seconds[op, device]


@inlined
def _arrival(flat: StepModel, ends: Float64, device: int, size_bytes: float) -> float:
    """The earliest time that something made anywhere can be on `device`."""
    earliest: float = ends[device]
    for source in range(flat.devices):
        if source == device:
            continue
        link, time = flat.link_of[source, device], ends[source]
        if link < 0:
            hop = flat.link_of[source, flat.host]
            time += flat.link_latencies[hop] + size_bytes / flat.link_bandwidths[hop]
            link = flat.link_of[flat.host, device]
        time += flat.link_latencies[link] + size_bytes / flat.link_bandwidths[link]
        earliest = min(earliest, time)
    return earliest


@kernel
def _best_window(
    order: Int32,
    heads: Float64,
    loads: Float64,
    ranks: Int32,
    thresholds: Float64,
    best: Float64,
    added: Float64,
) -> float:
    """The largest r + load + q, by a tree whose leaves are the thresholds q, ascending.

    A node has `best`, the most of q + load below it, and `added`, the load that was added to all
    leaves below it at once. A threshold above the tails of all ops that entered stays at -inf,
    because no op is counted there.
    """
    size = len(best) // 2
    entered = -1
    largest = 0.0
    for i in range(len(order)):
        op = order[i]
        while entered < ranks[op]:
            entered += 1
            best[size + entered] = thresholds[entered]
            _climb(best, added, size + entered)
        node = size + ranks[op]
        best[node] += loads[op]
        while node > 1:
            # All thresholds left of here are lower, so the op counts there too.
            if node % 2:
                best[node - 1] += loads[op]
                added[node - 1] += loads[op]
            node //= 2
            best[node] = max(best[2 * node], best[2 * node + 1]) + added[node]
        largest = max(largest, heads[op] + best[1])
    return largest


@inlined
def _climb(best: Float64, added: Float64, node: int) -> None:
    """Compute `best` anew on the way from a node to the root."""
    while node > 1:
        node //= 2
        best[node] = max(best[2 * node], best[2 * node + 1]) + added[node]
