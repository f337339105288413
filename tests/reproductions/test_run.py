"""A table from its tasks to its rows: complete, continued, each method with its own value."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import RunError, UsageError
from dovetail.graph import group
from dovetail.machine import parse_machine, save_machine
from dovetail.pipeline import graph_of, resolve_model
from dovetail.simulator import Simulator
from reproductions import running
from reproductions.methods import HYPOTHESIS, METHODS, PLAIN, lay_ground, run_method
from reproductions.records import Case, Published
from reproductions.tasks import matching, run_table
from tests.support import forked
from tests.support.tiny_tables import CASES, FEW, MACHINE, RNN, settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def graph():
    return graph_of(resolve_model(RNN, "adam"))


@pytest.fixture
def methods_run(monkeypatch):
    """(column, method) of every call of `run_method` from now on."""
    calls = []

    def noted(ground, method, budget):
        calls.append((ground.problem.machine.name, method))
        return run_method(ground, method, budget)

    monkeypatch.setattr(running, "run_method", noted)
    return calls


def values(table):
    """What was found, without how long it took."""
    return {
        (row.key, name, method): (found.seconds, found.reason, found.peak_memory_bytes)
        for row in table.rows
        for name, column in row.columns.items()
        for method, found in column.methods.items()
    }


def test_a_row_has_every_method_the_best_of_them_and_a_bound_that_none_beats(tmp_path):
    table = run_table(settings(tmp_path, methods=None), CASES[:1], jobs=0)
    assert not table.failures
    (row,) = table.rows
    assert row.ops > row.groups > 1
    assert row.flops > 0
    assert row.parameter_bytes == 4 * (50 * 16 + 2 * (16 + 16 + 1) * 64 + 16 * 50 + 50)
    assert list(row.columns) == [PLAIN, HYPOTHESIS]
    for name, column in row.columns.items():
        assert tuple(column.methods) == METHODS[name]
        fitting = {m: found.seconds for m, found in column.methods.items() if found.seconds}
        assert column.methods[column.best].seconds == min(fitting.values())
        assert min(fitting.values()) >= column.bound * (1 - 1e-9)
        assert column.proof
        assert set(column.shown) == {"expert", column.best}
        for found in column.methods.values():
            assert (found.seconds is None) == bool(found.reason)
    assert row.seconds > sum(
        found.search_seconds for column in row.columns.values() for found in column.methods.values()
    )


@pytest.mark.parametrize("method", ["1 CPU", "1 GPU", "balanced", "heft", "local_search"])
def test_the_value_of_a_method_is_that_of_its_own_placement(graph, method):
    machine = parse_machine(MACHINE)
    ground = lay_ground(graph, machine, PLAIN, seed=0)
    found, placement = run_method(ground, method, "60e")
    simulator = Simulator(graph, machine, ground.problem.costs)
    evaluated = simulator.evaluate(placement[None])
    assert found.seconds == evaluated.values[0]
    assert list(found.peak_memory_bytes.values()) == evaluated.peak_memory_bytes[0].tolist()
    if method.startswith("1 "):
        kinds = {machine.devices[d].kind for d in np.unique(placement[~graph.is_source])}
        assert kinds == {method[2:].lower()}


def test_a_column_of_its_own_may_split_the_groups_of_the_row(graph):
    ground = lay_ground(graph, parse_machine(MACHINE), PLAIN, seed=0)
    assert np.array_equal(ground.problem.groups.of_op, group(graph).of_op)
    assert ground.splitting.groups.count > ground.problem.groups.count
    simulator = Simulator(graph, ground.problem.machine, ground.problem.costs, ranked=True)
    for method in ("auto", "auto-split"):
        found, placement = run_method(ground, method, "200e")
        assert found.seconds == simulator.evaluate(placement[None]).values[0]
        if method == "auto":
            pairs = np.stack([ground.problem.groups.of_op, placement], axis=1)[~graph.is_source]
            devices_of = np.unique(np.unique(pairs, axis=0)[:, 0], return_counts=True)[1]
            assert (devices_of == 1).all()


def test_methods_do_not_hand_on_the_value_of_a_better_one(graph):
    ground = lay_ground(graph, parse_machine(MACHINE), PLAIN, seed=0)
    seconds = {
        name: run_method(ground, name, "60e")[0].seconds for name in ("1 CPU", "1 GPU", "expert")
    }
    assert len(set(seconds.values())) == 3, "one of them has another's value"


def small_gpus(folder, memory_bytes):
    machine = parse_machine(MACHINE)
    devices = tuple(
        replace(device, memory_bytes=memory_bytes) if device.kind == "gpu" else device
        for device in machine.devices
    )
    save_machine(replace(machine, devices=devices), folder / "small.toml")
    return str(folder / "small.toml")


def test_what_does_not_fit_is_reported_with_the_device_and_its_bytes(tmp_path):
    case = replace(CASES[0], machine=small_gpus(tmp_path, 50_000))
    few = {PLAIN: ("1 CPU", "1 GPU", "expert", "heft"), HYPOTHESIS: ("1 CPU",)}
    column = run_table(settings(tmp_path, methods=few), (case,), jobs=0).rows[0].columns[PLAIN]
    for method in ("1 GPU", "expert"):
        found = column.methods[method]
        assert found.seconds is None
        assert found.reason.startswith("OOM: k80:")
        assert found.reason.endswith("of 48.8 KiB")
        assert max(found.peak_memory_bytes.values()) > 50_000
    assert column.methods["1 CPU"].seconds is not None
    assert column.best in ("1 CPU", "heft")
    assert list(column.shown) == [column.best]


def test_a_refusal_is_reported_in_the_words_of_its_error(graph):
    ground = lay_ground(graph, parse_machine(MACHINE), PLAIN, seed=0)
    found, placement = run_method(ground, "latency_search", "60e")
    assert found.seconds is not None or found.reason
    assert (placement is None) == (not found.peak_memory_bytes)


def test_a_second_run_computes_nothing_and_reads_the_same(tmp_path, methods_run):
    first = run_table(settings(tmp_path), CASES, jobs=0)
    assert len(methods_run) == len(CASES) * sum(map(len, FEW.values()))
    methods_run.clear()
    second = run_table(settings(tmp_path), CASES, jobs=0)
    assert not methods_run
    assert second.computed == 0
    assert second.rows == first.rows


def test_another_seed_computes_every_method_anew_and_another_budget_the_searches(
    tmp_path, methods_run
):
    run_table(settings(tmp_path, budget="2s"), CASES[:1], jobs=0)
    count = len(methods_run)
    methods_run.clear()
    run_table(settings(tmp_path, budget="2s", seed=1), CASES[:1], jobs=0)
    assert len(methods_run) == count
    methods_run.clear()
    run_table(settings(tmp_path, budget="1s", seed=1), CASES[:1], jobs=0)
    assert [method for _, method in methods_run] == ["local_search"]


def test_another_rate_of_the_machine_computes_the_row_anew(tmp_path, methods_run):
    case = replace(CASES[0], machine=small_gpus(tmp_path, 10**9))
    run_table(settings(tmp_path), (case,), jobs=0)
    methods_run.clear()
    small_gpus(tmp_path, 2 * 10**9)
    run_table(settings(tmp_path), (case,), jobs=0)
    assert len(methods_run) == sum(map(len, FEW.values()))


def test_fresh_forgets_the_rows_it_names_and_no_others(tmp_path, methods_run):
    run_table(settings(tmp_path), CASES, jobs=0)
    methods_run.clear()
    table = run_table(settings(tmp_path), CASES, rows="tiny-4*", fresh=True, jobs=0)
    assert {name.split(",")[0] for name, _ in methods_run} == {"4 x k80 + haswell"}
    assert [row.key for row in table.rows] == ["tiny-2gpu", "tiny-4gpu"]


@pytest.mark.parametrize("content", ["", "{", '{"format": "other"}', "[1]"])
def test_a_broken_file_is_told_of_and_computed_anew(tmp_path, methods_run, content):
    first = run_table(settings(tmp_path), CASES[:1], jobs=0)
    (tmp_path / "rows" / "tiny-2gpu.plain.heft.json").write_text(content)
    methods_run.clear()
    said = []
    second = run_table(settings(tmp_path), CASES[:1], jobs=0, complain=said.append)
    assert [method for _, method in methods_run] == ["heft"]
    assert values(second) == values(first)
    assert "tiny-2gpu.plain.heft.json" in said[0]
    assert "computed anew" in said[0]


def test_a_broken_graph_is_told_of_and_captured_anew(tmp_path):
    first = run_table(settings(tmp_path), CASES[:1], jobs=0)
    (file,) = (tmp_path / "rows").glob("graph.*.json.gz")
    file.write_bytes(file.read_bytes()[:500])
    (tmp_path / "rows" / "tiny-2gpu.plain.heft.json").unlink()
    said = []
    second = run_table(settings(tmp_path), CASES[:1], jobs=0, complain=said.append)
    assert values(second) == values(first)
    assert len(said) == 1
    assert "captured anew" in said[0]


KILLED = """
import os, signal, sys
from reproductions import running
from reproductions.methods import run_method
from reproductions.tasks import run_table
from tests.support.tiny_tables import CASES, settings
from pathlib import Path

def until_the_second_row(ground, method, budget):
    if ground.problem.machine.name.startswith("4 x") and method == "expert":
        os.kill(os.getpid(), signal.SIGKILL)
    return run_method(ground, method, budget)

running.run_method = until_the_second_row
run_table(settings(Path(sys.argv[1])), CASES, jobs=0)
"""


def test_a_killed_run_continues_where_it_was(tmp_path, methods_run):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    killed = forked.start(
        ["-c", KILLED, tmp_path], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}
    )
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    kept = {path.name for path in (tmp_path / "rows").glob("tiny-*.json")}
    assert "tiny-2gpu.plain.local_search.json" in kept
    assert "tiny-4gpu.plain.1-cpu.json" in kept
    continued = run_table(settings(tmp_path), CASES, jobs=0)
    ran = {(name.split(" ")[0], method) for name, method in methods_run}
    assert ("4", "expert") in ran
    assert ("4", "1 CPU") not in ran
    assert not any(gpus == "2" for gpus, _ in ran)
    assert values(continued) == values(run_table(settings(tmp_path / "whole"), CASES, jobs=0))


def test_a_method_that_fails_is_told_of_and_the_others_go_on(tmp_path, monkeypatch):
    def failing(ground, method, budget):
        if method == "heft":
            raise RuntimeError("no such luck")
        return run_method(ground, method, budget)

    monkeypatch.setattr(running, "run_method", failing)
    table = run_table(settings(tmp_path), CASES, jobs=0)
    assert set(table.failures) == {"tiny-2gpu plain", "tiny-4gpu plain"}
    assert "no such luck" in table.failures["tiny-2gpu plain"]
    for row in table.rows:
        assert list(row.columns[PLAIN].methods) == ["1 CPU", "expert", "local_search"]
    monkeypatch.undo()
    again = run_table(settings(tmp_path), CASES, jobs=0)
    assert not again.failures
    assert list(again.rows[0].columns[PLAIN].methods) == list(FEW[PLAIN])


def test_a_network_that_cannot_be_captured_costs_its_rows_alone(tmp_path):
    broken = Case("broken", "Broken", "zoo:rnnlm?wheels=4", "adam", MACHINE, 2, Published({}))
    table = run_table(settings(tmp_path), (broken, CASES[0]), jobs=0)
    assert [row.key for row in table.rows] == ["tiny-2gpu"]
    capture, *columns = table.failures
    assert "no option 'wheels'" in table.failures[capture]
    assert columns == ["broken plain", "broken hypothesis"]


def test_a_worker_with_other_code_refuses_instead_of_keeping_what_nobody_finds(tmp_path):
    with pytest.raises(RunError, match="code changed"):
        running.capture(settings(tmp_path, code={}), CASES[0], print, print)
    assert not (tmp_path / "rows").exists()


def test_rows_are_chosen_by_pattern_and_an_empty_choice_is_refused():
    assert [case.key for case in matching(CASES, "")] == ["tiny-2gpu", "tiny-4gpu"]
    assert [case.key for case in matching(CASES, "*-4gpu, other")] == ["tiny-4gpu"]
    with pytest.raises(UsageError, match="tiny-2gpu, tiny-4gpu") as caught:
        matching(CASES, "huge-*")
    assert caught.value.option == "--rows"


def test_kept_values_are_plain_json_without_infinities(tmp_path):
    run_table(settings(tmp_path), CASES[:1], jobs=0)
    files = list((tmp_path / "rows").glob("*.json"))
    assert files

    def refuse(text):
        raise AssertionError(f"{text} in a file")

    for file in files:
        json.loads(file.read_text(), parse_constant=refuse)
