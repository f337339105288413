"""What is shown of schedules of one device: figures for page and terminal, and pictures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

from markupsafe import Markup, escape

from dovetail.reports.charts import COLOURS, WIDTH, key, svg, svg_path, svg_rect, svg_text
from dovetail.reports.kit import Part, Section, Table
from dovetail.runtime.timers import Timing, summarise
from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.records import members
from dovetail.schedulers.results import SEQUENTIAL, KernelStage, ScheduleCandidate, Scheduled
from dovetail.units import format_bytes, format_count, format_seconds


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


def overview(scheduled: Scheduled) -> Table:
    """The table of the schedulers, the chosen one marked. There is a column "left out" if any
    search pruned."""
    any_pruned = any(candidate.pruning for candidate in scheduled.candidates)
    rows: list[dict[str, str]] = []
    marks: dict[int, str] = {}
    for i, candidate in enumerate(scheduled.candidates):
        name, ratio = candidate.scheduler, ratio_of(scheduled, candidate)
        if name == scheduled.chosen:
            name, marks[i] = f"{name} (chosen)", "chosen"
        largest = max((len(stage.kernels) for stage in candidate.stages), default=None)
        row = {
            "scheduler": name,
            "predicted": format_seconds(candidate.predicted_seconds),
            "measured (spread)": measured_text(candidate),
            "speed-up": "-" if ratio is None else str(ratio),
            "stages": stages_text(candidate),
            "largest": "-" if largest is None else f"{largest:,}",
            "stages measured": f"{candidate.effort.timed:,}",
            "search": format_seconds(candidate.effort.search_seconds),
        }
        rows.append(row | ({"left out": candidate.pruning} if any_pruned else {}))
    return Table.of(rows, title=f"Batch {scheduled.batch:,}", marks=marks)


def answer(scheduled: Scheduled, costs_source: str) -> str:
    """Sentences that say which schedule was chosen, how fast it is against sequential, and how that
    is known. Names in them are not escaped."""
    best, sequential = scheduled.best, sequential_of(scheduled)
    subject = f"At batch {scheduled.batch} {best.scheduler}"
    against, ratio = "", ratio_of(scheduled, best)
    if sequential is not None and ratio is not None and best is not sequential:
        seconds = sequential.step_seconds if ratio.measured else sequential.predicted_seconds
        against = f", {ratio.value:.3f} x sequential's speed ({format_seconds(seconds)})"
    timing = measured_of(best)
    if timing is None:
        faster = sorted(
            (c for c in scheduled.candidates if c.predicted_seconds < best.predicted_seconds),
            key=lambda c: c.predicted_seconds,
        )
        verb, remark = "is predicted to be fastest", ""
        if faster:
            in_stages = any(candidate.stages for candidate in faster)
            verb = "was chosen" if in_stages else "is predicted to be the fastest in stages"
            least = faster[0]
            remark = f" The {format_seconds(least.predicted_seconds)} of {least.scheduler}"
            # Streams without barriers are predicted by their kernels' costs alone, so their
            # prediction does not compare with that of stages.
            remark += (
                " is less."
                if least.stages
                else " counts every kernel as if no other slowed it down, so it does not show that "
                f"{least.scheduler} is faster."
            )
        return (
            f"{subject} {verb}: {format_seconds(best.predicted_seconds)}{against}.{remark} "
            f"Predicted only, from costs that are {costs_source}: no step was measured, so nothing "
            "here shows that it is never slower than sequential."
        )
    # A schedule that runs like the chosen one was measured together with it and has the very same
    # seconds.
    rivals = [c for c in scheduled.candidates if c.seconds and c.seconds != best.seconds]
    next_best = min(rivals, key=lambda c: c.step_seconds, default=None)
    is_fastest = next_best is None or next_best.step_seconds >= best.step_seconds
    verb = "is fastest" if is_fastest else "was chosen"
    text = f"{subject} {verb}: {measured_text(best)} measured"
    if sequential is None or not sequential.seconds:
        return f"{text}. Sequential was not measured, so whether this is slower is not known."
    if best is sequential:
        if is_fastest:
            text += ". No other schedule was measured to be faster"
        if next_best is not None:
            text += f". The next is {next_best.scheduler}: {measured_text(next_best)}"
        return text + "."
    text += against
    rounds = f"{timing.samples:,} and {len(sequential.seconds):,} rounds"
    if timing.median_seconds > sequential.step_seconds:
        return f"{text}. It is slower than sequential, by {rounds}: run sequential instead."
    text += f". That it is not slower than sequential was measured, by {rounds}"
    gain = sequential.step_seconds / timing.median_seconds - 1
    noise = max(timing.spread, summarise(list(sequential.seconds)).spread)
    return text + (", but the difference is within their spread." if gain < noise else ".")


# ---- Schedules as pictures: kernels as boxes in running order, from the top down ----
#
#     1  213 us   ┌─────────┐ ┌─────────┐      stages as rows, their groups side by side,
#                 │  conv1  │ │  conv2  │      the kernels of a group below each other,
#                 │  conv3  │ └─────────┘      lines from what is read to what reads it
#                 └────┬────┘      │
#     2   90 us   [       concat      ]
#
# Streams without barriers are columns; a kernel stands below all kernels that it waits for.
#
# A long schedule is drawn in pieces of whole stages. A piece ends with a block if it can, and folds
# away on its own. Edges that leave a piece are stubs; the title of a kernel names what it reads.

BOX, BOX_HEIGHT = 150, 22
"""A kernel's box has this width and height, in pixels."""
ACROSS, DOWN, GUTTER, PAD = 180, 38, 124, 10
"""Pixels from one box to the next, to the right and down; to the left of the first box; and around
the boxes of a stage."""
MOST_ACROSS = 10
"""At most this many groups stand side by side; the next ones stand below them."""
FEW, MANY, OPEN = 24, 120, 60
"""A piece ends with a block once it has `FEW` kernels, and anywhere before it has more than `MANY`.
Pieces are unfolded until `OPEN` kernels are shown."""
LABEL, NAMED, NAME = 21, 4, 56
"""A label has at most `LABEL` characters; a title lists `NAMED` names of `NAME` characters each."""


@dataclass(frozen=True)
class Place:
    """A kernel's box: its upper left corner, its colour, and the words in its title on where the
    kernel runs."""

    x: int
    y: int
    colour: int
    where: str


def draw_schedule(scheduled: Scheduled, candidate: ScheduleCandidate) -> list[Part]:
    """The pictures of a schedule, in which each kernel stands once. O(kernels + edges)."""
    if not candidate.stages:
        return [draw_streams(scheduled, candidate.streams)]

    def counted(what: str, first: int, last: int) -> str:
        return f"{what} {first}" if first == last else f"{what}s {first} to {last}"

    longest = max(stage.seconds for stage in candidate.stages)
    total = sum(stage.seconds for stage in candidate.stages)
    drawn: list[Part] = []
    shown = 0
    for piece in pieces(scheduled, candidate):
        stages = [candidate.stages[i] for i in piece]
        kernels = {k for stage in stages for k in stage.kernels}
        spent = sum(stage.seconds for stage in stages)
        blocks = [b for b, block in enumerate(scheduled.blocks, 1) if not kernels.isdisjoint(block)]
        title = f"{counted('stage', piece.start + 1, piece.stop)}: "
        title += f"{counted('block', blocks[0], blocks[-1])}, " if blocks else ""
        title += f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}, {format_seconds(spent)}"
        title += f", {100 * spent / total:.1f} % of all" if total > 0 else ""
        picture = draw_stages(scheduled, stages, piece.start, longest)
        drawn.append(Section(title, [picture], fold="open" if shown < OPEN else "closed"))
        shown += len(kernels)
    return drawn


def pieces(scheduled: Scheduled, candidate: ScheduleCandidate) -> list[range]:
    """The ranges of stages that are drawn together, in running order; together they are all
    stages."""
    block_of = {k: b for b, kernels in enumerate(scheduled.blocks) for k in kernels}
    blocks = [block_of.get(min(stage.kernels, default=-1), -1) for stage in candidate.stages]
    if sum(len(stage.kernels) for stage in candidate.stages) <= OPEN:
        return [range(len(candidate.stages))]
    cuts, size = [0], 0
    for i, stage in enumerate(candidate.stages):
        ends = i > 0 and blocks[i] != blocks[i - 1]
        if (ends and size >= FEW) or size + len(stage.kernels) > MANY:
            cuts.append(i)
            size = 0
        size += len(stage.kernels)
    cuts.append(len(candidate.stages))
    return [range(first, end) for first, end in pairwise(cuts) if end > first]


def draw_stages(
    scheduled: Scheduled, stages: Sequence[KernelStage], first: int, longest_seconds: float
) -> Markup:
    """Stages below each other; `first` is the index of the first one among all, and the bar of one
    that takes `longest_seconds` is full."""
    across = max(min(len(stage.groups), MOST_ACROSS) for stage in stages)
    width = GUTTER + (across - 1) * ACROSS + BOX + 60
    places: dict[int, Place] = {}
    parts = []
    y = 0
    for number, stage in enumerate(stages, first + 1):
        # The row of the stage: a band behind it, its number, its seconds, and a bar of them. A
        # frame stands around each group, and one around all that are merged.
        top, frames = y, []
        for line in range(0, len(stage.groups), MOST_ACROSS):
            side = stage.groups[line : line + MOST_ACROSS]
            for column, group in enumerate(side):
                x = GUTTER + column * ACROSS
                where = f"stage {number}, group {line + column + 1} of {len(stage.groups)}"
                where += ", merged into one kernel" * stage.merged
                for place, kernel in enumerate(group):
                    upper = y + PAD + place * DOWN
                    places[kernel] = Place(x, upper, (line + column) % COLOURS, where)
                height = (len(group) - 1) * DOWN + BOX_HEIGHT
                frames.append((x - 5, y + PAD - 5, BOX + 10, height + 10))
            y += max(map(len, side)) * DOWN
        y += PAD
        share = stage.seconds / longest_seconds if longest_seconds > 0 else 0.0
        duration = format_seconds(stage.seconds)
        said = f"stage {number}: {duration}"
        parts += [
            svg_rect(0, top, width, y - top, f"row{number % 2}"),
            svg_text(6, top + 22, str(number)),
            svg_text(GUTTER - 24, top + 22, duration, "end"),
            svg_rect(6, top + 28, (GUTTER - 30) * share, 4, "took", said),
            *(svg_rect(*frame, "group") for frame in frames),
        ]
        if stage.merged and frames:
            right = max(x + wide for x, _, wide, _ in frames)
            x, upper = frames[0][:2]
            parts.append(svg_rect(x - 3, upper - 3, right - x + 6, y - top - PAD + 4, "merged"))
            parts.append(svg_text(right + 6, upper + 20, "merged", style="mark"))
    return draw_kernels(scheduled, places, {}, parts, f"{len(stages)} stages")


def draw_streams(scheduled: Scheduled, streams: Streams) -> Markup:
    """Streams side by side. Each kernel stands in the row below the lowest kernel that it waits
    for: one that it reads, one in its stream, or one whose event it awaits."""
    before: dict[int, set[int]] = {
        kernel: set(members(reads)) for kernel, reads in enumerate(scheduled.block.predecessors)
    }
    waits: dict[int, set[int]] = {}
    for earlier, waiting in streams.waits:
        before[waiting].add(earlier)
        waits.setdefault(waiting, set()).add(earlier)
    for order in streams.orders:
        for earlier, after in pairwise(order):
            before[after].add(earlier)
    rows: dict[int, int] = {}
    for kernel in TopologicalSorter(before).static_order():
        rows[kernel] = 1 + max((rows[earlier] for earlier in before[kernel]), default=-1)
    places: dict[int, Place] = {}
    parts = []
    for number, order in enumerate(streams.orders, 1):
        x, name = GUTTER + (number - 1) * ACROSS, f"stream {number}"
        parts.append(svg_text(x, 20, name))
        for position, kernel in enumerate(order, 1):
            y = 2 * PAD + BOX_HEIGHT + rows[kernel] * DOWN
            where = f"{name}, number {position} of {len(order)}"
            places[kernel] = Place(x, y, (number - 1) % COLOURS, where)
    return draw_kernels(scheduled, places, waits, parts, f"{len(streams.orders)} streams")


def draw_kernels(
    scheduled: Scheduled,
    places: Mapping[int, Place],
    waits: Mapping[int, set[int]],
    below: Sequence[str],
    rows: str,
) -> Markup:
    """A picture as SVG, one unit a pixel: `below` all else the kernels in their places.

    waits   kernel -> the kernels of other streams whose events it waits for
    """
    parts = list(below)
    # A kernel's lines go up to what it reads. Later kernels are drawn first, so that the boxes
    # above cover the ends of their lines.
    for kernel in sorted(places, key=lambda k: (places[k].y, places[k].x), reverse=True):
        work, place = scheduled.kernels[kernel], places[kernel]
        producers = list(members(scheduled.block.predecessors[kernel]))
        awaited = waits.get(kernel, set())
        read = [p for p in producers if p in places and p not in awaited]
        lines = "".join(_line(places[p], place) for p in read)
        events = "".join(_line(places[p], place) for p in sorted(awaited))
        # Stubs stand for kernels that are not in this picture: one above if this kernel reads from
        # some, one below if some read it.
        middle = place.x + BOX // 2
        if any(producer not in places for producer in producers):
            lines += f"M{middle - 12} {place.y - 8}v8"
        if any(c not in places for c in members(scheduled.block.successors[kernel])):
            lines += f"M{middle + 12} {place.y + BOX_HEIGHT}v8"
        reads = [scheduled.kernels[p].name for p in producers]
        title = "\n".join([
            _end(work.name, 2 * NAME),
            place.where,
            f"ops: {_few(work.ops)}",
            f"{format_count(work.flops, 'FLOP')}, {format_bytes(work.moved_bytes)} moved",
            f"reads {_few(reads)}" if reads else "reads the inputs alone",
        ])  # fmt: skip
        drawn = [
            svg_path(lines, "data"),
            svg_path(events, "event"),
            svg_rect(place.x, place.y, BOX, BOX_HEIGHT, f"c{place.colour}"),
            svg_text(place.x + 6, place.y + 15, _end(work.name, LABEL)),
        ]
        parts.append(f"<g><title>{escape(title)}</title>{''.join(drawn)}</g>")
    width = max((place.x for place in places.values()), default=GUTTER) + BOX + 60
    height = max((place.y for place in places.values()), default=0) + DOWN + PAD
    form = f' width="{width}" height="{height}"'
    label = f"{len(places)} kernels in {rows}"
    picture = svg(parts, (width, height), "stages", label, form=form)
    return Markup('<div class="sheet">{}</div>').format(picture)


def _line(source: Place, destination: Place) -> str:
    """A line from the lower edge of a box to the upper edge of a box below it. If the two are in
    one column with others between them, the line passes those on the right."""
    x, y = source.x + BOX // 2, source.y + BOX_HEIGHT
    to_x, to_y = destination.x + BOX // 2, destination.y
    if source.x == destination.x and to_y - y > DOWN:
        right = source.x + BOX
        bow = right + 28
        return f"M{right} {y - 6}C{bow} {y} {bow} {to_y} {right} {to_y + 6}"
    half = (y + to_y) // 2
    return f"M{x} {y}C{x} {half} {to_x} {half} {to_x} {to_y}"


def _few(names: Sequence[str]) -> str:
    text = ", ".join(_end(name, NAME) for name in names[:NAMED])
    return text + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _end(name: str, most: int) -> str:
    """The name, cut to its end if it is long: paths differ at their ends."""
    return name if len(name) <= most else "…" + name[1 - most :]


LABELS, ROW = 150, 36
"""The names before the bars of latencies have `LABELS` pixels of width; a row has `ROW` pixels of
height."""


def latency_chart(candidates: Sequence[ScheduleCandidate], chosen: str) -> Markup:
    """A chart with a row for each schedule: the predicted seconds above the measured ones, with a
    mark over the middle half of the rounds."""
    ends = [c.predicted_seconds for c in candidates]
    ends += [_quartiles(c)[1] for c in candidates if c.seconds]
    top = max((end for end in ends if math.isfinite(end)), default=0.0) or 1.0
    scale = (WIDTH - 70) / top
    parts = []
    for i, candidate in enumerate(candidates):
        y, predicted = i * ROW, candidate.predicted_seconds
        name = candidate.scheduler
        parts.append(
            svg_text(0, y + 18, name[: LABELS // 8], style="mark" if name == chosen else "")
        )
        # (colour, upper edge, seconds, end of what is drawn in its row, what it is)
        bars = [("c0", y + 3, predicted, predicted, "predicted")]
        if candidate.seconds:
            low, high = (LABELS + scale * quartile for quartile in _quartiles(candidate))
            seconds = candidate.step_seconds
            end = max(seconds, _quartiles(candidate)[1])
            bars.append(("c3", y + 15, seconds, end, "measured"))
            whisker = f"M{low:.1f} {y + 20}H{high:.1f}m0 -4v8M{low:.1f} {y + 16}v8"
            parts.append(svg_path(whisker, "whisker"))
        for colour, top_y, seconds, end, what in bars:
            duration = format_seconds(seconds)
            parts.append(svg_rect(LABELS, top_y, seconds * scale, 10, colour, f"{what} {duration}"))
            parts.append(svg_text(LABELS + end * scale + 6, top_y + 9, duration))
    label = "Predicted and measured seconds of each schedule; the table below has the figures."
    chart = svg(parts, (LABELS + WIDTH, len(candidates) * ROW), "chart plot bars", label)
    measured = "measured: median, and the middle half of the rounds"
    return chart + key([("c0", "predicted", ""), ("c3", measured, "")])


def _quartiles(candidate: ScheduleCandidate) -> tuple[float, float]:
    ordered = sorted(candidate.seconds)
    last = len(ordered) - 1
    return ordered[round(last / 4)], ordered[round(3 * last / 4)]
