"""Rebuilds the tree of modules from the paths of ops and parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.errors import ExportError
from dovetail.graph import LOSS_MODULE, Graph, Phase
from dovetail.graph.copies import is_of_first_micro_batch, origins_in, tower_count
from dovetail.plans import Plan, planned_graph

HELD = ("parameter", "buffer")


@dataclass
class Module:
    """A module of the tree.

    path       "" at the top
    ops        forward ops that run in the module itself, ascending
    held       name of each parameter and buffer of its own -> its source op
    children   by name, in order of first appearance
    """

    path: str
    ops: list[int] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    children: dict[str, "Module"] = field(default_factory=dict)

    def walk(self) -> Iterator["Module"]:
        """The module and all within it, from the top."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    @property
    def all_ops(self) -> list[int]:
        """Forward ops in it and within, ascending."""
        return sorted(op for module in self.walk() for op in module.ops)


def module_tree(graph: Graph, aliases: Mapping[str, str] | None = None) -> Module:
    """The top module. Modules without forward ops, parameters and buffers are not in the tree.

    aliases   other name of a parameter or buffer -> its name; both modules then hold it
    """
    top = Module("")
    for op in placed_ops(graph):
        _find(top, graph.modules[op]).ops.append(op)
    for op in np.flatnonzero(graph.is_source).tolist():
        if graph.kinds[op] in HELD:
            _find(top, graph.modules[op]).held[graph.names[op]] = op
    for alias, name in (aliases or {}).items():
        if name in graph.index:
            _find(top, alias.rpartition(".")[0]).held[alias] = graph.index[name]
    return top


def graph_behind(plan: Plan, graph: Graph | None, format: str) -> Graph:
    """The graph to read module paths from, with the copies of ops that the plan makes.

    It is based on the given graph, or else on the one that the plan remembers.
    """
    source = graph or plan.graph
    if source is None:
        raise ExportError(
            format,
            "a plan from a file",
            "does not hold the paths of modules; give the graph as well, or open it with open_plan",
        )
    return planned_graph(plan, source)


def check_one_replica(graph: Graph, format: str) -> None:
    """Raise `ExportError` for towers: they share one module, which cannot be on many devices."""
    if tower_count(graph) > 1:
        where = f"a graph of {tower_count(graph)} towers"
        raise ExportError(format, where, "runs every module once a tower; plan for one replica")


def forward_ops(graph: Graph) -> list[int]:
    """The forward ops in order, without copies of ops, because other tools know no copies. Of
    micro-batches they are the first one's."""
    origin = (origins_in(graph) == np.arange(len(graph))) & is_of_first_micro_batch(graph)
    ops: list[int] = np.flatnonzero((graph.phases == Phase.FORWARD) & origin).tolist()
    return ops


def forward_readers(graph: Graph, source: int) -> list[int]:
    """The forward ops that read a source, ascending."""
    readers = {int(r) for tensor in graph.outputs_of(source) for r in graph.consumers_of(tensor)}
    return sorted(r for r in readers if graph.phases[r] == Phase.FORWARD)


def placed_ops(graph: Graph) -> list[int]:
    """The forward ops that the model itself runs, in order, without those of a captured loss."""
    trained = bool((graph.phases == Phase.BACKWARD).any())
    return [op for op in forward_ops(graph) if not (trained and graph.modules[op] == LOSS_MODULE)]


def _find(top: Module, path: str) -> Module:
    at = top
    for name in path.split(".") if path else ():
        below = f"{at.path}.{name}" if at.path else name
        at = at.children.setdefault(name, Module(below))
    return at
