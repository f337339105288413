"""Makes machines of known devices from a text: "2 x rtx3090 + ryzen9 + ddr5-6000/64GiB".

`devices.csv` has a row for each device, with its source. Rates are the vendors' data sheets: dense,
float16 with sums in float32 (which GeForce cards do at half the rate of float16's). A dtype that a
device has no fast units for is computed in float32, at float32's rate, as torch and its libraries
do there; `emulated_dtypes` names those, and plans say so. What the table cannot say:

    K80             one of the board's two dies, at boost; it stores float16, computes in float32
    P100            2 % above its data sheet's 9.3 and 18.7 TFLOP/s, as GDP's machines were fitted
    V100, P4, TITAN Xp    int8 is dp4a: four products in the place of one of float32
    MI250, MI250X   one of the card's two dies, which are devices of their own
    M1 to M4        128 multiply-adds a core and cycle; the memory is the CPU's own; no float64
    Haswell         18 cores of which 50 GB may be used, as in RL17; Broadwell has as much
    other CPUs      base clock x two multiply-adds a cycle (of 8 numbers, of 16 with AVX-512; Zen 4
                    halves those; E-cores one of 8), and memory channels x MT/s x 8 bytes

`host` of a row is the link to the host, as "pcie4x16" or GB/s, or of a CPU its memory, as
"ddr5-5200x2"; `peer` is GB/s and microseconds to a peer, if other than through the host;
`multiprocessors` of a CPU are its cores, without E-cores.

Microseconds between ops and links are typical, not measured here. 5.7 us between ops, and 7.6 GB/s
with 25 us a transfer, were fitted to TensorFlow on K80s by an earlier simulator. PCIe reaches about
70 to 80 % of its rate; NVLink has the rate of its data sheet in each direction, Ethernet 94 % of
its own, which is what frames of 1500 bytes leave to TCP. Describe a machine that must be right in
TOML.
"""

import csv
import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

from dovetail.errors import MachineError, UnknownPresetError
from dovetail.machine.files import load_machine
from dovetail.machine.local import local_machine, names_here
from dovetail.machine.records import Chip, Device, Link, Machine
from dovetail.units import MIB, parse_bytes


@dataclass(frozen=True)
class Preset:
    """A device, and the rates of its links: to the host, and to its peers of the same model.

    cores, clock_hz, channels   of a CPU; memory channels have 8 bytes
    source                      where its rates are from
    """

    device: Device
    host_bytes_per_second: float = 11e9
    host_latency_seconds: float = 25e-6
    peer_bytes_per_second: float = 11e9
    peer_latency_seconds: float = 25e-6
    cores: int = 0
    clock_hz: float = 0.0
    channels: int = 0
    source: str = ""


MOST_PRESET_DEVICES = 512
"""Presets make at most so many devices. Those of one model have a link between every two."""
MOST_PRESET_HOSTS = 64
"""Presets make at most so many hosts. A host without a CPU adds a device that runs nothing."""
EMULATED_DTYPES = ("float16", "bfloat16", "int8")
"""A device without arithmetic for one of these dtypes computes it in float32."""
_PCIE = {1: 3e9, 2: 6e9, 3: 11e9, 4: 24e9, 5: 50e9}
"""Generation of PCIe -> bytes/s of large copies over 16 lanes."""
_PCIE_LATENCY_SECONDS = 25e-6
_ETHERNET_SHARE, _ETHERNET_LATENCY_SECONDS = 0.94, 50e-6
"""The share of Ethernet's rate that TCP has of frames of 1500 bytes, and a typical latency."""
_FLOPS_PER_CYCLE = {"avx2": 32, "avx512": 64}
"""Instructions -> float32 FLOPs of a core in a cycle, by two units of multiply-adds."""
_DDR = re.compile(r"ddr([1-9])-([1-9][0-9]{2,4})(?:x([1-9][0-9]?))?")
_PCIE_LINK = re.compile(r"pcie([1-5])x(1|2|4|8|16)")
_CAPACITY = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,3})?(?:[mgt]i?b)")
_UNLIKE = {"laptop", "mobile", "max", "d", "mig"}
"""Words of drivers' names that tell a smaller chip, or a part of one, from a card without them."""
_VENDORS = ("nvidia", "geforce", "tesla", "quadro", "amd", "radeon", "instinct", "intel", "apple")


def _presets() -> dict[str, Preset]:
    """Model -> preset, of each row of `devices.csv`."""
    found = {}
    with Path(__file__).with_name("devices.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            dtypes = ("float32", "float16", "bfloat16", "float64", "int8")
            rates = {dtype: float(f"{row[dtype]}e12") for dtype in dtypes if row[dtype]}
            missing = [dtype for dtype in EMULATED_DTYPES if dtype not in rates]
            rates |= dict.fromkeys(missing, rates["float32"])
            device = Device(
                model := row["model"],
                row["kind"],
                model,
                parse_bytes(row["memory"]),
                rates,
                float(row["gb_per_second"] + "e9"),
                float(row["overhead_us"] + "e-6"),
            )
            units, clock_hz = int(row["multiprocessors"]), 1e6 * float(row["mhz"])
            ddr = _DDR.fullmatch(row["host"])
            if ddr is not None:
                links = (_PCIE[3], _PCIE_LATENCY_SECONDS) * 2
                found[model] = Preset(device, *links, units, clock_hz, int(ddr[3]), row["source"])
                continue
            chip = Chip(
                units,
                clock_hz,
                threads=int(row["threads"]),
                l2_bytes=int(float(row["l2_mib"]) * MIB),
                watts=float(row["watts"]),
                nanometres=float(row["nm"]),
            )
            to_host = _rate_of(row["host"]), _PCIE_LATENCY_SECONDS
            rate, _, microseconds = row["peer"].partition("/")
            to_peer = (float(f"{rate}e9"), float(f"{microseconds}e-6")) if rate else to_host
            device = replace(device, chip=chip)
            found[model] = Preset(device, *to_host, *to_peer, source=row["source"])
    return found


def _rate_of(link: str) -> float:
    """Bytes/s of "pcie4x8", or of so many GB/s. Raises ValueError for anything else."""
    pcie = _PCIE_LINK.fullmatch(link)
    return _PCIE[int(pcie[1])] * int(pcie[2]) / 16 if pcie else 1e9 * float(link)


PRESETS: dict[str, Preset] = _presets()


def emulated_dtypes(device: Device) -> tuple[str, ...]:
    """The dtypes that a preset computes in float32: those of `EMULATED_DTYPES` whose rate is
    float32's. () for a device that is no preset, whose rates are taken as they are."""
    rates = device.flops_per_second
    if device.model.partition("/")[0] not in PRESETS or "float32" not in rates:
        return ()
    return tuple(d for d in EMULATED_DTYPES if rates.get(d) == rates["float32"])


def combine(text: str) -> Machine:
    """The machine of presets that a text names, such as "2 x rtx3090/pcie4x8 + ryzen9".

    GPUs of one model reach each other directly, each direction of each pair over a channel of its
    own. GPUs of different models reach each other through the host. The first CPU is the host; a
    machine without CPUs has an implied host that runs nothing. Options follow a model; memory that
    stands by itself, as "ddr5-6000/64GiB", is that of every CPU:

        GPU   pcie4x8, nvlink56 (GB/s in each direction, from 10 on), 24GiB
        CPU   16c, 4.5GHz, avx2 or avx512, ddr5-6000 or ddr5-6000x8 (channels), 128GiB

    Several hosts are joined by Ethernet: "rtx4090 + ryzen7 | 2 x rtx3090 + ryzen9 | 10gbe". Each
    two have a channel each way, so what a host sends to several others at once over one cable is
    not known, nor what it sends to its own devices meanwhile. Raises `UnknownPresetError`, which
    has near names, or `MachineError`.
    """
    *hosts, network = text.split("|")
    if not hosts:
        return _one_host(text, *_counted(text, text))
    ethernet = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,4})?)gbe", network.strip().lower())
    if ethernet is None or float(ethernet[1]) == 0:
        raise MachineError(f"{text[:80]}: hosts are joined by Ethernet, as in A | B | 10gbe")
    if len(hosts) > MOST_PRESET_HOSTS:
        most = f"presets make 1 to {MOST_PRESET_HOSTS} hosts"
        raise MachineError(f"{text[:80]}: {most}, not {len(hosts)}")
    # All are counted before any is made.
    counted = [_counted(part, text) for part in hosts]
    _check_count(text, sum(counts.total() for counts, _ in counted))
    parts = [
        on_host(f"host{i}", _one_host(part, *of_part))
        for i, (part, of_part) in enumerate(zip(hosts, counted, strict=True))
    ]
    links = [link for part in parts for link in part.links]
    rate = _ETHERNET_SHARE * float(ethernet[1]) * 1e9 / 8
    own_hosts = {part.host for part in parts}
    to_host = {link.source: link for link in links if link.destination in own_hosts}
    from_host = {link.destination: link for link in links if link.source in own_hosts}
    for here, there in permutations(parts, 2):
        channel = f"{here.name}->{there.name}"
        for a in here.device_names:
            for b in there.device_names:
                ways = [way[end] for way, end in ((to_host, a), (from_host, b)) if end in way]
                slowest = min([rate, *(way.bandwidth_bytes_per_second for way in ways)])
                latency = sum((way.latency_seconds for way in ways), _ETHERNET_LATENCY_SECONDS)
                links.append(Link(a, b, slowest, latency, channel))
    devices = tuple(device for part in parts for device in part.devices)
    return Machine(text, devices, parts[0].host, tuple(links))


def on_host(host: str, machine: Machine) -> Machine:
    """The machine as a part of one of several hosts, whose name its devices and channels have."""
    return Machine(
        host,
        tuple(replace(d, name=f"{host}/{d.name}", host=host) for d in machine.devices),
        f"{host}/{machine.host}",
        tuple(
            replace(
                link,
                source=f"{host}/{link.source}",
                destination=f"{host}/{link.destination}",
                channel=f"{host}/{link.channel}",
            )
            for link in machine.links
        ),
    )


def _counted(text: str, whole: str) -> tuple[Counter[tuple[str, ...]], tuple[str, ...]]:
    """((model, its options) -> how many, what CPUs have as memory) of what one host has.

    whole   the text that errors begin with
    """
    counts: Counter[tuple[str, ...]] = Counter()
    memory: tuple[str, ...] = ()
    models = _models()
    for part in text.split("+"):
        name, *options = (word.strip().lower() for word in part.split("/"))
        if _DDR.fullmatch(name):
            is_double, wrong = bool(memory), [o for o in options if not _CAPACITY.fullmatch(o)]
            memory = (name, *options)
            if is_double or wrong:
                says = "is the memory of every CPU, once, as in ddr5-6000/64GiB"
                raise MachineError(f"{part.strip()[:80]} {says}")
            continue
        number = re.match(r"([0-9]+)\s*[x*]", name)
        plain = "".join(_words(name[number.end() :] if number else name))
        model = models.get(plain)
        if model is None or (number and number[1] == "0"):
            tried = [] if model else difflib.get_close_matches(plain[:40], models, 4, 0.5)
            near = dict.fromkeys(models[similar] for similar in tried)
            raise UnknownPresetError(part.strip()[:80] or text[:80], tuple(PRESETS), tuple(near))
        # The digits are bounded first, since Python refuses to convert very many.
        counts[model, *options] += int((number[1] if number else "1").lstrip("0")[:9] or "0")
        _check_count(whole, counts.total())
    return counts, memory


def _one_host(text: str, counts: Counter[tuple[str, ...]], memory: tuple[str, ...]) -> Machine:
    """The machine of presets that one host has, of what `_counted` returns."""
    of_kinds = {kind: _with_options(*kind) for kind in counts}
    cpus = [kind for kind, preset in of_kinds.items() if preset.device.kind == "cpu"]
    if memory and not cpus:
        raise MachineError(f"{memory[0]} is a CPU's memory; name one, as in ryzen7 + {memory[0]}")
    presets: dict[str, Preset] = {}
    numbers = Counter(kind[0] for kind in counts.elements())
    placed: Counter[str] = Counter()
    for kind in counts.elements():
        preset = _with_options(kind[0], *memory, *kind[1:]) if kind in cpus else of_kinds[kind]
        name = f"{kind[0]}:{placed[kind[0]]}" if numbers[kind[0]] > 1 else kind[0]
        placed[kind[0]] += 1
        presets[name] = replace(preset, device=replace(preset.device, name=name))
    devices = [preset.device for preset in presets.values()]
    host = next((device.name for device in devices if device.kind == "cpu"), "host")
    if host == "host":
        devices.append(Device("host", "host", "host", 2**50, {}, 0.0, 0.0))
    links = []
    for a, b in permutations((device.name for device in devices), 2):
        if host in (a, b):
            preset = presets[b if a == host else a]
            rate, latency = preset.host_bytes_per_second, preset.host_latency_seconds
        elif presets[a].device.model == presets[b].device.model:
            preset = min(presets[a], presets[b], key=lambda p: p.peer_bytes_per_second)
            rate, latency = preset.peer_bytes_per_second, preset.peer_latency_seconds
        else:
            continue
        links.append(Link(a, b, rate, latency, f"{a}->{b}"))
    return Machine(text, tuple(devices), host, tuple(links))


def _check_count(text: str, count: int) -> None:
    if not 0 < count <= MOST_PRESET_DEVICES:
        raise MachineError(
            f"{text[:80]}: presets make 1 to {MOST_PRESET_DEVICES} devices in all, not {count}"
        )


def chip_of_driver(name: str) -> Chip | None:
    """The chip of what a driver calls a card, as "NVIDIA H100 80GB HBM3"; None if it is of no
    preset."""
    words, models = _words(name), _models()
    if _UNLIKE.intersection(words):
        return None
    tried = ("".join(words[:count]) for count in range(len(words), 0, -1))
    found = next((models[plain] for plain in tried if plain in models), None)
    return PRESETS[found].device.chip if found else None


def _models() -> dict[str, str]:
    """Name without spaces and hyphens -> model. "rtx" may be left out, or said of the 2080 Ti and
    the A6000."""
    models = {"".join(_words(model)): model for model in PRESETS}
    others = {plain.removeprefix("rtx"): model for plain, model in models.items()}
    return {"rtx2080ti": "2080ti", "rtxa6000": "a6000"} | others | models


def _words(name: str) -> list[str]:
    """The words of a name, without a vendor."""
    return [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word not in _VENDORS]


def _with_options(model: str, *options: str) -> Preset:
    """The preset of a model with other cores, clock, memory or links. Raises `MachineError`."""
    preset = PRESETS[model]
    is_cpu = preset.device.kind == "cpu"
    has_nvlink = preset.peer_bytes_per_second != preset.host_bytes_per_second
    for option in options:
        device = preset.device
        float32 = device.flops_per_second["float32"]
        rates, factor = device.flops_per_second, 0.0
        # What a core computes in a cycle; of a CPU with cores of two kinds it is not known.
        flops = float32 / (preset.cores * preset.clock_hz) if preset.cores else 0.0
        width = next((n for n in _FLOPS_PER_CYCLE.values() if abs(flops / n - 1) < 0.03), 0)
        if _CAPACITY.fullmatch(option) and parse_bytes(option) > 0:
            device = replace(device, memory_bytes=parse_bytes(option))
        elif width and (count := re.fullmatch(r"([1-9][0-9]{0,3})c", option)):
            factor = int(count[1]) / preset.cores
            preset = replace(preset, cores=int(count[1]))
        elif preset.cores and (clock := re.fullmatch(r"([1-9](?:\.[0-9]{1,3})?)ghz", option)):
            factor = 1e9 * float(clock[1]) / preset.clock_hz
            preset = replace(preset, clock_hz=1e9 * float(clock[1]))
        elif width and option in _FLOPS_PER_CYCLE:
            factor = _FLOPS_PER_CYCLE[option] / width
            if factor != 1:
                # Its other units are not those of these instructions.
                rates = rates | dict.fromkeys(EMULATED_DTYPES, float32)
        elif is_cpu and (ddr := _DDR.fullmatch(option)):
            rate = 8e6 * int(ddr[2]) * int(ddr[3] or preset.channels or 2)
            device = replace(device, bandwidth_bytes_per_second=rate)
        elif not is_cpu and _PCIE_LINK.fullmatch(option):
            preset = replace(preset, host_bytes_per_second=_rate_of(option))
        elif not is_cpu and (own := re.fullmatch(r"nvlink([1-9][0-9]{1,3}(?:\.[0-9]+)?)", option)):
            rate, has_nvlink = 1e9 * float(own[1]), True
            preset = replace(preset, peer_bytes_per_second=rate, peer_latency_seconds=8e-6)
        else:
            there = "4.5GHz, ddr5-6000x2" if is_cpu else "pcie4x8, nvlink56"
            there = "16c, avx512, " * bool(width) + there
            raise MachineError(f"{model} has no option {option[:40]!r}; it has {there}, 64GiB")
        if factor:
            rates = {dtype: rate * factor for dtype, rate in rates.items()}
        preset = replace(preset, device=replace(device, flops_per_second=rates))
    if not has_nvlink:
        preset = replace(preset, peer_bytes_per_second=preset.host_bytes_per_second)
    # Devices of one model cost the same.
    named = "/".join((model, *options)) if is_cpu else model
    return replace(preset, device=replace(preset.device, model=named))


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
                # Its rates are fitted to a roofline.
                chip=None,
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
