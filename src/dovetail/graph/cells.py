"""Finds the groups of RL17's experiments: a cell of a recurrent layer, or a branch, each as one.

A. Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 3.3: an op whose output has one consumer joins that
consumer, again and again; besides, each LSTM cell, embedding lookup, attention step, softmax step
and branch of Inception is one group.

    part    a numbered module, such as `lstm.0` or `blocks.3`, or else an outermost one
    run     forward ops that follow one another in program order, all of one part
    cell    a run, if its part has several. A part that loops over steps by itself has one run, in
            which kinds of op repeat with a period: each period is a cell, of the whole run or of
            one module within
    branch  in a part without cells, a module that has modules of its own, such as
            `blocks.3.branch3x3`; all other ops of the part are one branch

Differences: cells and branches are found from the captured graph, without the network's name. A
gradient stays with its op, as everywhere here. A cell joins no consumer, so that two cells are
never joined.
"""

import re
from collections import Counter
from itertools import groupby

import numpy as np

from dovetail.graph.grouping import Groups, colocate, merge_single_consumers
from dovetail.graph.records import Graph, Int32, Phase
from dovetail.graph.units import Units, module_paths

_NUMBERED = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")
"""The path of the outermost numbered module around a module."""


def group_cells(graph: Graph) -> Groups:
    """Return the groups of the paper's experiments, of any size. O(rounds x reads)."""
    cells = Units(cells_of(graph), np.empty((0, 2), np.int32))
    return merge_single_consumers(graph, colocate(graph, cells), cells, units_join=False)


def cells_of(graph: Graph) -> Int32:
    """Return [ops] the cell or branch of each op, numbered from 0 in program order; -1: none."""
    modules = graph.modules
    forward = np.flatnonzero((graph.phases == Phase.FORWARD) & ~graph.is_source).tolist()
    # The numbered module that a module is, or is inside of, else the outermost one; "": the model.
    part_of = {
        module: numbered.group() if (numbered := _NUMBERED.match(module)) else module.split(".")[0]
        for module in set(modules)
    }
    runs = _runs(forward, [part_of[modules[op]] for op in forward])
    runs_of_part = Counter(part for part, _ in runs)
    has_modules = {path.rpartition(".")[0] for path in module_paths(graph)}
    cell_of = np.full(len(graph), -1, dtype=np.int32)
    branches: dict[str, int] = {}
    count = 0
    for part, run in runs:
        if not part:
            continue
        cells = _periods(graph, run)
        if len(cells) > 1 or runs_of_part[part] > 1:
            for cell in cells:
                cell_of[cell] = count
                count += 1
            continue
        for module, inner in _runs(run, [modules[op] for op in run]):
            cells = _periods(graph, inner)
            if len(cells) > 1:
                for cell in cells:
                    cell_of[cell] = count
                    count += 1
            elif _NUMBERED.match(part):
                branch = f"{part}.{module[len(part) + 1 :].split('.')[0]}"
                number = branches.setdefault(branch if branch in has_modules else part, count)
                count += number == count
                cell_of[inner] = number
    backward = graph.gradient_of >= 0
    cell_of[backward] = cell_of[graph.gradient_of[backward]]
    return cell_of


def _runs(ops: list[int], keys: list[str]) -> list[tuple[str, list[int]]]:
    """Return (key, ops) of each longest run of ops with one key."""
    pairs = groupby(zip(keys, ops, strict=True), key=lambda pair: pair[0])
    return [(key, [op for _, op in run]) for key, run in pairs]


def _periods(graph: Graph, run: list[int]) -> list[list[int]]:
    """Return the ops of each period of the run, by the shortest period that divides it; the whole
    run if there is none. Ops of one kind in a row are no loop over steps, nor are modules that
    follow one another with ops of the same kinds."""
    calls = [(graph.kinds[op], graph.modules[op]) for op in run]
    several = len({kind for kind, _ in calls}) > 1
    for period in range(2, len(run) // 2 + 1):
        if several and len(run) % period == 0 and calls[period:] == calls[:-period]:
            return [run[start : start + period] for start in range(0, len(run), period)]
    return [run]
