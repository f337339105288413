"""The one serving loop, with ports that are lists and a clock that is set by hand."""

from types import SimpleNamespace

import numpy as np

from dovetail.training.records import Refusal, Turn, Verdict
from dovetail.training.serving import Serving, WorkerPort
from tests.support.serving import SIZE, Worker, job, serve


class Bench:
    """A server of `rule` with a clock, and workers whose answers lie in lists."""

    def __init__(self, rule="downpour", workers=2, restart=None, **options):
        self.clock = SimpleNamespace(now=0.0)
        self.server = serve(rule, of=job(workers), clock=lambda: self.clock.now, **options)
        self.serving = Serving(self.server, 10.0, restart=restart)
        self.workers = [Worker(index) for index in range(workers)]
        self.answers = {index: [] for index in range(workers)}
        self.broken, self.closed, self.beats = set(), [], {}

    def port(self, index):
        def send(delivery):
            self.answers[index].append(delivery.reply)
            if index not in self.broken:
                self.workers[index].answered(delivery)
            return index not in self.broken

        worker = self.workers[index]
        return WorkerPort(
            send,
            worker.inbox,
            worker.outbox,
            count_life=lambda: self.beats.get(index, 0),
            close=lambda: self.closed.append(index),
            detail=f"process {index}",
        )

    def join(self, index, **options):
        return self.serving.join(index, self.port(index), **options)

    def take(self, index):
        self.serving.take(self.workers[index].turn)
        return self.answers[index][-1] if self.answers[index] else None

    def events(self):
        events = self.serving.report((0, 0)).events
        return [(event.kind, event.worker, event.detail) for event in events]


def test_a_turn_is_answered_through_its_workers_port():
    bench = Bench()
    assert bench.join(0) == 0
    first = bench.take(0).lease
    assert bench.take(0).verdict is Verdict.APPLIED
    assert bench.server.holders == (0,)
    assert first.number < bench.answers[0][-1].lease.number
    assert bench.events() == [("joined", 0, "process 0")]


def test_a_worker_that_gives_no_sign_of_life_loses_its_lease_and_may_come_back():
    bench = Bench()
    for index in range(2):
        bench.join(index)
        bench.take(index)
    bench.clock.now, bench.beats[1] = 8.0, 1
    bench.serving.look_for_life()
    bench.clock.now = 12.0
    bench.serving.look_for_life()
    assert bench.serving.report((0, 0)).silent == (0,)
    assert bench.server.holders == (1,)
    assert bench.take(0).refusal is Refusal.LEASE
    assert bench.serving.report((0, 0)).silent == ()
    assert bench.events()[2:] == [
        ("lost", 0, "no sign of life for 12 s"),
        ("restarted", 0, "it woke up"),
        ("refused", 0, "lease not held"),
    ]


def test_the_time_of_a_worker_that_waits_for_its_round_does_not_run():
    bench = Bench("averaging")
    for index in range(2):
        bench.join(index)
        bench.take(index)
    bench.take(0)  # waits for the other
    assert bench.serving.life.computing == (1,)
    bench.clock.now = 100.0
    bench.serving.look_for_life()
    assert bench.serving.report((0, 0)).silent == (1,)
    assert bench.answers[0][-1].verdict is Verdict.APPLIED  # the round goes on without it


def test_a_worker_that_cannot_be_answered_is_lost_and_others_are_answered_instead():
    bench = Bench("averaging", workers=3)
    for index in range(3):
        bench.join(index)
        bench.take(index)
    bench.broken = {1, 2}
    for index in (1, 2, 0):
        bench.take(index)
    assert bench.closed == [1, 2]
    assert set(bench.serving.ports) == {0}
    assert bench.answers[0][-1].verdict is Verdict.APPLIED
    lost = [event for event in bench.events() if event[0] == "lost"]
    assert lost == [("lost", 1, "its link broke"), ("lost", 2, "its link broke")]


def test_a_death_counts_once_and_only_of_a_worker_that_had_joined():
    bench = Bench()
    bench.serving.connect(0, bench.port(0))
    bench.serving.evict(0, "killed")
    assert bench.events() == []
    bench.join(0)
    bench.take(0)
    for detail in ("its link broke", "killed"):
        bench.serving.evict(0, detail)
    assert bench.events() == [("joined", 0, "process 0"), ("lost", 0, "its link broke")]
    assert bench.server.holders == ()
    # Of a server that took over, nobody knows who had joined the one before it.
    after = Bench(restart="killed by SIGKILL")
    after.server.join(0)
    after.serving.connect(0, after.port(0))
    after.serving.evict(0, "killed")
    assert after.events()[-1] == ("lost", 0, "killed")


def test_a_new_process_takes_the_lease_of_the_one_before_it_back():
    bench = Bench()
    bench.join(0)
    held = bench.take(0).lease
    bench.workers[0] = Worker(0)
    bench.join(0, replaces=True)
    again = bench.take(0).lease
    assert (again.start, again.stop) == (held.start, held.stop)
    assert bench.events() == [
        ("joined", 0, "process 0"), ("lost", 0, "replaced"), ("restarted", 0, "process 0"),
    ]  # fmt: skip


def test_what_cannot_be_read_is_refused_and_changes_nothing():
    bench = Bench()
    bench.join(0)
    before = bench.server.theta.copy()
    bench.serving.refuse(0, Refusal.CHECKSUM)
    assert bench.answers[0][-1].refusal is Refusal.CHECKSUM
    assert bench.events()[-1] == ("refused", 0, "wrong checksum")
    assert bench.server.refusals == {Refusal.CHECKSUM: 1}
    assert (bench.server.theta == before).all()


def test_a_run_that_was_ended_at_once_answers_nobody_and_its_ledger_goes_on():
    bench = Bench()
    bench.join(0)
    bench.take(0)
    for _ in range(2):
        bench.serving.end("interrupted")
    answers = len(bench.answers[0])
    bench.take(0)
    assert len(bench.answers[0]) == answers
    assert bench.serving.done and not bench.server.stopped
    assert bench.serving.is_due(10**9)
    assert bench.events()[-1] == ("stopped", -1, "interrupted")


def test_a_run_that_is_stopped_tells_its_workers():
    bench = Bench("averaging")
    for index in range(2):
        bench.join(index)
        bench.take(index)
    bench.take(0)
    bench.serving.stop()
    assert bench.answers[0][-1].stop
    assert bench.take(1).stop


def test_a_server_has_a_center_that_lies_elsewhere():
    """It is handed what came with a commit, and its steps; the server has no vector."""

    class Elsewhere:
        def __init__(self):
            self.tickets, self.seen = 0, []

        def __getattr__(self, name):
            def note(*arguments, **options):
                self.seen.append((name, arguments))

            return note

        def examine(self, received, expected):
            from dovetail.training.center import CommitPayload
            from dovetail.training.checks import Check

            self.seen.append(("examine", (received,)))
            return CommitPayload(np.zeros(2, np.float32), Check(0, 1.0))

        def done(self, ticket):
            return True

        def lost_a_part(self):
            return False

    from dovetail.training.rules import make_rule
    from dovetail.training.server import Server

    center, answers = Elsewhere(), []
    server = Server(job(1), make_rule("downpour"), center, clock=lambda: 0.0)
    serving = Serving(server)
    serving.join(0, WorkerPort(lambda delivery: answers.append(delivery) or True))
    serving.take(Turn(0, lease=True, pull=True))
    worker = Worker(0)
    serving.take(Turn(0, worker.commit(answers[0].reply), lease=True), None, "a key")
    assert answers[1].reply.verdict is Verdict.APPLIED
    assert ("examine", ("a key",)) in center.seen
    assert "execute" in [name for name, _ in center.seen]
    assert len(server.rows) == 1 and job(1).size == SIZE
