"""Cuts one given order of units into runs: each device takes one run or none.

    units    0 1 2 3 │ 4 5 6 │ 7 8 9          order: that in which the network calls its modules
    device      d0   │   d2  │  d1

A unit is a group that has a place in the order. A dynamic programme goes over prefixes of the order
and over how many devices of each kind they use:

    best(prefix j, used + k)  =  min over i < j of  best(prefix i, used) (+) seconds of i..j on k

For the objective `load` (+) is the maximum; for the others, where one run comes after another, it
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

from dovetail.placers.budget import UNKNOWN, Budget, Score
from dovetail.placers.problem import GroupPlacement, PlacementProblem

Float64 = NDArray[np.float64]
State = tuple[int, ...]  # number of devices in use, of each kind
ROOMS = (1.0, 0.9, 0.8, 0.65, 0.5)
"""Shares of each device's memory that a run may fill by the estimate. They are tried in turn
until the evaluator finds that a plan fits."""
SHIFTS = (1, -1, 2, -2, 4, -4, 8, -8)
"""Numbers of units by which a cut is moved when a plan is improved."""
MOST_STATES = 2048
"""With more states than this, the first two kinds of devices are merged into one, as often as
needed. A merged kind is estimated as its first device."""


class _Runs(NamedTuple):
    """A plan along the order.

    cuts      for each run but the first, the number of units before it
    devices   the device of each run
    """

    cuts: tuple[int, ...]
    devices: tuple[int, ...]


def chain(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best plan along `problem.chain`, which must be given; ties: the fewest devices.

    Raises `KeyboardInterrupt` if Ctrl-C broke every evaluation.
    """
    order = ordered_groups(problem)
    scores: dict[_Runs, Score] = {}
    for room in ROOMS:
        plans = _best_runs(problem, order, room)
        _judge(problem, budget, order, scores, plans, always=True)
        # A plan whose evaluation a Ctrl-C broke has no score.
        if any(plan in scores and not scores[plan].lacking_bytes for plan in plans):
            break
    if not scores:
        raise KeyboardInterrupt
    # The best plan for every number of devices is improved, the best of these first, since `auto`
    # keeps a plan with fewer devices unless more devices gain enough.
    best_of_count: dict[int, _Runs] = {}
    for plan in sorted(scores, key=scores.__getitem__):
        best_of_count.setdefault(len(plan.devices), plan)
    for plan in best_of_count.values():
        # One cut is moved at a time, each time the one that helps most, as far as no run becomes
        # empty.
        while not (budget.exhausted or budget.closed):
            neighbours = []
            for i, cut in enumerate(plan.cuts):
                for shift in SHIFTS:
                    cuts = (*plan.cuts[:i], cut + shift, *plan.cuts[i + 1 :])
                    if all(a < b for a, b in pairwise((0, *cuts, len(order)))):
                        neighbours.append(_Runs(cuts, plan.devices))
            neighbours = [neighbour for neighbour in neighbours if neighbour not in scores]
            _judge(problem, budget, order, scores, neighbours)
            scored = [neighbour for neighbour in neighbours if neighbour in scores]
            best_neighbour = min(scored, key=scores.__getitem__, default=plan)
            if scores[best_neighbour] >= scores[plan]:
                break
            plan = best_neighbour
    best = min(scores, key=lambda plan: (scores[plan], len(plan.devices)))
    return _placement(problem, order, best)


def ordered_groups(problem: PlacementProblem) -> NDArray[np.int64]:
    """Return [units] the groups that have a place in the order, in that order."""
    assert problem.chain is not None, "the problem asks for an order"
    placed = np.flatnonzero(problem.chain >= 0)
    return placed[np.argsort(problem.chain[placed], kind="stable")]


def _judge(
    problem: PlacementProblem,
    budget: Budget,
    order: NDArray[np.int64],
    scores: dict[_Runs, Score],
    plans: list[_Runs],
    *,
    always: bool = False,
) -> None:
    """Evaluate those of `plans` that have no score yet, as far as the budget reaches, and enter
    their scores in `scores`.

    always   evaluate all of them, even beyond the budget
    """
    new = [plan for plan in dict.fromkeys(plans) if plan not in scores]
    if not new:
        return
    placements = np.stack([_placement(problem, order, plan) for plan in new])
    for plan, score in zip(new, budget.score(problem, placements, always=always), strict=True):
        if score != UNKNOWN:
            scores[plan] = score


def _placement(problem: PlacementProblem, order: NDArray[np.int64], plan: _Runs) -> GroupPlacement:
    """Return the plan's placement. Groups that are no units are on their fastest device."""
    placement = problem.fastest.copy()
    ends = (0, *plan.cuts, len(order))
    for device, (start, end) in zip(plan.devices, pairwise(ends), strict=True):
        placement[order[start:end]] = device
    return placement


def _best_runs(problem: PlacementProblem, order: NDArray[np.int64], room: float) -> list[_Runs]:
    """Return the plan with the best estimate for each number of devices, the fewest first.

    room   share of each device's memory that its run may fill
    """
    # Devices of a kind are alike in work, allowed groups and memory. The estimate looks at nothing
    # else, except that a kind's links are those of its first device.
    alike: dict[tuple[bytes, bytes, int], list[int]] = {}
    for device in range(problem.devices):
        if problem.machine.devices[device].kind != "host":
            work, allowed = problem.work_seconds[:, device], problem.allowed[:, device]
            key = (work.tobytes(), allowed.tobytes(), int(problem.capacities[device]))
            alike.setdefault(key, []).append(device)
    kinds = list(alike.values())
    while len(kinds) > 1 and np.prod([len(kind) + 1.0 for kind in kinds]) > MOST_STATES:
        kinds = [kinds[0] + kinds[1], *kinds[2:]]

    units = len(order)
    # [units + 1] the bytes that cross the cut before each unit, in either direction.
    unit_of = np.full(problem.groups.count, -1)
    unit_of[order] = np.arange(units)
    sources, destinations, sizes = problem.edges
    ends = np.sort(np.stack([unit_of[sources], unit_of[destinations]]), axis=0)
    across = (ends[0] >= 0) & (ends[0] < ends[1])
    # An edge between units a < b crosses the cuts before units a + 1 to b: its bytes are added at
    # the first of these cuts and taken away behind the last, and a running sum gives each cut's
    # bytes.
    change = np.zeros(units + 2)
    np.add.at(change, ends[0, across] + 1, sizes[across])
    np.add.at(change, ends[1, across] + 1, -sizes[across])
    cut_bytes = np.cumsum(change)[: units + 1]
    group_bytes = problem.group_bytes[order].astype(np.float64)
    bytes_before = np.concatenate([[0.0], np.cumsum(group_bytes)])
    has_units = np.arange(units + 1)[None, :] > np.arange(units + 1)[:, None]
    # For each kind [units + 1, units + 1]: at [i, j] the seconds of units i to j - 1, with the
    # transfer over the cut before i; inf if these units may not be there or do not fit.
    seconds: list[Float64] = []
    for device, *_ in kinds:
        allowed = problem.allowed[order, device]
        # Units that may not be there count 0 in the prefix sums, because inf - inf would be nan.
        # Runs that contain one are ruled out by `is_allowed`.
        work = np.where(allowed, problem.work_seconds[order, device], 0.0)
        work_before = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(work), work, 0.0))])
        barred_before = np.concatenate([[0], np.cumsum(~allowed)])
        # Transfers come over the link to the device that has the least bandwidth. The first run of
        # all receives nothing.
        name = problem.machine.device_names[device]
        links = [link for link in problem.machine.links if link.destination == name]
        latency, per_byte = 0.0, 0.0
        if links:
            slowest = min(links, key=lambda link: link.bandwidth_bytes_per_second)
            latency, per_byte = slowest.latency_seconds, 1 / slowest.bandwidth_bytes_per_second
        entry = np.where(np.arange(units + 1) > 0, latency + cut_bytes * per_byte, 0.0)
        taken = work_before[None, :] - work_before[:, None] + entry[:, None]
        room_bytes = room * float(problem.capacities[device])
        fits = bytes_before[None, :] - bytes_before[:, None] <= room_bytes
        is_allowed = barred_before[None, :] == barred_before[:, None]
        seconds.append(np.where(fits & has_units & is_allowed, taken, np.inf))
    join = np.maximum if problem.objective == "load" else np.add
    no_units = np.full(units + 1, np.inf)
    no_units[0] = 0.0
    # After n rounds `values` has the states with n devices in use: each maps to [units + 1] values,
    # of the best plan for every prefix. `last_runs` has, for the same state and prefix, the start
    # of the last run and its kind.
    values: dict[State, Float64] = {(0,) * len(kinds): no_units}
    last_runs: dict[State, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    best_of_counts: list[_Runs] = []
    for _ in range(sum(map(len, kinds))):
        next_values: dict[State, Float64] = {}
        for used, best in values.items():
            for k, kind in enumerate(kinds):
                if used[k] == len(kind):
                    continue
                next_used = (*used[:k], used[k] + 1, *used[k + 1 :])
                # [i, j] value of the prefix of j units whose last run has units i to j - 1.
                table = join(best[:, None], seconds[k])
                starts = table.argmin(axis=0)
                candidates = table[starts, np.arange(units + 1)]
                if next_used not in next_values:
                    next_values[next_used] = np.full(units + 1, np.inf)
                    last_runs[next_used] = (
                        np.zeros(units + 1, np.int64),
                        np.zeros(units + 1, np.int64),
                    )
                # Several states lead to this one; the strict comparison keeps the first of equals.
                better = candidates < next_values[next_used]
                next_values[next_used][better] = candidates[better]
                last_runs[next_used][0][better] = starts[better]
                last_runs[next_used][1][better] = k
        values = next_values
        complete = [used for used in values if np.isfinite(values[used][units])]
        if complete:
            used = min(complete, key=lambda used: values[used][units])
            # The runs are found from the last one to the first.
            end, cuts, run_kinds = units, [], []
            while any(used):
                start, k = int(last_runs[used][0][end]), int(last_runs[used][1][end])
                cuts.append(start)
                run_kinds.append(k)
                used = (*used[:k], used[k] - 1, *used[k + 1 :])
                end = start
            # The runs of a kind take its devices in machine order.
            remaining = [iter(kind) for kind in kinds]
            devices = tuple(next(remaining[k]) for k in reversed(run_kinds))
            # The first run starts at 0, which is no cut.
            best_of_counts.append(_Runs(tuple(reversed(cuts[:-1])), devices))
    # If nothing fits, everything becomes one run on the device that may run most units. Its
    # evaluation then says what does not fit.
    device_of_most = int(problem.allowed[order].sum(axis=0).argmax())
    return best_of_counts or [_Runs((), (device_of_most,))]
