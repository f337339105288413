import json
from dataclasses import fields, replace

import numpy as np
import pytest

from dovetail.errors import (
    FileFormatError,
    GraphMismatchError,
    MachineMismatchError,
    NotContiguousError,
    OrderError,
    OutOfMemoryError,
    PlanError,
    UnknownDeviceError,
    UnplacedOpError,
    UnwritableError,
)
from dovetail.graph import Phase
from dovetail.graph.source import Source
from dovetail.machine import parse_machine
from dovetail.plans import (
    Plan,
    Schedule,
    Stage,
    capacities_of,
    check,
    describe_gap,
    load_plan,
    normalise,
)
from dovetail.units import UNLIMITED_BYTES
from tests.support.builders import Op, graph_of, machine_of, source


def a_graph():
    return graph_of(
        source("x", "input"),
        source("w"),
        source("c", "constant"),
        Op("a", ("x", "w")),
        Op("b", ("a", "c")),
        Op("update", ("w", "b"), phase=Phase.UPDATE, overwrites="w"),
    )


def a_plan(**changes):
    graph = a_graph()
    plan = Plan(
        source=Source("zoo:test", "sgd", ((2,),), "2.13.0"),
        graph_fingerprint=graph.fingerprint,
        machine=machine_of(2),
        placement=np.array([0, 1, 0, 0, 0, 1], dtype=np.int32),
        orders=((3, 4), (5,)),
        compute_seconds=np.array([[0, 0]] * 3 + [[1, 2], [1, np.inf], [1, 1]], dtype=float),
        costs_source="given",
        placer="auto",
        seed=3,
        objective="step",
        value=3.5,
        lower_bound=3.0,
        bound_proof="critical path",
        peak_memory_bytes=(24, 16),
        groups=3,
        planning_seconds=0.1,
        pins=(("a*", "d0"),),
        caps=(("d1", 1000),),
        baselines={"single": 4.0, "expert": None},
    )
    return replace(plan, **changes)


def test_a_saved_plan_loads_equal(tmp_path):
    plan = a_plan(
        schedules=(None, Schedule((Stage((5,), 1.0),))),
        contiguous=True,
        sent_bytes=np.array([0.5, 0, 0, 8, 8, 8]),
        found_seconds={"single": 0.25},
    )
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    for field in fields(plan):
        np.testing.assert_equal(getattr(loaded, field.name), getattr(plan, field.name))


def test_the_gap_is_the_value_over_the_bound():
    assert a_plan().gap == pytest.approx(3.5 / 3.0 - 1)
    assert a_plan(lower_bound=0.0).gap == float("inf")


def test_a_printed_plan_names_every_method_and_device():
    text = str(a_plan())
    for word in ("single", "expert", "no feasible plan", "d0", "d1", "critical path"):
        assert word in text


def test_a_printed_plan_without_a_bound_says_so_and_shows_what_a_cap_leaves():
    text = str(a_plan(lower_bound=0.0))
    assert "no bound" in text
    assert "inf" not in text
    assert "16 B of 1000 B (cap)" in text


def test_a_printed_plan_of_no_time_at_all_prints():
    assert "0 ms" in str(a_plan(value=0.0, lower_bound=0.0, baselines={"single": 0.0}))


def test_given_costs_are_printed_in_full_and_in_milliseconds():
    text = str(a_plan(value=0.1234567, baselines={"single": 2.0}))
    assert "step 123.457 ms" in text
    assert "2000 ms" in text
    assert "123 ms" in str(a_plan(value=0.1234567, costs_source="measured"))


def test_a_printed_plan_says_contiguous_and_names_no_limit_that_is_none():
    machine = parse_machine("2 x p100")
    first, *others = machine.devices
    machine = replace(machine, devices=(replace(first, memory_bytes=UNLIMITED_BYTES), *others))
    text = str(a_plan(machine=machine, contiguous=True, peak_memory_bytes=(24, 16, 0), caps=()))
    assert ", contiguous, " in text
    assert "24 B\n" in text
    assert "unlimited" not in text
    assert "host" not in text  # a host that holds nothing


def test_a_gap_as_small_as_the_margins_of_bounds_is_none():
    assert describe_gap(a_plan(value=3.0, lower_bound=3.0 * (1 - 1e-7))) == "optimal"
    assert (
        describe_gap(a_plan(value=3.0, lower_bound=3.0 * (1 - 1e-4))) == "within 0.01 % of optimal"
    )
    assert describe_gap(a_plan(value=0.0, lower_bound=0.0)) == "optimal"


def test_control_characters_in_foreign_names_are_printed_as_escapes():
    evil = "\x1b]0;x\x07"
    text = str(a_plan(placer=evil, bound_proof=evil, baselines={evil: 4.0}))
    assert text.count(r"\x1b]0;x\x07") == 3
    assert "\x1b" not in text
    assert "\x07" not in text


def test_sources_are_filled_in_by_where_they_live():
    #               x   w   c   a  b  update
    placement = np.array([9, 9, 9, 1, 0, 1], dtype=np.int32)
    #  x: the host;  w: with its update;  c: with its first reader, b
    assert normalise(placement, a_graph(), machine_of(2)).tolist() == [0, 1, 0, 1, 0, 1]


def test_a_good_plan_passes():
    check(a_plan(), a_graph(), machine_of(2))


def test_a_plan_for_another_graph_names_both():
    other = graph_of(Op("other"))
    with pytest.raises(GraphMismatchError) as raised:
        check(a_plan(), other)
    assert raised.value.found == other.fingerprint
    assert raised.value.expected == a_graph().fingerprint
    assert raised.value.rule == 1


def test_a_plan_for_another_machine_names_both():
    with pytest.raises(MachineMismatchError) as raised:
        check(a_plan(), a_graph(), machine_of(3))
    assert "2 tests" in raised.value.expected
    assert "3 tests" in raised.value.found


@pytest.mark.parametrize(
    ("placement", "op"), [([0, 1, 0, 0, 0, 2], "update"), ([0, 1, 0, 0, 1, 1], "b")]
)
def test_an_op_on_no_device_or_on_one_that_cannot_run_it_is_named(placement, op):
    with pytest.raises(UnplacedOpError) as raised:
        check(a_plan(placement=np.array(placement, dtype=np.int32)), a_graph())
    assert raised.value.op == op


def test_colocated_ops_on_two_devices_are_refused():
    graph = graph_of(Op("a", colocation=0), Op("b", colocation=0))
    plan = a_plan(
        graph_fingerprint=graph.fingerprint,
        placement=np.array([0, 1], dtype=np.int32),
        compute_seconds=np.ones((2, 2)),
        orders=((0,), (1,)),
    )
    with pytest.raises(UnplacedOpError, match="belongs with"):
        check(plan, graph)


@pytest.mark.parametrize("orders", [((3,), (5,)), ((3, 4, 4), (5,)), ((4, 3, 5), ())])
def test_an_order_that_is_not_its_devices_ops_is_refused(orders):
    with pytest.raises(OrderError) as raised:
        check(a_plan(orders=orders), a_graph())
    assert raised.value.device in ("d0", "d1")


def test_a_promise_above_a_cap_lacks_bytes():
    with pytest.raises(OutOfMemoryError) as raised:
        check(a_plan(caps=(("d1", 10),)), a_graph())
    error = raised.value
    assert (error.device, error.needed_bytes, error.available_bytes) == ("d1", 16, 10)
    assert "6 bytes are lacking" in str(error)


def test_a_cap_on_a_device_that_is_not_there_is_refused():
    with pytest.raises(UnknownDeviceError):
        capacities_of(machine_of(2), {"gpu7": 1})


def test_every_rule_has_its_number():
    rules = {error.rule for error in PlanError.__subclasses__()}
    assert rules == {1, 2, 3, 4, 5, 6, 7}


def test_a_plan_that_should_be_contiguous_and_is_not_names_the_way_out_and_back():
    graph = graph_of(Op("a"), Op("b", ("a",)), Op("c", ("b",)), Op("d", ("c",)))
    plan = a_plan(
        graph_fingerprint=graph.fingerprint,
        placement=np.array([0, 1, 1, 0], dtype=np.int32),
        compute_seconds=np.ones((4, 2)),
        orders=None,
    )
    check(plan, graph)
    with pytest.raises(NotContiguousError) as raised:
        check(replace(plan, contiguous=True), graph)
    assert (raised.value.device, raised.value.path) == ("d0", ("a", "b", "d"))
    whole = np.array([0, 0, 1, 1], dtype=np.int32)
    check(replace(plan, contiguous=True, placement=whole), graph)


def test_backward_ops_may_come_back_to_a_contiguous_device():
    graph = graph_of(Op("a"), Op("b", ("a",)), Op("c", ("b",), phase=Phase.BACKWARD))
    plan = a_plan(
        graph_fingerprint=graph.fingerprint,
        placement=np.array([0, 1, 0], dtype=np.int32),
        compute_seconds=np.ones((3, 2)),
        orders=None,
        contiguous=True,
    )
    check(plan, graph)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw.pop("placement"), "placement"),
        (lambda raw: raw.update(value=None), "value"),
        (lambda raw: raw.update(value=-1), "value"),
        (lambda raw: raw["costs"]["index"].append(99), "outside the rows"),
        (lambda raw: raw["costs"]["index"].pop(), "costs.index"),
        (lambda raw: raw["costs"]["rows"][0].append(1.0), "one entry a device"),
        (lambda raw: raw.update(orders=[[0]]), "orders"),
        (lambda raw: raw["placement"].append(2**40), "int"),
        (lambda raw: raw["machine"].update(host="nobody"), "nobody"),
        (lambda raw: raw.update(extra=1), "extra"),
        (lambda raw: raw.update(seed=True), "seed: .* not true or false"),
        (lambda raw: raw.update(value=True), "value: .* not true or false"),
        (lambda raw: raw.update(placement=[True] * 6), "placement: .* not true or false"),
        (lambda raw: raw.update(orders=[[True, 4], [5]]), "orders.0.0: .* not true or false"),
        (lambda raw: raw["costs"]["rows"][0].__setitem__(0, True), "costs.rows.0.0: "),
        (lambda raw: raw.update(objective="speed"), "objective"),
        (lambda raw: raw.update(made_for="a toaster"), "made_for"),
        (lambda raw: raw.update(way="torchXcompile"), "way"),
        (lambda raw: raw.update(measured={"eager": 1.0}), "measured: lacks 'placed'"),
    ],
)
def test_a_plan_file_of_the_wrong_shape_says_where(tmp_path, change, complaint):
    path = tmp_path / "plan.json"
    a_plan().save(path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(FileFormatError, match=complaint):
        load_plan(path)


def test_an_unwritable_plan_is_named(tmp_path):
    with pytest.raises(UnwritableError):
        a_plan().save(tmp_path / "nowhere" / "plan.json")
