"""What several features need of a problem, in seconds and bytes, and how they become numbers."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.placers.budget import Budget
from dovetail.placers.etf import etf_schedule
from dovetail.placers.expert import expert
from dovetail.placers.learned.positions import OpPlaces, op_places
from dovetail.placers.learned.records import Float32
from dovetail.placers.list_scheduling import limits_of, tasks_of
from dovetail.placers.problem import Problem

LIMIT = 3.0
"""Relative numbers are cut to 10^-3 to 10^3."""
WAVES = 4

Float64 = NDArray[np.float64]


class Looking:
    """What several columns need, in seconds and bytes."""

    def __init__(self, problem: Problem) -> None:
        graph, of_op = problem.graph, problem.groups.of_op
        self.problem, self.graph, self.of_op = problem, graph, of_op
        op_seconds = np.where(
            np.isfinite(problem.costs.compute_seconds), problem.costs.compute_seconds, np.inf
        ).min(axis=1)
        self.op_seconds = np.where(graph.is_source | np.isinf(op_seconds), 0.0, op_seconds)
        finite = np.isfinite(problem.work_seconds) & problem.allowed
        slowest = np.where(finite, problem.work_seconds, 0.0).max(axis=1, keepdims=True)
        self.seconds = np.where(finite, problem.work_seconds, slowest)  # [groups, devices]
        best = np.where(finite, problem.work_seconds, np.inf).min(axis=1)
        self.work = np.where(np.isfinite(best), best, 0.0)  # [groups]
        sources, destinations, edge_bytes = problem.edges
        order = np.lexsort((sources, destinations))
        self.edges = (
            sources[order].astype(np.int64),
            destinations[order].astype(np.int64),
            edge_bytes[order],
        )
        self.edge_mean = float(edge_bytes.mean()) if len(edge_bytes) else 1.0
        self.links = link_rates(problem)
        self.places: OpPlaces = op_places(graph, self.op_seconds)

    def sums(self, of_ops: NDArray[np.generic]) -> Float64:
        """[groups]"""
        sums = np.bincount(self.of_op, weights=of_ops, minlength=self.problem.groups.count)
        return np.asarray(sums, dtype=np.float64)

    def means(self, of_ops: Float64, weights: Float64) -> Float64:
        """[groups] weighted; 0.5 where nothing weighs."""
        total = self.sums(weights)
        means = self.sums(of_ops * weights) / np.maximum(total, 1e-300)
        return np.where(total > 0, means, 0.5)

    @cached_property
    def listed(self) -> NDArray[np.int32]:
        """[groups] the device that a list schedule over the fastest devices gives each; -1: none.
        See `etf`."""
        limits = limits_of(self.problem, len(self.problem.device_sets) - 1)
        return etf_schedule(tasks_of(self.problem), limits).placed

    @cached_property
    def expected(self) -> NDArray[np.int32]:
        """[groups] the device that an expert would choose. See `expert`."""
        return expert(self.problem, Budget())

    @cached_property
    def fast(self) -> NDArray[np.bool_]:
        """[devices] at least a quarter of the best speed."""
        return np.asarray(self.speeds >= 0.25 * self.speeds.max())

    @cached_property
    def speeds(self) -> Float64:
        """[devices] 1: as fast as the best device for all that it may run; 0: runs nothing."""
        allowed = self.problem.allowed
        best = np.where(allowed, self.work[:, None], 0.0).sum(axis=0)
        own = np.where(allowed, self.seconds, 0.0).sum(axis=0)
        return np.where(allowed.any(axis=0), best / np.maximum(own, 1e-300), 0.0)


def relative(values: NDArray[np.generic], reference: float) -> Float32:
    """log10(values / reference), cut; what is 0 counts as least."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        logs = np.log10(np.asarray(values, dtype=np.float64) / max(reference, 1e-300))
    logs = np.nan_to_num(logs, nan=0.0, posinf=LIMIT, neginf=-LIMIT)
    return np.clip(logs, -LIMIT, LIMIT).astype(np.float32)


def waves(positions: Float64) -> Float64:
    """[..., 2 x WAVES] sines and cosines of 1/2, 1, 2 and 4 periods over 0 to 1."""
    angles = positions[..., None] * np.pi * 2.0 ** np.arange(WAVES)
    both = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return np.asarray(both.reshape(*positions.shape, 2 * WAVES))


def link_rates(problem: Problem) -> tuple[Float64, Float64, NDArray[np.bool_], Float64]:
    """[devices, devices] seconds a byte, latency in seconds, whether direct, links on the channel;
    through the host where there is no link. The diagonal is 0."""
    machine = problem.machine
    index, host, count = machine.link_index, machine.host_index, len(machine.devices)
    on_channel: dict[str, int] = {}
    for link in machine.links:
        on_channel[link.channel] = on_channel.get(link.channel, 0) + 1
    per_byte, latency = np.zeros((count, count)), np.zeros((count, count))
    shared = np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            hops = [index[a, b]] if index[a, b] >= 0 else [index[a, host], index[host, b]]
            links = [machine.links[hop] for hop in hops]
            per_byte[a, b] = sum(1 / link.bandwidth_bytes_per_second for link in links)
            latency[a, b] = sum(link.latency_seconds for link in links)
            shared[a, b] = max(on_channel[link.channel] for link in links)
    return per_byte, latency, index >= 0, shared
