"""Devices and links as a policy sees them: relative to what the graph needs.

Columns are named in `DEVICE_NAMES` and `LINK_NAMES`. Devices that are alike in all else are told
apart by their place among their like, and by their interval on the scale of positions: see
`features`.
"""

from dataclasses import dataclass

import numpy as np

from dovetail.placers.learned.looking import LIMIT, WAVES, Float64, Looking, relative, waves
from dovetail.placers.learned.records import Float32

WAVE_NAMES = tuple(f"{part}{k}" for k in range(WAVES) for part in ("sin", "cos"))
DEVICE_NAMES: tuple[str, ...] = (
    "speed", "flops", "bandwidth", "overhead", "memory", "memory_need",
    "cpu", "gpu", "host", "is_host", "allowed", "fast",
    "out_bandwidth", "in_bandwidth",
    "like_place", "like_share", "centre", "width",
    *WAVE_NAMES,
    "count",
)  # fmt: skip
"""Columns of `View.devices`.

speed                   work of all groups that it may run: the best device's seconds by its own
flops, bandwidth        by the machine's best; memory by the machine's largest that runs anything
overhead                seconds an op costs anyhow, by the mean op's work
memory_need             what the graph keeps by what the device has
allowed                 share of groups that it may run
fast                    1: at least a quarter of the best speed
out_, in_bandwidth      mean over links, in mean edges a mean group's work
like_place, like_share  place among devices that are alike, and one by their number
centre, width           its interval on the scale of positions; the slow have none: 1 and 0
sin0 .. cos3            waves of the centre
count                   log10 of devices that run anything
"""
LINK_NAMES: tuple[str, ...] = ("same", "direct", "seconds", "latency", "shared", "distance")
"""Columns of `View.links`: the device itself; a link of its own (else through the host); seconds
of a mean edge and the latency by a mean group's work; links on its channel; difference of their
centres."""
DEVICE_NUMBERS, LINK_NUMBERS = len(DEVICE_NAMES), len(LINK_NAMES)


@dataclass(frozen=True)
class Scale:
    """[devices] each device's interval on the scale of positions, and its place among its like."""

    centre: Float64
    width: Float64
    like_place: Float64
    like_share: Float64


def scale_of(view: Looking) -> Scale:
    machine, speeds = view.problem.machine, view.speeds
    weights = np.where(view.fast, speeds, 0.0)
    order = np.lexsort((np.arange(len(speeds)), -np.round(speeds, 3)))
    width = weights / max(weights.sum(), 1e-300)
    centre = np.ones(len(speeds))
    centre[order] = np.cumsum(width[order]) - width[order] / 2
    centre = np.where(width > 0, centre, 1.0)
    like = [
        (d.kind, d.model, d.memory_bytes, tuple(sorted(d.flops_per_second.items())))
        for d in machine.devices
    ]
    counts = np.array([like.count(one) for one in like], dtype=np.float64)
    before = np.array([like[:i].count(one) for i, one in enumerate(like)])
    return Scale(centre, width, (before + 0.5) / counts, 1 / counts)


def look_at_devices(view: Looking) -> tuple[Float32, Float32]:
    """([devices, DEVICE_NUMBERS], [devices, devices, LINK_NUMBERS])"""
    problem, machine = view.problem, view.problem.machine
    scale, allowed = scale_of(view), problem.allowed
    runs = allowed.any(axis=0)
    # Without int8, whose rates no policy was trained on and which no graph's costs use.
    inexact = [
        [rate for dtype, rate in d.flops_per_second.items() if dtype != "int8"]
        for d in machine.devices
    ]
    flops = np.array([max(rates, default=0.0) for rates in inexact])
    bandwidth = np.array([d.bandwidth_bytes_per_second for d in machine.devices])
    overhead = np.array([d.op_overhead_seconds for d in machine.devices])
    ops = max(1, int((~view.graph.is_source).sum()))
    memory = problem.capacities.astype(np.float64)
    kept = float(problem.group_bytes.sum())
    unit = max(float(view.work.mean()), 1e-300)
    per_byte, latency, direct, shared = view.links
    edge_seconds = per_byte * view.edge_mean + latency
    others = max(1, len(machine.devices) - 1)
    columns = [
        relative(view.speeds, 1.0),
        relative(flops, float(flops.max())),
        relative(bandwidth, float(bandwidth[runs].max(initial=0.0))),
        relative(overhead, view.op_seconds.sum() / ops),
        relative(memory, float(memory[runs].max(initial=0.0))),
        relative(kept / np.maximum(memory, 1.0), 1.0),
        *([d.kind == kind for d in machine.devices] for kind in ("cpu", "gpu", "host")),
        np.arange(len(machine.devices)) == machine.host_index,
        allowed.mean(axis=0),
        view.fast,
        relative(unit / np.maximum(edge_seconds.sum(axis=1) / others, 1e-300), 1.0),
        relative(unit / np.maximum(edge_seconds.sum(axis=0) / others, 1e-300), 1.0),
        scale.like_place,
        scale.like_share,
        scale.centre,
        scale.width,
        waves(scale.centre),
        np.full(len(machine.devices), np.log10(max(1, int(runs.sum())))),
    ]
    count = len(machine.devices)
    numbers = np.concatenate([np.reshape(c, (count, -1)) for c in columns], axis=1)
    links = np.stack(
        [
            np.eye(count),
            direct,
            np.where(np.eye(count) > 0, -LIMIT, relative(edge_seconds, unit)),
            np.where(np.eye(count) > 0, -LIMIT, relative(latency, unit)),
            np.log10(np.maximum(shared, 1.0)),
            scale.centre[None] - scale.centre[:, None],
        ],
        axis=2,
    )
    return np.nan_to_num(numbers.astype(np.float32)), np.nan_to_num(links.astype(np.float32))
