"""What trainings of learned methods come to: the run of the median, effort, and what was to be met.

Search effort, as GDP compares itself with HDP, is in evaluated placements: how many HDP evaluates
up to its best, over how many GDP evaluates up to one at least as good. Of two runs of one seed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dovetail.bench.cases import METHOD_OF
from dovetail.bench.records import Best, Case, Column, LearnedRun

CLOSE = 1 + 1e-9
BASELINES = ("1 CPU", "1 GPU", "Scotch", "MinCut", "expert")
"""What RL17 compares its learned placements with."""
HEAD_ROOM_SHARE = 0.8


def middle(runs: Sequence[LearnedRun]) -> LearnedRun:
    """The run of the median, the better of two; one that found nothing is worse than any."""
    return sorted(runs, key=_seconds)[(len(runs) - 1) // 2]


def span(runs: Sequence[LearnedRun]) -> tuple[float, float]:
    """(best, worst) seconds; inf for a run that found nothing."""
    found = [_seconds(run) for run in runs]
    return min(found), max(found)


def _seconds(run: LearnedRun) -> float:
    return math.inf if run.found.seconds is None else run.found.seconds


def reached(run: LearnedRun, seconds: float) -> Best | None:
    """The first placement of a run that takes no longer; None where there is none."""
    return next((best for best in run.bests if best.seconds <= seconds * CLOSE), None)


def cut(run: LearnedRun, trials: int) -> LearnedRun:
    """The run as if it had ended after so many placements, but for its counts."""
    bests = tuple(best for best in run.bests if best.trial <= trials)
    seconds = bests[-1].seconds if bests else None
    return replace(run, bests=bests, found=replace(run.found, seconds=seconds))


def middle_within(column: Column, method: str, other: str) -> float | None:
    """Seconds of the median of a method's runs, each cut to as many placements as the other
    method's run of that seed had. None where nothing fits, or no seed has both."""
    of_seed = {run.seed: run.trials for run in column.learned.get(other, ())}
    runs = column.learned.get(method, ())
    both = [cut(run, of_seed[run.seed]) for run in runs if run.seed in of_seed]
    return middle(both).found.seconds if both else None


@dataclass(frozen=True)
class Effort:
    """How much less one run evaluates than another, for a placement as good as the other's best.

    ratio       of evaluated placements; `distinct_ratio` of different ones
    limit       "at most": it never got there, and its whole run is counted; "at least": the other
                found nothing that fits, and its whole run is counted; "": neither
    """

    ratio: float
    distinct_ratio: float
    limit: str = ""


def effort(run: LearnedRun, other: LearnedRun) -> Effort:
    """Of `run` against `other`."""
    last = other.bests[-1] if other.bests else Best(other.trials, other.distinct, math.inf)
    hit = reached(run, last.seconds)
    limit = "" if other.bests else "at least"
    if hit is None:
        hit, limit = Best(run.trials, run.distinct, math.inf), "at most"
    ratio = last.trial / max(1, hit.trial)
    return Effort(ratio, last.distinct / max(1, hit.distinct), limit)


def efforts(column: Column, method: str = "gdp", other: str = "hdp") -> list[Effort]:
    """Seed by seed, of the seeds that both have."""
    of_seed = {run.seed: run for run in column.learned.get(other, ())}
    return [
        effort(run, of_seed[run.seed])
        for run in column.learned.get(method, ())
        if run.seed in of_seed
    ]


@dataclass(frozen=True)
class Target:
    """What RL17's learned placement was to reach on a row.

    baseline      of least seconds, and its seconds
    head_room     baseline over `auto`, less 1: what there is to be gained
    margin        the same of the paper's RL over its best baseline; None: not printed
    seconds       that meet the smaller of margin and `HEAD_ROOM_SHARE` of the head room
    """

    baseline: str
    baseline_seconds: float
    auto_seconds: float
    head_room: float
    margin: float | None
    seconds: float


def target_of(case: Case, column: Column) -> Target | None:
    """None where no baseline of ours fits, or `auto` was not run."""
    ours = {
        name: found.seconds
        for name in BASELINES
        if (found := column.methods.get(METHOD_OF[name])) is not None and found.seconds is not None
    }
    auto = column.methods.get("auto")
    if not ours or auto is None or auto.seconds is None:
        return None
    baseline = min(ours, key=lambda name: ours[name])
    head_room = max(0.0, ours[baseline] / auto.seconds - 1)
    margin = _margin(case)
    gain = HEAD_ROOM_SHARE * head_room
    gain = gain if margin is None else min(gain, margin)
    return Target(
        METHOD_OF[baseline], ours[baseline], auto.seconds, head_room, margin,
        ours[baseline] / (1 + gain),
    )  # fmt: skip


def _margin(case: Case) -> float | None:
    printed = case.published.seconds if case.published else {}
    given = [seconds for name in BASELINES if (seconds := printed.get(name)) is not None]
    learned = printed.get("RL")
    return max(0.0, min(given) / learned - 1) if given and learned else None


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of none."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None
