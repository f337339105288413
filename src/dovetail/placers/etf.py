"""Earliest task first: list scheduling that knows communication and memory.

Of all ready ops and all devices, the pair that can start earliest is scheduled; among pairs that
start at one instant the op with the longest path to the end (its static level) goes first, then
the lower op index, then the lower device.

    starts(op, d) = max(free_d,  max over inputs of  ends(producer) + transfer(producer's d, d))

Paper: Hwang, Chow, Anger and Lee, "Scheduling precedence graphs in systems with interprocessor
communication times", SIAM Journal on Computing 18(2), 1989,
https://doi.org/10.1137/0218016, section 4.
Differences: unlike devices; a group follows the first of its ops; a group goes only where its
bytes (`Problem.group_bytes`) still fit, and where none has room, to the one with the most left.
As in the paper links are never busy.

Each device keeps the ready ops in two heaps: those whose inputs are there by the time it is free,
by level, and those that come later, by arrival. O((ops x log ops + reads) x devices).
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.machine import Machine
from dovetail.placers.budget import Budget
from dovetail.placers.problem import GroupPlacement, Problem


def etf(problem: Problem, budget: Budget) -> GroupPlacement:
    """The better of schedules over all devices and over the fastest model of device only.

    Starting earliest says nothing of ending: idle slow devices draw ops that fast ones should run.
    """
    found = np.stack(
        [problem.settle(_Schedule(problem, devices).run()) for devices in problem.device_sets]
    )
    scores = budget.score(problem, found, always=True)
    return np.asarray(found[scores.index(min(scores))])


class _Schedule:
    """The growing schedule. Times in seconds from the start of the step."""

    def __init__(self, problem: Problem, devices: list[int]) -> None:
        graph = problem.graph
        self.problem = problem
        self.seconds: list[list[float]] = problem.costs.compute_seconds.tolist()
        self.predecessors, self.successors = _neighbours(graph)
        self.latency, self.per_byte = _transfer_model(problem.machine)
        self.levels = _levels(problem, self.successors)
        self.waiting = [len(before) for before in self.predecessors]
        self.of_op: list[int] = problem.groups.of_op.tolist()
        self.choices: list[list[int]] = [_choices(row, devices) for row in problem.allowed]
        self.placed = [-1] * problem.groups.count
        self.room: list[float] = problem.capacities.astype(float).tolist()
        self.bytes: list[int] = problem.group_bytes.tolist()
        self.ready_in: list[set[int]] = [set() for _ in range(problem.groups.count)]
        self.ends = [0.0] * len(graph)
        self.free = [0.0] * problem.devices
        self.now: list[list[tuple[float, int]]] = [[] for _ in range(problem.devices)]
        self.later: list[list[tuple[float, float, int]]] = [[] for _ in range(problem.devices)]
        self.done: list[bool] = graph.is_source.tolist()
        self.given_away = False

    def run(self) -> NDArray[np.int32]:
        for op, waits in enumerate(self.waiting):
            if not waits and not self.done[op]:
                self._make_ready(op)
        left = self.done.count(False)
        while left:
            self.given_away = False
            firsts = [self._first(device) for device in range(len(self.free))]
            if self.given_away:  # perhaps to a device that had answered before: ask all again
                continue
            starts, _, op, device = min(first for first in firsts if first is not None)
            self._start(op, device, starts)
            left -= 1
        return np.array(self.placed, dtype=np.int32)

    def _make_ready(self, op: int) -> None:
        group = self.of_op[op]
        self.ready_in[group].add(op)
        home = self.placed[group]
        for device in self.choices[group] if home < 0 else [home]:
            self._offer(op, device)

    def _offer(self, op: int, device: int) -> None:
        heapq.heappush(self.later[device], (self._arrival(op, device), -self.levels[op], op))

    def _arrival(self, op: int, device: int) -> float:
        arrival = 0.0
        for before, size in self.predecessors[op]:
            there = self.placed[self.of_op[before]]
            moves = there != device
            wait = self.latency[there][device] + size * self.per_byte[there][device] if moves else 0
            arrival = max(arrival, self.ends[before] + wait)
        return arrival

    def _first(self, device: int) -> tuple[float, float, int, int] | None:
        """(start, -level, op, device) of what `device` could start earliest."""
        now, later = self.now[device], self.later[device]
        while later and (later[0][0] <= self.free[device] or self._gone(later[0][2], device)):
            _, level, op = heapq.heappop(later)
            if not self._gone(op, device):
                heapq.heappush(now, (level, op))
        while now and self._gone(now[0][1], device):
            heapq.heappop(now)
        if now:
            return (self.free[device], *now[0], device)
        return (*later[0], device) if later else None

    def _gone(self, op: int, device: int) -> bool:
        """Started, or its group cannot be here."""
        group = self.of_op[op]
        home = self.placed[group]
        if self.done[op] or home >= 0:
            return self.done[op] or home != device
        fits = [d for d in self.choices[group] if self.room[d] >= self.bytes[group]]
        if not fits:
            self.given_away = True
            roomiest = max(self.choices[group], key=lambda d: (self.room[d], -d))
            self._settle(group, roomiest)
            for ready in sorted(self.ready_in[group] - {op}):
                self._offer(ready, roomiest)
            if roomiest != device:
                self._offer(op, roomiest)
            return roomiest != device
        return device not in fits

    def _settle(self, group: int, device: int) -> None:
        self.placed[group] = device
        self.room[device] -= self.bytes[group]

    def _start(self, op: int, device: int, starts: float) -> None:
        group = self.of_op[op]
        if self.placed[group] < 0:
            self._settle(group, device)
        self.done[op] = True
        self.ready_in[group].discard(op)
        self.ends[op] = self.free[device] = starts + self.seconds[op][device]
        for after in self.successors[op]:
            self.waiting[after] -= 1
            if not self.waiting[after]:
                self._make_ready(after)


def _choices(allowed: NDArray[np.bool_], devices: list[int]) -> list[int]:
    """Of `devices` those that are allowed; all that are, where that leaves none."""
    everywhere: list[int] = np.flatnonzero(allowed).tolist()
    return [d for d in everywhere if d in devices] or everywhere


def _neighbours(graph: Graph) -> tuple[list[list[tuple[int, float]]], list[list[int]]]:
    """Per op: (op before, bytes that it sends here), and the ops after. Sources are no ops."""
    before: list[dict[int, float]] = [{} for _ in range(len(graph))]
    producers = graph.producers[graph.input_tensors]
    sizes = graph.tensor_bytes[graph.input_tensors]
    real = ~graph.is_source[producers]
    reads = np.stack([producers, graph.readers, sizes], axis=1)[real].tolist()
    for producer, reader, size in reads:
        before[reader][producer] = before[reader].get(producer, 0.0) + size
    for earlier, later in graph.control.tolist():
        before[later].setdefault(earlier, 0.0)
    after: list[list[int]] = [[] for _ in range(len(graph))]
    for op, ops in enumerate(before):
        for earlier in ops:
            after[earlier].append(op)
    return [list(ops.items()) for ops in before], after


def _transfer_model(machine: Machine) -> tuple[list[list[float]], list[list[float]]]:
    """(latency seconds, seconds per byte) from row to column; two hops where there is no link."""
    index, host = machine.link_index, machine.host_index
    count = len(machine.devices)
    latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            hops = [index[a, b]] if index[a, b] >= 0 else [index[a, host], index[host, b]]
            links = [machine.links[hop] for hop in hops]
            latency[a, b] = sum(link.latency_seconds for link in links)
            per_byte[a, b] = sum(1 / link.bandwidth_bytes_per_second for link in links)
    return latency.tolist(), per_byte.tolist()


def _levels(problem: Problem, successors: list[list[int]]) -> list[float]:
    """Seconds of the longest path from each op to the end, on the fastest devices, at no
    communication."""
    least = problem.costs.compute_seconds.min(axis=1).tolist()
    levels = [0.0] * len(least)
    for op in range(len(least) - 1, -1, -1):
        levels[op] = least[op] + max((levels[after] for after in successors[op]), default=0.0)
    return levels
