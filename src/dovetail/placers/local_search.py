"""Local search over groups, starting from the best placement so far.

Each round proposes a batch of moves from the current placement and evaluates them together, so that
all cores are used. The best of the batch becomes current if it is no worse, or only a little worse:

    accept if   value <= current x (1 + temperature x Exp(1))

where the temperature falls to 0 as the budget is spent (annealing; Kirkpatrick, Gelatt and Vecchi,
Science 220, 1983, https://doi.org/10.1126/science.220.4598.671). If several moves of a batch
improve, the next batch tries them together. A search that stalls continues from another start, or
from the best placement after part of it was replaced by another start's or a few random moves were
made (iterated local search; Lourenco, Martin and Stutzle, 2003,
https://doi.org/10.1007/0-306-48056-5_11).

Differences: annealing judges the best of a batch instead of one move, and its temperature follows
the budget spent instead of a fixed schedule. A restart is accepted whatever its value.

Memory comes first: of two placements the one that lacks fewer bytes is better, whatever its value.
Kinds of move that have improved placements are proposed more often. No placement is evaluated
twice. Ties fall to the earlier proposal, so a seed and a budget of evaluations give one result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.baselines import try_baselines
from dovetail.placers.budget import UNKNOWN, Budget
from dovetail.placers.load_search import load_search
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.timeline import Timeline

# ── The critical path of a simulated step: the groups that local search should move ─────────────
#
# The path is traced backwards from the event that ends last. The cause of an event is one that
# ended at the instant when it started:
#
#     of an op        the op before it on its device, or the arrival of an input
#     of a transfer   the transfer before it on its channel, or the op (or first hop) that made what
#                     it carries available
#
# Of several causes an arrival is taken first, because arrivals tell which ops belong together.


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The critical path of a simulated step, in groups.

    groups       groups with an op on the path, ascending
    seconds      seconds that the ops of each of these groups take on the path
    producers, readers   [sends] the groups at the two ends of each send on the path
    crowded      [devices] seconds of ops on the path that had to wait for an op of their device
    """

    groups: NDArray[np.int32]
    seconds: NDArray[np.float64]
    producers: NDArray[np.int32]
    readers: NDArray[np.int32]
    crowded: NDArray[np.float64]


def critical_path(problem: PlacementProblem, timeline: Timeline) -> CriticalPath:
    """Return the critical path of a timeline. Ties: the first of an op's inputs.

    O(spans + transfers).
    """
    graph, of_op = problem.graph, problem.groups.of_op
    # Event i is span i, or transfer i - spans.
    spans = len(timeline.ops)
    starts = np.concatenate([timeline.op_starts, timeline.transfer_starts])
    ends = np.concatenate([timeline.op_ends, timeline.transfer_ends]).tolist()
    span_of = np.full(len(graph), -1)
    span_of[timeline.ops] = np.arange(spans)
    # The event before each in its lane (device or channel); -1: there is none.
    channels = timeline.transfer_channels + len(timeline.devices)
    lanes = np.concatenate([timeline.op_devices, channels])
    order = np.lexsort((starts, lanes))
    previous = np.full(len(lanes), -1)
    same = lanes[order][1:] == lanes[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    keys = zip(
        timeline.transfer_ops.tolist(),
        timeline.transfer_tensors.tolist(),
        timeline.transfer_destinations.tolist(),
        strict=True,
    )
    sent = {key: i + spans for i, key in enumerate(keys)}

    seconds, crowded = np.zeros(problem.groups.count), np.zeros(problem.devices)
    sends: list[tuple[int, int]] = []
    # Causes are followed back from the event that ends last.
    event = int(np.argmax(ends)) if ends else -1
    reader = -1
    # The number of rounds is bounded in case events of no length are each other's cause.
    for _ in range(len(ends)):
        if event < 0:
            break
        start = float(starts[event])
        if event < spans:
            reader = int(timeline.ops[event])
            seconds[of_op[reader]] += ends[event] - start
            # An input was brought by a transfer, or by the op that made it; -1 stands for a source
            # op, which has no span.
            device, awaited = int(timeline.op_devices[event]), []
            for tensor in graph.inputs_of(reader).tolist():
                maker = int(graph.producers[tensor])
                awaited.append(sent.get((maker, tensor, device), int(span_of[maker])))
        else:
            transfer = event - spans
            maker = int(timeline.transfer_ops[transfer])
            if reader >= 0:
                sends.append((int(of_op[maker]), int(of_op[reader])))
            # A transfer waits for the op that made the tensor, or for the first hop, which brought
            # the tensor to the device that this transfer leaves from.
            tensor = int(timeline.transfer_tensors[transfer])
            source = int(timeline.transfer_sources[transfer])
            awaited = [sent.get((maker, tensor, source), int(span_of[maker]))]
        # Times are equal bit for bit: the simulator starts an event at the end of its cause.
        cause = next((e for e in awaited if e >= 0 and ends[e] == start), -1)
        if cause < 0:
            cause = int(previous[event])
            if cause >= 0 and event < spans:
                crowded[timeline.op_devices[event]] += ends[event] - start
        event = cause if start > 0 else -1
    groups = np.flatnonzero(seconds)
    send_ends = np.array(sends, np.int32).reshape(-1, 2)
    return CriticalPath(
        groups.astype(np.int32), seconds[groups], send_ends[:, 0], send_ends[:, 1], crowded
    )


# ── Moves: each takes a group placement and returns a changed copy, or None ─────────────────────
#
# A move only touches groups with a choice, and only puts them where they may be.

GroupSet = NDArray[np.int32]
Random = np.random.Generator
MODULE_SHARE = 0.8
"""A module or cluster is moved as a whole only if it holds at most this share of the groups."""
CLUSTER_GROUPS = 256
"""A cluster has at most this many groups, so that building clusters takes O(edges x this)."""
CLUSTER_EDGES = 20_000
"""Clusters are built along this many edges, the heaviest ones."""


@dataclass(frozen=True, eq=False)
class MoveTables:
    """Tables of a problem, and the moves that look them up.

    neighbours       per group, the groups with a choice that it exchanges tensors with
    edges            [edges, 2] (from, to) groups, of which at least one has a choice
    pull             [edges] weights that sum to 1: the edge's bytes plus the mean bytes of edges
    modules          sets of groups that lie in one module
    clusters         sets of groups that heavy tensors join: every union that arises when groups
                     are joined along edges from the heaviest to the lightest
    path             critical path of a recent current placement; None: it was not traced
    """

    problem: PlacementProblem
    free: GroupSet
    neighbours: tuple[GroupSet, ...]
    edges: NDArray[np.int32]  # [edges, 2]
    pull: NDArray[np.float64]  # [edges]
    modules: tuple[GroupSet, ...]
    clusters: tuple[GroupSet, ...]
    path: CriticalPath | None = None

    def relocated(self, placement: GroupPlacement, groups: GroupSet, device: int) -> GroupPlacement:
        """Return the placement with `groups` on `device`, except those that may not be there."""
        moved = placement.copy()
        moved[groups[self.problem.allowed[groups, device]]] = device
        return moved

    def exchanged(
        self, placement: GroupPlacement, a: np.int32, b: np.int32
    ) -> GroupPlacement | None:
        """Return the placement with two groups each where the other was; None: one may not be."""
        allowed = self.problem.allowed
        if not (allowed[a, placement[b]] and allowed[b, placement[a]]):
            return None
        moved = placement.copy()
        moved[a], moved[b] = placement[b], placement[a]
        return moved

    def other(self, placement: GroupPlacement, group: np.int32, rng: Random) -> int:
        """Draw another device that `group` may be on."""
        options = self.problem.allowed[group].copy()
        options[placement[group]] = False
        return int(rng.choice(np.flatnonzero(options)))

    def one_group(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move one group to another device."""
        group = self.free[rng.integers(len(self.free))]
        return self.relocated(placement, group[None], self.other(placement, group, rng))

    def with_neighbours(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move one group and some of its neighbours to one device."""
        group = self.free[rng.integers(len(self.free))]
        near = self.neighbours[group]
        joining = near[rng.random(len(near)) < rng.choice((0.3, 0.6, 1.0))]
        device = self.other(placement, group, rng)
        return self.relocated(placement, np.append(joining, group), device)

    def swap(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Exchange the devices of two groups."""
        a, b = self.free[rng.integers(len(self.free), size=2)]
        return self.exchanged(placement, a, b)

    def window(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move a run of groups, in the order of their first ops, to one device."""
        count = len(self.free)
        # The cube makes short runs the most likely ones.
        length = min(count, 2 + int(count / 2 * rng.random() ** 3))
        start = rng.integers(count - length + 1)
        device = int(rng.integers(self.problem.devices))
        return self.relocated(placement, self.free[start : start + length], device)

    def boundary(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Shift a boundary between two devices along the order of groups, by a few groups."""
        devices = placement[self.free]
        at = np.flatnonzero(devices[1:] != devices[:-1])
        if not len(at):
            return None
        edge = int(at[rng.integers(len(at))])
        length = 1 + int(rng.geometric(0.3))
        if rng.random() < 0.5:
            span, device = slice(max(0, edge + 1 - length), edge + 1), int(devices[edge + 1])
        else:
            span, device = slice(edge + 1, edge + 1 + length), int(devices[edge])
        return self.relocated(placement, self.free[span], device)

    def module(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move all groups of one module to one device."""
        if not self.modules:
            return None
        groups = self.modules[rng.integers(len(self.modules))]
        return self.relocated(placement, groups, int(rng.integers(self.problem.devices)))

    def cluster(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move a cluster of groups that heavy tensors join (such as the sums of one gradient) to
        one device."""
        if not self.clusters:
            return None
        groups = self.clusters[rng.integers(len(self.clusters))]
        return self.relocated(placement, groups, int(rng.integers(self.problem.devices)))

    def follow(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move some groups, each to the device that it exchanges most bytes with."""
        if not len(self.edges):
            return None
        pulled = np.zeros(self.problem.allowed.shape)
        for ends, far_ends in (self.edges.T, self.edges.T[::-1]):
            np.add.at(pulled, (ends, placement[far_ends]), self.pull)
        pulled[~self.problem.allowed] = -1
        followers = self.free[rng.random(len(self.free)) < rng.choice((0.1, 0.3, 1.0))]
        moved = placement.copy()
        moved[followers] = pulled[followers].argmax(axis=1)
        return moved

    def cut_edge(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move one end of an edge that crosses devices to the device of the other end.

        Edges are drawn by their pull. In half of the cases, some neighbours on the same device move
        along.
        """
        crosses = placement[self.edges[:, 0]] != placement[self.edges[:, 1]]
        weights = np.cumsum(self.pull * crosses)
        if not len(weights) or weights[-1] <= 0:
            return None
        edge = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
        mover, stays = self.edges[edge][:: 1 if rng.random() < 0.5 else -1]
        if rng.random() < 0.5:
            return self.relocated(placement, mover[None], int(placement[stays]))
        near = self.neighbours[mover]
        along = near[placement[near] == placement[mover]]
        along = along[rng.random(len(along)) < 0.5]
        return self.relocated(placement, np.append(along, mover), int(placement[stays]))

    def unload(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move a group of the busiest device to the device that is least busy with it added."""
        problem = self.problem
        seconds = problem.work_seconds[np.arange(len(placement)), placement]
        loads = np.bincount(placement, weights=seconds, minlength=problem.devices)
        groups = self.free[placement[self.free] == loads.argmax()]
        if not len(groups):
            return None
        group = groups[rng.integers(len(groups))]
        options = np.where(problem.allowed[group], loads + problem.work_seconds[group], np.inf)
        return self.relocated(placement, group[None], int(options.argmin()))

    def critical_group(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move a group of the critical path, drawn by its seconds there, to another device."""
        group = self.critical(rng)
        if group is None:
            return None
        alone = np.array([group], dtype=np.int32)
        return self.relocated(placement, alone, self.other(placement, group, rng))

    def critical_send(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move one end of a send on the critical path to the device of the other end, and sometimes
        neighbours with it."""
        path = self.path
        if path is None or not len(path.producers):
            return None
        send = rng.integers(len(path.producers))
        mover, stays = path.producers[send], path.readers[send]
        if rng.random() < 0.5:
            mover, stays = stays, mover
        near = self.neighbours[mover]
        along = near[(placement[near] == placement[mover]) & (near != stays)]
        along = along[rng.random(len(along)) < rng.choice((0.0, 0.5))]
        return self.relocated(placement, np.append(along, mover), int(placement[stays]))

    def make_room(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Move a group that is not on the critical path off a device that the path waits for."""
        path = self.path
        if path is None or path.crowded.sum() <= 0:
            return None
        odds = np.cumsum(path.crowded)
        device = int(np.searchsorted(odds, rng.random() * odds[-1], side="right"))
        movable = np.setdiff1d(self.free[placement[self.free] == device], path.groups)
        if not len(movable):
            return None
        group = movable[rng.integers(len(movable))]
        return self.relocated(placement, group[None], self.other(placement, group, rng))

    def critical_swap(self, placement: GroupPlacement, rng: Random) -> GroupPlacement | None:
        """Exchange the devices of a group on the critical path and a group of another device."""
        a = self.critical(rng)
        if a is None:
            return None
        candidates = self.free[placement[self.free] != placement[a]]
        if not len(candidates):
            return None
        return self.exchanged(placement, a, candidates[rng.integers(len(candidates))])

    def critical(self, rng: Random) -> np.int32 | None:
        """Draw a group with a choice from the critical path, by its seconds there, if any has."""
        if self.path is None:
            return None
        can = self.problem.allowed[self.path.groups].sum(axis=1) > 1
        odds = np.cumsum(self.path.seconds * can)
        if not len(odds) or odds[-1] <= 0:
            return None
        chosen = np.searchsorted(odds, rng.random() * odds[-1], side="right")
        return np.int32(self.path.groups[chosen])


MOVES: tuple[Callable[[MoveTables, GroupPlacement, Random], GroupPlacement | None], ...] = (
    MoveTables.one_group,
    MoveTables.with_neighbours,
    MoveTables.swap,
    MoveTables.window,
    MoveTables.boundary,
    MoveTables.module,
    MoveTables.cluster,
    MoveTables.follow,
    MoveTables.cut_edge,
    MoveTables.unload,
    MoveTables.critical_group,
    MoveTables.critical_send,
    MoveTables.make_room,
    MoveTables.critical_swap,
)


@lru_cache(maxsize=1)
def move_tables(problem: PlacementProblem) -> MoveTables:
    """Return the tables of a problem. The last problem's are cached.

    O(ops x module depth + reads).
    """
    sources, destinations, sizes = problem.edges
    can = np.zeros(problem.groups.count, dtype=bool)
    can[problem.free] = True
    near: list[set[int]] = [set() for _ in range(problem.groups.count)]
    for a, b in zip(sources.tolist(), destinations.tolist(), strict=True):
        near[a].add(b)
        near[b].add(a)
    is_movable = can[sources] | can[destinations]
    # The mean is added so that moves also draw edges of few or no bytes.
    weights = sizes[is_movable] + sizes.mean() if len(sizes) else sizes

    # The distinct sets of groups that lie in one module.
    inside: dict[str, set[int]] = {}
    pairs = dict.fromkeys(zip(problem.graph.modules, problem.groups.of_op.tolist(), strict=True))
    for path, group in pairs:
        parts = path.split(".") if path and can[group] else []
        for depth in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:depth]), set()).add(group)
    most = MODULE_SHARE * len(problem.free)
    modules = {tuple(sorted(groups)) for groups in inside.values() if 2 <= len(groups) <= most}

    # Unions along edges, in the order of Kruskal's algorithm.
    joined: list[list[int]] = [[group] for group in range(len(can))]
    clusters: list[GroupSet] = []
    for edge in np.lexsort((destinations, sources, -sizes))[:CLUSTER_EDGES].tolist():
        a, b = joined[sources[edge]], joined[destinations[edge]]
        if a is b or not (can[sources[edge]] and can[destinations[edge]]):
            continue
        if len(a) + len(b) > min(CLUSTER_GROUPS, most):
            continue
        # All members share one list, so `a is b` above tells whether two groups are joined.
        union = sorted(a + b)
        for group in union:
            joined[group] = union
        clusters.append(np.array(union, dtype=np.int32))
    return MoveTables(
        problem=problem,
        free=problem.free,
        neighbours=tuple(
            np.array([g for g in sorted(groups) if can[g]], dtype=np.int32) for groups in near
        ),
        edges=np.stack([sources[is_movable], destinations[is_movable]], axis=1),
        pull=weights / max(weights.sum(), 1e-300),
        modules=tuple(np.array(groups, dtype=np.int32) for groups in sorted(modules)),
        clusters=tuple(clusters),
    )


# ── The search ──────────────────────────────────────────────────────────────────────────────────

BATCH = 16
"""This many moves are proposed and evaluated together."""
TEMPERATURE = 0.02
"""Temperature at the start of a search. Moves that lose about 2 % are accepted then."""
TRACE_ROUNDS = 6
"""The critical path is traced once in this many rounds, because tracing costs about three
evaluations."""
STALL_ROUNDS = 40
"""A search restarts after this many rounds without a new best, plus (groups with a choice) /
`BATCH` rounds."""
TRIES = 6
"""At most this many moves are drawn for each place in a batch; the batch stays smaller if too many
of them are known."""
GIVE_UP = 20
"""The search ends after this many restarts in a row that found nothing new to evaluate."""


def local_search(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best placement at the budget's end, or when nothing new is left to evaluate.

    For the objective `load`, unless contiguity is asked for, this is `load_search`, which computes
    loads itself.
    """
    try_baselines(problem, budget)
    if problem.objective == "load" and not problem.contiguous:
        return load_search(problem, budget)
    results = sorted(budget.ledger.results.values(), key=lambda pair: pair[0])
    placements = [placement for _, placement in results]
    if budget.ledger.best is not None:
        placements.insert(0, budget.ledger.best[1])
    starts = list({placement.tobytes(): placement for placement in placements}.values())
    if len(problem.free):
        try:
            _search(problem, budget, np.stack(starts))
        except KeyboardInterrupt:
            budget.interrupted = True
    return budget.ledger.best[1] if budget.ledger.best is not None else starts[0]


def _search(  # noqa: C901  one search, with the choices that its docstring names
    problem: PlacementProblem, budget: Budget, starts: NDArray[np.int32]
) -> None:
    """Descend and restart until the budget is spent or nothing new is left.

    starts   [starts, groups] best first
    """
    tables = move_tables(problem)
    rng = np.random.default_rng((problem.seed, budget.ledger.next_round()))
    # [moves] How often each kind of move improved the current placement, and was evaluated; old
    # counts fade. As if each kind had won 1 of 4 tries: so a kind without luck at first is still
    # tried.
    wins, tries = np.ones(len(MOVES)), np.full(len(MOVES), 4.0)

    def complete() -> bool:
        """Whether the budget is spent, or every placement was evaluated."""
        return budget.exhausted or len(budget.ledger) >= problem.placements

    def trace(current: GroupPlacement) -> None:
        """Trace the critical path of `current`. Moves use it until the next trace, though it is
        then out of date."""
        nonlocal tables
        if problem.trace is not None and problem.objective == "step":
            timeline = problem.trace(problem.spread(current))
            tables = replace(tables, path=critical_path(problem, timeline))

    patience = STALL_ROUNDS + len(problem.free) // BATCH
    barren = 0
    current = starts[0]
    while not complete() and barren < GIVE_UP:
        spent = budget.spent
        # A descent moves from `current` until `patience` rounds bring no new best.
        score = budget.score(problem, current[None])[0]
        best, stalled, rounds = score, 0, 0
        merged: list[GroupPlacement] = []
        trace(current)
        while stalled < patience and not complete():
            # Up to `BATCH` placements that were never evaluated: first those of `merged`, whose
            # kind is -1, and then moves.
            kinds: list[int] = []
            batch: list[GroupPlacement] = []
            proposed = {current.tobytes()}
            odds = np.cumsum(wins / tries)
            draws = np.searchsorted(odds, rng.random(BATCH * TRIES) * odds[-1], side="right")
            for kind in [-1] * len(merged) + draws.tolist():
                if kind >= 0 and len(batch) >= BATCH:
                    break
                moved = MOVES[kind](tables, current, rng) if kind >= 0 else merged.pop(0)
                if moved is None or moved.tobytes() in proposed or moved in budget.ledger:
                    continue
                proposed.add(moved.tobytes())
                kinds.append(kind)
                batch.append(moved)
            if not batch:
                break
            scores = budget.score(problem, np.array(batch, dtype=np.int32))
            better = [i for i in range(len(batch)) if scores[i] < score]
            better.sort(key=lambda i: (scores[i], i))

            # The odds of a kind of move follow how often it wins. Halving old counts lets the odds
            # follow the search: what helps early may not help later.
            for kind, new in zip(kinds, scores, strict=True):
                if kind >= 0:
                    tries[kind] += 1
                    wins[kind] += new < score
            if tries.sum() > 2000:
                wins = 1 + (wins - 1) / 2
                tries = 4 + (tries - 4) / 2

            # The next batch tries improving moves together: the best two, three and four. Where two
            # moves change the same group, the better one wins.
            merged, laid = [], current.copy()
            for rank, i in enumerate(better[:4]):
                changed = batch[i] != current
                laid = np.where(changed & (laid == current), batch[i], laid)
                if rank:
                    merged.append(laid)

            # The best of the batch becomes current if it is no worse, or only a little worse.
            winner = min(range(len(batch)), key=lambda i: (scores[i], i))
            new = scores[winner]
            accepted = new != UNKNOWN and new <= score
            if new != UNKNOWN and not accepted and new.lacking_bytes <= score.lacking_bytes:
                temperature = TEMPERATURE * (1 - budget.fraction) ** 2
                accepted = new.value <= score.value * (1 + temperature * rng.exponential())
            if accepted:
                current, score = batch[winner], new
            rounds += 1
            if rounds % TRACE_ROUNDS == 0:
                trace(current)
            stalled = 0 if score < best else stalled + 1
            best = min(best, score)
        barren = barren + 1 if budget.spent == spent else 0

        # A restart is from another start, or from the best placement after a few random moves. In
        # some cases, a run of its groups is taken from another start before.
        best_of_all = budget.ledger.best
        current = (starts[0] if best_of_all is None else best_of_all[1]).copy()
        chance = rng.random()
        other = starts[rng.integers(len(starts))]
        if chance < 0.15:
            current = other
            continue
        if chance < 0.4:
            a, b = np.sort(rng.integers(len(current) + 1, size=2))
            current[a:b] = other[a:b]
        for _ in range(int(rng.integers(1, 6))):
            moved = MOVES[rng.integers(len(MOVES))](tables, current, rng)
            current = current if moved is None else moved
