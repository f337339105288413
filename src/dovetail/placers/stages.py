"""The best chain of stages through a lattice of ideals: the programme that `ideal_dp` and
`linear_dp` share.

An ideal is a set of elements that holds all predecessors of its members. With f(I, c) the least
possible largest load of stages that make up I on devices c (a count of each kind),

    f({}, none) = 0
    f(I, c) = min over ideals J below I and kinds k in c of   max(f(J, c - k), load(k, I \\ J))

From every J that is reached, a depth-first walk up adds elements in ascending rank, which meets
each I above it exactly once: the walk to I adds the elements of I \\ J in the order of their ranks,
and every prefix of that is an ideal with J. Along the walk loads follow from counts per net.

Only plans below a known value (`ceiling`) are looked for, so most of it is cut off:
* the walk, where work, bytes and those transfers that more elements cannot undo reach it for every
  kind of device that is left;
* the states (I, c), where what is left of the work is more than the devices that are left can do:
  sum of lambda_k x devices left of k x ceiling < sum over elements left of min_k lambda_k x work_k.

Exact for any weights lambda. O(ideals x ideals above) steps at most, each O(nets of an element x
kinds + states).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import Budget
from dovetail.placers.contiguity import Elements, Kinds
from dovetail.placers.stage_kernel import Lattice, Table, Walk, left_work, push
from dovetail.simulator.flat import Float64, Int32, Int64

MOST_ENTRIES = 2**24
"""Largest table, in ideals x states: 13 bytes each."""
_ROUNDING = 1e-9
"""Share of all work that sums in another order must not cut a plan off for."""


class Chain(NamedTuple):
    """value: the largest load; stages: [elements] index of its stage; devices: of each stage."""

    value: float
    stages: Int32
    devices: list[int]


class States(NamedTuple):
    """Devices in use. nexts: as in `Table`; left [states, kinds]: devices that are left."""

    nexts: Int32
    left: Int64


def states_of(counts: NDArray[np.int64], most: int) -> States:
    """Every count of devices of each kind; where these are more than `most`, devices are used in
    their order only (one kind each, then)."""
    kinds = len(counts)
    if np.prod(counts + 1.0) > most:
        assert (counts == 1).all(), "devices in order are kinds of their own"
        upto = np.arange(kinds + 1)
        nexts = np.where(upto[:, None] <= np.arange(kinds), np.arange(kinds) + 1, -1)
        return States(nexts.astype(np.int32), (nexts >= 0).astype(np.int64))
    used = np.indices(tuple(counts + 1)).reshape(kinds, -1).T
    strides = np.cumprod(np.concatenate([[1], (counts + 1)[:0:-1]]))[::-1]
    index = np.arange(len(used))[:, None] + strides
    return States(np.where(used < counts, index, -1).astype(np.int32), counts - used)


def best_chain(
    elements: Elements,
    lattice: Lattice,
    kinds: Kinds,
    *,
    ceiling: float,
    budget: Budget,
    step_evaluations: float,
    always: bool = False,
) -> tuple[Chain | None, bool]:
    """The best chain below `ceiling`, or None; and whether the search came to its end.

    budget             ends it early, unless `always`
    step_evaluations   what it is charged for one step of a walk
    """
    counts = np.array([len(members) for members in kinds.members])
    states = states_of(counts, MOST_ENTRIES // len(lattice.parents))
    table = _table(elements, lattice, kinds, states, ceiling)
    walk = _walk(elements, lattice, len(states.nexts))
    ideal, steps = 0, np.zeros(1, np.int64)
    while ideal < len(lattice.parents):
        if budget.exhausted and not always:
            return None, False
        ideal = push(elements, lattice, table, walk, ideal, steps)
        budget.charge(float(steps[0]) * step_evaluations)
        steps[0] = 0
    state = int(table.values[-1].argmin())
    if not table.values[-1, state] < ceiling:
        return None, True
    return _backtrack(lattice, table, kinds, state), True


def _table(
    elements: Elements, lattice: Lattice, kinds: Kinds, states: States, ceiling: float
) -> Table:
    shape = (len(lattice.parents), len(states.nexts))
    weights, weighed = _weights(elements.work_seconds, states.left[0])
    left = np.zeros(shape[0])
    left_work(lattice, weighed, weighed.sum(), left)
    table = Table(
        values=np.full(shape, np.inf),
        origins=np.full(shape, -1, np.int32),
        kinds=np.full(shape, -1, np.int8),
        left_work=left - _ROUNDING * weighed.sum(),
        power=states.left @ weights,
        nexts=states.nexts,
        room_bytes=kinds.room_bytes,
        ceiling=np.array([ceiling]),
    )
    table.values[0, 0] = 0.0
    return table


def _weights(work_seconds: Float64, counts: Int64) -> tuple[Float64, Float64]:
    """[kinds] weights lambda that make the bound on work high, and [elements] weighed work.

    The first kind has weight 1; each other in turn the best of the quantiles of its ratio to what
    those before it make of the work.
    """
    weights = np.ones(work_seconds.shape[1])
    weighed, power = work_seconds[:, 0], float(counts[0])
    for kind in range(1, work_seconds.shape[1]):
        column = work_seconds[:, kind]
        usable = (column > 0) & np.isfinite(column) & np.isfinite(weighed)
        ratios = weighed[usable] / column[usable] if usable.any() else np.zeros(1)
        ratios = np.quantile(ratios, np.linspace(0, 1, 11))
        sums = [np.minimum(weighed, _times(column, r)).sum() for r in ratios]
        best = int(np.argmax(np.array(sums) / (power + counts[kind] * ratios)))
        weights[kind] = ratios[best]
        weighed = np.minimum(weighed, _times(column, weights[kind]))
        power += float(counts[kind] * weights[kind])
    return weights, np.where(np.isfinite(weighed), weighed, 0.0)


def _times(column: Float64, weight: float) -> Float64:
    """0 x inf is inf: what may not be there weighs nothing there."""
    finite = np.isfinite(column)
    return np.where(finite, np.where(finite, column, 0.0) * weight, np.inf)


def _walk(elements: Elements, lattice: Lattice, states: int) -> Walk:
    (count, kinds), nets = elements.work_seconds.shape, len(elements.net_sources)
    depth = count + 1
    return Walk(
        states=np.zeros(states, np.int32),
        kinds=np.zeros(kinds, np.int8),
        homes=np.zeros(nets, np.int8),
        below=np.zeros(nets, np.int32),
        inside=np.zeros(nets, np.int32),
        at=np.zeros(depth, np.int32),
        next_add=np.zeros(depth, np.int64),
        added=np.zeros(depth, np.int32),
        loads=np.zeros((depth, kinds)),
        least=np.zeros((depth, kinds)),
        held_bytes=np.zeros(depth),
    )


def _backtrack(lattice: Lattice, table: Table, kinds: Kinds, state: int) -> Chain:
    """Follow the origins down; stages are numbered from the bottom, and take the devices of their
    kind in machine order."""
    ideal = len(lattice.parents) - 1
    value = float(table.values[ideal, state])
    steps = []
    while ideal:
        kind, origin = int(table.kinds[ideal, state]), int(table.origins[ideal, state])
        steps.append((ideal, kind))
        befores = np.flatnonzero(table.nexts[:, kind] == state)  # several where some are skipped
        state = int(befores[table.values[origin, befores].argmin()])
        ideal = origin
    stages = np.zeros(len(lattice.ranks), np.int32)
    devices, free = [], [list(members) for members in kinds.members]
    for _, kind in reversed(steps):
        devices.append(free[kind].pop(0))
    for stage, (top, _) in enumerate(steps):
        while top:
            stages[lattice.lasts[top]] = len(steps) - 1 - stage
            top = int(lattice.parents[top])
    return Chain(value, stages, devices)
