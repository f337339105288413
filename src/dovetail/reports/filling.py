"""The pipeline that a plan for `load` fills: several samples in flight, a device a row.

    gpu0  |1111|2222|3333|4444|
    gpu1       |111 |222 |333 |444 |
    gpu2            |11111|22222|33333|44444|       one sample leaves every 5

A device's stage takes its load, which counts its transfers. A sample enters a device when it has
left the devices that this one reads from, and the sample before it has left this one. Where devices
read from one another in a circle there is no such order: then only the rhythm is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph
from dovetail.plans import Plan
from dovetail.units import format_seconds

SAMPLES = 6
WIDTH, ROW, GUTTER = 1000.0, 24.0, 130.0


@dataclass(frozen=True, eq=False)
class Filling:
    """devices   [stages] in pipeline order
    starts, ends   [stages, samples] seconds, when each sample is on each device
    period_seconds   between two samples that leave, once the pipeline is full
    """

    devices: tuple[int, ...]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    @property
    def period_seconds(self) -> float:
        return float((self.ends - self.starts).max(initial=0.0))


def fill(
    plan: Plan, graph: Graph, loads: dict[str, float], samples: int = SAMPLES
) -> Filling | None:
    """The first samples through the devices that have a load; None: devices read in a circle."""
    names = plan.machine.device_names
    ops = np.flatnonzero(~graph.is_source)
    working = set(plan.placement[ops].tolist())
    stages = [d for d, name in enumerate(names) if d in working and loads.get(name, 0.0) > 0]
    before = _reads(plan, graph, set(stages))
    order: list[int] = []
    # By the mean place of their ops where nothing else says which comes first.
    waiting = sorted(stages, key=lambda d: (float(np.mean(ops[plan.placement[ops] == d])), d))
    while waiting:
        ready = next((d for d in waiting if before[d] <= set(order)), None)
        if ready is None:
            return None
        order.append(ready)
        waiting.remove(ready)
    starts, ends = (np.zeros((len(order), samples)) for _ in range(2))
    row = {device: i for i, device in enumerate(order)}
    for i, device in enumerate(order):
        for sample in range(samples):
            arrived = max((ends[row[d], sample] for d in before[device]), default=0.0)
            free = ends[i, sample - 1] if sample else 0.0
            starts[i, sample] = max(arrived, free)
            ends[i, sample] = starts[i, sample] + loads[names[device]]
    return Filling(tuple(order), starts, ends)


def _reads(plan: Plan, graph: Graph, stages: set[int]) -> dict[int, set[int]]:
    """device -> those that it reads from."""
    before: dict[int, set[int]] = {device: set() for device in stages}
    makers = graph.producers[graph.input_tensors]
    real = ~graph.is_source[makers]
    there = plan.placement[graph.readers[real]]
    here = plan.placement[makers[real]]
    for a, b in {(int(a), int(b)) for a, b in zip(here, there, strict=True) if a != b}:
        if a in stages and b in stages:
            before[b].add(a)
    return before


def throughput(plan: Plan) -> tuple[str, str]:
    """What leaves the full pipeline: ("579 samples/s", "18.1 steps a second of 32"). A step's first
    input says how many samples it has, by its first dimension; ("", "") for a plan of no length."""
    if plan.value <= 0:
        return "", ""
    shapes: Sequence[tuple[int, ...]] = plan.source.shapes
    batch = shapes[0][0] * plan.source.replicas if shapes and shapes[0] else 0
    if batch <= 1:
        return f"{1 / plan.value:.3g} samples/s", "once the pipeline is full"
    return f"{batch / plan.value:.3g} samples/s", f"{1 / plan.value:.3g} steps a second of {batch}"


def filling_chart(filling: Filling, names: Sequence[str]) -> str:
    """As inline SVG, in the devices' colours; samples are numbered, and every other is paler."""
    end = float(filling.ends.max()) or 1.0
    height = ROW * len(filling.devices)
    scale = (WIDTH - GUTTER) / end
    parts = []
    for row, device in enumerate(filling.devices):
        y = row * ROW
        name = escape(names[device])
        parts.append(f'<text x="0" y="{y + 16:.0f}">{name}</text>')
        for sample, (start, stop) in enumerate(
            zip(filling.starts[row].tolist(), filling.ends[row].tolist(), strict=True)
        ):
            x, width = GUTTER + scale * start, max(scale * (stop - start) - 1, 0.5)
            pale = " pale" if sample % 2 else ""
            parts.append(
                f'<rect class="d{device}{pale}" x="{x:.1f}" y="{y + 2:.0f}" width="{width:.1f}" '
                f'height="{ROW - 4:.0f}"><title>sample {sample + 1} on {name}: '
                f"{format_seconds(start)} to {format_seconds(stop)}</title></rect>"
            )
            if width > 16:
                parts.append(
                    f'<text class="mark" x="{x + width / 2:.1f}" y="{y + 16:.0f}" '
                    f'text-anchor="middle">{sample + 1}</text>'
                )
    parts.append(f'<text x="{GUTTER}" y="{height + 14:.0f}">0 s</text>')
    parts.append(
        f'<text x="{WIDTH}" y="{height + 14:.0f}" text-anchor="end">{format_seconds(end)}</text>'
    )
    label = f"{filling.starts.shape[1]} samples through {len(filling.devices)} devices"
    return (
        f'<svg class="chart filling" viewBox="0 0 {WIDTH:.0f} {height + 18:.0f}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
