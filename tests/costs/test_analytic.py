from dataclasses import replace

import numpy as np
import pytest

from dovetail.costs.analytic import analytic_costs
from dovetail.errors import CostError
from dovetail.machine import parse_machine
from tests.support.builders import Op, graph_of, machine_of, source


def test_an_op_takes_its_overhead_and_the_longer_of_arithmetic_and_memory():
    graph = graph_of(
        source("w"),
        Op("arithmetic", ("w",), flops=5 * 10**9, accessed_bytes=8),
        Op("memory", ("w",), flops=1, accessed_bytes=3 * 10**12),
    )
    costs = analytic_costs(graph, machine_of(1, overhead=0.5))  # 1e9 FLOP/s, 1e12 bytes/s
    np.testing.assert_allclose(costs.compute_seconds[:, 0], [0.0, 5.5, 3.5])


def test_the_implied_host_and_unsuited_kinds_run_nothing():
    graph = graph_of(Op("a", device_kinds=("cpu",)), Op("b"))
    machine = parse_machine("k80 + p100")
    seconds = analytic_costs(graph, machine).compute_seconds
    assert np.isinf(seconds[0]).all()
    assert np.isinf(seconds[1, machine.host_index])
    assert np.isfinite(seconds[1, :2]).all()


def test_a_device_from_which_no_rate_can_be_derived_names_the_op():
    graph = graph_of(Op("a", dtype="complex64"), Op("b", ("a",), dtype="float16", flops=0))
    machine = machine_of(1)
    rates = {"float16": 1e9}
    machine = replace(machine, devices=(replace(machine.devices[0], flops_per_second=rates),))
    with pytest.raises(CostError, match="complex64, nor for float32") as raised:
        analytic_costs(graph, machine)
    assert raised.value.op == "a"


@pytest.mark.parametrize(
    ("dtype", "times"),
    [("float16", 1), ("float8_e5m2", 1), ("uint16", 1), ("float64", 2), ("complex128", 8),
     ("complex64", 4), ("complex32", 4)],
)  # fmt: skip
def test_a_dtype_without_a_rate_has_that_of_its_parts_or_of_float32(dtype, times):
    graph = graph_of(Op("a", dtype=dtype, flops=2 * 10**9, accessed_bytes=8))
    assert analytic_costs(graph, machine_of(1)).compute_seconds[0, 0] == 2.0 * times


def test_integer_and_boolean_work_counts_at_the_float32_rate():
    for dtype in ("int64", "uint8", "bool"):
        graph = graph_of(Op("a", dtype=dtype, flops=2 * 10**9, accessed_bytes=8))
        assert analytic_costs(graph, machine_of(1)).compute_seconds[0, 0] == 2.0


def test_arithmetic_takes_longer_where_a_kind_reaches_a_share_of_the_peak():
    ops = [Op("a", flops=10**9, accessed_bytes=8), Op("b", flops=10**9, accessed_bytes=8)]
    ops.append(Op("c", flops=1, accessed_bytes=3 * 10**12))  # memory is not slower
    graph = graph_of(*ops)
    graph = replace(graph, kinds=("aten.mm", "aten.convolution_backward", "aten.convolution"))
    machine = machine_of(1)
    shares = {"": 0.5, "aten.convolution": 0.1}
    slow = replace(machine, devices=(replace(machine.devices[0], efficiencies=shares),))
    seconds = analytic_costs(graph, slow).compute_seconds[:, 0]
    np.testing.assert_allclose(seconds, [2.0, 10.0, 3.0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_card_without_units_for_a_dtype_takes_as_long_as_in_float32(dtype):
    def seconds(dtype):
        graph = graph_of(Op("a", dtype=dtype, flops=10**12, accessed_bytes=8))
        return analytic_costs(graph, parse_machine("k80 + haswell")).compute_seconds

    np.testing.assert_array_equal(seconds(dtype), seconds("float32"))
