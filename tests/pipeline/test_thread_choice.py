"""How `here` comes to its number of threads, and what is said of plans made beside others."""

import json
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from dovetail.costs import CostCache
from dovetail.errors import OutOfMemoryError
from dovetail.executors import Measurement
from dovetail.frontends import capture
from dovetail.machine import local_machine
from dovetail.pipeline import Notes, disturbance_of, plan, run, sources
from dovetail.pipeline.sources import (
    ThreadChoice,
    candidates_of,
    choose_threads,
    fewest_of_the_best,
    in_order,
    time_threads,
)
from dovetail.plans import check, load_plan
from dovetail.runtime import neighbours

TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a choice wants two cores")


@pytest.fixture(scope="module")
def step():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return capture(layers, torch.randn(4, 8))


def test_few_cores_are_tried_one_by_one_and_many_by_halves():
    assert candidates_of(2) == [2, 1]
    assert candidates_of(4) == [4, 3, 2, 1]
    assert candidates_of(16) == [16, 8, 4, 2, 1]
    assert candidates_of(6) == [6, 3, 1]


def test_what_loses_a_round_by_far_runs_no_other():
    now, runs = [0.0], []

    def rounds(count):
        runs.append(count)
        now[0] += 0.5
        return {4: 1.0, 2: 0.8, 1: 2.0}[count] + 0.1 * (len(runs) > 3)

    timers = {count: partial(rounds, count) for count in (4, 2, 1)}
    seconds = time_threads(timers, lambda _fraction: None, lambda: now[0])
    assert sorted(runs[:3]) == [1, 2, 4]
    assert [sorted(runs[first : first + 2]) for first in (3, 5)] == [[2, 4]] * 2
    assert len(runs) == 7
    assert seconds == {4: 1.1, 2: pytest.approx(0.9), 1: 2.0}


def test_equals_go_to_the_fewest_threads():
    assert fewest_of_the_best({4: 1.0, 2: 1.02, 1: 1.3}) == 2
    assert fewest_of_the_best({4: 1.0, 2: 1.1, 1: 1.3}) == 4
    assert fewest_of_the_best({2: 5.0, 1: 1.0}) == 1


def test_a_choice_says_what_was_measured():
    choice = ThreadChoice(1, {2: 1.1e-3, 1: 0.41e-3})
    assert (
        str(choice)
        == "ops use 1 thread; a step was measured: 1 thread 410 us, with 2 threads 1.1 ms"
    )


def test_one_note_says_what_other_programs_disturbed():
    notes = Notes()
    notes.say("ops use 1 thread")
    assert notes.texts == ("ops use 1 thread",)
    notes.disturbed("the machine", 0.5)
    notes.disturbed("ops", 1.75)
    notes.disturbed("ops", 1.25)
    assert notes.texts[0] == "ops use 1 thread"
    assert notes.texts[1].startswith(
        "other programs used up to 1.8 cores while the machine and ops were measured"
    )


@TWO_CORES
def test_the_step_is_tried_once_and_the_choice_remembered(step, tmp_path, monkeypatch):
    machine, cache = local_machine(), CostCache(tmp_path / "costs.sqlite")
    monkeypatch.setattr(sources, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(sources, "MEASURED_SECONDS", 1e-3)
    first = choose_threads(step, machine, cache)
    assert first.threads in first.seconds
    assert set(first.seconds) == set(candidates_of(len(machine.devices[0].cores)))
    monkeypatch.setattr(sources, "_try_threads", None)
    again = choose_threads(step, machine, cache)
    assert (again.threads, again.seconds) == (first.threads, first.seconds)


@TWO_CORES
def test_a_choice_made_beside_other_programs_serves_until_the_cores_are_calm(
    step, tmp_path, monkeypatch
):
    cache, tried = CostCache(tmp_path / "costs.sqlite"), []

    def disturbed(*_args):
        tried.append(1)
        return ThreadChoice(1, {1: 1.0, 2: 2.0}, others_cores=1.0)

    monkeypatch.setattr(neighbours, "BUSY_CORES", 0.0)  # whatever the others do disturbs
    monkeypatch.setattr(sources, "_try_threads", disturbed)
    for _ in range(2):
        choice = choose_threads(step, local_machine(), cache)
        assert (choice.threads, choice.others_cores) == (1, 1.0)
    assert len(tried) == 1
    monkeypatch.setattr(neighbours, "BUSY_CORES", float("inf"))
    for _ in range(2):
        choose_threads(step, local_machine(), cache)
    assert len(tried) == 2


def test_one_core_a_long_step_and_one_that_does_not_fit_are_not_tried(step, tmp_path, monkeypatch):
    cache = CostCache(tmp_path / "costs.sqlite")
    monkeypatch.setattr(sources, "_try_threads", None)
    assert choose_threads(step, local_machine("here/1"), cache) is None
    monkeypatch.setattr(sources, "LONG_SECONDS", 0.0)
    assert choose_threads(step, local_machine(), cache) is None
    monkeypatch.undo()

    def too_large(*_args):
        raise OutOfMemoryError("here", 2, 1)

    monkeypatch.setattr(sources, "_try_threads", too_large)
    assert choose_threads(step, local_machine(), cache) is None


def test_the_plan_that_is_tried_is_one_that_can_run(step):
    machine = local_machine()
    check(in_order(step.graph, machine), step.graph, machine)


@TWO_CORES
def test_a_plan_for_here_has_its_threads_and_keeps_them_in_its_file(step, tmp_path, monkeypatch):
    choice = ThreadChoice(1, {1: 1e-3, 2: 2e-3})
    monkeypatch.setattr(sources, "_try_threads", lambda *_args: choice)
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    found = plan(step, "here", placer="single")
    (device,) = found.machine.devices
    assert device.op_threads == 1
    assert len(device.cores) == len(os.sched_getaffinity(0))
    assert found.notes[0] == str(choice)
    assert found.notes[1].startswith("of a budget of 60 s planning took")
    assert str(choice) in str(found)
    found.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert (loaded.machine, loaded.notes) == (found.machine, found.notes)
    with run(loaded, step) as placed:
        placed.step(torch.ones(4, 8))


def test_a_plan_from_an_older_file_uses_a_thread_a_core_and_has_no_notes(step, tmp_path):
    path = tmp_path / "plan.json"
    replace(in_order(step.graph, local_machine()), notes=("new",)).save(path)
    raw = json.loads(path.read_text())
    del raw["notes"]
    assert "threads" not in raw["machine"]["devices"][0]
    path.write_text(json.dumps(raw))
    old = load_plan(path)
    assert old.notes == ()
    assert old.machine.devices[0].op_threads == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("measured", "others_cores", "note", "words"),
    [
        (1.1, 0.1, "", ""),
        (9.0, 0.1, "", ""),
        (1.1, 1.2, "", "other programs used 1.2 cores of this plan's while it was measured: run"),
        (4.0, 1.2, "", "1.2 cores of this plan's while it was measured; measured and predicted "
         "differ by 300 %"),
        (0.5, 0.0, "ops were measured while other programs used 1.0 cores", "this plan was made "
         "while other programs used its cores; measured and predicted differ by 50 %: plan again"),
        (1.1, 0.0, "ops were measured while other programs used 1.0 cores", ""),
    ],
)  # fmt: skip
def test_a_run_beside_other_programs_says_so(
    step, monkeypatch, measured, others_cores, note, words
):
    monkeypatch.setattr(neighbours, "BUSY_CORES", 0.25)
    found = replace(in_order(step.graph, local_machine()), notes=(note,))
    measurement = Measurement(np.array([measured]), None, others_cores)
    text = disturbance_of(found, 1.0, measurement)
    assert words in text
    assert bool(text) == bool(words)
    # A small step's hand-over is no disturbance.
    small = replace(measurement, step_seconds=measurement.step_seconds / 1e5)
    assert "differ" not in disturbance_of(found, 1e-5, small)
