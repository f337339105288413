"""How the ops of a replicated graph are told apart, by their names and kinds alone, so that a graph
from a file tells it too.

    tower.2/lstm.0/addmm      module tower.2.lstm.0      what tower 2 runs for itself
    average/lstm.0.bias       kind "dovetail.average"    the mean of N tensors, one a tower
    lstm.0.bias/adam          synchronous                the one update
    lstm.0.bias/adam/tower.2  asynchronous               the update by tower 2's gradient
"""

import re

import numpy as np

from dovetail.graph.records import Graph, Int32, Phase

AVERAGE = "dovetail.average"
"""Kind of the op that reads one tensor of each tower and makes their mean. Every replicated graph
has one: that of the losses."""
_OWN = re.compile(r"tower\.(\d+)/")
_UPDATE = re.compile(r".*/tower\.(\d+)$", re.DOTALL)


def own_name(tower: int, name: str) -> str:
    """The name of a tower's copy of an op."""
    return f"tower.{tower}/{name}"


def own_module(tower: int, module: str) -> str:
    """The module of a tower's copy of an op."""
    return f"tower.{tower}.{module}" if module else f"tower.{tower}"


def update_name(tower: int, name: str) -> str:
    """The name of an asynchronous tower's copy of an update."""
    return f"{name}/tower.{tower}"


def tower_count(graph: Graph) -> int:
    """Number of towers; 1 of a graph that was not replicated."""
    if AVERAGE not in graph.kinds:
        return 1
    return len(graph.inputs_of(graph.kinds.index(AVERAGE)))


def towers_of(graph: Graph) -> Int32:
    """[ops] the tower whose own op or input it is; -1: shared by all, as every update is."""
    return _numbers(graph, _OWN)


def update_towers_of(graph: Graph) -> Int32:
    """[ops] the tower by whose gradient an asynchronous update updates; -1 elsewhere."""
    towers = _numbers(graph, _UPDATE)
    towers[graph.phases != Phase.UPDATE] = -1
    return towers


def _numbers(graph: Graph, pattern: re.Pattern[str]) -> Int32:
    if AVERAGE not in graph.kinds:
        return np.full(len(graph), -1, dtype=np.int32)
    found = map(pattern.match, graph.names)
    return np.array([int(match[1]) if match else -1 for match in found], dtype=np.int32)
