"""A cluster of several nodes on one machine, and nodes that are lost."""

from functools import partial

import numpy as np

from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Assignment, Storage, Watcher
from dovetail.training.records import Job
from dovetail.training.rules import make_rule
from tests.support.doors import Doors
from tests.support.ray_runs import SMALL, Digits, accuracy, counted, kinds


def test_digits_are_trained_to_the_end_though_a_workers_node_and_the_servers_are_lost(
    cluster, add_node, tmp_path
):
    lost = {"work": add_node("work"), "server": add_node("server")}
    add_node("work")  # one worker on each, and none elsewhere
    due = [(10, "work"), (60, "server")]
    rows, doors = [], Doors(tmp_path)

    def watch(new):
        rows.extend(new)
        if due and len(rows) >= due[0][0]:
            name = due.pop(0)[1]
            if name == "work":
                add_node("work")  # where the lost worker is started again
            cluster.remove_node(lost[name], allow_graceful=False)

    def hear(event):
        doors.open(event.kind)

    def hold(worker, steps):
        """Of 420 steps in all, two a commit: no life of a worker gets further before the losses
        are made good. The processes of a lost node may outlive it for a while."""
        doors.meet("begun", worker, of=2)
        if steps > 40:
            doors.wait("restarted")
        if steps > 140:
            doors.wait("server_restarted")

    job = Job("nodes", Digits.SIZE, 1400, 6, 20, 2, 2, seed=1)
    start = 0.1 * np.random.default_rng(0).standard_normal(Digits.SIZE)
    assignment = Assignment(
        job,
        make_rule("adag"),
        start.astype(np.float32),
        lambda worker: Digits(partial(hold, worker)),
        storage=Storage(tmp_path / "run", snapshot_commits=50),
    )
    run = load_backend("ray", server_node="server", worker_resources={"work": 1}, **SMALL)
    outcome = run(assignment, Watcher(rows=watch, event=hear))
    assert not due
    assert outcome.samples == counted(outcome) == 6 * 1400
    assert "lost" in kinds(outcome)
    assert kinds(outcome).count("restarted") >= 1  # on the node that was added
    assert "server_restarted" in kinds(outcome)
    assert accuracy(outcome.theta) > 0.85
