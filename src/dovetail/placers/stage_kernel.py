"""The walks up a lattice of ideals, that `stages.best_chain` spends its time in."""

from typing import NamedTuple

from dovetail.placers.contiguity import Elements
from dovetail.simulator.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64

STEPS = 2_000_000
"""Of the walks between two looks at the budget: about .1 s."""


class Lattice(NamedTuple):
    """Ideals, by size; the first is empty, the last is everything.

    add_offsets, adds, leads   CSR by ideal: an element that may be added, ascending by rank, and
                               the ideal that it leads to
    parents, lasts   [ideals] one ideal below, and the element that is added to it; -1 of the empty
    ranks            [elements] a topological numbering
    """

    add_offsets: Int64
    adds: Int32
    leads: Int32
    parents: Int32
    lasts: Int32
    ranks: Int32


class Table(NamedTuple):
    """values, origins, kinds   [ideals, states] f, the ideal before the last stage, its kind
    left_work     [ideals] weighed work of the elements that are not in it
    power         [states] weighed number of devices that are left
    nexts         [states, kinds] state with one device more in use, -1: none is left
    room_bytes    [kinds]
    ceiling       [1] values at and above it are of no interest
    """

    values: Float64
    origins: Int32
    kinds: Int8
    left_work: Float64
    power: Float64
    nexts: Int32
    room_bytes: Float64
    ceiling: Float64


class Walk(NamedTuple):
    """The walk up from one ideal.

    states, kinds     [states], [kinds] states of the ideal that go on; 1: one has this kind left
    homes             [nets] where the source is: 0 further up, 1 in the stage, 2 below or outside
    below, inside     [nets] readers below, and in the stage
    at, next_add      [depth] ideals on the way, and the next edge up to try
    added             [depth] element added last
    loads, least      [depth, kinds] load of the stage, and what of it can only grow
    held_bytes        [depth]
    """

    states: Int32
    kinds: Int8
    homes: Int8
    below: Int32
    inside: Int32
    at: Int32
    next_add: Int64
    added: Int32
    loads: Float64
    least: Float64
    held_bytes: Float64


@kernel
def left_work(lattice: Lattice, weighed: Float64, total: float, left_work: Float64) -> None:
    left_work[0] = total
    for ideal in range(1, len(lattice.parents)):
        left_work[ideal] = left_work[lattice.parents[ideal]] - weighed[lattice.lasts[ideal]]


@kernel
def push(
    elements: Elements, lattice: Lattice, table: Table, walk: Walk, ideal: int, steps: Int64
) -> int:
    """Push the values of ideals from `ideal` on to those above; the next one after enough steps."""
    while ideal < len(lattice.parents) and steps[0] < STEPS:
        alive = _alive(table, walk, ideal)
        steps[0] += 1
        if alive:
            _begin(elements, lattice, walk, ideal)
            _climb(elements, lattice, table, walk, alive, steps)
        ideal += 1
    return ideal


@inlined
def _alive(table: Table, walk: Walk, ideal: int) -> int:
    """How many states of the ideal may still lead below the ceiling; they stand in `walk`."""
    ceiling, alive = table.ceiling[0], 0
    for kind in range(len(walk.kinds)):
        walk.kinds[kind] = 0
    for state in range(len(table.power)):
        value = table.values[ideal, state]
        if value >= ceiling or table.left_work[ideal] > ceiling * table.power[state]:
            continue
        walk.states[alive] = state
        alive += 1
        for kind in range(len(walk.kinds)):
            if table.nexts[state, kind] >= 0:
                walk.kinds[kind] = 1
    return alive


@inlined
def _begin(elements: Elements, lattice: Lattice, walk: Walk, ideal: int) -> None:
    """An empty stage on top of the ideal."""
    for net in range(len(elements.net_sources)):
        walk.homes[net] = 2 if elements.net_sources[net] < 0 else 0
        walk.below[net] = 0
        walk.inside[net] = 0
    walk.at[0] = ideal
    walk.next_add[0] = lattice.add_offsets[ideal]
    while ideal > 0:
        element = lattice.lasts[ideal]
        for i in range(elements.touch_offsets[element], elements.touch_offsets[element + 1]):
            touch = elements.touches[i]
            if touch < 0:
                walk.homes[~touch] = 2
            else:
                walk.below[touch] += 1
        ideal = lattice.parents[ideal]


@inlined
def _climb(
    elements: Elements, lattice: Lattice, table: Table, walk: Walk, alive: int, steps: Int64
) -> None:
    """Visit every ideal above, and note what a stage from the bottom to there gives."""
    depth = 0
    while depth >= 0:
        edge = walk.next_add[depth]
        if edge == lattice.add_offsets[walk.at[depth] + 1]:
            if depth > 0:
                _take_back(elements, walk, walk.added[depth])
            depth -= 1
            continue
        walk.next_add[depth] += 1
        element = lattice.adds[edge]
        if depth > 0 and lattice.ranks[element] < lattice.ranks[walk.added[depth]]:
            continue
        steps[0] += 1
        if not _may_add(elements, table, walk, depth, element):
            continue
        depth += 1
        _add(elements, walk, depth, element)
        above = lattice.leads[edge]
        walk.at[depth] = above
        walk.next_add[depth] = lattice.add_offsets[above]
        walk.added[depth] = element
        if not _note(table, walk, depth, alive):
            walk.next_add[depth] = lattice.add_offsets[above + 1]


@inlined
def _may_add(elements: Elements, table: Table, walk: Walk, depth: int, element: int) -> bool:
    """Before anything is counted: do work and bytes fit some kind of device?"""
    held = walk.held_bytes[depth] + elements.held_bytes[element]
    fits = False
    for kind in range(len(walk.kinds)):
        least = walk.least[depth, kind] + elements.work_seconds[element, kind]
        if walk.kinds[kind] and least < table.ceiling[0] and held <= table.room_bytes[kind]:
            fits = True
    return fits


@inlined
def _add(elements: Elements, walk: Walk, depth: int, element: int) -> None:
    """Put an element into the stage: loads and bytes at `depth` follow from those below."""
    kinds = len(walk.kinds)
    walk.held_bytes[depth] = walk.held_bytes[depth - 1] + elements.held_bytes[element]
    for kind in range(kinds):
        work = elements.work_seconds[element, kind]
        walk.loads[depth, kind] = walk.loads[depth - 1, kind] + work
        walk.least[depth, kind] = walk.least[depth - 1, kind] + work
    for i in range(elements.touch_offsets[element], elements.touch_offsets[element + 1]):
        net = elements.touches[i]
        came_in, goes_out, lasts = 0.0, 0.0, 0
        if net < 0:
            net = ~net
            walk.homes[net] = 1
            came_in = -1.0 if walk.inside[net] else 0.0
            goes_out = 1.0 if walk.inside[net] < elements.net_sizes[net] else 0.0
            lasts = walk.below[net]
        else:
            walk.inside[net] += 1
            if walk.homes[net] == 1:
                goes_out = -1.0 if walk.inside[net] == elements.net_sizes[net] else 0.0
            elif walk.inside[net] == 1:
                came_in = 1.0
                lasts = walk.homes[net]
        if came_in == 0.0 and goes_out == 0.0:
            continue
        for kind in range(kinds):
            into, out = elements.in_seconds[net, kind], elements.out_seconds[net, kind]
            walk.loads[depth, kind] += came_in * into + goes_out * out
            if lasts:
                walk.least[depth, kind] += max(came_in, 0.0) * into + max(goes_out, 0.0) * out


@inlined
def _take_back(elements: Elements, walk: Walk, element: int) -> None:
    for i in range(elements.touch_offsets[element], elements.touch_offsets[element + 1]):
        touch = elements.touches[i]
        if touch < 0:
            walk.homes[~touch] = 0
        else:
            walk.inside[touch] -= 1


@inlined
def _note(table: Table, walk: Walk, depth: int, alive: int) -> bool:
    """Note the stage in the table; whether some kind of device could take more."""
    ceiling, below, above = table.ceiling[0], walk.at[0], walk.at[depth]
    grows = False
    for kind in range(len(walk.kinds)):
        if not walk.kinds[kind] or walk.held_bytes[depth] > table.room_bytes[kind]:
            continue
        if walk.least[depth, kind] >= ceiling:
            continue
        grows = True
        load = walk.loads[depth, kind]
        if load >= ceiling:
            continue
        for i in range(alive):
            state = walk.states[i]
            then = table.nexts[state, kind]
            if then < 0 or table.left_work[above] > ceiling * table.power[then]:
                continue
            value = max(load, table.values[below, state])
            if value < table.values[above, then]:
                table.values[above, then] = value
                table.origins[above, then] = below
                table.kinds[above, then] = kind
    return grows
