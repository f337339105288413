"""Runs on Ray in which nothing fails."""

from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import ProcessError, RunMismatchError, UsageError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Storage, Watcher
from dovetail.training.server import Server
from tests.support.ray_runs import SMALL, Squares, assign, counted, in_turn, kinds

run = load_backend("ray", **SMALL)
simulate = load_backend("simulated")
pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.parametrize("rule", ["sync", "aeasgd"])
def test_two_workers_train_each_sample_of_each_epoch_once_to_the_simulated_bits(rule):
    plain = assign(rule, run=rule)
    forced = replace(plain, order=in_turn(plain))
    outcome = run(forced, Watcher())
    assert outcome.samples == counted(outcome) == 128
    assert kinds(outcome)[:2] == ["joined", "joined"]
    assert {row.worker for row in outcome.rows} == {0, 1}
    assert outcome.theta.tobytes() == simulate(forced, Watcher()).theta.tobytes()


def test_the_watcher_sees_all_rows_and_evaluations_and_may_stop_the_run():
    rows = []
    watcher = Watcher(
        every_samples=40,
        evaluate=lambda theta, clock, samples, seconds: {"norm": float(np.linalg.norm(theta))},
        should_stop=lambda figures: len(figures) == 2,
        rows=rows.extend,
    )
    learner = lambda worker: Squares(64, 8, sleep=0.002)  # noqa: E731
    assignment = assign(run="stop", epochs=1000, workers=1, learner=learner)
    outcome = run(assignment, watcher)
    assert outcome.stopped
    assert len(outcome.evaluations) == 2
    assert [each.samples >= 40 for each in outcome.evaluations] == [True, True]
    assert tuple(rows) == outcome.rows
    assert outcome.samples < 64 * 1000


def test_large_vectors_go_through_the_object_store_to_the_simulated_bits():
    size = 300_000
    assignment = assign("downpour", run="large", size=size, samples=16, epochs=1)
    forced = replace(assignment, order=in_turn(assignment))
    outcome = run(forced, Watcher())
    assert outcome.samples == counted(outcome) == 16
    assert outcome.theta.tobytes() == simulate(forced, Watcher()).theta.tobytes()


def test_a_mistake_of_the_learner_ends_the_run_with_its_traceback():
    learner = lambda worker: Squares(64, 8, does={3: "raise"})  # noqa: E731
    assignment = assign(run="raise", workers=1, learner=learner)
    with pytest.raises(ProcessError, match="a learner's own mistake") as caught:
        run(assignment, Watcher())
    assert "gradient" in caught.value.traceback


def test_a_folder_of_another_run_is_an_error_of_the_callers(tmp_path):
    storage = Storage(tmp_path)
    other = assign(run="first", workers=1)
    Server(other.job, other.rule, other.theta.copy(), storage=storage, clock=float).close()
    with pytest.raises(RunMismatchError):
        run(assign(run="second", workers=1, storage=storage), Watcher())


def test_what_ray_cannot_do_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(UsageError, match="memory that all workers share"):
        run(assign("hogwild"), Watcher())
    with pytest.raises(UsageError, match="no such option"):
        load_backend("ray", speed=3)(assign(), Watcher())
    with pytest.raises(UsageError, match="worker_cores"):
        load_backend("ray", worker_cores="many")(assign(), Watcher())
    with pytest.raises(UsageError, match="by their logs"):
        run(assign(storage=Storage(tmp_path, log=False), shards=2), Watcher())
    with pytest.raises(UsageError, match="no node has"):
        load_backend("ray", server_node="nowhere", **SMALL)(assign(run="nowhere"), Watcher())
