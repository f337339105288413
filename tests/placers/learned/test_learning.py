"""`learn`: controllers around a server. What it finds, keeps, loses and takes up again."""

import itertools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import RunMismatchError, UsageError
from dovetail.placers.learned import learning
from dovetail.placers.learned.judges import SimulatedJudge
from dovetail.placers.learned.learner import parameters_of
from dovetail.placers.learned.learning import learn
from dovetail.placers.learned.log import LogReaders
from dovetail.training.records import Outcome
from tests.support.doors import Doors
from tests.support.learned_problems import random_task
from tests.support.tiny_policies import PPO, REINFORCE, Table

GROUPS, TRIALS = 6, 320
TASK = random_task(1, GROUPS)


def learn_table(settings=REINFORCE, tasks=(TASK,), **options):
    """(what is learned, the policy) of a table of the task's groups."""
    policy = Table(GROUPS, 2)
    options = {"trials": TRIALS, "backend": "simulated", **options}
    return learn(list(tasks), policy, settings, **options), policy


def assert_same(one, other):
    """Two runs have come to the same, bit for bit."""
    assert np.array_equal(one.theta, other.theta)
    assert (one.values, one.found, one.trials) == (other.values, other.found, other.trials)
    assert [plain(p) for p in one.points] == [plain(p) for p in other.points]
    for name, placement in other.placements.items():
        assert np.array_equal(one.placements[name], placement)


def plain(point):
    """A point without its time, comparable with itself where it has a nan."""
    return repr(replace(point, seconds=0.0))


class Stop(Exception):
    """What a test stops a run by."""


@pytest.fixture(scope="module")
def whole():
    """An uninterrupted run of one controller."""
    return learn_table()[0]


@pytest.mark.parametrize("settings", [REINFORCE, PPO], ids=["reinforce", "ppo"])
def test_a_run_finds_what_is_near_the_optimum_and_the_policy_holds_what_it_has_learned(settings):
    seen = []
    settings = replace(settings, entropy=0.02)
    learned, policy = learn_table(settings, controllers=2, trials=640, progress=seen.append)
    problem = TASK.problem()
    every = np.array(list(itertools.product(range(2), repeat=GROUPS)), np.int32)
    found = problem.evaluate(problem.spread(every))
    values = np.where(found.feasible, found.values, np.inf)
    (value,) = learned.values.values()
    assert value <= 1.05 * values.min()
    assert value == problem.evaluate(problem.spread(learned.placements[TASK.name][None])).values[0]
    assert np.array_equal(parameters_of(policy), learned.theta)
    means = [point.mean for point in learned.points]
    assert np.mean(means[-10:]) < np.mean(means[:10])
    assert np.mean([p.entropy for p in learned.points[-10:]]) < 0.9 * learned.points[0].entropy
    assert learned.trials == 640
    assert learned.updates == len(learned.points) == len(seen) == 80
    assert {point.controller for point in learned.points} == {0, 1}
    assert 0 < learned.found[TASK.name] <= 640


def test_trials_are_exact_where_they_are_no_whole_number_of_updates():
    learned, _ = learn_table(trials=50, controllers=3)
    assert (learned.trials, learned.updates) == (50, 7)


def test_several_tasks_each_have_their_best():
    tasks = [TASK, random_task(2, GROUPS)]
    learned, _ = learn_table(tasks=tasks, trials=160)
    assert learned.values.keys() == {task.name for task in tasks} == learned.placements.keys()
    assert [point.task for point in learned.points[:2]] == [task.name for task in tasks]


def test_threads_of_one_controller_learn_what_virtual_time_does(whole):
    assert_same(learn_table(backend="threads")[0], whole)


def test_the_rule_may_be_another_one():
    learned, _ = learn_table(rule="adag-agn", controllers=2)
    assert learned.trials == TRIALS
    assert not np.array_equal(learned.theta, parameters_of(Table(GROUPS, 2)))


# Stopped, and taken up again


@pytest.mark.parametrize(
    "settings",
    [
        REINFORCE,
        PPO,
        replace(REINFORCE, baseline="moving", elite=3.0, entropy=2.0, entropy_each=0.07),
        replace(PPO, baseline="batch", elite=4.0),
    ],
    ids=["reinforce", "ppo", "reinforce with an elite", "ppo with an elite"],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, settings):
    expected = learn_table(settings)[0]

    def stop(point):
        if point.update == 17:
            raise Stop

    with pytest.raises(Exception) as raised:
        learn_table(settings, folder=tmp_path, progress=stop)
    assert "Stop" in str(raised.value)
    resumed, _ = learn_table(settings, folder=tmp_path, resume=True)
    assert_same(resumed, expected)
    assert [point.update for point in resumed.points] == list(range(TRIALS // 8))
    assert resumed.trials == TRIALS


def test_an_interrupt_keeps_the_best_so_far_and_the_run_can_go_on(tmp_path, whole):
    def press(point):
        if point.update == 11:
            os.kill(os.getpid(), signal.SIGINT)

    stopped, policy = learn_table(folder=tmp_path, progress=press)
    assert stopped.interrupted
    assert 8 * 11 <= stopped.trials < TRIALS
    values = [point.best for point in stopped.points]
    assert stopped.values[TASK.name] == min(values)
    assert np.array_equal(parameters_of(policy), stopped.theta)
    assert_same(learn_table(folder=tmp_path, resume=True)[0], whole)


def test_an_interrupt_before_the_first_update_is_raised(monkeypatch):
    def press(_judge, _placements):
        raise KeyboardInterrupt

    monkeypatch.setattr(SimulatedJudge, "__call__", press)
    with pytest.raises(KeyboardInterrupt):
        learn_table()


def test_an_interrupt_that_a_backend_made_of_before_any_update_is_raised(monkeypatch):
    def stopped(assignment, _watcher):
        return Outcome(assignment.theta, clock=0, samples=0, seconds=0.0, stopped=True)

    monkeypatch.setattr(learning, "load_backend", lambda _name, **_options: stopped)
    with pytest.raises(KeyboardInterrupt):
        learn_table(backend="processes")


def test_a_folder_of_another_run_is_not_taken_up(tmp_path):
    learn_table(folder=tmp_path, trials=16)
    with pytest.raises(UsageError, match="resume"):
        learn_table(folder=tmp_path, trials=16)
    with pytest.raises(RunMismatchError) as raised:
        learn_table(folder=tmp_path, trials=24, resume=True)
    assert raised.value.field == "trials"
    with pytest.raises(UsageError, match="folder"):
        learn_table(resume=True)


@pytest.mark.parametrize("name", ["trials", "controllers", "evaluators"])
def test_numbers_that_cannot_be_are_refused(name):
    with pytest.raises(UsageError) as raised:
        learn_table(**{name: 0})
    assert raised.value.option == name


def test_an_unknown_backend_leaves_no_folder(tmp_path):
    with pytest.raises(UsageError, match="backend"):
        learn_table(backend="nowhere", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tasks_of_one_name_are_refused():
    with pytest.raises(UsageError, match="names"):
        learn_table(tasks=[TASK, TASK])


# Processes


def children(pid, entry=""):
    """Living child processes of one, by what they run."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            line = Path(f"/proc/{child}/cmdline").read_bytes()
        except FileNotFoundError:  # it has just ended
            continue
        if entry.encode() in line:
            found.append(int(child))
    return found


def updates_in(folder):
    """First samples of the updates that its controllers have written down."""
    return {entry.first for entry in LogReaders(folder).news()}


def wait_for(updates, folder):
    while len(updates_in(folder)) < updates:  # for ever: pytest has a limit of its own
        time.sleep(0.01)


class Held(Table):
    """A table that draws so often in one life of its controller, and then waits for ever."""

    DRAWS = 6

    def __init__(self, doors):
        super().__init__(GROUPS, 2)
        self.doors, self.draws = doors, 0

    def draw(self, view, batch, generator):
        self.draws += 1
        if self.draws > self.DRAWS:
            self.doors.wait("never")
        return super().draw(view, batch, generator)


def run_in_processes(folder):
    learn([TASK], Held(Doors(folder)), REINFORCE, trials=TRIALS, backend="processes", folder=folder)


def test_the_caller_hears_of_a_controller_that_is_lost(tmp_path):
    told = []

    def happened(event):
        told.append((event.kind, event.worker))

    def kill():
        try:
            wait_for(Held.DRAWS, tmp_path)
            (controller,) = set(children(os.getpid(), "worker:serve")) - before
            os.kill(controller, signal.SIGKILL)
        finally:
            Doors(tmp_path).open("never")

    before = set(children(os.getpid()))
    with ThreadPoolExecutor() as threads:
        killing = threads.submit(kill)
        learn(
            [TASK], Held(Doors(tmp_path)), REINFORCE, trials=TRIALS, backend="processes",
            folder=tmp_path, happened=happened,
        )  # fmt: skip
        killing.result()
    assert {("lost", 0), ("restarted", 0)} <= set(told)


def test_a_controller_and_then_the_whole_run_are_killed_and_it_goes_on_bit_for_bit(tmp_path, whole):
    caller = multiprocessing.get_context("fork").Process(target=run_in_processes, args=(tmp_path,))
    caller.start()
    wait_for(Held.DRAWS, tmp_path)
    (controller,) = children(caller.pid, "worker:serve")
    os.kill(controller, signal.SIGKILL)
    wait_for(2 * Held.DRAWS - 1, tmp_path)  # the last one may have to be done again
    os.kill(caller.pid, signal.SIGKILL)
    caller.join()
    resumed, _ = learn_table(backend="processes", folder=tmp_path, resume=True)
    assert_same(resumed, whole)
    assert resumed.trials == TRIALS
