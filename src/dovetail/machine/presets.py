"""Makes machines of known devices from a text: "4 x k80 + haswell".

Peak rates, memory bandwidth and capacity are the vendors' data sheets (K80: one of the board's two
dies; P100: PCIe; V100, A100, H100, H200: SXM, dense; 2080 Ti: reference clocks, float16 summed in
float32). A dtype that a device has no fast units for is computed in float32, at float32's rate, as
torch and its libraries do there; `emulated_dtypes` names those, and plans say so.

`op_overhead_seconds` and the links are typical, not measured here. 5.7 us between ops, and 7.6 GB/s
with 25 us a transfer, were fitted to TensorFlow on K80s by an earlier simulator. PCIe 3.0 x16
reaches about 11 GB/s; NVLink has the rate of its data sheet in each direction. The CPUs are servers
of one socket with 32 single-precision FLOP per core and cycle. Haswell has 18 cores at 2.3 GHz with
DDR4-2133, of which 50 GB may be used, as in RL17. Broadwell is the largest of its line, with 22
cores at 2.2 GHz, DDR4-2400 and as much memory. Describe a machine that must be right in TOML.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.errors import MachineError, UnknownPresetError
from dovetail.machine.files import load_machine
from dovetail.machine.local import local_machine, names_here
from dovetail.machine.records import Device, Link, Machine
from dovetail.units import GIB, MIB


@dataclass(frozen=True)
class Preset:
    """A device, and the rates of its links: to the host, and to its peers of the same model."""

    device: Device
    host_bytes_per_second: float = 11e9
    host_latency_seconds: float = 25e-6
    peer_bytes_per_second: float = 11e9
    peer_latency_seconds: float = 25e-6


MOST_PRESET_DEVICES = 512
"""Presets make at most so many devices. Those of one model have a link between every two."""
EMULATED_DTYPES = ("float16", "bfloat16", "int8")
"""A device without arithmetic for one of these dtypes computes it in float32."""


def _preset(
    model: str,
    memory_bytes: int,
    flops_per_second: dict[str, float],
    bandwidth_bytes_per_second: float,
    op_overhead_seconds: float = 5.7e-6,
    *,
    kind: str = "gpu",
    **links: float,
) -> Preset:
    """A preset by the data sheet's rates, with float32's rate for each dtype that is computed in
    float32. `links` are further fields of `Preset`."""
    missing = [dtype for dtype in EMULATED_DTYPES if dtype not in flops_per_second]
    rates = flops_per_second | dict.fromkeys(missing, flops_per_second["float32"])
    device = Device(
        model, kind, model, memory_bytes, rates, bandwidth_bytes_per_second, op_overhead_seconds
    )
    return Preset(device, **links)


def _tensor_core(float32: float, float16: float, float64: float, int8: float) -> dict[str, float]:
    of_float = {"float32": float32, "float16": float16, "bfloat16": float16, "float64": float64}
    return of_float | {"int8": int8}


_ALL_PRESETS = (
    # Tesla K80 board specification BD-07317-001: 8.74 and 2.91 TFLOP/s for both dies at boost.
    # GK210 stores float16 and computes in float32.
    _preset("k80", 11441 * MIB, {"float32": 4.37e12, "float64": 1.46e12}, 240e9,
            host_bytes_per_second=7.6e9, peer_bytes_per_second=7.6e9),
    # The data sheet of the P100 PCIe says 4.7, 9.3 and 18.7 TFLOP/s; float32 and float16 stand here
    # 2 % above it, as when GDP's machines were fitted. GP100 (compute capability 6.0) has no dp4a.
    _preset("p100", 16 * GIB, {"float32": 9.5e12, "float16": 19e12, "float64": 4.7e12}, 732e9),
    # Tesla V100 SXM2 data sheet. Its tensor cores take float16 alone; int8 is dp4a, four products
    # in the place of one of float32 (CUDA programming guide, arithmetic throughput of 7.0).
    _preset("v100", 16 * GIB,
            {"float32": 15.7e12, "float16": 125e12, "float64": 7.8e12, "int8": 62.8e12}, 900e9,
            peer_bytes_per_second=25e9, peer_latency_seconds=10e-6),
    # TITAN Xp product page. float16 in its own units would run at 1/64 of float32 (compute
    # capability 6.1), which is why libraries compute it in float32. int8 is dp4a.
    _preset("titan_xp", 12 * GIB, {"float32": 12.15e12, "float64": 0.38e12, "int8": 48.6e12},
            547.7e9),
    # NVIDIA Turing white paper WP-09183-001, table 1, reference clocks. Turing's tensor
    # cores have no bfloat16.
    _preset("2080ti", 11 * GIB,
            {"float32": 13.45e12, "float16": 53.8e12, "float64": 0.42e12, "int8": 215.2e12},
            616e9),
    # A100 80GB SXM data sheet; tensor cores, dense; float32 and float64 outside of them.
    _preset("a100", 80 * GIB, _tensor_core(19.5e12, 312e12, 9.7e12, 624e12), 2039e9, 4e-6,
            host_bytes_per_second=24e9, peer_bytes_per_second=300e9, peer_latency_seconds=8e-6),
    # H100 SXM data sheet, dense: half of what it states with sparsity.
    _preset("h100", 80 * GIB, _tensor_core(67e12, 989e12, 34e12, 1979e12), 3350e9, 3e-6,
            host_bytes_per_second=50e9, peer_bytes_per_second=450e9, peer_latency_seconds=8e-6),
    # H200 SXM data sheet: the H100's die.
    _preset("h200", 141 * 10**9, _tensor_core(67e12, 989e12, 34e12, 1979e12), 4800e9, 3e-6,
            host_bytes_per_second=50e9, peer_bytes_per_second=450e9, peer_latency_seconds=8e-6),
    # AVX2 has two 8-wide float32 multiply-adds a cycle, converts float16 (F16C), and has neither
    # bfloat16 nor int8 products that are summed in 32 bits (VNNI).
    _preset("haswell", 50 * 10**9, {"float32": 1.3e12, "float64": 0.65e12}, 68e9, 1e-6, kind="cpu"),
    _preset("broadwell", 50 * 10**9, {"float32": 1.55e12, "float64": 0.77e12}, 76.8e9, 1e-6,
            kind="cpu"),
)  # fmt: skip
PRESETS: dict[str, Preset] = {preset.device.model: preset for preset in _ALL_PRESETS}


def emulated_dtypes(device: Device) -> tuple[str, ...]:
    """The dtypes that a preset computes in float32: those of `EMULATED_DTYPES` whose rate is
    float32's. () for a device that is no preset, whose rates are taken as they are."""
    rates = device.flops_per_second
    if device.model not in PRESETS or "float32" not in rates:
        return ()
    return tuple(d for d in EMULATED_DTYPES if rates.get(d) == rates["float32"])


def combine(text: str) -> Machine:
    """The machine of presets that a text names, such as "4 x k80 + haswell".

    GPUs of one model reach each other directly, each direction of each pair over a channel of its
    own. GPUs of different models reach each other through the host. The first CPU is the host; a
    machine without CPUs has an implied host that runs nothing. Raises `UnknownPresetError`.
    """
    counts: Counter[str] = Counter()
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?([A-Za-z0-9_-]+)\s*", part)
        if match is None or match[2].lower() not in PRESETS or match[1] == "0":
            raise UnknownPresetError(part.strip() or text, tuple(PRESETS))
        # The digits are bounded first, since Python refuses to convert very many.
        count = int((match[1] or "1").lstrip("0")[:9] or "0")
        counts[match[2].lower()] += count
        if not 0 < counts.total() <= MOST_PRESET_DEVICES:
            raise MachineError(
                f"{text[:80]}: presets make 1 to {MOST_PRESET_DEVICES} devices in all, not "
                f"{counts.total()}"
            )
    devices = [
        replace(PRESETS[model].device, name=f"{model}:{i}" if count > 1 else model)
        for model, count in counts.items()
        for i in range(count)
    ]
    cpus = [device for device in devices if device.kind == "cpu"]
    host = cpus[0].name if cpus else "host"
    if not cpus:
        devices.append(Device("host", "host", "host", 2**50, {}, 0.0, 0.0))
    links = []
    for a in devices:
        for b in devices:
            if a is b:
                continue
            channel = f"{a.name}->{b.name}"
            if host in (a.name, b.name):
                preset = PRESETS[b.model if a.name == host else a.model]
                rate, latency = preset.host_bytes_per_second, preset.host_latency_seconds
            elif a.model == b.model:
                preset = PRESETS[a.model]
                rate, latency = preset.peer_bytes_per_second, preset.peer_latency_seconds
            else:
                continue
            links.append(Link(a.name, b.name, rate, latency, channel))
    return Machine(text, tuple(devices), host, tuple(links))


# --- The papers' machines: presets, with constants fitted to the papers' own figures ---
#
#     rl17/2, rl17/4      1 Haswell, 2 or 4 dies of K80. A. Mirhoseini et al.: "Device Placement
#                         Optimization with Reinforcement Learning", ICML 2017,
#                         https://arxiv.org/abs/1706.04972, section 4
#     gdp/2 to gdp/8      1 Broadwell, 2 to 8 P100. Y. Zhou et al.: "GDP: Generalized Device
#                         Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578,
#                         section 4
#
# Peaks, bandwidths, capacities and links are those of the presets above. A framework of 2017 does
# not reach them. So `fitted.json`, which `benchmarks/machines/fit.py` writes with all that it used,
# holds
#
#     RL17    seconds per op and share of the peak, of the CPU and of the GPU, such that the times
#             on a single device come out; a share of their own for convolutions
#     GDP     one factor on all compute seconds, such that the human column comes out in the mean
#
# Differences: neither paper names its CPU beyond the generation. GDP says nothing of links; they
# are those of PCIe 3.0.


FITTED = Path(__file__).with_name("fitted.json")
PAPER_MACHINES: dict[str, str] = {
    **{f"rl17/{gpus}": f"{gpus} x k80 + haswell" for gpus in (2, 4)},
    **{f"gdp/{gpus}": f"{gpus} x p100 + broadwell" for gpus in range(2, 9)},
}
"""Maps the MACHINE text of a paper's machine to the text of presets that it stands for."""


@cache
def paper_machine(name: str) -> Machine:
    """The fitted machine of a paper; `name` is one of `PAPER_MACHINES`."""
    fitted = json.loads(FITTED.read_text(encoding="utf-8"))
    return fitted_machine(name, fitted[name.partition("/")[0]]["devices"])


def fitted_machine(name: str, devices: Mapping[str, Mapping[str, Any]]) -> Machine:
    """The paper's machine `name` with other rates.

    devices   model -> fields of `Device` to replace, or `compute_factor`, which multiplies the
              seconds of every op: its overhead, its arithmetic and its memory access alike
    """
    machine = combine(PAPER_MACHINES[name])
    refitted = []
    for device in machine.devices:
        changes = dict(devices[device.model])
        factor = changes.pop("compute_factor", 1.0)
        overhead_seconds = changes.pop("op_overhead_seconds", device.op_overhead_seconds)
        refitted.append(
            replace(
                device,
                flops_per_second={d: rate / factor for d, rate in device.flops_per_second.items()},
                bandwidth_bytes_per_second=device.bandwidth_bytes_per_second / factor,
                op_overhead_seconds=overhead_seconds * factor,
                **changes,
            )
        )
    return replace(machine, name=name, devices=tuple(refitted))


# --- MACHINE texts ---


def parse_machine(text: str) -> Machine:
    """The machine that `text` names: "here", "here/1", "here/2", "FILE.toml", a paper's
    ("rl17/2"), or presets with counts.

    The rates of `here` are typical ones until `costs.measured` measures them. Raises
    `UnknownPresetError`, or what loading the file raises.
    """
    if names_here(text):
        return local_machine(text)
    if text.endswith(".toml"):
        return load_machine(Path(text))
    if text in PAPER_MACHINES:
        return paper_machine(text)
    return combine(text)
