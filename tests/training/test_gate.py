"""Forced orders of turns."""

from dovetail.training.gate import TurnGate
from dovetail.training.records import Turn


def a_turn(worker, **fields):
    return Turn(worker, **{"lease": True, **fields})


def test_turns_wait_until_the_order_names_their_worker():
    gate = TurnGate((1, 0, 0, 1))
    assert list(gate.push(a_turn(0))) == []
    assert list(gate.push(a_turn(1))) == [a_turn(1), a_turn(0)]
    assert list(gate.push(a_turn(1, pull=True))) == []
    assert gate.position == 2
    passed = list(gate.push(a_turn(0, pull=True)))
    assert passed == [a_turn(0, pull=True), a_turn(1, pull=True)]


def test_after_the_orders_end_turns_pass_as_they_come():
    gate = TurnGate((0,))
    assert list(gate.push(a_turn(3))) == []
    assert list(gate.push(a_turn(0))) == [a_turn(0), a_turn(3)]
    assert list(gate.push(a_turn(5))) == [a_turn(5)]


def test_a_turn_sent_again_passes_without_counting_twice():
    gate = TurnGate((0, 1, 0, 1))
    list(gate.push(a_turn(0)))
    assert list(gate.push(a_turn(0))) == [a_turn(0)]
    assert gate.position == 1
    assert list(gate.push(a_turn(1))) == [a_turn(1)]


def test_a_turn_that_waits_is_replaced_not_doubled():
    gate = TurnGate((1, 0))
    assert list(gate.push(a_turn(0))) == list(gate.push(a_turn(0))) == []
    assert list(gate.push(a_turn(1))) == [a_turn(1), a_turn(0)]


def test_a_lost_workers_entries_are_passed_over():
    gate = TurnGate((1, 1, 0, 1))
    assert list(gate.push(a_turn(0))) == []
    assert list(gate.drop(1)) == [a_turn(0)]
    assert list(gate.push(a_turn(1))) == [a_turn(1)]


def test_an_order_continues_where_a_former_gate_stood():
    assert list(TurnGate((0, 1), position=1).push(a_turn(1))) == [a_turn(1)]


def test_the_entries_of_a_worker_that_waits_for_an_answer_are_passed_over():
    waiting = set()
    gate = TurnGate((0, 0, 1), waiting=lambda: waiting)
    assert list(gate.push(a_turn(1))) == []
    taken = []
    for turn in gate.push(a_turn(0)):
        taken.append(turn)
        waiting.add(0)  # taking its turn left it waiting
    assert taken == [a_turn(0), a_turn(1)]
