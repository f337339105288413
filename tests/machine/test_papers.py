"""The papers' machines, and that they are what was fitted."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from dovetail.costs import analytic_costs
from dovetail.errors import FileFormatError, MachineError, UnknownPresetError
from dovetail.frontends import parse_optimizer, resolve
from dovetail.machine import PAPER_MACHINES, load_machine, parse_machine, save_machine
from dovetail.machine.files import machine_from_dict, machine_to_dict
from dovetail.machine.presets import FITTED, fitted_machine
from dovetail.reports import machine_table
from dovetail.simulator import Simulator
from reproductions.cases import RL17_CASES
from tests.support.builders import machine_of

FOUND = json.loads(FITTED.read_text())
SINGLE_DEVICE = {  # RL17, table 1
    ("zoo:rnnlm", "1 CPU"): 6.89,
    ("zoo:rnnlm", "1 GPU"): 1.57,
    ("zoo:nmt", "1 CPU"): 10.72,
    ("zoo:inception_v3", "1 CPU"): 26.21,
    ("zoo:inception_v3", "1 GPU"): 4.60,
}


def shown(machine):
    console = Console(width=300)
    with console.capture() as text:
        console.print(machine_table(machine))
    return text.get()


def test_rl17_has_dies_of_k80_and_a_haswell_that_is_the_host():
    machine = parse_machine("rl17/4")
    assert machine.device_names == ("k80:0", "k80:1", "k80:2", "k80:3", "haswell")
    assert (machine.name, machine.host) == ("rl17/4", "haswell")
    link = machine.links[machine.link_index[0, 1]]
    assert (link.bandwidth_bytes_per_second, link.latency_seconds) == (7.6e9, 25e-6)
    k80, haswell = machine.devices[0], machine.devices[4]
    assert k80.flops_per_second["float32"] == 4.37e12
    assert (k80.memory_bytes, haswell.memory_bytes) == (11441 * 2**20, 50 * 10**9)


@pytest.mark.parametrize("gpus", range(2, 9))
def test_gdp_has_two_to_eight_p100_and_a_broadwell(gpus):
    machine = parse_machine(f"gdp/{gpus}")
    assert machine.device_names[:gpus] == tuple(f"p100:{i}" for i in range(gpus))
    assert machine.device_names[gpus:] == ("broadwell",) == (machine.host,)


@pytest.mark.parametrize("text", ["rl17/3", "rl17", "rl17/8", "gdp/1", "gdp/9", "gdp/", "rl18/2"])
def test_a_machine_that_no_paper_has_is_refused_with_those_there_are(text):
    with pytest.raises(UnknownPresetError, match="rl17/2, rl17/4 or gdp/2 to gdp/8"):
        parse_machine(text)


def test_the_machines_have_the_constants_that_the_fit_wrote():
    for device in parse_machine("rl17/2").devices:
        fitted = FOUND["rl17"]["devices"][device.model]
        assert device.op_overhead_seconds == fitted["op_overhead_seconds"]
        assert device.efficiencies == fitted["efficiencies"]
    factor = FOUND["gdp"]["devices"]["p100"]["compute_factor"]
    gpu, sheet = parse_machine("gdp/2").devices[0], parse_machine("p100").devices[0]
    assert gpu.op_overhead_seconds == pytest.approx(sheet.op_overhead_seconds * factor)
    assert gpu.flops_per_second["float32"] * factor == pytest.approx(9.5e12)
    assert gpu.bandwidth_bytes_per_second * factor == pytest.approx(732e9)


def test_only_single_device_figures_of_rl17_entered_and_no_more_parameters_than_figures():
    rows = FOUND["rl17"]["figures"]
    used = {(r["model"].split("?")[0], r["column"]): r["published_seconds"] for r in rows}
    assert used == SINGLE_DEVICE
    assert FOUND["rl17"]["parameters"] == len(rows) == 5


def test_the_fit_meets_what_it_was_fitted_to():
    assert [row["log_ratio"] for row in FOUND["rl17"]["figures"]] == pytest.approx(
        [0] * 5, abs=1e-6
    )
    rows = FOUND["gdp"]["figures"]
    assert {row["column"] for row in rows} == {"human"}
    assert (len(rows), FOUND["gdp"]["parameters"]) == (12, 1)
    assert np.mean([row["log_ratio"] for row in rows]) == pytest.approx(0, abs=1e-6)
    for row in [*FOUND["rl17"]["figures"], *rows]:
        ratio = row["simulated_seconds"] / row["published_seconds"]
        assert np.log(ratio) == pytest.approx(row["log_ratio"], abs=1e-9)


def test_convolutions_reach_one_share_of_the_rest_on_both_devices_of_rl17():
    ratios = {
        device["efficiencies"]["aten.convolution"] / device["efficiencies"][""]
        for device in FOUND["rl17"]["devices"].values()
    }
    assert max(ratios) == pytest.approx(min(ratios))
    for device in FOUND["rl17"]["devices"].values():
        shares = device["efficiencies"]
        assert shares["onnx.Conv"] == shares["onnx.QLinearConv"] == shares["aten.convolution"]


def test_one_device_takes_as_long_as_the_paper_says():
    (case, *_) = (case for case in RL17_CASES if case.key == "rnnlm-2gpu")
    graph = resolve(case.model, train=parse_optimizer(case.train)).graph
    machine = parse_machine("rl17/2")
    simulator = Simulator(graph, machine, analytic_costs(graph, machine))
    placements = np.array([[machine.device_index("haswell")] * len(graph), [0] * len(graph)])
    seconds = simulator.evaluate(placements).values
    assert seconds == pytest.approx([6.89, 1.57], rel=0.01)


def test_a_factor_slows_all_that_an_op_does_and_no_link():
    plain = parse_machine("2 x p100 + broadwell")
    slow = fitted_machine("gdp/2", {m: {"compute_factor": 2.0} for m in ("p100", "broadwell")})
    for device, slower in zip(plain.devices, slow.devices, strict=True):
        assert slower.op_overhead_seconds == 2 * device.op_overhead_seconds
        assert slower.bandwidth_bytes_per_second == device.bandwidth_bytes_per_second / 2
        assert slower.flops_per_second["float32"] == device.flops_per_second["float32"] / 2
    assert slow.links == plain.links


def test_the_longest_prefix_of_a_kind_counts():
    (device,) = machine_of(1).devices
    device = replace(device, efficiencies={"": 0.5, "aten.conv": 0.3, "aten.convolution_b": 0.1})
    kinds = ("aten.mm", "aten.convolution", "aten.convolution_backward", "aten.con")
    assert [device.efficiency(kind) for kind in kinds] == [0.5, 0.3, 0.1, 0.5]
    assert replace(device, efficiencies={"aten.mm": 0.5}).efficiency("aten.add") == 1.0


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_an_efficiency_is_a_share(share):
    with pytest.raises(MachineError, match=r"efficiencies\['aten.mm'\]"):
        replace(machine_of(1).devices[0], efficiencies={"": 1.0, "aten.mm": share})


@pytest.mark.parametrize("name", PAPER_MACHINES)
def test_a_papers_machine_saved_as_toml_loads_equal(tmp_path, name):
    machine = parse_machine(name)
    save_machine(machine, tmp_path / "m.toml")
    loaded = load_machine(tmp_path / "m.toml")
    assert loaded == machine
    assert loaded.devices[0].efficiencies == machine.devices[0].efficiencies


def test_a_file_without_efficiencies_loads_and_a_wrong_one_says_where(tmp_path):
    raw = machine_to_dict(machine_of(2))
    assert all("efficiencies" not in device for device in raw["devices"])
    assert machine_from_dict(raw) == machine_of(2)
    (tmp_path / "m.toml").write_text(
        'name = "m"\nhost = "a"\n[[devices]]\nname = "a"\nkind = "cpu"\nmodel = "m"\n'
        'memory_bytes = 1\nefficiencies = { "" = "much" }\n'
    )
    with pytest.raises(FileFormatError, match=r"devices\.0\.efficiencies"):
        load_machine(tmp_path / "m.toml")


def test_efficiencies_do_not_change_the_fingerprint():
    sheet = parse_machine("2 x k80 + haswell")
    assert parse_machine("rl17/2").fingerprint == sheet.fingerprint


def test_the_shares_of_the_peak_are_shown():
    (device,) = machine_of(1).devices
    shares = {"": 0.31, "aten.mm": 0.5}
    machine = replace(machine_of(1), devices=(replace(device, efficiencies=shares),))
    assert "reached: 31 %, aten.mm 50 %" in shown(machine)
    assert "reached" not in shown(machine_of(1))
