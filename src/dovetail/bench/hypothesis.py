"""The hypothesis of how RL17's harness ran a step: variables and gradient sums on the CPU, and
links at 3.5 GB/s.

RL17's expert and its partitioners come out several times slower than any cost model of K80s
explains (Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, table 2). One reading that brings the expert near the printed
seconds: TensorFlow kept the variables, their updates and the sums of their gradients on the CPU, so
that every weight crosses a slow link to each device that reads it, and every gradient crosses back.
It is a guess, not verified by the paper. Nothing is fitted to it: the rates of the devices are
those of the plain machine.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph, Groups, Phase
from dovetail.machine import Machine

LINK_BYTES_PER_SECOND = 3.5e9
_SUMS = ("aten.add", "aten.sum", "aten.stack")


def slow_links(machine: Machine) -> Machine:
    """`machine` with every link at `LINK_BYTES_PER_SECOND`, latencies as they were."""
    links = tuple(
        replace(link, bandwidth_bytes_per_second=LINK_BYTES_PER_SECOND) for link in machine.links
    )
    return replace(machine, name=f"{machine.name}, links at 3.5 GB/s", links=links)


def on_the_cpu(graph: Graph) -> NDArray[np.bool_]:
    """[ops] True for what the hypothesis keeps on the CPU: updates, with which their variables
    live, and the additions that sum the gradients of one variable.

    Such an addition belongs to no forward op (autograd put it there), and what it makes is read by
    updates and by such additions alone. O(ops + reads).
    """
    pinned = np.asarray(graph.phases == Phase.UPDATE)
    sums = (graph.phases == Phase.BACKWARD) & (graph.gradient_of < 0)
    sums &= np.array([kind.startswith(_SUMS) for kind in graph.kinds], dtype=bool)
    for op in np.flatnonzero(sums)[::-1].tolist():  # readers come later, so they are decided
        readers = np.concatenate([graph.consumers_of(tensor) for tensor in graph.outputs_of(op)])
        pinned[op] = len(readers) > 0 and pinned[readers].all()
    return _with_colocated(graph, pinned)


def _with_colocated(graph: Graph, pinned: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """With all that a colocation id holds together with them."""
    given = graph.colocation >= 0
    ids = np.unique(graph.colocation[given & pinned])
    return np.asarray((pinned | (given & np.isin(graph.colocation, ids))) & ~graph.is_source)


def split(graph: Graph, groups: Groups, pinned: NDArray[np.bool_]) -> Groups:
    """`groups` with the pinned ops of each in a group of their own, so that nothing else goes where
    they go; sources as in `graph.grouping`: with the op that writes them, else as they were."""
    apart = groups.of_op * 2 + pinned
    written = graph.is_source & (graph.residences >= 0)
    apart[written] = apart[graph.residences[written]]
    _, first, inverse = np.unique(apart, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return Groups(rank[inverse].astype(np.int32), len(first))
