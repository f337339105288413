"""Three timers, the clock that all processes share, and a deadline by it.

    time_steps    repeats one thing
    time_rounds   runs several calls in turns, round after round, on a core that others may disturb
    race          runs a baseline and its rivals in turns, and decides whether a rival is faster

What is timed says itself how long it took: by this process's clock, by stamps of the runner or by
events on a GPU (`machine/gpu_rates.py`). So the timers only decide how often it runs, and which
times count. `Repeats` says how often, and a `Deadline` how long all of it may take.
"""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb, inf
from typing import TypeVar

clock = time.perf_counter
"""Returns seconds of CLOCK_MONOTONIC, so that stamps of different processes can be compared."""

Timed = TypeVar("Timed")
Name = TypeVar("Name", bound=Hashable)
Timer = Callable[[], float]
"""A function that runs a step, or several, and returns how many seconds a step took."""
Progress = Callable[[float], None]
"""Called with the share of the work that is done, 0 to 1."""


def silent(_fraction: float) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True)
class Repeats:
    """How often something is repeated: `most` times, but after `seconds` no more than `least`, and
    after `latest` seconds no more than once."""

    most: float
    least: int = 0
    seconds: float = inf
    latest: float = inf

    def are_done(self, times: int, seconds: float) -> bool:
        if times and seconds >= self.latest:
            return True
        return times >= self.most or (times >= self.least and seconds >= self.seconds)

    def share(self, times: int, seconds: float) -> float:
        """The share that is done, 0 to 1."""
        of_seconds = seconds / self.seconds if self.seconds else 1.0
        return min(1.0, max(times / self.most, of_seconds))


class Deadline:
    """What must be done within so many seconds, in phases, by one clock that all of them ask.

    seconds   from `began` on; inf: there is no limit
    parts     phase -> its part of the seconds, in the order of the phases. What one leaves goes to
              those behind it
    spent     phase -> seconds that it has taken so far
    missed    what was not reached in time, each in a few words

    What is at work when the time is over is ended where that can be: so a little more is taken.
    """

    def __init__(
        self,
        seconds: float = inf,
        parts: Mapping[str, float] | None = None,
        *,
        began: float | None = None,
        clock: Callable[[], float] = clock,
    ) -> None:
        self.seconds, self.clock = seconds, clock
        self.began = clock() if began is None else began
        self._parts = dict(parts or {})
        self.spent: dict[str, float] = {}
        self.missed: list[str] = []
        # The phases that are on, each within the one before it, and since when the last one is.
        self._on: list[str] = []
        self._since = 0.0

    @property
    def left_seconds(self) -> float:
        return max(0.0, self.seconds - (self.clock() - self.began))

    @property
    def is_over(self) -> bool:
        return not self.left_seconds

    def within(self, seconds: float, share: float = 1.0) -> float:
        """`seconds`, or this share of what is left if that is less."""
        return min(seconds, share * self.left_seconds)

    @contextmanager
    def phase(self, name: str) -> "Iterator[Deadline]":
        """Count the time within as that of a phase, and not of one around it. Yields the deadline
        of its part of what is left, among the phases that come behind it; of one without a part,
        of all that is left."""
        names, share = list(self._parts), 1.0
        if name in names:
            later = names[names.index(name) :]
            share = self._parts[name] / sum(self._parts[each] for each in later)
        part = Deadline(share * self.left_seconds, clock=self.clock)
        part.missed = self.missed
        self._count()
        self._on.append(name)
        try:
            yield part
        finally:
            self._count()
            self._on.pop()

    def _count(self) -> None:
        now = self.clock()
        if self._on:
            self.spent[self._on[-1]] = self.spent.get(self._on[-1], 0.0) + now - self._since
        self._since = now


@dataclass(frozen=True)
class Timing:
    """Seconds per call over `samples` samples; each sample is the mean of `calls` calls."""

    median_seconds: float
    minimum_seconds: float
    spread: float  # interquartile range / median
    samples: int
    calls: int


def summarise(seconds: Sequence[float], calls: int = 1) -> Timing:
    """The median, minimum and spread of at least one sample."""
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if seconds[1:] else [0.0] * 3
    spread = (quartiles[2] - quartiles[0]) / median if median > 0 else 0.0
    return Timing(median, min(seconds), spread, len(seconds), calls)


def seconds_of(
    call: Callable[[], object], times: int = 1, clock: Callable[[], float] = clock
) -> float:
    """Seconds of a call: the mean of so many in a row."""
    began = clock()
    for _ in range(times):
        call()
    return (clock() - began) / times


def times_within(seconds: float, once_seconds: float, least: int = 1, most: float = inf) -> int:
    """How often to repeat what takes `once_seconds` so that it takes about `seconds` in all."""
    return int(max(least, min(most, round(seconds / max(once_seconds, 1e-9)))))


# --- One thing, repeated ---


def time_steps(
    step: Callable[[], Timed],
    repeats: Repeats,
    *,
    warm_up: Callable[[], object] | None = None,
    warm_ups: int = 1,
    warm_up_seconds: float = 0.0,
    agreed: Callable[[bool], bool] = bool,
    progress: Progress = silent,
    clock: Callable[[], float] = clock,
) -> list[Timed]:
    """[steps that count] what `step` returns.

    warm_up    what runs before, `warm_ups` times and for `warm_up_seconds`; None: `step`
    agreed     given whether there is one more step, returns whether there is, where several
               processes run the step together
    """
    began, times = clock(), 0
    while times < warm_ups or clock() - began < warm_up_seconds:
        (warm_up or step)()
        times += 1
    began = clock()
    steps: list[Timed] = []
    while agreed(not repeats.are_done(len(steps), clock() - began)):
        steps.append(step())
        progress(repeats.share(len(steps), clock() - began))
    return steps


def time_call(
    call: Callable[[], object],
    *,
    samples: int = 7,
    sample_seconds: float = 5e-4,
    budget_seconds: float = 0.2,
    clock: Callable[[], float] = clock,
) -> Timing:
    """Time `call`, after two calls to warm up.

    A sample repeats the call for about `sample_seconds`, because reading the clock would hide a
    short call. It stops at `samples` samples, or after `budget_seconds` once it has three.
    """
    call()
    calls = times_within(sample_seconds, seconds_of(call, clock=clock))
    seconds = time_steps(
        lambda: seconds_of(call, calls, clock),
        Repeats(samples, 3, budget_seconds),
        warm_ups=0,
        clock=clock,
    )
    return summarise(seconds, calls)


# --- Several calls in turns, on a core that others may disturb ---

DISTURBED = 1.15
"""A core counts as disturbed while its pace takes more than this times the best pace."""


@dataclass(frozen=True)
class Rounds:
    """What `time_rounds` measured.

    seconds          [calls][rounds that count] seconds of each call
    pace_seconds     the best pace of the core, seen now or known before
    waited_seconds   time of the disturbed rounds
    """

    seconds: list[list[float]]
    pace_seconds: float
    waited_seconds: float


def time_rounds(
    run_round: Callable[[int], Iterable[float]],
    repeats: Repeats,
    *,
    pace: Timer = lambda: 1.0,
    best_seconds: float = inf,
    patience_seconds: float = 0.0,
    clock: Callable[[], float] = clock,
) -> Rounds:
    """Time calls in turns, round after round.

    Rounds on a disturbed core do not count, until such rounds have taken `patience_seconds`. If
    there are fewer than `repeats.least` others by then, all rounds count.

    run_round      runs each call once, and returns the seconds of each. It is given the number of
                   rounds before
    pace           seconds of a fixed piece of work, which show how fast the core runs just now; by
                   default the core is never disturbed
    best_seconds   the best pace known of this kind of core
    """
    rounds: list[tuple[float, Iterable[float]]] = []  # (pace, seconds of each call)
    undisturbed, turn, waited = 0, 0, 0.0
    began = clock()
    while True:
        calm_enough = undisturbed >= repeats.least or waited >= patience_seconds
        if calm_enough and repeats.are_done(len(rounds), clock() - began):
            break
        start = clock()
        now = pace()
        # A better pace than any before shows that earlier rounds may have been disturbed, so they
        # are judged again.
        if now < best_seconds:
            best_seconds = now
            undisturbed = sum(earlier <= DISTURBED * now for earlier, _ in rounds)
        seconds = run_round(turn)
        turn += 1
        is_calm = now <= DISTURBED * best_seconds
        undisturbed += is_calm
        waited += 0.0 if is_calm else clock() - start
        if is_calm or len(rounds) < repeats.most:
            rounds.append((now, seconds))
    limit = DISTURBED * best_seconds if undisturbed >= max(1, repeats.least) else inf
    counted = [seconds for now, seconds in rounds if now <= limit]
    return Rounds(list(map(list, zip(*counted, strict=True))), best_seconds, waited)


# --- A baseline and its rivals, in turns ---

ROUND_SECONDS, MOST_CALLS = 0.03, 20
"""A timer is called for about this long in each round, but at most so many times, if nobody says
how often."""
_RISK, _LOOKS = 0.05, 3
"""The risk of choosing a rival that only equals the baseline, and how often the decision is tried.
The risk is shared among the tries, because each of them may go wrong."""


def in_turns(
    timers: Mapping[Name, Timer],
    repeats: Repeats,
    progress: Progress = silent,
    *,
    calls: int = 0,
    warm_ups: int = 1,
    hopeless: float | None = None,
    clock: Callable[[], float] = clock,
) -> dict[Name, tuple[float, ...]]:
    """Name -> [rounds] seconds of a step, the median within each round.

    Each round has another random order (the same in each run), because threads of one timer may
    still spin while the next one runs. A disturbance of the machine that lasts a while disturbs
    all of them.

    calls      of a timer in a round; 0: as many as fill a round
    warm_ups   calls of it before, which do not count: the first one finds in the caches what
               another timer left
    hopeless   a timer that takes more than this times the best in the first round runs no other
               round, and where one is left, there is none
    """
    calls_of = dict.fromkeys(timers, calls)
    for name, timer in timers.items() if not calls else ():
        timer()
        timer()
        calls_of[name] = times_within(ROUND_SECONDS, timer(), most=MOST_CALLS)
    seconds: dict[Name, list[float]] = {name: [] for name in timers}
    left = list(timers)
    began, rounds = clock(), 0
    while not repeats.are_done(rounds, clock() - began):
        for name in random.Random(rounds).sample(left, len(left)):
            for _ in range(warm_ups):
                timers[name]()
            seconds[name].append(statistics.median(timers[name]() for _ in range(calls_of[name])))
        rounds += 1
        progress(repeats.share(rounds, clock() - began))
        if hopeless is not None and rounds == 1:
            best = min(first for (first,) in seconds.values())
            left = [name for name in left if seconds[name][0] <= hopeless * best]
            if len(left) == 1:
                break
    return {name: tuple(of_name) for name, of_name in seconds.items()}


def race(
    baseline: Name,
    timers: Mapping[Name, Timer],
    rounds: int,
    progress: Progress = silent,
    *,
    calls: int = 0,
) -> tuple[Name, dict[Name, tuple[float, ...]]]:
    """(name of the fastest, [rounds] seconds of all): `baseline` unless a rival is surely faster.

    A rival is judged by its time divided by that of the baseline in the same round. The one with
    the least median ratio is picked. It is returned if further rounds of the two alone show that it
    is faster. The rounds that picked it do not count in that test, because it may have been lucky
    in them. While the test leaves a doubt there are more rounds: 2 x `rounds` at a time, at most
    `_LOOKS` times.

    calls   of a timer in a round, as in `in_turns`
    """
    # Ranges of the progress: half for picking a rival, and half for the looks.
    ends = [0.0, *(0.5 + look / (2 * _LOOKS) for look in range(_LOOKS + 1))]

    def part(number: int) -> Progress:
        begin, end = ends[number], ends[number + 1]
        return lambda fraction: progress(begin + (end - begin) * fraction)

    def ratio(seconds: Mapping[Name, Sequence[float]], name: Name) -> float:
        return statistics.median(ratios_of(seconds[name], seconds[baseline]))

    seconds = in_turns(timers, Repeats(rounds), part(0), calls=calls)
    # If a rival ties with the baseline, the baseline wins.
    best = min(timers, key=lambda name: (ratio(seconds, name), name != baseline))
    if best == baseline:
        return baseline, seconds
    pair = {name: timers[name] for name in (baseline, best)}
    again: dict[Name, tuple[float, ...]] = dict.fromkeys(pair, ())
    for look in range(_LOOKS):
        more = in_turns(pair, Repeats(2 * rounds), part(1 + look), calls=calls)
        again = {name: own + more[name] for name, own in again.items()}
        is_faster = upper_limit(ratios_of(again[best], again[baseline])) < 1
        if is_faster or ratio(again, best) >= 1:
            break
    return (best if is_faster else baseline), {**seconds, **again}


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
