"""Shows a plan as RL17's figures do: its graph coloured by device, and the seconds of each device.

    forward    embedding     ▪▪▪▪▪▪▪▪▪▪             a row is a module, a cell a group of ops,
               lstm.0         ▪▪▪▪▪▪▪▪▪▪            a colour a device: an unrolled network
               lstm.1          ▪▪▪▪▪▪▪▪▪▪           reads layers x steps
    backward,  embedding     ▪▪▪▪▪▪▪▪▪▪
    update     lstm.0         ▪▪▪▪▪▪▪▪▪▪            each below the forward cell that it belongs to
               ...

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, figures 4 and 5 (pictures), 8 and 9 (loads and copies).
Differences: the paper draws the graph of its ops; here a cell is a group, as placed, since 9,000
ops would be 9,000 dots. The CPU is a colour too, where the paper leaves it transparent.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.graph import Graph, Groups, Phase
from dovetail.machine import Machine
from dovetail.reports.charts import key, svg, svg_path, svg_text
from dovetail.reports.pictures import GraphView, view
from dovetail.simulator import Simulator
from dovetail.units import format_bytes, format_seconds
from reproductions.records import PlanWork

COLOURS = 10
"""The page's style sheet has this many colours, classes "c0" to "c9". Devices have them in the
machine's order."""
MOST_ROWS, MOST_CELLS, MOST_LINES = 22, 1800, 150
WIDTH, LABELS = 1000.0, 190.0  # of the picture, and of its column of names
ROW, LEAST_CELL, GAP, HEAD = 13.0, 3.0, 3.0, 20.0
NAME_LENGTH = 30
BANDS = (("forward", (Phase.FORWARD,)), ("backward and update", (Phase.BACKWARD, Phase.UPDATE)))
Int32 = NDArray[np.int32]
Cell = tuple[int, int, int]  # row, column, device


@dataclass(frozen=True, eq=False)
class _Placed:
    """What `view` needs of a plan."""

    machine: Machine
    placement: Int32
    compute_seconds: NDArray[np.float64]


def work_of(
    graph: Graph, machine: Machine, costs: Costs, groups: Groups, placement: Int32
) -> PlanWork:
    """The work of a simulated step of `placement` [ops]: seconds of each device and channel, and a
    picture.

    Raises what `Simulator.timeline` raises.
    """
    timeline = Simulator(graph, machine, costs, ranked=True).timeline(placement)
    seconds = timeline.op_ends - timeline.op_starts
    phases = graph.phases[timeline.ops]

    def by_device(phase: Phase) -> dict[str, float]:
        of = phases == phase
        spent = np.bincount(timeline.op_devices[of], seconds[of], len(timeline.devices))
        return dict(zip(timeline.devices, spent.tolist(), strict=True))

    return PlanWork(
        forward_seconds=by_device(Phase.FORWARD),
        backward_seconds=by_device(Phase.BACKWARD),
        update_seconds=by_device(Phase.UPDATE),
        transfer_seconds=dict(
            zip(timeline.channels, timeline.channel_seconds.tolist(), strict=True)
        ),
        picture=graph_svg(graph, machine, costs, groups, placement),
    )


def graph_svg(
    graph: Graph, machine: Machine, costs: Costs, groups: Groups, placement: Int32
) -> str:
    """The graph as SVG of at most 60 KB, groups coloured by the device of `placement` [ops].

    A group's forward ops are one cell; its backward ops are another, and so are its update ops.
    Lines are the largest sums of tensors between cells of different devices within one pass. If
    there are more than `MOST_CELLS` cells, neighbours of one module and device are drawn as one.
    O(ops + reads).
    """
    # A node is the ops of one group, phase and device. Nodes are numbered by first op.
    real = np.flatnonzero(~graph.is_source)
    keys = np.stack([groups.of_op[real], graph.phases[real], placement[real]], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    of_op = np.full(len(graph), -1, dtype=np.int32)
    of_op[real] = rank[inverse.ravel()]
    # A row is a module, cut to the largest depth with at most `MOST_ROWS` modules.
    paths = [tuple(part for part in module.split(".") if part) for module in graph.modules]
    distinct = {path for path, source in zip(paths, graph.is_source, strict=True) if not source}
    depth = max((len(path) for path in distinct), default=0)
    while depth and len({path[:depth] for path in distinct}) > MOST_ROWS:
        depth -= 1
    names = tuple(".".join(path[:depth]) or "(top)" for path in paths)
    placed = _Placed(machine, placement, costs.compute_seconds)
    shown = view("groups", graph, placed, of_op, names)
    top, parts = HEAD, list[str]()
    for label, phases in BANDS:
        nodes = np.flatnonzero(np.isin(shown.phases, phases))
        if parts and not len(nodes):
            break
        drawn, bottom = _band(shown, nodes, top)
        parts += [svg_text(0, top - 6, label, style="band"), *drawn]
        top = bottom + HEAD + 6
    sizes = sorted(Counter(shown.devices.tolist()).items())
    loads = ", ".join(f"{n} cells on {machine.device_names[device]}" for device, n in sizes)
    title = f"Graph by module and group, coloured by device: {loads}"
    picture = svg(parts, (WIDTH, bottom + 4), "graph", title)
    legend = key((colour_of(device), machine.device_names[device], "") for device, _ in sizes)
    return f"{picture}{legend}"


def colour_of(device: int) -> str:
    """The class of a device's colour, by its index in the machine."""
    return f"c{device % COLOURS}"


def _band(shown: GraphView, nodes: NDArray[np.int64], top: float) -> tuple[list[str], float]:
    """(SVG, y at which it ends) of the cells of these nodes, with rows' names on the left."""
    order = {name: row for row, name in enumerate(dict.fromkeys(shown.labels))}
    rows = np.array([order[shown.labels[node]] for node in nodes.tolist()], dtype=np.int32)
    devices = shown.devices[nodes]
    columns, count = shown.columns[nodes], int(shown.columns.max(initial=0)) + 1
    # Columns are joined in pairs until the band has at most its part of `MOST_CELLS` cells.
    while count > 1:
        cells = np.stack([rows, columns, devices], axis=1)
        if len(np.unique(cells, axis=0)) <= MOST_CELLS // len(BANDS):
            break
        columns, count = columns // 2, (count + 1) // 2
    keys = zip(rows.tolist(), columns.tolist(), devices.tolist(), strict=True)
    cell_of: dict[int, Cell] = dict(zip(nodes.tolist(), keys, strict=True))
    # Cells of one row and column stand below each other, so a row is as high as most need.
    stacks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, column, device in dict.fromkeys(cell_of.values()):
        stacks[row, column].append(device)
    highest: dict[int, int] = defaultdict(int)
    for (row, _), stack in stacks.items():
        highest[row] = max(highest[row], len(stack))
    parts, starts = list[str](), dict[int, float]()
    y, modules = top, list(order)
    for row in sorted(highest):
        starts[row], height = y, max(ROW, LEAST_CELL * highest[row])
        name = modules[row]
        name = name if len(name) <= NAME_LENGTH else f"…{name[1 - NAME_LENGTH :]}"
        parts.append(svg_text(LABELS - 8, y + height / 2 + 3.5, name, "end"))
        y += height + GAP
    width = (WIDTH - LABELS) / count
    drawn = max(0.85 * width, 0.8)
    of_device: dict[int, list[str]] = defaultdict(list)
    middles: dict[Cell, str] = {}
    for (row, column), stack in stacks.items():
        height = max(ROW, LEAST_CELL * highest[row]) / len(stack)
        for i, device in enumerate(sorted(stack)):
            left, upper = LABELS + width * column, starts[row] + i * height
            box = f"M{left:.1f} {upper:.1f}h{drawn:.1f}v{height:.1f}h-{drawn:.1f}z"
            of_device[device].append(box)
            middles[row, column, device] = f"{left + drawn / 2:.0f} {upper + height / 2:.0f}"
    for device in sorted(of_device):
        its = nodes[devices == device]
        spent = format_seconds(float(shown.seconds[its].sum()))
        text = f"{len(its)} groups, {int(shown.ops[its].sum()):,} ops, {spent}"
        parts.append(svg_path("".join(of_device[device]), colour_of(device), text))
    # The `MOST_LINES` largest sums of tensors between cells of different devices are one path.
    between: dict[tuple[Cell, Cell], int] = defaultdict(int)
    for (a, b), size in zip(shown.edges.tolist(), shown.edge_bytes.tolist(), strict=True):
        if a in cell_of and b in cell_of and shown.devices[a] != shown.devices[b]:
            between[cell_of[a], cell_of[b]] += size
    largest = sorted(between, key=lambda pair: (-between[pair], pair))[:MOST_LINES]
    path = "".join(f"M{middles[a]}L{middles[b]}" for a, b in largest)
    total = format_bytes(sum(between.values()))
    text = f"{total} between devices over {len(between)} edges, the largest {len(largest)} drawn"
    return [*parts, svg_path(path, "between", text)], y
