"""From the shares of all GPUs to the one list of steps that a thread issues in each step of a plan.

    share of gpu0   Run a b   Send x -> gpu1   Run c           Send y -> cpu0
    share of gpu1                Await x  Run d    Await z
    list            launch a b │ push x │ launch c │ take x │ launch d │ push y │ take z │ ...

A thread that issues work to GPUs runs ahead of them, and waits only for what a CPU makes. So the
list must have each step after all that it stands on, also through other devices: then what the
thread waits for never waits for a step that was not issued. The order is that of a simulation in
which each device takes its own instructions in order, so it is near to the order of time.

Between GPUs of two ranks tensors may go straight. The simulation is of all ranks and alike on all,
so a tensor is received at the place of the list where it is sent: each rank has the sends and
receives in one order, and none waits for one that stands further back.

Memory: what a launch no longer needs is freed after it, on its own stream. A copy to another device
may still read it then. So such tensors are freed only behind a wait for the copy, and that wait
stands where the copy is expected to have ended (`ReleasePushed`).
"""

import math
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dovetail.executors.shares import (
    AwaitFlag,
    BlockSlot,
    Instruction,
    ReadSource,
    RunCompiled,
    RunLanes,
    RunOp,
    RunUpdates,
    SendTensor,
    Share,
    ops_of,
)
from dovetail.graph import Graph
from dovetail.plans import Plan

Work = RunOp | RunUpdates | RunLanes | RunCompiled


@dataclass(frozen=True)
class LaunchWorks:
    """Issue works to a GPU's compute stream, one after another.

    first    index of the first one in the share of the device
    random   they draw random numbers, whose seeds change from step to step
    """

    device: int
    first: int
    works: tuple[Work, ...]
    random: bool = False


@dataclass(frozen=True)
class PushTensor:
    """Copy a tensor to another device as soon as all that was launched on `device` has ended; for a
    control edge, tell it of that end."""

    device: int
    index: int
    send: SendTensor


@dataclass(frozen=True)
class ReceiveTensor:
    """Receive a tensor that a GPU of another rank sends straight to `device`.

    source, flag   the device that sends it, and the flag of the message
    """

    device: int
    source: int
    flag: int
    tensor: int
    slot: BlockSlot


@dataclass(frozen=True)
class PullSource:
    """Copy a source from the block to a GPU."""

    device: int
    index: int
    read: ReadSource


@dataclass(frozen=True)
class TakeArrived:
    """Make what is launched on `device` from now on start after a tensor has arrived, or after the
    op of a control edge has ended."""

    device: int
    index: int
    wait: AwaitFlag | ReadSource


@dataclass(frozen=True)
class ReleasePushed:
    """Make what is launched on `device` from now on start after pushes have ended, and forget
    tensors. `flags` are those of the pushes."""

    device: int
    flags: tuple[int, ...]
    tensors: tuple[int, ...]


IssueStep = LaunchWorks | PushTensor | ReceiveTensor | PullSource | TakeArrived | ReleasePushed


def steps_of(
    plan: Plan,
    graph: Graph,
    shares: tuple[Share, ...],
    random: Container[int] = (),
    own: Container[int] | None = None,
    direct: Container[tuple[int, int]] = (),
) -> tuple[IssueStep, ...]:
    """The steps that the GPUs' thread issues, for the shares of all devices of a checked plan.

    random   ops that draw random numbers: they are launched apart from others
    own      devices of this host. The steps are those of its GPUs; None: of all GPUs
    direct   (source, destination) GPUs of two ranks between which tensors go straight. Each such
             tensor is received where the simulation sends it, so that all ranks issue sends and
             receives in one order

    Sources that GPUs read from the block come first, in the order in which they are needed.
    """
    return _Merging(plan, graph, shares, random, own, direct).steps()


class _Merging:
    """A simulation of the shares, from which the order of the steps is taken.

    clock      [shares] seconds until which the device is busy
    arrived    flag -> when its tensor is there, or its op has ended
    pushed     (share, storage) -> flags of the pushes of the storage that nothing waits for yet
    kept       [shares] (tensor, flags) that are freed once these pushes have ended
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        shares: tuple[Share, ...],
        random: Container[int],
        own: Container[int] | None,
        direct: Container[tuple[int, int]],
    ) -> None:
        self.direct = direct
        self.graph, self.shares, self.machine = graph, shares, plan.machine
        self.random = random
        self.places = {share.device: place for place, share in enumerate(shares)}
        self.seconds = plan.compute_seconds
        self.on_gpu = [
            plan.machine.devices[share.device].kind == "gpu"
            and (own is None or share.device in own)
            for share in shares
        ]
        self.clock = [0.0] * len(shares)
        self.heads = [0] * len(shares)
        self.arrived: dict[int, float] = {}
        self.pushed: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.kept: list[list[tuple[int, frozenset[int]]]] = [[] for _ in shares]
        self.found: list[IssueStep] = []

    def steps(self) -> tuple[IssueStep, ...]:
        pulls: list[tuple[float, PullSource]] = []
        while (place := self._next()) is not None:
            share, index = self.shares[place], self.heads[place]
            instruction = share.instructions[index]
            match instruction:
                case AwaitFlag() | ReadSource():
                    if isinstance(instruction, AwaitFlag):
                        arrival = self.arrived[instruction.flag]
                        self.clock[place] = max(self.clock[place], arrival)
                    elif self.on_gpu[place]:
                        pulls.append(
                            (self.clock[place], PullSource(share.device, index, instruction))
                        )
                    self._add(place, TakeArrived(share.device, index, instruction))
                    self.heads[place] += 1
                case SendTensor():
                    self._push(place, index, instruction)
                    self.heads[place] += 1
                case _:
                    self._launch(place)
        # Sorting is stable, so equal ones stay in the order in which they were found.
        pulls.sort(key=lambda pair: pair[0])
        return (*(pull for _, pull in pulls), *self.found)

    def _next(self) -> int | None:
        """The device that is free first, of those whose next instruction can run; None if none has
        one left."""
        ready = [
            (self.clock[place], place)
            for place, share in enumerate(self.shares)
            if self.heads[place] < len(share.instructions)
            and self._can_run(share.instructions[self.heads[place]])
        ]
        if not ready:
            left = sum(
                len(share.instructions) - head
                for share, head in zip(self.shares, self.heads, strict=True)
            )
            assert not left, "a checked plan has no devices that wait for each other"
            return None
        return min(ready)[1]

    def _can_run(self, instruction: Instruction) -> bool:
        return not isinstance(instruction, AwaitFlag) or instruction.flag in self.arrived

    def _add(self, place: int, step: IssueStep) -> None:
        if self.on_gpu[place]:
            self.found.append(step)

    def _push(self, place: int, index: int, send: SendTensor) -> None:
        share = self.shares[place]
        sent = 0.0 if send.slot is None else self._seconds_of_send(share.device, send)
        self.arrived[send.flag] = self.clock[place] + sent
        if send.slot is not None:
            self.pushed[place, int(self.graph.storages[send.tensor])].add(send.flag)
        now, later = self._frees(place, send.frees)
        assert not now, "what is sent is held until the copy has ended"
        self.kept[place] += later
        self._add(place, PushTensor(share.device, index, replace(send, frees=())))
        ends = share.device, send.destination
        if send.slot is not None and ends in self.direct:
            received = ReceiveTensor(ends[1], ends[0], send.flag, send.tensor, send.slot)
            self._add(self.places[ends[1]], received)

    def _seconds_of_send(self, source: int, send: SendTensor) -> float:
        machine, host = self.machine, self.machine.host_index
        total, stops = 0.0, [source, send.destination]
        if machine.link_index[source, send.destination] < 0:
            stops = [source, host, send.destination]
        for a, b in pairwise(stops):
            link = machine.links[int(machine.link_index[a, b])]
            size = int(self.graph.tensor_bytes[send.tensor])
            total += link.latency_seconds + size / link.bandwidth_bytes_per_second
        return total

    def _launch(self, place: int) -> None:
        """Take all works up to the next instruction that is none."""
        share, first = self.shares[place], self.heads[place]
        self._release(place)
        works: list[Work] = []
        for instruction in share.instructions[first:]:
            if isinstance(instruction, (SendTensor, AwaitFlag, ReadSource)):
                break
            if works and self._draws(instruction) != self._draws(works[0]):
                break
            now, later = self._frees(place, instruction.frees)
            self.kept[place] += later
            works.append(replace(instruction, frees=now))
            ops = np.array(ops_of(instruction), dtype=np.intp)
            # Summed exactly, since all ranks must find one order, whatever their processors are.
            self.clock[place] += math.fsum(self.seconds[ops, share.device].tolist())
        self.heads[place] += len(works)
        random = self._draws(works[0])
        self._add(place, LaunchWorks(share.device, first, tuple(works), random))

    def _draws(self, work: Work) -> bool:
        """True if an op of the work draws random numbers."""
        return any(op in self.random for op in ops_of(work))

    def _frees(
        self, place: int, tensors: tuple[int, ...]
    ) -> tuple[tuple[int, ...], list[tuple[int, frozenset[int]]]]:
        """(tensors that are freed at once, those that a push may still read, with its flags)."""
        now, later = [], []
        for tensor in tensors:
            flags = self.pushed.get((place, int(self.graph.storages[tensor])), set())
            if flags:
                later.append((tensor, frozenset(flags)))
            else:
                now.append(tensor)
        return tuple(now), later

    def _release(self, place: int) -> None:
        """Free what pushes have read that are expected to have ended by now."""
        ready = [
            (tensor, flags)
            for tensor, flags in self.kept[place]
            if max(self.arrived[flag] for flag in flags) <= self.clock[place]
        ]
        if not ready:
            return
        self.kept[place] = [entry for entry in self.kept[place] if entry not in ready]
        flags = sorted(set().union(*(flags for _, flags in ready)))
        for own in self.pushed.values():
            own.difference_update(flags)
        tensors = tuple(tensor for tensor, _ in ready)
        self._add(place, ReleasePushed(self.shares[place].device, tuple(flags), tensors))
