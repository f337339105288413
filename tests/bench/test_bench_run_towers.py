"""Towers and curves of a table: simulated on the row's own graph, kept, and joined with losses."""

from dataclasses import replace

import pytest

from dovetail.bench import table, towers
from dovetail.bench.methods import PLAIN
from dovetail.bench.table import run_table
from dovetail.costs import analytic_costs
from dovetail.errors import MissingLibraryError
from dovetail.graph import replicate
from dovetail.machine import parse_machine
from dovetail.pipeline import graph_of, resolve_model
from dovetail.plans import tower_placement
from dovetail.simulator import Simulator
from tests.support.tiny_tables import CASES, settings

LOSSES = {
    towers.INCEPTION: {way: [3.0, 2.0] for way in set(towers.LEARNS_AS.values())},
    towers.NMT: {towers.ONE_BATCH: [1.0, 0.5]},
}


@pytest.fixture
def tiny(monkeypatch):
    """A table "rl17" of tiny rows, with towers and the whole batch likewise."""
    whole = replace(CASES[1], key="whole", model=CASES[1].model.replace("batch=3", "batch=12"))
    monkeypatch.setitem(table.CASES, "rl17", CASES)
    monkeypatch.setattr(towers, "TOWER", CASES[1])
    monkeypatch.setattr(towers, "WHOLE", whole)
    monkeypatch.setattr(towers, "TRANSLATION", CASES[0].key)
    monkeypatch.setattr(towers, "train", lambda *, seed: LOSSES)


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
        assert 0 < found["seconds"] <= whole.values[0]


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


def test_a_table_has_towers_of_both_kinds_and_curves_of_what_is_planned(tmp_path, tiny):
    chosen = settings(tmp_path)
    found = run_table(chosen, jobs=0)
    assert not found.failures
    assert [tower.kind for tower in found.towers] == ["synchronous", "asynchronous"]
    seconds = {tower.kind: tower.seconds for tower in found.towers}
    curves = {(curve.title, curve.name): curve for curve in found.curves}
    assert set(curves) == {
        *((towers.INCEPTION, name) for name in towers.LEARNS_AS),
        (towers.NMT, "expert"),
        (towers.NMT, "planned"),
    }
    row = found.rows[0].columns[PLAIN]
    assert curves[towers.NMT, "planned"].step_seconds == row.methods[row.best].seconds
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


def test_without_the_library_of_the_data_there_are_no_curves_and_no_failure(
    tmp_path, tiny, monkeypatch
):
    def missing(*, seed):
        raise MissingLibraryError("scikit-learn", "pip install dovetail[bench]")

    monkeypatch.setattr(towers, "train", missing)
    said = []
    found = run_table(settings(tmp_path), jobs=0, complain=said.append)
    assert not found.failures
    assert not found.curves
    assert len(found.towers) == 2
    assert "scikit-learn" in said[0]
