"""Computes the figures of stage schedules that both the terminal's table and the page show."""

from dataclasses import dataclass

from dovetail.runtime.timers import Timing, summarise
from dovetail.schedulers.results import SEQUENTIAL, ScheduleCandidate, Scheduled
from dovetail.units import format_seconds


@dataclass(frozen=True)
class Ratio:
    """Sequential's seconds over a schedule's seconds. Either both were measured, or both are
    predicted: the two kinds do not compare."""

    value: float
    measured: bool

    def __str__(self) -> str:
        return f"{self.value:.3f} x" + ("" if self.measured else " (predicted)")


def measured_of(candidate: ScheduleCandidate) -> Timing | None:
    """The median and spread of the measured rounds; None if nothing was measured."""
    return summarise(list(candidate.seconds)) if candidate.seconds else None


def sequential_of(scheduled: Scheduled) -> ScheduleCandidate | None:
    return next((c for c in scheduled.candidates if c.scheduler == SEQUENTIAL), None)


def ratio_of(scheduled: Scheduled, candidate: ScheduleCandidate) -> Ratio | None:
    """The schedule's ratio to sequential; None if sequential is not among the candidates, or if the
    schedule's seconds are 0."""
    base = sequential_of(scheduled)
    if base is None:
        return None
    both = bool(base.seconds and candidate.seconds)
    ours = candidate.median_seconds if both else candidate.predicted_seconds
    theirs = base.median_seconds if both else base.predicted_seconds
    return Ratio(theirs / ours, both) if ours > 0 else None


def measured_text(candidate: ScheduleCandidate) -> str:
    """ "4.03 ms (1.2 %)": median, and interquartile range over median."""
    timing = measured_of(candidate)
    if timing is None:
        return "-"
    return f"{format_seconds(timing.median_seconds)} ({100 * timing.spread:.1f} %)"


def stages_text(candidate: ScheduleCandidate) -> str:
    """The number of stages, or of streams if there are no stages."""
    if candidate.stages or not candidate.streams.orders:
        return f"{len(candidate.stages):,}"
    streams = len(candidate.streams.orders)
    return f"{streams} stream{'s' * (streams != 1)}"


def largest_text(candidate: ScheduleCandidate) -> str:
    """The number of kernels of the largest stage."""
    sizes = [len(stage.kernels) for stage in candidate.stages]
    return f"{max(sizes):,}" if sizes else "-"


def overview_rows(
    scheduled: Scheduled,
) -> tuple[tuple[str, ...], list[tuple[tuple[str, ...], bool]]]:
    """(titles, [(cells, whether it was chosen)] of each scheduler). There is a column "left out" if
    any search pruned."""
    head = ("scheduler", "predicted", "measured (spread)", "speed-up", "stages", "largest",
            "stages measured", "search")  # fmt: skip
    pruned = any(candidate.pruning for candidate in scheduled.candidates)
    rows = []
    for candidate in scheduled.candidates:
        chosen = candidate.scheduler == scheduled.chosen
        ratio = ratio_of(scheduled, candidate)
        cells = (
            candidate.scheduler + " (chosen)" * chosen,
            format_seconds(candidate.predicted_seconds),
            measured_text(candidate),
            "-" if ratio is None else str(ratio),
            stages_text(candidate),
            largest_text(candidate),
            f"{candidate.effort.timed:,}",
            format_seconds(candidate.effort.search_seconds),
        )
        rows.append((cells + (candidate.pruning,) * pruned, chosen))
    return head + ("left out",) * pruned, rows


def launches_of(scheduled: Scheduled, candidate: ScheduleCandidate) -> int:
    """The number of kernels that run. All kernels of a merged stage are one."""
    saved = sum(len(stage.kernels) - 1 for stage in candidate.stages if stage.merged)
    return len(scheduled.kernels) - saved


def answer(scheduled: Scheduled, costs_source: str) -> str:
    """Which schedule, how fast against sequential, and how that is known. Names as they came."""
    best, base = scheduled.best, sequential_of(scheduled)
    timing = measured_of(best)
    if timing is None:
        return (
            f"At batch {scheduled.batch} {best.scheduler} {_predicted_place(scheduled)}: "
            f"{format_seconds(best.predicted_seconds)}{_against(scheduled, best)}."
            f"{_predicted_faster(scheduled)} Predicted only, "
            f"from costs that are {costs_source}: no step was measured, so nothing here shows that "
            "it is never slower than sequential."
        )
    near = _next(scheduled)
    first = near is None or near.median_seconds >= best.median_seconds
    what = "is fastest" if first else "was chosen"
    took = f"At batch {scheduled.batch} {best.scheduler} {what}: {measured_text(best)} measured"
    if base is None or not base.seconds:
        return f"{took}. Sequential was not measured, so whether this is slower is not known."
    rounds = f"{timing.samples:,} and {len(base.seconds):,} rounds"
    if best is base:
        said = "No other schedule was measured to be faster. " * first
        said += "" if near is None else f"The next is {near.scheduler}: {measured_text(near)}."
        return f"{took}. {said}".rstrip()
    text = took + _against(scheduled, best)
    if timing.median_seconds > base.median_seconds:
        return f"{text}. It is slower than sequential, by {rounds}: run sequential instead."
    text += f". That it is not slower than sequential was measured, by {rounds}"
    apart = base.median_seconds / timing.median_seconds - 1
    noise = max(timing.spread, summarise(list(base.seconds)).spread)
    return text + (", but the difference is within their spread." if apart < noise else ".")


def _faster_by_prediction(scheduled: Scheduled) -> list[ScheduleCandidate]:
    """The schedules with less predicted seconds than the chosen one, the least first."""
    limit = scheduled.best.predicted_seconds
    faster = [c for c in scheduled.candidates if c.predicted_seconds < limit]
    return sorted(faster, key=lambda c: c.predicted_seconds)


def _predicted_place(scheduled: Scheduled) -> str:
    """Says how the prediction ranks the chosen schedule, among those it can be compared with."""
    faster = _faster_by_prediction(scheduled)
    if not faster:
        return "is predicted to be fastest"
    if any(candidate.stages for candidate in faster):
        return "was chosen"
    return "is predicted to be the fastest in stages"


def _predicted_faster(scheduled: Scheduled) -> str:
    """A sentence on the schedule with the lowest prediction, if it is below the chosen one's, else
    "". Streams without barriers are predicted by their kernels' costs alone, so their prediction
    does not compare with that of stages."""
    faster = _faster_by_prediction(scheduled)
    if not faster:
        return ""
    least = faster[0]
    text = f" The {format_seconds(least.predicted_seconds)} of {least.scheduler}"
    if least.stages:
        return f"{text} is less."
    return (
        f"{text} counts every kernel as if no other slowed it down, so it does not show that "
        f"{least.scheduler} is faster."
    )


def _against(scheduled: Scheduled, best: ScheduleCandidate) -> str:
    base, ratio = sequential_of(scheduled), ratio_of(scheduled, best)
    if base is None or ratio is None or best is base:
        return ""
    theirs = base.median_seconds if ratio.measured else base.predicted_seconds
    return f", {ratio.value:.3f} x sequential's speed ({format_seconds(theirs)})"


def _next(scheduled: Scheduled) -> ScheduleCandidate | None:
    """The fastest measured schedule apart from the chosen one; None if there is none."""
    best = scheduled.best
    # A schedule that runs like the chosen one was measured together with it and has the very same
    # seconds.
    compared = [c for c in scheduled.candidates if c.seconds and c.seconds != best.seconds]
    return min(compared, key=lambda c: c.median_seconds, default=None)
