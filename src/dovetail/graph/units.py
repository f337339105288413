"""Finds the units of a graph: modules that a search must put on one device as a whole.

    patterns ["layers.*"]     layers.0 ─► unit 0    layers.1 ─► unit 1    head ─► no unit
                              (layers.0.attention is within unit 0: the outermost match counts)

A unit consists of all ops of a module: forward, backward and update. A backward op is in the unit
of the op whose gradient it computes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from dovetail.errors import UsageError
from dovetail.graph.records import Graph, Int32

_TOWER = re.compile(r"tower\.\d+(?:\.|$)")


@dataclass(frozen=True, eq=False)
class Units:
    """The unit of each op, and further ops that stay together.

    of_op  [ops] the unit of each op, 0 to count - 1; -1: in no unit
    ties   [ties, 2] pairs of ops that stay together too, whatever their units are
    """

    of_op: Int32
    ties: Int32

    @property
    def count(self) -> int:
        return int(self.of_op.max(initial=-1)) + 1


def module_paths(graph: Graph) -> tuple[str, ...]:
    """Return every module that contains an op, in order of first appearance, each after the modules
    around it. The model itself, "", is left out."""
    paths: dict[str, None] = {}
    for module in dict.fromkeys(graph.modules):
        paths.update(dict.fromkeys([*reversed(_around(module)), module] if module else []))
    return tuple(paths)


def matched_modules(graph: Graph, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the outermost modules that a pattern matches. A pattern is a path, or a glob on paths.

    A glob that matches a module also matches its copies in towers. Raises `UsageError` for a
    pattern that matches no module.
    """
    paths = module_paths(graph)
    names = {path: _TOWER.sub("", path, count=1) for path in paths}
    matched: set[str] = set()
    for pattern in patterns:
        matching = [
            p for p in paths if p == pattern or (names[p] and fnmatchcase(names[p], pattern))
        ]
        if not matching:
            raise UsageError("whole", f"{pattern!r} matches no module of this network")
        matched.update(matching)
    inside = {path for path in matched if not matched.isdisjoint(_around(path))}
    return tuple(path for path in paths if path in matched - inside)


def units_of(graph: Graph, modules: Sequence[str], ties: Iterable[tuple[int, int]] = ()) -> Units:
    """Return each of these modules as a unit, with pairs of ops that stay together too."""
    unit_of = {path: unit for unit, path in enumerate(modules)}
    of_module: dict[str, int] = {}  # the unit of the module or of a module around it; -1: none
    for module in dict.fromkeys(graph.modules):
        around = [module, *_around(module), ""]
        of_module[module] = next((unit_of[path] for path in around if path in unit_of), -1)
    units = np.array([of_module[module] for module in graph.modules], dtype=np.int32)
    forward = graph.gradient_of
    units = np.where(forward >= 0, units[forward], units)
    # A source has no choice: it lives with the op that writes it, or wherever it is read.
    units[graph.is_source] = -1
    return Units(units.astype(np.int32), np.array(list(ties), dtype=np.int32).reshape(-1, 2))


def _around(module: str) -> list[str]:
    """Return the modules around a module, the innermost first, without the model itself."""
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
