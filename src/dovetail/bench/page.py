"""One self-contained page: a paper's table with ours beside it, row by row, and how it came about.

    head        who, what, and the figures that matter
    results     seconds, bounds, sizes; orderings, placements, methods     page_results.py
    learned     what learned methods reached, and with how much effort     learned_page.py
    notes       towers, curves, fit, what is ours, how it was made         page_notes.py

There is no script in it and nothing is fetched: style is allowed by its hash in a
Content-Security-Policy. Every name is foreign text and is escaped (`markup`).
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from dovetail.bench import tables
from dovetail.bench.cases import LEARNED, METHOD_OF
from dovetail.bench.figures import colour_of
from dovetail.bench.methods import HYPOTHESIS, PLAIN
from dovetail.bench.orderings import Ordering, format_step, is_oom, orderings_of
from dovetail.bench.records import Case, Column, Curve, Found, LearnedRun, Row, Tower, Work
from dovetail.bench.tables import span
from dovetail.machine import Machine, parse_machine
from dovetail.machine.presets import FITTED
from dovetail.reports.markup import Markup, cards, details, drawing, policy, row, table, text_of
from dovetail.reports.plots import ticks
from dovetail.runtime.files import write_atomically
from dovetail.units import (
    format_bandwidth,
    format_bytes,
    format_capacity,
    format_count,
    format_seconds,
)

# Charts of the papers' figures as inline SVG. Colours come from the page's style sheet, by class.
#
# load_chart   RL17's figures 8 and 9: a bar a device and a channel, as long as its seconds
# loss_chart   RL17's figures 6 and 7: loss against simulated time, a line a curve


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


# The notes on the page: towers, training curves, the machine's fit, what is ours, how made.


SYNCHRONOUS, ASYNCHRONOUS = "synchronous towers", "asynchronous towers"  # `LearningCurve.name`
TOWERS_TEXT = (
    "The paper compares its placement with data parallelism on Inception-V3 (section 4.4): batch "
    "128 as 4 towers of 32, parameters and data reading on the CPU. Its placement trains 19.7 % "
    "faster than synchronous towers; asynchronous towers take less time a step and converge slower."
)
CURVES_TEXT = (
    "As the paper's figures 6 and 7. Losses are real, of small networks trained on one core: "
    "Inception-V3 a tenth as wide at 75 x 75 on scikit-learn's handwritten digits with RMSProp, "
    "4 x 16 images a step; NMT 64 wide that learns to write 8 words backwards with Adam, 4 x 16 "
    "sentences a step. Seconds of a step are simulated on the full-size graphs. Expert and planned "
    "compute the same numbers, so that their losses are the same step by step; each line is the "
    "mean of up to 20 steps, and ends where the first of them does."
)
FIT_TEXT = {
    "rl17": (
        "Peaks, bandwidths and capacities are the hardware's. Seconds per op, the share of the "
        "peak that is reached, and what of it convolutions reach are fitted to the paper's "
        "columns 1 CPU and 1 GPU, and to nothing else."
    ),
    "gdp": (
        "Peaks, bandwidths and capacities are the hardware's. One factor on all compute seconds is "
        "fitted such that the column human comes out in the mean, and nothing else is fitted."
    ),
}


def towers_section(name: str, found: Sequence[Tower], learned: Sequence[Curve]) -> Markup:
    """The section on data-parallel towers; none for a paper without them."""
    if name != "rl17" and not found:
        return Markup("")
    rows = [
        (
            tower.title,
            tower.kind,
            f"{tower.replicas} x {tower.batch}",
            tower.reason or "none" if tower.seconds is None else format_seconds(tower.seconds),
            _rate(tower),
        )
        for tower in found
    ]
    head = ("network", "towers", "replicas x batch", "seconds of a step", "examples per second")
    shown = table(head, rows) if rows else "<p>Not yet run.</p>"
    said = "".join(f"<p>{text_of(text)}</p>" for text in _against_towers(learned))
    return _section("Data-parallel towers", f"<p>{text_of(TOWERS_TEXT)}</p>{shown}{said}")


def _against_towers(learned: Sequence[Curve]) -> Iterator[str]:
    """The paper's two statements on seconds, in ours: of a step of all examples, planned or not,
    and of towers."""
    of_title: dict[str, dict[str, float]] = {}
    for curve in learned:
        of_title.setdefault(curve.title, {})[curve.name] = curve.step_seconds
    for title, seconds in of_title.items():
        if SYNCHRONOUS not in seconds:
            continue
        base = seconds[SYNCHRONOUS]
        for name in ("planned", "expert", ASYNCHRONOUS):
            if name in seconds:
                change = 100 * (1 - seconds[name] / base)
                yield (
                    f"{title}, ours: a step of {'' if name == ASYNCHRONOUS else 'all examples, '}"
                    f"{name}, takes {format_seconds(seconds[name])}, {abs(change):.1f} % "
                    f"{'less' if change >= 0 else 'more'} than synchronous towers."
                )


def _rate(tower: Tower) -> str:
    if not tower.seconds:
        return ""
    return f"{tower.replicas * tower.batch / tower.seconds:.1f}"


def curves_section(name: str, found: Sequence[Curve]) -> Markup:
    """The section on loss against simulated time; none for a paper without it."""
    if name != "rl17" and not found:
        return Markup("")
    titles = dict.fromkeys(curve.title for curve in found)
    charts = "".join(
        f"<h3>{text_of(title)}</h3>"
        + loss_chart([curve for curve in found if curve.title == title], f"{title}: loss")
        + _losses([curve for curve in found if curve.title == title])
        for title in titles
    )
    text = f"<p>{text_of(CURVES_TEXT)}</p>{charts or '<p>Not yet run.</p>'}"
    return _section("Loss against simulated time", text)


def _losses(found: Sequence[Curve]) -> Markup:
    """The same in figures: where each curve is when the fastest ends, and at its own end."""
    usable = [curve for curve in found if curve.losses and curve.step_seconds > 0]
    if not usable:
        return Markup("")
    end = min(curve.step_seconds * len(curve.losses) for curve in usable)
    rows = []
    for curve in usable:
        steps = min(len(curve.losses), max(1, math.floor(end / curve.step_seconds * (1 + 1e-9))))
        rows.append((
            curve.name,
            format_seconds(curve.step_seconds),
            f"{steps:,}",
            f"{_mean(curve.losses[:steps]):.3f}",
            f"{_mean(curve.losses):.3f}",
            f"{len(curve.losses):,}",
        ))  # fmt: skip
    head = ("", "seconds of a step", f"steps in {format_seconds(end)}", "loss then",
            "loss after all steps", "all steps")  # fmt: skip
    return Markup(table(head, rows) + _convergence(usable))


def _convergence(found: Sequence[Curve]) -> str:
    """Whether asynchronous towers converge slower, step by step, as the paper says."""
    after = {
        kind: _mean(curve.losses)
        for curve in found
        for kind in (SYNCHRONOUS, ASYNCHRONOUS)
        if curve.name == kind
    }
    if len(after) < 2:
        return ""
    slower = after[ASYNCHRONOUS] > after[SYNCHRONOUS]
    text = (
        f"After all steps the loss of asynchronous towers is {after[ASYNCHRONOUS]:.3f}, of "
        f"synchronous ones {after[SYNCHRONOUS]:.3f}: step by step they converge "
        f"{'slower, as' if slower else 'no slower here, other than'} in the paper. "
    )
    if not slower:
        text += (
            "They make four updates a step where the others make one, at the same learning rate, "
            "and stay in step: no gradient is older than one step."
        )
    return f"<p>{text_of(text)}</p>"


def _mean(losses: Sequence[float]) -> float:
    last = losses[-20:]
    return sum(last) / len(last)


def fit(name: str, cases: Sequence[Case]) -> Markup:
    """The machines, what of them was fitted, and what the fit leaves over."""
    found = _fitted(name)
    parts = [f"<p>{text_of(FIT_TEXT[name])}</p>"]
    if found.get("provisional"):
        parts.append("<p><b>Provisional: the fit has not been made yet.</b></p>")
    if found.get("figures"):
        parts.append(_residuals(found))
    more = found.get("without_convolutions_apart")
    if isinstance(more, Mapping) and more.get("figures"):
        told = "The same without an efficiency of their own for convolutions"
        parts.append(details(told, _residuals(more)))
    if found.get("command"):
        parts.append(f"<p>Made by <code>{text_of(str(found['command']))}</code>.</p>")
    largest = max(cases, key=lambda case: case.gpus, default=None)
    if largest is not None:
        parts.append(_machine(parse_machine(largest.machine)))
    return Markup("".join(parts))


def _fitted(name: str) -> dict[str, Any]:
    try:
        fitted = json.loads(FITTED.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = fitted.get(name) if isinstance(fitted, dict) else None
    return found if isinstance(found, dict) else {}


def _residuals(found: Mapping[str, Any]) -> str:
    figures = found["figures"]
    parameters = found.get("parameters")
    met = f"{len(figures)} figures met {parameters} parameters." if parameters else ""
    if parameters == len(figures):
        met += (
            " As many of one as of the other: the fit is exact, and says nothing of how good the "
            "model is. What it predicts are the other columns."
        )
    rows = [
        (
            str(figure["model"]),
            str(figure["machine"]),
            str(figure["column"]),
            format_seconds(figure["published_seconds"]),
            format_seconds(figure["simulated_seconds"]),
            f"{figure['simulated_seconds'] / figure['published_seconds']:.3f} x",
        )
        for figure in figures
    ]
    head = ("network", "machine", "column", "paper", "simulated", "ratio")
    return f"<p>{met}</p>" + table(head, rows)


def _machine(machine: Machine) -> str:
    """One line for each model of device, and for each kind of link."""
    models = {device.model: device for device in machine.devices}
    counts = {model: sum(d.model == model for d in machine.devices) for model in models}
    rows = [
        (
            f"{counts[model]} x {model}",
            format_capacity(device.memory_bytes),
            ", ".join(
                f"{dtype} {format_count(rate, 'FLOP/s')}"
                for dtype, rate in device.flops_per_second.items()
            ),
            ", ".join(
                f"{kind or 'all else'} {100 * share:.1f} %"
                for kind, share in sorted(device.efficiencies.items(), reverse=True)
            ),
            format_bandwidth(device.bandwidth_bytes_per_second),
            format_seconds(device.op_overhead_seconds),
        )
        for model, device in models.items()
    ]
    head = ("device", "memory", "peak", "reached", "memory bandwidth", "per op")
    of = {device.name: device.model for device in machine.devices}
    links = {
        f"{of[link.source]} to {of[link.destination]}": (
            format_bandwidth(link.bandwidth_bytes_per_second),
            format_seconds(link.latency_seconds),
        )
        for link in machine.links
    }
    title = f"<h3>{text_of(machine.name)}</h3>"
    ends = [(name, *rates) for name, rates in links.items()]
    return title + table(head, rows) + table(("link", "bandwidth", "latency"), ends)


def ours(cases: Sequence[Case]) -> Markup:
    """Sizes that the paper does not give, network by network."""
    told = [(case.title, case.ours) for case in cases if case.ours]
    if not told:
        return Markup("<p>The paper gives all sizes.</p>")
    text = "<p>Sizes and choices that the paper does not give; these are ours.</p>"
    return Markup(text + table(("row", "ours"), told, "scroll left"))


def made_section(name: str, rows: Sequence[Row], facts: Sequence[tuple[str, str]]) -> Markup:
    """The command, and how long the rows took."""
    given = dict(facts) or {"command": f"dovetail bench {name}"}
    spent = sum(row.seconds for row in rows)
    given["all rows together"] = f"{format_seconds(spent)} of computing, captures included"
    return table((), given.items(), "facts")


def _section(title: str, content: str) -> Markup:
    return Markup(f"<section><h2>{text_of(title)}</h2>{content}</section>")


# The results on the page: seconds beside the paper's, bounds, sizes, orderings, plans, methods.


HYPOTHESIS_TEXT = (
    "Hypothesis, not stated by the paper: variables and gradient sums pinned to the CPU, links at "
    "3.5 GB/s. Nothing is fitted to it."
)
NAMES = {PLAIN: "ours, plain costs", HYPOTHESIS: "ours, hypothesis"}
NOT_RUN = "not yet run"
EXPERT = "expert"
OUTCOMES = {
    True: Markup('<span class="yes">yes</span>'),
    False: Markup('<span class="no">no</span>'),
    None: Markup('<span class="open">open</span>'),
}


@dataclass(frozen=True)
class Results:
    """A table's cases, and the rows that are done by key."""

    name: str
    cases: tuple[Case, ...]
    rows: Mapping[str, Row]

    @property
    def done(self) -> list[tuple[Case, Row]]:
        return [(case, self.rows[case.key]) for case in self.cases if case.key in self.rows]

    @property
    def columns(self) -> list[str]:
        """Our columns, in the order in which rows have them."""
        return list(dict.fromkeys(name for _, row in self.done for name in row.columns))

    @property
    def paper_columns(self) -> list[str]:
        """The paper's columns that any case has, learned ones last."""
        named = [name for case in self.cases if case.published for name in case.published.seconds]
        learned = LEARNED[self.name]
        return sorted(dict.fromkeys(named), key=lambda name: METHOD_OF[name] in learned)


def gap(column: Column) -> float | None:
    """How far the best is above the bound, as a share of the bound."""
    best = _seconds_of(column, column.best)
    return best / column.bound - 1 if best is not None and column.bound > 0 else None


def over_expert(column: Column) -> float | None:
    """How many times as long the expert's step takes as the best; None where either is lacking."""
    best, expert = _seconds_of(column, column.best), _seconds_of(column, EXPERT)
    return expert / best if best and expert else None


def reading(results: Results) -> Markup:
    """What the table's lines are."""
    text = (
        "<p>First line of a row: the paper's seconds. Below it ours, simulated, and how many times "
        "the paper's they are. OOM: out of memory. Of a method that learns: the training of the "
        "median, and from the best to the worst; best of ours is of those that do not learn.</p>"
    )
    if HYPOTHESIS in results.columns:
        text += f"<p><em>{text_of(HYPOTHESIS_TEXT)}</em></p>"
    return Markup(text)


def seconds(results: Results) -> Markup:
    """The paper's table, ours below each of its rows."""
    columns = results.paper_columns
    head = ["", *columns, "best of ours", "bound", "expert over best"]
    bodies = []
    for case in results.cases:
        lines = [row([case.title, *(_theirs(case, name) for name in columns), "", "", ""],
                     style="paper")]  # fmt: skip
        found = results.rows.get(case.key)
        if found is None:
            lines.append(row([NOT_RUN, *[""] * (len(columns) + 3)], style="ours"))
        for name, column in found.columns.items() if found else ():
            style = f"ours {name}" if name == HYPOTHESIS else "ours"
            ours = [_ours(case, column, of) for of in columns]
            lines.append(row([NAMES.get(name, name), *ours, *_ends(column)], style=style))
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return Markup(
        f'<div class="scroll seconds"><table><thead>{row(head, "th scope=col")}</thead>'
        f"{''.join(bodies)}</table></div>"
    )


def _theirs(case: Case, name: str) -> str:
    if case.published is None or name not in case.published.seconds:
        return "-"
    found = case.published.seconds[name]
    hours = case.published.hours.get(name)
    text = text_of(format_step(found))
    return Markup(f"{text} <small>search: {text_of(hours)}</small>") if hours else Markup(text)


def _ours(case: Case, column: Column, name: str) -> str:
    found = column.methods.get(METHOD_OF[name])
    if found is None or found.seconds is None:
        return _lack(found)
    published = case.published.seconds.get(name) if case.published else None
    text = format_step(found.seconds)
    if published:
        text += f" <small>{found.seconds / published:.2f} x</small>"
    runs = column.learned.get(METHOD_OF[name], ())
    if len(runs) > 1:
        text += f" <small>{format_span(runs)}</small>"
    return Markup(text)


def format_span(runs: Sequence[LearnedRun]) -> str:
    """From the best run to the worst: "0.298 s to 0.305 s"."""
    ends = [format_step(seconds if math.isfinite(seconds) else None) for seconds in span(runs)]
    return " to ".join(ends)


def _lack(found: Found | None) -> str:
    if found is None:
        return NOT_RUN
    return "OOM" if is_oom(found) else "none"


def _ends(column: Column) -> list[str]:
    best = _seconds_of(column, column.best)
    if best is None:
        return ["nothing fits", format_step(column.bound), ""]
    gain, above = over_expert(column), gap(column)
    distance = "" if above is None else f" <small>{100 * above:+.0f} %</small>"
    return [
        Markup(f"{format_step(best)} <small>{text_of(column.best)}</small>"),
        Markup(format_step(column.bound) + distance),
        "" if gain is None else f"{gain:.2f} x",
    ]


def bounds(results: Results) -> Markup:
    """Best, bound and expert of every row and column, with what proves the bound."""
    rows = []
    for case, found in results.done:
        for name, column in found.columns.items():
            best, expert = _seconds_of(column, column.best), _seconds_of(column, EXPERT)
            above, gain = gap(column), over_expert(column)
            rows.append((
                f"{case.title}, {NAMES.get(name, name).removeprefix('ours, ')}",
                column.best or "nothing fits",
                _or(best, "-"),
                format_step(column.bound),
                "" if above is None else f"{100 * above:.1f} %",
                _or(expert, _lack(column.methods.get(EXPERT))),
                "" if gain is None else f"{gain:.2f} x",
                column.proof,
            ))  # fmt: skip
    if not rows:
        return Markup(f"<p>{NOT_RUN.capitalize()}.</p>")
    head = ("row", "best method", "best", "bound", "above the bound", "expert", "expert over best",
            "the bound is proven by")  # fmt: skip
    return table(head, rows)


def sizes(results: Results) -> Markup:
    """Ops and groups beside the paper's; each network once."""
    rows, seen = [], set()
    for case in results.cases:
        if (case.model, case.train) in seen:
            continue
        seen.add((case.model, case.train))
        published, found = case.published, results.rows.get(case.key)
        theirs = (published.ops, published.groups) if published else (None, None)
        mine = (
            (f"{found.ops:,}", f"{found.groups:,}", format_count(found.flops, "FLOP"),
             format_bytes(found.parameter_bytes))
            if found
            else (NOT_RUN, "", "", "")
        )  # fmt: skip
        title = case.title.removesuffix(f", {case.gpus} GPUs")
        given = [f"{n:,}" if n is not None else "not given" for n in theirs]
        rows.append((title, given[0], mine[0], given[1], mine[1], mine[2], mine[3],
                     f"{case.model} --train {case.train}"))  # fmt: skip
    head = ("network", "ops, paper", "ops, ours", "groups, paper", "groups, ours", "of a step",
            "parameters", "MODEL")  # fmt: skip
    return table(head, rows)


def orderings_section(
    results: Results, found: Mapping[tuple[str, str], Sequence[Ordering]]
) -> Markup:
    """Per row each ordering of the paper, whether it is ours, and why not."""
    parts = []
    for case, row_of in results.done:
        parts.append(f"<h3>{text_of(case.title)}</h3>")
        for name in row_of.columns:
            shown = _ordering_table(found.get((case.key, name), ()))
            parts.append(_marked(name, shown))
    return Markup("".join(parts) + _missing(results))


def _missing(results: Results) -> str:
    titles = [case.title for case in results.cases if case.key not in results.rows]
    return f"<p>{text_of(NOT_RUN.capitalize() + ': ' + '; '.join(titles))}.</p>" if titles else ""


def _ordering_table(found: Sequence[Ordering]) -> str:
    if not found:
        return "<p>The paper has no figures to order.</p>"
    head = ("the paper's ordering", "its seconds", "ours", "holds", "why, or a remark")
    rows = [
        (one.statement, one.published, one.found, OUTCOMES[one.holds], one.why) for one in found
    ]
    return table(head, rows, "scroll why")


def plans(results: Results) -> Markup:
    """Pictures and loads of the expert's and the best plan."""
    parts = []
    for case, found in results.done:
        columns = []
        for name, column in found.columns.items():
            figures = [
                _figure(case, column, method) for method in column.shown
            ] or ["<p>No plan fits.</p>"]  # fmt: skip
            columns.append(_marked(name, "".join(figures)))
        parts.append(details(case.title, "".join(columns)))
    return Markup("".join(parts) + _missing(results))


def _figure(case: Case, column: Column, method: str) -> str:
    work = column.shown[method]
    role = "expert" if method == EXPERT else f"best: {method}"
    if method == column.best == EXPERT:
        role = "expert, which is the best"
    seconds = _or(_seconds_of(column, method), "OOM")
    chart = load_chart(work, f"{case.title}, {role}: seconds by device and channel")
    return (
        f"<figure><figcaption><b>{text_of(role)}</b>, {seconds} a step</figcaption>"
        f"{drawing(work.picture)}{chart}</figure>"
    )


def methods(results: Results) -> Markup:
    """Every method of every row: seconds, memory, how long it searched."""
    parts = []
    for case, found in results.done:
        tables = "".join(
            _marked(name, _method_table(column, LEARNED[results.name] if name == PLAIN else ()))
            for name, column in found.columns.items()
        )
        parts.append(details(case.title, tables))
    return Markup("".join(parts) + _missing(results))


def _method_table(column: Column, learned: Sequence[str]) -> str:
    best = _seconds_of(column, column.best)
    rows = []
    for method, found in column.methods.items():
        peaks = found.peak_memory_bytes
        fullest = max(peaks, key=lambda name: peaks[name], default="")
        ratio = f"{found.seconds / best:.3f} x" if best and found.seconds is not None else ""
        rows.append((
            method + (" (best)" if method == column.best else ""),
            _or(found.seconds, _lack(found)),
            ratio,
            f"{format_bytes(peaks[fullest])} on {fullest}" if fullest else "",
            format_seconds(found.search_seconds),
            found.reason,
        ))  # fmt: skip
    rows += [(name, NOT_RUN, "", "", "", "") for name in learned if name not in column.methods]
    head = ("method", "seconds of a step", "to the best", "fullest device", "search took", "")
    return table(head, rows)


def _marked(name: str, content: str) -> str:
    """A column's content, the hypothesis's set apart."""
    title = f"<h4>{text_of(NAMES.get(name, name).removeprefix('ours, ').capitalize())}</h4>"
    if name == HYPOTHESIS:
        return f'<div class="hypothesis-box">{title}{content}</div>'
    return title + content


def _seconds_of(column: Column, method: str) -> float | None:
    found = column.methods.get(method)
    return None if found is None else found.seconds


def _or(seconds: float | None, text: str) -> str:
    return text if seconds is None else format_step(seconds)


# What learned methods reached, on the page.


HOW = {
    "rl17": (
        "Every training begins with nothing but the graph, on the groups of RL17's rule. Its "
        "placements are simulated; the paper's were run, for 12 to 27 hours a row. To reach: the "
        "best baseline less the paper's margin of RL over its own, or less 80 % of the head room "
        "that auto, which does not learn, finds over ours, if that is less."
    ),
    "gdp": (
        "Every training begins with nothing but the graph: GDP-one is not the policy that comes "
        "with the package. GDP and HDP place the same groups; against HDP only as many of GDP's "
        "placements count as HDP had. Search effort is how many placements HDP evaluates up to its "
        "best, over how many GDP evaluates up to one as good, seed by seed; repeats count, for a "
        "real run would cost again. The paper's is of time, with six runs where ours are as many "
        "as stand there."
    ),
}


def learned(results: Results) -> Markup:
    """The section on what was learned; it says so where nothing was."""
    found = tables.tables_of(results.name, results.done)
    parts = [f"<p>{text_of(HOW[results.name])}</p>"]
    for title, (head, rows) in found:
        parts += [f"<h3>{text_of(title)}</h3>", table(head, rows)]
    if not found:
        parts.append("<p>No training was run.</p>")
    return Markup(f"<section><h2>Learned methods</h2>{''.join(parts)}</section>")


def cards_of(results: Results) -> list[tuple[str, str, str]]:
    """(what, figure, remark) of what was learned."""
    return tables.verdicts(results.name, results.done)


@dataclass(frozen=True)
class _Paper:
    title: str
    citation: str


PAPERS = {
    "rl17": _Paper(
        "RL17's table of device placement, and ours",
        "A. Mirhoseini, H. Pham, Q. V. Le, B. Steiner, R. Larsen, Y. Zhou, N. Kumar, M. Norouzi, "
        "S. Bengio, J. Dean: Device Placement Optimization with Reinforcement Learning. ICML 2017, "
        "https://arxiv.org/abs/1706.04972, tables 1 and 2, figures 4 to 9.",
    ),
    "gdp": _Paper(
        "GDP's table of device placement, and ours",
        "Y. Zhou, S. Roy, A. Abdolrashidi, D. Wong, P. C. Ma, Q. Xu, M. Zhong, H. Liu, A. Goldie, "
        "A. Mirhoseini, J. Laudon: GDP: Generalized Device Placement for Dataflow Graphs. 2019, "
        "https://arxiv.org/abs/1910.01578, table 1.",
    ),
}


def write_page(
    name: str,
    cases: Sequence[Case],
    rows: Sequence[Row],
    towers: Sequence[Tower],
    curves: Sequence[Curve],
    path: str | os.PathLike[str],
    *,
    made: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page of table `name` to `path`, whole or not at all. Cases without a row are shown
    as not yet run.

    made   (what, text) of how it was made: the command, the machine that ran it

    Raises `UnwritableError`.
    """
    text = render(name, cases, rows, towers, curves, made=made)
    # A name may hold a lone surrogate, which UTF-8 cannot: it is shown as "?".
    write_atomically(path, text.encode("utf-8", "replace"))


def render(
    name: str,
    cases: Sequence[Case],
    rows: Sequence[Row],
    towers: Sequence[Tower],
    curves: Sequence[Curve],
    *,
    made: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text."""
    paper = PAPERS[name]
    results = Results(name, tuple(cases), {row.key: row for row in rows})
    orderings = _orderings(results)
    style = "\n".join(
        resources.files(package).joinpath("assets", file).read_text("utf-8")
        for package, file in (("dovetail.reports", "page.css"), ("dovetail.bench", "bench.css"))
    )
    parts = {
        "policy": policy(style),
        "title": escape(paper.title),
        "paper": escape(paper.citation),
        "style": style,
        "cards": _cards(results, orderings),
        "reading": reading(results),
        "seconds": seconds(results),
        "learned": learned(results),
        "bounds": bounds(results),
        "sizes": sizes(results),
        "orderings": orderings_section(results, orderings),
        "plans": plans(results),
        "methods": methods(results),
        "towers": towers_section(name, towers, curves),
        "curves": curves_section(name, curves),
        "fit": fit(name, cases),
        "ours": ours(cases),
        "made": made_section(name, rows, made),
    }
    template = resources.files("dovetail.bench").joinpath("assets", "bench.html").read_text("utf-8")
    # One pass over the template: what is filled in is not searched again.
    pieces = template.split("@@")
    return "".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces))


def _orderings(results: Results) -> dict[tuple[str, str], tuple[Ordering, ...]]:
    """(row, column) -> its orderings."""
    return {
        (case.key, column): orderings_of(case, row, column, parse_machine(case.machine))
        for case, row in results.done
        for column in row.columns
    }


def _cards(results: Results, orderings: dict[tuple[str, str], tuple[Ordering, ...]]) -> Markup:
    items = [("rows", f"{len(results.done)} of {len(results.cases)}", "those that are done")]
    for column in results.columns:
        known = [
            ordering.holds
            for (_, of), found in orderings.items()
            for ordering in found
            if of == column and ordering.holds is not None
        ]
        if known:
            of_whom = "plain costs" if column == "plain" else column
            items.append((f"orderings that hold, {of_whom}", f"{sum(known)} of {len(known)}",
                          "the paper's, in our figures"))  # fmt: skip
    plain = [row.columns["plain"] for _, row in results.done if "plain" in row.columns]
    gains = [gain for gain in map(over_expert, plain) if gain is not None]
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        items.append(("best over expert", f"{mean:.2f} x",
                      f"geometric mean of {len(gains)} rows, {min(gains):.2f} to "
                      f"{max(gains):.2f}"))  # fmt: skip
    gaps = [gap for gap in map(gap, plain) if gap is not None]
    if gaps:
        near = sum(gap <= 0.15 for gap in gaps)
        items.append(("within 15 % of the bound", f"{near} of {len(gaps)}",
                      f"rows; {100 * min(gaps):.1f} % to {100 * max(gaps):.1f} %"))  # fmt: skip
    return cards([*items, *cards_of(results)])
