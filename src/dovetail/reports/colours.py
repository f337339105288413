"""Chooses a colour of its own for every device, for any number of devices.

The first seven are those of Okabe and Ito ("Color Universal Design", 2008), which people with a
colour deficiency tell apart too. Each further colour is taken from a grid: the one whose least
distance to all colours before it is largest, measured in OKLab (B. Ottosson, "A perceptual color
space for image processing", 2020, https://bottosson.github.io/posts/oklab/). So a device keeps its
colour however many devices there are. After the grid's some 600 colours they begin again.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LIGHT = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#a59b00")
DARK = ("#4a9fd8", "#eeb33b", "#2dbb92", "#ec7f3a", "#8fd0f5", "#dd9cc0", "#d8cf45")
LIGHTNESSES = {False: (0.42, 0.5, 0.58, 0.66, 0.74), True: (0.55, 0.63, 0.71, 0.79, 0.87)}
"""OKLab lightnesses of the grid on a light and on a dark page, well apart from the page's own."""
CHROMAS, HUES = (0.07, 0.12, 0.17), 48
"""The grid has these chromas, and this many hues around the circle."""


@cache
def device_colours(count: int, *, dark: bool = False) -> tuple[str, ...]:
    """Colours #rrggbb of devices 0 to count - 1. O(count x grid)."""
    chosen = list(DARK if dark else LIGHT)[:count]
    if len(chosen) < count:
        grid = _grid(dark)
        spots = _oklab(grid)
        # [grid] each colour's distance to the nearest one chosen so far, kept up to date.
        distances = np.full(len(grid), np.inf)
        for spot in _oklab(_rgb(chosen)):
            distances = np.minimum(distances, np.linalg.norm(spots - spot, axis=1))
        for _ in range(min(count - len(chosen), len(grid))):
            best = int(distances.argmax())
            chosen.append(_hex(grid[best]))
            distances = np.minimum(distances, np.linalg.norm(spots - spots[best], axis=1))
    return tuple(chosen[i % len(chosen)] for i in range(count))


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


def _grid(dark: bool) -> Floats:
    """[colours, 3] linear RGB of the grid's colours that a screen can show."""
    hues = np.arange(HUES) * 2 * np.pi / HUES
    light, chroma, hue = np.meshgrid(LIGHTNESSES[dark], CHROMAS, hues, indexing="ij")
    lab = np.stack([light, chroma * np.cos(hue), chroma * np.sin(hue)], axis=-1).reshape(-1, 3)
    linear = (lab @ _FROM_LAB.T) ** 3 @ _FROM_CONES.T
    return np.asarray(linear[((linear >= 0) & (linear <= 1)).all(axis=1)])


def _oklab(linear: Floats) -> Floats:
    """[colours, 3] OKLab of linear RGB."""
    return np.cbrt(linear @ np.linalg.inv(_FROM_CONES).T) @ np.linalg.inv(_FROM_LAB).T


def _rgb(colours: list[str]) -> Floats:
    """[colours, 3] linear RGB of #rrggbb."""
    shares = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def _hex(linear: Floats) -> str:
    shares = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * share):02x}" for share in shares.tolist())


# Ottosson's matrices: from OKLab to the cube roots of cone responses, and from cone responses to
# linear sRGB. The constants in `_rgb` and `_hex` are those of sRGB's transfer function.
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
