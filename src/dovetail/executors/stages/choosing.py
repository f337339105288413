"""Which schedule is fastest: all measured side by side, and never one that may be slower.

Schedules run in turn, round after round, so that what disturbs a machine for a while disturbs all.
What counts is each round's ratio to the sequential schedule of the same round.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import Any

from dovetail.runtime.timers import clock
from dovetail.schedulers.results import SEQUENTIAL

_ROUND_SECONDS = 0.03
_MOST_CALLS = 20
_CONFIDENCE = 0.95

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


def choose(seconds: Mapping[str, Sequence[float]]) -> str:
    """The fastest of those that are faster than `sequential` beyond doubt; else that."""
    least, chosen = 1.0, SEQUENTIAL
    for name, own in seconds.items():
        ratios = ratios_of(own, seconds[SEQUENTIAL])
        if name != SEQUENTIAL and upper_limit(ratios) < 1 and statistics.median(ratios) < least:
            least, chosen = statistics.median(ratios), name
    return chosen


def ratios_of(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Per round, what one took over what the other took."""
    return [own / other for own, other in zip(seconds, baseline, strict=True)]


def upper_limit(values: Sequence[float]) -> float:
    """Of the median: no more than this with 95 % confidence, whatever the distribution (the order
    statistic by the binomial distribution). The largest value where there are fewer than five."""
    ordered = sorted(values)
    below = 0.0
    for place in range(len(ordered)):
        below += comb(len(ordered), place) / 2 ** len(ordered)
        if below >= _CONFIDENCE:
            return ordered[place]
    return ordered[-1]


def _calls(timer: Timer) -> int:
    """How many calls a round takes, after some to warm up."""
    timer()
    timer()
    return max(1, min(_MOST_CALLS, round(_ROUND_SECONDS / max(timer(), 1e-9))))
