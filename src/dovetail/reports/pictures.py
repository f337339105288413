"""Lays out what the scripts of a plan's page draw: the timelines, the graph, the tree of modules.

layout    the graph op by op: nodes in columns and lanes
folding   the tree of modules, in which ten layers alike take one line
packing   all of it, and the timelines, as small JSON
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.graph.records import EVERYWHERE, Phase
from dovetail.machine import Machine
from dovetail.reports.limits import OP, StepLimits
from dovetail.timeline import Timeline

Int32 = NDArray[np.int32]
Path = tuple[str, ...]


class PricedPlacement(Protocol):
    """The part of a `Plan` that a picture needs: placement [ops] and compute_seconds
    [ops, devices]."""

    @property
    def machine(self) -> Machine: ...
    @property
    def placement(self) -> Int32: ...
    @property
    def compute_seconds(self) -> NDArray[np.float64]: ...


# ---- Layout: the graph op by op ----
#
# Columns are layers: a forward node stands one column to the right of the rightmost node that it
# reads. A backward or update node stands in the column of the forward node that it belongs to. So
# the forward pass of a training step reads to the right, and the backward pass below it to the
# left:
#
#     cpu0 forward    [embed]──►[lstm.0]                       lanes: one per device and phase
#     cpu0 backward   [embed]◄──[lstm.0]
#     cpu1 forward                      └►[softmax]
#     cpu1 backward              ▲────────[softmax]
#
# A node of several ops can read from a node whose first op comes later. Such an edge is drawn, but
# columns are computed without it.

MOST_OPS = 1500
"""A larger graph is drawn by module alone."""


@dataclass(frozen=True, eq=False)
class GraphView:
    """One picture of the graph. Its nodes are in the order of their first op.

    labels, details    [nodes] the node's name, and a text with its kind or number of ops
    devices, phases, ops, flops, seconds   [nodes]; `ops` is the number of ops
    columns, rows      [nodes] the node's place; rows count through all lanes
    edges              [edges, 2] nodes (from, to); edge_bytes [edges] is what each carries
    lanes              (label, device, first row, number of rows), from the top
    """

    name: str
    labels: tuple[str, ...]
    details: tuple[str, ...]
    devices: Int32
    phases: Int32
    ops: Int32
    flops: NDArray[np.int64]
    seconds: NDArray[np.float64]
    columns: Int32
    rows: Int32
    edges: Int32
    edge_bytes: NDArray[np.int64]
    lanes: tuple[tuple[str, int, int, int], ...]


def draw(graph: Graph, plan: PricedPlacement) -> list[GraphView]:
    """The picture of the graph op by op; none if it has more than `MOST_OPS` ops."""
    real = np.flatnonzero(~graph.is_source)
    if len(real) > MOST_OPS:
        return []
    of_op = np.full(len(graph), -1, dtype=np.int32)
    of_op[real] = np.arange(len(real))
    return [view("ops", graph, plan, of_op, graph.names)]


def view(
    name: str, graph: Graph, plan: PricedPlacement, of_op: Int32, labels: tuple[str, ...]
) -> GraphView:
    """The picture of a graph whose ops are joined to nodes.

    of_op    [ops] the node of each op, numbered by first op; -1: it is left out. The ops of a node
             must have one phase and one device
    labels   [ops] the label of a node is that of its first op
    """
    real = np.flatnonzero(of_op >= 0)
    nodes = of_op[real]
    count = int(nodes.max(initial=-1)) + 1
    first = np.full(count, len(graph), dtype=np.int64)
    np.minimum.at(first, nodes, real)
    sizes = np.bincount(nodes, minlength=count).astype(np.int32)
    spent = plan.compute_seconds[real, plan.placement[real]]
    edges, edge_bytes = edges_between(graph, of_op)
    phases = graph.phases[first].astype(np.int32)
    devices = plan.placement[first].astype(np.int32)
    columns = _columns(graph, of_op, edges, phases)

    # Nodes of one column, device and phase stand below each other, ordered by the mean row of the
    # nodes that they read, then by number. `inside` [nodes] is each node's row within its lane.
    inside = np.zeros(count, dtype=np.float64)
    readings: dict[int, list[int]] = defaultdict(list)
    for a, b in edges.tolist():
        readings[b].append(a)
    cells: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for node in range(count):
        cells[int(columns[node]), int(devices[node]), int(phases[node])].append(node)
    # Columns are handled from left to right, so the nodes that a node reads mostly have their rows.
    for cell in sorted(cells):
        weights = {
            n: float(np.mean([inside[a] for a in readings[n]])) if readings[n] else 0.0
            for n in cells[cell]
        }
        for row, node in enumerate(sorted(cells[cell], key=lambda n: (weights[n], n))):
            inside[node] = row
    lanes: list[tuple[str, int, int, int]] = []
    rows = np.zeros(count, dtype=np.int32)
    top = 0
    for device, device_name in enumerate(plan.machine.device_names):
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
            of = (devices == device) & (phases == phase)
            if of.any():
                rows[of] = top + inside[of].astype(np.int32)
                height = int(inside[of].max()) + 1
                lanes.append((f"{device_name} {phase.name.lower()}", device, top, height))
                top += height
    return GraphView(
        name=name,
        labels=tuple(labels[op] for op in first.tolist()),
        details=tuple(
            f"{size} ops" if size > 1 else f"{graph.names[op]}: {graph.kinds[op]}"
            for op, size in zip(first.tolist(), sizes.tolist(), strict=True)
        ),
        devices=devices,
        phases=phases,
        ops=sizes,
        flops=np.bincount(nodes, weights=graph.flops[real], minlength=count).astype(np.int64),
        seconds=np.bincount(nodes, weights=spent, minlength=count).astype(np.float64),
        columns=columns,
        rows=rows,
        edges=edges,
        edge_bytes=edge_bytes,
        lanes=tuple(lanes),
    )


def edges_between(graph: Graph, of_op: Int32) -> tuple[Int32, NDArray[np.int64]]:
    """(edges [edges, 2], bytes [edges]): the distinct edges between nodes, in ascending order, and
    the bytes that each carries."""
    producers = of_op[graph.producers[graph.input_tensors]]
    readers = of_op[graph.readers]
    between = (producers >= 0) & (readers >= 0) & (producers != readers)
    pairs = np.stack([producers[between], readers[between]], axis=1)
    edges, inverse = np.unique(pairs, axis=0, return_inverse=True)
    sizes = graph.tensor_bytes[graph.input_tensors][between]
    carried = np.bincount(inverse.ravel(), weights=sizes, minlength=len(edges))
    return edges.astype(np.int32).reshape(-1, 2), carried.astype(np.int64)


def _columns(graph: Graph, of_op: Int32, edges: Int32, phases: Int32) -> Int32:
    """[nodes] the layer of each forward node; for other nodes the column of the forward node that
    they belong to."""
    forward = (phases == Phase.FORWARD).tolist()
    columns = [0] * len(phases)
    first_reader = [len(graph)] * len(phases)
    # [nodes] False: no edge and no anchor says where the node belongs.
    settled = np.zeros(len(phases), dtype=bool)
    # Edges are sorted by their first node, so a node's column is final before others read it.
    for a, b in edges.tolist():
        if a < b and forward[a] and forward[b]:
            columns[b] = max(columns[b], columns[a] + 1)
            settled[a] = settled[b] = True
    for a, b in edges.tolist():
        if a < b and forward[a] and forward[b]:
            first_reader[a] = min(first_reader[a], columns[b])
    for node, reader in enumerate(first_reader):
        # A node that waits for nothing stands beside its first reader, not far left of it.
        if columns[node] == 0 and reader < len(graph):
            columns[node] = reader - 1

    # [ops] the anchor of each op, which is the forward op that it belongs to; -1: none. A forward
    # op is its own anchor. The anchor of a gradient is the op whose gradient it is. The anchor of a
    # parameter is its first forward reader. Any other op has the anchor of one of its inputs: the
    # first anchor in the op's own module, else the first anchor of all, where parameters come
    # before other inputs.
    anchors: list[int] = np.where(
        graph.phases == Phase.FORWARD, np.arange(len(graph)), graph.gradient_of
    ).tolist()
    for op in np.flatnonzero(graph.is_source).tolist():
        readers = [r for t in graph.outputs_of(op) for r in graph.consumers_of(t).tolist()]
        if graph.kinds[op] == "parameter":
            anchors[op] = next((r for r in readers if graph.phases[r] == Phase.FORWARD), -1)
    makers = graph.producers[graph.input_tensors].tolist()
    offsets = graph.input_offsets.tolist()
    for op in np.flatnonzero(~graph.is_source).tolist():
        if anchors[op] < 0:
            inputs = makers[offsets[op] : offsets[op + 1]]
            inputs.sort(key=lambda maker: graph.kinds[maker] != "parameter")
            reached = [anchors[maker] for maker in inputs if anchors[maker] >= 0]
            in_module = (a for a in reached if graph.modules[a] == graph.modules[op])
            anchors[op] = next(in_module, reached[0] if reached else -1)

    anchored: dict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero((of_op >= 0) & (np.array(anchors, dtype=np.int32) >= 0)).tolist():
        if not forward[of_op[op]] and settled[of_op[anchors[op]]]:
            anchored[int(of_op[op])].append(columns[of_op[anchors[op]]])
    for node, near in anchored.items():
        columns[node] = round(median(near))
        settled[node] = True
    # A node that is still not settled stands in the column of the first settled node of its module.
    places: dict[str, int] = {}
    real = np.flatnonzero(of_op >= 0).tolist()
    for op in real:
        if settled[of_op[op]]:
            places.setdefault(graph.modules[op], columns[of_op[op]])
    for op in real:
        if not settled[of_op[op]]:
            columns[of_op[op]] = places.get(graph.modules[op], columns[of_op[op]])
    return np.array(columns, dtype=np.int32)


# ---- Folding: the tree of modules ----
#
#     (model)
#       embed_tokens
#       layers.0-9          a run: ten siblings numbered in a row, with equal modules inside and on
#                           the same devices
#         layers.0
#           self_attn
#           ...
#       layers.10-19
#       lm_head
#
# A fold is a module, a run of such siblings, or a chain of modules each of which holds nothing but
# the next. A fold is open or closed. All ops within a closed fold are drawn as one node for each
# phase and device. *Leaves* are the finest nodes: the ops of one module, phase and device.

MOST_LEAVES, MOST_SHOWN = 4000, 40
"""Paths of modules are cut to the depth that leaves at most `MOST_LEAVES` leaves. At first at most
`MOST_SHOWN` nodes are shown."""
HELD = ("parameter", "buffer")
TOP = "(model)"


@dataclass(frozen=True, eq=False)
class Folds:
    """The folds in the order of the tree, each before those within it; fold 0 is the whole model.

    labels, paths    a fold's own part of its path, and the whole path
    parents          [folds] the fold directly around each; -1 for the whole model
    runs             the folds that are runs of siblings
    opened           the folds that are open at first
    leaf_folds, leaf_phases, leaf_devices   [leaves] each leaf's innermost fold, phase and device
    leaf_of          [ops] the leaf of each op; -1 for sources
    seconds          [folds, devices] seconds of computing, of all ops within the fold
    parameter_bytes  [folds, devices] bytes of all parameters and buffers within the fold; one that
                     several devices hold counts at each of them
    """

    labels: tuple[str, ...]
    paths: tuple[str, ...]
    parents: NDArray[np.int32]
    runs: tuple[int, ...]
    opened: tuple[int, ...]
    leaf_folds: NDArray[np.int32]
    leaf_phases: NDArray[np.int32]
    leaf_devices: NDArray[np.int32]
    leaf_of: NDArray[np.int32]
    seconds: NDArray[np.float64]
    parameter_bytes: NDArray[np.float64]

    def around(self, fold: int) -> Iterator[int]:
        """Yield the fold and every fold around it, up to the whole model."""
        while fold >= 0:
            yield fold
            fold = int(self.parents[fold])

    def shown(self, opened: Sequence[int]) -> NDArray[np.int32]:
        """[leaves] the fold in which each leaf is drawn: the outermost closed one around it, or its
        own if all are open."""
        open_folds = set(opened)
        drawn = [
            next((f for f in reversed(list(self.around(fold))) if f not in open_folds), fold)
            for fold in range(len(self.labels))
        ]
        return np.array(drawn, dtype=np.int32)[self.leaf_folds]


@dataclass
class _Node:
    """A module, or a run of modules if it has `members`.

    has_ops   ops are directly in the module, not only in modules inside it
    """

    path: Path
    children: dict[str, "_Node"] = field(default_factory=dict)
    devices: set[int] = field(default_factory=set)
    has_ops: bool = False
    members: tuple["_Node", ...] = ()

    @property
    def make(self) -> object:
        """A value that is equal for modules with the same tree of modules inside."""
        return tuple((name, child.make) for name, child in self.children.items())


def fold(graph: Graph, plan: PricedPlacement) -> Folds:
    """The folds of a plan's graph. O(ops x depth)."""
    ops = np.flatnonzero(~graph.is_source).tolist()
    paths = [tuple(part for part in module.split(".") if part) for module in graph.modules]
    # Paths are cut at this depth. (path, phase, device) -> leaf, numbered by first op.
    for depth in range(max((len(paths[op]) for op in ops), default=0), -1, -1):
        leaves: dict[tuple[Path, int, int], int] = {}
        for op in ops:
            key = (paths[op][:depth], int(graph.phases[op]), int(plan.placement[op]))
            leaves.setdefault(key, len(leaves))
        if len(leaves) <= MOST_LEAVES:
            break
    top = _Node(())
    for op in ops:
        node = top
        node.devices.add(int(plan.placement[op]))
        for part in paths[op][:depth]:
            node = node.children.setdefault(part, _Node((*node.path, part)))
            node.devices.add(int(plan.placement[op]))
        node.has_ops = True

    # Folds are numbered in the order of the tree; `fold_of` is module path -> fold.
    labels, full, parents, runs = [TOP], [TOP], [-1], []
    fold_of: dict[Path, int] = {(): 0}
    waiting = [(node, 0, 0) for node in reversed(_group_runs(top))]
    while waiting:
        node, parent, inherited = waiting.pop()
        index = len(labels)
        parents.append(parent)
        if node.members:
            runs.append(index)
            first, last = node.members[0].path, node.members[-1].path
            labels.append(f"{'.'.join(first[inherited:])}-{last[-1]}")
            full.append(f"{'.'.join(first)}-{last[-1]}")
            waiting += [(member, index, inherited) for member in reversed(node.members)]
            continue
        fold_of[node.path] = index
        # A module without ops of its own and with one child is one fold with that child.
        while len(node.children) == 1 and not node.has_ops:
            node = next(iter(node.children.values()))
            fold_of[node.path] = index
        labels.append(".".join(node.path[inherited:]))
        full.append(".".join(node.path))
        waiting += [(inner, index, len(node.path)) for inner in reversed(_group_runs(node))]

    leaf_folds = np.array([fold_of[path] for path, _, _ in leaves], dtype=np.int32)
    count, devices = len(labels), len(plan.machine.devices)
    seconds = np.zeros((count, devices))
    held = np.zeros((count, devices))
    for op in ops:
        device = int(plan.placement[op])
        seconds[fold_of[paths[op][:depth]], device] += plan.compute_seconds[op, device]
    for source in np.flatnonzero(graph.is_source).tolist():
        if graph.kinds[source] not in HELD:
            continue
        # A parameter or buffer is held for the whole step by the device of the op that writes it,
        # or, if no op does, by every device that reads it.
        users = [int(graph.residences[source])]
        if users[0] == EVERYWHERE:
            users = [int(r) for t in graph.outputs_of(source) for r in graph.consumers_of(t)]
        path = paths[source][:depth]
        # A module that holds a parameter but runs nothing has no fold. The next one around it has.
        while path not in fold_of:
            path = path[:-1]
        size_bytes = sum(graph.tensor_bytes[t] for t in graph.outputs_of(source))
        for device in {int(plan.placement[user]) for user in users}:
            held[fold_of[path], device] += size_bytes
    # A fold's number is larger than its parent's, so this order adds up whole subtrees.
    for inner in range(count - 1, 0, -1):
        seconds[parents[inner]] += seconds[inner]
        held[parents[inner]] += held[inner]
    leaf_of = np.full(len(graph), -1, dtype=np.int32)
    for op in ops:
        leaf_of[op] = leaves[paths[op][:depth], int(graph.phases[op]), int(plan.placement[op])]
    folds = Folds(
        labels=tuple(labels),
        paths=tuple(full),
        parents=np.array(parents, dtype=np.int32),
        runs=tuple(runs),
        opened=(),
        leaf_folds=leaf_folds,
        leaf_phases=np.array([phase for _, phase, _ in leaves], dtype=np.int32),
        leaf_devices=np.array([device for _, _, device in leaves], dtype=np.int32),
        leaf_of=leaf_of,
        seconds=seconds,
        parameter_bytes=held,
    )
    return _open_levels(folds)


def _group_runs(node: _Node) -> list[_Node]:
    """The children, in which numbered ones that follow each other and are alike are one run."""
    groups: list[list[_Node]] = []
    for child in node.children.values():
        last = groups[-1][-1] if groups else None
        follows = (
            last is not None
            and last.path[-1].isdigit()
            and child.path[-1] == str(int(last.path[-1]) + 1)
            and last.devices == child.devices
            and last.make == child.make
        )
        if follows:
            groups[-1].append(child)
        else:
            groups.append([child])
    return [
        _Node(node.path, members=tuple(group)) if len(group) > 1 else group[0] for group in groups
    ]


def _open_levels(folds: Folds) -> Folds:
    """The folds with as many of them open as leave at most `MOST_SHOWN` nodes, level by level from
    the outside. Runs stay closed."""
    children: dict[int, list[int]] = {}
    for inner, parent in enumerate(folds.parents.tolist()):
        children.setdefault(parent, []).append(inner)
    opened, level = [0], [0]
    while level:
        level = [inner for outer in level if outer in opened for inner in children.get(outer, [])]
        for inner in level:
            if inner not in children or inner in folds.runs:
                continue
            drawn = folds.shown([*opened, inner])
            shown = len(set(zip(drawn.tolist(), folds.leaf_phases.tolist(),
                                folds.leaf_devices.tolist(), strict=True)))  # fmt: skip
            if shown <= MOST_SHOWN:
                opened.append(inner)
    return replace(folds, opened=tuple(opened))


# ---- Packing: 100,000 spans in some 2 MB of plain JSON ----
#
# Times are whole nanoseconds. Names like "lstm.0/addmm_3" are mostly repetition. So ops whose names
# differ in one number alone, and that have the same kind, module and phase, share one *template*.
# An op is (template, number), both written as differences to the op before. A span of a row is (op
# as a difference, gap since the last end, length). `assets/timeline.js` undoes all this.

NANO = 1e9
Shown = tuple[str, Timeline, StepLimits]
"""A timeline that is drawn: its name, and what bounds it."""


def pack(graph: Graph, plan: PricedPlacement, timelines: Sequence[Shown], folds: Folds) -> Markup:
    """The data of everything that the page's scripts draw, as JSON that can stand inside a <script>
    element. Edges are flat triples (from, to, bytes).

    ops         strings: all texts, each once; templates: [before, after, kind, module, phase] of
                each, the first four as indices into `strings`; which: [ops] the op's template, as
                the difference to the op before; numbers: [ops] the op's number, as the difference
                to the last op of the same template
    timelines   rows of devices, then of the channels that carry something. `critical` holds the
                lengths of runs of spans, in turn off and on the critical chain
    modules     the tree of modules: one array for each field of folds and leaves. A leaf's place is
                the median of its ops
    views       pictures of the graph: one array for each field
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

    lines = []
    for name, timeline, limits in timelines:
        is_critical = [np.zeros(len(of), bool) for of in (timeline.ops, timeline.transfer_ops)]
        for event, i in limits.chain:
            is_critical[event != OP][i] = True
        # (label, its spans or transfers, whether it is a channel) of each row.
        shown = [
            (label, np.flatnonzero(timeline.op_devices == device), False)
            for device, label in enumerate(timeline.devices)
        ]
        shown += [
            (label, carried, True)
            for channel, label in enumerate(timeline.channels)
            if len(carried := np.flatnonzero(timeline.transfer_channels == channel))
        ]
        rows = []
        for label, spans, of_channel in shown:
            ops, all_starts, all_ends = (
                (timeline.transfer_ops, timeline.transfer_starts, timeline.transfer_ends)
                if of_channel
                else (timeline.ops, timeline.op_starts, timeline.op_ends)
            )
            spans = spans[np.argsort(all_starts[spans], kind="stable")]
            # Both ends are rounded before they are subtracted, so that rounding errors do not add
            # up.
            starts = np.rint(all_starts[spans] * NANO).astype(np.int64)
            ends = np.rint(all_ends[spans] * NANO).astype(np.int64)
            row = {
                "label": label,
                "kind": "channel" if of_channel else "device",
                "gaps": (starts - np.concatenate([[0], ends[:-1]]).astype(np.int64)).tolist(),
                "lengths": (ends - starts).tolist(),
                "ops": np.diff(ops[spans], prepend=0).tolist(),
                "critical": runs(is_critical[of_channel][spans]),
            }
            if of_channel:
                tensors = timeline.transfer_tensors[spans]
                row["bytes"] = np.where(tensors >= 0, graph.tensor_bytes[tensors], 0).tolist()
                row["to"] = timeline.transfer_destinations[spans].tolist()
            rows.append(row)
        lines.append({"name": name, "step": round(timeline.step_seconds * NANO), "rows": rows})

    count = len(folds.leaf_folds)
    in_leaves = np.flatnonzero(folds.leaf_of >= 0)
    of = folds.leaf_of[in_leaves]
    spent = plan.compute_seconds[in_leaves, plan.placement[in_leaves]]
    edges, sizes = edges_between(graph, folds.leaf_of)
    modules = {
        "labels": list(folds.labels),
        "paths": list(folds.paths),
        "parents": folds.parents,
        "opened": list(folds.opened),
        "leaves": {
            "folds": folds.leaf_folds,
            "phases": folds.leaf_phases,
            "devices": folds.leaf_devices,
            "places": [int(np.median(in_leaves[of == leaf])) for leaf in range(count)],
            "ops": np.bincount(of, minlength=count),
            "flops": np.bincount(of, graph.flops[in_leaves], minlength=count).astype(np.int64),
            "seconds": [round(s * NANO) for s in np.bincount(of, spent, minlength=count).tolist()],
        },
        "edges": np.column_stack([edges, sizes]).ravel(),
    }

    views = []
    for view in draw(graph, plan):
        fields = vars(view) | {
            "seconds": np.rint(view.seconds * NANO).astype(np.int64),
            "edges": np.column_stack([view.edges, view.edge_bytes]).ravel(),
        }
        views.append({field: value for field, value in fields.items() if field != "edge_bytes"})
    data = {
        "ops": {
            "strings": list(strings),
            "templates": [list(template) for template in templates],
            "which": which,
            "numbers": numbers,
        },
        "phases": [phase.name.lower() for phase in Phase],
        "devices": list(plan.machine.device_names),
        "timelines": lines,
        "modules": modules,
        "views": views,
    }
    text = json.dumps(
        data, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=np.ndarray.tolist
    )
    # "<", ">", "&" and line separators are written as escapes, so that no name can end the element.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


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
