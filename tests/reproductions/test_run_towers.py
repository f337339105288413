"""Towers and curves of a table: simulated on the row's own graph, kept, and joined with losses."""

from dataclasses import replace

import pytest

from dovetail.costs import analytic_costs
from dovetail.errors import MissingLibraryError
from dovetail.graph import Phase, colocate
from dovetail.machine import parse_machine
from dovetail.pipeline import graph_of, resolve_model
from dovetail.placers import Budget, make_problem
from dovetail.placers.expert import expert_apart
from dovetail.simulator import Simulator
from dovetail.transforms import replicate
from reproductions import learned, tasks, towers
from reproductions.cases import LEARNED
from reproductions.methods import PLAIN
from reproductions.records import MethodResult
from reproductions.tasks import run_table
from reproductions.towers import tower_placement
from tests.reproductions.test_learned import random_policy
from tests.support.tiny_tables import CASES, settings

LOSSES = {
    towers.INCEPTION: {way: [3.0, 2.0] for way in set(towers.LEARNS_AS.values())},
    towers.NMT: {towers.ONE_BATCH: [1.0, 0.5]},
}


@pytest.fixture
def tiny(monkeypatch):
    """A table "rl17" of tiny rows, with towers and the whole batch likewise."""
    whole = replace(CASES[1], key="whole", model=CASES[1].model.replace("batch=3", "batch=12"))
    monkeypatch.setitem(tasks.CASES, "rl17", CASES)
    monkeypatch.setattr(towers, "TOWER", CASES[1])
    monkeypatch.setattr(towers, "WHOLE", whole)
    monkeypatch.setattr(towers, "TRANSLATION", CASES[0].key)
    monkeypatch.setattr(towers, "train", lambda *, seed, world: LOSSES)


@pytest.mark.parametrize("synchronous", [True, False])
def test_towers_have_the_seconds_of_their_own_graph_with_parameters_on_the_cpu(synchronous):
    graph = graph_of(resolve_model(CASES[1].model, "adam"))
    machine = parse_machine(CASES[1].machine)
    found = towers.simulate_towers(graph, machine, synchronous=synchronous)
    many = replicate(graph, 4, synchronous=synchronous).graph
    placement = tower_placement(many, machine)
    whole = Simulator(many, machine, analytic_costs(many, machine)).evaluate(placement[None])
    assert found["reason"] == ""
    if synchronous:
        assert found["seconds"] == pytest.approx(whole.values[0])
    else:
        world = towers.tower_world(graph, machine)
        alone = world.times.mean_seconds + world.apply_seconds
        slowest = max(alone, 4 * world.apply_seconds)
        assert found["seconds"] == pytest.approx(slowest)


def test_towers_go_on_by_themselves_unless_the_cpu_is_what_all_wait_for():
    free = towers.World(times=towers.StepTimes(mean_seconds=3.0), apply_seconds=0.5)
    rows = towers.run_asynchronously(free, towers._Idle(), towers.FlatRMSprop(), 4, 3).rows
    assert [row.worker for row in rows] == [0, 1, 2, 3] * 3
    assert [row.seconds for row in rows[:8]] == [3.5, 4.0, 4.5, 5.0, 7.0, 7.5, 8.0, 8.5]
    assert {row.begin_seconds for row in rows[4:8]} == {3.5, 4.0, 4.5, 5.0}
    assert {row.staleness for row in rows[4:]} == {3}
    assert towers.asynchronous_seconds(free, 4) == pytest.approx(3.5)
    busy = towers.World(times=towers.StepTimes(mean_seconds=1.0), apply_seconds=0.5)
    assert towers.asynchronous_seconds(busy, 4) == pytest.approx(2.0)


def test_the_expert_of_section_4_4_has_attention_and_softmax_on_gpus_of_their_own():
    graph = graph_of(resolve_model("zoo:nmt?hidden=16&steps=4&batch=3&vocabulary=50", "adam"))
    machine = parse_machine("rl17/4")
    placement = _apart(graph, machine)
    where = {
        module: int(placement[op])
        for op, module in enumerate(graph.modules)
        if graph.phases[op] == Phase.FORWARD
    }
    assert {module: where[module] for module in ("encoder_lstm.0", "decoder_lstm.0")} == {
        "encoder_lstm.0": 0, "decoder_lstm.0": 0,
    }  # fmt: skip
    assert (where["encoder_lstm.1"], where["decoder_lstm.1"]) == (1, 1)
    assert where["source_embedding"] == 0
    assert {where[name] for name in where if name.startswith(("attention", "memory"))} == {2}
    assert {where[name] for name in where if name.startswith(("softmax", "readout"))} == {3}
    on_two = _apart(graph, parse_machine("rl17/2"))
    forward = graph.phases == Phase.FORWARD
    assert set(on_two[forward & (placement < 2)].tolist()) == {0}
    assert set(on_two[forward & (placement >= 2)].tolist()) == {1}


def _apart(graph, machine):
    """[ops] where the expert of section 4.4 places each op by itself."""
    costs = analytic_costs(graph, machine)
    problem = make_problem(graph, machine, costs, None, groups=colocate(graph))
    return problem.spread(expert_apart(problem, Budget(evaluations=1)))


def test_towers_that_do_not_fit_say_which_device_lacks_memory():
    graph = graph_of(resolve_model(CASES[1].model, "adam"))
    machine = parse_machine(CASES[1].machine)
    devices = [
        replace(device, memory_bytes=1000) if device.name == "k80:2" else device
        for device in machine.devices
    ]
    tight = replace(machine, devices=tuple(devices))
    found = towers.simulate_towers(graph, tight, synchronous=True)
    assert found["seconds"] is None
    assert found["reason"].startswith("OOM: k80:2 needs")


def test_a_table_has_towers_of_both_kinds_and_curves_of_what_is_planned_and_learned(
    tmp_path, tiny, monkeypatch
):
    monkeypatch.setattr(learned, "train", random_policy)
    chosen = settings(tmp_path, learn=16, seeds=1)
    found = run_table(chosen, jobs=0)
    assert not found.failures
    assert [tower.kind for tower in found.towers] == ["synchronous", "asynchronous"]
    seconds = {tower.kind: tower.seconds for tower in found.towers}
    curves = {(curve.title, curve.name): curve for curve in found.curves}
    assert set(curves) == {
        *((towers.INCEPTION, name) for name in towers.LEARNS_AS if name != towers.APART),
        *((towers.NMT, name) for name in ("expert", towers.APART, "planned", *LEARNED["rl17"])),
    }
    row = found.rows[0].columns[PLAIN]
    assert curves[towers.NMT, "planned"].step_seconds == row.methods[row.best].seconds
    for method in LEARNED["rl17"]:
        assert curves[towers.NMT, method].step_seconds == row.methods[method].seconds
        assert curves[towers.INCEPTION, method].step_seconds > 0
    assert curves[towers.NMT, "expert"].step_seconds == row.methods["expert"].seconds
    synchronous = curves[towers.INCEPTION, "synchronous towers"]
    assert synchronous.step_seconds == seconds["synchronous"]
    assert run_table(chosen, jobs=0).computed == 0
    again = run_table(chosen, jobs=0, fresh=True)
    assert again.computed > 4
    assert again.towers == found.towers


def test_some_rows_alone_bring_no_towers_but_show_those_that_are_kept(tmp_path, tiny):
    few = run_table(settings(tmp_path), rows="tiny-2*", jobs=0)
    assert not few.towers
    assert not few.curves
    whole = run_table(settings(tmp_path), jobs=0)
    assert run_table(settings(tmp_path), rows="tiny-2*", jobs=0).towers == whole.towers


def test_an_expert_that_does_not_fit_is_kept_as_such(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(towers, "run_method", lambda *_: (MethodResult(None, "OOM"), None))
    found = run_table(settings(tmp_path), jobs=0)
    assert (towers.NMT, towers.APART) not in {(curve.title, curve.name) for curve in found.curves}
    assert run_table(settings(tmp_path), jobs=0).computed == 0


def test_losses_of_towers_on_another_machine_do_not_count(tmp_path, tiny, monkeypatch):
    chosen = settings(tmp_path)
    run_table(chosen, jobs=0)
    assert not towers.lacking(chosen, chosen.store(print))
    other = replace(CASES[1], machine="4 x p100 + haswell")
    monkeypatch.setattr(towers, "TOWER", other)
    assert set(towers.lacking(chosen, chosen.store(print))) == {"towers", "curves"}


def test_without_the_library_of_the_data_there_are_no_curves_and_no_failure(
    tmp_path, tiny, monkeypatch
):
    def missing(*, seed, world):
        raise MissingLibraryError("scikit-learn", "pip install dovetail[bench]")

    monkeypatch.setattr(towers, "train", missing)
    said = []
    found = run_table(settings(tmp_path), jobs=0, complain=said.append)
    assert not found.failures
    assert not found.curves
    assert len(found.towers) == 2
    assert "scikit-learn" in said[0]
