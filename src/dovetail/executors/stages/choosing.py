"""Finds the fastest schedule by measuring all side by side, and never picks one that may be slower.

Schedules run in turn, round after round, so that a disturbance of the machine that lasts a while
disturbs all of them. A schedule is judged by its time divided by that of the sequential schedule in
the same round.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from math import comb, inf

from dovetail.schedulers.results import SEQUENTIAL

_ROUND_SECONDS = 0.03
"""A schedule is called for about this long in each round, but at most `_MOST_CALLS` times."""
_MOST_CALLS = 20
_RISK, _LOOKS = 0.05, 3
"""The risk of choosing a schedule that only equals `sequential`, and how often the decision is
tried. The risk is shared among the tries, because each of them may go wrong."""

Timer = Callable[[], float]
"""A function that runs a step, or several, and returns how many seconds a step took."""


def measure(
    timers: Mapping[str, Timer],
    rounds: int,
    progress: Callable[[float], None] = lambda _fraction: None,
    *,
    calls: int = 0,
) -> dict[str, tuple[float, ...]]:
    """Schedule's name -> [rounds] seconds of a step, the median within each round.

    calls   of a timer in a round, after one that does not count; 0: as many as fill a round

    Each round has another random order (the same in each run), because threads of one schedule may
    still spin while the next one runs.
    """
    names = list(timers)
    calls_of = {name: calls or _calls(timers[name]) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):
            # The first call does not count: it finds in the caches what another schedule left.
            timers[name]()
            seconds[name].append(statistics.median(timers[name]() for _ in range(calls_of[name])))
        progress((number + 1) / rounds)
    return {name: tuple(of_name) for name, of_name in seconds.items()}


def fastest(
    timers: Mapping[str, Timer],
    rounds: int,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> tuple[str, dict[str, tuple[float, ...]]]:
    """(name of the schedule to run, seconds of all schedules).

    The schedule with the least median ratio to `sequential` is picked. It is returned if further
    rounds of the two alone show that it is faster; otherwise `sequential` is returned. The rounds
    that picked it do not count in that test, because it may have been lucky in them. While the test
    leaves a doubt there are more rounds: 2 x `rounds` at a time, at most `_LOOKS` times.
    """
    seconds = measure(timers, rounds, _part_of(progress, 0.0, 0.5))
    # If another schedule ties with `sequential`, `sequential` wins.
    best = min(timers, key=lambda name: (median_ratio(seconds, name), name != SEQUENTIAL))
    if best == SEQUENTIAL:
        return SEQUENTIAL, seconds
    pair = {name: timers[name] for name in (SEQUENTIAL, best)}
    again: dict[str, tuple[float, ...]] = dict.fromkeys(pair, ())
    for look in range(_LOOKS):
        begin, end = ((1 + done / _LOOKS) / 2 for done in (look, look + 1))
        more = measure(pair, 2 * rounds, _part_of(progress, begin, end))
        again = {name: own + more[name] for name, own in again.items()}
        faster = upper_limit(ratios_of(again[best], again[SEQUENTIAL])) < 1
        if faster or median_ratio(again, best) >= 1:
            break
    return (best if faster else SEQUENTIAL), {**seconds, **again}


def median_ratio(seconds: Mapping[str, Sequence[float]], name: str) -> float:
    """The median over the rounds of a schedule's ratio to `sequential`."""
    return statistics.median(ratios_of(seconds[name], seconds[SEQUENTIAL]))


def ratios_of(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """[rounds] seconds divided by the baseline's seconds of the same round."""
    return [own / other for own, other in zip(seconds, baseline, strict=True)]


def upper_limit(values: Sequence[float]) -> float:
    """An upper confidence limit of the median; inf if there are too few values.

    The true median is above the limit in at most one of 20 cases, even if the limit is asked for
    `_LOOKS` times. It holds for any distribution, because it is an order statistic: how many of the
    values lie below the median follows a binomial distribution.
    """
    ordered = sorted(values)
    below = 0.0
    for place in range(len(ordered)):
        below += comb(len(ordered), place) / 2 ** len(ordered)
        if below >= 1 - _RISK / _LOOKS:
            return ordered[place]
    return inf


def _part_of(
    progress: Callable[[float], None], begin: float, end: float
) -> Callable[[float], None]:
    # Maps progress within one part to progress within the whole.
    return lambda fraction: progress(begin + (end - begin) * fraction)


def _calls(timer: Timer) -> int:
    """How many calls of a timer fill a round; the timer is called twice before to warm up."""
    timer()
    timer()
    return max(1, min(_MOST_CALLS, round(_ROUND_SECONDS / max(timer(), 1e-9))))
