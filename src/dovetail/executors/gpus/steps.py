"""From the shares of all GPUs to the one list that a thread issues in each step of a plan.

    share of gpu0   RunOp a b   SendTensor x -> gpu1   RunOp c   SendTensor y -> cpu0
    share of gpu1                  AwaitFlag x   RunOp d   AwaitFlag z
    list            [RunOp a b] │ [SendTensor x] │ [RunOp c] │ [AwaitFlag x] │ [RunOp d] │ ...

What stands side by side in a share and computes is one `Issue`, which a GPU gets as one launch. All
else is issued by itself. Sources that GPUs read from the block come first: a `ReadSource` there has
only a wait for its copy (an `AwaitFlag` without a flag) where it stood in the share.

A thread that issues work to GPUs runs ahead of them, and waits only for what a CPU makes. So the
list must have each step after all that it stands on, also through other devices: then what the
thread waits for never waits for a step that was not issued. The order is that of a simulation in
which each device takes its own instructions in order, so it is near to the order of time.

Between GPUs of two ranks tensors may go straight. The simulation is of all ranks and alike on all,
so a tensor is received at the place of the list where it is sent: each rank has the sends and
receives in one order, and none waits for one that stands further back.

Memory: what a launch no longer needs is freed after it, on its own stream. A copy to another device
may still read it then. So such tensors are freed only behind a wait for the copy, and that wait
stands where the copy is expected to have ended (`AwaitFlag`s and a `FreeTensors`).
"""

import math
from collections import defaultdict
from collections.abc import Container
from dataclasses import replace
from itertools import pairwise

import numpy as np

from dovetail.executors.shares import Share
from dovetail.frontends.instructions import (
    NO_FLAG,
    AwaitFlag,
    FreeTensors,
    Issue,
    ReadSource,
    ReceiveTensor,
    SendTensor,
    Work,
    ops_of,
)
from dovetail.graph import Graph
from dovetail.plans import Plan


def steps_of(
    plan: Plan,
    graph: Graph,
    shares: tuple[Share, ...],
    random: Container[int] = (),
    own: Container[int] | None = None,
    direct: Container[tuple[int, int]] = (),
) -> tuple[Issue, ...]:
    """What the GPUs' thread issues in a step, for the shares of all devices of a checked plan.

    random   ops that draw random numbers: they are launched apart from others
    own      devices of this host. The steps are those of its GPUs; None: of all GPUs
    direct   (source, destination) GPUs of two ranks between which tensors go straight. Each such
             tensor is received where the simulation sends it, so that all ranks issue sends and
             receives in one order
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
        self.found: list[Issue] = []

    def steps(self) -> tuple[Issue, ...]:
        reads: list[tuple[float, Issue]] = []
        while True:
            # The next is the device that is free first, of those whose next instruction can run.
            ready = []
            for place, (share, head) in enumerate(zip(self.shares, self.heads, strict=True)):
                if head < len(share.instructions):
                    first = share.instructions[head]
                    if not isinstance(first, AwaitFlag) or first.flag in self.arrived:
                        ready.append((self.clock[place], place))
            if not ready:
                break
            _, place = min(ready)
            share, index = self.shares[place], self.heads[place]
            instruction = share.instructions[index]
            match instruction:
                case AwaitFlag():
                    arrival = self.arrived[instruction.flag]
                    self.clock[place] = max(self.clock[place], arrival)
                    self._add(place, Issue(share.device, (instruction,), index))
                    self.heads[place] += 1
                case ReadSource(op=op, tensor=tensor, source=source):
                    if self.on_gpu[place]:
                        reads.append(
                            (self.clock[place], Issue(share.device, (instruction,), index))
                        )
                    copied = AwaitFlag(op, tensor, NO_FLAG, None, source)
                    self._add(place, Issue(share.device, (copied,)))
                    self.heads[place] += 1
                case SendTensor():
                    self._push(place, index, instruction)
                    self.heads[place] += 1
                case _:
                    self._launch(place)
        ends = [len(share.instructions) for share in self.shares]
        assert self.heads == ends, "a checked plan has no devices that wait for each other"
        # Sorting is stable, so equal ones stay in the order in which they were found.
        reads.sort(key=lambda pair: pair[0])
        return (*(read for _, read in reads), *self.found)

    def _add(self, place: int, step: Issue) -> None:
        if self.on_gpu[place]:
            self.found.append(step)

    def _push(self, place: int, index: int, send: SendTensor) -> None:
        share, machine = self.shares[place], self.machine
        source, destination = share.device, send.destination
        seconds = 0.0
        if send.slot is not None:
            stops = [source, destination]
            if machine.link_index[source, destination] < 0:
                stops = [source, machine.host_index, destination]
            for ends in pairwise(stops):
                link = machine.links[int(machine.link_index[ends])]
                size = int(self.graph.tensor_bytes[send.tensor])
                seconds += link.latency_seconds + size / link.bandwidth_bytes_per_second
        self.arrived[send.flag] = self.clock[place] + seconds
        if send.slot is not None:
            self.pushed[place, int(self.graph.storages[send.tensor])].add(send.flag)
        now, later = self._frees(place, send.frees)
        assert not now, "what is sent is held until the copy has ended"
        self.kept[place] += later
        self._add(place, Issue(source, (replace(send, frees=()),), index))
        if send.slot is not None and (source, destination) in self.direct:
            received = ReceiveTensor(send.op, send.tensor, send.flag, send.slot, source)
            self._add(self.places[destination], Issue(destination, (received,)))

    def _launch(self, place: int) -> None:
        """Take all works up to the next instruction that is none."""
        share, first = self.shares[place], self.heads[place]
        # First what pushes have read that are expected to have ended by now is freed.
        ended = [
            (tensor, flags)
            for tensor, flags in self.kept[place]
            if max(self.arrived[flag] for flag in flags) <= self.clock[place]
        ]
        if ended:
            self.kept[place] = [entry for entry in self.kept[place] if entry not in ended]
            every = sorted(set().union(*(flags for _, flags in ended)))
            for own in self.pushed.values():
                own.difference_update(every)
            waits = (AwaitFlag(-1, -1, flag, None, share.device) for flag in every)
            frees = FreeTensors(tuple(tensor for tensor, _ in ended))
            self._add(place, Issue(share.device, (*waits, frees)))
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
        self._add(place, Issue(share.device, tuple(works), first, random))

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
