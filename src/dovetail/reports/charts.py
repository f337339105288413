"""Small charts as inline SVG. Colours come from the page's style sheet, by class."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dovetail.units import format_bytes, format_seconds

Curve = tuple[str, NDArray[np.float64], NDArray[np.int64]]  # label, times, bytes
COLOURS = 8  # of the palette in page.css
KEYS, LEAST_SHARE = 7, 0.005
WIDTH, HEIGHT = 600, 150
POINTS = 400


def stacked_bar(parts: Sequence[tuple[str, float, str]], description: str) -> str:
    """(what, share, colour class) side by side; the legend names the largest."""
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
    return (
        f'<svg class="stack" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(description)}">{"".join(pieces)}</svg>'
        f'<ul class="key">{"".join(keys)}</ul>'
    )


def bar(share: float) -> str:
    """One bar of a table, 0 to 1."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect x="0" y="1" width="{width:.2f}" height="8" rx="1"/></svg>'
    )


def memory(curves: Sequence[Curve], capacity: int, end_seconds: float, description: str) -> str:
    """Bytes in use over one step, against the capacity where that is near enough to show."""
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        return "<p>Memory was not recorded.</p>"
    top = max(float(sizes.max()) for _, _, sizes in curves) or 1.0
    shown = capacity <= 3 * top
    scale = 1.1 * max(top, capacity if shown else 0)
    lines = []
    for label, times, sizes in curves:
        steps = _steps(times, sizes, end_seconds, scale)
        kind = "measured" if label == "measured" else "predicted"
        lines.append(f'<path class="area {kind}" d="{steps}V{HEIGHT}H0Z"/>')
        lines.append(f'<path class="{kind}" d="{steps}"><title>{escape(label)}</title></path>')
    if shown:
        y = HEIGHT * (1 - capacity / scale)
        lines.append(f'<path class="capacity" d="M0 {y:.1f}H{WIDTH}"/>')
        lines.append(f'<text x="4" y="{y - 4:.1f}">available {format_bytes(capacity)}</text>')
    y = HEIGHT * (1 - top / scale)
    lines.append(f'<text x="{WIDTH - 4}" y="{max(y - 4, 10):.1f}" text-anchor="end">'
                 f"{format_bytes(top)}</text>")  # fmt: skip
    lines.append(f'<text x="{WIDTH - 4}" y="{HEIGHT + 14}" text-anchor="end">'
                 f"{format_seconds(end_seconds)}</text>")  # fmt: skip
    lines.append(f'<text x="0" y="{HEIGHT + 14}">0 s</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT + 18}" role="img" '
        f'aria-label="{escape(description)}"><path class="axis" d="M0 {HEIGHT}H{WIDTH}"/>'
        f"{''.join(lines)}</svg>"
    )


def _steps(
    times: NDArray[np.float64], sizes: NDArray[np.int64], end_seconds: float, scale: float
) -> str:
    """A staircase of at most `POINTS` steps; each shows the largest value within it."""
    if len(times) > POINTS:
        edges = np.linspace(0, end_seconds, POINTS, endpoint=False)
        first = np.searchsorted(times, edges, side="right") - 1
        bounds = np.append(np.clip(first, 0, len(times) - 1), len(times) - 1)
        peaks = [sizes[a : b + 1].max() for a, b in pairwise(bounds.tolist())]
        times, sizes = edges, np.array(peaks, dtype=np.int64)
    x = WIDTH * times / (end_seconds or 1.0)
    y = HEIGHT * (1 - sizes / scale)
    path = f"M{x[0]:.1f} {y[0]:.1f}"
    path += "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(x[1:], y[1:], strict=True))
    return path + f"H{WIDTH}"
