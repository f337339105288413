"""Computes the figures of stage schedules that both the terminal's table and the page show."""

from collections.abc import Sequence
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


def sequential_of(scheduled: Scheduled) -> ScheduleCandidate | None:
    """The sequential schedule; None if it is not among the candidates."""
    return next((c for c in scheduled.candidates if c.scheduler == SEQUENTIAL), None)


def ratio_of(scheduled: Scheduled, candidate: ScheduleCandidate) -> Ratio | None:
    """The schedule's ratio to sequential; None if sequential is not among the candidates, or if the
    schedule's seconds are 0."""
    sequential = sequential_of(scheduled)
    if sequential is None:
        return None
    measured = bool(sequential.seconds and candidate.seconds)
    seconds, sequential_seconds = (
        schedule.step_seconds if measured else schedule.predicted_seconds
        for schedule in (candidate, sequential)
    )
    return Ratio(sequential_seconds / seconds, measured) if seconds > 0 else None


def measured_of(candidate: ScheduleCandidate) -> Timing | None:
    """The median and spread of the measured rounds; None if nothing was measured."""
    return summarise(list(candidate.seconds)) if candidate.seconds else None


def measured_text(candidate: ScheduleCandidate) -> str:
    """ "4.03 ms (1.2 %)": median, and interquartile range over median; "-" if nothing was
    measured."""
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


def launches_of(scheduled: Scheduled, candidate: ScheduleCandidate) -> int:
    """The number of kernels that run. All kernels of a merged stage are one."""
    saved = sum(len(stage.kernels) - 1 for stage in candidate.stages if stage.merged)
    return len(scheduled.kernels) - saved


def noise_of(candidates: Sequence[ScheduleCandidate]) -> float:
    """The noise of the measurements: the median, over the schedules, of the interquartile range of
    the rounds over their median."""
    spreads = sorted(summarise(list(c.seconds)).spread for c in candidates if len(c.seconds) > 1)
    return spreads[len(spreads) // 2] if spreads else 0.0


def overview_rows(
    scheduled: Scheduled,
) -> tuple[tuple[str, ...], list[tuple[tuple[str, ...], bool]]]:
    """(titles, [(cells, whether it was chosen)] of each scheduler). There is a column "left out" if
    any search pruned."""
    titles = ("scheduler", "predicted", "measured (spread)", "speed-up", "stages", "largest",
              "stages measured", "search")  # fmt: skip
    any_pruned = any(candidate.pruning for candidate in scheduled.candidates)
    rows = []
    for candidate in scheduled.candidates:
        chosen = candidate.scheduler == scheduled.chosen
        ratio = ratio_of(scheduled, candidate)
        largest = max((len(stage.kernels) for stage in candidate.stages), default=None)
        cells = (
            candidate.scheduler + " (chosen)" * chosen,
            format_seconds(candidate.predicted_seconds),
            measured_text(candidate),
            "-" if ratio is None else str(ratio),
            stages_text(candidate),
            "-" if largest is None else f"{largest:,}",
            f"{candidate.effort.timed:,}",
            format_seconds(candidate.effort.search_seconds),
        )
        rows.append((cells + (candidate.pruning,) * any_pruned, chosen))
    return titles + ("left out",) * any_pruned, rows


def answer(scheduled: Scheduled, costs_source: str) -> str:
    """Sentences that say which schedule was chosen, how fast it is against sequential, and how that
    is known. Names in them are not escaped."""
    best = scheduled.best
    subject = f"At batch {scheduled.batch} {best.scheduler}"
    timing = measured_of(best)
    if timing is None:
        return f"{subject} {_predicted(scheduled, costs_source)}"
    next_best = _fastest_measured_other(scheduled)
    is_fastest = next_best is None or next_best.step_seconds >= best.step_seconds
    verb = "is fastest" if is_fastest else "was chosen"
    text = f"{subject} {verb}: {measured_text(best)} measured"
    sequential = sequential_of(scheduled)
    if sequential is None or not sequential.seconds:
        return f"{text}. Sequential was not measured, so whether this is slower is not known."
    if best is sequential:
        if is_fastest:
            text += ". No other schedule was measured to be faster"
        if next_best is not None:
            text += f". The next is {next_best.scheduler}: {measured_text(next_best)}"
        return text + "."
    text += _against_sequential(scheduled)
    rounds = f"{timing.samples:,} and {len(sequential.seconds):,} rounds"
    if timing.median_seconds > sequential.step_seconds:
        return f"{text}. It is slower than sequential, by {rounds}: run sequential instead."
    text += f". That it is not slower than sequential was measured, by {rounds}"
    gain = sequential.step_seconds / timing.median_seconds - 1
    noise = max(timing.spread, summarise(list(sequential.seconds)).spread)
    return text + (", but the difference is within their spread." if gain < noise else ".")


def _predicted(scheduled: Scheduled, costs_source: str) -> str:
    """What is known of a chosen schedule that was not measured, as the rest of a sentence and
    further ones.

    Streams without barriers are predicted by their kernels' costs alone, so their prediction does
    not compare with that of stages.
    """
    best = scheduled.best
    faster = sorted(
        (c for c in scheduled.candidates if c.predicted_seconds < best.predicted_seconds),
        key=lambda c: c.predicted_seconds,
    )
    remark = ""
    if not faster:
        verb = "is predicted to be fastest"
    else:
        in_stages = any(candidate.stages for candidate in faster)
        verb = "was chosen" if in_stages else "is predicted to be the fastest in stages"
        least = faster[0]
        remark = f" The {format_seconds(least.predicted_seconds)} of {least.scheduler}"
        remark += (
            " is less."
            if least.stages
            else " counts every kernel as if no other slowed it down, so it does not show that "
            f"{least.scheduler} is faster."
        )
    return (
        f"{verb}: {format_seconds(best.predicted_seconds)}{_against_sequential(scheduled)}."
        f"{remark} Predicted only, from costs that are {costs_source}: no step was measured, so "
        "nothing here shows that it is never slower than sequential."
    )


def _against_sequential(scheduled: Scheduled) -> str:
    """The speed of the chosen schedule against sequential's, to end a sentence with; "" if there is
    none."""
    best, sequential = scheduled.best, sequential_of(scheduled)
    ratio = ratio_of(scheduled, best)
    if sequential is None or ratio is None or best is sequential:
        return ""
    seconds = sequential.step_seconds if ratio.measured else sequential.predicted_seconds
    return f", {ratio.value:.3f} x sequential's speed ({format_seconds(seconds)})"


def _fastest_measured_other(scheduled: Scheduled) -> ScheduleCandidate | None:
    """The fastest measured schedule apart from the chosen one; None if there is none."""
    best = scheduled.best
    # A schedule that runs like the chosen one was measured together with it and has the very same
    # seconds.
    others = [c for c in scheduled.candidates if c.seconds and c.seconds != best.seconds]
    return min(others, key=lambda c: c.step_seconds, default=None)
