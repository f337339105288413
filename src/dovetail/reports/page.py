"""One self-contained web page: timelines, graph, memory, methods and what bounds the plan.

Nothing is fetched: style and scripts are the files of `assets/`, allowed by their hashes in a
Content-Security-Policy, and the data is JSON in the page. Every name in it is foreign: here it
goes through `html.escape`, in the JSON through `payload.to_script`, and the scripts write text
with `textContent` or onto a canvas, never as markup.
"""

import base64
import hashlib
import os
from collections.abc import Iterable
from html import escape
from importlib import resources

import numpy as np

from dovetail.plans import Plan, capacities_of, describe_gap, format_value
from dovetail.reports import charts, payload
from dovetail.reports.colours import device_styles
from dovetail.reports.filling import fill, filling_chart, throughput
from dovetail.reports.folding import Folds, fold
from dovetail.reports.layout import draw
from dovetail.reports.limits import Limits, explain, find_limits, shares
from dovetail.reports.records import Report, utilisation
from dovetail.reports.tables import found_after, loads_of, plan_facts, run_rows
from dovetail.runtime.files import write_atomically
from dovetail.timeline import Timeline
from dovetail.units import (
    BEYOND_ANY_BYTES,
    format_bandwidth,
    format_bytes,
    format_capacity,
    format_count,
    format_seconds,
    format_shares,
)

SCRIPTS = ("common.js", "timeline.js", "folds.js", "graph.js", "page.js")
MOST_ROWS = 1500
"""Of the table of modules by device: deeper modules than fit are left out of it."""


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`, whole or not at all. Raises `UnwritableError`."""
    # A name may hold a lone surrogate, which UTF-8 cannot: it is shown as "?".
    write_atomically(path, render(report).encode("utf-8", "replace"))


def render(report: Report) -> str:
    """The page as text. O(spans + reads); 100,000 spans make less than 3 MB."""
    limits = [find_limits(timeline, report.graph) for _, timeline in report.timelines]
    folds = fold(report.graph, report.plan)
    style = _asset("page.css") + device_styles(len(report.plan.machine.devices))
    script = "\n".join(_asset(name) for name in SCRIPTS)
    data = payload.pack(report, limits, draw(report.graph, report.plan), folds)
    parts = {
        "policy": _policy(style, script),
        "title": escape(f"{report.model or 'plan'} on {report.plan.machine.name}"),
        "style": style,
        "cards": _cards(report),
        "limits": "".join(
            _limits(name, limit, timeline, report.plan)
            for (name, timeline), limit in zip(report.timelines, limits, strict=True)
        ),
        "run": _run(report),
        "devices": _devices(report),
        "methods": _methods(report.plan),
        "memory": _memory(report, folds),
        "filling": _filling(report),
        "layers": _layers(report.plan, folds),
        "machine": _machine(report.plan),
        "facts": _table((), plan_facts(report.plan, report.graph), "facts"),
        "data": payload.to_script(data),
        "script": script,
    }
    # One pass over the template: what is filled in is not searched again.
    pieces = _asset("page.html").split("@@")
    return "".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files("dovetail.reports").joinpath("assets", name).read_text("utf-8")


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and no request at all."""
    allowed = (_digest(text) for text in (style, script))
    return "default-src 'none'; style-src '{}'; script-src '{}'; base-uri 'none'".format(*allowed)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def _cards(report: Report) -> str:
    plan = report.plan
    cards = [(f"predicted {plan.objective}", format_value(plan, plan.value), f"by {plan.placer}")]
    measured = report.measured_step_seconds
    if measured is not None:
        error = "" if report.error is None else f"predicted {100 * report.error:+.1f} %"
        cards.append(("measured step", format_seconds(measured), error))
    if report.speedup is not None:
        cards.append(("speed-up", f"{report.speedup:.2f} x", "over the best single device"))
    bound = f"bound {format_value(plan, plan.lower_bound)}" if plan.lower_bound > 0 else ""
    cards.append(("distance to the bound", describe_gap(plan), bound))
    busy = utilisation(report.predicted)[[device.kind != "host" for device in plan.machine.devices]]
    used = f"{100 * float(busy.mean()):.0f} %" if len(busy) else ""
    if plan.objective == "load":
        loads = loads_of(plan, report.graph).values()
        used = f"{100 * sum(loads) / (len(busy) * (max(loads) or 1.0)):.0f} %"
    if plan.objective == "load" and plan.value > 0:
        cards.append(("throughput", *throughput(plan)))
    what = "load over the busiest one's" if plan.objective == "load" else "of the step"
    cards.append(("devices at work", used, f"{len(busy)} devices, mean {what}"))
    return "".join(
        f'<div class="card"><span>{escape(label)}</span><strong>{escape(value)}</strong>'
        f"<small>{escape(note)}</small></div>"
        for label, value, note in cards
    )


def _limits(name: str, limits: Limits, timeline: Timeline, plan: Plan) -> str:
    parts = shares(limits, timeline)
    sentence = explain(limits, timeline, plan).replace(" %", "\u00a0%")
    colours = {f"computing on {device}": f"d{i}" for i, device in enumerate(timeline.devices)} | {
        f"transfers on {channel}": "carry" for channel in timeline.channels
    }
    coloured = [(what, share, colours.get(what, "wait")) for what, share in parts]
    return f"<h3>{escape(name.capitalize())}</h3><p>{escape(sentence)}</p>" + charts.stacked_bar(
        coloured, f"{name}: {sentence}"
    )


def _run(report: Report) -> str:
    seconds = report.measured_seconds
    if seconds is None and report.measured is None:
        if report.plan.machine.local:
            return "<p>Not measured yet: <code>dovetail run</code> does that.</p>"
        return "<p>Not measured: the plan is for another machine.</p>"
    rows = []
    for label, predicted, measured in run_rows(
        report.predicted, np.zeros(0) if seconds is None else seconds, report.measured
    ):
        both = isinstance(measured, float) and measured and predicted is not None
        rows.append(
            (
                label,
                "" if predicted is None else format_seconds(predicted),
                _seconds(measured),
                f"{100 * (predicted / measured - 1):+.1f} %" if both else "",  # type: ignore[operator]
            )
        )
    counted = "" if seconds is None else f"<p>{len(seconds)} measured steps, warm-up left out.</p>"
    return counted + _table(("", "predicted", "measured", "error"), rows)


def _seconds(value: float | tuple[float, float] | None) -> str:
    if isinstance(value, tuple):
        return " to ".join(format_seconds(v) for v in value)
    return "" if value is None else format_seconds(value)


def _devices(report: Report) -> str:
    """The timelines in words and figures, for those who cannot see the picture."""
    head = ["device or channel"]
    columns: list[dict[str, str]] = []
    for name, timeline in report.timelines:
        head += [f"{name} busy", "of the step"]
        names = timeline.devices + timeline.channels
        busy = [*timeline.busy_seconds.tolist(), *timeline.channel_seconds.tolist()]
        step = timeline.step_seconds or 1.0
        columns.append({n: format_seconds(s) for n, s in zip(names, busy, strict=True)})
        columns.append({n: f"{100 * s / step:.1f} %" for n, s in zip(names, busy, strict=True)})
    names = report.predicted.devices + report.predicted.channels
    loads = {
        n: format_value(report.plan, s) for n, s in loads_of(report.plan, report.graph).items()
    }
    if loads:
        head.append("load")
        columns.append(loads)
    return _table(head, [(n, *(column.get(n, "") for column in columns)) for n in names])


def _methods(plan: Plan) -> str:
    rows = []
    values = dict(plan.baselines)
    values.setdefault(plan.placer, plan.value)
    worst = max((v for v in values.values() if v is not None), default=0.0)
    for method, value in values.items():
        chosen = " class=chosen" * (method == plan.placer)
        if value is None:
            rows.append(
                f"<tr class=none><th scope=row>{escape(method)}</th><td>infeasible</td><td></td>"
                "<td></td><td></td></tr>"
            )
            continue
        ratio = f"{value / plan.value:.3f} x" if plan.value > 0 else ""
        bar = charts.bar(value / worst if worst > 0 else 0.0)
        rows.append(
            f"<tr{chosen}><th scope=row>{escape(method)}</th><td>{format_value(plan, value)}</td>"
            f"<td>{ratio}</td><td>{found_after(plan, method)}</td><td class=bar>{bar}</td></tr>"
        )
    if plan.lower_bound > 0:
        bar = charts.bar(plan.lower_bound / worst if worst > 0 else 0.0)
        share = plan.lower_bound / (plan.value or 1.0)
        rows.append(
            f"<tr class=bound><th scope=row>lower bound: {escape(plan.bound_proof)}</th>"
            f"<td>{format_value(plan, plan.lower_bound)}</td><td>{share:.3f} x</td>"
            f"<td></td><td class=bar>{bar}</td></tr>"
        )
    columns = ("method", f"predicted {plan.objective}", "to the plan", "found after", "")
    head = _row("th scope=col", columns)
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _filling(report: Report) -> str:
    """The section of a plan for objective load; "" for others."""
    plan = report.plan
    loads = loads_of(plan, report.graph)
    if not loads:
        return ""
    filling = fill(plan, report.graph, loads)
    if filling is None:
        text = (
            "Its devices hand samples back and forth, so that they stand in no order; each is busy "
            "with its load once every period."
        )
        chart = ""
    else:
        text = (
            f"Each device works on another sample: once the pipeline is full, one leaves every "
            f"{format_seconds(filling.period_seconds)}. A device's stage takes its load, with the "
            "transfers in and out of it."
        )
        chart = filling_chart(filling, plan.machine.device_names)
    rate = f"<p><strong>{escape(', '.join(filter(None, throughput(plan))))}</strong></p>"
    return (
        f"<section><h2>The pipeline, filled</h2>{rate}<p>{escape(text)}</p>"
        f'<div class="scroll">{chart}</div></section>'
    )


def _layers(plan: Plan, folds: Folds) -> str:
    """Modules by device: seconds, and bytes of parameters below them. Rows of closed folds are
    hidden; buttons open them, by script."""
    used = np.flatnonzero((folds.seconds[0] > 0) | (folds.parameter_bytes[0] > 0)).tolist()
    names = plan.machine.device_names
    head = "".join(
        f'<th scope=col><i class="d{device}"></i>{escape(names[device])}</th>' for device in used
    )
    parents = set(folds.parents.tolist())
    known = set(folds.opened)
    rows = []
    for index in _rows_of(folds):
        label = escape(folds.labels[index])
        depth = min(folds.depth(index), 8)
        shown = all(around in known for around in list(folds.around(index))[1:])
        if index in parents and index:
            is_open = "true" if index in known else "false"
            label = f'<button type="button" class="fold" aria-expanded="{is_open}">{label}</button>'
        cells = "".join(_layer_cell(folds, index, device) for device in used)
        held = float(folds.parameter_bytes[index].sum())
        rows.append(
            f"<tr data-fold={index}{'' if shown else ' hidden'}>"
            f'<th scope=row class="i{depth}" title="{escape(folds.paths[index])}">{label}</th>'
            f"<td>{format_bytes(held) if held else ''}</td>{cells}</tr>"
        )
    return (
        '<div class="scroll"><table id="layers"><thead><tr><th scope=col>module</th>'
        f"<th scope=col>parameters</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "</div>"
    )


def _rows_of(folds: Folds) -> list[int]:
    """Folds that the table has: all, or those down to the depth at which they are few enough."""
    depths = [folds.depth(index) for index in range(len(folds.labels))]
    deepest = max(depths)
    while deepest > 1 and sum(depth <= deepest for depth in depths) > MOST_ROWS:
        deepest -= 1
    return [index for index, depth in enumerate(depths) if depth <= deepest]


def _layer_cell(folds: Folds, index: int, device: int) -> str:
    seconds = float(folds.seconds[index, device])
    held = float(folds.parameter_bytes[index, device])
    if not (seconds or held):
        return "<td></td>"
    whole = float(folds.seconds[0].max()) or 1.0
    # A step of eight: how much of the busiest device's seconds it is.
    strength = int(np.ceil(min(seconds / whole, 1.0) ** 0.5 * 8))
    below = f"<small>{format_bytes(held)}</small>" if held else ""
    return (
        f'<td class="cell"><i class="d{device} w{strength}"></i>'
        f"{format_seconds(seconds) if seconds else ''}{below}</td>"
    )


def _memory(report: Report, folds: Folds) -> str:
    plan = report.plan
    capacities = capacities_of(plan.machine, dict(plan.caps)).tolist()
    parts = []
    for device, (name, capacity) in enumerate(
        zip(plan.machine.device_names, capacities, strict=True)
    ):
        curves = [
            (label, timeline.memory_times[device], timeline.memory_bytes[device])
            for label, timeline in report.timelines
            if device < len(timeline.memory_times)
        ]
        end = max(timeline.step_seconds for _, timeline in report.timelines)
        peak = plan.peak_memory_bytes[device]
        if plan.machine.devices[device].kind == "host" and not peak:
            continue
        limit = f" of {format_capacity(capacity)}" if capacity < BEYOND_ANY_BYTES else ""
        held = float(folds.parameter_bytes[0, device])
        parameters = f", {format_bytes(held)} of it parameters" if held else ""
        text = f"{name}: peak {format_bytes(peak)}{limit}{parameters}"
        parts.append(
            f'<figure class="m{device}"><figcaption><i class="d{device}"></i>{escape(text)}'
            "</figcaption>"
            f"{charts.memory(curves, capacity, end, text)}</figure>"
        )
    return "".join(parts)


def _machine(plan: Plan) -> str:
    if plan.costs_source == "given":  # rates stand for nothing
        rows = [
            (d.name, d.kind, format_capacity(d.memory_bytes))
            for d in plan.machine.devices
            if d.kind != "host"
        ]
        return _table(("device", "kind", "memory"), rows)
    devices = [
        (
            d.name,
            d.kind + " (host)" * (d.name == plan.machine.host),
            d.model,
            format_capacity(d.memory_bytes),
            ", ".join(f"{t} {format_count(r, 'FLOP/s')}" for t, r in d.flops_per_second.items())
            + (f"; reached: {format_shares(d.efficiencies)}" if d.efficiencies else ""),
            format_bandwidth(d.bandwidth_bytes_per_second),
            format_seconds(d.op_overhead_seconds),
        )
        for d in plan.machine.devices
    ]
    head = ("device", "kind", "model", "memory", "peak rate", "memory bandwidth", "per op")
    links = [
        (
            f"{link.source} → {link.destination}",
            format_bandwidth(link.bandwidth_bytes_per_second),
            format_seconds(link.latency_seconds),
            link.channel,
        )
        for link in plan.machine.links
    ]
    text = _table(head, devices)
    return text + _table(("link", "bandwidth", "latency", "channel"), links) if links else text


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], style: str = "scroll") -> str:
    """A table whose cells are escaped; the first cell of a row names it."""
    titles = tuple(head)
    top = f"<thead>{_row('th scope=col', titles)}</thead>" if titles else ""
    body = []
    for row in rows:
        first, *rest = row
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f"<tr><th scope=row>{escape(first)}</th>{cells}</tr>")
    return f'<div class="{style}"><table>{top}<tbody>{"".join(body)}</tbody></table></div>'


def _row(tag: str, cells: Iterable[str]) -> str:
    end = tag.split()[0]
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{end}>" for cell in cells) + "</tr>"
