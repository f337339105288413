"""Draws the page about a plan: timelines, graph, memory, methods and what bounds the plan.

The template draws tables and charts. Scripts draw the timelines and the graph from JSON in the
page. Every name is foreign text: the template escapes it, `to_script` escapes it in the JSON, and
the scripts write names with `textContent` or onto a canvas, never as markup.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.graph.records import Phase
from dovetail.plans import PLACED, Plan, capacities_of, describe_gap, format_value
from dovetail.reports import plots
from dovetail.reports.colours import device_styles
from dovetail.reports.folding import Folds, fold
from dovetail.reports.layout import GraphView, PricedPlacement, draw, edges_between
from dovetail.reports.limits import OP, StepLimits, explain, find_limits, shares
from dovetail.reports.markup import Card, PageTable, render_page, save_page
from dovetail.reports.records import PlanReport, utilisation
from dovetail.reports.tables import (
    found_after,
    label_of,
    loads_of,
    plan_facts,
    ratio_text,
    run_rows,
)
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

# ---- The page's data, packed: 100,000 spans in some 2 MB of plain JSON ----
#
# Times are whole nanoseconds. Names like "lstm.0/addmm_3" are mostly repetition. So ops whose names
# differ in one number alone, and that have the same kind, module and phase, share one *template*.
# An op is (template, number), both written as differences to the op before. A span of a row is (op
# as a difference, gap since the last end, length). `assets/timeline.js` undoes all this.

NANO = 1e9


def pack(
    report: PlanReport, limits: list[StepLimits], views: list[GraphView], folds: Folds
) -> dict[str, Any]:
    """The data of everything that the page's scripts draw."""
    return {
        "ops": pack_ops(report.graph),
        "phases": [phase.name.lower() for phase in Phase],
        "devices": list(report.predicted.devices),
        "timelines": [
            pack_timeline(name, timeline, report.graph, limit)
            for (name, timeline), limit in zip(report.timelines, limits, strict=True)
        ],
        "modules": pack_folds(folds, report.graph, report.plan),
        "views": [pack_view(view) for view in views],
    }


def pack_ops(graph: Graph) -> dict[str, Any]:
    """The ops, packed.

    strings     all texts, each once
    templates   [before, after, kind, module, phase] of each template; the first four are indices
                into `strings`
    which       [ops] the op's template, as the difference to the op before
    numbers     [ops] the op's number, as the difference to the last op of the same template
    """
    strings: dict[str, int] = {}
    templates: dict[tuple[int, ...], int] = {}
    last_numbers: list[int] = []
    which: list[int] = []
    numbers: list[int] = []
    last = 0
    for name, kind, module, phase in zip(
        graph.names, graph.kinds, graph.modules, graph.phases.tolist(), strict=True
    ):
        before, number, after = split_name(name)
        texts = (before, after, kind, module)
        key = (*(strings.setdefault(text, len(strings)) for text in texts), phase)
        template = templates.setdefault(key, len(templates))
        # The template is new.
        if template == len(last_numbers):
            last_numbers.append(0)
        which.append(template - last)
        numbers.append(number - last_numbers[template])
        last, last_numbers[template] = template, number
    return {
        "strings": list(strings),
        "templates": [list(template) for template in templates],
        "which": which,
        "numbers": numbers,
    }


def split_name(name: str) -> tuple[str, int, str]:
    """The name split at its last number: "addmm_3_b" -> ("addmm_", 3, "_b"). A name without one is
    (name, -1, "")."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else (name, -1, "")


# No leading zero and no more digits than an int32 holds: the number must come back as it was.
_NUMBERED = re.compile(r"((?:.*[^0-9])?)(0|[1-9][0-9]{0,8})([^0-9]*)", re.DOTALL)


def runs(flags: NDArray[np.bool_]) -> list[int]:
    """The lengths of the runs of equal flags, in turn False, True, False and so on; the first is 0
    if the flags begin with True."""
    # `append=2` differs from both flags, so that the last run has an end, too.
    ends = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=2))
    lengths: list[int] = np.diff(ends, prepend=0).tolist()
    return lengths


def pack_timeline(
    name: str, timeline: Timeline, graph: Graph, limits: StepLimits
) -> dict[str, Any]:
    """The rows of a timeline, packed: devices, then the channels that carry something. `critical`
    holds the lengths of runs of spans, in turn off and on the critical chain."""
    critical_ops = np.zeros(len(timeline.ops), dtype=bool)
    critical_transfers = np.zeros(len(timeline.transfer_ops), dtype=bool)
    for kind, i in limits.chain:
        (critical_ops if kind == OP else critical_transfers)[i] = True
    rows = []
    for device, label in enumerate(timeline.devices):
        of = np.flatnonzero(timeline.op_devices == device)
        of = of[np.argsort(timeline.op_starts[of], kind="stable")]
        row = _packed_row(label, "device", timeline.op_starts[of], timeline.op_ends[of])
        row["ops"] = np.diff(timeline.ops[of], prepend=0).tolist()
        row["critical"] = runs(critical_ops[of])
        rows.append(row)
    for channel, label in enumerate(timeline.channels):
        of = np.flatnonzero(timeline.transfer_channels == channel)
        if not len(of):
            continue
        of = of[np.argsort(timeline.transfer_starts[of], kind="stable")]
        row = _packed_row(
            label, "channel", timeline.transfer_starts[of], timeline.transfer_ends[of]
        )
        row["ops"] = np.diff(timeline.transfer_ops[of], prepend=0).tolist()
        row["critical"] = runs(critical_transfers[of])
        tensors = timeline.transfer_tensors[of]
        row["bytes"] = np.where(tensors >= 0, graph.tensor_bytes[tensors], 0).tolist()
        row["to"] = timeline.transfer_destinations[of].tolist()
        rows.append(row)
    return {"name": name, "step": round(timeline.step_seconds * NANO), "rows": rows}


def _packed_row(
    label: str, kind: str, starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> dict[str, Any]:
    # Both ends are rounded before they are subtracted, so that rounding errors do not add up.
    from_ns = np.rint(starts * NANO).astype(np.int64)
    to_ns = np.rint(ends * NANO).astype(np.int64)
    before = np.concatenate([[0], to_ns[:-1]]).astype(np.int64)
    return {
        "label": label,
        "kind": kind,
        "gaps": (from_ns - before).tolist(),
        "lengths": (to_ns - from_ns).tolist(),
    }


def pack_view(view: GraphView) -> dict[str, Any]:
    """A picture of the graph, packed: one array for each field of the nodes, and the edges as flat
    triples (from, to, bytes)."""
    return {
        "name": view.name,
        "labels": list(view.labels),
        "details": list(view.details),
        "devices": view.devices.tolist(),
        "phases": view.phases.tolist(),
        "ops": view.ops.tolist(),
        "flops": view.flops.tolist(),
        "seconds": [round(float(s) * NANO) for s in view.seconds],
        "columns": view.columns.tolist(),
        "rows": view.rows.tolist(),
        "edges": np.stack([view.edges[:, 0], view.edges[:, 1], view.edge_bytes], 1).ravel().tolist()
        if len(view.edges)
        else [],
        "lanes": [list(lane) for lane in view.lanes],
    }


def pack_folds(folds: Folds, graph: Graph, plan: PricedPlacement) -> dict[str, Any]:
    """The tree of modules, packed: one array for each field of folds and leaves, and the edges
    between leaves as flat triples (from, to, bytes). A leaf's place is the median of its ops."""
    count = len(folds.leaf_folds)
    ops = np.flatnonzero(folds.leaf_of >= 0)
    of = folds.leaf_of[ops]
    spent = np.bincount(of, plan.compute_seconds[ops, plan.placement[ops]], minlength=count)
    flops = np.bincount(of, graph.flops[ops], minlength=count)
    edges, sizes = edges_between(graph, folds.leaf_of)
    return {
        "labels": list(folds.labels),
        "paths": list(folds.paths),
        "parents": folds.parents.tolist(),
        "opened": list(folds.opened),
        "leaves": {
            "folds": folds.leaf_folds.tolist(),
            "phases": folds.leaf_phases.tolist(),
            "devices": folds.leaf_devices.tolist(),
            "places": [int(np.median(ops[of == leaf])) for leaf in range(count)],
            "ops": np.bincount(of, minlength=count).tolist(),
            "flops": flops.astype(np.int64).tolist(),
            "seconds": [round(float(s) * NANO) for s in spent],
        },
        "edges": np.column_stack([edges, sizes]).ravel().tolist(),
    }


def to_script(data: dict[str, Any]) -> Markup:
    """The data as JSON that can stand inside a <script> element: "<", ">", "&" and line separators
    are written as escapes, so that no name can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


# ---- The pipeline that a plan for `load` fills: several samples in flight, a device a row ----
#
#     gpu0  |1111|2222|3333|4444|
#     gpu1       |111 |222 |333 |444 |
#     gpu2            |11111|22222|33333|44444|       one sample leaves every 5
#
# A device's stage takes its load, which counts its transfers. A sample enters a device when it has
# left all devices that this one reads from, and when the sample before it has left this one. If
# devices read from one another in a circle, they have no order. Then only the period is known.

SAMPLES = 6
"""The chart shows this many samples."""
WIDTH, ROW, GUTTER = 1000.0, 24.0, 130.0


@dataclass(frozen=True, eq=False)
class Filling:
    """The times at which the first samples pass through a pipeline.

    devices          [stages] devices in pipeline order
    starts, ends     [stages, samples] seconds at which each sample enters and leaves each device
    period_seconds   seconds between two samples that leave, once the pipeline is full
    """

    devices: tuple[int, ...]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    @property
    def period_seconds(self) -> float:
        return float((self.ends - self.starts).max(initial=0.0))


def fill(
    plan: Plan, graph: Graph, loads: dict[str, float], samples: int = SAMPLES
) -> Filling | None:
    """The times of the first samples on the devices that have a load; None if the devices read from
    one another in a circle."""
    names = plan.machine.device_names
    ops = np.flatnonzero(~graph.is_source)
    working = set(plan.placement[ops].tolist())
    stages = [d for d, name in enumerate(names) if d in working and loads.get(name, 0.0) > 0]
    before = _reads(plan, graph, set(stages))
    order: list[int] = []
    # Devices whose order no read decides are ordered by the mean index of their ops.
    waiting = sorted(stages, key=lambda d: (float(np.mean(ops[plan.placement[ops] == d])), d))
    while waiting:
        ready = next((d for d in waiting if before[d] <= set(order)), None)
        if ready is None:
            return None
        order.append(ready)
        waiting.remove(ready)
    starts, ends = (np.zeros((len(order), samples)) for _ in range(2))
    row = {device: i for i, device in enumerate(order)}
    for i, device in enumerate(order):
        for sample in range(samples):
            arrived = max((ends[row[d], sample] for d in before[device]), default=0.0)
            free = ends[i, sample - 1] if sample else 0.0
            starts[i, sample] = max(arrived, free)
            ends[i, sample] = starts[i, sample] + loads[names[device]]
    return Filling(tuple(order), starts, ends)


def _reads(plan: Plan, graph: Graph, stages: set[int]) -> dict[int, set[int]]:
    """device -> the other devices among `stages` that it reads from. Sources do not count."""
    before: dict[int, set[int]] = {device: set() for device in stages}
    makers = graph.producers[graph.input_tensors]
    real = ~graph.is_source[makers]
    reader_devices = plan.placement[graph.readers[real]]
    maker_devices = plan.placement[makers[real]]
    for a, b in {
        (int(a), int(b)) for a, b in zip(maker_devices, reader_devices, strict=True) if a != b
    }:
        if a in stages and b in stages:
            before[b].add(a)
    return before


def throughput(plan: Plan) -> tuple[str, str]:
    """The rate of the full pipeline: ("579 samples/s", "18.1 steps a second of 32"). The first
    dimension of the step's first input is its number of samples. ("", "") if the plan's value is
    0."""
    if plan.value <= 0:
        return "", ""
    shapes: Sequence[tuple[int, ...]] = plan.source.shapes
    batch = shapes[0][0] * plan.repeats if shapes and shapes[0] else 0
    if batch <= 1:
        return f"{1 / plan.value:.3g} samples/s", "once the pipeline is full"
    return f"{batch / plan.value:.3g} samples/s", f"{1 / plan.value:.3g} steps a second of {batch}"


def filling_chart(filling: Filling, names: Sequence[str]) -> Markup:
    """The chart as inline SVG, in the devices' colours. Samples are numbered, and every other one
    is paler."""
    end = float(filling.ends.max()) or 1.0
    height = ROW * len(filling.devices)
    scale = (WIDTH - GUTTER) / end
    parts = []
    for row, device in enumerate(filling.devices):
        y = row * ROW
        name = escape(names[device])
        parts.append(f'<text x="0" y="{y + 16:.0f}">{name}</text>')
        for sample, (start, stop) in enumerate(
            zip(filling.starts[row].tolist(), filling.ends[row].tolist(), strict=True)
        ):
            x, width = GUTTER + scale * start, max(scale * (stop - start) - 1, 0.5)
            pale = " pale" if sample % 2 else ""
            parts.append(
                f'<rect class="d{device}{pale}" x="{x:.1f}" y="{y + 2:.0f}" width="{width:.1f}" '
                f'height="{ROW - 4:.0f}"><title>sample {sample + 1} on {name}: '
                f"{format_seconds(start)} to {format_seconds(stop)}</title></rect>"
            )
            if width > 16:
                parts.append(
                    f'<text class="mark" x="{x + width / 2:.1f}" y="{y + 16:.0f}" '
                    f'text-anchor="middle">{sample + 1}</text>'
                )
    parts.append(f'<text x="{GUTTER}" y="{height + 14:.0f}">0 s</text>')
    parts.append(
        f'<text x="{WIDTH}" y="{height + 14:.0f}" text-anchor="end">{format_seconds(end)}</text>'
    )
    label = f"{filling.starts.shape[1]} samples through {len(filling.devices)} devices"
    return Markup(
        f'<svg class="chart filling" viewBox="0 0 {WIDTH:.0f} {height + 18:.0f}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


# ---- The page ----

SCRIPTS = ("common.js", "timeline.js", "folds.js", "graph.js", "page.js")
MOST_ROWS = 1500
"""The table of modules has at most this many rows. It leaves out the deepest modules until the rest
fits."""
MOST_DEPTH = 8
"""The style sheet indents names to this depth. Deeper ones are indented as much."""


@dataclass(frozen=True)
class _MethodRow:
    """A row of the table of methods; `bar` is "" if the method found nothing that fits."""

    style: str
    name: str
    value: str
    ratio: str = ""
    found_after: str = ""
    bar: str = ""


@dataclass(frozen=True)
class _ModuleCell:
    """One device's part of a module; `width`, 0 to 8, is the width of its mark."""

    device: int
    width: int
    seconds: str
    parameters: str


@dataclass(frozen=True)
class _ModuleRow:
    """A fold in the table of modules. `expanded` is "" if no fold is within it. A cell is None if
    the device neither computes nor holds anything of the fold."""

    fold: int
    hidden: bool
    depth: int
    path: str
    label: str
    expanded: str
    parameters: str
    cells: tuple[_ModuleCell | None, ...]


@dataclass(frozen=True)
class _FillingShown:
    """The section about the pipeline that a plan for objective load fills."""

    rate: str
    text: str
    chart: str


def write_html(report: PlanReport, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`, whole or not at all. Raises `UnwritableError`."""
    save_page(render(report), path)


def render(report: PlanReport) -> str:
    """The page as text. O(spans + reads); 100,000 spans make less than 3 MB."""
    plan, graph = report.plan, report.graph
    limits = [find_limits(timeline, graph) for _, timeline in report.timelines]
    folds = fold(graph, plan)
    used = np.flatnonzero((folds.seconds[0] > 0) | (folds.parameter_bytes[0] > 0)).tolist()
    return render_page(
        "plan.html",
        f"{report.model or 'plan'} on {plan.machine.name}",
        _cards(report),
        styles=("page.css",),
        more_style=device_styles(len(plan.machine.devices)),
        scripts=SCRIPTS,
        devices=_devices(report),
        filling=_filling(report),
        limits=[
            _limits(name, limit, timeline, plan)
            for (name, timeline), limit in zip(report.timelines, limits, strict=True)
        ],
        method_head=("method", f"predicted {plan.objective}", "to the plan", "found after", ""),
        methods=_methods(plan),
        run=_run(report),
        measured_steps=0 if report.measured_seconds is None else len(report.measured_seconds),
        local=plan.machine.local,
        memory=_memory(report, folds),
        module_devices=[(device, plan.machine.device_names[device]) for device in used],
        modules=_modules(folds, used),
        machine=_machine(plan),
        facts=PageTable((), plan_facts(plan, graph), "facts"),
        data=to_script(pack(report, limits, draw(graph, plan), folds)),
    )


def _cards(report: PlanReport) -> list[Card]:
    plan = report.plan
    found = "predicted" if plan.way == PLACED else "measured"
    cards = [(f"{found} {plan.objective}", format_value(plan, plan.value), f"by {plan.placer}")]
    measured = report.measured_step_seconds
    if measured is not None:
        error = "" if report.error is None else f"predicted {100 * report.error:+.1f} %"
        cards.append(("measured step", format_seconds(measured), error))
    if report.speedup is not None:
        ratio, over = report.speedup
        cards.append(("speed-up", f"{ratio:.2f} x", over))
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
    return cards


def _limits(
    name: str, limits: StepLimits, timeline: Timeline, plan: Plan
) -> tuple[str, str, Markup]:
    """(the timeline's name, a sentence on what bounds it, the critical chain as a bar)."""
    # A number and its percent sign stay on one line of the page.
    sentence = explain(limits, timeline, plan).replace(" %", "\u00a0%")
    colours = {f"computing on {device}": f"d{i}" for i, device in enumerate(timeline.devices)} | {
        f"transfers on {channel}": "carry" for channel in timeline.channels
    }
    coloured = [
        (what, share, colours.get(what, "wait")) for what, share in shares(limits, timeline)
    ]
    return name.capitalize(), sentence, plots.stacked_bar(coloured, f"{name}: {sentence}")


def _run(report: PlanReport) -> PageTable | None:
    """The table of predicted beside measured seconds; None if the plan did not run."""
    seconds = report.measured_seconds
    if seconds is None and report.measured is None:
        return None
    rows = []
    for label, predicted, measured in run_rows(
        report.predicted if report.plan.way == PLACED else report.plan.value,
        np.zeros(0) if seconds is None else seconds,
        report.measured,
    ):
        error = ""
        if isinstance(measured, float) and measured and predicted is not None:
            error = f"{100 * (predicted / measured - 1):+.1f} %"
        rows.append((label, _seconds(predicted), _seconds(measured), error))
    return PageTable(("", "predicted", "measured", "error"), rows)


def _seconds(value: float | tuple[float, float] | None) -> str:
    if isinstance(value, tuple):
        return " to ".join(format_seconds(v) for v in value)
    return "" if value is None else format_seconds(value)


def _devices(report: PlanReport) -> PageTable:
    """The timelines as a table, for readers who cannot see the picture."""
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
    return PageTable(head, [(n, *(column.get(n, "") for column in columns)) for n in names])


def _methods(plan: Plan) -> list[_MethodRow]:
    """The rows of all methods that were tried, then of the lower bound."""
    values = dict(plan.baselines)
    values.setdefault(plan.placer, plan.value)
    worst = max((v for v in values.values() if v is not None), default=0.0) or 1.0
    rows = []
    for method, value in values.items():
        if value is None:
            rows.append(_MethodRow("none", method, "infeasible"))
            continue
        style = "chosen" if method == plan.placer else ""
        rows.append(_MethodRow(style, label_of(plan, method), format_value(plan, value),
                               ratio_text(plan, method, value), found_after(plan, method),
                               plots.bar(value / worst)))  # fmt: skip
    if plan.lower_bound > 0:
        ratio = f"{plan.lower_bound / (plan.value or 1.0):.3f} x"
        rows.append(
            _MethodRow("bound", f"lower bound: {plan.bound_proof}",
                       format_value(plan, plan.lower_bound), ratio, "",
                       plots.bar(plan.lower_bound / worst))
        )  # fmt: skip
    return rows


def _filling(report: PlanReport) -> _FillingShown | None:
    """The pipeline's section for a plan for objective load; None for other objectives."""
    plan = report.plan
    loads = loads_of(plan, report.graph)
    if not loads:
        return None
    rate = ", ".join(filter(None, throughput(plan)))
    filling = fill(plan, report.graph, loads)
    if filling is None:
        text = (
            "Its devices hand samples back and forth, so that they stand in no order; each is busy "
            "with its load once every period."
        )
        return _FillingShown(rate, text, "")
    text = (
        f"Each device works on another sample: once the pipeline is full, one leaves every "
        f"{format_seconds(filling.period_seconds)}. A device's stage takes its load, with the "
        "transfers in and out of it."
    )
    return _FillingShown(rate, text, filling_chart(filling, plan.machine.device_names))


def _modules(folds: Folds, devices: Sequence[int]) -> list[_ModuleRow]:
    """The rows of the table of modules: seconds and bytes of parameters by device. The rows within
    a closed fold are hidden; a script opens them by buttons."""
    parents = set(folds.parents.tolist())
    opened = set(folds.opened)
    rows = []
    for index in _rows_of(folds):
        held = float(folds.parameter_bytes[index].sum())
        expanded = ""
        if index in parents and index:
            expanded = "true" if index in opened else "false"
        rows.append(
            _ModuleRow(
                fold=index,
                hidden=not all(around in opened for around in list(folds.around(index))[1:]),
                depth=min(folds.depth(index), MOST_DEPTH),
                path=folds.paths[index],
                label=folds.labels[index],
                expanded=expanded,
                parameters=format_bytes(held) if held else "",
                cells=tuple(_module_cell(folds, index, device) for device in devices),
            )
        )
    return rows


def _rows_of(folds: Folds) -> list[int]:
    """The folds in the table: all of them, or those down to the largest depth at which there are at
    most `MOST_ROWS`."""
    depths = [folds.depth(index) for index in range(len(folds.labels))]
    deepest = max(depths)
    while deepest > 1 and sum(depth <= deepest for depth in depths) > MOST_ROWS:
        deepest -= 1
    return [index for index, depth in enumerate(depths) if depth <= deepest]


def _module_cell(folds: Folds, index: int, device: int) -> _ModuleCell | None:
    seconds = float(folds.seconds[index, device])
    held = float(folds.parameter_bytes[index, device])
    if not (seconds or held):
        return None
    busiest = float(folds.seconds[0].max()) or 1.0
    # The root makes small shares visible: one hundredth is still a mark of width 1.
    width = int(np.ceil(min(seconds / busiest, 1.0) ** 0.5 * 8))
    return _ModuleCell(
        device,
        width,
        format_seconds(seconds) if seconds else "",
        format_bytes(held) if held else "",
    )


def _memory(report: PlanReport, folds: Folds) -> list[tuple[int, str, Markup]]:
    """(device, a text with its peak, chart) of each device. A host that holds nothing has none."""
    plan = report.plan
    capacities = capacities_of(plan.machine, dict(plan.caps)).tolist()
    end = max(timeline.step_seconds for _, timeline in report.timelines)
    figures = []
    for device, (name, capacity) in enumerate(
        zip(plan.machine.device_names, capacities, strict=True)
    ):
        peak = plan.peak_memory_bytes[device]
        if plan.machine.devices[device].kind == "host" and not peak:
            continue
        curves = [
            (label, timeline.memory_times[device], timeline.memory_bytes[device])
            for label, timeline in report.timelines
            if device < len(timeline.memory_times)
        ]
        limit = f" of {format_capacity(capacity)}" if capacity < BEYOND_ANY_BYTES else ""
        held = float(folds.parameter_bytes[0, device])
        parameters = f", {format_bytes(held)} of it parameters" if held else ""
        text = f"{name}: peak {format_bytes(peak)}{limit}{parameters}"
        figures.append((device, text, plots.memory(curves, capacity, end, text)))
    return figures


def _machine(plan: Plan) -> list[PageTable]:
    """The tables of devices and links. If the costs were given, the rates mean nothing, and there
    is one table of names, kinds and memory."""
    if plan.costs_source == "given":
        given = [
            (d.name, d.kind, format_capacity(d.memory_bytes))
            for d in plan.machine.devices
            if d.kind != "host"
        ]
        return [PageTable(("device", "kind", "memory"), given)]
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
    tables = [PageTable(head, devices)]
    return (
        [*tables, PageTable(("link", "bandwidth", "latency", "channel"), links)]
        if links
        else tables
    )
