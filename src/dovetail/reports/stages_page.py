"""Draws the page about schedules of one device, batch size by batch size.

    answer      which schedule is chosen, its speed against sequential, and how that is known
    stages      the schedules drawn over the graph, the chosen one first
    latency     seconds of all schedules, and the speed-up of each block
    work        kernels, FLOPs, memory access, utilisation; seconds of searching and measuring
    sums        whether sums over stages predict the seconds of schedules
    matrices    the loss of a schedule at a batch size or on a device that it was not made for

Figures and tables are those of "Accelerate DNN Inference by Inter-Operator Parallelism", 2019.
The page has no script.
"""

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import pairwise

from markupsafe import Markup, escape

from dovetail.reports.markup import Card, PageTable, joined, remarked, render_page, save_page
from dovetail.reports.plots import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Axes, bar_chart, ticks
from dovetail.reports.stages_figures import (
    answer,
    launches_of,
    measured_of,
    measured_text,
    noise_of,
    overview_rows,
    ratio_of,
    sequential_of,
    stages_text,
)
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
COLOURS = 8  # of the palette in page.css


@dataclass(frozen=True)
class Place:
    """A kernel's box: its upper left corner, its colour, and the words in its title on where the
    kernel runs."""

    x: int
    y: int
    colour: int
    where: str


@dataclass(frozen=True)
class Band:
    """The row of a stage: its number, from 1 on, its seconds, and the frames (x, y, width, height)
    around its groups."""

    number: int
    y: int
    height: int
    seconds: float
    merged: bool
    frames: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Picture:
    """A picture of stages (`bands`) or of streams (`lanes`).

    places   kernel -> its box
    waits    kernel -> the kernels of other streams whose events it waits for
    """

    places: dict[int, Place]
    bands: tuple[Band, ...] = ()
    lanes: tuple[str, ...] = ()
    waits: dict[int, set[int]] = field(default_factory=dict)


def effort_of(scheduled: Scheduled, candidate: ScheduleCandidate) -> int:
    """The number of boxes and lines that a picture of the schedule has."""
    reads = sum(before.bit_count() for before in scheduled.block.predecessors)
    return len(scheduled.kernels) + reads + len(candidate.stages)


def draw_schedule(scheduled: Scheduled, candidate: ScheduleCandidate) -> Markup:
    """The pictures of a schedule, in which each kernel stands once. O(kernels + edges)."""
    if not candidate.stages:
        picture = render(scheduled, streamed(scheduled, candidate))
        return Markup('<div class="sheet">{}</div>').format(picture)
    longest = max(stage.seconds for stage in candidate.stages)
    drawn, shown = [], 0
    for piece in pieces(scheduled, candidate):
        stages = [candidate.stages[i] for i in piece]
        folded = '<details{}><summary>{}</summary><div class="sheet">{}</div></details>'
        drawn.append(
            Markup(folded).format(
                " open" * (shown < OPEN),
                _piece_title(scheduled, candidate, piece),
                render(scheduled, staged(stages, piece.start), longest),
            )
        )
        shown += sum(len(stage.kernels) for stage in stages)
    return joined(drawn)


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


def staged(stages: Sequence[KernelStage], first: int) -> Picture:
    """The picture of stages below each other; `first` is the index of the first one among all."""
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
    """The picture of streams side by side. Each kernel stands in the row below the lowest kernel
    that it waits for: one that it reads, one in its stream, or one whose event it awaits."""
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


def render(scheduled: Scheduled, picture: Picture, longest_seconds: float = 0.0) -> Markup:
    """A picture as SVG, one unit a pixel. `longest_seconds` are those of the longest stage of the
    schedule, whose bar is full."""
    places = picture.places
    width = max((place.x for place in places.values()), default=GUTTER) + BOX + 60
    height = max((place.y for place in places.values()), default=0) + DOWN + PAD
    parts = [_band(band, width, longest_seconds) for band in picture.bands]
    parts += [
        f'<text x="{GUTTER + i * ACROSS}" y="20">{lane}</text>'
        for i, lane in enumerate(picture.lanes)
    ]
    # A kernel's lines go up to what it reads. Later kernels are drawn first, so that the boxes
    # above cover the ends of their lines.
    for kernel in sorted(places, key=lambda k: (places[k].y, places[k].x), reverse=True):
        parts.append(_kernel(scheduled, picture, kernel))
    label = f"{len(places)} kernels in {len(picture.bands) or len(picture.lanes)} "
    label += "stages" if picture.bands else "streams"
    return Markup(
        f'<svg class="stages" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def _band(band: Band, width: int, longest_seconds: float) -> str:
    share = band.seconds / longest_seconds if longest_seconds > 0 else 0.0
    duration = format_seconds(band.seconds)
    parts = [
        f'<rect class="row{band.number % 2}" x="0" y="{band.y}" width="{width}" '
        f'height="{band.height}"/>',
        f'<text x="6" y="{band.y + 22}">{band.number}</text>',
        f'<text x="{GUTTER - 24}" y="{band.y + 22}" text-anchor="end">{duration}</text>',
        f'<rect class="took" x="6" y="{band.y + 28}" width="{(GUTTER - 30) * share:.1f}" '
        f'height="4"><title>stage {band.number}: {duration}</title></rect>',
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
    """A kernel's box, the lines into it, and stubs for kernels that are not in this picture: one
    above if it reads from some, one below if some read it."""
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


def _title(work: KernelWork, place: Place, reads: Sequence[str]) -> str:
    return "\n".join([
        _end(work.name, 2 * NAME),
        place.where,
        f"ops: {_few(work.ops)}",
        f"{format_count(work.flops, 'FLOP')}, {format_bytes(work.moved_bytes)} moved",
        f"reads {_few(reads)}" if reads else "reads the inputs alone",
    ])  # fmt: skip


def _few(names: Iterable[str]) -> str:
    every = list(names)
    text = ", ".join(_end(name, NAME) for name in every[:NAMED])
    return text + (f" and {len(every) - NAMED} more" if len(every) > NAMED else "")


def _end(name: str, most: int) -> str:
    """The name, cut to its end if it is long: paths differ at their ends."""
    return name if len(name) <= most else "…" + name[1 - most :]


def _piece_title(scheduled: Scheduled, candidate: ScheduleCandidate, piece: range) -> str:
    stages = [candidate.stages[i] for i in piece]
    kernels = {k for stage in stages for k in stage.kernels}
    total = sum(stage.seconds for stage in candidate.stages)
    spent = sum(stage.seconds for stage in stages)
    blocks = [b for b, block in enumerate(scheduled.blocks, 1) if not kernels.isdisjoint(block)]
    text = f"{_span('stage', piece.start + 1, piece.stop)}: "
    text += f"{_span('block', blocks[0], blocks[-1])}, " if blocks else ""
    text += f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}, {format_seconds(spent)}"
    return text + (f", {100 * spent / total:.1f} % of all" if total > 0 else "")


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


# ---- Charts as SVG: latencies, prediction against measurement; and a heated matrix ----

LABELS, ROW = 150, 36
"""The names before bars have `LABELS` pixels of width; a row has `ROW` pixels of height."""
MOST_POINTS = 2000
"""A scatter chart has at most this many dots."""
HEATS = (0.005, 0.02, 0.05, 0.10)
"""From each of these losses on a cell of the matrix is one step hotter."""


def latency_chart(candidates: Sequence[ScheduleCandidate], chosen: str) -> Markup:
    """A chart with a row for each schedule: the predicted seconds above the measured ones, with a
    mark over the middle half of the rounds."""
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
            parts.append(_bar("c3", y + 15, candidate.step_seconds, scale, "measured", high))
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
    """A chart of measured against predicted seconds: a dot for each pair, and the line on which
    both are equal."""
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
    """The range of the values, 5 % wider on each side, and never empty."""
    low, high = min(values), max(values)
    more = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - more, high + more


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


@dataclass(frozen=True)
class _Matrix:
    """A specialisation as a table: each cell is (class of the style sheet, text)."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, list[tuple[str, str]]]]


def _matrix(matrix: Specialisation) -> _Matrix:
    """The table of a specialisation: seconds, and the loss against the schedule that was made for
    the row."""
    rows = []
    for i, (name, seconds) in enumerate(zip(matrix.rows, matrix.seconds, strict=True)):
        diagonal = _own_column(matrix, i)
        base = seconds[diagonal] if diagonal is not None else 0.0
        cells: list[tuple[str, str]] = []
        for j, value in enumerate(seconds):
            loss = value / base - 1 if base > 0 else math.nan
            text = format_seconds(value) if math.isfinite(value) else "-"
            style = "own" if j == diagonal else f"heat{sum(loss >= heat for heat in HEATS)}"
            if math.isfinite(loss) and j != diagonal:
                text = remarked(text, f"{100 * loss:+.1f} %")
            cells.append((style, text))
        rows.append((name, cells))
    return _Matrix(matrix.title, tuple(matrix.columns), rows)


def _own_column(matrix: Specialisation, row: int) -> int | None:
    """The column of the schedule that was made for a row; None if there is none. It is the column
    with the row's name. If rows and columns share no name at all, it is the column with the row's
    number in a square matrix."""
    if set(matrix.rows) & set(matrix.columns):
        name = matrix.rows[row]
        return matrix.columns.index(name) if name in matrix.columns else None
    return row if len(matrix.rows) == len(matrix.columns) else None


# ---- What the page's sections show ----

MOST_DRAWN = 10_000
"""All pictures together have at most this many boxes and lines."""
MOST_BLOCKS = 64
"""At most this many blocks, the first ones, are compared, so that chart and table stay legible."""
MOST_CARDS = 4
"""At most this many batch sizes, the first ones, have a card at the top of the page."""


@dataclass(frozen=True)
class _ShownSchedule:
    """A schedule under its title; `picture` is "" if it is not drawn."""

    title: str
    chosen: bool
    picture: Markup


@dataclass(frozen=True)
class _BlockGains:
    """The speed-up of each block; `cut` says how many blocks are shown, "" for all."""

    chart: Markup
    cut: str
    table: PageTable


@dataclass(frozen=True)
class _SampledShown:
    """Random schedules, measured against predicted."""

    text: str
    chart: Markup


@dataclass(frozen=True)
class _ShownBatch:
    """The section of one batch size. A part is None if nothing is known of it."""

    title: str
    answer: str
    overview_head: tuple[str, ...]
    overview: list[tuple[tuple[str, ...], bool]]
    schedules: list[_ShownSchedule]
    latency_chart: Markup
    latency: PageTable
    blocks: _BlockGains | None
    peak: str
    work: PageTable | None
    merged: bool
    search: PageTable | None
    sampled: _SampledShown | None


def write_stages_page(
    schedules: Schedules, path: str | os.PathLike[str], *, made: str = ""
) -> None:
    """Write the page to `path`, whole or not at all. made: the command that made it.

    Raises `UnwritableError`.
    """
    save_page(render_stages(schedules, made=made), path)


def render_stages(schedules: Schedules, *, made: str = "") -> str:
    """The page as text. O(kernels + edges) for each schedule; what is drawn is bounded."""
    return render_page(
        "stages.html",
        f"{schedules.model} on {schedules.device}",
        _cards(schedules),
        styles=("page.css", "training.css", "stages.css"),
        summary=_summary(schedules),
        batches=[
            _batch(schedules, result, drawn)
            for result, drawn in zip(schedules.results, drawable(schedules), strict=True)
        ],
        matrices=[_matrix(matrix) for matrix in schedules.specialisations],
        made=made,
    )


def _cards(schedules: Schedules) -> list[Card]:
    kernels = [len(result.kernels) for result in schedules.results]
    blocks = [len(result.blocks) for result in schedules.results]
    cards = [("costs", schedules.costs_source, "of stages, on which the search stands")]
    if kernels:
        cards.append(("kernels", f"{max(kernels):,}", f"in {max(blocks):,} blocks"))
    for result in schedules.results[:MOST_CARDS]:
        ratio = ratio_of(result, result.best)
        source = "measured" if result.best.seconds else "predicted"
        gain = "" if ratio is None else f"{ratio.value:.3f} x sequential's speed, {source}"
        duration = format_seconds(result.best.step_seconds)
        cards.append((f"batch {result.batch}: {result.chosen}", duration, gain))
    return cards


def _summary(schedules: Schedules) -> PageTable | None:
    """A row for each batch size; None if there are not several."""
    if len(schedules.results) < 2:
        return None
    rows = []
    for result in schedules.results:
        best, ratio = result.best, ratio_of(result, result.best)
        seconds = best.step_seconds
        rows.append((
            f"{result.batch:,}",
            result.chosen,
            format_seconds(best.predicted_seconds),
            measured_text(best),
            "-" if ratio is None else str(ratio),
            format_count(result.batch / seconds) if seconds > 0 else "-",
        ))  # fmt: skip
    head = ("batch", "chosen", "predicted", "measured (spread)", "speed-up", "samples a second")
    return PageTable(head, rows)


def drawable(schedules: Schedules, most: int = MOST_DRAWN) -> list[set[str]]:
    """[results] the schedulers whose schedules are drawn. All pictures together have at most `most`
    boxes and lines: chosen schedules come first, then the others in their order. One that does not
    fit is left out, and smaller ones after it may still fit."""
    drawn: list[set[str]] = [set() for _ in schedules.results]
    candidates = [(i, result.best) for i, result in enumerate(schedules.results)]
    candidates += [
        (i, candidate)
        for i, result in enumerate(schedules.results)
        for candidate in _by_choice(result)[1:]
        if _same_as(result, candidate) is None
    ]
    for i, candidate in candidates:
        needed = effort_of(schedules.results[i], candidate)
        if needed <= most:
            most -= needed
            drawn[i].add(candidate.scheduler)
    return drawn


def _by_choice(scheduled: Scheduled) -> list[ScheduleCandidate]:
    """The candidates, the chosen one first and the others in their order."""
    return sorted(scheduled.candidates, key=lambda c: c.scheduler != scheduled.chosen)


def _same_as(scheduled: Scheduled, candidate: ScheduleCandidate) -> str | None:
    """The first scheduler before this one that found the same stages or streams; None if none
    did."""
    for other in _by_choice(scheduled):
        if other is candidate:
            return None
        if _form(other) == _form(candidate):
            return other.scheduler
    return None


def _form(candidate: ScheduleCandidate) -> object:
    return [(stage.groups, stage.merged) for stage in candidate.stages] or candidate.streams


def _batch(schedules: Schedules, scheduled: Scheduled, drawn: Collection[str]) -> _ShownBatch:
    """The section of one batch size; `drawn` names the schedulers whose schedules are drawn."""
    head, rows = overview_rows(scheduled)
    return _ShownBatch(
        title=f"Batch {scheduled.batch:,}: {scheduled.chosen}",
        answer=answer(scheduled, schedules.costs_source),
        overview_head=head,
        overview=rows,
        schedules=[_show_schedule(scheduled, c, drawn) for c in _by_choice(scheduled)],
        latency_chart=latency_chart(scheduled.candidates, scheduled.chosen),
        latency=_latency(scheduled),
        blocks=_blocks(scheduled),
        peak=format_bytes(scheduled.peak_bytes) if scheduled.peak_bytes else "",
        work=_work(scheduled),
        merged=any(stage.merged for c in scheduled.candidates for stage in c.stages),
        search=_search(scheduled),
        sampled=_show_sampled(scheduled),
    )


def _show_schedule(
    scheduled: Scheduled, candidate: ScheduleCandidate, drawn: Collection[str]
) -> _ShownSchedule:
    name = candidate.scheduler
    chosen = name == scheduled.chosen
    title = f"{name}{' (chosen)' * chosen}: {stages_text(candidate)}"
    title += " stages" * bool(candidate.stages)
    same = _same_as(scheduled, candidate)
    if same is not None:
        return _ShownSchedule(f"{name} found what {same} found.", chosen, Markup(""))
    if name not in drawn:
        title += ". Not drawn: the page would be too large."
        return _ShownSchedule(title, chosen, Markup(""))
    return _ShownSchedule(title, chosen, draw_schedule(scheduled, candidate))


def _latency(scheduled: Scheduled) -> PageTable:
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
    return PageTable(head, rows)


def _blocks(scheduled: Scheduled) -> _BlockGains | None:
    """The speed-up of each block: sequential's predicted seconds over each scheduler's. None if no
    schedule has seconds for the same blocks as sequential."""
    base = sequential_of(scheduled)
    if base is None or not base.block_seconds:
        return None
    count = len(base.block_seconds)
    compared = [c for c in _by_choice(scheduled) if c is not base and len(c.block_seconds) == count]
    if not compared:
        return None
    gains = {
        c.scheduler: [
            base_seconds / seconds if seconds > 0 else 1.0
            for base_seconds, seconds in zip(base.block_seconds, c.block_seconds, strict=True)
        ][:MOST_BLOCKS]
        for c in compared
    }
    shown = min(count, MOST_BLOCKS)
    first = compared[0].scheduler
    chart = bar_chart(
        gains[first],
        [str(block) for block in range(1, shown + 1)],
        Axes(f"block: how many times as fast as sequential, by {first}"),
    )
    cut = f"The first {shown} of {count:,} blocks." if shown < count else ""
    return _BlockGains(chart, cut, _block_table(scheduled, base, gains))


def _block_table(
    scheduled: Scheduled, base: ScheduleCandidate, gains: Mapping[str, list[float]]
) -> PageTable:
    sizes = [f"{len(kernels):,}" for kernels in scheduled.blocks]
    rows = [
        (
            str(i + 1),
            sizes[i] if i < len(sizes) else "",
            format_seconds(seconds),
            *(f"{of[i]:.3f} x" for of in gains.values()),
        )
        for i, seconds in enumerate(base.block_seconds[:MOST_BLOCKS])
    ]
    return PageTable(("block", "kernels", "sequential", *gains), rows)


def _work(scheduled: Scheduled) -> PageTable | None:
    """The table of kernels, FLOPs, memory access and utilisation (the paper's table 5)."""
    if not scheduled.kernels:
        return None
    flops = sum(kernel.flops for kernel in scheduled.kernels)
    moved = sum(kernel.moved_bytes for kernel in scheduled.kernels)
    rows = []
    for candidate in scheduled.candidates:
        seconds = candidate.step_seconds
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
    return PageTable(head, rows)


def _search(scheduled: Scheduled) -> PageTable | None:
    """The table of the effort of finding each schedule (the paper's table 4)."""
    if all(candidate.effort == SearchEffort() for candidate in scheduled.candidates):
        return None
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
    return PageTable(head, rows)


def _show_sampled(scheduled: Scheduled) -> _SampledShown | None:
    """Random schedules, measured against predicted, and the share of pairs whose order was
    predicted right; None for less than two."""
    points = scheduled.sampled
    if len(points) < 2:
        return None
    noise = noise_of(scheduled.candidates)
    text = (
        f"{len(points):,} random schedules. Of all pairs "
        f"{_share(*pairs_ordered_right(points))} come out in the order that was predicted "
        "(the paper: 93.7 %)."
    )
    if noise > 0:
        text += (
            f" Of pairs further apart than the noise of the measurements, {100 * noise:.1f} %: "
            f"{_share(*pairs_ordered_right(points, noise))}."
        )
    return _SampledShown(text, scatter_chart(points))


def _share(right: int, compared: int) -> str:
    if not compared:
        return "none of 0"
    return f"{right:,} of {compared:,} ({100 * right / compared:.1f} %)"
