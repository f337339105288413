"""Makes the tables of plans, machines, networks and graphs, for the terminal and for pages.
`plan_table` is for the terminal alone.

Each function returns what rich prints, and prints nothing. Every name in them is foreign text: a
`Table` shows it character by character.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from dovetail.costs import Costs
from dovetail.costs.kernels import EXACT, is_modelled, step_spread
from dovetail.errors import GraphMismatchError
from dovetail.graph import Graph
from dovetail.graph.records import SOURCE_KINDS, Phase
from dovetail.machine import PRESETS, Machine, emulated_dtypes
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
from dovetail.reports.kit import Table
from dovetail.reports.limits import StepLimits, explain, shares
from dovetail.reports.schedules import overview
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


def stacked(*shown: RenderableType) -> Group:
    """Tables one below the other, with a line between them."""
    parts: list[RenderableType] = []
    for each in shown:
        parts += [Text(), each]
    return Group(*parts[1:])


def plan_facts(
    plan: Plan, graph: Graph, interval: tuple[float, float] | None = None
) -> list[tuple[str, str]]:
    """(label, text) pairs that sum a plan up.

    interval   of its value, as `interval_of`

    There is a note for each model of device that computes some dtype of the graph in float32; with
    analytic costs also for each dtype of the graph's numbers whose rate some devices do not give.
    """
    machine, used = plan.machine, dict.fromkeys(graph.dtypes)
    emulated = {device.model: emulated_dtypes(device) for device in machine.devices}
    notes = [
        f"a {model} has no fast units for {' and '.join(dtypes)}: costed as computed in float32"
        for model, emulated_of in emulated.items()
        # Integer tensors are mostly indices and flags, which nothing multiplies.
        if (dtypes := [dtype for dtype in emulated_of if dtype in used and dtype != "int8"])
    ]
    derived: dict[str, list[str]] = {}
    for dtype in used if plan.costs_source == "analytic" else ():
        for device in machine.devices:
            source, times = device.rate_source(dtype)
            # Integers are mostly indices and flags, and count as float32 everywhere.
            is_exact = dtype.startswith(EXACT)
            if device.kind != "host" and source != dtype and not is_exact:
                part = f"1/{times} of {source}'s" if times > 1 else f"{source}'s"
                derived.setdefault(f"{dtype} is costed at {part} rate", []).append(device.model)
    notes += [
        f"{how}, as {' and '.join(dict.fromkeys(models))} give none for it"
        for how, models in derived.items()
    ]
    sources = int(graph.is_source.sum())
    what = f"{len(graph) - sources:,} ops and {sources:,} sources in {plan.groups:,} groups"
    value = f"{plan.objective} {format_value(plan, plan.value)}"
    facts = [
        ("model", plan.source.model + (f", {plan.source.training}" * bool(plan.source.training))),
        ("graph", what),
        ("machine", f"{machine.name}: {', '.join(machine.device_names)}"),
        ("costs", plan.costs_source),
        ("method", f"{plan.placer}, seed {plan.seed}" + ", contiguous" * plan.contiguous),
    ]
    if plan.way == PLACED:
        interval = interval_of(plan, graph)
        facts.append(
            ("predicted", value + (f"; {format_interval(plan, interval)}" * bool(interval)))
        )
    if plan.measured:
        measured = format_value(plan, plan.measured[plan.way])
        facts.append(("measured", f"{plan.objective} {measured}"))
    if plan.lower_bound > 0:
        bound = format_value(plan, plan.lower_bound)
        facts.append(("lower bound", f"{bound}, by {plan.bound_proof}"))
    facts.append(("gap", describe_gap(plan)))
    searched = format_seconds(plan.planning_seconds)
    facts.append(("planning", searched + (", interrupted: best so far" * plan.interrupted)))
    facts += [("note", note) for note in notes]
    if plan.made_for:
        facts.append(("for", plan.made_for))
    facts += [("whole", pattern) for pattern in plan.whole]
    facts += [("pin", f"{pattern} = {device}") for pattern, device in plan.pins]
    facts += [("cap", f"{device}: {format_bytes(size)}") for device, size in plan.caps]
    facts += [("note", note) for note in plan.notes]
    return facts


_MEASURED_FACTORS = (0.9, 1.5)
"""The calls of four of five of the 80 plans in benchmarks/fidelity took .91 to 1.49 times their
prediction, on two virtual cores of one machine."""


def interval_of(plan: Plan, graph: Graph) -> tuple[float, float] | None:
    """(least, most) that 80 % of such steps should take once they are measured; None where nothing
    says how far off they are.

    Analytic costs have the errors of their kernels on single devices; links are taken as they are.
    Measured costs have the errors of such plans' calls, which only CPUs have run. A plan that was
    measured itself needs no interval.

    graph   of the plan's step, as in `plan_table`
    """
    if plan.way != PLACED or PLACED in plan.measured:
        return None
    if plan.costs_source == "measured":
        kinds = {plan.machine.devices[device].kind for device in set(plan.placement.tolist())}
        if plan.objective != "step" or "gpu" in kinds:
            return None
        least, most = _MEASURED_FACTORS
        return plan.value * least, plan.value * most
    if plan.costs_source != "analytic":
        return None
    graph = planned_graph(plan, graph)
    spread = step_spread(graph, plan.machine, plan.placement, plan.compute_seconds)
    return (plan.value * math.exp(-spread), plan.value * math.exp(spread)) if spread else None


def format_interval(plan: Plan, interval: tuple[float, float] | None) -> str:
    """Return an interval of the plan's objective as text; "" for None."""
    if interval is None:
        return ""
    least, most = (format_value(plan, value) for value in interval)
    return f"80 % likely {least} to {most} once measured"


def plan_table(plan: Plan, graph: Graph) -> RenderableType:
    """The tables of a plan: its facts, every method that was tried, and memory per device.

    graph   of the plan's step, with or without the plan's copies. Raises `GraphMismatchError` for
            another one
    """
    graph = planned_graph(plan, graph)
    if len(graph) != len(plan.placement):
        raise GraphMismatchError(plan.graph_fingerprint, graph.fingerprint)
    # A host that neither runs nor holds anything has no row.
    loads = loads_of(plan, graph)
    counts = np.bincount(
        plan.placement[~graph.is_source], minlength=len(plan.machine.devices)
    ).tolist()
    capacities = capacities_of(plan.machine, dict(plan.caps)).tolist()
    capped = {device for device, _ in plan.caps}
    rows: list[dict[str, str]] = []
    marks: dict[int, str] = {}
    for device, count, peak, capacity in zip(
        plan.machine.devices, counts, plan.peak_memory_bytes, capacities, strict=True
    ):
        name, runs = device.name, device.kind != "host"
        if not (runs or peak):
            continue
        if peak > capacity:
            marks[len(rows)] = "over"
        load = {"load": format_value(plan, loads[name]) if runs else ""} if loads else {}
        limited = 0 < capacity < BEYOND_ANY_BYTES
        rows.append({
            "device": name,
            "ops": f"{count:,}" if runs else "",
            **load,
            "peak memory": format_bytes(peak),
            "available": format_capacity(capacity) + " (cap)" * (name in capped),
            "used": f"{100 * peak / capacity:.1f} %" if limited else "",
        })  # fmt: skip
    memory = Table.of(rows, title="Devices", marks=marks)
    interval = interval_of(plan, graph)
    facts = Table((), plan_facts(plan, graph, interval))
    return stacked(facts, methods_table(plan, interval), memory)


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
    rows = []
    for name, plan in plans.items():
        share = f"{100 * weights[name] * plan.value / total:.1f} %" if total else ""
        peaks = zip(plan.machine.device_names, plan.peak_memory_bytes, strict=True)
        memory = ", ".join(f"{device} {format_bytes(peak)}" for device, peak in peaks if peak)
        rows.append((name, format_value(plan, plan.value), f"{weights[name]:g}", share, memory))
    rows.append(("all, weighted", format_seconds(total), "", "", ""))
    phases = Table(("phase", "seconds", "times", "share", "peak memory"), rows, title="Phases",
                   marks={len(plans): "total"})  # fmt: skip
    modules: dict[str, list[str]] = {}
    for path, device in devices.items():
        modules.setdefault(device, []).append(path or "(the model itself)")
    placed = Table(
        ("device", "modules with parameters"),
        [(device, ", ".join(paths)) for device, paths in modules.items()],
        title="One placement for all phases",
    )
    tried = Table(
        ("placement", "weighted seconds", "against the plan"),
        [
            (name, "infeasible", "")
            if seconds is None
            else (name, format_seconds(seconds), f"{seconds / total:.3f} x" if total else "")
            for name, seconds in candidates.items()
        ],
        title="Placements tried",
        marks={i: "none" for i, seconds in enumerate(candidates.values()) if seconds is None},
    )
    return stacked(phases, placed, tried)


def methods_table(plan: Plan, interval: tuple[float, float] | None = None) -> Table:
    """The table of methods, in the order in which they were tried: value, ratio to the chosen plan,
    and when the search first had the value. A name says whether its value was measured among
    predicted ones. Values that cannot be compared have no ratio. Predictions within the interval of
    the plan's are too close to call, where its GPUs are modelled.

    interval   of the plan's value, as `interval_of`
    """
    modelled = [is_modelled(device) for device in plan.machine.devices if device.kind == "gpu"]
    least, most = interval if interval and modelled and all(modelled) else (plan.value, plan.value)
    rows: list[tuple[str, ...]] = []
    marks: dict[int, str] = {}
    for i, (method, value) in enumerate(tried_values(plan).items()):
        name = method + ", measured" * (method in plan.measured)
        if method == plan.placer:
            name, marks[i] = f"{name} (chosen)", "chosen"
        if value is None:
            rows.append((name, "infeasible", "", ""))
            marks[i] = "none"
            continue
        ratio, found_seconds = ratio_to(plan, method, value), plan.found_seconds.get(method)
        compared = "" if ratio is None else f"{ratio:.3f} x"
        if compared and method not in plan.measured and least < value < most and ratio != 1:
            compared += ", too close to call"
        rows.append((
            name,
            format_value(plan, value),
            compared,
            "" if found_seconds is None else format_seconds(found_seconds),
        ))  # fmt: skip
    head = ("method", "value", "against the plan", "found after")
    return Table(head, rows, title="Methods", marks=marks)


def tried_values(plan: Plan) -> dict[str, float | None]:
    """method -> value, of all methods that were tried and the chosen one."""
    values = dict(plan.baselines)
    values.setdefault(plan.placer, plan.value)
    return values


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
) -> Table:
    """The table of predicted beside measured seconds: the step, each device, and the channels.

    predicted   the timeline, or the step's seconds where nothing is known of its devices
    """
    seconds = np.asarray(measured_seconds, dtype=np.float64)
    rows: list[tuple[str, str, str, str]] = []

    def compare(label: str, before: float | None, after: float | None) -> None:
        """Add a row of predicted and measured seconds."""
        error = f"{100 * (before / after - 1):+.1f} %" if before and after else ""
        texts = ["" if value is None else format_seconds(value) for value in (before, after)]
        rows.append((label, texts[0], texts[1], error))

    step = predicted.step_seconds if isinstance(predicted, Timeline) else predicted
    if len(seconds):
        compare("step, median", step, float(np.median(seconds)))
        compare("step, mean", step, float(seconds.mean()))
        ends = f"{format_seconds(seconds.min())} to {format_seconds(seconds.max())}"
        rows.append(("step, lowest to highest", "", ends, ""))
    else:
        compare("step", step, None if measured is None else measured.step_seconds)
    if isinstance(predicted, Timeline):
        count = len(predicted.devices)
        busy = [None] * count if measured is None else measured.busy_seconds.tolist()
        for name, before, after in zip(
            predicted.devices, predicted.busy_seconds.tolist(), busy, strict=True
        ):
            compare(f"{name} computes", before, after)
        carried = None if measured is None else float(measured.channel_seconds.sum())
        compare("channels carry", float(predicted.channel_seconds.sum()), carried)
    head = ("", "predicted", "measured", "error")
    return Table(head, rows, title=f"{len(seconds)} measured steps")


def limits_table(limits: StepLimits, timeline: Timeline, plan: Plan) -> RenderableType:
    """What bounds the plan: the sentences, and a table of the critical chain by share."""
    sentences = Text(printable(explain(limits, timeline, plan)))
    parts = shares(limits, timeline)
    if not parts:
        return sentences
    named = max(1, sum(share >= LEAST_SHARE for _, share in parts))
    if len(parts) > named + 1:
        rest = parts[named:]
        parts = [*parts[:named], (f"{len(rest)} smaller", sum(share for _, share in rest))]
    rows = [
        (what, format_seconds(share * limits.total_seconds), f"{100 * share:.1f} %")
        for what, share in parts
    ]
    return Group(sentences, Table(("critical chain", "time", "share"), rows))


def schedules_table(schedules: Schedules) -> RenderableType:
    """For each batch size a table of the schedulers: predicted and measured seconds, the speed-up
    (sequential's seconds over the schedule's), stages, and what the search took. A spread is the
    interquartile range over the median."""
    what = f"{schedules.model} on {schedules.device}; costs: {schedules.costs_source}"
    return Group(Text(printable(what)), stacked(*map(overview, schedules.results)))


def machine_tables(machine: Machine) -> list[Table]:
    """The tables of a machine: devices with their rates, and links if there are any."""
    rows = []
    for device in machine.devices:
        runs = device.kind != "host"
        rates = ", ".join(
            f"{dtype} {format_count(rate, 'FLOP/s')}"
            + " (computed in float32)" * (dtype in emulated_dtypes(device))
            for dtype, rate in device.flops_per_second.items()
        )
        if device.efficiencies:
            rates += f"; reached: {format_shares(device.efficiencies)}"
        # Runs of cores: (0, 1, 2, 5) is "0-2, 5".
        spans: list[list[int]] = []
        for core in sorted(device.cores):
            if spans and core == spans[-1][-1] + 1:
                spans[-1].append(core)
            else:
                spans.append([core])
        cores = ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
        threads = device.op_threads
        if threads != len(device.cores):
            cores += f"; {threads} thread{'s' * (threads != 1)} an op"
        rows.append({
            "device": device.name + " (host)" * (device.name == machine.host),
            "kind": device.kind,
            "model": device.model,
            "cores": cores,
            "memory": format_capacity(device.memory_bytes),
            "peak": rates,
            "bandwidth": format_bandwidth(device.bandwidth_bytes_per_second) if runs else "",
            "per op": format_seconds(device.op_overhead_seconds) if runs else "",
        })  # fmt: skip
    # What messages take of both ends, if they take anything.
    messages = any(link.send_seconds or link.receive_seconds for link in machine.links)
    links = [
        {
            "link": f"{link.source} -> {link.destination}",
            "bandwidth": format_bandwidth(link.bandwidth_bytes_per_second),
            "latency": format_seconds(link.latency_seconds),
            "channel": link.channel,
        }
        | (
            {
                "sender busy": format_seconds(link.send_seconds),
                "receiver busy": format_seconds(link.receive_seconds),
            }
            if messages
            else {}
        )
        for link in machine.links
    ]
    tables = [Table.of(rows, title=f"Machine {machine.name}")]
    if links:
        tables.append(Table.of(links, title="Links"))
    known = [device for device in machine.devices if device.calibration]
    if known:
        factors = [
            {"class": name, **{d.name: f"{d.calibration.get(name, 1.0):.3g} x" for d in known}}
            for name in sorted({name for device in known for name in device.calibration})
        ]
        title = "Calibration: seconds over those of the cost model"
        tables.append(Table.of(factors, title=title))
    return tables


def presets_table() -> RenderableType:
    """The table of the devices that a MACHINE text may name."""
    rows = []
    for model, preset in PRESETS.items():
        device = preset.device
        float32 = device.rate("float32")
        fast = max(device.rate(dtype) for dtype in ("float16", "bfloat16"))
        rows.append({
            "device": model,
            "kind": device.kind,
            "memory": format_capacity(device.memory_bytes),
            "float32": format_count(float32, "FLOP/s"),
            "16 bits": format_count(fast, "FLOP/s") if fast > float32 else "",
            "bandwidth": format_bandwidth(device.bandwidth_bytes_per_second),
            "source": preset.source,
        })  # fmt: skip
    return Table.of(rows, title="Devices")


def machine_table(machine: Machine) -> RenderableType:
    """The tables of a machine, one below the other."""
    return stacked(*machine_tables(machine))


def gpus_table(rates: Sequence[GpuMeasurement]) -> RenderableType:
    """The tables of what was measured of GPUs: products and peers, then copies of each GPU."""
    dtypes = list(dict.fromkeys(dtype for gpu in rates for dtype in gpu.flops_per_second))
    several = len(rates) > 1
    names = {gpu.torch_device: ", ".join(gpu.devices) for gpu in rates}
    gpus, copies = [], []
    for gpu in rates:
        flops, name = gpu.flops_per_second, names[gpu.torch_device]
        peers = "; ".join(names[peer] for peer in gpu.peers) or "none"
        gpus.append({
            "GPU": name,
            "name": gpu.model,
            "all memory": format_bytes(gpu.memory_bytes),
            **{d: format_count(flops[d], "FLOP/s") if d in flops else "none" for d in dtypes},
            **({"reaches": peers} if several else {}),
        })  # fmt: skip
        for way, ends in (("to", f"host -> {name}"), ("from", f"{name} -> host")):
            kinds = ("pinned", "pageable")
            rate_of = {kind: format_bandwidth(gpu.copies[way, kind]) for kind in kinds}
            copies.append({"copy": ends} | rate_of)
    return stacked(
        Table.of(gpus, title="GPUs, measured now"), Table.of(copies, title="Copies, measured now")
    )


def networks_table(rows: Sequence[Mapping[str, object]]) -> RichTable:
    """The table of networks, one row for each; its columns are the keys of the first row.

    The last word of a key says how its number is written: `parameter_bytes` and `step_seconds` in
    their units, `training_ops` and `batch` in full, any other as a count.
    """
    keys = list(rows[0]) if rows else ["network"]
    left = [
        i for i, key in enumerate(keys) if any(isinstance(r.get(key), str) and r[key] for r in rows)
    ]
    cells = [[_cell(key, row.get(key, "")) for key in keys] for row in rows]
    table = Table(list(map(_heading, keys)), cells, title="Networks", left=left).__rich__()
    table.columns[0].no_wrap = True
    return table


def network_table(
    facts: Sequence[tuple[str, object]], options: Mapping[str, object]
) -> RenderableType:
    """A network's facts, with whole numbers in full, and a table of its options with their
    defaults."""
    rows = []
    for label, value in facts:
        text = _cell(label, value)
        if isinstance(value, int) and text != f"{value:,}":
            text = f"{value:,} ({text})"
        rows.append((_heading(label), text))
    defaults = [
        (option, str(default).lower() if isinstance(default, bool) else f"{default:,}")
        for option, default in options.items()
    ]
    return stacked(Table((), rows), Table(("option", "default"), defaults, title="Options"))


def graph_summary(graph: Graph) -> RenderableType:
    """The tables of a graph: ops, FLOPs and bytes by phase, and the sizes of the sources by
    kind."""
    kinds = np.array(graph.kinds, dtype=object)
    ops = []
    for phase in Phase:
        of = graph.phases == phase
        if phase == Phase.SOURCE or not of.any():
            continue
        ops.append({
            "phase": phase.name.lower(),
            "ops": f"{int(of.sum()):,}",
            "kinds": f"{len(set(kinds[of])):,}",
            "FLOPs": format_count(float(graph.flops[of].sum())),
            "bytes accessed": format_bytes(float(graph.accessed_bytes[of].sum())),
        })  # fmt: skip
    held = []
    for kind in SOURCE_KINDS:
        tensors = np.flatnonzero(((kinds == kind) & graph.is_source)[graph.producers])
        if len(tensors):
            held.append({
                "source": kind,
                "count": f"{len(tensors):,}",
                "elements": f"{sum(int(np.prod(graph.shapes[t])) for t in tensors):,}",
                "bytes": format_bytes(float(graph.tensor_bytes[tensors].sum())),
            })  # fmt: skip
    total = Text(
        f"{len(graph):,} ops, {graph.tensors:,} tensors, "
        f"{format_count(float(graph.flops.sum()), 'FLOP')}, "
        f"{format_bytes(float(graph.tensor_bytes.sum()))} of tensors; {graph.fingerprint}"
    )
    return stacked(Table.of(ops, title="Graph"), Group(Table.of(held, title="Sources"), total))


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
