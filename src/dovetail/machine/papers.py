"""The machines of the papers: presets, with what was fitted to the papers' own figures.

    rl17/2, rl17/4      1 Haswell, 2 or 4 dies of K80. A. Mirhoseini et al.: "Device Placement
                        Optimization with Reinforcement Learning", ICML 2017,
                        https://arxiv.org/abs/1706.04972, section 4
    gdp/2 to gdp/8      1 Broadwell, 2 to 8 P100. Y. Zhou et al.: "GDP: Generalized Device
                        Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578,
                        section 4

Peaks, bandwidths, capacities and links are those of `presets`. A framework of 2017 does not reach
them, so `fitted.json`, which `benchmarks/machines/fit.py` writes with all that it used, has

    RL17    seconds per op and share of the peak, of the CPU and of the GPU, such that the times on
            a single device come out; a share of their own for convolutions
    GDP     one factor on all compute seconds, such that the human column comes out in the mean

Differences: neither paper names its CPU beyond the generation. GDP says nothing of links; they are
those of PCIe 3.0.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.machine.presets import combine
from dovetail.machine.records import Device, Machine

FITTED = Path(__file__).with_name("fitted.json")
PAPER_MACHINES: dict[str, str] = {
    **{f"rl17/{gpus}": f"{gpus} x k80 + haswell" for gpus in (2, 4)},
    **{f"gdp/{gpus}": f"{gpus} x p100 + broadwell" for gpus in range(2, 9)},
}
"""MACHINE text -> the presets that it is made of."""


def paper_machine(name: str) -> Machine:
    """The machine of a paper, as fitted. `name` is one of `PAPER_MACHINES`."""
    paper = name.partition("/")[0]
    return fitted_machine(name, _fitted()[paper]["devices"])


def fitted_machine(name: str, devices: Mapping[str, Mapping[str, Any]]) -> Machine:
    """The presets of `name` with other rates: model -> fields of `Device`, or `compute_factor`.

    A factor multiplies what every op takes: its overhead, arithmetic and memory alike.
    """
    machine = combine(PAPER_MACHINES[name])
    return replace(
        machine,
        name=name,
        devices=tuple(_refitted(device, devices[device.model]) for device in machine.devices),
    )


def _refitted(device: Device, rates: Mapping[str, Any]) -> Device:
    changes = {name: value for name, value in rates.items() if name != "compute_factor"}
    factor = rates.get("compute_factor", 1.0)
    return replace(
        device,
        flops_per_second={d: rate / factor for d, rate in device.flops_per_second.items()},
        bandwidth_bytes_per_second=device.bandwidth_bytes_per_second / factor,
        op_overhead_seconds=changes.pop("op_overhead_seconds", device.op_overhead_seconds) * factor,
        **changes,
    )


@cache
def _fitted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FITTED.read_text(encoding="utf-8"))
    return found
