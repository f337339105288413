"""Draws the page about schedules of one device, batch size by batch size.

    answer      which schedule is chosen, its speed against sequential, and how that is known
    stages      the schedules drawn over the graph, the chosen one first
    latency     seconds of all schedules, and the speed-up of each block
    work        kernels, FLOPs, memory access, utilisation; seconds of searching and measuring

Figures and tables are those of "Accelerate DNN Inference by Inter-Operator Parallelism", 2019.
The page has no script.
"""

from markupsafe import Markup

from dovetail.reports.charts import Axes, bar_chart
from dovetail.reports.kit import (
    Card,
    Page,
    Part,
    Section,
    Table,
    hint,
    in_figures,
    preformatted,
    render_page,
)
from dovetail.reports.schedules import (
    answer,
    draw_schedule,
    latency_chart,
    launches_of,
    measured_of,
    measured_text,
    overview,
    ratio_of,
    sequential_of,
    stages_text,
)
from dovetail.schedulers.results import ScheduleCandidate, Scheduled, Schedules, SearchEffort
from dovetail.units import format_bytes, format_count, format_seconds

MOST_DRAWN = 10_000
"""All pictures together have at most this many boxes and lines."""
MOST_BLOCKS = 64
"""At most this many blocks, the first ones, are compared, so that chart and table stay legible."""
MOST_CARDS = 4
"""At most this many batch sizes, the first ones, have a card at the top of the page."""


def render_stages(schedules: Schedules, *, made: str = "") -> str:
    """The page as text. O(kernels + edges) for each schedule; what is drawn is bounded.

    made   the command that made it
    """
    return render_page(page_of_stages(schedules, made=made))


def page_of_stages(schedules: Schedules, *, made: str = "") -> Page:
    """The page, to which a comparison of schedules adds its own sections."""
    results = schedules.results
    parts: list[Part] = []
    if not results:
        parts.append(Section("", ["Nothing was scheduled."]))
    cards: list[Card] = [("costs", schedules.costs_source, "of stages, on which the search stands")]
    if results:
        kernels = max(len(result.kernels) for result in results)
        blocks = max(len(result.blocks) for result in results)
        cards.append(("kernels", f"{kernels:,}", f"in {blocks:,} blocks"))
    rows = []
    for result in results:
        best, ratio = result.best, ratio_of(result, result.best)
        seconds = best.step_seconds
        source = "measured" if best.seconds else "predicted"
        gain = "" if ratio is None else f"{ratio.value:.3f} x sequential's speed, {source}"
        cards.append((f"batch {result.batch}: {result.chosen}", format_seconds(seconds), gain))
        rows.append({
            "batch": f"{result.batch:,}",
            "chosen": result.chosen,
            "predicted": format_seconds(best.predicted_seconds),
            "measured (spread)": measured_text(best),
            "speed-up": "-" if ratio is None else str(ratio),
            "samples a second": format_count(result.batch / seconds) if seconds > 0 else "-",
        })  # fmt: skip
    if len(results) > 1:
        parts.append(Section("Batch sizes", [Table.of(rows)]))
    for i, (result, drawn) in enumerate(zip(results, drawable(schedules), strict=True)):
        answered: list[Part] = [
            answer(result, schedules.costs_source),
            overview(result),
            hint(
                "Speed-up: sequential's seconds over the schedule's. Spread: interquartile range "
                "over median. Sizes are in kernels."
            ),
        ]
        # The schedules as pictures, the chosen one unfolded.
        pictures: list[Part] = [
            "Time runs down. A box is a kernel; boxes of one frame run one after another, frames "
            "of one row at the same time, and rows one after another. Lines are data; strong ones "
            "are events between streams. Hover over a box for its ops, FLOPs and bytes, and for "
            "what it reads."
        ]
        firsts = _first_of_each(result)
        for candidate in _by_choice(result):
            name, first = candidate.scheduler, firsts[candidate.scheduler]
            is_chosen = name == result.chosen
            head = f"{name}{' (chosen)' * is_chosen}: {stages_text(candidate)}"
            head += " stages" * bool(candidate.stages)
            if first is not candidate:
                pictures.append(f"{name} found what {first.scheduler} found.")
            elif name not in drawn:
                pictures.append(f"{head}. Not drawn: the page would be too large.")
            elif is_chosen:
                pictures.append(Markup("<p><b>{}</b></p>").format(head))
                pictures += draw_schedule(result, candidate)
            else:
                pictures.append(Section(head, draw_schedule(result, candidate), fold="closed"))
        sections = [
            Section("The answer", answered), Section("Stages", pictures), *_figures(result)
        ]  # fmt: skip
        title = f"Batch {result.batch:,}: {result.chosen}"
        parts.append(Section(title, sections, fold="closed" if i else "open", style="batch"))
    if made:
        parts.append(Section("How this was made", [preformatted(made)]))
    title = f"{schedules.model} on {schedules.device}"
    return Page(title, cards[: 2 + MOST_CARDS], parts, brand="dovetail schedule")


def drawable(schedules: Schedules, most: int = MOST_DRAWN) -> list[set[str]]:
    """[results] the schedulers whose schedules are drawn. All pictures together have at most `most`
    boxes and lines: chosen schedules come first, then the others in their order. One that does not
    fit is left out, and smaller ones after it may still fit."""
    drawn: list[set[str]] = [set() for _ in schedules.results]
    candidates = [(i, result.best) for i, result in enumerate(schedules.results)]
    for i, result in enumerate(schedules.results):
        firsts = _first_of_each(result)
        candidates += [(i, c) for c in _by_choice(result)[1:] if firsts[c.scheduler] is c]
    for i, candidate in candidates:
        result = schedules.results[i]
        reads = sum(before.bit_count() for before in result.block.predecessors)
        needed = len(result.kernels) + reads + len(candidate.stages)
        if needed <= most:
            most -= needed
            drawn[i].add(candidate.scheduler)
    return drawn


def _by_choice(scheduled: Scheduled) -> list[ScheduleCandidate]:
    """The candidates, the chosen one first and the others in their order."""
    return sorted(scheduled.candidates, key=lambda c: c.scheduler != scheduled.chosen)


def _first_of_each(scheduled: Scheduled) -> dict[str, ScheduleCandidate]:
    """Scheduler -> the first candidate by choice with its stages or streams, which may be its
    own."""
    firsts: dict[object, ScheduleCandidate] = {}
    return {
        c.scheduler: firsts.setdefault(
            tuple((stage.groups, stage.merged) for stage in c.stages) or c.streams, c
        )
        for c in _by_choice(scheduled)
    }


def _figures(scheduled: Scheduled) -> list[Section]:
    """The sections of figures: latency, blocks, work and search. One of which nothing is known is
    left out."""
    candidates = scheduled.candidates
    rows = []
    for candidate in candidates:
        timing = measured_of(candidate)
        error = ""
        if timing is not None and timing.median_seconds > 0:
            error = f"{100 * (candidate.predicted_seconds / timing.median_seconds - 1):+.1f} %"
        ends = (min(candidate.seconds), max(candidate.seconds)) if candidate.seconds else ()
        rows.append({
            "scheduler": candidate.scheduler,
            "predicted": format_seconds(candidate.predicted_seconds),
            "measured (spread)": measured_text(candidate),
            "lowest to highest": " to ".join(format_seconds(end) for end in ends),
            "error of the prediction": error,
            "rounds": f"{len(candidate.seconds):,}" if timing else "not measured",
        })  # fmt: skip
    chart = latency_chart(candidates, scheduled.chosen)
    sections = [Section("Latency of all schedules", [chart, in_figures(Table.of(rows))])]

    # Of each block sequential's predicted seconds over each scheduler's, where a schedule has
    # seconds for the same blocks as sequential.
    base = sequential_of(scheduled)
    count = 0 if base is None else len(base.block_seconds)
    compared = [c for c in _by_choice(scheduled) if c is not base and len(c.block_seconds) == count]
    if base is not None and count and compared:
        gains = {
            c.scheduler: [
                base_seconds / seconds if seconds > 0 else 1.0
                for base_seconds, seconds in zip(base.block_seconds, c.block_seconds, strict=True)
            ][:MOST_BLOCKS]
            for c in compared
        }
        first, *_ = gains
        numbers = [str(block + 1) for block in range(len(gains[first]))]
        axes = Axes(f"block: how many times as fast as sequential, by {first}")
        sizes = [f"{len(kernels):,}" for kernels in scheduled.blocks]
        of_blocks = [
            (number, sizes[i] if i < len(sizes) else "", format_seconds(base.block_seconds[i]),
             *(f"{of[i]:.3f} x" for of in gains.values()))
            for i, number in enumerate(numbers)
        ]  # fmt: skip
        parts: list[Part] = [
            "Predicted, against the same block run sequentially.",
            bar_chart(gains[first], numbers, axes),
        ]
        if len(numbers) < count:
            parts.append(f"The first {len(numbers)} of {count:,} blocks.")
        table = Table(("block", "kernels", "sequential", *gains), of_blocks)
        sections.append(Section("Speed-up of each block", [*parts, in_figures(table)]))

    # Kernels, FLOPs, memory access and utilisation (the paper's table 5).
    if scheduled.kernels:
        flops = sum(kernel.flops for kernel in scheduled.kernels)
        moved = sum(kernel.moved_bytes for kernel in scheduled.kernels)
        rows = []
        for candidate in candidates:
            seconds = candidate.step_seconds
            rate = format_count(flops / seconds, "FLOP/s") if seconds > 0 else "-"
            rows.append({
                "scheduler": candidate.scheduler,
                "kernels run": f"{launches_of(scheduled, candidate):,}",
                "FLOPs": format_count(flops, "FLOP"),
                "memory access": format_bytes(moved),
                "utilisation": rate + ("" if candidate.seconds else " (predicted)"),
                "bandwidth": format_count(moved / seconds, "B/s") if seconds > 0 else "-",
            })  # fmt: skip
        peak = ""
        if scheduled.peak_bytes:
            peak = "Peak of the chosen schedule's memory plan, parameters apart: "
            peak += f"{format_bytes(scheduled.peak_bytes)}. "
        text = f"{peak}A multiply-add is two FLOPs; table 5 of the paper counts it once."
        parts = [text, Table.of(rows)]
        if any(stage.merged for c in candidates for stage in c.stages):
            parts.append(hint("FLOPs and memory access are of the kernels before any were merged."))
        sections.append(Section("Work and memory", parts))

    # The effort of finding each schedule (the paper's table 4).
    if any(candidate.effort != SearchEffort() for candidate in candidates):
        rows = [
            {
                "scheduler": candidate.scheduler,
                "search": format_seconds(candidate.effort.search_seconds),
                "measuring": format_seconds(candidate.effort.measuring_seconds),
                "states": f"{candidate.effort.states:,}",
                "transitions": f"{candidate.effort.transitions:,}",
                "stages asked": f"{candidate.effort.asked:,}",
                "stages measured": f"{candidate.effort.timed:,}",
                "left out": candidate.pruning or "nothing",
            }
            for candidate in candidates
        ]
        note = (
            "Stages asked: distinct ones that came up; stages measured: those of them that were "
            "not known yet."
        )
        sections.append(Section("Search", [note, Table.of(rows)]))

    return sections
