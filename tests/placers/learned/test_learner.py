"""A controller's learner: what trials teach, and that its state is all that counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.placers.learned.adam import VectorAdam
from dovetail.placers.learned.features import look
from dovetail.placers.learned.judges import SimulatedJudge
from dovetail.placers.learned.learner import (
    PolicyLearner,
    TaskView,
    parameters_of,
    write_parameters,
)
from dovetail.placers.learned.log import ControllerLog, LogEntry, LogReaders
from dovetail.placers.learned.losses import Baseline, cost
from dovetail.placers.learned.records import LearningSettings, Point, Trials
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.records import Job
from dovetail.training.rules import make_rule
from tests.support.learned_problems import random_problem
from tests.support.run_order import order
from tests.support.tiny_policies import PPO, REINFORCE, Table

GROUPS, K = 6, 8
PLAIN = LearningSettings("reinforce", trials=4, rate=0.1, baseline="moving", failing=10.0)
MEAN = replace(PLAIN, baseline="mean")


def trials(*seconds, lost=()):
    """Trials of these seconds; None: it failed."""
    judged = np.array([i not in lost for i in range(len(seconds))])
    return Trials(
        np.array([np.inf if s is None else float(s) for s in seconds]),
        np.array([s is not None for s in seconds]),
        judged,
    )


def learner_of(seed=1, settings=REINFORCE, folder=None, judge=None, **options):
    problem = random_problem(seed, GROUPS)
    seen = TaskView("task", look(problem))
    judge = judge or SimulatedJudge(problem)
    policy = Table(GROUPS, 2)
    return PolicyLearner(policy, [seen], [judge], settings, seed=7, folder=folder, **options)


def go_on(learner, theta, positions, indices_of=lambda p: np.arange(p, p + K)):
    """`theta += U(g)` over those positions."""
    for position in positions:
        gradient = learner.gradient(theta, indices_of(position), 0)
        theta = theta + learner.update(theta, gradient.vector, 0.0)
    return theta


# What a trial teaches


def test_a_cost_is_the_root_of_the_seconds_or_the_failing_signal():
    found = cost(trials(4, None, 9, lost=(2,)), PLAIN)
    assert found.tolist() == [2.0, 10.0, 10.0]


def test_the_moving_baseline_starts_at_the_failing_signal_and_moves_by_a_batchs_mean():
    baseline = Baseline.of(PLAIN)
    found = baseline.advantages(trials(4, 16), PLAIN, 0)
    assert found.tolist() == [8.0, 6.0]
    assert baseline.value == pytest.approx(0.9 * 10 + 0.1 * 3)


def test_the_mean_baseline_is_the_mean_of_all_earlier_trials_failures_included():
    baseline = Baseline.of(MEAN)
    first = baseline.advantages(trials(4, 16), MEAN, 0)
    assert first.tolist() == [1.0, -1.0]  # none are earlier: their own mean, 3
    second = baseline.advantages(trials(1, None, 9), MEAN, 1)
    assert second.tolist() == [2.0, -7.0, 0.0]
    assert baseline.value == pytest.approx((2 + 4 + 1 + 10 + 3) / 5)


def test_failures_teach_until_the_update_from_which_only_what_ran_does():
    settings = replace(PLAIN, valid_only_from=5)
    before, after = Baseline.of(settings), Baseline.of(settings)
    assert before.advantages(trials(4, None), settings, 4).tolist() == [8.0, 0.0]
    assert before.value == pytest.approx(0.9 * 10 + 0.1 * 6)
    assert after.advantages(trials(4, None), settings, 5).tolist() == [8.0, 0.0]
    assert after.value == pytest.approx(0.9 * 10 + 0.1 * 2)


def test_a_lost_trial_teaches_nothing_and_moves_no_baseline():
    lossy, without = Baseline.of(MEAN), Baseline.of(MEAN)
    found = lossy.advantages(trials(4, None, 16, lost=(1,)), MEAN, 0)
    assert found.tolist() == [1.0, 0.0, -1.0]
    without.advantages(trials(4, 16), MEAN, 0)
    assert lossy == without


def test_normalised_advantages_have_unit_spread_but_do_not_blow_up_what_hardly_differs():
    settings = replace(MEAN, normalised=True)
    found = Baseline.of(settings).advantages(trials(4, 9, 25), settings, 0)
    assert np.mean(found**2) == pytest.approx(1)
    assert (found[:-1] > found[1:]).all()
    close = Baseline.of(settings).advantages(trials(4, 4 + 1e-9), settings, 0)
    assert np.abs(close).max() < 1e-6


def test_adam_steps_as_that_of_torch_does():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(50))
    theirs, ours, theta = (
        torch.optim.Adam([parameter], lr=0.05),
        VectorAdam(parameter.data),
        parameter,
    )
    theta = parameter.detach().clone()
    for _ in range(20):
        parameter.grad = torch.randn(50)
        theirs.step()
        theta += ours.step(parameter.grad, 0.05)
    assert torch.allclose(theta, parameter.detach(), atol=1e-6)


def test_the_rate_decays_by_the_controllers_own_updates():
    settings = replace(REINFORCE, rate=0.1, decay=0.5, decay_from=2, decay_every=2)
    learner, rates = learner_of(settings=settings), []
    theta = learner.theta
    for position in range(0, 7 * K, K):
        rates.append(learner.rate(0.0))
        theta = go_on(learner, theta, [position])
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025])


# One controller


@pytest.mark.parametrize("settings", [REINFORCE, PPO], ids=["reinforce", "ppo"])
def test_one_process_equals_downpour_with_one_worker_and_window_one_bit_for_bit(settings):
    job = Job("run", 2 * GROUPS, 20 * K - 3, 1, K, 1, 1, seed=5)
    alone = learner_of(settings=settings)
    shuffled = order(job, 0)
    theta = go_on(alone, alone.theta, range(0, job.samples, K), lambda p: shuffled[p : p + K])
    made = []

    def make(_worker):
        made.append(learner_of(settings=settings))
        return made[-1]

    start = parameters_of(Table(GROUPS, 2))
    assignment = Assignment(job, make_rule("downpour"), start, make)
    outcome = load_backend("simulated")(assignment, Watcher())
    assert np.array_equal(outcome.theta, theta)
    assert not np.array_equal(theta, start)
    assert made[0].best["task"].seconds == alone.best["task"].seconds
    assert made[0].trials == alone.trials == job.samples


@pytest.mark.parametrize("settings", [REINFORCE, PPO], ids=["reinforce", "ppo"])
def test_what_is_drawn_depends_on_the_seed_and_the_sample_alone(settings):
    one, other = learner_of(settings=settings), learner_of(settings=settings)
    theta = one.theta + 0.25
    go_on(other, theta, [0, K])  # what it did before does not count
    first = one.gradient(theta, np.arange(40, 40 + K), 0).vector.copy()
    other._baselines = [Baseline.of(settings)]
    other.updates, other._adam = 0, VectorAdam(other.flat.theta)
    assert np.array_equal(first, other.gradient(theta, np.arange(40, 40 + K), 0).vector)


def test_the_best_placement_is_kept_with_the_number_of_trials_up_to_it():
    seen = []

    def judge(placements):
        seconds = 100.0 - 10 * placements.sum(axis=1)
        seen.extend(seconds)
        return Trials(seconds, seconds != 40.0, np.ones(len(seconds), bool))

    learner = learner_of(judge=judge)
    go_on(learner, learner.theta, range(0, 10 * K, K))
    valid = np.where(np.array(seen) != 40.0, seen, np.inf)
    best = learner.best["task"]
    assert best.seconds == valid.min()
    assert best.found == valid.argmin() + 1
    assert 100.0 - 10 * best.placement.sum() == best.seconds
    assert learner.points[-1].trials == len(seen) == 10 * K
    assert [p.best for p in learner.points] == sorted(p.best for p in learner.points)[::-1]


def test_a_step_is_an_update_by_the_learner_alone_without_a_server():
    by_hand, alone = learner_of(), learner_of()
    theta = go_on(by_hand, by_hand.theta, range(0, 3 * K, K))
    for _ in range(3):
        alone.step()
    assert np.array_equal(alone.theta, theta)
    assert (alone.updates, alone.trials) == (3, 3 * K)
    alone.step(2)
    assert alone.trials == 3 * K + 2


def test_tasks_take_turns_and_each_has_its_baseline_and_its_best():
    views = [look(random_problem(seed, GROUPS)) for seed in (1, 2)]

    def judge_of(seconds):
        return lambda placements: Trials(
            np.full(len(placements), seconds), *np.ones((2, len(placements)), dtype=bool)
        )

    seen = [TaskView("a", views[0]), TaskView("b", views[1])]
    judges = [judge_of(4.0), judge_of(9.0)]
    learner = PolicyLearner(Table(GROUPS, 2), seen, judges, MEAN, controller=1)
    go_on(learner, learner.theta, range(0, 4 * K, K))
    assert [point.task for point in learner.points] == ["b", "a", "b", "a"]
    assert {name: best.seconds for name, best in learner.best.items()} == {"a": 4.0, "b": 9.0}
    assert [baseline.value for baseline in learner._baselines] == [2.0, 3.0]


@pytest.mark.parametrize("settings", [REINFORCE, PPO], ids=["reinforce", "ppo"])
def test_a_batch_of_which_nothing_is_left_changes_nothing(settings):
    def judge(placements):
        return trials(*[None] * len(placements), lost=range(len(placements)))

    learner = learner_of(settings=settings, judge=judge)
    theta = learner.theta
    assert np.array_equal(go_on(learner, theta, [0, K]), theta)
    assert (learner.updates, learner.trials, learner.best) == (2, 0, {})


def test_parameters_that_are_written_are_those_that_were_read():
    one, other = Table(3, 2), Table(3, 2)
    one.logits.data.normal_(generator=torch.Generator().manual_seed(0))
    write_parameters(other, parameters_of(one))
    assert torch.equal(one.logits, other.logits)


# What is kept


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("settings", [REINFORCE, PPO], ids=["reinforce", "ppo"])
def test_a_learner_that_comes_back_goes_on_bit_for_bit(tmp_path, settings, committed):
    whole = learner_of(settings=settings)
    theta = go_on(whole, whole.theta, range(0, 12 * K, K))
    first = learner_of(settings=settings, folder=tmp_path)
    reached = go_on(first, first.theta, range(0, 6 * K, K))
    if not committed:  # it has computed its update, and the server has not heard of it
        go_on(first, reached, [6 * K])
    again = learner_of(settings=settings, folder=tmp_path)
    assert np.array_equal(go_on(again, reached, range(6 * K, 12 * K, K)), theta)
    assert again.best["task"].seconds == whole.best["task"].seconds
    assert again.best["task"].found == whole.best["task"].found
    assert np.array_equal(again.best["task"].placement, whole.best["task"].placement)
    assert (again.updates, again.trials) == (whole.updates, whole.trials)


def test_a_first_update_that_was_not_committed_is_done_again_from_the_beginning(tmp_path):
    first = learner_of(folder=tmp_path)
    theta = first.theta
    reached = go_on(first, theta, [0])
    again = learner_of(folder=tmp_path)
    assert np.array_equal(go_on(again, theta, [0]), reached)
    assert again.trials == K


def test_updates_are_read_back_as_they_were_written_and_half_a_line_is_none(tmp_path):
    point = Point(0, 3, "net", 32, 1.5, 0.25, float("nan"), 0.5, 0.1, -0.2)
    whole = LogEntry(point, 17, 8, 2, np.array([0, 3, 1], np.int32))
    log = ControllerLog(tmp_path, 0)
    log.add(whole)
    log.close()
    path = tmp_path / "controllers" / "0" / "updates.jsonl"
    path.write_bytes(path.read_bytes() + whole.line().encode()[:40])
    again = ControllerLog(tmp_path, 0)  # what was cut off stays on a line of its own
    again.add(replace(whole, first=25, placement=None, at=-1))
    readers = LogReaders(tmp_path)
    found = list(readers.news())
    assert [entry.first for entry in found] == [17, 25]
    assert found[0].line() == whole.line()
    assert found[0].placement.tolist() == [0, 3, 1]
    assert list(readers.news()) == []
    again.add(replace(whole, first=33))
    assert [entry.first for entry in readers.news()] == [33]
    again.close()
