"""Which schedule is fastest: all measured side by side, and never one that may be slower.

Schedules run in turn, round after round, so that what disturbs a machine for a while disturbs all.
What counts is each round's ratio to the sequential schedule of the same round.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from math import comb, inf
from typing import Any

from dovetail.runtime.timers import clock
from dovetail.schedulers.results import SEQUENTIAL

_ROUND_SECONDS = 0.03
_MOST_CALLS = 20
_RISK, _LOOKS = 0.05, 3

Timer = Callable[[], float]
"""Runs a step once, and says how many seconds it took."""


def measure(
    timers: Mapping[str, Timer],
    rounds: int,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> dict[str, tuple[float, ...]]:
    """name -> seconds of a step, the median of each round; the order is drawn for each: threads of
    one may still spin when the next one runs."""
    names = list(timers)
    calls = {name: _calls(timers[name]) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):
            timers[name]()  # the caches are another schedule's
            seconds[name].append(statistics.median(timers[name]() for _ in range(calls[name])))
        progress((number + 1) / rounds)
    return {name: tuple(of_name) for name, of_name in seconds.items()}


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = clock()
    run()
    return clock() - began


def fastest(
    timers: Mapping[str, Timer],
    rounds: int,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> tuple[str, dict[str, tuple[float, ...]]]:
    """(what to run, seconds of all): the schedule of the least median ratio to `sequential`, if
    rounds of the two alone show it to be the faster; else `sequential`.

    The rounds that picked it, and may have been lucky, do not count then. While they leave a doubt
    there are more, at most `_LOOKS` times twice as many as `rounds`.
    """
    seconds = measure(timers, rounds, _part_of(progress, 0.0, 0.5))
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
    """Of the rounds' ratios to `sequential`."""
    return statistics.median(ratios_of(seconds[name], seconds[SEQUENTIAL]))


def ratios_of(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Per round, what one took over what the other took."""
    return [own / other for own, other in zip(seconds, baseline, strict=True)]


def upper_limit(values: Sequence[float]) -> float:
    """Of the median: no more than this but in one of 20 cases, though it is asked `_LOOKS` times,
    whatever the distribution (the order statistic by the binomial distribution). Infinite where
    there are too few values to tell."""
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
    return lambda fraction: progress(begin + (end - begin) * fraction)


def _calls(timer: Timer) -> int:
    """How many calls a round takes, after some to warm up."""
    timer()
    timer()
    return max(1, min(_MOST_CALLS, round(_ROUND_SECONDS / max(timer(), 1e-9))))
