"""The page's data, packed: 100,000 spans in some 2 MB of plain JSON.

Times are whole nanoseconds. Names like "lstm.0/addmm_3" are mostly repetition: ops that differ by
one number only, with the same kind, module and phase, share one *template*, and an op is (template,
number), both written as differences. Spans of a row are (op difference, gap since the last end,
length).
`assets/timeline.js` undoes this.
"""

import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.graph.records import Phase
from dovetail.reports.folding import Folds
from dovetail.reports.layout import Placed, View, edges_between
from dovetail.reports.limits import OP, Limits
from dovetail.reports.records import Report
from dovetail.timeline import Timeline

NANO = 1e9


def pack(report: Report, limits: list[Limits], views: list[View], folds: Folds) -> dict[str, Any]:
    """Everything the page's scripts draw."""
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
    """strings, templates [[before, after, kind, module: indices into strings, phase]], and per op
    its template and number as differences: the number's to the last one of the same template."""
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
    """ "addmm_3_b" -> ("addmm_", 3, "_b"), at the last number; without one -> (name, -1, "")."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else (name, -1, "")


# No leading zero and no more digits than an int32 holds: the number must come back as it was.
_NUMBERED = re.compile(r"((?:.*[^0-9])?)(0|[1-9][0-9]{0,8})([^0-9]*)", re.DOTALL)


def runs(flags: NDArray[np.bool_]) -> list[int]:
    """Lengths of the runs of False, True, False ... in turn."""
    ends = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=2))
    lengths: list[int] = np.diff(ends, prepend=0).tolist()
    return lengths


def pack_timeline(name: str, timeline: Timeline, graph: Graph, limits: Limits) -> dict[str, Any]:
    """Rows of devices and of the channels that carry something; `critical` holds runs of
    spans that are not, and are, on the critical chain."""
    critical_ops = np.zeros(len(timeline.ops), dtype=bool)
    critical_transfers = np.zeros(len(timeline.transfer_ops), dtype=bool)
    for kind, i in limits.chain:
        (critical_ops if kind == OP else critical_transfers)[i] = True
    rows = []
    for device, label in enumerate(timeline.devices):
        of = np.flatnonzero(timeline.op_devices == device)
        of = of[np.argsort(timeline.op_starts[of], kind="stable")]
        row = _row(label, "device", timeline.op_starts[of], timeline.op_ends[of])
        row["ops"] = np.diff(timeline.ops[of], prepend=0).tolist()
        row["critical"] = runs(critical_ops[of])
        rows.append(row)
    for channel, label in enumerate(timeline.channels):
        of = np.flatnonzero(timeline.transfer_channels == channel)
        if not len(of):
            continue
        of = of[np.argsort(timeline.transfer_starts[of], kind="stable")]
        row = _row(label, "channel", timeline.transfer_starts[of], timeline.transfer_ends[of])
        row["ops"] = np.diff(timeline.transfer_ops[of], prepend=0).tolist()
        row["critical"] = runs(critical_transfers[of])
        tensors = timeline.transfer_tensors[of]
        row["bytes"] = np.where(tensors >= 0, graph.tensor_bytes[tensors], 0).tolist()
        row["to"] = timeline.transfer_destinations[of].tolist()
        rows.append(row)
    return {"name": name, "step": round(timeline.step_seconds * NANO), "rows": rows}


def _row(
    label: str, kind: str, starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> dict[str, Any]:
    from_ns = np.rint(starts * NANO).astype(np.int64)
    to_ns = np.rint(ends * NANO).astype(np.int64)
    before = np.concatenate([[0], to_ns[:-1]]).astype(np.int64)
    return {
        "label": label,
        "kind": kind,
        "gaps": (from_ns - before).tolist(),
        "lengths": (to_ns - from_ns).tolist(),
    }


def pack_view(view: View) -> dict[str, Any]:
    """A picture of the graph: one array a column, and edges as flat (from, to, bytes) triples."""
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


def pack_folds(folds: Folds, graph: Graph, plan: Placed) -> dict[str, Any]:
    """The tree of modules, its leaves one array a column, and their edges as (from, to, bytes)."""
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


def to_script(data: dict[str, Any]) -> str:
    """JSON that can stand inside a <script> element: no "<", ">", "&" or line separator in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
