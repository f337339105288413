"""Pins, caps and kinds of device hold in every method; wrong ones are errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import NoDeviceError, OutOfMemoryError, PinError, UnknownDeviceError
from dovetail.graph import Groups, Phase
from dovetail.placers import parse_budget, place
from tests.support.placer_instances import (
    build_graph,
    build_machine,
    build_problem,
    random_problem,
    usable_placers,
)


def chain(**fields):
    reads = [[]] + [[i] for i in range(5)]
    modules = ["embed", "lstm.0", "lstm.0.gate", "lstm.1", "lstm.1", "softmax"]
    return build_graph(reads, modules=modules, **fields)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    pinned=st.dictionaries(st.integers(0, 19), st.integers(0, 2), max_size=3),
    placer=st.sampled_from(sorted(usable_placers())),
    share=st.sampled_from([0.55, 0.8, 2.0]),
)
def test_pins_and_caps_hold_in_every_method(seed, pinned, placer, share):
    rng = np.random.default_rng(seed)
    shape = random_problem(rng, groups=10, devices=3)
    of_op = shape.groups.of_op
    pins = {int(of_op[op]): (f"op{op}", f"gpu{device}") for op, device in pinned.items()}
    cap = int(share * shape.graph.tensor_bytes.sum())
    problem = build_problem(
        shape.graph,
        shape.machine,
        groups=shape.groups,
        seconds=shape.costs.compute_seconds,
        pins=pins.values(),
        caps=[("gpu1", cap)],
    )
    try:
        outcome = place(problem, placer, parse_budget("120e"))
    except OutOfMemoryError as error:
        assert error.needed_bytes > error.available_bytes
        return
    for pattern, device in pins.values():
        op = shape.graph.index[pattern]
        assert problem.machine.device_names[outcome.placement[op]] == device
    assert outcome.peak_memory_bytes[1] <= cap
    of_group = [set(outcome.placement[of_op == g].tolist()) for g in range(shape.groups.count)]
    assert all(len(devices) == 1 for devices in of_group)


@pytest.mark.parametrize(
    ("pattern", "ops"),
    [
        ("op2", [2]),
        ("lstm.0", [1, 2]),
        ("lstm", [1, 2, 3, 4]),
        ("lstm.?", [1, 2, 3, 4]),
        ("op[45]", [4, 5]),
        ("*", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_pin_matches_names_modules_and_what_is_inside_them(pattern, ops):
    problem = build_problem(chain(), build_machine(2), pins=[(pattern, "gpu1")])
    fixed = np.flatnonzero(~problem.allowed[:, 0])
    assert fixed.tolist() == ops


def test_a_pin_that_matches_nothing_is_an_error():
    with pytest.raises(PinError) as raised:
        build_problem(chain(), build_machine(2), pins=[("lstm.7", "gpu0")])
    assert raised.value.pattern == "lstm.7"


def test_a_pin_on_a_device_that_is_not_there_is_an_error():
    with pytest.raises(UnknownDeviceError) as raised:
        build_problem(chain(), build_machine(2), pins=[("lstm.0", "tpu")])
    assert raised.value.device == "tpu"


def test_two_pins_that_tear_a_group_apart_are_an_error():
    groups = Groups(np.zeros(6, dtype=np.int32), 1)
    pins = [("op0", "gpu0"), ("op5", "gpu1")]
    with pytest.raises(PinError, match="op0"):
        build_problem(chain(), build_machine(2), groups=groups, pins=pins)


def test_a_pin_on_inputs_only_is_an_error_since_they_carry_no_choice():
    graph = chain(sources={0: "input"})
    with pytest.raises(PinError, match="no choice"):
        build_problem(graph, build_machine(2), pins=[("op0", "gpu0")])


def test_ops_go_only_to_their_kinds_of_device_in_every_method():
    kinds = (("cpu",), (), (), (), (), ())
    machine = build_machine(2, kinds=["cpu", "gpu"])
    for name in usable_placers():
        problem = build_problem(chain(device_kinds=kinds), machine)
        outcome = place(problem, name, parse_budget("100e"))
        assert outcome.placement[0] == 0, name


def test_an_op_that_costs_forever_on_a_device_is_not_placed_there():
    seconds = np.ones((6, 2))
    seconds[3, 0] = np.inf
    for name in usable_placers():
        outcome = place(
            build_problem(chain(), build_machine(2), seconds=seconds), name, parse_budget("100e")
        )
        assert outcome.placement[3] == 1, name


def test_nothing_runs_on_a_host_that_runs_nothing():
    for name in usable_placers():
        problem = build_problem(chain(), build_machine(2, host=True))
        outcome = place(problem, name, parse_budget("100e"))
        assert outcome.placement.max() <= 1, name


def test_an_op_without_any_device_is_an_error_that_names_it():
    with pytest.raises(NoDeviceError) as raised:
        build_problem(chain(device_kinds=((), (), ("cpu",), (), (), ())), build_machine(2))
    assert raised.value.op == "op2"


def test_a_pin_against_the_kinds_of_an_op_is_an_error():
    machine = build_machine(2, kinds=["cpu", "gpu"])
    graph = chain(device_kinds=((), (), ("cpu",), (), (), ()))
    with pytest.raises(NoDeviceError) as raised:
        build_problem(graph, machine, pins=[("op2", "gpu1")])
    assert raised.value.op == "op2"


def test_source_entries_of_a_placement_are_where_sources_live():
    #  input0   parameter1 (read by op 2)
    #      └──► op2 ◄──┘
    graph = build_graph(
        [[], [], [0, 1], [2]],
        sources={0: "input", 1: "parameter"},
        phases=[Phase.FORWARD] * 4,
    )
    groups = Groups(np.array([0, 0, 0, 1], dtype=np.int32), 2)
    machine = build_machine(2, host=True)
    problem = build_problem(graph, machine, groups=groups, pins=[("op2", "gpu1")])
    outcome = place(problem, "auto", parse_budget("50e"))
    assert outcome.placement[:3].tolist() == [2, 1, 1]
