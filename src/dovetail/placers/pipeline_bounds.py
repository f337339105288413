"""Proves a lower bound on the step of every pipeline of a problem.

A pipeline here: stages along the edges of `PipelineElements`, each on a device of its own
(interleaved: on a device with others), each device's tasks in the order of a schedule, the ops of a
task together, and then its updates.

*Load*. Some device computes at least what a linear programme says, for M micro-batches.

*Fill, work, drain*. Before a stage can go on with its first micro-batch the stages before it must
have passed it on, and after its last backward task the gradients must pass them all:

    stage 0   F ─┐                              ┌─ B
    stage 1      F ─┐                        ┌─ B
    stage 2         F F F B F B F B F B B B B        head + M T + tail

So with stages D_1, D_2, ... the step takes at least max over s of head_s + M T_s + tail_s, where
head and tail grow from stage to stage. Its minimum over all stages is found by a dynamic programme
over *ideals*, sets of elements that hold all that comes before their members (the states of
Tarnawski et al., NeurIPS 2020, https://arxiv.org/abs/2006.16423, section 4; the recurrence is
ours). For ideals I and I' = I + D:

    V(I) = min over D of max(M T(D) - free(D), head(I, I') + tail(I, I') + V(I'))

p(I) is the op of I whose value leaves I and comes last on the longest path. head(I, I') is what D
computes from the first op that reads p(I)'s value to p(I'), one op after the other, and the sending
of its value; tail is the same for gradients, with time running backwards. free(D) is what comes
before the first reader in the order of D's ops, or behind the last gradient that it sends: it may
be done while D waits, for one micro-batch. In zero-bubble the ops of B have no such order, so there
only what lies on paths from one exit to the next counts, and W is free for all micro-batches.

Where p(I') does not wait for p(I), or D does not, the value counts from the beginning of the step,
which is no further away than all work up to p(I) (`most`). A stage's updates come behind all of its
gradients. A second programme leaves the tail out and counts the updates of each stage.

*Round trip*. In gpipe and 1f1b a device takes no more than w forward tasks before its first
backward task, for which it waits until the first micro-batch has come back. So with R_s the seconds
of one micro-batch from stage s through all later stages and back to it, the step takes at least

    head_s + R_s + tail_s + (M - 1) T_s - (w_s - 1) F_s    w_s = S - s in 1f1b; in gpipe, 1 counts

for every stage s. In gpipe all stages but the last wait as long for the last forward task. The
second part, from (M - 1) T_s on, has a least maximum over all stages by a programme, and for each
interval of it the first part by another. R_s lies in the middle of the step, where only what waits
for a value counts.

All programmes have one form, with terms of their own, and the devices that are used as states:

    V(I) = min over D of max(term(D), added(I, I') + V(I'))

Each takes O(ideals^2 x sets of devices), and is left out with more than `MOST_IDEALS` ideals.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Phase
from dovetail.graph.copies import sums_of_gradients
from dovetail.placers.pipelines import (
    Bool,
    Float64,
    Int64,
    PipelineElements,
    PipelineProblem,
    sum_seconds,
)
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.bounds import LowerBound, load_balance_seconds

MOST_IDEALS = 6_000
"""With more ideals the programmes are left out: they would take a minute."""
LEFT_OUT_SHARES = (0.0, 1e-5, 1e-4, 2e-4, 5e-4, 1e-3)
"""Elements of less than such a share of the work are left out, in turn, while there are too many
ideals."""
MOST_STATES = 64
"""Sets of devices, like ones counted, with which the programme still runs."""
MOST_HALVINGS, LIMIT_SHARE = 60, 5e-4
"""So many limits are tried in the bound of the round trip, until they differ by this share."""
UNKNOWN = 1e30
"""Seconds that stand for "any number of them"."""
MOST_ENTRIES = 4e9
"""All programmes with limits go over so many entries of their tables at most."""
ROUNDING = 1e-9
"""Bounds are lowered by this share, since sums round."""


def pipeline_bound(
    problem: PipelineProblem, value: float = np.inf, *, quick: bool = False
) -> LowerBound:
    """Return the best bound we can prove for every pipeline of the problem.

    quick   True: without the dynamic programmes
    value   the seconds of a pipeline that is known; stages that take longer are not looked at
    """
    # Sums of gradients run once a step with some stages. They count as nothing.
    of_ops = problem.costs.compute_seconds.copy()
    of_ops[sums_of_gradients(problem.graph)[:, None] & np.isfinite(of_ops)] = 0.0
    problem = replace(problem, costs=replace(problem.costs, compute_seconds=of_ops))
    elements, count = problem.elements, problem.micro_batches

    # The longest path through one micro-batch, each op on its fastest device.
    graph = problem.graph
    seconds = np.where(graph.is_source, 0.0, problem.costs.compute_seconds.min(axis=1))
    ends = _depths(seconds, graph.input_offsets, graph.producers[graph.input_tensors])
    path_seconds = float(ends.max(initial=0.0)) * (1 - ROUNDING)
    bounds = [LowerBound(path_seconds, "critical path of one micro-batch")]

    work = count * (elements.forward + elements.backward) + elements.updates
    if problem.costs.source == "analytic":
        work += (count - 1) * elements.sums
    work = np.where(elements.runs, work, np.inf)
    loads = load_balance_seconds(work)
    bounds.append(LowerBound(loads, "load balance of all micro-batches (LP)"))

    # The programmes, unless there are too many ideals or sets of devices.
    if "interleaved" not in problem.schedules and not quick:
        # Devices that take equally long for every element are alike; some can run none.
        alike: dict[bytes, list[int]] = {}
        columns = np.stack([elements.forward, elements.backward, elements.updates])
        for device, record in enumerate(problem.machine.devices):
            if record.kind != "host" and elements.runs[:, device].any():
                key = columns[:, :, device].tobytes() + elements.runs[:, device].tobytes()
                alike.setdefault(key, []).append(device)
        kinds = list(alike.values())
        # Elements of ever more work are left out while there are too many ideals.
        seconds = elements.forward + elements.backward
        seconds = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1)
        share = seconds / max(float(seconds.sum()), 1e-300)
        tried = (_ideals(elements, ~elements.loose & (share >= s)) for s in LEFT_OUT_SHARES)
        ideals = next((ideals for ideals in tried if ideals is not None), None)
        states = int(np.prod([len(members) + 1 for members in kinds]))
        if ideals is not None and states <= MOST_STATES:
            table = _BoundTable(problem, ideals, kinds)
            filled = max(table.fill(drain=True, value=value), table.fill(drain=False, value=value))
            bounds.append(LowerBound(filled, "fill, work and drain (dynamic programme)"))
            if table.in_order:
                trip = table.round_trip(value)
                bounds.append(LowerBound(trip, "round trip (dynamic programmes)"))
    return max(bounds, key=lambda bound: bound.seconds)


@kernel
def _longest(seconds: Float64, offsets: Int64, befores: Int64, ends: Float64) -> None:
    for op in range(len(seconds)):
        latest = 0.0
        for entry in range(offsets[op], offsets[op + 1]):
            latest = max(latest, ends[befores[entry]])
        ends[op] = latest + seconds[op]


def _depths(
    seconds: Float64, offsets: NDArray[np.integer], befores: NDArray[np.integer]
) -> Float64:
    """Return [ops] the seconds of the longest path up to the end of each op."""
    ends = np.zeros(len(seconds))
    _longest(seconds, np.asarray(offsets, np.int64), np.asarray(befores, np.int64), ends)
    return ends


def _ideals(elements: PipelineElements, counts: Bool) -> tuple[Int64, Bool] | None:
    """Return (elements that count, ideals [ideals, those elements]), smaller ones first; None if
    there are none or more than `MOST_IDEALS`.

    Elements that do not count may be anywhere and take no time. Those that wait for each other
    through them still do.
    """
    members = np.flatnonzero(counts)
    if not len(members):
        return None
    place = {element: node for node, element in enumerate(members.tolist())}

    # Paths through elements that do not count are edges, too.
    following: list[set[int]] = [set() for _ in range(elements.count)]
    before: list[set[int]] = [set() for _ in range(elements.count)]
    for first, second in elements.edges.tolist():
        following[first].add(second)
        before[second].add(first)
    for element in np.flatnonzero(~counts).tolist():
        for first in before[element]:
            following[first].discard(element)
            following[first] |= following[element]
        for second in following[element]:
            before[second].discard(element)
            before[second] |= before[element]
    pairs = [(place[f], place[s]) for f in members.tolist() for s in following[f] if counts[s]]

    # From the empty ideal to that of all; `masks` grows while it is gone through. `ready` has what
    # may be added to each.
    needs = [0] * len(members)
    after: list[list[int]] = [[] for _ in members]
    for first, second in pairs:
        needs[second] |= 1 << first
        after[first].append(second)
    roots = [node for node in range(len(members)) if not needs[node]]
    ready = {0: frozenset(roots)}
    masks = [0]
    for ideal in masks:
        for node in ready[ideal]:
            larger = ideal | 1 << node
            if larger in ready:
                continue
            free = set(ready[ideal]) - {node}
            free.update(other for other in after[node] if needs[other] & larger == needs[other])
            ready[larger] = frozenset(free)
            masks.append(larger)
            if len(masks) > MOST_IDEALS:
                return None
    return members, _bits(masks, len(members))


def _bits(masks: Collection[int], size: int) -> Bool:
    """[masks, size] the bits of integers."""
    width = (size + 7) // 8
    if not masks:
        return np.zeros((0, size), dtype=bool)
    rows = [np.frombuffer(mask.to_bytes(width, "little"), np.uint8) for mask in masks]
    return np.unpackbits(np.stack(rows), axis=1, bitorder="little")[:, :size].astype(bool)


class _Passage(NamedTuple):
    """Where values of one direction pass from an ideal to the rest, and what is computed between.

    For gradients time runs backwards: op 0 is the last one of the step, and a value "comes" from
    the op that reads it.

    There is one for the ends of the step and one for its middle. In the middle, nothing limits how
    long before a value comes the step has begun, and the first micro-batch has no sums of gradients
    behind its ops.

    in_order    True: a device runs the ops of a task by their numbers
    exits       [ideals] the exit p(I), a place in `exit_places`; -1: none
    exit_places [exits] the element of each
    exit_ranks  [exits] the number of each exit's op
    starts      [ideals] number of the first op outside that reads p(I)'s value; -1: none
    start_places  [ideals] the element of that op
    upto        [ideals, points, kinds] seconds of the ideal's ops with numbers up to a point's; at
                the ends also of the sums of gradients that the last micro-batch has behind them
    exit_points, start_points   [exits], [ideals] the points of an exit, and right before a start
    total       [ideals, kinds] seconds of the ideal's ops
    behind      [ideals, exits, kinds] seconds of those that come after an exit
    between     [exits + 1, exits, kinds] seconds of what lies after the first and up to the second;
                the last row is of what lies up to the second at all
    send        [exits] least seconds of sending the value
    updates     [ideals, kinds] seconds of the ideal's updates, which come behind all gradients: 0
                for values, and in the middle
    most        [ideals] no head (or tail) that the programme adds up for an ideal is longer;
                `UNKNOWN` in the middle
    """

    in_order: bool
    exits: Int64
    exit_places: Int64
    exit_ranks: Int64
    starts: Int64
    start_places: Int64
    upto: Float64
    exit_points: Int64
    start_points: Int64
    total: Float64
    behind: Float64
    between: Float64
    send: Float64
    updates: Float64
    most: Float64


class _BoundTable:
    """The ideals of a problem, what passes from each to the rest, and the programmes over them.

    rows         [ideals, members] the elements of each, of those that count
    devices      [kinds] a device of each kind
    place        [ops] the place of the op's element among the members; -1: none
    last_sums    [ops, devices] seconds of the last sum of an op's gradients, for ops that make
                 nothing but gradients of parameters: the sum comes right behind such an op
    seconds      name -> [members, kinds] seconds of the elements, 0 where they may not be
    in_order     True: a device runs the ops of a backward task by their numbers
    forward, backward   what passes at the ends of the step, and in its middle
    """

    def __init__(
        self, problem: PipelineProblem, ideals: tuple[Int64, Bool], kinds: list[list[int]]
    ) -> None:
        graph, elements = problem.graph, problem.elements
        self.problem = problem
        members, self.rows = ideals
        self.devices = [kind[0] for kind in kinds]
        place = np.full(elements.count, -1, dtype=np.int64)
        place[members] = np.arange(len(members))
        self.place = place[elements.of_op]

        self.last_sums, sums = sum_seconds(problem), elements.sums
        if problem.costs.source == "analytic":
            elsewhere = graph.phases[graph.readers] != Phase.UPDATE
            self.last_sums[graph.producers[graph.input_tensors[elsewhere]]] = 0.0
        else:
            # Sums that were measured are not known here.
            self.last_sums, sums = np.zeros_like(self.last_sums), np.zeros_like(sums)
        last = np.zeros((elements.count, len(problem.machine.devices)))
        np.add.at(last, elements.of_op, self.last_sums)
        columns = {
            "forward": elements.forward, "backward": elements.backward, "sums": sums,
            "updates": elements.updates, "last": last,
        }  # fmt: skip
        finite = elements.runs[members][:, self.devices]
        self.seconds = {
            name: np.where(finite, column[members][:, self.devices], 0)
            for name, column in columns.items()
        }

        packed = np.packbits(self.rows, axis=1, bitorder="little")
        padded = np.zeros((len(self.rows), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
        padded[:, : packed.shape[1]] = packed
        counts = np.array([len(kind) for kind in kinds], dtype=np.int64)
        self.lattice = _Lattice(
            words=padded.view(np.uint64),
            order=np.argsort(-self.rows.sum(axis=1), kind="stable"),
            barred=self._sums((~finite).astype(np.float64)),
            counts=counts,
            strides=np.concatenate([[1], np.cumprod(counts + 1)[:-1]]).astype(np.int64),
        )
        self.in_order = "zero-bubble" not in problem.schedules
        self.forward = self._passages(Phase.FORWARD, in_order=True)
        self.backward = self._passages(Phase.BACKWARD, in_order=self.in_order)

    def _passages(self, phase: Phase, *, in_order: bool) -> tuple[_Passage, _Passage]:
        """Return what passes of forward or of backward ops at the ends of the step, and in its
        middle."""
        graph = self.problem.graph
        ops = np.flatnonzero(graph.phases == phase)
        index = np.full(len(graph), -1, dtype=np.int64)
        index[ops] = np.arange(len(ops))
        # The reads among the phase's ops, which `index` numbers.
        makers, readers = index[graph.producers[graph.input_tensors]], index[graph.readers]
        taken = (makers >= 0) & (readers >= 0)
        makers, readers = makers[taken], readers[taken]
        tensors = graph.input_tensors[taken].astype(np.int64)
        if phase == Phase.BACKWARD:
            ops = ops[::-1]
            makers, readers = len(ops) - 1 - readers, len(ops) - 1 - makers
        order = np.lexsort((makers, readers))
        makers, readers, tensors = makers[order], readers[order], tensors[order]
        seconds = self.problem.costs.compute_seconds[ops][:, self.devices]
        offsets = np.searchsorted(readers, np.arange(len(ops) + 1))
        depth = _depths(seconds.min(axis=1), offsets, makers)
        place = self.place[ops]
        # Elements that are left out count as nothing, also on the way between others.
        bare = np.where(np.isfinite(seconds) & (place[:, None] >= 0), seconds, 0.0)
        seconds = bare
        if phase == Phase.BACKWARD and in_order:
            last = np.where(place[:, None] >= 0, self.last_sums[ops][:, self.devices], 0.0)
            seconds = bare + last

        # By their readers, whose numbers are above their makers': the op of each and all before it;
        # and the values that reach an op through ops of elements that are left out alone.
        upto_of = [1 << op for op in range(len(ops))]
        passing: dict[int, int] = {}
        passed: dict[int, int] = {}
        for maker, reader in zip(makers.tolist(), readers.tolist(), strict=True):
            upto_of[reader] |= upto_of[maker]
            comes = passing.get(maker, 0) if place[maker] < 0 else 1 << maker
            if place[reader] < 0:
                passing[reader] = passing.get(reader, 0) | comes
            elif place[maker] < 0 and comes:
                passed[reader] = passed.get(reader, 0) | comes
        through = [
            np.stack([(sources := np.flatnonzero(row)), np.full(len(sources), reader)])
            for reader, row in zip(passed, _bits(passed.values(), len(ops)), strict=True)
        ]
        pairs = np.concatenate([*through, np.stack([makers, readers])], axis=1)

        # An ideal's exit is the deepest op whose value is read outside; ties: the last. Its start
        # is the first op outside that reads this value.
        outer = place[pairs]
        from_ops, to_ops = pairs[:, (outer >= 0).all(axis=0) & (outer[0] != outer[1])]
        exits = np.full(len(self.rows), -1, dtype=np.int64)
        starts = np.full(len(self.rows), -1, dtype=np.int64)
        for ideal, row in enumerate(self.rows):
            leaves = row[place[from_ops]] & ~row[place[to_ops]]
            if leaves.any():
                leaving = np.unique(from_ops[leaves])
                deepest = depth[leaving]
                exits[ideal] = leaving[np.flatnonzero(deepest == deepest.max())[-1]]
                starts[ideal] = to_ops[leaves & (from_ops == exits[ideal])].min()
        ranks = np.unique(exits[exits >= 0])
        position = np.where(exits < 0, -1, np.searchsorted(ranks, exits))
        points = np.unique(np.concatenate([ranks, starts - 1]))
        # [exits, ops] The op of an exit and all before it, and all after it. Reads are taken by
        # their readers, last first, so that a reader's own readers are known.
        behind_of = [0] * len(ops)
        for at in np.argsort(-readers, kind="stable").tolist():
            maker, reader = int(makers[at]), int(readers[at])
            behind_of[maker] |= behind_of[reader] | 1 << reader
        before = _bits([upto_of[op] for op in ranks.tolist()], len(ops))
        behind = _bits([behind_of[op] for op in ranks.tolist()], len(ops))
        # The last row stands for the beginning, which everything comes after.
        after = np.concatenate([behind, np.ones((1, len(ops)), dtype=bool)]).astype(np.float64)
        between = np.stack([after @ (before * column).T for column in seconds.T], axis=2)

        # The smallest tensor of an exit passes over the fastest link. An element that is left out
        # may read and pass on any size.
        problem = self.problem
        sizes = np.where(place[readers] < 0, 0.0, problem.costs.sends_of(graph)[tensors])
        smallest = np.full(int(makers.max(initial=-1)) + 1, np.inf)
        np.minimum.at(smallest, makers, sizes)
        links = problem.machine.links
        rate = max((link.bandwidth_bytes_per_second for link in links), default=np.inf)
        latency = min((link.latency_seconds for link in links), default=0.0)
        send = latency + smallest[ranks] / rate
        stages = int(self.lattice.counts.sum())
        every = np.arange(len(ops))
        late = self.seconds["updates"] * (phase == Phase.BACKWARD)
        updates = self._sums(late)

        # The ops that may count on the way to an exit, on the slowest device.
        counted = every[None] <= ranks[:, None] if in_order else before
        most = np.zeros(len(position))
        if len(ranks):
            sums = self._within(counted, place, seconds.max(axis=1, keepdims=True))[:, :, 0]
            most = sums[np.arange(len(position)), np.maximum(position, 0)]
        way = _Passage(
            in_order=in_order,
            exits=position,
            exit_places=place[ranks],
            exit_ranks=ranks,
            starts=starts,
            start_places=np.where(starts < 0, -1, place[starts]),
            upto=self._within(every[None] <= points[:, None], place, seconds),
            exit_points=np.searchsorted(points, ranks),
            start_points=np.searchsorted(points, starts - 1),
            total=self._within(np.ones((1, len(ops)), dtype=bool), place, seconds)[:, 0],
            behind=self._within(behind, place, seconds),
            between=between,
            send=send,
            updates=updates,
            most=most
            + stages * np.where(self.rows[:, place[ranks]], send, 0).max(axis=1, initial=0)
            + self._sums(late.max(axis=1)),
        )
        middle = way._replace(
            upto=self._within(every[None] <= points[:, None], place, bare),
            updates=np.zeros_like(updates),
            most=np.full_like(way.most, UNKNOWN),
        )
        return way, middle

    def _within(self, masks: Bool, place: Int64, seconds: Float64) -> Float64:
        """[ideals, masks, kinds] seconds of the ops of each ideal that a mask [masks, ops] has."""
        there = place >= 0
        sums = []
        for column in seconds.T:
            weights = np.zeros((self.rows.shape[1], len(masks)))
            np.add.at(weights, place[there], (masks * column)[:, there].T)
            sums.append(self._sums(weights))
        return np.stack(sums, axis=2)

    def _sums(self, values: Float64) -> Float64:
        """[ideals, ...] sums over each ideal's elements, of values [members, ...]."""
        flat = values.reshape(len(values), -1)
        sums = self.rows.astype(np.float64) @ flat
        return np.asarray(sums.reshape(len(self.rows), *values.shape[1:]))

    def fill(self, *, drain: bool, value: float) -> float:
        """The least over all stages of the longest of head, work and, with `drain`, tail; without,
        the updates count as work."""
        of, count = self.seconds, self.problem.micro_batches
        work = count * (of["forward"] + of["backward"])
        if drain:
            # The last sum may come after the last gradient was sent.
            work = work + (max(0, count - 2) * of["sums"] + of["last"] if self.in_order else 0)
        else:
            work = work + (count - 1) * of["sums"] + of["updates"]
        sums = self._sums(work)
        free = 1 if self.in_order else count
        return self._solve(_Terms(FILL, sums, sums, sums, 0, 0.0, np.inf, free, drain, value))

    def round_trip(self, value: float) -> float:
        """The bound of the round trip, for gpipe or 1f1b.

        value   the seconds of a pipeline that is known

        The least of the sum of both parts is sought over intervals of the second: stages of which
        the largest second part lies in an interval take at least its lower end, and the shortest
        way of such stages. The interval with the least sum is halved, again and again.
        """
        of, count = self.seconds, self.problem.micro_batches
        second = (count - 1) * (of["forward"] + of["backward"]) + max(0, count - 2) * of["sums"]
        terms = _Terms(
            PEAK,
            self._sums(of["forward"] + of["backward"]),
            self._sums(second),
            self._sums(of["forward"]),
            0 if self.problem.schedules == ("gpipe",) else int(self.lattice.counts.sum()) - 1,
            0.0, np.inf, 1, True, np.inf,
        )  # fmt: skip

        def shortest(low: float, high: float) -> float:
            """The least of the first part, where the second part of no stage is above `high`, and
            that of the stage that is waited for no less than `low`; inf if there are none."""
            low, high = low * (1 - ROUNDING), high * (1 + ROUNDING)
            return self._solve(terms._replace(programme=ROUND_TRIP, low=low, high=high))

        lowest = self._solve(terms)
        limits, ways = [lowest, np.inf], [shortest(lowest, np.inf)]
        # So many limits are tried as take a few seconds.
        states = int(np.prod(self.lattice.counts + 1))
        halvings = min(MOST_HALVINGS, MOST_ENTRIES / (len(self.lattice.order) ** 2 * states))
        for _ in range(int(halvings)):
            least = int(np.argmin([low + way for low, way in zip(limits, ways, strict=False)]))
            low, high = limits[least : least + 2]
            middle = (low + high) / 2 if high < np.inf else min(2 * low, max(low, value))
            if middle - low <= LIMIT_SHARE * low:
                break
            limits.insert(least + 1, middle)
            ways[least : least + 1] = [shortest(low, middle), shortest(middle, high)]
        return min(low + way for low, way in zip(limits, ways, strict=False))

    def _solve(self, terms: "_Terms") -> float:
        """V of the empty ideal, lowered for rounding. Without any stages it is inf for the round
        trip, which has other intervals, and else 0."""
        order, counts = self.lattice.order, self.lattice.counts
        # Of the table only the entries of the whole graph are known.
        least = np.full((int(np.prod(counts + 1)), len(order)), np.inf)
        first = least.copy()
        least[:, order[0]] = 0.0
        _solve(self.lattice, *self.forward, *self.backward, terms, least, first)
        if terms.programme == ROUND_TRIP:
            # The second part alone is work of one device.
            return max(0.0, float(first[0, order[-1]])) * (1 - ROUNDING)
        seconds = float(least[0, order[-1]])
        return seconds * (1 - ROUNDING) if np.isfinite(seconds) else 0.0


FILL, PEAK, ROUND_TRIP = range(3)
"""The programmes: fill, work and drain; the least of the largest second part of a stage; and the
least of the first part between limits of the second."""


class _Lattice(NamedTuple):
    """The ideals and the devices that may take what lies between two of them.

    words    [ideals, words] the elements of each as bits
    order    [ideals] the ideals, larger ones first
    barred   [ideals, kinds] number of its elements that devices of the kind may not run
    counts   [kinds] devices of each kind. A state tells how many of each are used
    strides  [kinds] a state is the sum of strides x devices used
    """

    words: NDArray[np.uint64]
    order: Int64
    barred: Float64
    counts: Int64
    strides: Int64


class _Terms(NamedTuple):
    """What a programme adds up.

    programme   FILL, PEAK or ROUND_TRIP
    work        [ideals, kinds] seconds of the tasks: of all micro-batches for FILL, else of one
    second, each   [ideals, kinds] seconds of the second part as if nothing were done ahead, and of
                one forward task in it
    ahead       forward tasks that the first stage may do ahead
    low, high   limits of second parts: that of the stage that is waited for is not below the one,
                and no stage's above the other
    free        tasks that need not come before the value that drains a stage
    drain       True: tails count
    longest     stages whose own term is longer are not looked at
    """

    programme: int
    work: Float64
    second: Float64
    each: Float64
    ahead: int
    low: float
    high: float
    free: int
    drain: bool
    longest: float


@kernel
def _solve(  # noqa: C901, PLR0917  the programmes share one loop
    lattice: _Lattice,
    forward: _Passage,
    forward_middle: _Passage,
    backward: _Passage,
    backward_middle: _Passage,
    terms: _Terms,
    least: Float64,
    first: Float64,
) -> None:
    """Fill `least` [states, ideals]: V of the docstring above, with the devices that are used.

    first   [states, ideals] of the round trip alone, with the stage s among the later ones: seconds
            to it at the beginning of the step, through all stages behind it and back, and from it
            at the end of the step. `least` is then through all later stages and back, in the middle
            of the step
    """
    words, order, barred, counts, strides = lattice
    for turn in range(1, len(order)):
        ideal = order[turn]
        for other_turn in range(turn):
            larger = order[other_turn]
            is_last = other_turn == 0
            # A stage is what lies between an ideal and one that holds it.
            is_held = True
            for word in range(words.shape[1]):
                if words[ideal, word] & ~words[larger, word]:
                    is_held = False
                    break
            if not is_held:
                continue
            for kind in range(len(counts)):
                if barred[larger, kind] > barred[ideal, kind]:
                    continue  # no device of the kind may run it
                term, added, mine, ends, updates = 0.0, 0.0, 0.0, 0.0, 0.0
                work = terms.work[larger, kind] - terms.work[ideal, kind]
                if terms.programme != PEAK:
                    # Work of the stage that is certainly done after the value came that fills it
                    # and before the value goes that drains it; and head and tail.
                    mine = work - _free(forward, words, ideal, larger, kind, 1)
                    ends = _passed(forward, words, ideal, larger, kind)
                    if terms.drain:
                        mine -= _free(backward, words, ideal, larger, kind, terms.free)
                        ends += _passed(backward, words, ideal, larger, kind)
                    term, added = mine, ends
                if terms.programme == ROUND_TRIP:
                    # In the middle of the step: the stage's own tasks, one after the other whatever
                    # is between them, and the ways to the next stage and back.
                    term = work - _free(forward_middle, words, ideal, larger, kind, 1)
                    term = max(0.0, term - _free(backward_middle, words, ideal, larger, kind, 1))
                    added = _passed(forward_middle, words, ideal, larger, kind)
                    added += _passed(backward_middle, words, ideal, larger, kind)
                    if turn == len(order) - 1:
                        # The first stage's updates come behind all its tasks.
                        updates = backward.updates[larger, kind]
                if is_last:
                    added, ends = 0.0, 0.0
                if term > terms.longest:
                    continue
                second = terms.second[larger, kind] - terms.second[ideal, kind]
                each = terms.each[larger, kind] - terms.each[ideal, kind]
                for state in range(len(least)):
                    if state // strides[kind] % (counts[kind] + 1) == counts[kind]:
                        continue  # all devices of the kind are used
                    part = 0.0
                    if terms.programme != FILL:
                        # The second part is less what the stage may do of its forward tasks before
                        # its first backward task: `ahead` tasks on the first device, and one less
                        # on each later one.
                        before = 0
                        for other in range(len(counts)):
                            before += state // strides[other] % (counts[other] + 1)
                        part = second - max(0, terms.ahead - before) * each
                        if part > terms.high:
                            continue
                    if terms.programme == PEAK:
                        term = part
                    used = state + strides[kind]
                    back = added + least[used, larger]
                    least[state, ideal] = min(least[state, ideal], max(term, back))
                    if terms.programme == ROUND_TRIP:
                        seconds = ends + first[used, larger]
                        if part >= terms.low:
                            seconds = min(seconds, max(mine + updates, back + updates))
                        first[state, ideal] = min(first[state, ideal], seconds)


@inlined
def _holds(words: NDArray[np.uint64], ideal: int, place: int) -> bool:
    return bool((words[ideal, place >> 6] >> np.uint64(place & 63)) & np.uint64(1) != 0)


@inlined
def _free(
    way: _Passage, words: NDArray[np.uint64], ideal: int, larger: int, kind: int, times: int
) -> Any:
    """Seconds of the stage's work that need not come after the value that leaves `ideal`."""
    at = way.exits[ideal]
    if at < 0:
        return 0.0
    if way.in_order:
        if not _holds(words, larger, way.start_places[ideal]):
            return way.most[ideal]
        point = way.start_points[ideal]
        before = way.upto[larger, point, kind] - way.upto[ideal, point, kind]
        # The value comes no later than `most` after the beginning, so no more is done before.
        return min(times * before, way.most[ideal])
    behind = way.behind[larger, at, kind] - way.behind[ideal, at, kind]
    if behind <= 0:
        return way.most[ideal]
    before = way.total[larger, kind] - way.total[ideal, kind] - behind
    return min(times * before, way.most[ideal])


@inlined
def _passed(way: _Passage, words: NDArray[np.uint64], ideal: int, larger: int, kind: int) -> Any:
    """Seconds from the coming of one exit's value to that of the next; less than 0 where the next
    does not wait for the first."""
    at, following = way.exits[ideal], way.exits[larger]
    if at == following:
        return 0.0
    updates = way.updates[larger, kind] - way.updates[ideal, kind]
    if at < 0 and way.in_order:
        last = way.exit_points[following]
        before = way.upto[larger, last, kind] - way.upto[ideal, last, kind]
        return updates + before + way.send[following]
    if at < 0:
        # The last row stands for the beginning.
        return updates + way.between[-1, following, kind] + way.send[following]
    if following < 0 or _holds(words, ideal, way.exit_places[following]):
        return -way.most[ideal]
    if way.in_order:
        last = way.exit_points[following]
        before = way.upto[larger, last, kind] - way.upto[ideal, last, kind]
        seconds = updates + before - way.most[ideal]
        start = way.starts[ideal]
        waits = start <= way.exit_ranks[following]
        if waits and _holds(words, larger, way.start_places[ideal]):
            first = way.start_points[ideal]
            ahead = way.upto[larger, first, kind] - way.upto[ideal, first, kind]
            seconds = max(seconds, before - ahead)
        return seconds + way.send[following]
    if way.between[at, following, kind] <= 0:
        return -way.most[ideal]
    return way.between[at, following, kind] + way.send[following]
