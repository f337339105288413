"""One self-contained page about schedules of one device, batch size by batch size.

    answer      which schedule, how fast against sequential, and how that is known
    stages      drawn over the graph, the chosen schedule first
    latency     of all schedules, and the speed-up of each block
    work        kernels, FLOPs, memory access, utilisation; what searching and measuring took
    sums        whether sums of stages predict what schedules take
    matrices    what a schedule costs where it was not made for it

There is no script in it and nothing is fetched: style is allowed by its hash in a
Content-Security-Policy. Every name is foreign text and is escaped (`markup`).
"""

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from html import escape
from importlib import resources
from itertools import pairwise

from dovetail.reports.markup import Markup, cards, details, policy, row, table
from dovetail.reports.plots import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Axes, bar_chart, ticks
from dovetail.reports.stages_figures import (
    answer,
    launches_of,
    measured_of,
    measured_text,
    overview_rows,
    ratio_of,
    sequential_of,
    stages_text,
)
from dovetail.runtime.files import write_atomically
from dovetail.runtime.timers import summarise
from dovetail.schedulers.additivity import pairs_ordered_right
from dovetail.schedulers.records import members
from dovetail.schedulers.results import (
    KernelStage,
    KernelWork,
    ScheduleCandidate,
    Scheduled,
    Schedules,
    SearchEffort,
    Specialisation,
)
from dovetail.units import format_bytes, format_count, format_seconds

# Schedules as pictures: kernels as boxes in running order, from the top down, and what reads what.
#
#     1  213 us   ┌─────────┐ ┌─────────┐      stages as rows, their groups side by side,
#                 │  conv1  │ │  conv2  │      the kernels of a group below each other
#                 │  conv3  │ └─────────┘
#                 └────┬────┘      │
#     2   90 us   [       concat      ]
#
# Streams without barriers are columns; a kernel stands below all that it waits for.
#
# A long schedule is drawn in pieces of whole stages that end with a block where they can, each
# folded
# away on its own. Edges that leave a piece are stubs; the title of a kernel names what it reads.


BOX, BOX_HEIGHT = 150, 22
"""Pixels of a kernel's box."""
ACROSS, DOWN, GUTTER, PAD = 180, 38, 124, 10
"""From one box to the next, what stands before the first, and around the boxes of a stage."""
MOST_ACROSS = 10
"""Groups side by side; of more the next ones stand below."""
FEW, MANY, OPEN = 24, 120, 60
"""Kernels of a piece: where it may end, where it must; of the pieces that are unfolded at first."""
LABEL, NAMED, NAME = 21, 4, 56
"""Characters of a label; names that a title lists, and characters of each."""
COLOURS = 8  # of the palette in page.css


@dataclass(frozen=True)
class Place:
    """Where a kernel's box stands, its colour, and what its title says of where it runs."""

    x: int
    y: int
    colour: int
    where: str


@dataclass(frozen=True)
class Band:
    """A stage's row: its number from 1, seconds, and the frames (x, y, width, height) of groups."""

    number: int
    y: int
    height: int
    seconds: float
    merged: bool
    frames: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Picture:
    """places: kernel -> its box; waits: kernel -> those of other streams whose events it awaits."""

    places: dict[int, Place]
    bands: tuple[Band, ...] = ()
    lanes: tuple[str, ...] = ()
    waits: dict[int, set[int]] = field(default_factory=dict)


def effort_of(scheduled: Scheduled, candidate: ScheduleCandidate) -> int:
    """Boxes and lines that a picture of it has."""
    reads = sum(before.bit_count() for before in scheduled.block.predecessors)
    return len(scheduled.kernels) + reads + len(candidate.stages)


def draw_schedule(scheduled: Scheduled, candidate: ScheduleCandidate) -> Markup:
    """All kernels of a schedule, each once. O(kernels + edges)."""
    if not candidate.stages:
        lines = render(scheduled, streamed(scheduled, candidate))
        return Markup(f'<div class="sheet">{lines}</div>')
    longest = max(stage.seconds for stage in candidate.stages)
    drawn, shown = [], 0
    for piece in pieces(scheduled, candidate):
        stages = [candidate.stages[i] for i in piece]
        svg = render(scheduled, staged(stages, piece.start), longest)
        title = _piece_title(scheduled, candidate, piece)
        opened = " open" * (shown < OPEN)
        shown += sum(len(stage.kernels) for stage in stages)
        drawn.append(
            f"<details{opened}><summary>{escape(title)}</summary>"
            f'<div class="sheet">{svg}</div></details>'
        )
    return Markup("".join(drawn))


def pieces(scheduled: Scheduled, candidate: ScheduleCandidate) -> list[range]:
    """Stages by number that are drawn together, all of them in running order."""
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


def staged(stages: Sequence[KernelStage], first: int) -> Picture:
    """Stages below each other; `first` is the number of the first of them, from 0."""
    places: dict[int, Place] = {}
    bands = []
    y = 0
    for number, stage in enumerate(stages, first + 1):
        top, frames = y, []
        for line in range(0, len(stage.groups), MOST_ACROSS):
            side = stage.groups[line : line + MOST_ACROSS]
            for column, group in enumerate(side):
                x = GUTTER + column * ACROSS
                where = f"stage {number}, group {line + column + 1} of {len(stage.groups)}"
                where += ", merged into one kernel" * stage.merged
                colour = (line + column) % COLOURS
                for place, kernel in enumerate(group):
                    places[kernel] = Place(x, y + PAD + place * DOWN, colour, where)
                height = (len(group) - 1) * DOWN + BOX_HEIGHT
                frames.append((x - 5, y + PAD - 5, BOX + 10, height + 10))
            y += max(map(len, side)) * DOWN
        y += PAD
        bands.append(Band(number, top, y - top, stage.seconds, stage.merged, tuple(frames)))
    return Picture(places, tuple(bands))


def streamed(scheduled: Scheduled, candidate: ScheduleCandidate) -> Picture:
    """Streams side by side; each kernel in the row below the last that it waits for."""
    streams = candidate.streams
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
    places = {
        kernel: Place(
            GUTTER + stream * ACROSS,
            2 * PAD + BOX_HEIGHT + rows[kernel] * DOWN,
            stream % COLOURS,
            f"stream {stream + 1}, number {position + 1} of {len(order)}",
        )
        for stream, order in enumerate(streams.orders)
        for position, kernel in enumerate(order)
    }
    lanes = tuple(f"stream {stream + 1}" for stream in range(len(streams.orders)))
    return Picture(places, (), lanes, waits)


def render(scheduled: Scheduled, picture: Picture, longest_seconds: float = 0.0) -> str:
    """A picture as SVG, one unit a pixel. `longest_seconds`: of the stage with the longest bar."""
    places = picture.places
    width = max((place.x for place in places.values()), default=GUTTER) + BOX + 60
    height = max((place.y for place in places.values()), default=0) + DOWN + PAD
    parts = [_band(band, width, longest_seconds) for band in picture.bands]
    parts += [
        f'<text x="{GUTTER + i * ACROSS}" y="20">{lane}</text>'
        for i, lane in enumerate(picture.lanes)
    ]
    # What runs later is drawn first, so that no line lies on a box.
    for kernel in sorted(places, key=lambda k: (places[k].y, places[k].x), reverse=True):
        parts.append(_kernel(scheduled, picture, kernel))
    said = f"{len(places)} kernels in {len(picture.bands) or len(picture.lanes)} "
    said += "stages" if picture.bands else "streams"
    return (
        f'<svg class="stages" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{said}">{"".join(parts)}</svg>'
    )


def _band(band: Band, width: int, longest_seconds: float) -> str:
    share = band.seconds / longest_seconds if longest_seconds > 0 else 0.0
    took = format_seconds(band.seconds)
    parts = [
        f'<rect class="row{band.number % 2}" x="0" y="{band.y}" width="{width}" '
        f'height="{band.height}"/>',
        f'<text x="6" y="{band.y + 22}">{band.number}</text>',
        f'<text x="{GUTTER - 24}" y="{band.y + 22}" text-anchor="end">{took}</text>',
        f'<rect class="took" x="6" y="{band.y + 28}" width="{(GUTTER - 30) * share:.1f}" '
        f'height="4"><title>stage {band.number}: {took}</title></rect>',
    ]
    frame = '<rect class="group" x="{}" y="{}" width="{}" height="{}" rx="7"/>'
    parts += [frame.format(*sizes) for sizes in band.frames]
    if band.merged and band.frames:
        right = max(x + wide for x, _, wide, _ in band.frames)
        x, y = band.frames[0][:2]
        parts.append(
            f'<rect class="merged" x="{x - 3}" y="{y - 3}" width="{right - x + 6}" '
            f'height="{band.height - PAD + 4}" rx="9"/>'
            f'<text class="mark" x="{right + 6}" y="{y + 20}">merged</text>'
        )
    return "".join(parts)


def _kernel(scheduled: Scheduled, picture: Picture, kernel: int) -> str:
    """A box, the lines into it, and stubs of lines from and to where this picture does not go."""
    work, place = scheduled.kernels[kernel], picture.places[kernel]
    producers = list(members(scheduled.block.predecessors[kernel]))
    waits = picture.waits.get(kernel, set())
    read = [p for p in producers if p in picture.places and p not in waits]
    lines = "".join(_line(picture.places[p], place) for p in read)
    events = "".join(_line(picture.places[p], place) for p in sorted(waits))
    middle = place.x + BOX // 2
    if any(producer not in picture.places for producer in producers):
        lines += f"M{middle - 12} {place.y - 8}v8"
    if any(c not in picture.places for c in members(scheduled.block.successors[kernel])):
        lines += f"M{middle + 12} {place.y + BOX_HEIGHT}v8"
    drawn = f'<path d="{lines}"/>' if lines else ""
    drawn += f'<path class="event" d="{events}"/>' if events else ""
    title = _title(work, place, [scheduled.kernels[p].name for p in producers])
    return (
        f"<g><title>{escape(title)}</title>{drawn}"
        f'<rect class="c{place.colour}" x="{place.x}" y="{place.y}" width="{BOX}" '
        f'height="{BOX_HEIGHT}" rx="4"/>'
        f'<text x="{place.x + 6}" y="{place.y + 15}">{escape(_end(work.name, LABEL))}</text></g>'
    )


def _line(source: Place, destination: Place) -> str:
    """From the lower edge of a box to the upper edge of one below it; past the boxes between two
    of one column on their right."""
    x, y = source.x + BOX // 2, source.y + BOX_HEIGHT
    to_x, to_y = destination.x + BOX // 2, destination.y
    if source.x == destination.x and to_y - y > DOWN:
        right = source.x + BOX
        bow = right + 28
        return f"M{right} {y - 6}C{bow} {y} {bow} {to_y} {right} {to_y + 6}"
    half = (y + to_y) // 2
    return f"M{x} {y}C{x} {half} {to_x} {half} {to_x} {to_y}"


def _title(work: KernelWork, place: Place, reads: Sequence[str]) -> str:
    return "\n".join([
        _end(work.name, 2 * NAME),
        place.where,
        f"ops: {_few(work.ops)}",
        f"{format_count(work.flops, 'FLOP')}, {format_bytes(work.moved_bytes)} moved",
        f"reads {_few(reads)}" if reads else "reads the inputs alone",
    ])  # fmt: skip


def _few(names: Iterable[str]) -> str:
    found = list(names)
    text = ", ".join(_end(name, NAME) for name in found[:NAMED])
    return text + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")


def _end(name: str, most: int) -> str:
    """A long name by its end: paths begin alike."""
    return name if len(name) <= most else "…" + name[1 - most :]


def _piece_title(scheduled: Scheduled, candidate: ScheduleCandidate, piece: range) -> str:
    stages = [candidate.stages[i] for i in piece]
    kernels = {k for stage in stages for k in stage.kernels}
    total = sum(stage.seconds for stage in candidate.stages)
    spent = sum(stage.seconds for stage in stages)
    found = [b for b, block in enumerate(scheduled.blocks, 1) if not kernels.isdisjoint(block)]
    text = f"{_span('stage', piece.start + 1, piece.stop)}: "
    text += f"{_span('block', found[0], found[-1])}, " if found else ""
    text += f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}, {format_seconds(spent)}"
    return text + (f", {100 * spent / total:.1f} % of all" if total > 0 else "")


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


# Charts of stage schedules as SVG: latencies, prediction against measurement, a heated matrix.


LABELS, ROW = 150, 36
"""Pixels of the names before bars, and of a row."""
MOST_POINTS = 2000
HEATS = (0.005, 0.02, 0.05, 0.10)
"""Losses from which on a cell is hotter."""


def latency_chart(candidates: Sequence[ScheduleCandidate], chosen: str) -> Markup:
    """A row for each schedule: predicted above measured, with the middle half of the rounds."""
    ends = [c.predicted_seconds for c in candidates]
    ends += [_quartiles(c)[1] for c in candidates if c.seconds]
    top = max((end for end in ends if math.isfinite(end)), default=0.0) or 1.0
    scale = (WIDTH - 70) / top
    parts = []
    for i, candidate in enumerate(candidates):
        y = i * ROW
        name = escape(candidate.scheduler[: LABELS // 8])
        mark = ' class="mark"' * (candidate.scheduler == chosen)
        parts.append(f'<text{mark} x="0" y="{y + 18}">{name}</text>')
        parts.append(_bar("c0", y + 3, candidate.predicted_seconds, scale, "predicted"))
        if candidate.seconds:
            low, high = _quartiles(candidate)
            parts.append(_bar("c3", y + 15, candidate.median_seconds, scale, "measured", high))
            parts.append(
                f'<path class="whisker" d="M{LABELS + low * scale:.1f} {y + 20}'
                f'H{LABELS + high * scale:.1f}m0 -4v8M{LABELS + low * scale:.1f} {y + 16}v8"/>'
            )
    return Markup(
        f'<svg class="chart plot bars" viewBox="0 0 {LABELS + WIDTH:.0f} '
        f'{len(candidates) * ROW}" role="img" aria-label="Predicted and measured seconds of '
        f'each schedule; the table below has the figures.">{"".join(parts)}</svg>'
        '<ul class="key"><li><i class="c0"></i>predicted</li><li><i class="c3"></i>measured: '
        "median, and the middle half of the rounds</li></ul>"
    )


def _bar(
    colour: str, y: int, seconds: float, scale: float, what: str, end_seconds: float = 0.0
) -> str:
    text = format_seconds(seconds)
    x = LABELS + max(seconds, end_seconds) * scale + 6
    return (
        f'<rect class="{colour}" x="{LABELS}" y="{y}" width="{seconds * scale:.1f}" height="10">'
        f'<title>{what} {text}</title></rect><text x="{x:.1f}" y="{y + 9}">{text}</text>'
    )


def _quartiles(candidate: ScheduleCandidate) -> tuple[float, float]:
    ordered = sorted(candidate.seconds)
    last = len(ordered) - 1
    return ordered[round(last / 4)], ordered[round(3 * last / 4)]


def scatter_chart(points: Sequence[tuple[float, float]]) -> Markup:
    """Measured over predicted seconds, a dot for each, and the line where both are equal."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    if not finite:
        return Markup("<p>Nothing was recorded.</p>")
    every = math.ceil(len(finite) / MOST_POINTS)
    factor, unit = _unit(max(max(point) for point in finite))
    drawn = [(x * factor, y * factor) for x, y in finite[::every]]
    (left, right), (low, high) = (_room(values) for values in zip(*drawn, strict=True))

    def across(x: float) -> float:
        return LEFT + WIDTH * (x - left) / (right - left)

    def down(y: float) -> float:
        return HEIGHT * (1 - (y - low) / (high - low))

    parts = [f'<path class="axis" d="M{LEFT:.0f} 0V{HEIGHT:.0f}H{LEFT + WIDTH:.0f}"/>']
    for x in ticks(left, right):
        parts.append(_text(across(x), HEIGHT + 15, f"{x:.5g}", "middle"))
    for y in ticks(low, high):
        parts.append(_text(LEFT - 6, down(y) + 4, f"{y:.5g}", "end"))
        parts.append(f'<path class="grid" d="M{LEFT:.0f} {down(y):.1f}h{WIDTH:.0f}"/>')
    first, last = max(left, low), min(right, high)
    if first < last:
        parts.append(
            f'<path class="line s7 dashed" d="M{across(first):.1f} {down(first):.1f}'
            f'L{across(last):.1f} {down(last):.1f}"><title>as predicted</title></path>'
        )
    dots = "".join(f"M{across(x):.1f} {down(y):.1f}h0" for x, y in drawn)
    parts.append(f'<path class="line s0 dots" d="{dots}"/>')
    title = f"measured against predicted, {unit}"
    parts.append(_text(LEFT, HEIGHT + 30, title, "start"))
    return Markup(
        f'<svg class="chart plot" viewBox="0 -8 {LEFT + WIDTH + RIGHT:.0f} '
        f'{HEIGHT + BOTTOM + 8:.0f}" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    )


def _unit(seconds: float) -> tuple[float, str]:
    if seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")


def _room(values: Sequence[float]) -> tuple[float, float]:
    """The range of values, and a little more."""
    low, high = min(values), max(values)
    more = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - more, high + more


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def heat_table(matrix: Specialisation) -> Markup:
    """Seconds, and what is lost against the schedule that was made for the row."""
    head = "".join(f"<th scope=col>for {escape(column)}</th>" for column in matrix.columns)
    body = []
    for i, (name, seconds) in enumerate(zip(matrix.rows, matrix.seconds, strict=True)):
        own = _own(matrix, i)
        cells = [f"<tr><th scope=row>on {escape(name)}</th>"]
        for j, value in enumerate(seconds):
            base = seconds[own] if own is not None else 0.0
            loss = value / base - 1 if base > 0 else math.nan
            text = format_seconds(value) if math.isfinite(value) else "-"
            style = "own" if j == own else f"heat{sum(loss >= heat for heat in HEATS)}"
            if math.isfinite(loss) and j != own:
                text += f" <small>{100 * loss:+.1f} %</small>"
            cells.append(f'<td class="{style}">{text}</td>')
        body.append("".join(cells) + "</tr>")
    return Markup(
        f'<div class="scroll"><table class="heat"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _own(matrix: Specialisation, row: int) -> int | None:
    """The column of the schedule that was made for a row: of its name; where no name is both a
    row's and a column's, of its number in a square matrix."""
    if set(matrix.rows) & set(matrix.columns):
        name = matrix.rows[row]
        return matrix.columns.index(name) if name in matrix.columns else None
    return row if len(matrix.rows) == len(matrix.columns) else None


def noise_of(candidates: Sequence[ScheduleCandidate]) -> float:
    """Interquartile range over median of the measured rounds: the middle schedule's."""
    spreads = sorted(summarise(list(c.seconds)).spread for c in candidates if len(c.seconds) > 1)
    return spreads[len(spreads) // 2] if spreads else 0.0


# Sections of the page about stage schedules; each is "" where there is nothing to show.
#
# Figures and tables are those of "Accelerate DNN Inference by Inter-Operator Parallelism", 2019.


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


def _by_choice(scheduled: Scheduled) -> list[ScheduleCandidate]:
    """The chosen one first."""
    return sorted(scheduled.candidates, key=lambda c: c.scheduler != scheduled.chosen)


def _same_as(scheduled: Scheduled, candidate: ScheduleCandidate) -> str | None:
    """An earlier scheduler that found the same stages."""
    for other in _by_choice(scheduled):
        if other is candidate:
            return None
        if _form(other) == _form(candidate):
            return other.scheduler
    return None


def _form(candidate: ScheduleCandidate) -> object:
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
    if all(candidate.effort == SearchEffort() for candidate in scheduled.candidates):
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


def write_stages_page(
    schedules: Schedules, path: str | os.PathLike[str], *, made: str = ""
) -> None:
    """Write the page to `path`, whole or not at all. made: the command that made it.

    Raises `UnwritableError`.
    """
    text = render_stages(schedules, made=made)
    # A name may hold a lone surrogate, which UTF-8 cannot: it is shown as "?".
    write_atomically(path, text.encode("utf-8", "replace"))


def render_stages(schedules: Schedules, *, made: str = "") -> str:
    """The page as text. O(kernels + edges) for each schedule; what is drawn is bounded."""
    style = "\n".join(_asset(name) for name in ("page.css", "training.css", "stages.css"))
    parts = {
        "policy": policy(style),
        "title": escape(f"{schedules.model} on {schedules.device}"),
        "style": style,
        "cards": _cards(schedules),
        "batches": _summary(schedules) + _batches(schedules),
        "specialisations": specialisations(schedules),
        "made": _made(made),
    }
    # One pass over the template: what is filled in is not searched again.
    pieces = _asset("stages.html").split("@@")
    return "".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files("dovetail.reports").joinpath("assets", name).read_text("utf-8")


def _cards(schedules: Schedules) -> Markup:
    kernels = [len(result.kernels) for result in schedules.results]
    blocks = [len(result.blocks) for result in schedules.results]
    items = [("costs", schedules.costs_source, "of stages, on which the search stands")]
    if kernels:
        items.append(("kernels", f"{max(kernels):,}", f"in {max(blocks):,} blocks"))
    for result in schedules.results[:4]:
        ratio = ratio_of(result, result.best)
        known = "measured" if result.best.seconds else "predicted"
        gain = "" if ratio is None else f"{ratio.value:.3f} x sequential's speed, {known}"
        took = format_seconds(result.best.median_seconds)
        items.append((f"batch {result.batch}: {result.chosen}", took, gain))
    return cards(items)


def _summary(schedules: Schedules) -> Markup:
    """A row for each batch size, where there are several."""
    if not schedules.results:
        return Markup("<section><p>Nothing was scheduled.</p></section>")
    if len(schedules.results) == 1:
        return Markup("")
    rows = []
    for result in schedules.results:
        best, ratio = result.best, ratio_of(result, result.best)
        seconds = best.median_seconds
        rows.append((
            f"{result.batch:,}",
            result.chosen,
            format_seconds(best.predicted_seconds),
            measured_text(best),
            "-" if ratio is None else str(ratio),
            format_count(result.batch / seconds) if seconds > 0 else "-",
        ))  # fmt: skip
    head = ("batch", "chosen", "predicted", "measured (spread)", "speed-up", "samples a second")
    return Markup(f"<section><h2>Batch sizes</h2>{table(head, rows)}</section>")


def _batches(schedules: Schedules) -> Markup:
    parts = []
    found = drawable(schedules)
    for i, (result, drawn) in enumerate(zip(schedules.results, found, strict=True)):
        title = f"Batch {result.batch:,}: {result.chosen}"
        opened = " open" * (i == 0)
        parts.append(
            f'<details class="batch"{opened}><summary>{escape(title)}</summary>'
            f"{batch(schedules, result, drawn)}</details>"
        )
    return Markup("".join(parts))


def _made(made: str) -> Markup:
    if not made:
        return Markup("")
    return Markup(f"<section><h2>How this was made</h2><pre>{escape(made)}</pre></section>")
