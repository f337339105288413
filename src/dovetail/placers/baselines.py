"""The baselines `single` and `balanced`, and the functions that run all baselines.

Baselines are cheap. Every result is compared with them, and every search starts from them.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InvalidError
from dovetail.methods import PLACERS
from dovetail.placers.budget import UNKNOWN, Budget, Score
from dovetail.placers.problem import GroupPlacement, PlacementProblem

# ── One device ──────────────────────────────────────────────────────────────────────────────────


def single(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Put everything on one device: the best of one placement per device; ties: the first device.

    A group that may not be on that device goes to its own fastest one. So pinned groups stay where
    they are pinned, and ops without a GPU kernel run on the CPU, as in RL17.
    """
    candidates = np.stack(
        [
            problem.settle(np.full(problem.groups.count, device))
            for device in range(problem.devices)
            if problem.machine.devices[device].kind != "host"
        ]
    )
    scores = budget.score(problem, candidates, always=True)
    return np.asarray(candidates[scores.index(min(scores))])


# ── Contiguous runs of equal work ───────────────────────────────────────────────────────────────

MAX_CELLS = 512
"""With more groups than this, consecutive groups are first merged into this many cells of equally
many groups. Runs begin and end between cells."""
MEMORY_ATTEMPTS = 4
"""Times that a method makes a placement: once, and up to three times more if memory turns out to be
short."""


def balanced(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Cut the groups into contiguous runs whose largest load is the least possible. Returns the
    better of runs over all devices and runs over the devices of the fastest model only.

    Groups stand in the order of their first op. With W_d(i, j) the seconds of groups i to j - 1 on
    device d, and devices in machine order,

        load_d(j) = min over i <= j of   max(load_{d-1}(i), W_d(i, j))   where the run fits memory

    This is solved exactly in O(devices x groups^2), or over `MAX_CELLS` equal cells of groups. A
    run may be empty. A group that may not be on its run's device goes to its fastest one and counts
    nothing in the run. The method ignores schedules and communication.

    Source: the partitioning of torchgpipe's `balance` (Kim et al., 2020,
    https://arxiv.org/abs/2004.09910, section 4). Differences: unlike devices, and memory.

    Memory is estimated while cutting. If the evaluator then finds a device over its capacity, the
    runs are cut again as if all that a group makes stayed in memory, and after that with less room
    on the devices that were over.
    """
    scored_placements: list[tuple[Score, GroupPlacement]] = []
    for devices in problem.device_sets:
        room = problem.capacities.astype(np.float64)
        for attempt in range(MEMORY_ATTEMPTS):
            sizes = problem.made_bytes if attempt else problem.group_bytes
            placement = problem.settle(runs(problem, devices, sizes, room))
            score = budget.score(problem, placement[None], always=True)[0]
            scored_placements.append((score, placement))
            # 0 means that it fits; inf means that a Ctrl-C broke the evaluation.
            if not 0 < score.lacking_bytes < np.inf:
                break
            # The second attempt only counts more bytes per group. From the third on the room
            # shrinks by the share that the peak is above capacity, and 5 % more.
            if attempt:
                share = problem.capacities / np.maximum(budget.ledger.peaks(placement), 1)
                room = room * np.where(share < 1, 0.95 * share, 1.0)
    return min(scored_placements, key=lambda pair: pair[0])[1]


def best_fitting(
    problem: PlacementProblem,
    budget: Budget,
    count: int,
    make: Callable[[int, int, NDArray[np.int64]], GroupPlacement],
) -> GroupPlacement:
    """Return the best of `count` placements, each made again while it lacks memory.

    make   (number of the placement, attempt, [devices] bytes of room) -> the placement, which is
           made with an estimate of the bytes that groups hold

    If the evaluator finds a device over its capacity, the second attempt should count more bytes
    for each group. From the third on the room shrinks. Ties: the earlier attempt, then the earlier
    placement.
    """
    rooms = dict.fromkeys(range(count), problem.capacities.astype(np.int64))
    scored_placements: list[tuple[Score, GroupPlacement]] = []
    for attempt in range(MEMORY_ATTEMPTS):
        placements = [problem.settle(make(i, attempt, room)) for i, room in rooms.items()]
        scores = budget.score(problem, np.stack(placements), always=True)
        scored_placements += zip(scores, placements, strict=True)
        for i, score, placement in zip(list(rooms), scores, placements, strict=True):
            # 0 means that it fits; inf means that a Ctrl-C broke the evaluation.
            if not 0 < score.lacking_bytes < np.inf:
                del rooms[i]
            elif attempt:
                # The room shrinks by the share of the overrun, and by 5 % more, because the next
                # placement will not overrun by exactly the same share.
                share = problem.capacities / np.maximum(budget.ledger.peaks(placement), 1)
                rooms[i] = (rooms[i] * np.where(share < 1, 0.95 * share, 1.0)).astype(np.int64)
        if not rooms:
            break
    return min(scored_placements, key=lambda pair: pair[0])[1]


def runs(
    problem: PlacementProblem,
    devices: list[int],
    group_bytes: NDArray[np.int64],
    room_bytes: NDArray[np.float64],
) -> NDArray[np.int32]:
    """Return [groups] the device of each group. If no cut fits `room_bytes`, memory is ignored.

    devices   in the order in which they take their runs
    """
    count = problem.groups.count
    bounds = np.unique(np.linspace(0, count, min(count, MAX_CELLS) + 1).astype(int))
    cells = len(bounds)
    for room in (room_bytes, np.full(problem.devices, np.inf)):
        # `load[j]` is the least largest load of the first j cells on the devices so far.
        # `worst[i, j]` is that load if this device takes cells i to j - 1, which i > j rules out
        # (`np.tri`).
        load = np.full(cells, np.inf)
        load[0] = 0.0
        begins = []
        for device in devices:
            ok = problem.allowed[:, device]
            work = _spans(np.where(ok, problem.work_seconds[:, device], 0.0), bounds)
            size = _spans(np.where(ok, group_bytes, 0.0), bounds)
            worst = np.maximum(load[:, None], work)
            worst[(size > room[device]) | np.tri(cells, k=-1, dtype=bool)] = np.inf
            begins.append(worst.argmin(axis=0))
            load = worst.min(axis=0)
        if np.isfinite(load[-1]):
            break
    assert np.isfinite(load[-1]), "without a limit on memory some cut is always possible"
    placement = np.empty(count, dtype=np.int32)
    end = cells - 1
    for device, begin in zip(reversed(devices), reversed(begins), strict=True):
        start = int(begin[end])
        placement[bounds[start] : bounds[end]] = device
        end = start
    return placement


def _spans(values: NDArray[np.float64], bounds: NDArray[np.int_]) -> NDArray[np.float64]:
    """Return a matrix whose [i, j] is the sum of the values of cells i to j - 1."""
    sums = np.concatenate([[0.0], np.cumsum(values)])[bounds]
    return np.asarray(sums[None, :] - sums[:, None])


Placer = Callable[[PlacementProblem, Budget], GroupPlacement]
BASELINES: dict[str, Placer] = {
    name: method for name, method in PLACERS.items() if method.role == "baseline"
}
"""The placers of role "baseline" by name, in the order of `PLACERS`."""


def try_baselines(problem: PlacementProblem, budget: Budget) -> None:
    """Run each baseline that has no result yet, even beyond the budget, and note its result."""
    for name, method in BASELINES.items():
        if name not in budget.ledger.results:
            attempt(name, method, problem, budget)


def attempt(
    name: str,
    method: Placer,
    problem: PlacementProblem,
    budget: Budget,
    *,
    may_refuse: bool = False,
) -> bool:
    """Run a method and note its result in the ledger, unless that already holds a result of the
    same name that is as good. A method that a Ctrl-C breaks is not noted.

    Returns False if `may_refuse` is set and the method raises an `InvalidError`: a library is
    absent, or the problem exceeds a limit. Otherwise returns True. Raises `KeyboardInterrupt` if
    no method has found anything so far, since there is nothing to return then.
    """
    results = budget.ledger.results
    try:
        placement = method(problem, budget)
        score = budget.score(problem, placement[None], always=True)[0]
    except KeyboardInterrupt:
        budget.interrupted = True
    except InvalidError:
        if not may_refuse:
            raise
        return False
    else:
        if score != UNKNOWN and (name not in results or score < results[name][0]):
            budget.note(name, score, placement)
    if not results:
        raise KeyboardInterrupt
    return True
