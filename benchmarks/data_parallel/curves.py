"""Accuracy against virtual time, a line a rule: a page of inline SVG without scripts."""

from collections.abc import Sequence
from html import escape

from dovetail.training.analysis import temporal_efficiency

Curve = tuple[str, list[float], list[float]]
"""name, seconds, accuracy"""
WIDTH, HEIGHT, LEFT, BOTTOM = 620.0, 280.0, 44.0, 30.0
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em}"
    "text{font:11px system-ui,sans-serif}path{fill:none;stroke-width:1.6}"
    "line{stroke:#ddd}table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right}"
    "figure{margin:0}li{list-style:none;display:inline-block;margin-right:1em}ul{padding:0}"
)


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
        [name, *(f"{temporal_efficiency(seconds, accuracy, s, a):.2f}" for _, s, a in curves)]
        for name, seconds, accuracy in curves
    ]
