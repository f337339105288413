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
from dovetail.training.supervisor import Gone
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


def test_a_server_that_dies_within_commits_loses_none_and_doubles_none(tmp_path, dying):
    """Its first life ends between a commit's record and the commit, its second after a snapshot."""
    storage = Storage(tmp_path / "run", snapshot_commits=8)
    dying(("journalled", 3), ("snapshot-renamed", 3))
    outcome = run(assign_counts("commits", storage=storage), Watcher())
    assert kinds(outcome).count("server_restarted") == 2
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


def test_a_server_that_dies_too_often_ends_the_run(dying):
    assignment = assign(run="often", workers=1, policy=FailurePolicy(server_restarts=1))
    dying(("received", 3), ("received", 3))
    with pytest.raises(ServerLostError) as caught:
        run(assignment, Watcher())
    assert caught.value.restarts == 1


def test_a_server_and_then_a_worker_that_are_killed_at_any_time_are_replaced(doors):
    """The server goes on where it was, and the worker's samples are trained by others."""

    def hold(worker, committed):
        doors.meet("begun", worker, of=2)
        if committed >= 8 * 3:
            doors.wait("server_restarted")
        if committed >= 8 * 6:
            doors.wait("killed" if worker == 1 else "restarted")

    seen = []

    def watch(rows):
        if len(seen) < 3 <= len(seen) + len(rows):
            kill("kills", "server")
        if len(seen) < 6 <= len(seen) + len(rows):
            kill("kills", "worker-1-0")
            doors.open("killed")
        seen.extend(rows)

    def hear(event):
        doors.open(event.kind)

    outcome = run(assign_counts("kills", hold=hold), Watcher(rows=watch, event=hear))
    assert each_sample_once_an_epoch(outcome)
    assert kinds(outcome).count("server_restarted") == 1
    assert kinds(outcome).count("lost") == 1
    assert "restarted" in kinds(outcome)


def test_workers_that_keep_dying_end_the_run():
    assignment = assign(
        run="dying",
        workers=1,
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

    # A busy machine may keep a worker that is well silent for as long: it may be replaced.
    policy = FailurePolicy(lease_seconds=2.0, worker_restarts=50)
    outcome = run(assign(run="hung", learner=hangs_once, policy=policy), Watcher())
    assert outcome.samples == counted(outcome) == 128
    assert 1 in [event.worker for event in outcome.events if event.kind == "lost"]


def test_commits_that_are_never_finite_are_called_divergence():
    def broken(worker):
        return Squares(64, 8, does=dict.fromkeys(range(1, 1000), "nan"))

    policy = FailurePolicy(refusals=3)
    with pytest.raises(DivergedError):
        run(assign(run="diverged", workers=1, learner=broken, policy=policy), Watcher())


def test_commits_that_are_refused_leave_the_center_as_it_was(doors):
    """Of another run, changed on their way, or not finite, in each worker's third step: samples of
    those are trained again. One worker makes half the steps at least, whoever it is."""
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
        ray.get(server.tell.remote(Gone(7, "", for_good=True)))
        doors.open("intruded")

    assignment = assign_counts("foreign", hold=held_until(doors, "intruded", rows=2), nan_at=3)
    outcome = run(assignment, once(2, intrude))
    refused = [event.detail for event in outcome.events if event.kind == "refused"]
    assert Refusal.NOT_FINITE in refused
    assert verdicts == {Verdict.REFUSED}
    assert refusals == [Refusal.RUN, Refusal.CHECKSUM, Refusal.SHAPE]
    assert each_sample_once_an_epoch(outcome)
