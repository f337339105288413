"""The notes on the page: towers, training curves, the machine's fit, what is ours, how made."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.bench.charts import loss_chart
from dovetail.bench.records import Case, Curve, Row, Tower
from dovetail.machine import Machine, parse_machine
from dovetail.machine.presets import FITTED
from dovetail.reports.markup import Markup, details, table, text_of
from dovetail.units import (
    format_bandwidth,
    format_capacity,
    format_count,
    format_seconds,
)

SYNCHRONOUS, ASYNCHRONOUS = "synchronous towers", "asynchronous towers"  # as `Curve.name` says
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


def towers(name: str, found: Sequence[Tower], learned: Sequence[Curve]) -> Markup:
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


def curves(name: str, found: Sequence[Curve]) -> Markup:
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


def made(name: str, rows: Sequence[Row], facts: Sequence[tuple[str, str]]) -> Markup:
    """The command, and how long the rows took."""
    given = dict(facts) or {"command": f"dovetail bench {name}"}
    spent = sum(row.seconds for row in rows)
    given["all rows together"] = f"{format_seconds(spent)} of computing, captures included"
    return table((), given.items(), "facts")


def _section(title: str, content: str) -> Markup:
    return Markup(f"<section><h2>{text_of(title)}</h2>{content}</section>")
