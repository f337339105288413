"""Makes tables for the terminal. Each function returns a rich renderable and prints nothing.

Every name in them is foreign text. `escape` keeps rich from obeying markup in it, and the terminal
from obeying its control characters.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.markup import escape as escape_markup
from rich.table import Table
from rich.text import Text

from dovetail.costs import Costs
from dovetail.costs.analytic import EXACT
from dovetail.errors import GraphMismatchError
from dovetail.graph import Graph
from dovetail.graph.records import SOURCE_KINDS, Phase
from dovetail.machine import Device, Machine, emulated_dtypes
from dovetail.machine.gpus import GpuMeasurement
from dovetail.plans import (
    PLACED,
    Plan,
    capacities_of,
    describe_gap,
    format_value,
    planned_graph,
    ratio_to,
)
from dovetail.reports.limits import StepLimits, explain, shares
from dovetail.reports.stages_figures import overview_rows
from dovetail.schedulers.results import Schedules
from dovetail.simulator.loads import device_loads
from dovetail.timeline import Timeline
from dovetail.units import (
    BEYOND_ANY_BYTES,
    format_bandwidth,
    format_bytes,
    format_capacity,
    format_count,
    format_seconds,
    format_shares,
    printable,
)

LEAST_SHARE = 0.001
"""Parts of the critical chain with a smaller share than this are summed up in one row."""


def escape(text: str) -> str:
    """The text, escaped so that rich and the terminal show it character by character."""
    return escape_markup(printable(text))


def plan_facts(plan: Plan, graph: Graph) -> list[tuple[str, str]]:
    """(label, text) pairs that sum a plan up."""
    sources = int(graph.is_source.sum())
    what = f"{len(graph) - sources:,} ops and {sources:,} sources in {plan.groups:,} groups"
    value = f"{plan.objective} {format_value(plan, plan.value)}"
    facts = [
        ("model", plan.source.model + (f", {plan.source.training}" * bool(plan.source.training))),
        ("graph", what),
        ("machine", f"{plan.machine.name}: {', '.join(plan.machine.device_names)}"),
        ("costs", plan.costs_source),
        ("method", f"{plan.placer}, seed {plan.seed}"),
    ]
    if plan.way == PLACED:
        facts.append(("predicted", value + (", contiguous" * plan.contiguous)))
    if plan.measured:
        measured = format_value(plan, plan.measured[plan.way])
        facts.append(("measured", f"{plan.objective} {measured}"))
    if plan.lower_bound > 0:
        bound = format_value(plan, plan.lower_bound)
        facts.append(("lower bound", f"{bound}, by {plan.bound_proof}"))
    facts.append(("gap", describe_gap(plan)))
    searched = format_seconds(plan.planning_seconds)
    facts.append(("planning", searched + (", interrupted: best so far" * plan.interrupted)))
    facts += [("note", note) for note in emulation_notes(plan.machine, graph)]
    if plan.costs_source == "analytic":
        facts += [("note", note) for note in derived_rate_notes(plan.machine, graph)]
    if plan.made_for:
        facts.append(("for", plan.made_for))
    facts += [("whole", pattern) for pattern in plan.whole]
    facts += [("pin", f"{pattern} = {device}") for pattern, device in plan.pins]
    facts += [("cap", f"{device}: {format_bytes(size)}") for device, size in plan.caps]
    facts += [("note", note) for note in plan.notes]
    return facts


def emulation_notes(machine: Machine, graph: Graph) -> list[str]:
    """One sentence for each model of device that computes some dtype of the graph in float32."""
    emulated = {device.model: emulated_dtypes(device) for device in machine.devices}
    used = set(graph.dtypes)
    return [
        f"a {model} has no fast units for {' and '.join(dtypes)}: costed as computed in float32"
        for model, emulated_of in emulated.items()
        # Integer tensors are mostly indices and flags, which nothing multiplies.
        if (dtypes := [dtype for dtype in emulated_of if dtype in used and dtype != "int8"])
    ]


def derived_rate_notes(machine: Machine, graph: Graph) -> list[str]:
    """One sentence for each dtype of the graph's numbers whose rate some devices do not give."""
    derived: dict[str, list[str]] = {}
    for dtype in dict.fromkeys(graph.dtypes):
        for device in machine.devices:
            source, times = device.rate_source(dtype)
            # Integers are mostly indices and flags, and count as float32 everywhere.
            is_exact = dtype.startswith(EXACT)
            if device.kind != "host" and source != dtype and not is_exact:
                part = f"1/{times} of {source}'s" if times > 1 else f"{source}'s"
                derived.setdefault(f"{dtype} is costed at {part} rate", []).append(device.model)
    return [
        f"{how}, as {' and '.join(dict.fromkeys(models))} give none for it"
        for how, models in derived.items()
    ]


def plan_table(plan: Plan, graph: Graph) -> RenderableType:
    """The tables of a plan: its facts, every method that was tried, and memory per device.

    graph   of the plan's step, with or without the plan's copies. Raises `GraphMismatchError` for
            another one
    """
    graph = planned_graph(plan, graph)
    if len(graph) != len(plan.placement):
        raise GraphMismatchError(plan.graph_fingerprint, graph.fingerprint)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for label, text in plan_facts(plan, graph):
        facts.add_row(label, escape(text))
    return Group(facts, Text(), methods_table(plan), Text(), memory_table(plan, graph))


def phases_table(
    plans: Mapping[str, Plan],
    weights: Mapping[str, float],
    devices: Mapping[str, str],
    candidates: Mapping[str, float | None],
) -> RenderableType:
    """The tables of phases under one placement: the seconds, number of runs and share of each
    phase; the modules of each device; and the values of the placements that were tried.

    devices     module path -> device name
    candidates  placement -> weighted seconds; None if it does not fit
    """
    total = sum(weights[name] * plan.value for name, plan in plans.items())
    phases = _table("phase", "seconds", "times", "share", "peak memory", title="Phases")
    for name, plan in plans.items():
        share = f"{100 * weights[name] * plan.value / total:.1f} %" if total else ""
        peaks = zip(plan.machine.device_names, plan.peak_memory_bytes, strict=True)
        memory = ", ".join(
            f"{escape(device)} {format_bytes(peak)}" for device, peak in peaks if peak
        )
        value, times = format_value(plan, plan.value), f"{weights[name]:g}"
        phases.add_row(escape(name), value, times, share, memory)
    phases.add_row("all, weighted", format_seconds(total), "", "", "", style="bold")
    modules = _table("device", "modules with parameters", title="One placement for all phases")
    for device in dict.fromkeys(devices.values()):
        paths = [path or "(the model itself)" for path, where in devices.items() if where == device]
        modules.add_row(escape(device), escape(", ".join(paths)))
    placements = _table(
        "placement", "weighted seconds", "against the plan", title="Placements tried"
    )
    for name, seconds in candidates.items():
        if seconds is None:
            placements.add_row(escape(name), "infeasible", "", style="dim")
        else:
            ratio = f"{seconds / total:.3f} x" if total else ""
            placements.add_row(escape(name), format_seconds(seconds), ratio)
    return Group(phases, Text(), modules, Text(), placements)


def methods_table(plan: Plan) -> Table:
    """The table of methods, in the order in which they were tried: value, ratio to the chosen plan,
    and when the value was found."""
    table = _table("method", "value", "against the plan", "found after", title="Methods")
    for method, value in plan.baselines.items():
        chosen = method == plan.placer
        style = "bold green" if chosen else None
        name = escape(label_of(plan, method)) + (" (chosen)" * chosen)
        if value is None:
            table.add_row(name, "infeasible", "", "", style="dim")
        else:
            table.add_row(
                name,
                format_value(plan, value),
                ratio_text(plan, method, value),
                found_after(plan, method),
                style=style,
            )
    if plan.placer not in plan.baselines:
        value_text = format_value(plan, plan.value)
        table.add_row(
            f"{escape(plan.placer)} (chosen)", value_text, "1.000 x", "", style="bold green"
        )
    return table


def label_of(plan: Plan, method: str) -> str:
    """The method's name, which says whether its value was measured among predicted ones."""
    return method + ", measured" * (method in plan.measured)


def ratio_text(plan: Plan, method: str, value: float) -> str:
    """The method's value over the plan's; "" where the two cannot be compared."""
    ratio = ratio_to(plan, method, value)
    return "" if ratio is None else f"{ratio:.3f} x"


def found_after(plan: Plan, method: str) -> str:
    """The time after which the search first had the method's value; "" if it is not known."""
    seconds = plan.found_seconds.get(method)
    return "" if seconds is None else format_seconds(seconds)


def memory_table(plan: Plan, graph: Graph) -> Table:
    """The table of devices: number of ops, load (for objective load), peak memory, and the memory
    that the device may use. A host that neither runs nor holds anything has no row."""
    loads = loads_of(plan, graph)
    head = ("device", "ops", *(("load",) if loads else ()), "peak memory", "available", "used")
    table = _table(*head, title="Devices")
    counts = np.bincount(
        plan.placement[~graph.is_source], minlength=len(plan.machine.devices)
    ).tolist()
    capacities = capacities_of(plan.machine, dict(plan.caps)).tolist()
    capped = {device for device, _ in plan.caps}
    for device, count, peak, capacity in zip(
        plan.machine.devices, counts, plan.peak_memory_bytes, capacities, strict=True
    ):
        name, runs = device.name, device.kind != "host"
        if not (runs or peak):
            continue
        cells = [f"{count:,}" if runs else ""]
        cells += [format_value(plan, loads[name]) if runs else ""] if loads else []
        limited = 0 < capacity < BEYOND_ANY_BYTES
        used = f"{100 * peak / capacity:.1f} %" if limited else ""
        cells += [
            format_bytes(peak),
            format_capacity(capacity) + (" (cap)" * (name in capped)),
            used,
        ]
        table.add_row(escape(name), *cells, style="bold red" if peak > capacity else None)
    return table


def loads_of(plan: Plan, graph: Graph) -> dict[str, float]:
    """device -> seconds of its load, for a plan for objective load; empty for other objectives."""
    if plan.objective != "load":
        return {}
    costs = Costs(plan.compute_seconds, plan.costs_source, plan.sent_bytes)
    loads = device_loads(graph, plan.machine, costs, plan.placement)
    return dict(zip(plan.machine.device_names, loads.tolist(), strict=True))


def run_table(
    predicted: Timeline | float,
    measured_seconds: NDArray[np.float64] | Sequence[float],
    measured: Timeline | None = None,
) -> RenderableType:
    """The table of predicted beside measured seconds: the step, each device, and the channels.

    predicted   the timeline, or the step's seconds where nothing is known of its devices
    """
    seconds = np.asarray(measured_seconds, dtype=np.float64)
    step = _table("", "predicted", "measured", "error", title=f"{len(seconds)} measured steps")
    for label, mine, measured_value in run_rows(predicted, seconds, measured):
        step.add_row(escape(label), *_compare(mine, measured_value))
    return step


def run_rows(
    predicted: Timeline | float, seconds: NDArray[np.float64], measured: Timeline | None
) -> list[tuple[str, float | None, float | tuple[float, float] | None]]:
    """(label, predicted, measured) in seconds, of the step, each device and the channels. A pair is
    a range from lowest to highest; None: there is no such figure."""
    rows: list[tuple[str, float | None, float | tuple[float, float] | None]] = []
    step = predicted.step_seconds if isinstance(predicted, Timeline) else predicted
    if len(seconds):
        rows.append(("step, median", step, float(np.median(seconds))))
        rows.append(("step, mean", step, float(seconds.mean())))
        rows.append(("step, lowest to highest", None, (float(seconds.min()), float(seconds.max()))))
    else:
        lone = None if measured is None else measured.step_seconds
        rows.append(("step", step, lone))
    if not isinstance(predicted, Timeline):
        return rows
    busy = [None] * len(predicted.devices) if measured is None else measured.busy_seconds.tolist()
    for name, predicted_busy, measured_busy in zip(
        predicted.devices, predicted.busy_seconds, busy, strict=True
    ):
        rows.append((f"{name} computes", float(predicted_busy), measured_busy))
    carried = None if measured is None else float(measured.channel_seconds.sum())
    rows.append(("channels carry", float(predicted.channel_seconds.sum()), carried))
    return rows


def _compare(
    predicted: float | None, measured: float | tuple[float, float] | None
) -> tuple[str, str, str]:
    predicted_text = "" if predicted is None else format_seconds(predicted)
    if isinstance(measured, tuple):
        return predicted_text, f"{format_seconds(measured[0])} to {format_seconds(measured[1])}", ""
    measured_text = "" if measured is None else format_seconds(measured)
    error = f"{100 * (predicted / measured - 1):+.1f} %" if predicted and measured else ""
    return predicted_text, measured_text, error


def limits_table(limits: StepLimits, timeline: Timeline, plan: Plan) -> RenderableType:
    """What bounds the plan: the sentences, and a table of the critical chain by share."""
    sentences = Text(printable(explain(limits, timeline, plan)))
    parts = shares(limits, timeline)
    if not parts:
        return sentences
    table = _table("critical chain", "time", "share")
    named = max(1, sum(share >= LEAST_SHARE for _, share in parts))
    if len(parts) > named + 1:
        rest = parts[named:]
        parts = [*parts[:named], (f"{len(rest)} smaller", sum(share for _, share in rest))]
    for what, share in parts:
        spent = format_seconds(share * limits.total_seconds)
        table.add_row(escape(what), spent, f"{100 * share:.1f} %")
    return Group(sentences, table)


def schedules_table(schedules: Schedules) -> RenderableType:
    """For each batch size a table of the schedulers: predicted and measured seconds, the speed-up
    (sequential's seconds over the schedule's), stages, and what the search took. A spread is the
    interquartile range over the median."""
    shown: list[RenderableType] = []
    for result in schedules.results:
        head, rows = overview_rows(result)
        table = _table(*head, title=f"Batch {result.batch:,}")
        for cells, chosen in rows:
            table.add_row(*map(escape, cells), style="bold green" if chosen else None)
        shown += [table, Text()]
    what = f"{schedules.model} on {schedules.device}; costs: {schedules.costs_source}"
    return Group(Text(printable(what)), *shown[:-1])


def machine_table(machine: Machine) -> RenderableType:
    """The tables of a machine: devices with their rates, and links."""
    devices = _table(
        "device", "kind", "model", "cores", "memory", "peak", "bandwidth", "per op",
        title=f"Machine {escape(machine.name)}",
    )  # fmt: skip
    for device in machine.devices:
        runs = device.kind != "host"
        rates = ", ".join(
            f"{dtype} {format_count(rate, 'FLOP/s')}"
            + " (computed in float32)" * (dtype in emulated_dtypes(device))
            for dtype, rate in device.flops_per_second.items()
        )
        if device.efficiencies:
            rates += f"; reached: {format_shares(device.efficiencies)}"
        bandwidth = format_bandwidth(device.bandwidth_bytes_per_second) if runs else ""
        devices.add_row(
            escape(device.name) + (" (host)" * (device.name == machine.host)),
            device.kind,
            escape(device.model),
            _cores_text(device),
            format_capacity(device.memory_bytes),
            escape(rates),
            bandwidth,
            format_seconds(device.op_overhead_seconds) if runs else "",
        )
    if not machine.links:
        return devices
    links = _table("link", "bandwidth", "latency", "channel", title="Links")
    for link in machine.links:
        links.add_row(
            f"{escape(link.source)} -> {escape(link.destination)}",
            format_bandwidth(link.bandwidth_bytes_per_second),
            format_seconds(link.latency_seconds),
            escape(link.channel),
        )
    return Group(devices, Text(), links)


def gpus_table(rates: Sequence[GpuMeasurement]) -> RenderableType:
    """The tables of what was measured of GPUs: products and peers, then copies of each GPU."""
    dtypes = list(dict.fromkeys(dtype for gpu in rates for dtype in gpu.flops_per_second))
    several = len(rates) > 1
    gpus = _table(
        "GPU", "name", "all memory", *dtypes, *["reaches"] * several,
        title="GPUs, measured now",
    )  # fmt: skip
    copies = _table("copy", "pinned", "pageable", title="Copies, measured now")
    names = {gpu.torch_device: ", ".join(gpu.devices) for gpu in rates}
    for gpu in rates:
        flops, name = gpu.flops_per_second, escape(names[gpu.torch_device])
        gpus.add_row(
            name,
            escape(gpu.model),
            format_bytes(gpu.memory_bytes),
            *(format_count(flops[d], "FLOP/s") if d in flops else "none" for d in dtypes),
            *[escape("; ".join(names[peer] for peer in gpu.peers)) or "none"] * several,
        )
        for way, ends in (("to", f"host -> {name}"), ("from", f"{name} -> host")):
            copies.add_row(
                ends,
                *(format_bandwidth(gpu.copies[way, memory]) for memory in ("pinned", "pageable")),
            )
    return Group(gpus, Text(), copies)


def networks_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """The table of networks, one row for each; its columns are the keys of the first row.

    The last word of a key says how its number is written: `parameter_bytes` and `step_seconds` in
    their units, `training_ops` and `batch` in full, any other as a count.
    """
    keys = list(rows[0]) if rows else ["network"]
    table = _table(*map(_heading, keys), title="Networks")
    for column, key in zip(table.columns, keys, strict=True):
        has_text = any(isinstance(row.get(key), str) and row[key] for row in rows)
        column.justify = "left" if has_text else "right"
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(escape(_cell(key, row.get(key, ""))) for key in keys))
    return table


def network_table(
    facts: Sequence[tuple[str, object]], options: Mapping[str, object]
) -> RenderableType:
    """A network's facts, with whole numbers in full, and a table of its options with their
    defaults."""
    shown = Table.grid(padding=(0, 2))
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    for label, value in facts:
        text = _cell(label, value)
        if isinstance(value, int) and text != f"{value:,}":
            text = f"{value:,} ({text})"
        shown.add_row(escape(_heading(label)), escape(text))
    table = _table("option", "default", title="Options")
    for option, default in options.items():
        text = str(default).lower() if isinstance(default, bool) else f"{default:,}"
        table.add_row(escape(option), escape(text))
    return Group(shown, Text(), table)


def graph_summary(graph: Graph) -> RenderableType:
    """The tables of a graph: ops, FLOPs and bytes by phase, and the sizes of the sources by
    kind."""
    table = _table("phase", "ops", "kinds", "FLOPs", "bytes accessed", title="Graph")
    kinds = np.array(graph.kinds, dtype=object)
    for phase in Phase:
        of = graph.phases == phase
        if phase == Phase.SOURCE or not of.any():
            continue
        table.add_row(
            phase.name.lower(),
            f"{int(of.sum()):,}",
            f"{len(set(kinds[of])):,}",
            format_count(float(graph.flops[of].sum())),
            format_bytes(float(graph.accessed_bytes[of].sum())),
        )
    held = _table("source", "count", "elements", "bytes", title="Sources")
    for kind in SOURCE_KINDS:
        tensors = np.flatnonzero(((kinds == kind) & graph.is_source)[graph.producers])
        if len(tensors):
            elements = sum(int(np.prod(graph.shapes[t])) for t in tensors)
            size = format_bytes(float(graph.tensor_bytes[tensors].sum()))
            held.add_row(kind, f"{len(tensors):,}", f"{elements:,}", size)
    total = Text(
        f"{len(graph):,} ops, {graph.tensors:,} tensors, "
        f"{format_count(float(graph.flops.sum()), 'FLOP')}, "
        f"{format_bytes(float(graph.tensor_bytes.sum()))} of tensors; {graph.fingerprint}"
    )
    return Group(table, Text(), held, total)


def _heading(key: str) -> str:
    return key.replace("_", " ").replace("flops", "FLOPs")


def _cell(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    unit = key.rpartition("_")[2]
    if unit == "bytes":
        return format_bytes(value)
    if unit in ("ops", "batch"):
        return f"{value:,}"
    return format_seconds(value) if unit == "seconds" else format_count(float(value))


def _cores_text(device: Device) -> str:
    threads, text = device.op_threads, _ranges(device.cores)
    if threads == len(device.cores):
        return text
    return f"{text}; {threads} thread{'s' * (threads != 1)} an op"


def _ranges(cores: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` -> "0-2, 5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _table(*columns: str, title: str | None = None) -> Table:
    """An empty table without borders. The first column is aligned left, the others right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if i == 0 else "right", overflow="fold")
    return table
