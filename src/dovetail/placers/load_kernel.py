"""Annealing of the largest load, one proposed change after the other, over flat arrays.

A change moves one group, a cluster of neighbours, or two clusters past each other. Loads are kept
as nets see them: `counts` says how many readers a net has on each device, `relays` how many remote
destinations it reaches through the host, so that moving a group from a to b costs

    O(nets that it reads + nets that it makes x devices)

without the factor in a *star*, where all goes through a host whose load does not count. The largest
load after a change is exact. What is minimised is not the largest load, a plateau, but with
x(d) = load(d) / scale

    energy = sum over devices of x(d) ^ (2 ^ doublings)

which falls whenever a device near the top is relieved. A change is accepted if

    energy' <= energy x (1 + temperature x Exp(1))

and never if it makes memory lack more bytes. Temperature falls geometrically, call by call.
"""

from typing import NamedTuple

import numpy as np

from dovetail.placers.load_draws import UInt64, below, exponential
from dovetail.simulator.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64
from dovetail.simulator.queues import copy

# Where `Walk.scalars` keeps what a walk carries from call to call.
WORST, ENERGY, LACKING, BEST = range(4)


class Field(NamedTuple):
    """What does not change: groups, nets and links. Shapes as in `LoadModel`, and

    free                 groups that have a choice
    choice_offsets, choices     CSR of the devices that each group may be on
    made_offsets         CSR into the nets by their source; nets are sorted so
    read_offsets, reads  CSR of the nets that each group reads
    direct               [devices, devices] 1: one hop, not through the host
    star                 whether no hop is direct, but from the host, and the host's load does not
                         count (nor is it kept up to date)
    """

    groups: int
    devices: int
    host: int
    counted: Int8
    work_seconds: Float64
    sizes: Float64
    capacities: Float64
    net_sources: Int32
    net_offsets: Int32
    net_targets: Int32
    net_bytes: Float64
    net_sends: Float64
    latency_seconds: Float64
    seconds_per_byte: Float64
    direct: Int8
    star: bool
    free: Int32
    choice_offsets: Int32
    choices: Int32
    made_offsets: Int32
    read_offsets: Int32
    reads: Int32


class Walk(NamedTuple):
    """One annealing walk.

    placement, best      [groups] where it stands, and the best that it has seen
    counts               [nets, devices] readers of the net on the device
    relays               [nets] remote destinations through the host
    loads, used_bytes    [devices]; `saved_loads`, `saved_bytes` undo a change
    moved, ends          [groups] the change in hand: groups, and where each goes
    stamps               [groups] the change in which a group was last moved
    scalars              worst device, energy, lacking bytes, largest load of `best`
    random               [1] state of the generator
    """

    placement: Int32
    best: Int32
    counts: Int32
    relays: Int32
    loads: Float64
    used_bytes: Float64
    saved_loads: Float64
    saved_bytes: Float64
    moved: Int32
    ends: Int32
    stamps: Int64
    scalars: Float64
    random: UInt64


class Heat(NamedTuple):
    """temperature   relative, of the energy; `scale_seconds` is the load whose power is 1"""

    temperature: float
    scale_seconds: float
    doublings: int


@kernel
def start(field: Field, walk: Walk, heat: Heat) -> None:
    """Counts, loads and energy of `walk.placement` from scratch; `best` is not touched."""
    walk.loads[:] = 0.0
    walk.used_bytes[:] = 0.0
    for group in range(field.groups):
        there = walk.placement[group]
        walk.loads[there] += field.work_seconds[group, there]
        walk.used_bytes[there] += field.sizes[group]
        walk.stamps[group] = -1
    for net in range(len(field.net_sources)):
        walk.relays[net] = 0
        for device in range(field.devices):
            walk.counts[net, device] = 0
        for i in range(field.net_offsets[net], field.net_offsets[net + 1]):
            walk.counts[net, walk.placement[field.net_targets[i]]] += 1
        add_all_hops(field, walk, net, home_of(field, walk, net), 1)
    walk.scalars[ENERGY] = energy(field, walk, heat)
    walk.scalars[LACKING] = lacking_bytes(field, walk)


@kernel
def anneal(field: Field, walk: Walk, heat: Heat, moves: int) -> int:
    """Propose `moves` times, and accept or undo each change; number of changes, of each of which
    the exact loads were computed. The others were none, as from a device to itself."""
    made = 0
    for move in range(moves):
        count = propose(field, walk, move)
        if not count:
            continue
        made += 1
        keep(walk.loads, walk.saved_loads)
        keep(walk.used_bytes, walk.saved_bytes)
        for turn in range(2):
            for i in range(count):
                group = walk.moved[i]
                old = walk.placement[group]
                shift(field, walk, group, old, walk.ends[i])
                walk.ends[i] = old
            if turn:
                keep(walk.saved_loads, walk.loads)
                keep(walk.saved_bytes, walk.used_bytes)
                break
            lacking = lacking_bytes(field, walk)
            worst = walk.scalars[WORST]
            last = energy(field, walk, heat)
            before = walk.scalars[LACKING]
            accepted = lacking < before
            if lacking == before:
                accepted = last <= walk.scalars[ENERGY]
                if not accepted:
                    limit = 1.0 + heat.temperature * exponential(walk.random)
                    accepted = last <= walk.scalars[ENERGY] * limit
            if accepted:
                walk.scalars[ENERGY] = last
                walk.scalars[LACKING] = lacking
                largest = walk.loads[int(walk.scalars[WORST])]
                if lacking == 0.0 and largest < walk.scalars[BEST]:
                    walk.scalars[BEST] = largest
                    copy(walk.placement, walk.best)
                break
            walk.scalars[WORST] = worst
    for group in range(field.groups):
        walk.stamps[group] = -1
    return made


@inlined
def keep(source: Float64, destination: Float64) -> None:
    for i in range(len(source)):
        destination[i] = source[i]


@inlined
def propose(field: Field, walk: Walk, move: int) -> int:
    """Fill `moved` and `ends` with a change; number of its groups, 0 where none was found.

    Half of the changes begin on the device with the largest load. Half go where a neighbour is.
    Half of them send something back, or on to a third device.
    """
    group = field.free[below(walk.random, len(field.free))]
    if below(walk.random, 2):
        group = pick_on(field, walk, int(walk.scalars[WORST]), group)
    here = walk.placement[group]
    target = -1
    if below(walk.random, 2):
        other = neighbour(field, walk, group)
        if other >= 0:
            target = walk.placement[other]
    if target < 0 or target == here:
        target = pick_choice(field, walk, group)
    count = 0
    for turn in range(2):
        if target == here or not allowed(field.work_seconds, group, target):
            break
        count = grow(field, walk, (group, here, target), count, pick_size(walk.random), move)
        if turn or below(walk.random, 2):
            break
        group = pick_on(field, walk, target, field.free[below(walk.random, len(field.free))])
        if walk.placement[group] != target or walk.stamps[group] == move:
            break
        back = here
        here = target
        target = back if below(walk.random, 4) else pick_choice(field, walk, group)
    return count


@inlined
def pick_size(random: UInt64) -> int:
    """Of a cluster: mostly 1, else up to 32, log-uniformly."""
    size = 1
    if not below(random, 4):
        size += below(random, 1 << (1 + below(random, 5)))
    return size


@inlined
def pick_on(field: Field, walk: Walk, device: int, group: int) -> int:
    """A group on the device, at random; any, where eight draws after `group` meet none."""
    for _ in range(8):
        if walk.placement[group] == device:
            break
        group = field.free[below(walk.random, len(field.free))]
    return group


@inlined
def pick_choice(field: Field, walk: Walk, group: int) -> int:
    """A device where the group may be, at random."""
    first, last = field.choice_offsets[group], field.choice_offsets[group + 1]
    return int(field.choices[first + below(walk.random, last - first)])


@inlined
def grow(
    field: Field, walk: Walk, step: tuple[int, int, int], count: int, size: int, move: int
) -> int:
    """Append a cluster around `group` that goes from `here` to `there`: mostly neighbours, and
    some that merely balance work or bytes. Its end of `moved`."""
    group, here, there = step
    first = count
    walk.moved[count] = group
    walk.ends[count] = there
    walk.stamps[group] = move
    count += 1
    if size > 1:
        for _ in range(2 * size):
            if count - first >= size or count >= field.groups:
                break
            member = walk.moved[first + below(walk.random, count - first)]
            other = field.free[below(walk.random, len(field.free))]
            if below(walk.random, 8):
                other = neighbour(field, walk, member)
            if other < 0 or walk.placement[other] != here or walk.stamps[other] == move:
                continue
            if allowed(field.work_seconds, other, there):
                walk.moved[count] = other
                walk.ends[count] = there
                walk.stamps[other] = move
                count += 1
    return count


@inlined
def neighbour(field: Field, walk: Walk, group: int) -> int:
    """A group that shares a net with `group`, at random; -1: none was met."""
    first, reads = field.read_offsets[group], field.read_offsets[group + 1]
    made = field.made_offsets[group]
    nets = reads - first + field.made_offsets[group + 1] - made
    if not nets:
        return -1
    i = below(walk.random, nets)
    net = field.reads[first + i] if i < reads - first else made + i - (reads - first)
    begin, end = field.net_offsets[net], field.net_offsets[net + 1]
    j = begin + below(walk.random, end - begin + 1)
    return int(field.net_sources[net] if j == end else field.net_targets[j])


@inlined
def allowed(work_seconds: Float64, group: int, device: int) -> bool:
    return bool(work_seconds[group, device] < np.inf)


@inlined
def shift(field: Field, walk: Walk, group: int, here: int, there: int) -> None:
    """Move one group: loads, bytes, counts and relays."""
    walk.placement[group] = there
    walk.loads[here] -= field.work_seconds[group, here]
    walk.loads[there] += field.work_seconds[group, there]
    walk.used_bytes[here] -= field.sizes[group]
    walk.used_bytes[there] += field.sizes[group]
    for i in range(field.read_offsets[group], field.read_offsets[group + 1]):
        net = field.reads[i]
        home = home_of(field, walk, net)
        for sign in range(-1, 2, 2):
            device = here if sign < 0 else there
            count = walk.counts[net, device] + sign
            walk.counts[net, device] = count
            if count == (1 + sign) // 2 and device != home:
                add_hop(field, walk, net, home, device, sign)
    for net in range(field.made_offsets[group], field.made_offsets[group + 1]):
        if field.star:
            turn_hops(field, walk, net, here, there)
        else:
            for sign in range(-1, 2, 2):
                home = here if sign < 0 else there
                add_all_hops(field, walk, net, home, sign)


@inlined
def turn_hops(field: Field, walk: Walk, net: int, here: int, there: int) -> None:
    """The maker of a net moves in a star: its readers elsewhere notice nothing."""
    if walk.relays[net] > 0:
        walk.loads[here] -= price(field, net, here, field.host)
    if walk.counts[net, here] > 0:
        walk.relays[net] += 1
        walk.loads[here] += price(field, net, field.host, here)
    if walk.counts[net, there] > 0:
        walk.relays[net] -= 1
        walk.loads[there] -= price(field, net, field.host, there)
    if walk.relays[net] > 0:
        walk.loads[there] += price(field, net, there, field.host)


@inlined
def home_of(field: Field, walk: Walk, net: int) -> int:
    source = field.net_sources[net]
    return int(field.host if source < 0 else walk.placement[source])


@inlined
def add_all_hops(field: Field, walk: Walk, net: int, home: int, sign: int) -> None:
    for device in range(field.devices):
        if walk.counts[net, device] > 0 and device != home:
            add_hop(field, walk, net, home, device, sign)


@inlined
def add_hop(field: Field, walk: Walk, net: int, home: int, device: int, sign: int) -> None:
    """The hops of a net from `home` to one destination come, or go: the first one through the
    host, or the last, pays the way to the host."""
    if field.direct[home, device]:
        seconds = sign * price(field, net, home, device)
        walk.loads[home] += seconds
        walk.loads[device] += seconds
        return
    others = walk.relays[net] + (sign - 1) // 2
    walk.relays[net] += sign
    if others == 0:
        seconds = sign * price(field, net, home, field.host)
        walk.loads[home] += seconds
        walk.loads[field.host] += seconds
    if device != field.host:
        seconds = sign * price(field, net, field.host, device)
        walk.loads[field.host] += seconds
        walk.loads[device] += seconds


@inlined
def price(field: Field, net: int, source: int, destination: int) -> float:
    """Seconds of one hop; 0 where there is no link."""
    return float(
        field.net_sends[net] * field.latency_seconds[source, destination]
        + field.net_bytes[net] * field.seconds_per_byte[source, destination]
    )


@inlined
def energy(field: Field, walk: Walk, heat: Heat) -> float:
    """The sum of powers of loads; notes the worst device, of equal ones the first."""
    total, largest, worst = 0.0, -1.0, 0
    for device in range(field.devices):
        if field.counted[device]:
            load = walk.loads[device]
            if load > largest:
                largest, worst = load, device
            power = load / heat.scale_seconds
            for _ in range(heat.doublings):
                power *= power
            total += power
    walk.scalars[WORST] = worst
    return total


@inlined
def lacking_bytes(field: Field, walk: Walk) -> float:
    total = 0.0
    for device in range(field.devices):
        total += max(0.0, walk.used_bytes[device] - field.capacities[device])
    return total
