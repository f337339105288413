"""The flow in Python: what `plan` weighs, promises, keeps at a Ctrl-C, and refuses up front."""

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest

from dovetail import pipeline
from dovetail.costs import Costs
from dovetail.errors import (
    CostError,
    GraphError,
    MachineError,
    MachineMismatchError,
    OutOfMemoryError,
    PinError,
    PromiseError,
    UnknownDeviceError,
    UsageError,
)
from dovetail.machine import local_machine, save_machine
from dovetail.pipeline import opening, plan, searching, sources, verify
from dovetail.simulator import Simulator
from tests.support.builders import Op, graph_of, machine_of, source

TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="here/2 wants two cores")


def three_ops():
    return graph_of(Op("a", kind="x.a"), Op("b", kind="x.b"), Op("c", kind="x.c"))


@pytest.fixture
def op_seconds(monkeypatch):
    """Costs of `here` machines without measuring: name -> seconds an op, or what is raised."""
    given = {"here": 0.6, "here/2": 1.0}

    def measured_costs(graph, _program, machine, _cache, **_):
        seconds = given.get(machine.name, 1.0)
        if callable(seconds):
            seconds = seconds()
        table = np.full((len(graph), len(machine.devices)), seconds)
        table[graph.is_source] = 0.0
        return Costs(table, "measured")

    monkeypatch.setattr(sources, "measured_costs", measured_costs)
    monkeypatch.setattr(sources, "costs_in_step", lambda *_, **__: None)
    monkeypatch.setattr(sources, "probed_machine", lambda machine, _cache, **_: machine)
    return given


def raising(error):
    def failing():
        raise error

    return failing


@TWO_CORES
@pytest.mark.parametrize("error", [CostError("a", "unknown"), OutOfMemoryError("cpu0", 2, 1)])
def test_a_finished_plan_is_kept_where_all_cores_cannot_be_weighed(op_seconds, error):
    op_seconds["here"] = raising(error)
    found = plan(three_ops(), "here/2", budget="50e")
    assert found.value == pytest.approx(2.0)
    assert found.baselines["here"] is None


@TWO_CORES
def test_a_finished_plan_is_kept_when_weighing_all_cores_is_interrupted(op_seconds):
    op_seconds["here"] = raising(KeyboardInterrupt())
    found = plan(three_ops(), "here/2", budget="50e")
    assert found.interrupted
    assert found.machine.name == "here/2"
    assert found.value == pytest.approx(2.0)


@TWO_CORES
def test_where_all_cores_win_the_bound_holds_for_both_machines_and_the_seed_stays(op_seconds):
    # Three ops of 1 s on two devices: 2 s, not less than 1.5. On all cores 3 x 0.6 = 1.8 s exactly.
    found = plan(three_ops(), "here/2", budget="50e", seed=5)
    assert (found.placer, found.machine.name, found.seed) == ("here", "here", 5)
    assert found.value == pytest.approx(1.8)
    assert found.lower_bound == pytest.approx(1.5)
    verify(found, three_ops())


@TWO_CORES
def test_a_named_method_keeps_its_plan_and_all_cores_stand_beside_it(op_seconds):
    found = plan(three_ops(), "here/2", placer="single", budget="50e")
    assert found.machine.name == "here/2"
    assert found.baselines["here"] == pytest.approx(1.8)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_machine_with_cores_that_is_described_keeps_its_rates(
    op_seconds, monkeypatch, tmp_path, as_file
):
    monkeypatch.setattr(sources, "probed_machine", raising(AssertionError("probed")))
    machine = replace(local_machine(f"here/{min(2, len(os.sched_getaffinity(0)))}"), name="box")
    save_machine(machine, tmp_path / "box.toml")
    found = plan(three_ops(), str(tmp_path / "box.toml") if as_file else machine, budget="50e")
    assert found.machine == machine
    assert found.costs_source == "measured"
    assert "here" not in found.baselines


def elsewhere(machine):
    return replace(machine, devices=tuple(replace(d, model="other") for d in machine.devices))


def test_cores_of_another_machine_are_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(searching, "costs_of", raising(AssertionError("measured")))
    with pytest.raises(MachineError, match="'other'"):
        plan(three_ops(), elsewhere(local_machine()))


def test_a_plan_for_cores_of_another_machine_does_not_run(op_seconds):
    class Step:
        graph = three_ops()

    box = replace(local_machine(), name="box")
    found = replace(plan(three_ops(), box, budget="50e"), machine=elsewhere(box))
    with pytest.raises(MachineMismatchError, match="'other'") as raised:
        pipeline.run(found, Step())
    assert raised.value.expected.startswith("box")


def test_a_promised_bound_that_cannot_be_proven_again_is_refused():
    graph = three_ops()
    found = plan(graph, machine_of(2), budget="50e")
    verify(found, graph)
    with pytest.raises(PromiseError) as raised:
        verify(replace(found, lower_bound=found.value * 1.01), graph)
    assert raised.value.promise == "lower bound"
    assert raised.value.found == pytest.approx(found.lower_bound)


def test_the_bound_holds_for_every_plan_that_the_pins_permit():
    # b is a view of a and so of its group; a pin of a on slow d0 still permits b on fast d1.
    graph = graph_of(
        source("w"),
        Op("a", ("w",), flops=10**6),
        Op("b", ("a",), flops=10**9, view_of="a"),
        outputs=("b",),
    )
    machine = machine_of(2)
    fast = replace(machine.devices[1], flops_per_second={"float32": 1e12})
    machine = replace(machine, devices=(machine.devices[0], fast))
    found = plan(graph, machine, pins=[("a", "d0")], budget="50e")
    assert found.placement.tolist()[1:] == [0, 0]
    simulator = Simulator(graph, machine, pipeline.costs_of(graph, machine))
    permitted = simulator.evaluate(np.array([[0, 0, 1]], dtype=np.int32)).values[0]
    assert found.lower_bound <= permitted < found.value
    verify(found, graph)


def interrupting(function, times=1):
    """The function, with Ctrl-C pressed `times` at its first call."""
    presses = [signal.SIGINT] * times

    def interrupted(*arguments, **options):
        while presses:
            os.kill(os.getpid(), presses.pop())
        return function(*arguments, **options)

    return interrupted


@pytest.mark.parametrize(
    ("module", "moment"),
    [
        (searching, "run_placer"),
        (opening, "lower_bound"),
        (searching, "to_plan"),
        (searching, "source_of"),
    ],
)
def test_a_first_ctrl_c_at_any_moment_of_the_search_keeps_the_plan(monkeypatch, module, moment):
    monkeypatch.setattr(module, moment, interrupting(getattr(module, moment)))
    found = plan(three_ops(), machine_of(2), budget="600s")
    assert found.interrupted
    assert found.baselines["single"] is not None
    verify(found, three_ops())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_ctrl_c_in_the_first_evaluation_keeps_the_plan(monkeypatch):
    monkeypatch.setattr(Simulator, "evaluate", interrupting(Simulator.evaluate))
    found = plan(three_ops(), machine_of(2), budget="600s")
    assert found.interrupted
    assert {"single", "expert", "balanced", "etf"} <= set(found.baselines)


@pytest.mark.parametrize(
    ("module", "moment"), [(searching, "run_placer"), (opening, "lower_bound")]
)
def test_a_second_ctrl_c_aborts(monkeypatch, module, moment):
    monkeypatch.setattr(module, moment, interrupting(getattr(module, moment), times=2))
    with pytest.raises(KeyboardInterrupt):
        plan(three_ops(), machine_of(2), budget="50e")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_that_cannot_be_interrupted_plans_as_well():
    found = []
    thread = threading.Thread(
        target=lambda: found.append(plan(three_ops(), machine_of(2), budget="50e"))
    )
    thread.start()
    thread.join()
    assert not found[0].interrupted


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budget": "soon"}, UsageError),
        ({"seed": -1}, UsageError),
        ({"seed": 2**70}, UsageError),
        ({"gap": -0.1}, UsageError),
        ({"gap": float("nan")}, UsageError),
        ({"placer": "magic"}, UsageError),
        ({"objective": "joy"}, UsageError),
        ({"pins": [("a", "d9")]}, UnknownDeviceError),
        ({"pins": [("nothing", "d0")]}, PinError),
        ({"caps": [("d9", 1)]}, UnknownDeviceError),
    ],
)
def test_wrong_options_are_refused_before_the_costs_are_measured(monkeypatch, options, error):
    monkeypatch.setattr(searching, "costs_of", raising(AssertionError("measured")))
    with pytest.raises(error):
        plan(three_ops(), machine_of(2), **options)


def test_a_graph_without_ops_is_refused():
    with pytest.raises(GraphError, match="nothing to place"):
        plan(graph_of(), machine_of(2))


def test_a_graph_of_sources_alone_has_a_plan():
    assert plan(graph_of(source("w")), machine_of(2), budget="5e").value == 0.0
