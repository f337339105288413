"""The supervisor over a transport that says the words of a script; and the clock of leases."""

import math

import numpy as np
import pytest

from dovetail.errors import DivergedError, NoWorkersError, ProcessError, ServerLostError
from dovetail.training.backends.contract import Assignment, FailurePolicy, Watcher
from dovetail.training.liveness import LeaseClock
from dovetail.training.records import Event, Job
from dovetail.training.rules import make_rule
from dovetail.training.supervisor import (
    CenterCopy,
    Gone,
    RunEnded,
    ServerEnded,
    ServerReport,
    ServerUp,
    Stop,
    Supervisor,
    WorkerDied,
    WorkerFinished,
    WorkerRaised,
)


class Script:
    """A transport that says one word a turn, and keeps what it was asked."""

    name, mercy_seconds, interruptible = "script", 0.0, False

    def __init__(self, *words, server_restarts=0):
        self.words, self.server_restarts = list(words), server_restarts
        self.asked = []

    def start_server(self, died=None):
        self.asked.append(("server", died))

    def start_worker(self, worker):
        self.asked.append(("worker", worker))

    def kill_workers(self, workers):
        self.asked.append(("kill", *sorted(workers)))

    def tell(self, message):
        self.asked.append(message)

    def turn(self, progress):
        yield self.words.pop(0)

    def facts(self):
        return {"fact": 1}


START = [("server", None), ("worker", 0), ("worker", 1)]
FINAL = CenterCopy(np.ones(2, np.float32), 4, 8, 1.0, final=True)
DONE = ServerReport((0, 0), (0, 0), done=True)


def supervise(*words, policy=None, watcher=None, restarts=0, **options):
    """(the outcome, what the transport was asked beside the start)."""
    job = Job("r", 2, 8, 1, 2, 1, 2)
    assignment = Assignment(
        job, make_rule("downpour"), np.zeros(2, np.float32), None, policy=policy or FailurePolicy()
    )
    script = Script(*words, server_restarts=restarts)
    outcome = Supervisor(assignment, watcher or Watcher(), script, **options).run()
    assert script.words == []
    assert script.asked[:3] == START
    return outcome, script.asked[3:]


def refused(reason, count):
    events = tuple(Event("refused", 0, 0.0, reason) for _ in range(count))
    return ServerReport((0, 0), (0, count), events=events)


def test_a_run_ends_once_all_is_reported_and_its_workers_have_finished():
    outcome, asked = supervise(
        ServerUp(0, 0, False), DONE, FINAL, WorkerFinished(0), WorkerFinished(1)
    )
    assert asked == []
    assert (outcome.theta.tolist(), outcome.samples, outcome.stopped) == ([1.0, 1.0], 8, False)
    assert (outcome.meta["backend"], outcome.meta["fact"]) == ("script", 1)


def test_dead_workers_are_replaced_then_missed_and_then_the_run_ends():
    policy = FailurePolicy(worker_restarts=1, worker_losses=1)
    died = WorkerDied(0, "killed"), WorkerDied(1, "killed")
    outcome, asked = supervise(*died, RunEnded(FINAL), policy=policy)
    assert asked == [Gone(0, "killed"), ("worker", 0), Gone(1, "killed", for_good=True)]
    assert outcome.meta["worker_deaths"] == 2
    with pytest.raises(NoWorkersError) as caught:
        supervise(*died, WorkerDied(0, "again"), policy=policy)
    assert (caught.value.lost, caught.value.status) == (3, "again")


def test_nobodys_death_matters_once_every_sample_was_seen():
    _, asked = supervise(DONE, FINAL, WorkerDied(0, ""), WorkerDied(1, ""))
    assert asked == []


def test_an_exception_is_a_bug_unless_the_policy_calls_it_a_death():
    first, second = ProcessError("worker 0", "first"), ProcessError("worker 1", "second")
    raised = WorkerRaised(0, first), WorkerDied(0, "first"), WorkerRaised(1, second)
    with pytest.raises(ProcessError) as caught:
        supervise(*raised, policy=FailurePolicy(worker_errors=1))
    assert caught.value is first
    supervise(*raised, RunEnded(FINAL), policy=FailurePolicy(worker_errors=2))


def test_a_dead_server_is_replaced_and_told_what_its_log_may_not_know():
    policy = FailurePolicy(worker_restarts=0, worker_losses=1)
    stops = Watcher(every_samples=2, evaluate=lambda *_: {}, should_stop=lambda _: True)
    copy = CenterCopy(np.ones(2, np.float32), 1, 2, 0.5)
    words = [
        ServerUp(0, 0, False), WorkerDied(1, "killed"), copy, ServerEnded("killed"),
        ServerUp(0, 0, False), RunEnded(FINAL),
    ]  # fmt: skip
    outcome, asked = supervise(*words, policy=policy, watcher=stops, restarts=1)
    stop = Stop("by the watcher")
    lost = Gone(1, "lost", for_good=True)
    assert asked[1:] == [stop, ("server", "killed"), lost, stop]
    assert outcome.stopped
    with pytest.raises(ServerLostError):
        supervise(ServerUp(0, 0, False), ServerEnded("killed"))


def test_workers_that_had_finished_begin_again_if_the_server_has_lost_what_they_did():
    lost_it = WorkerFinished(0), ServerEnded("killed"), ServerUp(0, 0, False), RunEnded(FINAL)
    assert supervise(*lost_it, restarts=1)[1] == [("server", "killed"), ("worker", 0)]


def test_refusals_beyond_the_policy_end_the_run_but_for_lost_leases():
    policy = FailurePolicy(refusals=2)
    supervise(refused("lease not held", 9), RunEnded(FINAL), policy=policy)
    supervise(refused("not finite", 2), RunEnded(FINAL), policy=policy)
    with pytest.raises(DivergedError, match="3 commits were refused, the last one as not finite"):
        supervise(refused("not finite", 3), policy=policy)


def test_hung_workers_are_killed_where_nobody_else_is_left_and_once_each():
    def silent(*workers):
        return ServerReport((0, 0), (0, 0), silent=workers)

    _, asked = supervise(silent(0), silent(0, 1), silent(0, 1), RunEnded(FINAL))
    assert asked == [("kill", 0, 1)]


def test_another_worker_joins_each_time_the_center_has_seen_so_many_samples():
    report = ServerReport((0, 0), (0, 0), samples=5)
    assert supervise(report, RunEnded(FINAL), late=[9, 4])[1] == [("worker", 2)]


def test_a_worker_is_hung_when_its_lease_has_run_out_while_it_computes():
    clock = LeaseClock(10.0)
    clock.start(0, 0.0)
    clock.start(1, 0.0)
    clock.stop(1)  # it waits for an answer
    clock.beat(1, 5.0)
    assert clock.due_seconds() == 10.0
    assert clock.overdue(10.0) == {}
    assert clock.overdue(12.0) == {0: 12.0}
    assert (clock.overdue(30.0), clock.silent, clock.due_seconds()) == ({}, {0}, math.inf)


def test_a_worker_in_doubt_gets_time_from_when_its_silence_was_noticed():
    clock = LeaseClock(10.0, doubt_seconds=2.0)
    clock.start(0, 0.0)
    clock.start(1, 0.0)
    assert clock.overdue(50.0) == {}
    clock.start(1, 51.0)
    assert clock.due_seconds() == 52.0
    assert clock.overdue(52.0) == {0: 52.0}
    assert clock.left_seconds(1, 52.0) == 9.0
