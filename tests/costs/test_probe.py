from dataclasses import replace

import pytest

from dovetail.costs import CostCache, probed_machine
from dovetail.costs.measured import fit_link
from dovetail.machine import local_machine
from dovetail.runtime import neighbours
from dovetail.runtime.timers import Deadline


def test_a_link_is_fitted_exactly_where_its_hops_follow_the_rule():
    hops = {size: 5e-6 + size / 4e9 for size in (4096, 262144, 4194304)}
    fitted = fit_link(hops)
    assert fitted["latency_seconds"] == pytest.approx(5e-6)
    assert fitted["bandwidth_bytes_per_second"] == pytest.approx(4e9)


def test_a_fit_is_never_negative():
    fitted = fit_link({4096: 5e-6, 262144: 3e-5, 4194304: 4e-3})
    assert fitted["latency_seconds"] > 0
    assert fitted["bandwidth_bytes_per_second"] > 0


def test_the_probe_measures_once_and_the_cache_remembers(tmp_path):
    machine = local_machine(f"here/{min(2, len(local_machine().devices[0].cores))}")
    cache = CostCache(tmp_path / "costs.sqlite")
    probed = probed_machine(machine, cache)
    assert probed.fingerprint == machine.fingerprint
    for device in probed.devices:
        assert device.flops_per_second["float32"] > 1e8
        assert 1e8 < device.bandwidth_bytes_per_second < 1e13
        assert 1e-8 < device.op_overhead_seconds < 1e-2
    assert probed_machine(machine, cache) == probed


@pytest.fixture
def measured(monkeypatch):
    """The machines that were measured, without the work."""
    machines = []

    def measure(machine, _deadline):
        machines.append(machine)
        devices = [{"op_overhead_seconds": 1e-5}] * len(machine.devices)
        return {"devices": devices, "links": []}, 1.5

    monkeypatch.setattr("dovetail.costs.measured._measure_rates", measure)
    return machines


def test_two_machines_that_only_share_a_name_are_measured_apart(tmp_path, measured):
    machine, cache = local_machine(), CostCache(tmp_path / "costs.sqlite")
    other = replace(machine.devices[0], name="other")
    probed_machine(machine, cache)
    probed_machine(replace(machine, devices=(other,), host="other"), cache)
    probed_machine(machine, cache)
    assert len(measured) == 2


def test_rates_measured_beside_other_programs_serve_until_the_cores_are_calm(
    tmp_path, measured, monkeypatch
):
    monkeypatch.setattr(neighbours, "BUSY_CORES", 0.0)  # whatever the others do disturbs
    machine, cache, told = local_machine(), CostCache(tmp_path / "costs.sqlite"), []
    for _ in range(2):
        probed = probed_machine(machine, cache, beside=told.append)
        assert probed.devices[0].op_overhead_seconds == 1e-5
    assert told == [1.5, 1.5]
    assert len(measured) == 1
    monkeypatch.setattr(neighbours, "BUSY_CORES", float("inf"))
    # There is no time to measure them anew.
    probed_machine(machine, cache, beside=told.append, deadline=Deadline(0.0))
    assert len(told) == 3 and len(measured) == 1
    for _ in range(2):
        probed_machine(machine, cache, beside=told.append)
    assert len(told) == 3
    assert len(measured) == 2


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"devices": [], "links": []},
        {"devices": [{"surprise": 1}], "links": []},
        {"devices": [{"op_overhead_seconds": -1.0}], "links": []},
    ],
)
def test_a_row_that_does_not_fit_is_measured_anew(tmp_path, measured, monkeypatch, row):
    monkeypatch.setattr(CostCache, "probe", lambda _cache, _key: row)
    probed = probed_machine(local_machine(), CostCache(tmp_path / "costs.sqlite"))
    assert len(measured) == 1
    assert probed.devices[0].op_overhead_seconds == 1e-5
