"""Charts of stage schedules as SVG: latencies, prediction against measurement, a heated matrix."""

import math
from collections.abc import Sequence
from html import escape

from dovetail.reports.markup import Markup
from dovetail.reports.plots import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, ticks
from dovetail.runtime.timers import summarise
from dovetail.schedulers.results import Candidate, Specialisation
from dovetail.units import format_seconds

LABELS, ROW = 150, 36
"""Pixels of the names before bars, and of a row."""
MOST_POINTS = 2000
HEATS = (0.005, 0.02, 0.05, 0.10)
"""Losses from which on a cell is hotter."""


def latency_chart(candidates: Sequence[Candidate], chosen: str) -> Markup:
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


def _quartiles(candidate: Candidate) -> tuple[float, float]:
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
    for i, (row, seconds) in enumerate(zip(matrix.rows, matrix.seconds, strict=True)):
        own = _own(matrix, i)
        cells = [f"<tr><th scope=row>on {escape(row)}</th>"]
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


def noise_of(candidates: Sequence[Candidate]) -> float:
    """Interquartile range over median of the measured rounds: the middle schedule's."""
    spreads = sorted(summarise(list(c.seconds)).spread for c in candidates if len(c.seconds) > 1)
    return spreads[len(spreads) // 2] if spreads else 0.0
