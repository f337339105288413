"""Chooses stages on every device of a placement, so that the devices never wait for each other.

A device runs a stage as a whole: the stage waits for all that its ops need from other devices. So
A and C below may not share a stage, and no pair of stages may wait for each other either:

    d0   A ────────► C         crossings   A 0, B 1, C 2
          └──► B ──►
    d1

The *crossings* of an op are the most changes of device on a path that ends at it. Stages hold ops
of one device with equal crossings (a *wave*). Between two such ops no path leaves the device,
and a stage waits only for waves with fewer crossings or for earlier stages of its own wave.
So any stages of the waves complete together, on all devices. The price is that an op never
shares a stage with one that it could run beside but that is behind more changes of device.

Within a wave `dos` or `ios` choose the stages. Ops that share no stage keep the order in which
the plan without stages starts them.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.graph.kernels import FOLDED, Kernels
from dovetail.graph.topological import topological_order
from dovetail.plans import Schedule, Stage
from dovetail.schedulers.blocks import Part, narrowed
from dovetail.schedulers.dos import dos
from dovetail.schedulers.ios import GROUPS, ios
from dovetail.schedulers.records import (
    BlockSchedule,
    KernelBlock,
    OpSet,
    StageTimer,
    StageTiming,
    groups_of,
    members,
)
from dovetail.schedulers.scheduling import StageProblem, by_parts

MOST_STATES = {"dos": 2_000, "ios": 500}
"""Each scheduler searches parts of at most this many states where many placements are compared."""
THOROUGH_STATES = {"dos": 10_000, "ios": 1_000}
"""The same for the few placements that are left. `dovetail schedule` searches five times as many on
its one device, which takes up to a minute."""
_NO_TIE = 1 + 1e-6
"""A stage that gains nothing costs this times its ops one by one, so that it never ties with
them."""
_LEAST_GAIN = 1e-4
"""A stage is kept if it saves more than this share of its ops' seconds one by one."""

Nodes = list[tuple[tuple[int, ...], int]]
"""(ops, kernel) of what a wave runs: a whole kernel, or one op with kernel `FOLDED`."""


@dataclass(frozen=True, eq=False)
class DeviceStages:
    """The costs of stages of a step's kernels on one device, relative to the kernels one by one.

    block, signatures   of all kernels of the step
    timer               seconds of stages of several groups
    alone               [kernels] seconds of each kernel, as a plan without stages runs it, from the
                        same source as the timer's
    hopeless            True for groups that surely gain nothing at the same time
    hand_over_seconds   what a stage of several groups takes beside what the timer says
    groups              most groups in a stage, for `ios`
    """

    block: KernelBlock
    signatures: Sequence[str]
    timer: StageTimer
    alone: Sequence[float]
    hopeless: Callable[[Sequence[Sequence[int]]], bool] = lambda _groups: False
    hand_over_seconds: float = 0.0
    groups: int = GROUPS

    def shares(self, stages: Sequence[OpSet]) -> list[float]:
        """Seconds of each stage divided by those of its kernels one by one."""
        timings = self.timer(stages)
        return [
            timing.seconds / max(sum(self.alone[k] for k in members(stage)), 1e-12)
            for timing, stage in zip(timings, stages, strict=True)
        ]


class PlacedStages:
    """Chooses stages for placements of one graph. Equal parts of waves are searched once."""

    def __init__(
        self,
        graph: Graph,
        kernels: Kernels,
        seconds: NDArray[np.float64],
        devices: Sequence[DeviceStages | None],
    ) -> None:
        """Take what placements have in common.

        seconds   [ops, devices] of each op by itself, which plans are made with
        devices   [devices] None for a device that runs one op after another
        """
        self.graph, self.kernels, self.seconds, self.devices = graph, kernels, seconds, devices
        of_op = kernels.of_op
        self._sizes = np.bincount(of_op[of_op != FOLDED], minlength=kernels.count)
        self._known: dict[Hashable, BlockSchedule] = {}

    def choose(
        self, placement: NDArray[np.int32], scheduler: str, *, thorough: bool = False
    ) -> list[tuple[int, Stage]]:
        """(device, stage) of each stage that runs several groups at the same time and is faster
        than its ops one by one, in no order.

        scheduler   "dos" or "ios". Where a part is so wide that its states keep within a window,
                    "ios" is "dos", because it would discard most of what it compares
        thorough    search larger parts: `THOROUGH_STATES` in place of `MOST_STATES`

        A stage's seconds are those of its ops one by one, by `seconds`, times the share that the
        device's own costs give. So they compare with ops that share no stage.
        """
        most = (THOROUGH_STATES if thorough else MOST_STATES)[scheduler]
        stages: list[tuple[int, Stage]] = []
        for device, ops in waves_of(self.graph, placement):
            if self.devices[device] is None or len(ops) < 2:
                continue
            # The kernels that the wave has whole, and every other op by itself.
            by_kernel: dict[int, list[int]] = defaultdict(list)
            for op in ops:
                by_kernel[int(self.kernels.of_op[op])].append(op)
            nodes: Nodes = []
            for kernel, inside in by_kernel.items():
                if kernel != FOLDED and len(inside) == self._sizes[kernel]:
                    nodes.append((tuple(inside), kernel))
                else:
                    nodes += [((op,), FOLDED) for op in inside]
            if len(nodes) > 1:
                found = self._search(device, nodes, scheduler, most)
                stages += [(device, stage) for stage in found]
        return stages

    def _search(self, device: int, nodes: Nodes, scheduler: str, most: int) -> list[Stage]:
        """The stages of several groups that the scheduler finds in a wave and that gain."""
        costs = self.devices[device]
        assert costs is not None, "only devices with stages are searched"
        edges = needs_between(self.graph, [ops for ops, _ in nodes])
        order = topological_order(len(nodes), edges, [ops[0] for ops, _ in nodes])
        nodes = [nodes[i] for i in order]
        place = {node: i for i, node in enumerate(order)}
        before = [0] * len(nodes)
        for first, then in edges.tolist():
            before[place[then]] |= 1 << place[first]
        block = KernelBlock(tuple(before))
        alone = [float(self.seconds[list(ops), device].sum()) for ops, _ in nodes]
        signatures = [
            costs.signatures[kernel] if kernel != FOLDED else f"alone: {alone[i]}"
            for i, (_, kernel) in enumerate(nodes)
        ]

        def time(stages: Sequence[OpSet]) -> list[StageTiming]:
            """Seconds of stages of the wave, in the plan's own costs.

            A stage of one group, one that surely gains nothing, and one that holds an op outside of
            whole kernels costs what its ops take one by one.
            """
            asked: dict[OpSet, OpSet] = {}
            for stage in stages:
                groups = [
                    [nodes[n][1] for n in members(group)] for group in groups_of(block, stage)
                ]
                if len(groups) < 2 or any(FOLDED in group for group in groups):
                    continue
                if not costs.hopeless(groups):
                    asked[stage] = sum(1 << kernel for group in groups for kernel in group)
            shares: dict[OpSet, float] = {}
            if asked:
                shares = dict(zip(asked, costs.shares(list(asked.values())), strict=True))
            timings = []
            for stage in stages:
                one_by_one = sum(alone[n] for n in members(stage))
                several = stage & (stage - 1)
                seconds = one_by_one * (_NO_TIE if several else 1.0)
                if stage in shares:
                    seconds = one_by_one * shares[stage] + costs.hand_over_seconds
                timings.append(StageTiming(seconds))
            return timings

        problem = StageProblem(
            block, signatures, time, time, [None] * len(nodes), costs.groups, alone
        )
        known = self._known

        def search(part: Part, timer: StageTimer, window: int) -> BlockSchedule:
            names = tuple(signatures[op] for op in part.ops)
            key: Hashable = (device, scheduler, window, part.block, names)
            if key not in known:
                if scheduler == "ios" and not window:
                    known[key] = ios(part.block, timer, groups=costs.groups, window=window)
                else:
                    known[key] = dos(part.block, timer, window=window)
            return known[key]

        result = by_parts(problem, narrowed(block, most), search)
        stages = []
        for stage in result.stages:
            one_by_one = sum(alone[node] for node in stage.kernels)
            if len(stage.groups) > 1 and stage.seconds < (1 - _LEAST_GAIN) * one_by_one:
                ops = sorted(op for node in stage.kernels for op in nodes[node][0])
                stages.append(Stage(tuple(ops), stage.seconds))
        return stages


def waves_of(graph: Graph, placement: NDArray[np.int32]) -> list[tuple[int, list[int]]]:
    """(device, ops) of each wave; ops ascend. O(ops + reads)."""
    crossings = [0] * len(graph)
    # [ops] the ops, without sources, that each op needs.
    before: list[list[int]] = [[] for _ in range(len(graph))]
    ends = _needs(graph)
    for first, then in np.unique(ends[~graph.is_source[ends[:, 0]]], axis=0).tolist():
        before[then].append(first)
    devices, is_source = placement.tolist(), graph.is_source.tolist()
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for op in range(len(graph)):
        if is_source[op]:
            continue
        device, most = devices[op], 0
        for needed in before[op]:
            crossed = crossings[needed] + (devices[needed] != device)
            most = max(most, crossed)
        crossings[op] = most
        found[device, most].append(op)
    return [(device, ops) for (device, _), ops in sorted(found.items())]


def schedules_of(
    graph: Graph,
    placement: NDArray[np.int32],
    seconds: NDArray[np.float64],
    stages: Iterable[tuple[int, Stage]],
    starts: NDArray[np.float64],
    *,
    late: bool = False,
) -> tuple[Schedule | None, ...]:
    """[devices] the schedule of each device that has stages; None for others.

    starts   [ops] when each op starts without stages. Ops come in this order, and a stage where its
             first op was
    late     a stage comes where its last op was
    """
    by_unit: list[tuple[int, Stage]] = list(stages)
    scheduled = {device for device, _ in by_unit}
    inside = {op for _, stage in by_unit for op in stage.ops}
    for op in np.flatnonzero(~graph.is_source).tolist():
        if op not in inside:
            device = int(placement[op])
            by_unit.append((device, Stage((op,), float(seconds[op, device]))))
    units = [stage.ops for _, stage in by_unit]
    turn_of = np.max if late else np.min
    turns = [float(turn_of(starts[list(ops)])) for ops in units]
    of_device: dict[int, list[Stage]] = {device: [] for device in scheduled}
    # One order for all devices, in which no unit comes before one that it needs: so all complete.
    for unit in topological_order(len(units), needs_between(graph, units), turns):
        device, stage = by_unit[unit]
        if device in of_device:
            of_device[device].append(stage)
    return tuple(
        Schedule(tuple(of_device[device])) if device in of_device else None
        for device in range(seconds.shape[1])
    )


def needs_between(graph: Graph, units: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """[pairs, 2] (first, then) of distinct units, the second of which needs the first; sorted."""
    unit_of = np.full(len(graph), -1)
    for number, ops in enumerate(units):
        unit_of[list(ops)] = number
    pairs = unit_of[_needs(graph)]
    pairs = pairs[(pairs >= 0).all(axis=1) & (pairs[:, 0] != pairs[:, 1])]
    return np.unique(pairs, axis=0)


def _needs(graph: Graph) -> NDArray[np.int64]:
    """[pairs, 2] (first, then) of ops, the second of which reads the first or waits for it."""
    reads = np.stack([graph.producers[graph.input_tensors], graph.readers], axis=1)
    return np.concatenate([reads, graph.control])
