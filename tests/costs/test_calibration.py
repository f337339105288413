from dataclasses import replace

import numpy as np
import pytest

from dovetail.costs import Costs, analytic_costs, calibration
from dovetail.costs.calibration import calibrated
from dovetail.errors import MachineError
from dovetail.machine import load_machine, parse_machine, save_machine
from tests.support.builders import Op, graph_of, machine_of, source


def with_factors(machine, **factors):
    devices = tuple(replace(d, calibration=factors) for d in machine.devices)
    return replace(machine, devices=devices)


@pytest.mark.parametrize("text", ["v100 + xeon", "ryzen9"])
def test_a_factor_scales_what_its_class_takes_beyond_the_overhead(text):
    graph = graph_of(
        source("w"),
        Op("a", ("w",), "aten.add", accessed_bytes=10**9),
        Op("b", ("w",), "aten.mm", flops=10**12),
    )
    machine = parse_machine(text)
    before = analytic_costs(graph, machine).compute_seconds[:, 0]
    after = analytic_costs(graph, with_factors(machine, product=3.0)).compute_seconds[:, 0]
    overhead = machine.devices[0].op_overhead_seconds
    np.testing.assert_allclose(after[:2], before[:2])
    assert after[2] - overhead == pytest.approx(3 * (before[2] - overhead))


def test_factors_stay_with_the_machines_file(tmp_path):
    machine = with_factors(parse_machine("ryzen9"), product=1.5, softmax=0.7)
    save_machine(machine, tmp_path / "box.toml")
    assert load_machine(tmp_path / "box.toml") == machine


@pytest.mark.parametrize("factor", [0.0, -1.0, np.inf, np.nan])
def test_a_factor_is_above_nothing(factor):
    with pytest.raises(MachineError, match="calibration"):
        with_factors(parse_machine("ryzen9"), product=factor)


def test_a_class_takes_the_median_of_its_ops_factors(monkeypatch):
    machine = with_factors(machine_of(2, overhead=1e-7), product=7.0)

    def measured(graph, program, machine, cache, **_):
        bare = replace(machine, devices=tuple(replace(d, calibration={}) for d in machine.devices))
        seconds = analytic_costs(graph, bare).compute_seconds
        seconds = np.where(graph.is_source[:, None], 0.0, 1e-7 + (seconds - 1e-7) * [2.0, 4.0])
        return Costs(seconds, "measured")

    monkeypatch.setattr(calibration, "measured_costs", measured)
    found = calibrated(machine, None)
    for device, factor in zip(found.devices, (2.0, 4.0), strict=True):
        assert set(device.calibration.values()) == {factor}
        assert {"product", "convolution", "softmax", "normalisation", "pointwise", "update",
                "gather", "attention"} <= set(device.calibration)  # fmt: skip
