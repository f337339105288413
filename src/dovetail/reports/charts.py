"""Draws charts as inline SVG. Colours come from the style sheet, by class, and devices' from here.

A line has gaps at values that are not finite, and is thinned to at most `POINTS` points.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
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

# ---- Elements: every name in them is escaped here ----


def svg(
    parts: Iterable[str],
    size: tuple[float, float],
    style: str,
    label: str,
    *,
    top: float = 0.0,
    form: str = "",
) -> Markup:
    """The parts as one picture of (width, height) pixels, from `top` on; `form` holds further
    attributes."""
    return Markup(
        f'<svg class="{style}" viewBox="0 {top:.0f} {size[0]:.0f} {size[1]:.0f}"{form} role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def svg_rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    sizes = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
    return f'<rect class="{style}" {sizes}>{_title(title)}</rect>'


def svg_path(d: str, style: str, title: str = "") -> str:
    return f'<path class="{style}" d="{d}">{_title(title)}</path>' if d else ""


def svg_text(
    x: float, y: float, words: str, anchor: str = "start", style: str = "", title: str = ""
) -> str:
    look = f' class="{style}"' if style else ""
    where = f'x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}"'
    return f"<text{look} {where}>{escape(words)}{_title(title)}</text>"


def key(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """The legend of a chart: (class of a colour, name, remark) of each entry."""
    items = []
    for style, name, remark in entries:
        mark = f'<i class="{style}"></i>' if style else ""
        said = f" <b>{escape(remark)}</b>" if remark else ""
        items.append(f"<li>{mark}{escape(name)}{said}</li>")
    return Markup(f'<ul class="key">{"".join(items)}</ul>')


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def _px(pixels: float) -> str:
    return str(pixels) if isinstance(pixels, int) else f"{pixels:.1f}"


# ---- Charts with axes ----


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


def line_chart(lines: Sequence[Line], axes: Axes) -> Markup:
    """The lines over common axes, with their names below."""
    drawn = [line for line in lines if np.isfinite(line.y).any()]
    if not drawn:
        return Markup("<p>Nothing was recorded.</p>")
    end = axes.end_x or max(float(line.x.max()) for line in drawn) or 1.0
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in drawn])
    low, high = float(values.min()), float(values.max())
    if axes.zero and low > 0:
        low = 0.0
    high = min(high + 0.04 * (high - low), axes.top)
    low = max(low, axes.bottom)
    # All values are equal, or their difference overflows: any range with a length will do. Beyond
    # 1e9 adding 1 might change nothing.
    if not (math.isfinite(high - low) and high > low):
        low, high = (low, low + 1.0) if abs(low) < 1e9 else (0.0, 1.0)
    parts = []
    for line in drawn:
        # At most `POINTS` of the points, evenly spaced by index, with the first and the last.
        x, y = line.x, line.y
        if len(x) > POINTS:
            kept = np.unique(np.linspace(0, len(x) - 1, POINTS).round().astype(np.int64))
            x, y = x[kept], y[kept]
        pieces, pen = [], False
        shares = np.stack([x / end, (np.clip(y, low, high) - low) / (high - low)], axis=1)
        for a, b in shares.tolist():
            is_finite = math.isfinite(a) and math.isfinite(b)
            if is_finite:
                pieces.append(f"{'L' if pen else 'M'}{LEFT + WIDTH * a:.1f} {HEIGHT * (1 - b):.1f}")
            # A line of no length, drawn with round caps, makes a point without neighbours visible.
            if is_finite and not pen:
                pieces.append("h0")
            pen = is_finite
        style = f"line s{line.colour % COLOURS}" + " dashed" * line.dashed
        parts.append(svg_path("".join(pieces), style, line.name))
    marks = [(LEFT + WIDTH * x / end, axes.format_x(x)) for x in ticks(0.0, end)]
    names = key((f"c{line.colour % COLOURS}", line.name, line.remark)
                for line in drawn if not line.dashed)  # fmt: skip
    return plot(parts, (low, high), marks, axes.title) + names


def bar_chart(
    counts: Sequence[float], labels: Sequence[str], axes: Axes, colour: int = 0
) -> Markup:
    """A chart with a bar for each count, side by side, and as many labels as there is room for."""
    top = max(counts, default=0.0) or 1.0
    step = WIDTH / max(len(counts), 1)
    # About 70 characters fit below the chart. If all labels are longer, every n-th one is written.
    every = max(1, math.ceil(len(labels) * max((len(t) for t in labels), default=1) / 70))
    parts = []
    for i, (count, label) in enumerate(zip(counts, labels, strict=True)):
        x, height = LEFT + i * step, HEIGHT * count / top
        style, title = f"c{colour % COLOURS}", f"{label}: {count:.4g}"
        parts.append(svg_rect(x + 0.08 * step, HEIGHT - height, 0.84 * step, height, style, title))
    marks = [(LEFT + (i + 0.5) * step, labels[i]) for i in range(0, len(labels), every)]
    return plot(parts, (0.0, top), marks, axes.title)


def plot(
    parts: Sequence[str],
    y_range: tuple[float, float],
    x_marks: Sequence[tuple[float, str]],
    title: str,
) -> Markup:
    """The parts on axes: `y_range` has ticks and a grid, `x_marks` are (pixel, text)."""
    (low, high), right = y_range, LEFT + WIDTH
    drawn = [svg_path(f"M{LEFT:.0f} 0V{HEIGHT:.0f}H{right:.0f}", "axis")]
    for value in ticks(low, high):
        y = HEIGHT * (1 - (value - low) / (high - low))
        words = format_count(value) if abs(value) >= 1e4 else f"{value:.5g}"
        drawn.append(svg_text(LEFT - 6, y + 4, words, "end"))
        drawn.append(svg_path(f"M{LEFT:.0f} {y:.1f}H{right:.0f}", "grid"))
    drawn += [svg_text(x, HEIGHT + 15, words, "middle") for x, words in x_marks]
    drawn.append(svg_text(LEFT, HEIGHT + 30, title, "start"))
    # The topmost label on the y axis reaches above it.
    size = (right + RIGHT, HEIGHT + BOTTOM + 8)
    return svg([*drawn, *parts], size, "chart plot", title, top=-8)


def ticks(low: float, high: float) -> list[float]:
    """Round values within [low, high], four to nine of them."""
    span = high - low
    # The step is 1, 2 or 5 times a power of ten: the largest with four of it within the span. The
    # 1e-9 keeps a tick that rounding would push past an end.
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (5, 2, 1) if span / (factor * step) >= 4 or factor == 1)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


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


# ---- Small charts without axes ----

MemoryCurve = tuple[str, NDArray[np.float64], NDArray[np.int64]]  # label, times, bytes
KEYS, LEAST_SHARE = 7, 0.005
SMALL_WIDTH, SMALL_HEIGHT = 600, 150


def stacked_bar(parts: Sequence[tuple[str, float, str]], description: str) -> Markup:
    """A bar of parts (what, share, colour class) side by side. The legend names the first parts, at
    most `KEYS` and those of at least `LEAST_SHARE`, and sums the others up."""
    pieces, entries, x = [], [], 0.0
    for what, share, colour in parts:
        percent = f"{100 * share:.1f} %"
        pieces.append(
            svg_rect(x, 0, max(1000 * share - 1.5, 0.5), 20, colour, f"{what}: {percent}")
        )
        entries.append((colour, what, percent))
        x += 1000 * share
    named = max(1, min(KEYS, sum(share >= LEAST_SHARE for _, share, _ in parts)))
    if len(parts) > named + 1:
        rest = sum(share for _, share, _ in parts[named:])
        entries[named:] = [("", f"{len(parts) - named} smaller", f"{100 * rest:.1f} %")]
    stretched = ' preserveAspectRatio="none"'
    return svg(pieces, (1000, 20), "stack", description, form=stretched) + key(entries)


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
    the peak; else the curve would lie flat.

    A curve is a staircase of at most `POINTS` steps. Each step shows the largest value within it,
    so that thinning never hides a peak.
    """
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        return Markup("<p>Memory was not recorded.</p>")
    top = max(float(sizes.max()) for _, _, sizes in curves) or 1.0
    shown = capacity <= 3 * top
    scale = 1.1 * max(top, capacity if shown else 0)
    drawn = [svg_path(f"M0 {SMALL_HEIGHT}H{SMALL_WIDTH}", "axis")]
    for label, times, sizes in curves:
        if len(times) > POINTS:
            edges = np.linspace(0, end_seconds, POINTS, endpoint=False)
            first = np.searchsorted(times, edges, side="right") - 1
            bounds = np.append(np.clip(first, 0, len(times) - 1), len(times) - 1)
            peaks = [sizes[a : b + 1].max() for a, b in pairwise(bounds.tolist())]
            times, sizes = edges, np.array(peaks, dtype=np.int64)
        x = SMALL_WIDTH * times / (end_seconds or 1.0)
        y = SMALL_HEIGHT * (1 - sizes / scale)
        steps = f"M{x[0]:.1f} {y[0]:.1f}"
        steps += "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(x[1:], y[1:], strict=True))
        steps += f"H{SMALL_WIDTH}"
        kind = "measured" if label == "measured" else "predicted"
        drawn.append(svg_path(f"{steps}V{SMALL_HEIGHT}H0Z", f"area {kind}"))
        drawn.append(svg_path(steps, kind, label))
    if shown:
        height = SMALL_HEIGHT * (1 - capacity / scale)
        drawn.append(svg_path(f"M0 {height:.1f}H{SMALL_WIDTH}", "capacity"))
        drawn.append(svg_text(4, height - 4, f"available {format_bytes(capacity)}"))
    height = SMALL_HEIGHT * (1 - top / scale)
    drawn += [
        svg_text(SMALL_WIDTH - 4, max(height - 4, 10.0), format_bytes(top), "end"),
        svg_text(SMALL_WIDTH - 4, SMALL_HEIGHT + 14, format_seconds(end_seconds), "end"),
        svg_text(0, SMALL_HEIGHT + 14, "0 s"),
    ]
    return svg(drawn, (SMALL_WIDTH, SMALL_HEIGHT + 18), "chart", description)


# ---- A colour of its own for every device ----
#
# The first seven are those of Okabe and Ito ("Color Universal Design", 2008), which people with a
# colour deficiency tell apart too. Each further colour is taken from a grid: the one whose least
# distance to all colours before it is largest, measured in OKLab (B. Ottosson, "A perceptual color
# space for image processing", 2020, https://bottosson.github.io/posts/oklab/). So a device keeps
# its colour however many devices there are. After the grid's some 600 colours they begin again.

LIGHT = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#a59b00")
DARK = ("#4a9fd8", "#eeb33b", "#2dbb92", "#ec7f3a", "#8fd0f5", "#dd9cc0", "#d8cf45")
LIGHTNESSES = {False: (0.42, 0.5, 0.58, 0.66, 0.74), True: (0.55, 0.63, 0.71, 0.79, 0.87)}
"""OKLab lightnesses of the grid on a light and on a dark page, well apart from the page's own."""
CHROMAS, HUES = (0.07, 0.12, 0.17), 48
"""The grid has these chromas, and this many hues around the circle."""
# Ottosson's matrices: from OKLab to the cube roots of cone responses, and from cone responses to
# linear sRGB.
_FROM_LAB = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.2914855480],
    ]
)
_FROM_CONES = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


@cache
def device_colours(count: int, *, dark: bool = False) -> tuple[str, ...]:
    """Colours #rrggbb of devices 0 to count - 1. O(count x grid)."""
    chosen = list(DARK if dark else LIGHT)[:count]
    if len(chosen) < count:
        angles = np.arange(HUES) * 2 * np.pi / HUES
        light, chroma, hue = np.meshgrid(LIGHTNESSES[dark], CHROMAS, angles, indexing="ij")
        lab = np.stack([light, chroma * np.cos(hue), chroma * np.sin(hue)], axis=-1).reshape(-1, 3)
        linear = (lab @ _FROM_LAB.T) ** 3 @ _FROM_CONES.T
        # A screen shows from 0 to 1 of each colour.
        linear = linear[((linear >= 0) & (linear <= 1)).all(axis=1)]
        # From linear RGB by the transfer function of sRGB.
        curved = 1.055 * linear ** (1 / 2.4) - 0.055
        shares = np.where(linear <= 0.0031308, 12.92 * linear, curved)
        grid = ["#" + "".join(f"{round(255 * s):02x}" for s in rgb) for rgb in shares.tolist()]
        spots = oklab(linear)
        # [grid] each colour's distance to the nearest one chosen so far, kept up to date.
        distances = np.full(len(grid), np.inf)
        for spot in oklab(linear_rgb(chosen)):
            distances = np.minimum(distances, np.linalg.norm(spots - spot, axis=1))
        for _ in range(min(count - len(chosen), len(grid))):
            best = int(distances.argmax())
            chosen.append(grid[best])
            distances = np.minimum(distances, np.linalg.norm(spots - spots[best], axis=1))
    return tuple(chosen[i % len(chosen)] for i in range(count))


def oklab(linear: Floats) -> Floats:
    """[colours, 3] OKLab of linear RGB."""
    return np.cbrt(linear @ np.linalg.inv(_FROM_CONES).T) @ np.linalg.inv(_FROM_LAB).T


def linear_rgb(colours: Sequence[str]) -> Floats:
    """[colours, 3] linear RGB of #rrggbb, by the transfer function of sRGB."""
    shares = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def device_styles(count: int) -> str:
    """Rules of a style sheet for `count` devices: properties `--d0` and so on, classes `d0` and so
    on that fill with them, and classes `m0` and so on for charts of one device's memory."""
    light, dark = (
        "".join(f"--d{i}:{colour};" for i, colour in enumerate(device_colours(count, dark=dark)))
        for dark in (False, True)
    )
    classes = "".join(
        f".d{i}{{fill:var(--d{i});background:var(--d{i})}}"
        f".m{i} .predicted{{stroke:var(--d{i})}}.m{i} .area.predicted{{fill:var(--d{i})}}"
        for i in range(count)
    )
    return (
        f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}{classes}\n"
        if count
        else ""
    )
