"""Evaluates batches of placements, and simulates one plan to its `Timeline`."""

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.costs import Costs
from dovetail.errors import OrderError, UnplacedOpError, UsageError
from dovetail.graph import Graph
from dovetail.machine import Machine
from dovetail.methods import PLACED_OBJECTIVES
from dovetail.plans import Placement, Schedule
from dovetail.runtime.compiling import interpreted, is_compiled
from dovetail.simulator.critical_path import upward_ranks
from dovetail.simulator.flat import (
    DispatchRules,
    Float64,
    Int64,
    StepWorkspace,
    check_slots,
    flatten,
    free_rules,
    homes_of,
    ordered_rules,
    slots_of,
    workspace,
)
from dovetail.simulator.kernel import LOGGED, QUEUED, simulate_batch
from dovetail.simulator.latency import LatencyModel, latencies, latency_model, latency_work
from dovetail.simulator.loads import sum_loads
from dovetail.timeline import Timeline

Bool = NDArray[np.bool_]
_MOST_INTERPRETED = 3000
"""On one device nothing is searched, so few placements are simulated. Of graphs of up to so many
ops that takes less in Python than compiling does."""


@dataclass(frozen=True, eq=False)
class BatchEvaluation:
    """The values and memory of a batch of placements.

    values             [batch] seconds of the objective, also where memory is exceeded; inf where
                       an op cannot run on its device
    peak_memory_bytes  [batch, devices] during one step; 0 where the value is inf
    feasible           [batch] finite value, and every peak within its device's capacity
    """

    values: Float64
    peak_memory_bytes: Int64
    feasible: Bool


class Simulator:
    """Simulates placements of one graph on one machine, by the rules of docs/design.md.

    capacities   [devices] bytes, by default each device's memory
    ranked       False: a device that may choose takes the ready op of lowest index. True: each
                 placement is simulated a second time with the op of highest upward rank first, and
                 the better of the two counts. Better means lacking less memory, then being
                 quicker; the first one wins a tie. On a machine of one device no order is
                 quicker. It affects the objective `step` only

    Threads must not share a simulator: it has one workspace for each thread that it starts itself.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        costs: Costs,
        *,
        capacities: Int64 | None = None,
        ranked: bool = False,
    ) -> None:
        self.graph, self.machine, self.costs, self.ranked = graph, machine, costs, ranked
        memory = [device.memory_bytes for device in machine.devices]
        self.capacities = np.array(memory if capacities is None else capacities, np.int64)
        self._flat = flatten(graph, machine, costs)
        self._choices = [free_rules(self._flat)]
        if ranked:
            self._choices.append(free_rules(self._flat, upward_ranks(self._flat)))
        few = self._flat.devices == 1 and self._flat.ops <= _MOST_INTERPRETED
        waits = few and not is_compiled(simulate_batch)
        self._simulate_batch = interpreted(simulate_batch) if waits else simulate_batch
        self._works: list[StepWorkspace] = []
        self._latency: LatencyModel | None = None

    def evaluate(
        self,
        placements: NDArray[np.integer],
        objective: str = "step",
        *,
        threads: int | None = None,
    ) -> BatchEvaluation:
        """Simulate every placement of a batch [batch, ops].

        `threads` is by default the number of cores that this process may use. Raises
        `UnplacedOpError` for a device that the machine lacks, and `UsageError` for an objective
        that is not defined for the graph and the machine.
        """
        if objective not in PLACED_OBJECTIVES:
            raise UsageError("objective", f"is {objective!r}; use {' or '.join(PLACED_OBJECTIVES)}")
        if objective == "latency" and self._latency is None:
            self._latency = latency_model(self.graph, self.machine, self.costs)
        batch = np.ascontiguousarray(np.atleast_2d(placements), dtype=np.int32)
        self._check_devices(batch)
        threads = threads or len(os.sched_getaffinity(0))
        # Every objective needs the simulation: it gives the peaks of memory.
        values, peaks = self._simulate_all(batch, self._choices[0], threads)
        if objective == "load":
            # Each finite value is replaced by the largest load of a device; a mere host has none.
            loads = np.zeros(self._flat.devices)
            counted = np.array([device.kind != "host" for device in self.machine.devices])
            stamps = np.zeros(self._flat.devices, np.int64)
            for row in np.flatnonzero(np.isfinite(values)).tolist():
                sum_loads(self._flat, homes_of(self._flat, batch[row]), stamps, loads)
                values[row] = loads[counted].max()
        elif objective == "latency" and self._latency is not None:
            values[:] = latencies(self._latency, latency_work(self._latency), batch)
        best = self._evaluation(values, peaks)
        for choice in self._choices[1:] if objective == "step" else ():
            ranked = self._evaluation(*self._simulate_all(batch, choice, threads))
            takes = self._is_better(best, ranked)
            best = BatchEvaluation(
                np.where(takes, ranked.values, best.values),
                np.where(takes[:, None], ranked.peak_memory_bytes, best.peak_memory_bytes),
                np.where(takes, ranked.feasible, best.feasible),
            )
        return best

    def _is_better(self, current: BatchEvaluation, other: BatchEvaluation) -> Bool:
        """[batch] True where `other` lacks less memory, or as much and is quicker."""
        lacks, other_lacks = (
            np.maximum(e.peak_memory_bytes - self.capacities, 0).sum(axis=1)
            for e in (current, other)
        )
        # On one device all orders are as quick, but for rounding.
        quicker = (other_lacks == lacks) & (other.values < current.values)
        quicker &= self._flat.devices > 1
        return np.asarray((other_lacks < lacks) | quicker)

    def _evaluation(self, values: Float64, peaks: Int64) -> BatchEvaluation:
        feasible = np.isfinite(values) & (peaks <= self.capacities).all(axis=1)
        return BatchEvaluation(values, peaks, feasible)

    def timeline(
        self,
        placement: Placement,
        *,
        priorities: Float64 | None = None,
        orders: Sequence[tuple[int, ...] | None] | None = None,
        schedules: Sequence[Schedule | None] | None = None,
    ) -> Timeline:
        """Every span, transfer and change of memory of one step.

        `priorities` [ops]: the highest goes first. `orders` and `schedules` have an entry for each
        device; None leaves the device free to choose. If none of the three is given, the timeline
        is that of the simulation that counts in `evaluate`. A time appears twice in the memory if
        work of no duration changes it within an instant.
        Raises `UnplacedOpError` for an op that its device cannot run, `OrderError` for orders that
        do not fit the placement or cannot complete.
        """
        flat = self._flat
        self._check_devices(np.asarray(placement)[None])
        placed = homes_of(flat, placement)
        real = np.flatnonzero(~self.graph.is_source)
        stuck = real[np.isinf(flat.compute_seconds[real, placed[real]])]
        if len(stuck):
            name = self.machine.device_names[placed[stuck[0]]]
            raise UnplacedOpError(self.graph.names[int(stuck[0])], name, "cannot run it")
        rows = np.ascontiguousarray(np.atleast_2d(placement), np.int32)

        rules = self._choices[0] if priorities is None else free_rules(flat, priorities)
        if orders is None and schedules is None and priorities is None and self.ranked:
            # By index or by upward rank, as this placement counts.
            best = self._evaluation(*self._simulate_all(rows, rules, 1))
            for choice in self._choices[1:]:
                other = self._evaluation(*self._simulate_all(rows, choice, 1))
                if self._is_better(best, other)[0]:
                    rules, best = choice, other
        elif orders is not None or schedules is not None:
            every = []
            for device, name in enumerate(self.machine.device_names):
                order = orders[device] if orders else None
                slots = slots_of(flat, device, order, schedules[device] if schedules else None)
                if slots is not None:
                    device_ops = np.flatnonzero((placed == device) & ~self.graph.is_source)
                    check_slots(slots, device_ops.tolist(), name)
                every.append(slots)
            rules = ordered_rules(flat, rules, every)

        work = workspace(flat, len(rules.slot_seconds), record=True)
        values, peaks = np.empty(1), np.zeros((1, flat.devices), np.int64)
        self._simulate_batch(flat, rules, work, rows, values, peaks, True)
        for device, name in enumerate(self.machine.device_names):
            slot = work.next_slots[device]
            if rules.ordered[device] and slot < rules.slot_offsets[device + 1]:
                due = rules.slot_ops[rules.op_offsets[slot] : rules.op_offsets[slot + 1]]
                waiting = [self.graph.names[op] for op in due.tolist() if work.pending[op] > 0]
                says = f"op {waiting[0]!r} waits for what can never start before it"
                raise OrderError(name, f"cannot complete: {says}")

        # Ops stand in the order of their starts. Of ops that start at one time, the one that was
        # started in an earlier round comes first, and then the one of lower index.
        unordered = np.flatnonzero(flat.is_source == 0)
        turns, starts = work.span_turns[unordered], work.span_starts[unordered]
        ops = unordered[np.lexsort((unordered, turns, starts))].astype(np.int32)
        sent = int(work.counts[QUEUED])
        channels = flat.link_channels[work.queue_links[:sent]]
        by_start = np.lexsort((work.transfer_ends[:sent], channels, work.transfer_starts[:sent]))
        units, links = work.queue_units[by_start], work.queue_links[by_start]
        carried = units < flat.tensors
        # A control edge has no tensor; it reads the appended entry, which is not used.
        producers = np.append(flat.producers, 0)[np.where(carried, units, -1)]
        log = slice(int(work.counts[LOGGED]))
        logs = [work.log_devices[log] == device for device in range(flat.devices)]
        return Timeline(
            devices=self.machine.device_names,
            channels=self.machine.channels,
            ops=ops,
            op_devices=work.placed[ops],
            op_starts=work.span_starts[ops],
            op_ends=work.span_ends[ops],
            transfer_tensors=np.where(carried, units, -1).astype(np.int32),
            transfer_ops=np.where(carried, producers, units - flat.tensors).astype(np.int32),
            transfer_sources=flat.link_sources[links],
            transfer_destinations=work.queue_destinations[by_start],
            transfer_channels=flat.link_channels[links],
            transfer_starts=work.transfer_starts[by_start],
            transfer_ends=work.transfer_ends[by_start],
            memory_times=tuple(work.log_times[log][of_device] for of_device in logs),
            memory_bytes=tuple(work.log_bytes[log][of_device] for of_device in logs),
            step_seconds=float(values[0]),
        )

    def _simulate_all(
        self, batch: NDArray[np.int32], rules: DispatchRules, threads: int
    ) -> tuple[Float64, Int64]:
        """(values, peaks) of all rows. Threads take small runs of rows until none is left."""
        values, peaks = np.empty(len(batch)), np.zeros((len(batch), self._flat.devices), np.int64)
        # About eight runs of rows a thread, so that no thread waits long for a slower one.
        rows = max(1, len(batch) // (8 * threads))
        firsts = range(0, len(batch), rows)
        threads = max(1, min(threads, len(firsts)))
        while len(self._works) < threads:
            self._works.append(workspace(self._flat))
        # `next` of a counter is atomic, so that no two threads take the same run.
        taken = itertools.count()

        def simulate_some(work: StepWorkspace) -> None:
            while (turn := next(taken)) < len(firsts):
                part = slice(firsts[turn], firsts[turn] + rows)
                self._simulate_batch(
                    self._flat, rules, work, batch[part], values[part], peaks[part], False
                )

        if threads == 1:
            simulate_some(self._works[0])
            return values, peaks
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(simulate_some, self._works[:threads]))
        return values, peaks

    def _check_devices(self, batch: NDArray[np.integer]) -> None:
        """Raise `UnplacedOpError` for an op without a valid device."""
        ops, devices = self._flat.ops, self._flat.devices
        if batch.shape[1] != ops:
            at = min(batch.shape[1], ops - 1)
            raise UnplacedOpError(self.graph.names[at], f"row of {batch.shape[1]} entries")
        bad = ((batch < 0) | (batch >= devices)) & ~self.graph.is_source
        if bad.any():
            row, op = np.argwhere(bad)[0].tolist()
            raise UnplacedOpError(self.graph.names[op], int(batch[row, op]))
