"""Cuts one given order of units into stages: each device runs one stage or none.

    units    0 1 2 3 │ 4 5 6 │ 7 8 9          order: that in which the network calls its modules
    device      d0   │   d2  │  d1

A unit is a group that has a place in the order. A dynamic programme goes over prefixes of the order
and over how many devices of each kind they use:

    best(prefix j, used + k)  =  min over i < j of  best(prefix i, used) (+) seconds of i..j on k

For the objective `load` (+) is the maximum; for the others, where one stage runs after another, it
is the sum. The programme yields the plan with the best estimate for every number of devices. The
evaluator judges these plans. Then single cuts of a plan are moved as long as that makes it better.

PipeDream's planner (Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN
Training", SOSP 2019, https://doi.org/10.1145/3341301.3359646, section 3.1) has the recurrence for
`load`. Differences: kinds of devices; no replicas of stages; the bytes that units hold must fit
into a device's room, which shrinks if the evaluator finds that no plan fits. Transfers are
estimated by the slowest link to a device. O(units^2 x kinds x states), where the number of states
is the product of (devices of a kind + 1) over kinds.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import Budget, Score
from dovetail.placers.problem import GroupPlacement, PlacementProblem

Float64 = NDArray[np.float64]
ROOMS = (1.0, 0.9, 0.8, 0.65, 0.5)
"""Shares of each device's memory that a stage may fill by the estimate. They are tried in turn
until the evaluator finds that a plan fits."""
SHIFTS = (1, -1, 2, -2, 4, -4, 8, -8)
"""Numbers of units by which a cut is moved when a plan is improved."""
MOST_STATES = 2048
"""With more states than this, the first two kinds of devices are merged into one, as often as
needed. A merged kind is estimated as its first device."""


class _Stages(NamedTuple):
    """A plan along the order.

    cuts      for each stage but the first, the number of units before it
    devices   the device of each stage
    """

    cuts: tuple[int, ...]
    devices: tuple[int, ...]


def chain(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best plan along `problem.chain`, which must be given; ties: the fewest devices."""
    order = ordered_groups(problem)
    candidates: dict[_Stages, Score] = {}
    for room in ROOMS:
        stages = _best_stages(problem, order, room)
        _judge(problem, budget, order, candidates, stages, always=True)
        if any(not candidates[candidate].lacking_bytes for candidate in stages):
            break
    # The best plan for every number of devices is improved, since `auto` keeps a plan with fewer
    # devices unless more devices gain enough.
    by_count: dict[int, _Stages] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidates[candidate]):
        by_count.setdefault(len(candidate.devices), candidate)
    for count in sorted(by_count, key=lambda count: candidates[by_count[count]]):
        _improve(problem, budget, order, candidates, by_count[count])
    best = min(candidates, key=lambda candidate: (candidates[candidate], len(candidate.devices)))
    return _placement(problem, order, best)


def ordered_groups(problem: PlacementProblem) -> NDArray[np.int64]:
    """Return [units] the groups that have a place in the order, in that order."""
    assert problem.chain is not None, "only where an order is asked for"
    placed = np.flatnonzero(problem.chain >= 0)
    return placed[np.argsort(problem.chain[placed], kind="stable")]


def _improve(
    problem: PlacementProblem,
    budget: Budget,
    order: NDArray[np.int64],
    candidates: dict[_Stages, Score],
    best: _Stages,
) -> None:
    """Move one cut at a time, each time the one that helps most, until no move helps or the budget
    ends. All scores go into `candidates`."""
    while not (budget.exhausted or budget.closed):
        near = [moved for moved in _moved(best, len(order)) if moved not in candidates]
        _judge(problem, budget, order, candidates, near)
        better = min(
            (candidate for candidate in near if candidate in candidates),
            key=candidates.__getitem__,
            default=best,
        )
        if candidates[better] >= candidates[best]:
            return
        best = better


def _moved(stages: _Stages, units: int) -> list[_Stages]:
    """Return the plans with one cut moved by one of `SHIFTS`, as far as no stage becomes empty."""
    neighbours = []
    for i, cut in enumerate(stages.cuts):
        for shift in SHIFTS:
            cuts = (*stages.cuts[:i], cut + shift, *stages.cuts[i + 1 :])
            if all(a < b for a, b in pairwise((0, *cuts, units))):
                neighbours.append(_Stages(cuts, stages.devices))
    return neighbours


def _judge(
    problem: PlacementProblem,
    budget: Budget,
    order: NDArray[np.int64],
    candidates: dict[_Stages, Score],
    stages: list[_Stages],
    *,
    always: bool = False,
) -> None:
    """Evaluate those of `stages` that have no score yet, as far as the budget reaches, and enter
    their scores in `candidates`."""
    new = [candidate for candidate in dict.fromkeys(stages) if candidate not in candidates]
    if not new:
        return
    placements = np.stack([_placement(problem, order, candidate) for candidate in new])
    for candidate, score in zip(new, budget.score(problem, placements, always=always), strict=True):
        if np.isfinite(score.lacking_bytes):
            candidates[candidate] = score


def _placement(
    problem: PlacementProblem, order: NDArray[np.int64], stages: _Stages
) -> GroupPlacement:
    """Return the plan's placement. Groups that are no units are on their fastest device."""
    placement = problem.fastest.copy()
    ends = (0, *stages.cuts, len(order))
    for device, (start, end) in zip(stages.devices, pairwise(ends), strict=True):
        placement[order[start:end]] = device
    return placement


def _best_stages(problem: PlacementProblem, order: NDArray[np.int64], room: float) -> list[_Stages]:
    """Return the plan with the best estimate for each number of devices, the fewest first."""
    kinds = _kinds(problem)
    seconds = [_run_seconds(problem, order, kind[0], room) for kind in kinds]
    join = np.maximum if problem.objective == "load" else np.add
    units = len(order)
    start = np.full(units + 1, np.inf)
    start[0] = 0.0
    layer: dict[tuple[int, ...], Float64] = {(0,) * len(kinds): start}
    best_of_counts: list[_Stages] = []
    cells: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    # After n rounds `layer` has the states with n devices in use: each maps to [units + 1] values,
    # of the best plan for every prefix. `cells` has, for the same state and prefix, the start of
    # the last stage and its kind.
    for _ in range(sum(map(len, kinds))):
        following: dict[tuple[int, ...], Float64] = {}
        for used, best in layer.items():
            for k, kind in enumerate(kinds):
                if used[k] == len(kind):
                    continue
                now = (*used[:k], used[k] + 1, *used[k + 1 :])
                # [i, j] value of the prefix of j units whose last stage has units i to j - 1.
                table = join(best[:, None], seconds[k])
                before = table.argmin(axis=0)
                values = table[before, np.arange(units + 1)]
                if now not in following:
                    following[now] = np.full(units + 1, np.inf)
                    cells[now] = (np.zeros(units + 1, np.int64), np.zeros(units + 1, np.int64))
                # Several states lead to this one; the strict comparison keeps the first of equals.
                better = values < following[now]
                following[now][better] = values[better]
                cells[now][0][better] = before[better]
                cells[now][1][better] = k
        layer = following
        ends = [used for used in layer if np.isfinite(layer[used][units])]
        if ends:
            best_used = min(ends, key=lambda used: layer[used][units])
            best_of_counts.append(_walk_back(kinds, cells, best_used, units))
    # If nothing fits, everything becomes one stage on the device that may run most units. Its
    # evaluation then says what does not fit.
    most_units = int(problem.allowed[order].sum(axis=0).argmax())
    return best_of_counts or [_Stages((), (most_units,))]


def _walk_back(
    kinds: list[list[int]],
    cells: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]],
    used: tuple[int, ...],
    units: int,
) -> _Stages:
    """Return the stages behind the value of all `units` in state `used`. The stages of a kind take
    its devices in machine order."""
    at, cuts, chosen = units, [], []
    while any(used):
        before, k = int(cells[used][0][at]), int(cells[used][1][at])
        chosen.append(k)
        cuts.append(before)
        used = (*used[:k], used[k] - 1, *used[k + 1 :])
        at = before
    left = [iter(kind) for kind in kinds]
    return _Stages(tuple(reversed(cuts[:-1])), tuple(next(left[k]) for k in reversed(chosen)))


def _kinds(problem: PlacementProblem) -> list[list[int]]:
    """Return the devices by kind: those of a kind are alike in work, allowed groups and memory.

    The estimate looks at nothing else, except that a kind's links are those of its first device.
    """
    alike: dict[tuple[bytes, bytes, int], list[int]] = {}
    for device in range(problem.devices):
        if problem.machine.devices[device].kind == "host":
            continue
        work, allowed = problem.work_seconds[:, device], problem.allowed[:, device]
        key = (work.tobytes(), allowed.tobytes(), int(problem.capacities[device]))
        alike.setdefault(key, []).append(device)
    kinds = list(alike.values())
    while len(kinds) > 1 and np.prod([len(kind) + 1.0 for kind in kinds]) > MOST_STATES:
        kinds = [kinds[0] + kinds[1], *kinds[2:]]
    return kinds


def _run_seconds(
    problem: PlacementProblem, order: NDArray[np.int64], device: int, room: float
) -> Float64:
    """Return [units + 1, units + 1]: at [i, j] the seconds of units i to j - 1 on the device, with
    the transfer over the cut before i; inf if these units may not be there or do not fit.

    room   share of the device's memory that they may fill
    """
    units = len(order)
    allowed = problem.allowed[order, device]
    # Units that may not be there count 0 in the prefix sums, because inf - inf would be nan. Runs
    # that contain one are ruled out by `clear`.
    work = np.where(allowed, problem.work_seconds[order, device], 0.0)
    total = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(work), work, 0.0))])
    barred = np.concatenate([[0], np.cumsum(~allowed)])
    held = np.concatenate([[0.0], np.cumsum(problem.group_bytes[order].astype(np.float64))])
    latency, per_byte = _slowest_link(problem, device)
    entry = np.where(np.arange(units + 1) > 0, latency + _cut_bytes(problem, order) * per_byte, 0.0)
    seconds = total[None, :] - total[:, None] + entry[:, None]
    fits = held[None, :] - held[:, None] <= room * float(problem.capacities[device])
    ahead = np.arange(units + 1)[None, :] > np.arange(units + 1)[:, None]
    clear = barred[None, :] == barred[:, None]
    return np.where(fits & ahead & clear, seconds, np.inf)


def _slowest_link(problem: PlacementProblem, device: int) -> tuple[float, float]:
    """Return (seconds per tensor, seconds per byte) of the link to the device that has the least
    bandwidth; zeros if it has no link."""
    name = problem.machine.device_names[device]
    links = [link for link in problem.machine.links if link.destination == name]
    if not links:
        return 0.0, 0.0
    slowest = min(links, key=lambda link: link.bandwidth_bytes_per_second)
    return slowest.latency_seconds, 1 / slowest.bandwidth_bytes_per_second


def _cut_bytes(problem: PlacementProblem, order: NDArray[np.int64]) -> Float64:
    """Return [units + 1] the bytes that cross the cut before each unit, in either direction."""
    place = np.full(problem.groups.count, -1)
    place[order] = np.arange(len(order))
    sources, destinations, sizes = problem.edges
    ends = np.sort(np.stack([place[sources], place[destinations]]), axis=0)
    across = (ends[0] >= 0) & (ends[0] < ends[1])
    # An edge between units a < b crosses the cuts before units a + 1 to b: its bytes are added at
    # the first of these cuts and taken away behind the last, and a running sum gives each cut's
    # bytes.
    change = np.zeros(len(order) + 2)
    np.add.at(change, ends[0, across] + 1, sizes[across])
    np.add.at(change, ends[1, across] + 1, -sizes[across])
    return np.cumsum(change)[: len(order) + 1]
