"""Folds the tree of modules for the page, so that ten layers alike take one line.

    (model)
      embed_tokens
      layers.0-9          a run: ten siblings numbered in a row, with equal modules inside and on
                          the same devices
        layers.0
          self_attn
          ...
      layers.10-19
      lm_head

A fold is a module, a run of such siblings, or a chain of modules each of which holds nothing but
the next. A fold is open or closed. All ops within a closed fold are drawn as one node for each
phase and device. *Leaves* are the finest nodes: the ops of one module, phase and device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.graph.records import EVERYWHERE
from dovetail.reports.layout import PricedPlacement

MOST_LEAVES, MOST_SHOWN = 4000, 40
"""Paths of modules are cut to the depth that leaves at most `MOST_LEAVES` leaves. At first at most
`MOST_SHOWN` nodes are shown."""
HELD = ("parameter", "buffer")
TOP = "(model)"
Path = tuple[str, ...]


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

    def depth(self, fold: int) -> int:
        """The number of folds around a fold."""
        return len(list(self.around(fold))) - 1

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
    depth, leaves = _leaves(graph, plan, paths, ops)
    top = _Node(())
    for op in ops:
        node = top
        node.devices.add(int(plan.placement[op]))
        for part in paths[op][:depth]:
            node = node.children.setdefault(part, _Node((*node.path, part)))
            node.devices.add(int(plan.placement[op]))
        node.has_ops = True
    labels, full, parents, runs, fold_of = _number_folds(top)
    leaf_folds = np.array([fold_of[path] for path, _, _ in leaves], dtype=np.int32)
    count, devices = len(labels), len(plan.machine.devices)
    seconds = np.zeros((count, devices))
    held = np.zeros((count, devices))
    for op in ops:
        device = int(plan.placement[op])
        seconds[fold_of[paths[op][:depth]], device] += plan.compute_seconds[op, device]
    for source, device in _holders(graph, plan):
        path = paths[source][:depth]
        # A module that holds a parameter but runs nothing has no fold. The next one around it has.
        while path not in fold_of:
            path = path[:-1]
        held[fold_of[path], device] += sum(graph.tensor_bytes[t] for t in graph.outputs_of(source))
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


def _leaves(
    graph: Graph, plan: PricedPlacement, paths: Sequence[Path], ops: Sequence[int]
) -> tuple[int, dict[tuple[Path, int, int], int]]:
    """The depth at which paths are cut, and (path, phase, device) -> leaf, numbered by first op."""
    for depth in range(max((len(paths[op]) for op in ops), default=0), -1, -1):
        leaves: dict[tuple[Path, int, int], int] = {}
        for op in ops:
            key = (paths[op][:depth], int(graph.phases[op]), int(plan.placement[op]))
            leaves.setdefault(key, len(leaves))
        if len(leaves) <= MOST_LEAVES:
            break
    return depth, leaves


def _holders(graph: Graph, plan: PricedPlacement) -> Iterator[tuple[int, int]]:
    """Yield (parameter or buffer, device) for each device that holds it for the whole step: the
    device of the op that writes it, or, if no op does, every device that reads it."""
    for source in np.flatnonzero(graph.is_source).tolist():
        if graph.kinds[source] not in HELD:
            continue
        writer = int(graph.residences[source])
        if writer != EVERYWHERE:
            yield source, int(plan.placement[writer])
            continue
        readers = [int(r) for t in graph.outputs_of(source) for r in graph.consumers_of(t)]
        for device in sorted({int(plan.placement[reader]) for reader in readers}):
            yield source, device


def _number_folds(
    top: _Node,
) -> tuple[list[str], list[str], list[int], list[int], dict[Path, int]]:
    """(labels, whole paths, parents, runs) of the folds, and module path -> fold."""
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
    return labels, full, parents, runs, fold_of


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
