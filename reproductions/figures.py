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
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.graph import Graph, Groups, Phase
from dovetail.machine import Machine
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


@dataclass(frozen=True)
class _Box:
    """The rectangle of a drawn cell."""

    x: float
    y: float
    width: float
    height: float

    @property
    def path(self) -> str:
        return f"M{self.x:.1f} {self.y:.1f}h{self.width:.1f}v{self.height:.1f}h-{self.width:.1f}z"

    @property
    def middle(self) -> str:
        return f"{self.x + self.width / 2:.0f} {self.y + self.height / 2:.0f}"


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


def colour_of(device: int) -> str:
    """The class of a device's colour, by its index in the machine."""
    return f"c{device % COLOURS}"


def graph_svg(
    graph: Graph, machine: Machine, costs: Costs, groups: Groups, placement: Int32
) -> str:
    """The graph as SVG of at most 60 KB, groups coloured by the device of `placement` [ops].

    A group's forward ops are one cell; its backward ops are another, and so are its update ops.
    Lines are the largest sums of tensors between cells of different devices within one pass. If
    there are more than `MOST_CELLS` cells, neighbours of one module and device are drawn as one.
    O(ops + reads).
    """
    of_op = _nodes(graph, groups, placement)
    placed = _Placed(machine, placement, costs.compute_seconds)
    names = _cut(graph)
    shown = view("groups", graph, placed, of_op, names)
    rows, order = _rows(shown)
    tops, bottom = HEAD, HEAD
    parts = []
    for band, (label, phases) in enumerate(BANDS):
        of = np.flatnonzero(np.isin(shown.phases, phases))
        if band and not len(of):
            break
        drawn, bottom = _band(shown, of, rows, order, tops)
        parts.append(f'<text class="band" x="0" y="{tops - 6:.0f}">{label}</text>{drawn}')
        tops = bottom + HEAD + 6
    sizes = Counter(shown.devices.tolist())
    loads = ", ".join(f"{n} cells on {machine.device_names[d]}" for d, n in sorted(sizes.items()))
    title = escape(f"Graph by module and group, coloured by device: {loads}")
    return (
        f'<svg class="graph" viewBox="0 0 {WIDTH:.0f} {bottom + 4:.0f}" role="img" '
        f'aria-label="{title}">{"".join(parts)}</svg>{_legend(shown, machine)}'
    )


def _nodes(graph: Graph, groups: Groups, placement: Int32) -> Int32:
    """[ops] the node of each op; -1 for sources. A node is the ops of one group, phase and device,
    and nodes are numbered by first op."""
    real = np.flatnonzero(~graph.is_source)
    keys = np.stack([groups.of_op[real], graph.phases[real], placement[real]], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    of_op = np.full(len(graph), -1, dtype=np.int32)
    of_op[real] = rank[inverse.ravel()]
    return of_op


def _cut(graph: Graph) -> tuple[str, ...]:
    """[ops] the module of each op, cut to the largest depth with at most `MOST_ROWS` modules."""
    paths = [tuple(part for part in module.split(".") if part) for module in graph.modules]
    distinct = {path for path, source in zip(paths, graph.is_source, strict=True) if not source}
    depth = max((len(path) for path in distinct), default=0)
    while depth and len({path[:depth] for path in distinct}) > MOST_ROWS:
        depth -= 1
    return tuple(".".join(path[:depth]) or "(top)" for path in paths)


def _rows(shown: GraphView) -> tuple[Int32, list[str]]:
    """(rows [nodes], names): the row of each node within its band, and the name of each row. A row
    is a module; rows are ordered by first op."""
    order = {name: row for row, name in enumerate(dict.fromkeys(shown.labels))}
    return np.array([order[name] for name in shown.labels], dtype=np.int32), list(order)


def _band(
    shown: GraphView, of: NDArray[np.int64], rows: Int32, order: Sequence[str], top: float
) -> tuple[str, float]:
    """(SVG, y at which it ends) of the cells of the nodes `of`, with rows' names on the left."""
    columns, count = _bin_columns(shown, of, rows)
    keys = zip(rows[of].tolist(), columns.tolist(), shown.devices[of].tolist(), strict=True)
    cell_of = dict(zip(of.tolist(), keys, strict=True))
    stacks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, column, device in dict.fromkeys(cell_of.values()):
        stacks[row, column].append(device)
    highest = Counter({row: 0 for row in rows[of].tolist()})
    for (row, _), devices in stacks.items():
        highest[row] = max(highest[row], len(devices))
    starts, heights, y = {}, {}, top
    for row in sorted(highest):
        starts[row], heights[row] = y, max(ROW, LEAST_CELL * highest[row])
        y += heights[row] + GAP
    boxes: dict[Cell, _Box] = {}
    width = (WIDTH - LABELS) / count
    for (row, column), devices in stacks.items():
        height = heights[row] / len(devices)
        for i, device in enumerate(sorted(devices)):
            x, middle = LABELS + width * column, starts[row] + i * height
            boxes[row, column, device] = _Box(x, middle, max(0.85 * width, 0.8), height)
    names = "".join(
        f'<text x="{LABELS - 8:.0f}" y="{starts[row] + heights[row] / 2 + 3.5:.1f}" '
        f'text-anchor="end">{escape(_short(order[row]))}</text>'
        for row in starts
    )
    return names + _paths(shown, of, boxes) + _lines(shown, cell_of, boxes), y


def _bin_columns(shown: GraphView, of: NDArray[np.int64], rows: Int32) -> tuple[Int32, int]:
    """(columns [of], number of columns) of the nodes `of`. Columns are joined in pairs until the
    band has at most its part of `MOST_CELLS` cells."""
    columns, count = shown.columns[of], int(shown.columns.max(initial=0)) + 1
    while count > 1:
        cells = np.stack([rows[of], columns, shown.devices[of]], axis=1)
        if len(np.unique(cells, axis=0)) <= MOST_CELLS // len(BANDS):
            break
        columns, count = columns // 2, (count + 1) // 2
    return columns, count


def _paths(shown: GraphView, of: NDArray[np.int64], boxes: dict[Cell, _Box]) -> str:
    """One SVG path for each device, whose title says how many groups, ops and seconds it has."""
    parts = []
    for device in sorted({device for _, _, device in boxes}):
        nodes = of[shown.devices[of] == device]
        path = "".join(box.path for cell, box in boxes.items() if cell[2] == device)
        spent = format_seconds(float(shown.seconds[nodes].sum()))
        text = f"{len(nodes)} groups, {int(shown.ops[nodes].sum()):,} ops, {spent}"
        parts.append(f'<path class="{colour_of(device)}" d="{path}"><title>{text}</title></path>')
    return "".join(parts)


def _lines(shown: GraphView, cell_of: dict[int, Cell], boxes: dict[Cell, _Box]) -> str:
    """The `MOST_LINES` largest edges between cells of different devices, as one SVG path."""
    drawn: dict[tuple[Cell, Cell], int] = defaultdict(int)
    for (a, b), size in zip(shown.edges.tolist(), shown.edge_bytes.tolist(), strict=True):
        if a in cell_of and b in cell_of and shown.devices[a] != shown.devices[b]:
            drawn[cell_of[a], cell_of[b]] += size
    if not drawn:
        return ""
    largest = sorted(drawn, key=lambda key: (-drawn[key], key))[:MOST_LINES]
    path = "".join(f"M{boxes[a].middle}L{boxes[b].middle}" for a, b in largest)
    total = format_bytes(sum(drawn.values()))
    text = f"{total} between devices over {len(drawn)} edges, the largest {len(largest)} drawn"
    return f'<path class="between" d="{path}"><title>{text}</title></path>'


def _legend(shown: GraphView, machine: Machine) -> str:
    used = sorted(set(shown.devices.tolist()))
    items = (
        f'<li><i class="{colour_of(device)}"></i>{escape(machine.device_names[device])}</li>'
        for device in used
    )
    return f'<ul class="key">{"".join(items)}</ul>'


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else f"…{name[1 - NAME_LENGTH :]}"
