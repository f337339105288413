"""When each data-parallel tower of a graph has done its step."""

import re

import numpy as np

from dovetail.graph import Phase
from dovetail.graph.copies import AVERAGE, tower_count

_UPDATE_OF_TOWER = re.compile(r".*/tower\.([0-9]{1,9})$", re.DOTALL)


def update_towers_of(graph):
    """[ops] the tower whose gradient an asynchronous update uses; -1 for other ops."""
    towers = np.full(len(graph), -1, dtype=np.int32)
    for op in np.flatnonzero(graph.phases == Phase.UPDATE) if AVERAGE in graph.kinds else ():
        match = _UPDATE_OF_TOWER.match(graph.names[op])
        towers[op] = int(match[1]) if match else -1
    return towers


def tower_seconds(timeline, graph):
    """[towers] the seconds after which each tower has done its step.

    In a synchronous step that is the step's end for every tower. In an asynchronous one it is the
    end of the last update by the tower's gradients. The tower would then go on with its next batch
    while others still update. Updates of one parameter are in the order of towers and all towers
    begin at once, so tower 0 has the least seconds and the last one about `step_seconds`.
    """
    towers = update_towers_of(graph)[timeline.ops]
    if (towers < 0).all():
        return np.full(tower_count(graph), timeline.step_seconds)
    seconds = np.zeros(tower_count(graph))
    np.maximum.at(seconds, towers[towers >= 0], timeline.op_ends[towers >= 0])
    return seconds
