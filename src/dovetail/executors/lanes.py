"""Stages whose groups run at the same time, one lane of groups a core.

    stage  a ─► b   c   d ─► e          groups: ab, c, de
    lanes  ├─ a ─┤├─ b ─┤├─ c ─┤        on two cores, the longest group first
           ├─── d ───┤├── e ──┤

Torch's threads are set per thread: those of a `Team` give each op one, and never change, so that
the thread that runs everything else keeps all of the device's.
"""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.graph import Graph
from dovetail.plans import Stages, needs_of
from dovetail.runtime.setup import set_up_thread

Lane = Callable[[], None]


def lanes_of(
    stage: tuple[int, ...], group_of: NDArray[np.int32], seconds: NDArray[np.float64], most: int
) -> tuple[tuple[int, ...], ...]:
    """The groups of a stage spread over at most `most` lanes: the longest first, by `seconds`
    [ops], each to the lane that has least. Equals go by the stage's order, to the first lane."""
    groups: dict[int, list[int]] = {}
    for op in stage:
        groups.setdefault(int(group_of[op]), []).append(op)
    lanes: list[list[int]] = [[] for _ in range(min(most, len(groups)))]
    loads = [(0.0, 0, lane) for lane in range(len(lanes))]  # seconds, ops, index
    for length, group in sorted(
        ((float(seconds[group].sum()), group) for group in groups.values()), key=lambda one: -one[0]
    ):
        loaded, ops, lane = min(loads)
        lanes[lane] += group
        loads[lane] = (loaded + length, ops + len(group), lane)
    return tuple(map(tuple, lanes))


def groups_of(stages: Sequence[Stages], graph: Graph) -> NDArray[np.int32]:
    """[ops] which group each is in: a connected component of its stage, by what its ops need of
    one another."""
    stage_of, needs = needs_of(stages, graph)
    needs = needs[stage_of[needs[:, 0]] == stage_of[needs[:, 1]]]
    ones = np.ones(len(needs))
    matrix = coo_array((ones, (needs[:, 0], needs[:, 1])), shape=(len(graph), len(graph)))
    labels: NDArray[np.int32] = connected_components(matrix, directed=False)[1]
    return labels


class Team:
    """Threads that run lanes at the same time, one a lane. They start with the first lanes that
    need them, and end with the process."""

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[Lane]] = []
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, lanes: Sequence[Lane]) -> None:
        """Run the lanes; once all have ended, raise what one of them has raised."""
        while len(self._waiting) < len(lanes):
            own: SimpleQueue[Lane] = SimpleQueue()
            self._waiting.append(own)
            Thread(target=self._serve, args=(own,), daemon=True).start()
        for own, lane in zip(self._waiting, lanes, strict=False):
            own.put(lane)
        raised = [error for _ in lanes if (error := self._ended.get()) is not None]
        if raised:
            raise raised[0]

    def _serve(self, own: SimpleQueue[Lane]) -> None:
        set_up_thread(1)
        with torch.inference_mode():
            while True:
                try:
                    own.get()()  # and keep nothing of it
                except BaseException as error:  # the thread that waits raises it
                    self._ended.put(error)
                else:
                    self._ended.put(None)
