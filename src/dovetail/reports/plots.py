"""Draws charts as inline SVG; colours come from the style sheet, by class.

A line has gaps at values that are not finite, and is thinned to at most `POINTS` points.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from dovetail.units import format_bytes, format_count, format_seconds

Floats = NDArray[np.float64]
COLOURS = 8
"""The palette in page.css has this many colours. Further lines begin it again."""
POINTS = 400
"""A line is drawn with at most this many points: the eye cannot tell more apart."""
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 560.0, 220.0, 48.0, 26.0, 34.0


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart.

    colour   the number of its colour, from 0 on
    dashed   it is a reference, and is not named below the chart
    remark   a text that stands after its name below the chart
    """

    name: str
    x: Floats
    y: Floats
    colour: int = 0
    dashed: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Axes:
    """The title, units and ranges of a chart.

    top, bottom   bounds of y; values beyond them are drawn at the edge
    zero          y begins at 0 if all its values are positive
    end_x         x ends here; 0: at the last point
    """

    title: str
    format_x: Callable[[float], str] = format_count
    top: float = math.inf
    bottom: float = -math.inf
    zero: bool = True
    end_x: float = 0.0


def line_chart(lines: Sequence[Line], axes: Axes, *, keys: bool = True) -> Markup:
    """The lines over common axes, with their names below."""
    drawn = [line for line in lines if np.isfinite(line.y).any()]
    if not drawn:
        return Markup("<p>Nothing was recorded.</p>")
    end = axes.end_x or max(float(line.x.max()) for line in drawn) or 1.0
    low, high = _range(drawn, axes)
    parts = _frame(end, low, high, axes)
    for line in drawn:
        x, y = thinned(line.x, line.y)
        path = _path(x / end, (np.clip(y, low, high) - low) / (high - low))
        style = f"line s{line.colour % COLOURS}" + " dashed" * line.dashed
        parts.append(f'<path class="{style}" d="{path}"><title>{escape(line.name)}</title></path>')
    names = "".join(_key(line) for line in drawn if not line.dashed)
    return Markup(
        f'<svg class="chart plot" viewBox="0 -8 {LEFT + WIDTH + RIGHT:.0f} '
        f'{HEIGHT + BOTTOM + 8:.0f}" role="img" aria-label="{escape(axes.title)}">'
        f"{''.join(parts)}</svg>" + (f'<ul class="key">{names}</ul>' if keys else "")
    )


def _key(line: Line) -> str:
    remark = f" <b>{escape(line.remark)}</b>" if line.remark else ""
    return f'<li><i class="c{line.colour % COLOURS}"></i>{escape(line.name)}{remark}</li>'


def bar_chart(
    counts: Sequence[float], labels: Sequence[str], axes: Axes, colour: int = 0
) -> Markup:
    """A chart with a bar for each count, side by side, and as many labels as there is room for."""
    top = max(counts, default=0.0) or 1.0
    step = WIDTH / max(len(counts), 1)
    parts = [_y_axis(0.0, top)]
    # About 70 characters fit below the chart. If all labels are longer, every n-th one is written.
    every = max(1, math.ceil(len(labels) * max((len(t) for t in labels), default=1) / 70))
    for i, (count, label) in enumerate(zip(counts, labels, strict=True)):
        x, height = LEFT + i * step, HEIGHT * count / top
        parts.append(
            f'<rect class="c{colour % COLOURS}" x="{x + 0.08 * step:.1f}" '
            f'y="{HEIGHT - height:.1f}" width="{0.84 * step:.1f}" height="{height:.1f}">'
            f"<title>{escape(label)}: {count:.4g}</title></rect>"
        )
        if i % every == 0:
            parts.append(_text(x + step / 2, HEIGHT + 15, label, "middle"))
    parts.append(_text(LEFT, HEIGHT + 30, axes.title, "start"))
    return Markup(
        f'<svg class="chart plot" viewBox="0 -8 {LEFT + WIDTH + RIGHT:.0f} '
        f'{HEIGHT + BOTTOM + 8:.0f}" role="img" aria-label="{escape(axes.title)}">'
        f"{''.join(parts)}</svg>"
    )


def ticks(low: float, high: float) -> list[float]:
    """Round values within [low, high], four to nine of them."""
    span = high - low
    # The step is 1, 2 or 5 times a power of ten: the largest with four of it within the span. The
    # 1e-9 keeps a tick that rounding would push past an end.
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (5, 2, 1) if span / (factor * step) >= 4 or factor == 1)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(x: Floats, y: Floats, points: int = POINTS) -> tuple[Floats, Floats]:
    """At most `points` of the points, evenly spaced by index, with the first and the last."""
    if len(x) <= points:
        return x, y
    kept = np.unique(np.linspace(0, len(x) - 1, points).round().astype(np.int64))
    return x[kept], y[kept]


def averaged(x: Floats, y: Floats, points: int = POINTS) -> tuple[Floats, Floats]:
    """The line as at most `points` means over neighbouring points, each drawn at its last x. Values
    that are not finite are left out of a mean; a mean of none is nan."""
    if len(x) <= points:
        return x, y
    starts = np.linspace(0, len(x), points, endpoint=False).astype(np.int64)
    finite = np.isfinite(y)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(finite, y, 0.0), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / counts
    return x[np.append(starts[1:], len(x)) - 1], means


def _range(lines: Sequence[Line], axes: Axes) -> tuple[float, float]:
    """The (low, high) that the y axis shows, with low < high whatever the values are."""
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    low, high = float(values.min()), float(values.max())
    if axes.zero and low > 0:
        low = 0.0
    high = min(high + 0.04 * (high - low), axes.top)
    low = max(low, axes.bottom)
    # All values are equal, or their difference overflows: any range with a length will do. Beyond
    # 1e9 adding 1 might change nothing.
    if not (math.isfinite(high - low) and high > low):
        low, high = (low, low + 1.0) if abs(low) < 1e9 else (0.0, 1.0)
    return low, high


def _frame(end: float, low: float, high: float, axes: Axes) -> list[str]:
    parts = [_y_axis(low, high)]
    parts += [
        _text(LEFT + WIDTH * value / end, HEIGHT + 15, axes.format_x(value), "middle")
        for value in ticks(0.0, end)
    ]
    return [*parts, _text(LEFT, HEIGHT + 30, axes.title, "start")]


def _y_axis(low: float, high: float) -> str:
    right = LEFT + WIDTH
    parts = [f'<path class="axis" d="M{LEFT:.0f} 0V{HEIGHT:.0f}H{right:.0f}"/>']
    for value in ticks(low, high):
        y = HEIGHT * (1 - (value - low) / (high - low))
        text = format_count(value) if abs(value) >= 1e4 else f"{value:.4g}"
        parts.append(_text(LEFT - 6, y + 4, text, "end"))
        parts.append(f'<path class="grid" d="M{LEFT:.0f} {y:.1f}H{right:.0f}"/>')
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(x: Floats, y: Floats) -> str:
    """The `d` of an SVG path with lines between neighbours that are both finite; x and y are shares
    from 0 to 1."""
    pieces, pen = [], False
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen = False
            continue
        pieces.append(f"{'L' if pen else 'M'}{LEFT + WIDTH * a:.1f} {HEIGHT * (1 - b):.1f}")
        # A line of no length, drawn with round caps, makes a point without neighbours visible.
        if not pen:
            pieces.append("h0")
        pen = True
    return "".join(pieces)


# ---- Small charts without axes ----

MemoryCurve = tuple[str, NDArray[np.float64], NDArray[np.int64]]  # label, times, bytes
KEYS, LEAST_SHARE = 7, 0.005
SMALL_WIDTH, SMALL_HEIGHT = 600, 150


def stacked_bar(parts: Sequence[tuple[str, float, str]], description: str) -> Markup:
    """A bar of parts (what, share, colour class) side by side. The legend names the first parts, at
    most `KEYS` and those of at least `LEAST_SHARE`, and sums the others up."""
    pieces, keys, x = [], [], 0.0
    for what, share, colour in parts:
        width = max(1000 * share - 1.5, 0.5)
        text = escape(what)
        pieces.append(
            f'<rect class="{colour}" x="{x:.1f}" y="0" width="{width:.1f}" height="20">'
            f"<title>{text}: {100 * share:.1f} %</title></rect>"
        )
        keys.append(f'<li><i class="{colour}"></i>{text} <b>{100 * share:.1f} %</b></li>')
        x += 1000 * share
    named = max(1, min(KEYS, sum(share >= LEAST_SHARE for _, share, _ in parts)))
    if len(parts) > named + 1:
        rest = sum(share for _, share, _ in parts[named:])
        keys[named:] = [f"<li>{len(parts) - named} smaller <b>{100 * rest:.1f} %</b></li>"]
    return Markup(
        f'<svg class="stack" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(description)}">{"".join(pieces)}</svg>'
        f'<ul class="key">{"".join(keys)}</ul>'
    )


def bar(share: float) -> Markup:
    """A bar for a cell of a table; `share` is from 0 to 1."""
    width = 100 * min(max(share, 0.0), 1.0)
    return Markup(
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect x="0" y="1" width="{width:.2f}" height="8" rx="1"/></svg>'
    )


def memory(
    curves: Sequence[MemoryCurve], capacity: int, end_seconds: float, description: str
) -> Markup:
    """A chart of the bytes in use over one step. The capacity is drawn if it is at most three times
    the peak; else the curve would lie flat."""
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        return Markup("<p>Memory was not recorded.</p>")
    top = max(float(sizes.max()) for _, _, sizes in curves) or 1.0
    shown = capacity <= 3 * top
    scale = 1.1 * max(top, capacity if shown else 0)
    lines = []
    for label, times, sizes in curves:
        steps = _steps(times, sizes, end_seconds, scale)
        kind = "measured" if label == "measured" else "predicted"
        lines.append(f'<path class="area {kind}" d="{steps}V{SMALL_HEIGHT}H0Z"/>')
        lines.append(f'<path class="{kind}" d="{steps}"><title>{escape(label)}</title></path>')
    if shown:
        y = SMALL_HEIGHT * (1 - capacity / scale)
        lines.append(f'<path class="capacity" d="M0 {y:.1f}H{SMALL_WIDTH}"/>')
        lines.append(f'<text x="4" y="{y - 4:.1f}">available {format_bytes(capacity)}</text>')
    y = SMALL_HEIGHT * (1 - top / scale)
    lines.append(f'<text x="{SMALL_WIDTH - 4}" y="{max(y - 4, 10):.1f}" text-anchor="end">'
                 f"{format_bytes(top)}</text>")  # fmt: skip
    lines.append(f'<text x="{SMALL_WIDTH - 4}" y="{SMALL_HEIGHT + 14}" text-anchor="end">'
                 f"{format_seconds(end_seconds)}</text>")  # fmt: skip
    lines.append(f'<text x="0" y="{SMALL_HEIGHT + 14}">0 s</text>')
    return Markup(
        f'<svg class="chart" viewBox="0 0 {SMALL_WIDTH} {SMALL_HEIGHT + 18}" role="img" '
        f'aria-label="{escape(description)}">'
        f'<path class="axis" d="M0 {SMALL_HEIGHT}H{SMALL_WIDTH}"/>'
        f"{''.join(lines)}</svg>"
    )


def _steps(
    times: NDArray[np.float64], sizes: NDArray[np.int64], end_seconds: float, scale: float
) -> str:
    """The `d` of a staircase of at most `POINTS` steps. Each step shows the largest value within
    it, so that thinning never hides a peak."""
    if len(times) > POINTS:
        edges = np.linspace(0, end_seconds, POINTS, endpoint=False)
        first = np.searchsorted(times, edges, side="right") - 1
        bounds = np.append(np.clip(first, 0, len(times) - 1), len(times) - 1)
        peaks = [sizes[a : b + 1].max() for a, b in pairwise(bounds.tolist())]
        times, sizes = edges, np.array(peaks, dtype=np.int64)
    x = SMALL_WIDTH * times / (end_seconds or 1.0)
    y = SMALL_HEIGHT * (1 - sizes / scale)
    path = f"M{x[0]:.1f} {y[0]:.1f}"
    path += "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(x[1:], y[1:], strict=True))
    return path + f"H{SMALL_WIDTH}"
