"""Runs on Ray in which processes are killed, and commits are not what they should be."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import ray

from dovetail.errors import DivergedError, NoWorkersError, ServerLostError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import FailurePolicy, Storage, Watcher
from dovetail.training.checks import checksum
from dovetail.training.records import Commit, Refusal, Turn, Verdict
from tests.support.doors import Doors
from tests.support.ray_runs import (
    SMALL,
    Squares,
    actor,
    assign,
    assign_counts,
    counted,
    each_sample_once_an_epoch,
    held_until,
    in_turn,
    kill,
    kinds,
    once,
)

run = load_backend("ray", **SMALL)
simulate = load_backend("simulated")
pytestmark = pytest.mark.usefixtures("cluster")


def forced(rule, **fields):
    assignment = assign(rule, **fields)
    return replace(assignment, order=in_turn(assignment))


@pytest.fixture
def doors(tmp_path):
    return Doors(tmp_path)


@pytest.mark.parametrize("point", ["journalled", "snapshot-renamed"])
def test_a_server_that_dies_within_a_commit_loses_none_and_doubles_none(point, tmp_path, dying):
    storage = Storage(tmp_path / "run", snapshot_commits=8)
    dying((point, 3))
    outcome = run(assign_counts(point, storage=storage), Watcher())
    assert "server_restarted" in kinds(outcome)
    assert each_sample_once_an_epoch(outcome)


def test_a_server_that_dies_within_a_record_comes_back_to_the_same_bits(doors, dying):
    """The sixth record is worker 1's first commit, which waits until worker 0 was answered to its
    own: whoever was not before the server's death pulls a center that may be newer."""

    def hold(worker, steps):
        if worker == 1:
            doors.wait("answered")
        elif steps == 2:  # a window's
            doors.open("answered")

    def learner(worker):
        return Squares(64, 8, hold=partial(hold, worker))

    assignment = forced("adag", run="half", learner=learner)
    dying(("journal-half", 6))
    outcome = run(assignment, Watcher())
    assert "server_restarted" in kinds(outcome)
    expected = simulate(forced("adag", run="half"), Watcher())
    assert outcome.theta.tobytes() == expected.theta.tobytes()


def test_a_server_that_is_killed_at_any_time_goes_on_where_it_was(doors):
    def kill_it():
        kill("kill", "server")
        doors.open("killed")

    assignment = assign_counts("kill", hold=held_until(doors, "killed", rows=3))
    outcome = run(assignment, once(3, kill_it))
    assert "server_restarted" in kinds(outcome)
    assert each_sample_once_an_epoch(outcome)


def test_a_server_that_dies_too_often_ends_the_run(dying):
    assignment = assign(run="often", policy=FailurePolicy(server_restarts=1))
    dying(("received", 3), ("received", 3))
    with pytest.raises(ServerLostError) as caught:
        run(assignment, Watcher())
    assert caught.value.restarts == 1


def test_a_killed_workers_samples_are_trained_by_others(doors):
    def kill_it():
        kill("worker", "worker-1-0")
        doors.open("killed")

    def hold(worker, committed):
        doors.meet("begun", worker, of=2)
        if committed >= 8 * 3:
            doors.wait("killed" if worker == 1 else "restarted")

    def hear(event):
        if event.kind == "restarted":
            doors.open("restarted")

    outcome = run(assign_counts("worker", hold=hold), replace(once(3, kill_it), event=hear))
    assert each_sample_once_an_epoch(outcome)
    assert kinds(outcome).count("lost") == 1
    assert "restarted" in kinds(outcome)


def test_workers_that_keep_dying_end_the_run():
    assignment = assign(
        run="dying",
        learner=lambda worker: Squares(64, 8, does={1: "die"}),
        policy=FailurePolicy(worker_restarts=1),
    )
    with pytest.raises(NoWorkersError):
        run(assignment, Watcher())


def test_a_hung_worker_loses_its_lease(doors):
    """The other begins after it."""

    def hangs_once(worker):
        if worker == 1 and not doors.is_open("hangs"):
            return Squares(64, 8, does={1: "hang"}, hold=lambda _: doors.open("hangs"))
        return Squares(64, 8, hold=lambda _: doors.wait("hangs"))

    policy = FailurePolicy(lease_seconds=2.0)
    outcome = run(assign(run="hung", learner=hangs_once, policy=policy), Watcher())
    assert outcome.samples == counted(outcome) == 128
    assert 1 in [event.worker for event in outcome.events if event.kind == "lost"]


def test_commits_that_are_not_finite_are_refused_and_their_samples_trained_again():
    """One worker makes half the steps at least, whoever it is."""

    def broken(worker):
        return Squares(64, 8, does={3: "nan"})

    outcome = run(assign(run="nan", learner=broken), Watcher())
    assert outcome.samples == counted(outcome) == 128
    refused = [event.detail for event in outcome.events if event.kind == "refused"]
    assert refused and set(refused) == {Refusal.NOT_FINITE}
    assert np.isfinite(outcome.theta).all()


def test_commits_that_are_never_finite_are_called_divergence():
    def broken(worker):
        return Squares(64, 8, does=dict.fromkeys(range(1, 1000), "nan"))

    with pytest.raises(DivergedError):
        run(assign(run="diverged", learner=broken, policy=FailurePolicy(refusals=3)), Watcher())


def test_commits_of_another_run_or_changed_on_their_way_leave_the_center_as_it_was(doors):
    refusals, verdicts = [], set()

    def intrude():
        server, vector = actor("foreign", "server"), np.ones(128, np.float32)
        right = checksum(vector)
        ray.get(server.join.remote(7, 0))
        told = ray.get(server.turn.remote(7, 0, Turn(7, lease=True, pull=True), 0, None))
        lease = told.reply.lease
        ours = Commit("foreign", 7, 1, 0, lease.number, lease.stop - lease.start, 2, 1.0, 0.0)
        for commit, expected, sent in [
            (replace(ours, run="another"), right, vector),
            (ours, right + 1, vector),
            (ours, checksum(vector[:7]), vector[:7]),
        ]:
            turn = Turn(7, commit)
            reply = ray.get(server.turn.remote(7, 0, turn, expected, sent)).reply
            refusals.append(reply.refusal)
            verdicts.add(reply.verdict)
        ray.get(server.gone.remote(7, True))
        doors.open("intruded")

    assignment = assign_counts("foreign", hold=held_until(doors, "intruded", rows=2))
    outcome = run(assignment, once(2, intrude))
    assert verdicts == {Verdict.REFUSED}
    assert refusals == [Refusal.RUN, Refusal.CHECKSUM, Refusal.SHAPE]
    assert each_sample_once_an_epoch(outcome)
