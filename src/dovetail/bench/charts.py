"""Charts of the papers' figures as inline SVG. Colours come from the page's style sheet, by class.

load_chart   RL17's figures 8 and 9: a bar a device and a channel, as long as its seconds
loss_chart   RL17's figures 6 and 7: loss against simulated time, a line a curve
"""

from collections.abc import Sequence
from html import escape

import numpy as np

from dovetail.bench.figures import colour_of
from dovetail.bench.records import Curve, Work
from dovetail.reports.plots import ticks
from dovetail.units import format_seconds

PHASES = ("forward", "backward", "update")
WIDTH, LABELS, VALUES = 620.0, 150.0, 80.0
BAR, GAP = 13.0, 6.0
PLOT_WIDTH, PLOT_HEIGHT, LEFT, RIGHT, BOTTOM = 560.0, 220.0, 44.0, 26.0, 34.0
POINTS, WINDOW = 300, 20
MOST_CHANNELS = 8


def load_chart(work: Work, description: str) -> str:
    """Seconds of each device by phase, below them the seconds of the busiest channels."""
    busiest = sorted(work.transfer_seconds.items(), key=lambda item: -item[1])
    channels = [(name, seconds) for name, seconds in busiest if seconds > 0][:MOST_CHANNELS]
    of_phase = (work.forward_seconds, work.backward_seconds, work.update_seconds)
    bars = [
        (name, [(phase, seconds.get(name, 0.0)) for phase, seconds in zip(PHASES, of_phase,
                                                                        strict=True)])
        for name in work.forward_seconds
    ]  # fmt: skip
    bars += [(name, [("transfer", seconds)]) for name, seconds in channels]
    longest = max((sum(s for _, s in parts) for _, parts in bars), default=0.0) or 1.0
    scale = (WIDTH - LABELS - VALUES) / longest
    drawn = "".join(
        _bar(name, parts, scale, row * (BAR + GAP)) for row, (name, parts) in enumerate(bars)
    )
    height = len(bars) * (BAR + GAP)
    keys = "".join(
        f'<li><i class="{kind}"></i>{kind}</li>'
        for kind in (*PHASES, *(["transfer"] if channels else []))
    )
    return (
        f'<svg class="load" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(description)}">{drawn}</svg><ul class="key">{keys}</ul>'
    )


def _bar(name: str, parts: Sequence[tuple[str, float]], scale: float, y: float) -> str:
    pieces, x = [], LABELS
    for kind, seconds in parts:
        if seconds > 0:
            width = max(seconds * scale, 0.5)
            pieces.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" '
                f'height="{BAR:.0f}"><title>{kind}: {format_seconds(seconds)}</title></rect>'
            )
            x += width
    total = format_seconds(sum(seconds for _, seconds in parts))
    return (
        f'<text x="{LABELS - 8:.0f}" y="{y + 10.5:.1f}" text-anchor="end">{escape(name)}</text>'
        f'{"".join(pieces)}<text x="{x + 6:.1f}" y="{y + 10.5:.1f}">{total}</text>'
    )


def loss_chart(curves: Sequence[Curve], description: str) -> str:
    """Loss against simulated time, each a running mean over `WINDOW` steps.

    The axis of time ends where the fastest curve does, so that all are there at every time.
    """
    curves = [curve for curve in curves if curve.losses and curve.step_seconds > 0]
    if not curves:
        return "<p>Not yet run.</p>"
    end = min(curve.step_seconds * len(curve.losses) for curve in curves)
    lines = [_smoothed(curve) for curve in curves]
    shown = [losses[times <= end * (1 + 1e-9)] for times, losses in lines]
    top = 1.05 * max((float(losses.max()) for losses in shown if len(losses)), default=1.0)
    parts, keys = _axes(end, top or 1.0), []
    for i, (curve, (times, losses)) in enumerate(zip(curves, lines, strict=True)):
        inside = times <= end * (1 + 1e-9)
        path = _path(times[inside] / end, losses[inside] / (top or 1.0))
        parts.append(
            f'<path class="line {colour_of(i)}" d="{path}"><title>{escape(curve.name)}</title>'
            "</path>"
        )
        keys.append(
            f'<li><i class="{colour_of(i)}"></i>{escape(curve.name)} '
            f"<b>{format_seconds(curve.step_seconds)} a step</b></li>"
        )
    return (
        f'<svg class="chart loss" viewBox="0 -6 {LEFT + PLOT_WIDTH + RIGHT:.0f} '
        f'{PLOT_HEIGHT + BOTTOM + 6:.0f}" role="img" aria-label="{escape(description)}">'
        f'{"".join(parts)}</svg><ul class="key">{"".join(keys)}</ul>'
    )


def _smoothed(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Times at which steps begin and the mean loss of the `WINDOW` steps up to each; thinned."""
    losses = np.array(curve.losses, dtype=np.float64)
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    last = np.arange(1, len(losses) + 1)
    first = np.maximum(last - WINDOW, 0)
    means = (sums[last] - sums[first]) / (last - first)
    kept = np.unique(np.linspace(0, len(losses) - 1, min(POINTS, len(losses))).round().astype(int))
    return curve.step_seconds * kept, means[kept]


def _path(x: np.ndarray, y: np.ndarray) -> str:
    points = (
        f"{LEFT + PLOT_WIDTH * a:.1f} {PLOT_HEIGHT * (1 - b):.1f}"
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    )
    return "M" + "L".join(points)


def _axes(end_seconds: float, top: float) -> list[str]:
    right = LEFT + PLOT_WIDTH
    parts = [f'<path class="axis" d="M{LEFT:.0f} 0V{PLOT_HEIGHT:.0f}H{right:.0f}"/>']
    for value in ticks(0.0, top):
        y = PLOT_HEIGHT * (1 - value / top)
        parts.append(
            f'<text x="{LEFT - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
            f'<path class="grid" d="M{LEFT:.0f} {y:.1f}H{right:.0f}"/>'
        )
    for value in ticks(0.0, end_seconds):
        x = LEFT + PLOT_WIDTH * value / end_seconds
        parts.append(
            f'<text x="{x:.1f}" y="{PLOT_HEIGHT + 15:.0f}" text-anchor="middle">'
            f"{format_seconds(value)}</text>"
        )
    parts.append(
        f'<text x="{LEFT:.0f}" y="{PLOT_HEIGHT + 30:.0f}">loss against simulated time</text>'
    )
    return parts
