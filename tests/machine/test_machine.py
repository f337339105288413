import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.errors import (
    FileFormatError,
    MachineError,
    NoRouteError,
    UnknownDeviceError,
    UnknownPresetError,
)
from dovetail.machine import (
    PRESETS,
    Chip,
    Device,
    Link,
    Machine,
    check_local,
    chip_of_driver,
    emulated_dtypes,
    gpus,
    load_machine,
    local_machine,
    parse_machine,
    save_machine,
)
from dovetail.machine.gpus import RESERVED_BYTES
from dovetail.reports.tables import machine_tables
from tests.support.builders import machine_of


def test_a_machine_saved_as_toml_loads_equal(tmp_path):
    machine = machine_of(3)
    save_machine(machine, tmp_path / "m.toml")
    assert load_machine(tmp_path / "m.toml") == machine


def test_presets_combine_with_counts():
    machine = parse_machine("4 x k80 + haswell")
    assert machine.device_names == ("k80:0", "k80:1", "k80:2", "k80:3", "haswell")
    assert machine.host == "haswell"
    assert machine.link_index[0, 1] >= 0


def test_gpus_without_a_cpu_have_an_implied_host_that_runs_nothing():
    machine = parse_machine("2 x p100")
    assert machine.devices[machine.host_index].kind == "host"


def test_unlike_gpus_go_through_the_host():
    machine = parse_machine("k80 + p100 + haswell")
    assert machine.link_index[0, 1] == -1


@pytest.mark.parametrize("model", sorted(PRESETS))
def test_every_preset_stands_alone(model):
    assert parse_machine(model).device_names[0] == model


@pytest.mark.parametrize("model", sorted(PRESETS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8"])
def test_every_preset_has_a_rate_for_every_dtype(model, dtype):
    rates = PRESETS[model].device.flops_per_second
    if dtype == "float64" and model.startswith(("m1", "m2", "m3", "m4")):
        assert dtype not in rates  # Apple's GPUs have no such arithmetic
    else:
        assert rates[dtype] > 0


def test_dtypes_without_units_of_their_own_are_computed_in_float32():
    turing, volta = PRESETS["2080ti"].device, PRESETS["v100"].device
    assert emulated_dtypes(turing) == ("bfloat16",) == emulated_dtypes(volta)
    assert turing.flops_per_second["bfloat16"] == turing.flops_per_second["float32"]
    assert emulated_dtypes(PRESETS["haswell"].device) == ("float16", "bfloat16", "int8")
    assert emulated_dtypes(PRESETS["h100"].device) == ()
    assert emulated_dtypes(replace(turing, model="mine")) == ()


@pytest.mark.parametrize("text", ["5 x k81", "", "here/x", "0 x k80", "k80 +", "../etc/passwd"])
def test_an_unknown_machine_is_named_with_what_there_is(text):
    with pytest.raises(UnknownPresetError) as raised:
        parse_machine(text)
    assert "k80" in raised.value.known


@pytest.mark.parametrize(
    "text",
    [
        "513 x k80",
        f"{'9' * 5000} x k80",
        "300 x k80 + 300 x v100",
        "00 x k80",
        "+".join(["k80"] * 513),
    ],
    ids=["many", "very many", "many in all", "none", "one by one"],
)
def test_more_presets_than_can_be_linked_are_refused_before_any_is_made(text):
    with pytest.raises(MachineError, match="presets make 1 to 512 devices in all"):
        parse_machine(text)


@pytest.mark.parametrize("name", ["RTX 3090", "rtx-3090", "NVIDIA GeForce RTX 3090", "3090"])
def test_a_preset_is_found_by_the_names_that_people_write(name):
    assert parse_machine(f"2 x {name}").device_names == ("rtx3090:0", "rtx3090:1", "host")


@pytest.mark.parametrize(
    ("text", "near"),
    [("rtx309", "rtx3090"), ("4 x a100-40", "a100-40gb"), ("ryzen8", "ryzen7"), ("m5", "m4")],
)
def test_an_unknown_preset_is_told_with_near_ones(text, near):
    with pytest.raises(UnknownPresetError, match=f"did you mean .*{near}") as raised:
        parse_machine(text)
    assert near in raised.value.near


def test_a_name_that_is_like_no_preset_has_no_near_ones():
    with pytest.raises(UnknownPresetError) as raised:
        parse_machine("abacus")
    assert raised.value.near == ()
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"),
        ("NVIDIA GeForce RTX 2080 Ti", "2080ti"), ("NVIDIA TITAN Xp", "titan_xp"),
        ("NVIDIA RTX A6000", "a6000"), ("AMD Instinct MI250X/MI250", "mi250x"),
    ],
)  # fmt: skip
def test_a_card_is_known_by_what_its_driver_calls_it(name, model):
    assert chip_of_driver(name) == PRESETS[model].device.chip


@pytest.mark.parametrize(
    "name",
    ["NVIDIA L40", "", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
     "NVIDIA A100-SXM4-40GB MIG 1g.5gb"],
)  # fmt: skip
def test_no_card_is_taken_for_another(name):
    assert chip_of_driver(name) is None


def test_every_preset_says_where_it_is_from_and_what_it_is():
    for preset in PRESETS.values():
        assert preset.source
        assert (preset.device.chip is not None) == (preset.device.kind == "gpu")


def rate_of(machine, source, destination):
    link = machine.link_index[machine.device_index(source), machine.device_index(destination)]
    return machine.links[link].bandwidth_bytes_per_second


def test_options_of_a_gpu_change_its_links_and_memory_alone():
    machine = parse_machine("2 x rtx3090/pcie3x8/nvlink56.25/20GiB + rtx3090 + ryzen7")
    changed, plain = machine.devices[0], machine.devices[2]
    assert replace(changed, memory_bytes=plain.memory_bytes, name=plain.name) == plain
    assert changed.memory_bytes == 20 * 2**30
    assert rate_of(machine, "rtx3090:0", "ryzen7") == 5.5e9
    assert rate_of(machine, "ryzen7", "rtx3090:2") == 24e9
    assert rate_of(machine, "rtx3090:0", "rtx3090:1") == 56.25e9
    # The slower end counts.
    assert rate_of(machine, "rtx3090:1", "rtx3090:2") == 24e9


def test_peers_without_a_link_of_their_own_have_that_of_the_host():
    machine = parse_machine("2 x rtx4090/pcie4x4")
    assert (
        rate_of(machine, "rtx4090:0", "rtx4090:1") == rate_of(machine, "host", "rtx4090:0") == 6e9
    )


def test_options_of_a_cpu_scale_its_rates():
    usual = PRESETS["ryzen7"].device
    (cores,) = parse_machine("ryzen7/16c").devices
    (clock,) = parse_machine("ryzen7/9.0GHz").devices
    for twice in (cores, clock):
        assert twice.flops_per_second == pytest.approx(
            {dtype: 2 * rate for dtype, rate in usual.flops_per_second.items()}
        )
        assert twice.bandwidth_bytes_per_second == usual.bandwidth_bytes_per_second
        assert emulated_dtypes(twice) == emulated_dtypes(usual)
    assert len({cores.model, clock.model, usual.model}) == 3  # their costs differ


def test_instructions_that_a_cpu_has_already_change_nothing_and_others_its_other_units():
    for model, width in (("ryzen7", "avx2"), ("haswell", "avx2"), ("xeon", "avx512")):
        (device,) = parse_machine(f"{model}/{width}").devices
        assert device.flops_per_second == PRESETS[model].device.flops_per_second
    (narrow,) = parse_machine("xeon/avx2").devices
    assert narrow.flops_per_second["float32"] == PRESETS["xeon"].device.rate("float32") / 2
    assert emulated_dtypes(narrow) == ("float16", "bfloat16", "int8")


@pytest.mark.parametrize("text", ["nvlink50/pcie5x16", "pcie5x16/nvlink50"])
def test_nvlink_is_the_link_to_peers_whatever_the_host_has(text):
    machine = parse_machine(f"2 x rtx3090/{text}")
    assert rate_of(machine, "rtx3090:0", "rtx3090:1") == 50e9
    assert {link.latency_seconds for link in machine.links} == {8e-6, 25e-6}


def test_a_long_text_is_refused_at_once():
    for text in ("a" + " " * 10**6 + "b", "t4/" + "9" * 10**6, "9" * 10**6 + "x" * 10**5):
        with pytest.raises(MachineError):
            parse_machine(text)


def test_memory_by_itself_is_that_of_every_cpu_but_for_what_one_says_of_its_own():
    machine = parse_machine("epyc + ryzen7/ddr5-5200 + ddr5-6000/64GiB")
    epyc, ryzen = machine.devices
    assert epyc.bandwidth_bytes_per_second == 12 * 6000e6 * 8
    assert ryzen.bandwidth_bytes_per_second == 2 * 5200e6 * 8
    assert epyc.memory_bytes == ryzen.memory_bytes == 64 * 2**30


def test_hosts_are_joined_by_ethernet():
    machine = parse_machine("rtx4090 + ryzen7 | 2 x rtx3090 | 10gbe")
    assert machine.device_names == (
        "host0/rtx4090", "host0/ryzen7", "host1/rtx3090:0", "host1/rtx3090:1", "host1/host",
    )  # fmt: skip
    assert machine.host == "host0/ryzen7"
    assert [device.host for device in machine.devices] == ["host0"] * 2 + ["host1"] * 3
    assert rate_of(machine, "host0/rtx4090", "host1/rtx3090:1") == pytest.approx(1.175e9)
    between = [link for link in machine.links if link.source[:5] != link.destination[:5]]
    assert {link.channel for link in between} == {"host0->host1", "host1->host0"}
    assert len(between) == 2 * 2 * 3
    ways = {round(1e6 * link.latency_seconds) for link in between}
    assert ways == {50, 75, 100}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rtx3090/pcie6x16", "rtx3090 has no option 'pcie6x16'; it has pcie4x8"),
        ("rtx3090/16c", "rtx3090 has no option '16c'"),
        ("ryzen7/0c", "ryzen7 has no option '0c'; it has 16c"),
        ("ryzen7/0.0GHz", "ryzen7 has no option '0.0ghz'"),
        ("ryzen7/\u0664ghz", "ryzen7 has no option"),
        ("ryzen7/1\u0666c", "ryzen7 has no option"),
        ("ryzen7/4.5", "ryzen7 has no option '4.5'"),
        ("core-i9/24c", "core-i9 has no option '24c'; it has 4.5GHz"),
        ("rtx3090/nvlink4", "rtx3090 has no option 'nvlink4'"),
        ("ryzen7 + ddr5-6000/16c", "is the memory of every CPU, once"),
        ("ryzen7 + ddr5-6000 + ddr4-3200", "is the memory of every CPU, once"),
        ("|".join(["t4"] * 65 + ["1gbe"]), "presets make 1 to 64 hosts, not 65"),
        ("ryzen7/64", "ryzen7 has no option '64'"),
        ("ryzen7/", "ryzen7 has no option ''"),
        ("rtx3090/nvlink0", "rtx3090 has no option 'nvlink0'"),
        ("rtx3090 + ddr5-6000", "ddr5-6000 is a CPU's memory"),
        ("rtx3090 | rtx3090", "hosts are joined by Ethernet"),
        ("rtx3090 | 0gbe", "hosts are joined by Ethernet"),
        ("300 x v100 | 300 x v100 | 1gbe", "presets make 1 to 512 devices in all, not 600"),
    ],
)
def test_options_that_cannot_be_are_refused(text, says):
    with pytest.raises(MachineError, match=says):
        parse_machine(text)


def test_a_machine_of_presets_is_written_and_read_again(tmp_path):
    machine = parse_machine("m3 max + ryzen7/16c | mi300x/pcie5x8 | 100gbe")
    save_machine(machine, tmp_path / "m.toml")
    assert load_machine(tmp_path / "m.toml") == machine


def test_a_chip_that_cannot_be_is_refused():
    with pytest.raises(MachineError, match="chip: threads is 0"):
        Chip(10, 1e9, 0)
    with pytest.raises(MachineError, match="chip: clock_hz is nan"):
        Chip(10, float("nan"), 1024)


def test_a_machine_has_a_bounded_number_of_devices():
    devices = tuple(Device(f"d{i}", "cpu", "test", 1, {}, 1.0) for i in range(4097))
    with pytest.raises(MachineError, match="has 4097 devices; it may have 1 to 4096"):
        Machine("many", devices, "d0")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a = " + "[" * 100_000, "nested too deeply"),
        (".".join(["a"] * 100_000) + " = 1", "a key of more than 16 parts"),
        ("[" + ".".join(["'a b'"] * 101) + "]", "a key of more than 16 parts"),
        ("a = " + "9" * 5000, "not TOML"),
        ("#" * 2**26 + "#", "larger than 64 MiB"),
    ],
    ids=["brackets", "dots", "dots in a head", "digits", "size"],
)
def test_a_file_that_is_no_machine_in_an_unusual_way_is_refused(tmp_path, text, complaint):
    (tmp_path / "box.toml").write_text(text)
    with pytest.raises(FileFormatError, match=complaint):
        load_machine(tmp_path / "box.toml")


def test_here_splits_the_cores_in_disjoint_devices():
    one = local_machine()
    count = min(2, len(one.devices[0].cores))
    many = local_machine(f"here/{count}")
    cores = [core for device in many.devices for core in device.cores]
    assert sorted(cores) == sorted(one.devices[0].cores)
    assert many.local


def test_here_1_is_one_device_of_one_core():
    one, whole = local_machine("here/1"), local_machine()
    assert (one.name, whole.name) == ("here/1", "here")
    (device,) = one.devices
    assert len(device.cores) == 1
    assert set(device.cores) < set(whole.devices[0].cores) or whole.devices[0].cores == device.cores
    parsed = parse_machine("here/1")
    assert (parsed.name, parsed.devices[0].cores) == ("here/1", device.cores)
    check_local(one)


def test_a_device_uses_a_thread_a_core_unless_it_says_otherwise(tmp_path):
    machine = machine_of(1)
    device = replace(machine.devices[0], cores=(0, 1, 2))
    assert device.op_threads == 3
    two = replace(machine, devices=(replace(device, threads=2),))
    assert two.devices[0].op_threads == 2
    assert two.fingerprint == replace(machine, devices=(device,)).fingerprint
    save_machine(two, tmp_path / "two.toml")
    assert load_machine(tmp_path / "two.toml") == two
    save_machine(replace(two, devices=(device,)), tmp_path / "all.toml")
    assert "threads" not in (tmp_path / "all.toml").read_text()
    assert load_machine(tmp_path / "all.toml").devices[0].op_threads == 3
    with pytest.raises(MachineError, match="threads is 4, but it has 3 cores"):
        replace(device, threads=4)


def test_the_host_is_among_the_smaller_devices_where_cores_do_not_divide(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(5)))
    sizes = [len(device.cores) for device in local_machine("here/3").devices]
    assert sizes == [1, 2, 2]


def test_the_devices_of_here_are_of_this_machine():
    check_local(local_machine(f"here/{min(2, len(os.sched_getaffinity(0)))}"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "another processor"}, "another processor"),
        ({"kind": "gpu"}, "is a gpu"),
        ({"cores": (99_999,)}, "core 99999"),
        ({"cores": (-1,)}, "core -1"),
        ({"cores": "twice"}, "listed twice"),
    ],
)
def test_devices_with_cores_of_another_machine_are_refused(change, complaint):
    machine = local_machine()
    (device,) = machine.devices
    if change.get("cores") == "twice":
        change = {"cores": device.cores[:1] * 2}
    with pytest.raises(MachineError, match=complaint):
        check_local(replace(machine, devices=(replace(device, **change),)))


def test_two_devices_that_share_a_core_are_refused():
    core = local_machine().devices[0].cores[:1]
    devices = tuple(
        replace(device, model=local_machine().devices[0].model, cores=core)
        for device in machine_of(2).devices
    )
    with pytest.raises(MachineError, match="each belongs to one device"):
        check_local(replace(machine_of(2), devices=devices))


def test_more_devices_than_cores_are_refused():
    with pytest.raises(MachineError, match="cores here"):
        local_machine("here/100000")


def test_measured_rates_do_not_change_the_fingerprint_but_devices_do():
    machine = machine_of(2)
    faster = replace(machine, links=tuple(replace(x, latency_seconds=1.0) for x in machine.links))
    assert faster.fingerprint == machine.fingerprint
    assert machine_of(3).fingerprint != machine.fingerprint


def test_what_messages_take_of_both_ends_is_kept_in_a_file_and_shown(tmp_path):
    machine = machine_of(2)
    busy = replace(machine.links[0], send_seconds=6e-5, receive_seconds=2e-5)
    machine = replace(machine, links=(busy, *machine.links[1:]))
    save_machine(machine, tmp_path / "box.toml")
    assert load_machine(tmp_path / "box.toml") == machine
    assert (tmp_path / "box.toml").read_text().count("_seconds = ") == 2 + len(machine.links) + 2
    shown = "".join(str(row) for table in machine_tables(machine) for row in table.rows)
    assert "60 us" in shown
    assert "20 us" in shown


@pytest.mark.parametrize("field", ["send_seconds", "receive_seconds"])
@pytest.mark.parametrize("value", [-1e-6, np.inf, np.nan])
def test_what_messages_take_is_finite_and_not_negative(field, value):
    with pytest.raises(MachineError, match=f"link d0 -> d1: {field} is"):
        replace(machine_of(2).links[0], **{field: value})


def test_an_unknown_device_is_named_with_those_there_are():
    with pytest.raises(UnknownDeviceError) as raised:
        machine_of(2).device_index("d9")
    assert (raised.value.device, raised.value.known) == ("d9", ("d0", "d1"))


def test_two_devices_that_cannot_reach_each_other_are_named():
    devices = machine_of(3).devices
    links = (Link("d0", "d1", 1e9, 0.0, "a"), Link("d1", "d0", 1e9, 0.0, "b"))
    with pytest.raises(NoRouteError) as raised:
        Machine("m", devices, "d0", links)
    assert (raised.value.source, raised.value.destination) == ("d0", "d2")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tpu"},
        {"memory_bytes": -1},
        {"memory_bytes": 2**63},
        {"memory_bytes": 10**400},
        {"flops_per_second": {"float32": 0.0}},
        {"bandwidth_bytes_per_second": float("nan")},
        {"op_overhead_seconds": float("inf")},
    ],
)
def test_an_impossible_device_is_refused(change):
    with pytest.raises(MachineError, match="d0"):
        replace(machine_of(1).devices[0], **change)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name = ", "not TOML"),
        (
            'name = "m"\nhost = "a"\n[[devices]]\nname = "a"\nkind = "cpu"\nmodel = "m"\n'
            "memory_bytes = true",
            "devices.0.memory_bytes: .* not true or false",
        ),
        ('name = "m"\ndevices = []', "host: Field required"),
        ('name = "m"\nhost = "a"\nsurprise = 1\n[[devices]]\nname = "a"', "devices.0.kind"),
    ],
)
def test_a_malformed_file_says_where(tmp_path, text, complaint):
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(FileFormatError, match=complaint):
        load_machine(tmp_path / "m.toml")


def test_devices_of_one_name_are_refused():
    device = Device("a", "cpu", "m", 1, {}, 1.0, 0.0)
    with pytest.raises(MachineError, match="share a name"):
        Machine("m", (device, device), "a")


def test_only_its_own_source_can_be_a_links_channel():
    devices = machine_of(2).devices
    Machine(
        "m", devices, "d0", (Link("d0", "d1", 1e9, 0.0, "d0"), Link("d1", "d0", 1e9, 0.0, "d1"))
    )
    with pytest.raises(MachineError, match="not d1"):
        Machine(
            "m", devices, "d0", (Link("d0", "d1", 1e9, 0.0, "d1"), Link("d1", "d0", 1e9, 0.0, "d1"))
        )


# ---- GPUs ----


def with_gpus(monkeypatch, count=2, gib=16):
    """torch sees so many GPUs, and a driver is there."""
    monkeypatch.setattr(gpus, "_DRIVERS", (__file__,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (gib << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _number: "NVIDIA Test")


def test_here_has_the_cores_and_every_gpu(monkeypatch):
    with_gpus(monkeypatch)
    machine = parse_machine("here")
    assert machine.device_names == ("cpu0", "gpu0", "gpu1")
    assert [d.torch_device for d in machine.devices] == ["", "cuda:0", "cuda:1"]
    assert machine.host == "cpu0" and machine.local
    without = parse_machine("here/cpu")
    assert (without.name, without.device_names) == ("here/cpu", ("cpu0",))
    check_local(machine)


def test_without_gpus_here_has_one_name(monkeypatch):
    with_gpus(monkeypatch, count=0)
    assert parse_machine("here/cpu").name == parse_machine("here").name == "here"


def test_here_gpu_has_the_gpus_alone(monkeypatch):
    with_gpus(monkeypatch)
    machine = parse_machine("here/gpu")
    assert machine.device_names == ("host", "gpu0", "gpu1")
    assert machine.devices[0].kind == "host" and machine.local
    check_local(machine)


def test_a_gpu_may_be_several_devices_that_share_it(monkeypatch):
    with_gpus(monkeypatch, count=1)
    machine = parse_machine("here/gpu*2")
    assert machine.device_names == ("host", "gpu0.0", "gpu0.1")
    halves = machine.devices[1:]
    assert {d.torch_device for d in halves} == {"cuda:0"}
    assert {d.memory_bytes for d in halves} == {((16 << 30) - RESERVED_BYTES) // 2}
    channels = {link.destination: link.channel for link in machine.links if link.source == "host"}
    assert len(set(channels.values())) == 1, "they share the engine that copies"


def test_gpus_that_are_not_here_are_refused(monkeypatch):
    with_gpus(monkeypatch)
    machine = parse_machine("here/gpu")
    with_gpus(monkeypatch, count=1)
    with pytest.raises(MachineError, match=r"gpu1.*torch sees cuda:0 to cuda:0"):
        check_local(machine)
    with_gpus(monkeypatch, count=0)
    with pytest.raises(MachineError, match="torch sees no GPU"):
        parse_machine("here/gpu")
    assert parse_machine("here").device_names == ("cpu0",)


@pytest.mark.parametrize("text", ["here/gpus", "here/gpu*", "here/cpu2", "here/gpu*x", "here/-1"])
def test_other_texts_do_not_name_this_machine(text):
    with pytest.raises(UnknownPresetError):
        parse_machine(text)


def test_a_machine_file_names_its_gpus(tmp_path, monkeypatch):
    with_gpus(monkeypatch)
    machine = parse_machine("here")
    save_machine(machine, tmp_path / "box.toml")
    assert load_machine(tmp_path / "box.toml") == machine
    with pytest.raises(MachineError, match="torch_device is 'cuda'"):
        replace(machine.devices[1], torch_device="cuda")
    with pytest.raises(MachineError, match="torch_device"):
        replace(machine.devices[0], torch_device="cuda:0")
