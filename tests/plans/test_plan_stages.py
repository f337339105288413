"""Rule 4 for schedules: each op once, after what it needs, and no stage that waits for ever."""

from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import OrderError
from dovetail.plans import Schedule, Stage, check, stages_of
from tests.support.builders import Op, graph_of, machine_of, plan_by_hand, source

X, A, B, C, D = range(5)


def diamond():
    """x ─► a ─► b ─► d, and a ─► c ─► d."""
    return graph_of(
        source("x", "input"), Op("a", ("x",)), Op("b", ("a",)), Op("c", ("a",)), Op("d", ("b", "c"))
    )


def plan_of(placement, *schedules, orders=None):
    graph = diamond()
    return plan_by_hand(graph, machine_of(2), placement, orders=orders, schedules=schedules or None)


def stages(*ops, seconds=1.0):
    return Schedule(tuple(Stage(stage, seconds) for stage in ops))


def refused(plan):
    with pytest.raises(OrderError) as raised:
        check(plan, diamond())
    assert raised.value.rule == 4
    return raised.value.device, str(raised.value)


def test_stages_orders_and_neither_are_lists_of_stages():
    plan = plan_of([0, 0, 0, 0, 1], stages((A,), (C, B)), None, orders=((), (D,)))
    assert stages_of(plan, diamond()) == [((A,), (C, B)), ((D,),)]
    assert stages_of(replace(plan, orders=None, schedules=None), diamond()) == [
        ((A,), (B,), (C,)),
        ((D,),),
    ]
    check(plan, diamond())
    check(replace(plan, orders=None), diamond())


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (((A,), (B, B), (C,)), "op 'b' is there twice"),
        (((A,), (B,), (C, B)), "op 'b' is there twice"),
        (((A,), (B, C, D)), "op 'd' is on d1"),
        (((A,), (C,)), "op 'b' is missing"),
        (((X, A), (B, C)), "0 is no op that runs"),
        (((A,), (B, C), (99,)), "99 is no op that runs"),
    ],
)
def test_a_schedule_names_each_op_of_its_device_once(listed, said):
    device, text = refused(plan_of([0, 0, 0, 0, 1], stages(*listed), None))
    assert device == "d0"
    assert text.endswith(f"does not name each of its ops exactly once: {said}")


def test_a_device_without_stages_names_its_ops_all_the_same():
    assert refused(plan_of([0, 0, 0, 0, 1], stages((A,), (B, C)), stages()))[0] == "d1"


@pytest.mark.parametrize("listed", [((B,), (A,), (C,)), ((B, C), (A,))])
def test_stages_out_of_order_are_refused(listed):
    device, text = refused(plan_of([0, 0, 0, 0, 1], stages(*listed), None))
    assert device == "d0"
    assert "op 'b' would wait for ever" in text


def test_within_a_stage_an_op_stands_after_what_it_needs():
    check(plan_of([0, 0, 0, 0, 1], stages((A, C, B)), None), diamond())
    device, text = refused(plan_of([0, 0, 0, 0, 1], stages((C, A, B)), None))
    assert device == "d0"
    assert "a stage has op 'c' before op 'a', which it needs" in text


def test_a_stage_that_waits_for_itself_by_way_of_another_device_is_refused():
    #   d0  [ a  c  d ]      b reads a: the stage gives a only when it has ended, and waits for b
    #   d1  [ b ]
    check(plan_of([0, 0, 1, 0, 0], orders=((A, C, D), (B,))), diamond())
    device, text = refused(plan_of([0, 0, 1, 0, 0], stages((A, C, D)), stages((B,))))
    assert device == "d0"
    assert "op 'd' would wait for ever" in text
    check(plan_of([0, 0, 1, 0, 0], stages((A, C), (D,)), stages((B,))), diamond())


@pytest.mark.parametrize("seconds", [-1.0, np.inf, np.nan])
def test_a_stage_takes_a_finite_time(seconds):
    text = refused(plan_of([0] * 5, stages((A, B, C, D), seconds=seconds), None))[1]
    assert "negative or not finite" in text
