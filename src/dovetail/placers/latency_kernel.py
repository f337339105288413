"""Annealing of the latency: one proposed change after the other, each walked through in full.

A change moves a group, two groups past each other, or what is on a device from one group on, in
topological order, to another device. A full walk takes O(ops + reads), some microseconds for the
published instances, so nothing is kept between changes but the placement and the bytes used. With

    energy = latency + penalty x (calls that wait for themselves, and all that wait for those
                                  + share by which devices exceed their capacities, 1 + at least)

and an exponentially distributed X of mean 1 a change is accepted if

    energy' <= energy + temperature x X
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.simulator.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int32
from dovetail.simulator.latency import LatencyModel, LatencyWork, walk

UInt64 = NDArray[np.uint64]
ENERGY, BEST, PENALTY = range(3)  # in `Search.scalars`


class Search(NamedTuple):
    """One annealing search.

    free                      groups that have a choice
    choice_offsets, choices   CSR of the devices that each group may be on
    near_offsets, near        CSR of the groups that share a tensor with each group
    member_offsets, members   CSR of the ops of each group
    sizes                     [groups] bytes that stay where the group is
    capacities, used_bytes    [devices]
    groups, saved             [groups] devices now, and before the change in hand
    placement                 [ops] the same, spread
    best                      [groups] the best seen
    scalars                   energy now, and of `best`; the penalty
    random                    [1] state of the generator
    """

    free: Int32
    choice_offsets: Int32
    choices: Int32
    near_offsets: Int32
    near: Int32
    member_offsets: Int32
    members: Int32
    sizes: Float64
    capacities: Float64
    used_bytes: Float64
    groups: Int32
    saved: Int32
    placement: Int32
    best: Int32
    scalars: Float64
    random: UInt64


@kernel
def start(model: LatencyModel, work: LatencyWork, search: Search) -> None:
    """Bytes, placement and energy of `search.groups` from scratch."""
    search.used_bytes[:] = 0.0
    for group in range(len(search.groups)):
        put(search, group, search.groups[group])
        search.used_bytes[search.groups[group]] += search.sizes[group]
    search.scalars[ENERGY] = energy(model, work, search)


@kernel
def anneal(
    model: LatencyModel, work: LatencyWork, search: Search, temperature: float, changes: int
) -> None:
    """Propose `changes` changes, and accept or undo each."""
    for _ in range(changes):
        group = search.free[draw(search, len(search.free))]
        old, new = search.groups[group], target(search, group)
        if new == old or not may(search, group, new):
            continue
        for g in range(len(search.groups)):
            search.saved[g] = search.groups[g]
        change(search, group, old, new)
        after = energy(model, work, search)
        chance = (draw(search, 1 << 30) + 1) / (1 << 30)
        if after <= search.scalars[ENERGY] - temperature * np.log(chance):
            accept(search, after)
        else:
            for g in range(len(search.groups)):
                if search.groups[g] != search.saved[g]:
                    shift(search, g, search.saved[g])


@inlined
def target(search: Search, group: int) -> int:
    """Mostly the device of a group that shares a tensor with it, else any that it may be on."""
    near = search.near_offsets[group + 1] - search.near_offsets[group]
    if near and draw(search, 4):
        return int(search.groups[search.near[search.near_offsets[group] + draw(search, near)]])
    first, last = search.choice_offsets[group], search.choice_offsets[group + 1]
    return int(search.choices[first + draw(search, last - first)])


@inlined
def change(search: Search, group: int, old: int, new: int) -> None:
    """One in eight a swap, two in eight what is later or earlier on the same device moves too."""
    kind = draw(search, 8)
    shift(search, group, new)
    if kind == 0:
        other = search.free[draw(search, len(search.free))]
        if search.saved[other] == new and may(search, other, old):
            shift(search, other, old)
    elif kind <= 2:
        for g in search.free:
            beyond = (g > group) == (kind == 1)
            if beyond and search.saved[g] == old and may(search, g, new):
                shift(search, g, new)


@inlined
def accept(search: Search, after: float) -> None:
    search.scalars[ENERGY] = after
    if after < search.scalars[BEST]:
        search.scalars[BEST] = after
        for g in range(len(search.groups)):
            search.best[g] = search.groups[g]


@inlined
def energy(model: LatencyModel, work: LatencyWork, search: Search) -> float:
    """Does not walk what does not fit: the larger part of a walk's price is saved."""
    excess = 0.0
    for device in range(len(search.used_bytes)):
        over = search.used_bytes[device] - search.capacities[device]
        if over > 0:
            excess += 1 + over / (search.capacities[device] + 1)
    latency = 0.0
    if excess == 0.0:
        latency = walk(model, work, search.placement)
        if latency < 0:
            excess, latency = -latency, 0.0
    total: float = latency + search.scalars[PENALTY] * excess
    return total


@inlined
def may(search: Search, group: int, device: int) -> bool:
    found = False
    for i in range(search.choice_offsets[group], search.choice_offsets[group + 1]):
        found = found or search.choices[i] == device
    return found


@inlined
def shift(search: Search, group: int, device: int) -> None:
    search.used_bytes[search.groups[group]] -= search.sizes[group]
    search.used_bytes[device] += search.sizes[group]
    search.groups[group] = device
    put(search, group, device)


@inlined
def put(search: Search, group: int, device: int) -> None:
    for i in range(search.member_offsets[group], search.member_offsets[group + 1]):
        search.placement[search.members[i]] = device


@inlined
def draw(search: Search, count: int) -> int:
    """0 to count - 1; xorshift64* (Marsaglia, https://doi.org/10.18637/jss.v008.i14)."""
    x = search.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    search.random[0] = x
    high = (x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(33)
    return int(high % np.uint64(count))
