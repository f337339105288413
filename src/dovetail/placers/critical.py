"""The critical path of a simulated step: what local search should move.

From the last event backwards, each event is explained by what ended when it started:

    op        the op before it on its device, or an input that arrived then
    transfer  the transfer before it on its channel, or the op (or first hop) that it carries

Of several explanations arrivals come first, since they say which ops belong together.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.problem import Problem
from dovetail.timeline import Timeline


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """groups    on the path, ascending, and `seconds` that each spends there
    producers, readers   [sends] groups at both ends of every send on the path
    crowded      [devices] seconds of path ops that had to wait for an op of their device
    """

    groups: NDArray[np.int32]
    seconds: NDArray[np.float64]
    producers: NDArray[np.int32]
    readers: NDArray[np.int32]
    crowded: NDArray[np.float64]


def critical_path(problem: Problem, timeline: Timeline) -> CriticalPath:
    """Walk back from the end. O(spans + transfers), ties: by the order of inputs."""
    walk = _Walk(problem, timeline)
    return walk.run()


class _Walk:
    """Spans come first, transfers after them: event i is span i, or transfer i - spans."""

    def __init__(self, problem: Problem, timeline: Timeline) -> None:
        self.problem, self.timeline = problem, timeline
        self.spans = len(timeline.ops)
        self.starts = np.concatenate([timeline.op_starts, timeline.transfer_starts]).tolist()
        self.ends = np.concatenate([timeline.op_ends, timeline.transfer_ends]).tolist()
        span_of = np.full(len(problem.graph), -1)
        span_of[timeline.ops] = np.arange(self.spans)
        self.span_of = span_of.tolist()
        channels = timeline.transfer_channels + len(timeline.devices)
        lanes = np.concatenate([timeline.op_devices, channels])
        self.before = _previous(lanes, np.array(self.starts)).tolist()
        keys = zip(
            timeline.transfer_ops.tolist(),
            timeline.transfer_tensors.tolist(),
            timeline.transfer_destinations.tolist(),
            strict=True,
        )
        self.sent = {key: i + self.spans for i, key in enumerate(keys)}
        self.groups = np.zeros(problem.groups.count)
        self.sends: list[tuple[int, int]] = []
        self.crowded = np.zeros(problem.devices)

    def run(self) -> CriticalPath:
        of_op = self.problem.groups.of_op
        event = int(np.argmax(self.ends)) if self.ends else -1
        reader = -1
        for _ in range(len(self.ends)):
            if event < 0:
                break
            start = self.starts[event]
            if event < self.spans:
                reader = int(self.timeline.ops[event])
                self.groups[of_op[reader]] += self.ends[event] - start
                cause = self._latest(self._arrivals(reader, event), start)
            else:
                transfer = event - self.spans
                maker = int(self.timeline.transfer_ops[transfer])
                if reader >= 0:
                    self.sends.append((int(of_op[maker]), int(of_op[reader])))
                cause = self._latest(self._carried(transfer), start)
            if cause < 0:
                cause = self.before[event]
                if cause >= 0 and event < self.spans:
                    self.crowded[self.timeline.op_devices[event]] += self.ends[event] - start
            event = cause if start > 0 else -1
        groups = np.flatnonzero(self.groups)
        ends = np.array(self.sends, np.int32).reshape(-1, 2)
        return CriticalPath(
            groups.astype(np.int32), self.groups[groups], ends[:, 0], ends[:, 1], self.crowded
        )

    def _arrivals(self, op: int, span: int) -> list[int]:
        """Events that brought what `op` reads."""
        graph, device = self.problem.graph, int(self.timeline.op_devices[span])
        found = []
        for tensor in graph.inputs_of(op).tolist():
            maker = int(graph.producers[tensor])
            arrived = self.sent.get((maker, tensor, device))
            found.append(self.span_of[maker] if arrived is None else arrived)
        return found

    def _carried(self, transfer: int) -> list[int]:
        """The op whose output it is, or the hop that brought it to where it leaves from."""
        timeline = self.timeline
        maker = int(timeline.transfer_ops[transfer])
        key = (maker, int(timeline.transfer_tensors[transfer]))
        hop = self.sent.get((*key, int(timeline.transfer_sources[transfer])))
        return [self.span_of[maker] if hop is None else hop]

    def _latest(self, events: list[int], start: float) -> int:
        """The first of `events` that ended at `start`; -1: none did."""
        for event in events:
            if event >= 0 and self.ends[event] == start:
                return event
        return -1


def _previous(lanes: NDArray[np.integer], starts: NDArray[np.float64]) -> NDArray[np.int_]:
    """[events] the event before each one in its lane; -1: it is the first."""
    order = np.lexsort((starts, lanes))
    previous = np.full(len(lanes), -1)
    same = lanes[order][1:] == lanes[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    return previous
