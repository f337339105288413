"""The hypothesis: shared variables and their gradient sums on the CPU, links at 3.5 GB/s.

RL17's expert and its partitioners come out several times slower than any cost model of K80s
explains (Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML
2017, https://arxiv.org/abs/1706.04972, table 2). One reading brings the expert near the printed
seconds: a variable that several devices read, its update and the sums of its gradient were kept
on the CPU, so that every such weight crosses a slow link to each device that reads it, and every
gradient crosses back. A variable that one device reads is on that device, so one GPU takes what
it takes without the hypothesis. This is a guess, not verified by the paper. Nothing is fitted to
it: the rates of the devices are those of the plain machine.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph, Phase
from dovetail.machine import Machine

LINK_BYTES_PER_SECOND = 3.5e9
Settle = Callable[[NDArray[np.int32]], NDArray[np.int32]]
"""Placements [batch, ops] as a method chose them -> as they are evaluated."""
_SUMS = ("aten.add", "aten.sum", "aten.stack")


def under_hypothesis(graph: Graph, machine: Machine) -> tuple[Machine, Settle]:
    """(the machine with slow links, the graph's `SharedVariables.settle` for the first CPU)."""
    cpu = [device.kind for device in machine.devices].index("cpu")
    return slow_links(machine), SharedVariables(graph, cpu).settle


def as_chosen(placements: NDArray[np.int32]) -> NDArray[np.int32]:
    """The placements themselves: what `Settle` is without the hypothesis."""
    return placements


def slow_links(machine: Machine) -> Machine:
    """The machine with every link at `LINK_BYTES_PER_SECOND`; latencies stay."""
    links = tuple(
        replace(link, bandwidth_bytes_per_second=LINK_BYTES_PER_SECOND) for link in machine.links
    )
    return replace(machine, name=f"{machine.name}, links at 3.5 GB/s", links=links)


class SharedVariables:
    """The variables of a graph, and what is on the CPU if several devices read one.

    That is its update, with which the variable lives, and additions that sum its gradients. Such an
    addition belongs to no forward op (autograd put it there), and its outputs are read by updates
    and by such additions alone. O(ops + reads).
    """

    def __init__(self, graph: Graph, cpu: int) -> None:
        self._cpu = cpu
        # [ops] the update op of the variable whose update or sum of gradients each op is; -1: none
        variable_of = np.full(len(graph), -1, dtype=np.int32)
        update_ops = np.flatnonzero(graph.phases == Phase.UPDATE)
        variable_of[update_ops] = update_ops
        sums = (graph.phases == Phase.BACKWARD) & (graph.gradient_of < 0)
        sums &= np.array([kind.startswith(_SUMS) for kind in graph.kinds], dtype=bool)
        # Readers come after producers, so going backwards all readers of an op are decided.
        for op in np.flatnonzero(sums)[::-1].tolist():
            outputs = graph.outputs_of(op)
            readers = np.concatenate([graph.consumers_of(tensor) for tensor in outputs])
            if len(readers) and (variable_of[readers] >= 0).all():
                variable_of[op] = variable_of[readers[0]]
        producers = graph.producers[graph.input_tensors]
        updates = graph.residences[producers]
        reads = graph.is_source[producers] & (updates >= 0) & (variable_of[graph.readers] < 0)
        reads &= variable_of[np.maximum(updates, 0)] >= 0
        pairs = np.unique(np.stack([updates[reads], graph.readers[reads]], axis=1), axis=0)
        read, self._offsets = np.unique(pairs[:, 0], return_index=True)
        self._readers = pairs[:, 1]
        self._moved = np.flatnonzero(np.isin(variable_of, read)).astype(np.int32)
        self._variables = np.searchsorted(read, variable_of[self._moved])

    def settle(self, placements: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the placements [batch, ops], in which each variable's update and sums are where
        all that read the variable are, or on the CPU if these are on several devices."""
        settled = placements.copy()
        if len(self._moved):
            devices = placements[:, self._readers]
            lowest = np.minimum.reduceat(devices, self._offsets, axis=1)
            highest = np.maximum.reduceat(devices, self._offsets, axis=1)
            homes = np.where(lowest == highest, lowest, self._cpu)
            settled[:, self._moved] = homes[:, self._variables]
        return settled
