"""Accuracy against virtual time, a line a rule: a page of inline SVG without scripts.

python benchmarks/data_parallel/curves.py       draws curves.html from curves.csv
"""

import csv
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dovetail.training import analysis

Curve = tuple[str, list[float], list[float]]
"""name, seconds, accuracy"""
CHARTS = (("Equal workers", 10, 1.0), ("One worker 10 times slower", 1, 10.0))
"""Title, window, factor of worker 0's step times."""
WIDTH, HEIGHT, LEFT, BOTTOM = 620.0, 280.0, 44.0, 30.0
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em}"
    "text{font:11px system-ui,sans-serif}path{fill:none;stroke-width:1.6}"
    "line{stroke:#ddd}table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right}"
    "figure{margin:0}li{list-style:none;display:inline-block;margin-right:1em}ul{padding:0}"
)


def draw(folder: Path) -> None:
    """Write curves.html from the folder's curves.csv."""
    curves: dict[str, dict[str, Curve]] = {title: {} for title, _, _ in CHARTS}
    with (folder / "curves.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            rule = row["rule"]
            _, seconds, accuracy = curves[row["chart"]].setdefault(rule, (rule, [], []))
            seconds.append(float(row["seconds"]))
            accuracy.append(float(row["accuracy"]))
    charts = [
        (
            title,
            f"20 workers, window {window}, digits; time in normal minibatches, transfers free. "
            "Every rule trains the same samples; the synchronous one has no window.",
            list(curves[title].values()),
        )
        for title, window, _ in CHARTS
    ]
    (folder / "curves.html").write_text(page(charts))


def page(charts: Sequence[tuple[str, str, Sequence[Curve]]]) -> str:
    """A page of (title, text, curves)."""
    parts = [
        f"<h2>{escape(title)}</h2><p>{escape(text)}</p><figure>{chart(curves)}</figure>"
        for title, text, curves in charts
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Accuracy against time</title>'
        f"<style>{STYLE}</style><h1>Accuracy against virtual time</h1>{''.join(parts)}</html>\n"
    )


def chart(curves: Sequence[Curve]) -> str:
    end = max(seconds[-1] for _, seconds, _ in curves)
    parts = []
    for step in range(6):
        y = HEIGHT * (1 - step / 5)
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{20 * step} %</text>'
        )
        x = LEFT + WIDTH * step / 5
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT + 16:.1f}" text-anchor="middle">{end * step / 5:.0f}'
            "</text>"
        )
    keys = []
    for i, (name, seconds, accuracy) in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        points = "L".join(
            f"{LEFT + WIDTH * s / end:.1f} {HEIGHT * (1 - a):.1f}"
            for s, a in zip(seconds, accuracy, strict=True)
        )
        parts.append(f'<path d="M{points}" stroke="{colour}"><title>{escape(name)}</title></path>')
        keys.append(f'<li><span style="color:{colour}">&#9632;</span> {escape(name)}</li>')
    return (
        f'<svg viewBox="0 -8 {LEFT + WIDTH + 20:.0f} {HEIGHT + BOTTOM + 8:.0f}" role="img" '
        f'aria-label="accuracy against virtual time">{"".join(parts)}</svg>'
        f"<ul>{''.join(keys)}</ul>"
    )


def efficiencies(curves: Sequence[Curve]) -> list[list[str]]:
    """[curves][curves] E(row, column)"""
    return [
        [
            name,
            *(f"{analysis.temporal_efficiency(seconds, accuracy, s, a):.2f}" for _, s, a in curves),
        ]
        for name, seconds, accuracy in curves
    ]


if __name__ == "__main__":
    draw(Path(__file__).parent)
