"""Covering: all devices together cannot hold everything, if each must be done in time T.

With weights y >= 0 on groups, let room(d) be the most weight that device d can have while its load,
communication included, and its memory stay within limits:

    room(d) = max over S of  y(S)   where   work(S, d) + in(S) + out(S) <= T,   bytes(S) <= capacity

If room summed over the devices is less than y of all groups, no placement has a largest load of
at most T, whatever is on which device. One device alone is no symmetric problem any more: what
makes programmes over all devices slow, that devices are alike, here means one programme for all.

    maximise    sum of y_g s_g                                   s_g in {0, 1}: in S
    where       in_n  >= s_reader - s_source     for every reader of net n (s_source = 0: the host)
                out_n >= s_source - s_reader
                sum of work_g s_g + in(n) in_n + out(n) out_n <= T,   sum of bytes_g s_g <= capacity

by HiGHS, of which only the dual bound is used. This is the pricing problem of the configuration
programme (Gilmore and Gomory, "A Linear Programming Approach to the Cutting-Stock Problem",
Operations Research 9, 1961), used as Farley does ("A Note on Bounding a Class of Linear Programming
Problems, Including Cutting Stock Problems", Operations Research 38, 1990).

Differences: T is found by bisection, first with the given weights, then with better ones. Sends
count by the fastest link of a device, as in `closure`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array, vstack

from dovetail.simulator.closure import DeviceNets, kinds_of_devices
from dovetail.simulator.flat import Float64
from dovetail.simulator.load_model import LoadModel

Bool = NDArray[np.bool_]

_TOLERANCE = 1e-5
"""Share of the weight that must be missing before a proof counts: HiGHS keeps its constraints to
1e-6 of the limit, to which each row here is scaled."""
_WIDEST_BOX = 0.2
"""Share by which one step may change a weight."""


@dataclass(frozen=True)
class Limits:
    """How hard `covering_seconds` tries.

    rounds      changes of the weights for one T: 1 (none), or powers of 8
    nodes       of each programme
    seconds, programme_seconds   by `clock`, in all and of one programme: HiGHS cannot be
                interrupted. With inf the answer is the same every time
    """

    rounds: int = 1
    nodes: int = 20_000
    seconds: float = np.inf
    programme_seconds: float = np.inf
    clock: Callable[[], float] = time.monotonic


class _Room(NamedTuple):
    """The programme of one kind of device, but for weights and T.

    rows, lows    net rows: rows @ (s, in, out) <= 0
    seconds       [variables] what each adds to the load; sizes [variables] bytes
    """

    groups: int
    rows: csr_array
    seconds: Float64
    sizes: Float64
    upper: Float64
    kind: DeviceNets


def covering_seconds(
    model: LoadModel,
    weights: Float64,
    proven: float,
    reached: float,
    *,
    limits: Limits | None = None,
) -> float:
    """The largest T between `proven` (a bound already) and `reached` (some plan's load) that is
    proven to be a lower bound, to one part in 1,000.

    `weights` [groups] to begin with, e.g. `class_burdens`.
    """
    limits = limits or Limits()
    end = limits.clock() + limits.seconds
    rooms = [_room(model, kind) for kind in kinds_of_devices(model)[0]]
    rooms.sort(key=lambda room: int(np.count_nonzero(room.seconds)))
    if not weights.sum() > 0:
        return proven
    low, weights = proven, weights / weights.sum()
    rounds = 1
    while rounds <= limits.rounds:
        high = reached
        while high - low > 1e-3 * reached and limits.clock() < end:
            middle = low + (high - low) / 2
            better = _proving_weights(rooms, weights, middle, rounds, (limits, end))
            if better is None:
                high = middle
            else:
                low, weights = middle, better
        rounds *= 8
    return low


def _proving_weights(
    rooms: list[_Room],
    weights: Float64,
    target: float,
    rounds: int,
    until: tuple[Limits, float],
) -> Float64 | None:
    """Weights that prove `target`, from `weights` in `rounds` steps; None: not found.

    Room as a function of the weights is convex, and the largest over all sets found so far is a
    model of it from below. Each step goes where the model is least, in a box around the best
    weights (Marsten, Hogan and Blankenship, "The Boxstep Method for Large-Scale Optimization",
    Operations Research 23, 1975).
    """
    best, least, share = weights, np.inf, _WIDEST_BOX / 2
    sets: list[list[Bool]] = [[] for _ in rooms]
    for _ in range(rounds):
        total = 0.0
        for room, found in zip(rooms, sets, strict=True):
            most, chosen = _most_weight(room, weights, target, until)
            total += room.kind.copies * most
            if chosen is not None:
                found.append(chosen)
        if total < 1 - _TOLERANCE:
            return weights
        if until[0].clock() >= until[1]:
            break
        if total < least:
            best, least = weights, total
        elif total - 1 > 1.3 * (least - 1):
            share *= 0.7  # the model was far off
        weights, modelled = _box_step(rooms, sets, best, share)
        if modelled >= 1:  # nothing in the box proves it
            share = min(share * 1.5, _WIDEST_BOX)
    return None


def _box_step(
    rooms: list[_Room], sets: list[list[Bool]], best: Float64, share: float
) -> tuple[Float64, float]:
    """Weights within `share` of `best` where the sets have least weight, and that weight."""
    groups, kinds = len(best), len(rooms)
    flat = [(kind, chosen) for kind, found in enumerate(sets) for chosen in found]
    rows = np.zeros((len(flat), groups + kinds))
    for row, (kind, chosen) in zip(rows, flat, strict=True):
        row[:groups] = chosen
        row[groups + kind] = -1.0
    counts = np.array([room.kind.copies for room in rooms], float)
    whole = np.concatenate([np.ones(groups), np.zeros(kinds)])
    spare = share * 1e-2 / groups  # so that what weighs nothing can begin to
    lows = np.concatenate([best * (1 - share), np.zeros(kinds)])
    highs = np.concatenate([best * (1 + share) + spare, np.ones(kinds)])
    found = linprog(  # type: ignore[call-overload]  # stubs know lists of pairs only
        np.concatenate([np.zeros(groups), counts]),
        A_ub=rows,
        b_ub=np.zeros(len(flat)),
        A_eq=whole[None],
        b_eq=np.ones(1),
        bounds=np.stack([lows, highs], axis=1),
    )
    if found.x is None:
        return best, 1.0
    weights = np.maximum(found.x[:groups], 0.0)
    return weights / weights.sum(), float(found.fun)


def _room(model: LoadModel, kind: DeviceNets) -> _Room:
    groups, nets = model.groups, len(model.net_sources)
    owners = np.repeat(np.arange(nets), np.diff(model.net_offsets))
    sources, readers = model.net_sources[owners], model.net_targets
    into = np.flatnonzero(kind.in_seconds[owners] > 0)
    made = np.flatnonzero((kind.out_seconds[owners] > 0) & (sources >= 0))
    at, after = np.arange(len(into)), len(into) + np.arange(len(made))
    here = sources[into] >= 0
    entries = [
        (at, readers[into], 1.0),
        (at[here], sources[into][here], -1.0),
        (at, groups + owners[into], -1.0),
        (after, sources[made], 1.0),
        (after, readers[made], -1.0),
        (after, groups + nets + owners[made], -1.0),
    ]
    rows = coo_array(
        (
            np.concatenate([np.full(len(row), value) for row, _, value in entries]),
            (
                np.concatenate([row for row, _, _ in entries]),
                np.concatenate([column for _, column, _ in entries]),
            ),
        ),
        shape=(len(into) + len(made), groups + 2 * nets),
    ).tocsr()
    may = np.isfinite(kind.work_seconds)
    work = np.where(may, kind.work_seconds, 0.0)
    return _Room(
        groups,
        rows,
        np.concatenate([work, kind.in_seconds, kind.out_seconds]),
        np.concatenate([model.resident_bytes, np.zeros(2 * nets)]),
        np.concatenate([may.astype(float), np.ones(2 * nets)]),
        kind,
    )


def _most_weight(
    room: _Room, weights: Float64, target: float, until: tuple[Limits, float]
) -> tuple[float, Bool | None]:
    """An upper bound on the weight that a device can have within `target` seconds, and the set
    of groups of the best that was found."""
    rows = [room.rows, csr_array(room.seconds[None] / target)]
    highest = [np.zeros(room.rows.shape[0]), np.ones(1)]
    capacity = room.kind.capacity_bytes
    if room.sizes.sum() > capacity > 0:
        rows.append(csr_array(room.sizes[None] / capacity))
        highest.append(np.ones(1))
    gain = np.zeros(len(room.seconds))
    gain[: room.groups] = -weights
    limits, end = until
    options: dict[str, float] = {"node_limit": limits.nodes, "mip_rel_gap": 1e-3}
    left = min(end - limits.clock(), limits.programme_seconds)
    if np.isfinite(left):
        options["time_limit"] = max(left, 0.01)
    found = milp(
        gain,
        integrality=(np.arange(len(gain)) < room.groups).astype(np.int8),
        bounds=Bounds(0.0, room.upper),
        constraints=LinearConstraint(vstack(rows), -np.inf, np.concatenate(highest)),
        options=options,  # type: ignore[arg-type]  # a plain dict
    )
    chosen = None if found.x is None else np.asarray(found.x[: room.groups] > 0.5)
    bound = getattr(found, "mip_dual_bound", None)
    return (1.0 if bound is None or not np.isfinite(bound) else float(-bound)), chosen
