"""Local search for the `load` objective: annealing walks in parallel, from a pool of good plans.

Each *cycle* anneals one walk per core (`load_kernel.anneal`) from a plan of the pool. Temperature
falls, and the power under the loads rises, so that at first all devices count and at last only the
one with the largest load:

    temperature(t) = hot x COLD^t          power(t) = 2^(first + floor(3 t))       t from 0 to 1

Hot is drawn anew for every walk; a cold walk refines its plan, a hot one leaves it. What a walk
found joins the pool, which keeps the best `POOL`. So a cycle is one step of an iterated local
search (Lourenco, Martin and Stutzle, 2003, https://doi.org/10.1007/0-306-48056-5_11) whose descent
is annealing (Kirkpatrick, Gelatt and Vecchi, Science 220, 1983,
https://doi.org/10.1126/science.220.4598.671), over hypergraph moves kept up to date as in Fiduccia
and Mattheyses, DAC 1982, https://doi.org/10.1109/DAC.1982.1585498.

Differences: the energy is a power of the loads, not the largest load, on which most moves make no
difference; the gain of every proposed move is computed when it is proposed, not kept in buckets.

Memory: walks see the bytes that groups always occupy. Where the evaluator finds a plan over
capacity, sizes become `Problem.group_bytes` and the room of that device shrinks by as much.

Budget: one evaluation buys as many proposed moves as there are groups. Under a budget of
evaluations there are `WALKS` walks on however many cores, and no decision looks at a clock, so the
result depends on the seed alone. Ties fall to the earlier plan.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.baselines import try_baselines
from dovetail.placers.budget import Budget, Score
from dovetail.placers.load_kernel import BEST, Field, Heat, Walk, anneal, start
from dovetail.placers.problem import GroupPlacement, Problem
from dovetail.simulator import LoadModel

WALKS = 2
POOL = 6
CYCLE = (1000, 40_000)
"""Shortest and longest cycle, evaluations of each walk; between them a third of what is left."""
HOT = (0.004, 0.1)
"""Relative rise of the largest load that is accepted at first: drawn log-uniformly."""
COLD = 0.01
CHUNK_WORK = 2e7
"""Of one call of the kernel, in steps of about a nanosecond: 0.1 s at most."""
PATIENCE = 30
"""Cycles without a new best, where nothing limits the search."""


def load_search(problem: Problem, budget: Budget) -> GroupPlacement:
    """The best placement found until the budget is spent; never worse than what was known."""
    try_baselines(problem, budget)
    if len(problem.free) and problem.load.counted.any():
        try:
            _Search(problem, budget).run()
        except KeyboardInterrupt:
            budget.interrupted = True
    assert budget.best is not None, "the baselines were evaluated"
    return budget.best[1]


@dataclass
class _Search:
    """The moving parts of one search.

    pool    (score, placement), best first
    pace    moves per second of one walk, measured; looked at only under a clock
    """

    problem: Problem
    budget: Budget
    pool: list[tuple[Score, GroupPlacement]] = field(default_factory=list)
    pace: float = 5e5
    terrain: Field = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.terrain = make_field(self.problem)
        self.rng = np.random.default_rng([self.problem.seed, self.budget.next_round()])
        assert self.budget.best is not None
        self._join(self.budget.best[0], self.budget.best[1])
        for score, placement in self.budget.found.values():
            self._join(score, placement)

    def run(self) -> None:
        count = self.budget.threads if self.budget.timed else WALKS
        walks = [make_walk(self.terrain) for _ in range(max(1, count))]
        limited = self.budget.timed or np.isfinite(self.budget.left)
        stalled = 0
        with ThreadPoolExecutor(max(1, min(count, self.budget.threads))) as executor:
            while not (self.budget.exhausted or self.budget.closed):
                before = self.pool[0][0]
                self._cycle(walks, executor)
                stalled = 0 if self.pool[0][0] < before else stalled + 1
                if stalled >= PATIENCE and not limited:
                    return

    def _cycle(self, walks: list[Walk], executor: ThreadPoolExecutor) -> None:
        moves = self._cycle_moves(len(walks))
        began = self.budget.clock()
        tasks = []
        for i, walk in enumerate(walks):
            base = self._start(walk, i)
            walk.random[0] = np.uint64(self.rng.integers(1, 2**63))
            hot = float(np.exp(self.rng.uniform(*np.log(HOT))))
            cycle = _Cycle(self.terrain, walk, base, hot, moves)
            tasks.append(executor.submit(cycle.run, self.budget))
        made = [task.result() for task in tasks]
        if self.budget.timed:
            self.pace = max(made) / max(self.budget.clock() - began, 1e-9)
        self.budget.charge(sum(made) / self.terrain.groups)
        found = {walk.best.tobytes(): walk.best.copy() for walk in walks}
        for placement in found.values():
            self._take(placement)

    def _cycle_moves(self, walks: int) -> int:
        """Of each walk. All that is left, where that is less than two of the shortest cycles."""
        left = self.budget.left / walks
        if self.budget.timed:
            left = min(left, self.budget.left_seconds * self.pace / self.terrain.groups)
        shortest, longest = CYCLE
        evaluations = left if left < 2 * shortest else min(max(left / 3, shortest), longest)
        return max(1, int(evaluations * self.terrain.groups))

    def _start(self, walk: Walk, index: int) -> float:
        """Set a walk on a plan of the pool, the first one mostly on the best; its value."""
        pick = 0
        if index or self.rng.random() < 0.25:
            pick = int(len(self.pool) * self.rng.random() ** 2)
        score, placement = self.pool[pick]
        walk.placement[:] = self.problem.settle(placement)
        walk.best[:] = walk.placement
        walk.scalars[BEST] = np.inf if score.lacking_bytes else score.value
        return score.value

    def _take(self, placement: GroupPlacement) -> None:
        """Verify what a walk found; where memory lacks, let the next walks see less room."""
        score = self.budget.score(self.problem, placement[None], always=True)[0]
        self._join(score, placement)
        if not 0 < score.lacking_bytes < np.inf:
            return
        sizes = np.maximum(self.problem.load.resident_bytes, self.problem.group_bytes)
        used = np.bincount(placement, weights=sizes, minlength=self.terrain.devices)
        share = self.problem.capacities / np.maximum(self.budget.peaks(placement), 1)
        room = np.where(share < 1, 0.95 * share * used, np.inf)
        room = np.minimum(self.terrain.capacities, room)
        self.terrain = self.terrain._replace(sizes=sizes, capacities=room)

    def _join(self, score: Score, placement: GroupPlacement) -> None:
        if all(not np.array_equal(placement, other) for _, other in self.pool):
            self.pool.append((score, placement))
            self.pool.sort(key=lambda pair: pair[0])
            del self.pool[POOL:]


@dataclass
class _Cycle:
    """One walk from hot to cold. `scale_seconds` is the value that it starts from."""

    terrain: Field
    walk: Walk
    scale_seconds: float
    hot: float
    moves: int

    def run(self, budget: Budget) -> int:
        """Number of moves proposed; less than `moves` where the budget is out earlier."""
        made = 0
        chunk = chunk_moves(self.terrain)
        while made < self.moves and not (made and budget.exhausted):
            part = min(chunk, self.moves - made)
            heat = self._heat(made / self.moves)
            start(self.terrain, self.walk, heat)
            if not made and np.isinf(self.walk.scalars[BEST]):
                self.walk.best[:] = self.walk.placement
            anneal(self.terrain, self.walk, heat, part)
            made += part
        if np.isinf(self.walk.scalars[BEST]):
            self.walk.best[:] = self.walk.placement
        return made

    def _heat(self, share: float) -> Heat:
        doublings = (2 if self.hot > 0.02 else 3) + int(3 * share)
        temperature = self.hot * COLD**share * 2.0**doublings
        best = float(self.walk.scalars[BEST])
        scale = best if np.isfinite(best) else self.scale_seconds
        return Heat(temperature, scale if 0 < scale < np.inf else 1.0, doublings)


def chunk_moves(field: Field) -> int:
    """Moves of one call of the kernel, the fewer the more nets groups have."""
    nets = len(field.reads) + len(field.net_sources) * field.devices
    return max(1000, int(CHUNK_WORK / (100 + 10 * nets / max(field.groups, 1))))


def make_field(problem: Problem) -> Field:
    """The kernel's view of the problem; groups without a choice may only be where they settle."""
    model: LoadModel = problem.load
    work = model.work_seconds.copy()
    fixed = np.ones(model.groups, bool)
    fixed[problem.free] = False
    work[fixed[:, None] & (np.arange(model.devices) != problem.fastest[:, None])] = np.inf
    groups, devices = np.nonzero(np.isfinite(work))
    choice_offsets, choices = _rows(groups, devices, model.groups)
    nets = np.repeat(np.arange(len(model.net_sources)), np.diff(model.net_offsets))
    read_offsets, reads = _rows(model.net_targets, nets, model.groups)
    made_offsets = np.searchsorted(model.net_sources, np.arange(model.groups + 1))
    direct = model.linked.copy()
    direct[:, model.host] = 0
    return Field(
        groups=model.groups,
        devices=model.devices,
        host=model.host,
        counted=model.counted,
        work_seconds=work,
        sizes=model.resident_bytes,
        capacities=model.capacities,
        net_sources=model.net_sources,
        net_offsets=model.net_offsets,
        net_targets=model.net_targets,
        net_bytes=model.net_bytes,
        net_sends=model.net_sends,
        latency_seconds=model.latency_seconds,
        seconds_per_byte=model.seconds_per_byte,
        direct=direct,
        star=not np.delete(direct, model.host, 0).any() and not model.counted[model.host],
        free=problem.free,
        choice_offsets=choice_offsets,
        choices=choices,
        made_offsets=made_offsets.astype(np.int32),
        read_offsets=read_offsets,
        reads=reads,
    )


def make_walk(field: Field) -> Walk:
    """A walk's arrays, not yet on any placement."""
    groups, devices, nets = field.groups, field.devices, len(field.net_sources)
    return Walk(
        placement=np.zeros(groups, np.int32),
        best=np.zeros(groups, np.int32),
        counts=np.zeros((nets, devices), np.int32),
        relays=np.zeros(nets, np.int32),
        loads=np.zeros(devices),
        used_bytes=np.zeros(devices),
        saved_loads=np.zeros(devices),
        saved_bytes=np.zeros(devices),
        moved=np.zeros(groups, np.int32),
        ends=np.zeros(groups, np.int32),
        stamps=np.full(groups, -1, np.int64),
        scalars=np.array([0.0, 0.0, 0.0, np.inf]),
        random=np.ones(1, np.uint64),
    )


def _rows(
    rows: NDArray[np.integer], values: NDArray[np.integer], count: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """CSR of `values` by row, in the order given."""
    offsets = np.searchsorted(np.sort(rows), np.arange(count + 1))
    return offsets.astype(np.int32), values[np.argsort(rows, kind="stable")].astype(np.int32)
