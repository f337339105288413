"""Draws the page about a plan.

    cards     how much faster it is than what its user runs now, its step, what is left to gain
    use       the command that runs it
    why       timeline, pipeline, what bounds it, measured beside predicted, memory, modules, graph
    how       methods, machine, facts

Devices have two tables. The one below the timeline, "in figures" (`_times`), says what each does in
a step, and the machine's says what each is.

Scripts draw the timelines and the graph from JSON in the page (`pictures`). Every name is foreign
text: the template escapes it, `pack` escapes it in the JSON, and the scripts write names with
`textContent` or onto a canvas, never as markup.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.plans import (
    COMPILED,
    EAGER,
    PLACED,
    REDUCED,
    Plan,
    capacities_of,
    describe_gap,
    format_value,
)
from dovetail.reports import charts
from dovetail.reports.gantt import fill, filling_chart, throughput
from dovetail.reports.kit import (
    Card,
    Figure,
    Figures,
    Page,
    Part,
    Section,
    StyledCell,
    Table,
    coloured,
    hint,
    in_figures,
    piece,
    preformatted,
    render_page,
    save_page,
    scrolled,
    strong,
)
from dovetail.reports.limits import StepLimits, explain, find_limits, shares
from dovetail.reports.pictures import Folds, fold, pack
from dovetail.reports.tables import (
    format_interval,
    interval_of,
    loads_of,
    machine_tables,
    methods_table,
    plan_facts,
    run_table,
    tried_values,
)
from dovetail.runtime.timers import summarise
from dovetail.timeline import Timeline
from dovetail.units import BEYOND_ANY_BYTES, format_bytes, format_capacity, format_seconds

SINGLES = ("single", "here")
"""The names of the baselines on one device: the machine's best device, and all cores of this
machine together."""
SCRIPTS = ("common.js", "timeline.js", "folds.js", "graph.js", "page.js")
MOST_ROWS = 1500
"""The table of modules has at most this many rows. It leaves out the deepest modules until the rest
fits."""
MOST_DEPTH = 8
"""The style sheet indents names to this depth. Deeper ones are indented as much."""
TOLD_ELSEWHERE = {"predicted", "measured", "lower bound", "gap"}
"""Facts of a plan that the page's cards and sections tell, so that the last table does not."""


@dataclass(frozen=True, eq=False)
class PlanReport:
    """Everything that the page of a plan shows.

    predicted          the timeline of the simulated plan
    measured           the timeline of one run; None if no run recorded its spans
    measured_seconds   [steps] seconds of the measured steps without the warm-up; None if it did
                       not run
    file               the plan's own file; "": it is not known
    """

    plan: Plan
    graph: Graph
    predicted: Timeline
    measured: Timeline | None = None
    measured_seconds: NDArray[np.float64] | None = None
    file: str = ""

    def __post_init__(self) -> None:
        if self.measured_seconds is not None:
            seconds = np.array(self.measured_seconds, dtype=np.float64).reshape(-1)
            seconds.flags.writeable = False
            object.__setattr__(self, "measured_seconds", seconds if len(seconds) else None)

    @property
    def timelines(self) -> tuple[tuple[str, Timeline], ...]:
        """The predicted timeline and, where there is one, the measured."""
        both = (("predicted", self.predicted), ("measured", self.measured))
        return tuple((name, timeline) for name, timeline in both if timeline is not None)

    @property
    def speedup(self) -> tuple[float, str] | None:
        """(speed-up, over what): what the fastest of the user's own ways takes over what the plan
        does, both measured. Where nothing was measured it is predicted, over the best single
        device, and None if no single device fits."""
        plan = self.plan
        own_ways = [name for name in (EAGER, COMPILED, REDUCED) if name in plan.measured]
        if own_ways:
            best = min(own_ways, key=lambda name: plan.measured[name])
            return plan.measured[best] / plan.measured[plan.way], f"over {best}, measured"
        singles = [v for name in SINGLES if (v := plan.baselines.get(name)) is not None]
        if not singles or plan.value <= 0:
            return None
        return min(singles) / plan.value, "over the best single device"

    @property
    def measured_step_seconds(self) -> float | None:
        """The median of the measured steps; if there are none, the length of the measured
        timeline, or what was measured while it was planned; None if nothing was measured."""
        if self.measured_seconds is not None:
            return float(np.median(self.measured_seconds))
        if self.measured is not None:
            return self.measured.step_seconds
        return self.plan.measured.get(self.plan.way)


def write_html(report: PlanReport, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`, whole or not at all. Raises `UnwritableError`."""
    save_page(render(report), path)


def render(report: PlanReport) -> str:
    """The page as text. O(spans + reads); 100,000 spans make less than 3 MB."""
    plan, graph = report.plan, report.graph
    timelines = [(name, line, find_limits(line, graph)) for name, line in report.timelines]
    folds = fold(graph, plan)
    loads = loads_of(plan, graph)

    # How much faster it is, its step, what is left to gain.
    seconds = report.measured_step_seconds
    cards: list[Card] = []
    if plan.way != PLACED and plan.measured:
        cards.append(("speed-up", "none", f"no plan is faster than {plan.way}, which runs"))
    elif plan.way != PLACED:
        cards.append(("speed-up", "not compared", f"{plan.way} runs; the notes below say why"))
    elif report.speedup is not None:
        cards.append(("speed-up", f"{report.speedup[0]:.2f} x", report.speedup[1]))
    value, interval = format_value(plan, plan.value), interval_of(plan, graph)
    told = format_interval(plan, interval)
    if seconds is None:
        remark = "; ".join(filter(None, (told, f"by {plan.placer}")))
        cards.append((f"predicted {plan.objective}", value, remark))
    else:
        remarks = []
        if report.measured_seconds is not None:
            spread = summarise(report.measured_seconds.tolist()).spread
            remarks.append(f"spread {100 * spread:.1f} % of {len(report.measured_seconds)} steps")
        elif report.measured is None:
            remarks.append("while planning")
        if plan.way == PLACED:
            remarks.append(f"predicted {plan.objective} {value}")
        cards.append(
            ("measured step", format_seconds(seconds), f"{'; '.join(remarks)}, by {plan.placer}")
        )
    # Nothing is said of a bound where none is known. Nothing takes less than no time.
    if plan.lower_bound > 0 or plan.value == 0:
        bound = f"bound {format_value(plan, plan.lower_bound)}" if plan.lower_bound > 0 else ""
        cards.append(("distance to the bound", describe_gap(plan), bound))
    if loads and plan.value > 0:
        cards.append(("throughput", *throughput(plan)))
    # The host, which computes nothing, is not among the devices that could be at work.
    works = [device.kind != "host" for device in plan.machine.devices]
    busy = report.predicted.busy_seconds[works]
    whole, what = report.predicted.step_seconds, "of the step"
    if loads:
        busy = np.array(list(loads.values()))[works]
        whole, what = float(busy.max(initial=0.0)), "load over the busiest one's"
    if len(busy):
        used = f"{100 * float(busy.mean()) / (whole or 1.0):.0f} %"
        cards.append(("devices at work", used, f"{len(busy)} devices, mean {what}"))

    # The commands that run the plan or, if it is for another machine, write it for a tool.
    model, file = plan.source.model, report.file or "plan.json"
    use: list[Part] = []
    if plan.machine.local:
        # The name of a module's class says nothing of where it comes from.
        if ":" in model or Path(model).suffix:
            command = f"dovetail run {shlex.quote(file)}"
            # A plan's file may be somebody else's, so it alone imports no code.
            if not model.startswith(("zoo:", "transformers:")) and ":" in model:
                command += f" {shlex.quote(model)}"
            use += ["This runs the plan on this machine and measures it:", preformatted(command)]
        program = (
            f"plan = dt.load_plan({file!r})\n"
            "with dt.run(plan, step) as placed:\n"
            "    placed.step(...)  # takes what the model takes"
        )
        use += ["In a program, where step is what dt.capture returned:", preformatted(program)]
    else:
        form = plan.made_for or ("instance" if plan.costs_source == "given" else "device-map")
        use += [
            "The plan is for another machine. This writes it for the program that runs there:",
            preformatted(f"dovetail export {shlex.quote(file)} --to {form}"),
        ]

    # The methods that were tried, with a bar each, then the lower bound.
    methods = methods_table(plan, interval)
    rows, marks = list(methods.rows), dict(methods.marks)
    values = list(tried_values(plan).values())
    if plan.lower_bound > 0:
        marks[len(rows)] = "bound"
        ratio = f"{plan.lower_bound / (plan.value or 1.0):.3f} x"
        bound = format_value(plan, plan.lower_bound)
        rows.append((f"lower bound: {plan.bound_proof}", bound, ratio, ""))
        values.append(plan.lower_bound)
    worst = max((value for value in values if value is not None), default=0.0) or 1.0
    bars = ["" if value is None else charts.bar(value / worst) for value in values]
    rows = [(*row, StyledCell(bar, "bar")) for row, bar in zip(rows, bars, strict=True)]
    facts = [fact for fact in plan_facts(plan, graph, interval) if fact[0] not in TOLD_ELSEWHERE]

    # If the costs were given, the rates of a machine mean nothing.
    given = [
        (device.name, device.kind, format_capacity(device.memory_bytes))
        for device in plan.machine.devices
        if device.kind != "host"
    ]
    machine = (
        [Table(("device", "kind", "memory"), given)]
        if plan.costs_source == "given"
        else machine_tables(plan.machine)
    )
    unfinished = (
        "This plan is not finished: its planning was interrupted, and it is the best one up to "
        "then. Plan again for a better one."
    )
    return render_page(
        Page(
            f"{model or 'plan'} on {plan.machine.name}",
            cards,
            [
                Section("Use it", use),
                *_times(report, loads, timelines),
                *_places(report, folds),
                Section("Methods", [Table((*methods.head, ""), rows, marks=marks)]),
                Section("Machine", machine),
                Section("Plan", [Table((), facts, "facts")]),
            ],
            lead=[strong(unfinished)] if plan.interrupted else [],
            more_style=charts.device_styles(len(plan.machine.devices)),
            scripts=SCRIPTS,
            data=pack(graph, plan, timelines, folds),
        )
    )


def _times(
    report: PlanReport,
    loads: dict[str, float],
    timelines: Sequence[tuple[str, Timeline, StepLimits]],
) -> list[Section]:
    """The sections of the step's time: its timeline, the pipeline that a plan for objective load
    fills, what bounds it, and predicted beside measured seconds."""
    plan, seconds = report.plan, report.measured_seconds
    # The timelines as a table, for readers who cannot see the picture. A device may be a channel as
    # well, and then has a row of each kind.
    devices = report.predicted.devices
    channels = [f"transfers on {c}" if c in devices else c for c in report.predicted.channels]
    names = [*devices, *channels]
    head = ["device or channel"]
    columns: list[dict[str, str]] = []
    largest = 0.0
    for name, timeline in report.timelines:
        head += [f"{name} busy", "of the step"]
        busy = [*timeline.busy_seconds.tolist(), *timeline.channel_seconds.tolist()]
        of = dict(zip(names, busy, strict=True))
        step = timeline.step_seconds or 1.0
        columns.append({n: format_seconds(s) for n, s in of.items()})
        columns.append({n: f"{100 * s / step:.1f} %" for n, s in of.items()})
        largest = max(largest, *(s / step for s in busy), 0.0)
    if loads:
        head.append("load")
        columns.append({n: format_value(plan, s) for n, s in loads.items()})
    busy_rows = [(n, *(column.get(n, "") for column in columns)) for n in names]
    parts: list[Part] = [piece("timeline.html"), in_figures(Table(head, busy_rows))]
    if largest >= 1.0005:
        parts.append(
            hint(
                "Each transfer counts, also where several share a channel at one time, so that a "
                "channel can be busy for more than 100 % of the step."
            )
        )
    sections = [Section("Timeline of one step", parts)]

    if loads:
        filling = fill(plan, report.graph, loads)
        filled: list[Part] = [strong(", ".join(filter(None, throughput(plan))))]
        if filling is None:
            filled.append(
                "Its devices hand samples back and forth, so that they stand in no order; each is "
                "busy with its load once every period."
            )
        else:
            filled += [
                f"Each device works on another sample: once the pipeline is full, one leaves every "
                f"{format_seconds(filling.period_seconds)}. A device's stage takes its load, with "
                "the transfers in and out of it.",
                scrolled(filling_chart(filling, plan.machine.device_names)),
            ]
        sections.append(Section("The pipeline, filled", filled))

    bounds: list[Part] = []
    for name, timeline, limits in timelines:
        # A number and its percent sign stay on one line of the page.
        sentence = explain(limits, timeline, plan, with_proof=not bounds).replace(" %", "\u00a0%")
        colours = {f"computing on {device}": f"d{i}" for i, device in enumerate(timeline.devices)}
        colours |= {f"transfers on {channel}": "carry" for channel in timeline.channels}
        spent = [(what, s, colours.get(what, "wait")) for what, s in shares(limits, timeline)]
        chart = charts.stacked_bar(spent, f"{name.capitalize()}: {sentence}")
        bounds.append(Section(name.capitalize(), [sentence, chart]))
    sections.append(Section("What bounds it", bounds))

    # Predicted beside measured seconds, and where each measured figure comes from.
    is_placed = plan.way == PLACED
    predicted = report.predicted if is_placed else plan.value
    table = run_table(predicted, () if seconds is None else seconds, report.measured)
    rows = [] if seconds is None and report.measured is None else list(table.rows)
    parts = []
    if seconds is not None:
        parts.append(
            f"{len(seconds)} measured steps, warm-up left out. Each is a whole call, as a program "
            "makes it."
        )
    if seconds is not None and report.measured is not None:
        parts.append(
            f"The measured timeline, of {format_seconds(report.measured.step_seconds)}, is one "
            "more step, in which every call on a device was timed; ops that were compiled together "
            "are one call. It takes longer than the median by the reading of the clock, and less "
            "by the handing over of inputs and results, which it leaves out."
        )
    if plan.measured:
        beside = plan.measured[plan.way]
        compared = ("the placed step" if n == PLACED else n for n in plan.measured if n != plan.way)
        error = f"{100 * (plan.value / beside - 1):+.1f} %" if is_placed and beside > 0 else ""
        rows.append((
            "step, beside your own ways",
            format_seconds(plan.value) if is_placed else "",
            format_seconds(beside),
            error,
        ))  # fmt: skip
        parts.append(
            f"The step beside your own ways was measured while planning, in turn with "
            f"{', '.join(compared)}. Steps of another time have other neighbours at work, and "
            "another median."
        )
    if rows:
        parts.append(replace(table, rows=rows))
    elif plan.machine.local:
        parts = [Markup("<p>Not measured yet: <code>dovetail run</code> does that.</p>")]
    else:
        parts = ["Not measured: the plan is for another machine."]
    return [*sections, Section("Predicted and measured", parts)]


def _places(report: PlanReport, folds: Folds) -> list[Section]:
    """The sections of what is where: memory, modules by device, and the graph."""
    plan = report.plan
    # A chart of each device's memory, with its peak. A host that holds nothing has none.
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
        chart = charts.memory(curves, capacity, end, text)
        figures.append(Figure(coloured(f"d{device}", text), chart, f"m{device}"))
    key = charts.key([
        ("line predicted", "predicted, in the colour of the device", ""),
        ("line measured", "measured", ""),
        ("line capacity", "available", ""),
    ])  # fmt: skip

    # Seconds and bytes of parameters of each module, by device. The rows within a closed fold are
    # hidden; a script opens them by buttons.
    used = np.flatnonzero((folds.seconds[0] > 0) | (folds.parameter_bytes[0] > 0)).tolist()
    parents, opened = set(folds.parents.tolist()), set(folds.opened)
    busiest = float(folds.seconds[0].max()) or 1.0
    depths = [len(list(folds.around(index))) - 1 for index in range(len(folds.labels))]
    deepest = max(depths)
    while deepest > 1 and sum(depth <= deepest for depth in depths) > MOST_ROWS:
        deepest -= 1
    module_rows = []
    for index, depth in enumerate(depths):
        if depth > deepest:
            continue
        cells = []
        for device in used:
            seconds = float(folds.seconds[index, device])
            held = float(folds.parameter_bytes[index, device])
            cells.append({
                "device": device,
                # The root makes small shares visible: one hundredth is still a mark of width 1.
                "width": int(np.ceil(min(seconds / busiest, 1.0) ** 0.5 * 8)),
                "seconds": format_seconds(seconds) if seconds else "",
                "parameters": format_bytes(held) if held else "",
            })  # fmt: skip
        whole = float(folds.parameter_bytes[index].sum())
        module_rows.append({
            "fold": index,
            "is_hidden": not all(around in opened for around in list(folds.around(index))[1:]),
            "depth": min(depth, MOST_DEPTH),
            "path": folds.paths[index],
            "label": folds.labels[index],
            "is_parent": index in parents and index > 0,
            "is_open": index in opened,
            "parameters": format_bytes(whole) if whole else "",
            "cells": cells,
        })  # fmt: skip
    names = [(device, plan.machine.device_names[device]) for device in used]
    modules = piece("modules.html", devices=names, rows=module_rows)
    return [
        Section("Memory", [key, Figures(figures)]),
        Section("Modules, by device", [modules]),
        Section("The graph, by device", [piece("graph.html")]),
    ]
