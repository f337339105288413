"""Trials that run on the devices of this machine: what they count, and what they survive."""

import os
import signal

import numpy as np
import pytest

from dovetail.costs import analytic_costs
from dovetail.errors import InfeasibleError, UsageError, WorkerDiedError, WorkerError
from dovetail.machine.local import local_machine
from dovetail.pipeline import TaskRequest, learn, learning, resolve_model, searching
from dovetail.pipeline.learning import FINAL_RUNS, LONG_RUNS, MOST_RUNS, MeasuredTrials, task_of
from dovetail.placers.learned.records import PlacementTask

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.fixture(scope="module", autouse=True)
def _quick_costs():
    """What is learned here does not depend on what ops cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            learning, "costs_of", lambda step, machine, *_: analytic_costs(step.graph, machine)
        )
        patch.setattr(
            searching, "costs_of", lambda step, machine, *_: analytic_costs(step.graph, machine)
        )
        yield


@pytest.fixture(scope="module")
def asked():
    return TaskRequest(
        "m", resolve_model("tests.support.small_models:trained", "adam"), local_machine("here/2")
    )


@pytest.fixture(scope="module")
def task(asked):
    return task_of(asked, "seq2seq")


@pytest.fixture
def fake(monkeypatch, task, asked):
    """fake(seconds of a placement's step, or an error to raise) -> trials that run nothing."""

    def make(seconds_of, steps=10, of=task):
        runs = []

        def loaded(plan, _captured, *, seed, workers):
            runs.append(tuple(plan.placement.tolist()))
            return Loaded(seconds_of(plan.placement, len(runs)), steps)

        monkeypatch.setattr(learning, "execute", loaded)
        trials = MeasuredTrials(asked.step, of, steps=steps)
        trials.runs_made = runs
        return trials

    return make


class Loaded:
    """Stands in for a loaded plan."""

    def __init__(self, found, steps):
        self.found, self.steps = found, steps

    def __enter__(self):
        if isinstance(self.found, BaseException):
            raise self.found
        return self

    def __exit__(self, *_):
        return False

    def step_seconds(self, steps):
        assert steps == self.steps
        return np.full(steps - 1, self.found)


def placements(trials, count, seed=0):
    groups = trials.problem.groups.count
    drawn = np.random.default_rng(seed).integers(2, size=(count, groups))
    return np.stack([trials.problem.settle(row.astype(np.int32)) for row in drawn])


def test_a_killed_process_costs_its_trial_and_the_best_placement_is_the_plan(
    asked, task, monkeypatch
):
    made, pids = [], []

    class Kept(MeasuredTrials):
        def __enter__(self):
            made.append(self)
            return self

    def heard(_point):
        pids.append(made[0]._workers.pids)
        if len(pids) == 2:
            os.kill(pids[-1][1], signal.SIGKILL)

    monkeypatch.setattr(learning, "MeasuredTrials", Kept)
    monkeypatch.setattr(learning, "FINAL_RUNS", 2)
    result = learn(
        asked.step, task.machine, method="seq2seq", measured=True, trials=12,
        settings={"trials": 4}, progress=heard,
    )  # fmt: skip
    assert len(pids[0]) == 2
    assert pids[0] == pids[1], "the processes are kept from trial to trial"
    assert set(pids[1]).isdisjoint(pids[2]), "and new ones take the place of those that died"
    assert len(result.failures) == 1
    assert result.learned.trials == 12
    assert result.card["reward"] == "measured"
    assert (result.plan.placer, result.plan.machine) == ("seq2seq", task.machine)
    medians = [timed.median_seconds for timed in result.measured]
    assert medians == sorted(medians)
    spread = task.problem().spread(result.measured[0].placement)
    choices = ~task.graph.is_source
    assert (result.plan.placement[choices] == spread[choices]).all()


def test_a_placement_that_fails_is_invalid_and_no_more(fake):
    errors = (WorkerError("cpu0", "add", "Traceback"), WorkerDiedError("cpu1", "mm", "SIGKILL"))
    trials = fake(lambda _placement, run: errors[run % 2] if run <= 2 else 0.5)
    found = trials.judge(placements(trials, 4))
    assert found.valid.tolist() == [False, False, True, True]
    assert found.seconds.tolist() == [np.inf, np.inf, 0.5, 0.5]
    assert len(trials.failures) == 2
    assert len(trials.finalists()) == 2


def test_what_is_predicted_not_to_fit_is_not_run(fake, task):
    caps = tuple((name, 1024) for name in task.machine.device_names)
    tight = PlacementTask(**{**vars(task), "caps": caps})
    trials = fake(lambda *_: pytest.fail("it ran"), of=tight)
    assert not trials.judge(placements(trials, 2)).valid.any()
    with pytest.raises(InfeasibleError, match="predicted to fit"):
        trials.finalists()


def test_where_nothing_runs_the_last_failure_is_told(fake):
    trials = fake(lambda *_: WorkerError("cpu0", "add", "the numbers are off"))
    trials.judge(placements(trials, 2))
    with pytest.raises(InfeasibleError, match="the numbers are off"):
        trials.finalists()


def test_a_placement_drawn_again_runs_again_until_its_median_is_known(fake):
    seconds = [0.9, 0.5, 0.6]
    trials = fake(lambda _placement, run: seconds[run - 1])
    one = placements(trials, 1)
    shown = [float(trials.judge(one).seconds[0]) for _ in range(MOST_RUNS + 2)]
    assert shown == pytest.approx([0.9, 0.7, 0.6, 0.6, 0.6])
    assert len(trials.runs_made) == MOST_RUNS


def test_the_best_few_run_again_in_turns_and_the_best_median_wins(fake):
    trials = fake(lambda placement, run: 0.1 + 0.01 * float(placement.sum() % 3))
    few = trials.finalists_of = placements(trials, 3)
    trials.judge(few)
    before = len(trials.runs_made)
    timed = trials.compare(few)
    turns = [set(trials.runs_made[i : i + 3]) for i in range(before, len(trials.runs_made), 3)]
    assert len(turns) == FINAL_RUNS
    assert all(turn == turns[0] for turn in turns)
    assert len({trials.runs_made[before + 3 * i] for i in range(3)}) == len(turns[0])
    assert all(len(one.run_seconds) == FINAL_RUNS for one in timed)
    medians = [one.median_seconds for one in timed]
    assert medians == sorted(medians)
    assert timed[0].spread == 0


def test_long_runs_are_repeated_less_often_and_failures_drop_out(fake):
    trials = fake(
        lambda _placement, run: 2.0 if run != 2 else WorkerError("cpu0", "add", "Traceback")
    )
    timed = trials.compare(placements(trials, 2))
    assert [len(one.run_seconds) for one in timed] == [LONG_RUNS]


def test_the_share_of_the_comparison_that_is_done_is_never_above_1(fake):
    # The seventh run is the first long one, and by then more turns are done than long runs need.
    trials = fake(lambda _placement, run: 2.0 if run == 7 else 0.1)
    shares = []
    (timed,) = trials.compare(placements(trials, 1), shares.append)
    assert len(timed.run_seconds) == 7
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_simulated_trials_may_come_first_and_their_best_is_among_the_finalists(fake, asked, task):
    trials = fake(lambda _placement, _run: 0.1)
    points = []
    result = learn(
        asked.step, task.machine, measured=True, trials=4, simulated_first=12,
        settings={"trials": 4}, progress=points.append,
    )  # fmt: skip
    assert [point.trials for point in points] == [4, 8, 12, 4]
    best = min(point.best for point in points[:3])
    values = [
        float(trials.problem.evaluate(trials.problem.spread(timed.placement[None])).values[0])
        for timed in result.measured
    ]
    assert best in values
    assert result.learned.trials == 4


def test_ctrl_c_in_a_measured_trial_keeps_the_best_of_those_before(fake, asked, task, monkeypatch):
    def seconds_of(_placement, run):
        if run == 6:
            signal.raise_signal(signal.SIGINT)
        return 0.1

    fake(seconds_of)
    monkeypatch.setattr(learning, "FINAL_RUNS", 2)
    result = learn(asked.step, task.machine, measured=True, trials=400, settings={"trials": 4})
    assert result.learned.interrupted
    assert result.plan.interrupted
    assert len(result.measured) == 5


def test_ctrl_c_in_the_simulated_trials_before_measures_nothing_and_keeps_their_best(
    fake, asked, task
):
    trials = fake(lambda _placement, _run: 0.1)

    def press(point):
        if point.trials == 8:
            signal.raise_signal(signal.SIGINT)

    result = learn(
        asked.step, task.machine, measured=True, trials=4, simulated_first=400,
        settings={"trials": 4}, progress=press,
    )  # fmt: skip
    assert trials.runs == 0
    assert result.measured == ()
    assert result.plan.interrupted
    assert result.card["reward"] == "simulated"
    assert result.plan.value == min(point.best for point in result.learned.points)


def test_only_devices_of_this_machine_can_measure(asked):
    with pytest.raises(UsageError, match="here/2"):
        learn(asked.step, "2 x p100", measured=True, trials=16)
    with pytest.raises(UsageError, match="only a network can run"):
        learn(asked.step.graph, "here/2", measured=True, trials=16)
