import os
from dataclasses import replace

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
    Device,
    Link,
    Machine,
    check_local,
    emulated_dtypes,
    gpus,
    load_machine,
    local_machine,
    parse_machine,
    save_machine,
)
from dovetail.machine.gpus import RESERVED_BYTES
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
    assert PRESETS[model].device.flops_per_second[dtype] > 0


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
