"""Schedules as pictures: kernels as boxes in running order, from the top down, and what reads what.

    1  213 us   ┌─────────┐ ┌─────────┐      stages as rows, their groups side by side,
                │  conv1  │ │  conv2  │      the kernels of a group below each other
                │  conv3  │ └─────────┘
                └────┬────┘      │
    2   90 us   [       concat      ]

Streams without barriers are columns; a kernel stands below all that it waits for.

A long schedule is drawn in pieces of whole stages that end with a block where they can, each folded
away on its own. Edges that leave a piece are stubs; the title of a kernel names what it reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from html import escape
from itertools import pairwise

from dovetail.reports.markup import Markup
from dovetail.schedulers.records import members
from dovetail.schedulers.results import Candidate, KernelStage, KernelWork, Scheduled
from dovetail.units import format_bytes, format_count, format_seconds

BOX, HEIGHT = 150, 22
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


def effort_of(scheduled: Scheduled, candidate: Candidate) -> int:
    """Boxes and lines that a picture of it has."""
    reads = sum(before.bit_count() for before in scheduled.block.predecessors)
    return len(scheduled.kernels) + reads + len(candidate.stages)


def draw_schedule(scheduled: Scheduled, candidate: Candidate) -> Markup:
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


def pieces(scheduled: Scheduled, candidate: Candidate) -> list[range]:
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
                for row, kernel in enumerate(group):
                    places[kernel] = Place(x, y + PAD + row * DOWN, colour, where)
                height = (len(group) - 1) * DOWN + HEIGHT
                frames.append((x - 5, y + PAD - 5, BOX + 10, height + 10))
            y += max(map(len, side)) * DOWN
        y += PAD
        bands.append(Band(number, top, y - top, stage.seconds, stage.merged, tuple(frames)))
    return Picture(places, tuple(bands))


def streamed(scheduled: Scheduled, candidate: Candidate) -> Picture:
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
            2 * PAD + HEIGHT + rows[kernel] * DOWN,
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
        lines += f"M{middle + 12} {place.y + HEIGHT}v8"
    drawn = f'<path d="{lines}"/>' if lines else ""
    drawn += f'<path class="event" d="{events}"/>' if events else ""
    title = _title(work, place, [scheduled.kernels[p].name for p in producers])
    return (
        f"<g><title>{escape(title)}</title>{drawn}"
        f'<rect class="c{place.colour}" x="{place.x}" y="{place.y}" width="{BOX}" '
        f'height="{HEIGHT}" rx="4"/>'
        f'<text x="{place.x + 6}" y="{place.y + 15}">{escape(_end(work.name, LABEL))}</text></g>'
    )


def _line(source: Place, destination: Place) -> str:
    """From the lower edge of a box to the upper edge of one below it; past the boxes between two
    of one column on their right."""
    x, y = source.x + BOX // 2, source.y + HEIGHT
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


def _piece_title(scheduled: Scheduled, candidate: Candidate, piece: range) -> str:
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
