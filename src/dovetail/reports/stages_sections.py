"""Sections of the page about stage schedules; each is "" where there is nothing to show.

Figures and tables are those of "Accelerate DNN Inference by Inter-Operator Parallelism", 2019.
"""

from collections.abc import Collection, Mapping
from html import escape

from dovetail.reports.markup import Markup, details, row, table
from dovetail.reports.plots import Axes, bar_chart
from dovetail.reports.stages_charts import heat_table, latency_chart, noise_of, scatter_chart
from dovetail.reports.stages_drawing import draw_schedule, effort_of
from dovetail.reports.stages_figures import (
    answer,
    launches_of,
    measured_of,
    measured_text,
    overview_rows,
    sequential_of,
    stages_text,
)
from dovetail.schedulers.additivity import pairs_ordered_right
from dovetail.schedulers.results import Candidate, Effort, Scheduled, Schedules
from dovetail.units import format_bytes, format_count, format_seconds

MOST_DRAWN = 10_000
"""Boxes and lines of all pictures together."""
MOST_BLOCKS = 64
"""That are compared, from the first; their picture and table stay legible."""


def section(title: str, content: str, note: str = "") -> Markup:
    """ "" without content."""
    said = f"<p>{escape(note)}</p>" if note else ""
    return Markup(f"<section><h3>{escape(title)}</h3>{said}{content}</section>" if content else "")


def batch(schedules: Schedules, scheduled: Scheduled, drawn: Collection[str]) -> Markup:
    """All that is known of one batch size; `drawn`: schedulers whose schedules are drawn."""
    return Markup("".join([
        section("The answer", f"<p>{escape(answer(scheduled, schedules.costs_source))}</p>"
                + overview(scheduled)),
        section("Stages", stages(scheduled, drawn),
                "Time runs down. A box is a kernel; boxes of one frame run one after another, "
                "frames of one row at the same time, and rows one after another. Lines are data; "
                "strong ones are events between streams. Hover over a box for its ops, FLOPs and "
                "bytes, and for what it reads."),
        section("Latency of all schedules", latency(scheduled)),
        section("Speed-up of each block", blocks(scheduled),
                "Predicted, against the same block run sequentially (figure 8)."),
        section("Work and memory", work(scheduled)),
        section("Search", search(scheduled),
                "Stages asked: distinct ones that came up; stages measured: those of them that "
                "were not known yet."),
        section("Are sums of stages right?", sampled(scheduled)),
    ]))  # fmt: skip


def drawable(schedules: Schedules, most: int = MOST_DRAWN) -> list[set[str]]:
    """[results] the schedulers whose schedules are drawn, of at most `most` boxes and lines in all:
    first those chosen, then the others in their order."""
    found: list[set[str]] = [set() for _ in schedules.results]
    asked = [(i, result.best) for i, result in enumerate(schedules.results)]
    asked += [
        (i, candidate)
        for i, result in enumerate(schedules.results)
        for candidate in _by_choice(result)[1:]
        if _same_as(result, candidate) is None
    ]
    for i, candidate in asked:
        needed = effort_of(schedules.results[i], candidate)
        if needed <= most:
            most -= needed
            found[i].add(candidate.scheduler)
    return found


def _by_choice(scheduled: Scheduled) -> list[Candidate]:
    """The chosen one first."""
    return sorted(scheduled.candidates, key=lambda c: c.scheduler != scheduled.chosen)


def _same_as(scheduled: Scheduled, candidate: Candidate) -> str | None:
    """An earlier scheduler that found the same stages."""
    for other in _by_choice(scheduled):
        if other is candidate:
            return None
        if _form(other) == _form(candidate):
            return other.scheduler
    return None


def _form(candidate: Candidate) -> object:
    return [(stage.groups, stage.merged) for stage in candidate.stages] or candidate.streams


def overview(scheduled: Scheduled) -> Markup:
    """A row for each scheduler, the chosen one marked."""
    head, rows = overview_rows(scheduled)
    body = "".join(row(cells, style="chosen" * chosen) for cells, chosen in rows)
    top = row(head, "th scope=col")
    return Markup(
        f'<div class="scroll"><table><thead>{top}</thead><tbody>{body}</tbody></table></div>'
        "<p class=hint>Speed-up: sequential's seconds over the schedule's. Spread: "
        "interquartile range over median. Sizes are in kernels.</p>"
    )


def stages(scheduled: Scheduled, drawn: Collection[str]) -> Markup:
    parts = []
    for candidate in _by_choice(scheduled):
        name = candidate.scheduler
        chosen = name == scheduled.chosen
        title = f"{name}{' (chosen)' * chosen}: {stages_text(candidate)}"
        title += " stages" * bool(candidate.stages)
        same = _same_as(scheduled, candidate)
        if same is not None:
            parts.append(f"<p>{escape(f'{name} found what {same} found.')}</p>")
        elif name not in drawn:
            parts.append(f"<p>{escape(f'{title}. Not drawn: the page would be too large.')}</p>")
        elif chosen:
            parts.append(f"<p><b>{escape(title)}</b></p>{draw_schedule(scheduled, candidate)}")
        else:
            parts.append(details(title, draw_schedule(scheduled, candidate)))
    return Markup("".join(parts))


def latency(scheduled: Scheduled) -> Markup:
    rows = []
    for candidate in scheduled.candidates:
        timing = measured_of(candidate)
        error = ""
        if timing is not None and timing.median_seconds > 0:
            error = f"{100 * (candidate.predicted_seconds / timing.median_seconds - 1):+.1f} %"
        ends = (min(candidate.seconds), max(candidate.seconds)) if candidate.seconds else ()
        rows.append((
            candidate.scheduler,
            format_seconds(candidate.predicted_seconds),
            measured_text(candidate),
            " to ".join(format_seconds(end) for end in ends),
            error,
            f"{len(candidate.seconds):,}" if timing else "not measured",
        ))  # fmt: skip
    head = ("scheduler", "predicted", "measured (spread)", "lowest to highest", "error of the "
            "prediction", "rounds")  # fmt: skip
    chart = latency_chart(scheduled.candidates, scheduled.chosen)
    return Markup(chart + details("in figures", table(head, rows)))


def blocks(scheduled: Scheduled) -> Markup:
    """Sequential's predicted seconds over each scheduler's, block by block."""
    base = sequential_of(scheduled)
    if base is None or not base.block_seconds:
        return Markup("")
    count = len(base.block_seconds)
    others = [c for c in _by_choice(scheduled) if c is not base and len(c.block_seconds) == count]
    if not others:
        return Markup("")
    gains = {
        c.scheduler: [
            theirs / ours if ours > 0 else 1.0
            for theirs, ours in zip(base.block_seconds, c.block_seconds, strict=True)
        ][:MOST_BLOCKS]
        for c in others
    }
    shown = min(count, MOST_BLOCKS)
    first = others[0].scheduler
    chart = bar_chart(
        gains[first],
        [str(block) for block in range(1, shown + 1)],
        Axes(f"block: how many times as fast as sequential, by {first}"),
    )
    cut = f"<p>The first {shown} of {count:,} blocks.</p>" if shown < count else ""
    return Markup(chart + cut + details("in figures", _block_table(scheduled, gains, shown)))


def _block_table(scheduled: Scheduled, gains: Mapping[str, list[float]], shown: int) -> Markup:
    base = sequential_of(scheduled)
    assert base is not None, "gains are against it"
    sizes = [f"{len(kernels):,}" for kernels in scheduled.blocks[:shown]]
    rows = [
        (
            str(i + 1),
            sizes[i] if i < len(sizes) else "",
            format_seconds(base.block_seconds[i]),
            *(f"{of[i]:.3f} x" for of in gains.values()),
        )
        for i in range(shown)
    ]
    return table(("block", "kernels", "sequential", *gains), rows)


def work(scheduled: Scheduled) -> Markup:
    """Kernels, FLOPs, memory access and utilisation (table 5)."""
    if not scheduled.kernels:
        return Markup("")
    flops = sum(kernel.flops for kernel in scheduled.kernels)
    moved = sum(kernel.moved_bytes for kernel in scheduled.kernels)
    rows = []
    for candidate in scheduled.candidates:
        seconds = candidate.median_seconds
        rate = format_count(flops / seconds, "FLOP/s") if seconds > 0 else "-"
        rows.append((
            candidate.scheduler,
            f"{launches_of(scheduled, candidate):,}",
            format_count(flops, "FLOP"),
            format_bytes(moved),
            rate + ("" if candidate.seconds else " (predicted)"),
            format_count(moved / seconds, "B/s") if seconds > 0 else "-",
        ))  # fmt: skip
    head = ("scheduler", "kernels run", "FLOPs", "memory access", "utilisation", "bandwidth")
    text = table(head, rows)
    if any(stage.merged for c in scheduled.candidates for stage in c.stages):
        text = Markup(text + "<p class=hint>FLOPs and memory access are of the kernels before "
                      "any were merged.</p>")  # fmt: skip
    said = "A multiply-add is two FLOPs; table 5 of the paper counts it once."
    if scheduled.peak_bytes:
        said = (
            "Peak of the chosen schedule's memory plan, parameters apart: "
            f"{format_bytes(scheduled.peak_bytes)}. {said}"
        )
    return Markup(f"<p>{said}</p>{text}")


def search(scheduled: Scheduled) -> Markup:
    """What finding each schedule took (table 4)."""
    if all(candidate.effort == Effort() for candidate in scheduled.candidates):
        return Markup("")
    rows = [
        (
            candidate.scheduler,
            format_seconds(candidate.effort.search_seconds),
            format_seconds(candidate.effort.measuring_seconds),
            f"{candidate.effort.states:,}",
            f"{candidate.effort.transitions:,}",
            f"{candidate.effort.asked:,}",
            f"{candidate.effort.timed:,}",
            candidate.pruning or "nothing",
        )
        for candidate in scheduled.candidates
    ]
    head = ("scheduler", "search", "measuring", "states", "transitions", "stages asked",
            "stages measured", "left out")  # fmt: skip
    return table(head, rows)


def sampled(scheduled: Scheduled) -> Markup:
    """Random schedules, measured against predicted, and the pairs that are ordered right."""
    points = scheduled.sampled
    if len(points) < 2:
        return Markup("")
    noise = noise_of(scheduled.candidates)
    said = [
        f"{len(points):,} random schedules. Of all pairs "
        f"{_share(*pairs_ordered_right(points))} come out in the order that was predicted "
        "(the paper: 93.7 %)."
    ]
    if noise > 0:
        said.append(
            f"Of pairs further apart than the noise of the measurements, {100 * noise:.1f} %: "
            f"{_share(*pairs_ordered_right(points, noise))}."
        )
    return Markup(f"<p>{' '.join(said)}</p>{scatter_chart(points)}")


def _share(right: int, compared: int) -> str:
    if not compared:
        return "none of 0"
    return f"{right:,} of {compared:,} ({100 * right / compared:.1f} %)"


def specialisations(schedules: Schedules) -> Markup:
    """One matrix below the other."""
    parts = [
        f"<h3>{escape(matrix.title)}</h3>{heat_table(matrix)}"
        for matrix in schedules.specialisations
    ]
    if not parts:
        return Markup("")
    note = (
        "<p>Rows: where it ran. Columns: what the schedule was made for. On the diagonal both are "
        "the same; beside it, what is lost against the diagonal of the row (tables 1 and 2, "
        "figure 6).</p>"
    )
    return Markup(f"<section><h2>Specialisation</h2>{note}{''.join(parts)}</section>")
