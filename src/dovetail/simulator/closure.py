"""Closure: where a group is, there must also be whatever costs more to send than to have.

The device d that has group g has some set S of groups around it, and pays for the work of S, for
every net that comes into S and for every net that leaves it:

    load(d) >= min over S with g in S of
               sum over h in S of work(h, d) + sum of in(net, d) + sum of out(net, d)

Each sum is a cut in a directed graph (Picard, "Maximal Closure of a Graph and Applications to
Combinatorial Problems", Management Science 22, 1976; nets as in Lawler, "Cutsets and Partitions of
Hypergraphs", Networks 3, 1973), so the minimum is a maximum flow from g to the sink:

    h ──work──► sink            h is in S: its work
    reader ──∞──► ◯ ──in──► source of the net        a reader is in S, the source is not
    source of the net ──out──► ◯ ──∞──► reader       the source is in S, a reader is not

Every plan has g somewhere, so the largest load is at least the largest over g of the least over
devices. And in a plan of largest load below T no group is where its cut is T or more: if load
balance over what is left reaches T, there is no such plan.

Differences: a send counts by the fastest link of its device. Capacities are whole numbers, rounded
down, for scipy's maximum flow.
"""

from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

from dovetail.simulator.flat import Float64
from dovetail.simulator.load_balance import ROUNDING, Int64, load_balance_seconds
from dovetail.simulator.load_model import LoadModel

_WHOLE = 2**30 - 1
"""Capacity that stands for infinity, and for the largest that is of interest."""
_MOST_VISITS = 4_000_000
"""Nodes times flows that are worth their time: some seconds."""


class DeviceNets(NamedTuple):
    """Work and sends of one kind of device.

    work_seconds              [groups] inf: may not be there
    in_seconds, out_seconds   [nets] what it pays to read, or to send, all of a net once
    copies                    devices of this kind
    """

    work_seconds: Float64
    in_seconds: Float64
    out_seconds: Float64
    capacity_bytes: float
    copies: int


class Closures(NamedTuple):
    """kinds          of device, of_device [devices] index of each device's; -1: does not count
    cuts_seconds   [groups, kinds] load of a device of that kind that has the group, at least
    """

    kinds: list[DeviceNets]
    of_device: Int64
    cuts_seconds: Float64


def closures(model: LoadModel, at_least: float = 0.0) -> Closures:
    """Cuts of every group that could load a device by more than `at_least` seconds, the heaviest
    first, for as long as `_MOST_VISITS` allows; for the others, their work."""
    kinds, of_device = kinds_of_devices(model)
    cuts = np.stack([kind.work_seconds for kind in kinds], axis=1)
    own = np.stack([own_seconds(model, kind) for kind in kinds], axis=1)
    own[own <= cuts * (1 + ROUNDING)] = -np.inf  # nothing to send: the work is all
    own[~np.isfinite(cuts) | (own <= at_least)] = -np.inf
    top = float(own.max(initial=-np.inf))
    if top > 0:
        networks = [_network(model, kind, top) for kind in kinds]
        flows = max(1, _MOST_VISITS // networks[0].shape[0])
        order = np.argsort(-own, axis=None, kind="stable")[:flows]
        for group, kind in zip(*np.unravel_index(order, own.shape), strict=True):
            if own[group, kind] > 0:
                least = _least_cut(networks[kind], int(group), top)
                cuts[group, kind] = max(cuts[group, kind], least)
    return Closures(kinds, of_device, cuts * (1 - ROUNDING))


def closure_seconds(found: Closures) -> float:
    """Seconds that the load of some device reaches, for every placement of the groups."""
    return float(found.cuts_seconds.min(axis=1).max(initial=0.0))


def closure_balance_seconds(model: LoadModel, found: Closures, proven: float) -> float:
    """The same, where groups that are too much for one kind of device burden another: the largest
    T, to 1 in 10,000 of the largest cut, such that load balance reaches T without the devices on
    which a group's cut does. Not less than `proven`, a bound already."""
    devices = np.flatnonzero(found.of_device >= 0)
    cuts = found.cuts_seconds[:, found.of_device[devices]]
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
    """The kinds of the devices that count, alike in work, sends and memory; and [devices] the kind
    of each, -1 where it does not count."""
    kinds: dict[tuple[object, ...], DeviceNets] = {}
    of_device = np.full(model.devices, -1)
    for device in np.flatnonzero(model.counted).tolist():
        columns = model.work_seconds[:, device].copy(), *_net_seconds(model, device)
        room = float(model.capacities[device])
        key = room, *(column.tobytes() for column in columns)
        known = kinds.get(key)
        kinds[key] = DeviceNets(*columns, room, known.copies + 1 if known else 1)
        of_device[device] = list(kinds).index(key)
    return list(kinds.values()), of_device


def own_seconds(model: LoadModel, kind: DeviceNets) -> Float64:
    """[groups] load of a device of this kind that has one group and nothing else."""
    owners = np.repeat(np.arange(len(model.net_sources)), np.diff(model.net_offsets))
    own = kind.work_seconds + np.bincount(
        model.net_targets, weights=kind.in_seconds[owners], minlength=model.groups
    )
    made = model.net_sources >= 0
    return own + np.bincount(
        model.net_sources[made], weights=kind.out_seconds[made], minlength=model.groups
    )


def _net_seconds(model: LoadModel, device: int) -> tuple[Float64, Float64]:
    """[nets] least seconds of one hop into the device and of one out of it."""

    def hop(source: int, destination: int) -> Float64:
        latency = float(model.latency_seconds[source, destination])
        per_byte = float(model.seconds_per_byte[source, destination])
        return model.net_sends * latency + model.net_bytes * per_byte

    nets = len(model.net_sources)
    others = [d for d in range(model.devices) if d != device]
    comes = [hop(d, device) for d in others if model.linked[d, device]]
    goes = [hop(device, d) for d in others if model.linked[device, d]]
    zero = np.zeros(nets)
    into = np.min(comes, axis=0) if comes else zero
    out = np.min(goes, axis=0) if goes else zero
    from_host = zero if device == model.host else hop(model.host, device)
    return np.where(model.net_sources < 0, from_host, into), out


def _network(model: LoadModel, kind: DeviceNets, top: float) -> csr_array:
    """Capacities of the graph above: nodes are groups, two a net, and the sink, which is last.
    `top` seconds and more are all the same."""
    groups, nets = model.groups, len(model.net_sources)
    owners = np.repeat(np.arange(nets), np.diff(model.net_offsets))
    readers = model.net_targets
    came, gone, sink = groups + np.arange(nets), groups + nets + np.arange(nets), groups + 2 * nets
    made = np.flatnonzero(model.net_sources >= 0)
    whole = np.full(len(readers), np.inf)
    home = np.where(model.net_sources >= 0, model.net_sources, sink)
    of_made = np.flatnonzero(model.net_sources[owners] >= 0)
    arcs = [
        (np.arange(groups), np.full(groups, sink), kind.work_seconds),
        (readers, came[owners], whole),
        (came, home, kind.in_seconds),
        (model.net_sources[made], gone[made], kind.out_seconds[made]),
        (gone[owners[of_made]], readers[of_made], whole[: len(of_made)]),
    ]
    tails, heads, seconds = (np.concatenate(part) for part in zip(*arcs, strict=True))
    capacity = np.minimum(seconds * (_WHOLE / top), _WHOLE).astype(np.int32)
    kept = capacity > 0
    ends = tails[kept].astype(np.int32), heads[kept].astype(np.int32)
    return coo_array((capacity[kept], ends), shape=(sink + 1, sink + 1)).tocsr()


def _least_cut(network: csr_array, group: int, top: float) -> float:
    flow = maximum_flow(network, group, network.shape[0] - 1).flow_value
    return float(flow) * (top / _WHOLE) * (1 - ROUNDING)
