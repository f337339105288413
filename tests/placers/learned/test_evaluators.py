"""Evaluators: what they say reaches its trial, and who dies loses only what it had."""

import os
import time

import numpy as np
import pytest

from dovetail.errors import EvaluatorsLostError, ProcessError
from dovetail.placers import Budget
from dovetail.placers.learned.evaluators import (
    HUNG_SECONDS,
    BudgetJudge,
    EvaluatorPool,
    SimulatedJudge,
)
from dovetail.runtime.processes import Worker
from dovetail.training.liveness import on_alive
from tests.support.evaluator_judges import DEADLY, HUNG, RAISING, Deadly, Hanging
from tests.support.learned_problems import random_problem, random_task

GROUPS = 6


def placements_of(*devices):
    """Of each trial: all groups on that device."""
    return np.repeat(np.array(devices, np.int32)[:, None], GROUPS, axis=1)


def kill(pid):
    """Kill a child of ours, and wait until it is dead."""
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def crew(tmp_path):
    task = random_task(1, GROUPS)
    found = EvaluatorPool(Deadly(tmp_path), [task], 2)
    yield found
    found.close()


def test_the_simulators_judge_says_what_the_simulator_says():
    problem = random_problem(3, GROUPS)
    placements = np.random.default_rng(0).integers(2, size=(20, GROUPS)).astype(np.int32)
    found, wanted = (
        SimulatedJudge(problem)(placements),
        problem.evaluate(problem.spread(placements)),
    )
    assert np.array_equal(found.seconds, wanted.values)
    assert np.array_equal(found.valid, wanted.feasible)
    assert found.judged.all()
    assert 0 < found.valid.sum() < 20


def test_a_budgets_judge_pays_a_placement_once_and_leaves_what_it_cannot_pay_unjudged():
    problem = random_problem(1, GROUPS)
    budget = Budget(evaluations=3)
    judge = BudgetJudge(problem, budget)
    first = judge(np.array([[0, 1] * 3, [0, 1] * 3, [0] * 6], np.int32))
    assert first.judged.all()
    assert first.seconds[0] == first.seconds[1]
    assert budget.spent == 2
    second = judge(np.array([[0] * 6, [1] * 6, [1, 0] * 3], np.int32))
    assert second.judged.tolist() == [True, True, False]
    assert budget.spent == 3
    known = [budget.score(problem, np.array([row], np.int32))[0] for row in ([0, 1] * 3, [1] * 6)]
    assert judge.best[0] <= min(known)


def test_a_crew_judges_every_placement_and_loses_only_what_its_dead_had(crew, tmp_path):
    beats = []
    on_alive(lambda: beats.append(1))
    (judge,) = crew.judges()
    quiet = judge(placements_of(0, 1, 0, 1, 1))
    assert quiet.seconds.tolist() == [6.0, 12.0, 6.0, 12.0, 12.0]
    assert quiet.valid.tolist() == [True, False, True, False, False]
    assert quiet.judged.all()
    pids = crew.pids
    has_torch = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert has_torch == dict.fromkeys(pids, "False")  # it takes seconds to import
    kill(pids[0])  # while it has nothing to judge: nothing is lost
    found = judge(placements_of(0, DEADLY, 1, 1))
    on_alive(None)
    assert found.judged.tolist() == [True, False, True, True]
    assert found.seconds[[0, 2, 3]].tolist() == [6.0, 12.0, 12.0]
    assert crew.lost == 2
    assert len(set(crew.pids) - set(pids)) == 2
    assert beats
    with pytest.raises(ProcessError) as raised:
        judge(placements_of(RAISING))
    assert "a judge's own mistake" in raised.value.traceback


def test_evaluators_that_die_again_and_again_end_the_run_with_an_error(tmp_path):
    crew = EvaluatorPool(Deadly(tmp_path), [random_task(1, GROUPS)], 1, losses=0)
    with pytest.raises(EvaluatorsLostError) as raised:
        crew.judges()[0](placements_of(DEADLY))
    crew.close()
    assert (raised.value.lost, raised.value.status) == (1, "killed by SIGKILL")


def test_a_hung_evaluator_loses_its_placement_and_no_other(tmp_path):
    def clock():  # stands still until there is one that hangs
        return 2 * HUNG_SECONDS if (tmp_path / "hung").exists() else 0.0

    crew = EvaluatorPool(Hanging(tmp_path), [random_task(1, GROUPS)], 1, clock=clock)
    (pid,) = crew.pids
    found = crew.judges()[0](placements_of(0, HUNG, 1))
    crew.close()
    assert found.judged.tolist() == [True, False, True]
    assert found.seconds[[0, 2]].tolist() == [6.0, 12.0]
    assert crew.lost == 1
    assert not os.path.exists(f"/proc/{pid}")


def test_an_evaluator_that_hangs_before_its_controller_goes_on_is_found_too(tmp_path, monkeypatch):
    send = Worker.send

    def send_and_wait(worker, message):
        send(worker, message)
        while isinstance(message, tuple) and message[2][0, 0] == HUNG:
            if (tmp_path / "hung").exists():
                return
            time.sleep(0.01)

    monkeypatch.setattr(Worker, "send", send_and_wait)
    test_a_hung_evaluator_loses_its_placement_and_no_other(tmp_path)


def test_evaluators_end_with_their_controller(crew):
    pids = crew.pids
    crew.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
