"""The server: exactly once, whatever dies; refused commits change nothing; pulls of one version."""

import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import TrainingError
from dovetail.training.backends.contract import Guard, Storage
from dovetail.training.checks import checksum
from dovetail.training.records import Job, Refusal, Turn, Verdict
from dovetail.training.rules import make_rule
from dovetail.training.server import Server
from tests.support.server_faults import CRASH_POINTS, Crash, CrashEvery, faulty_files
from tests.support.serving import SIZE, Worker, finish, job, run, serve, start, state_of

# An asynchronous rule, one that remembers bases, one that gathers, and one with slots and counts.
RULES = ("downpour", "adag", "sync", "async-diloco")


@pytest.fixture(scope="module")
def undisturbed():
    found = {}
    for name in RULES:
        with run(name) as server:
            found[name] = (server.theta.copy(), server.rows, state_of(server))
    return found


@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("name", RULES)
def test_a_server_that_dies_there_again_and_again_ends_where_it_would_have(
    name, point, tmp_path, undisturbed
):
    crash = CrashEvery(point, every=2 if point.startswith("s") else 3)
    storage = Storage(tmp_path / "run", snapshot_commits=4)
    with run(name, storage, crash) as server:
        theta, rows, state = undisturbed[name]
        assert crash.crashes >= 2
        assert server.done
        assert server.theta.tobytes() == theta.tobytes()
        assert state_of(server) == state
        assert repr(server.rows) == repr(rows)
        restarts = [event for event in server.events if event.kind == "server_restarted"]
        # Dying while it comes back counts once; dying before the answer to nothing is lost.
        assert 1 <= len(restarts) <= crash.crashes


def ledger_of(server):
    """The ledger's state but for the number of the next lease, which a resumed server draws."""
    state = server._state.ledger.state()
    del state["leases"]["number"]
    return state


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_server_is_what_it_was(name, tmp_path):
    storage = Storage(tmp_path / "run", snapshot_commits=5)
    with run(name, storage, shards=2) as server:
        before = (state_of(server), ledger_of(server), repr(server.rows))
        events = list(server.events)
    with serve(name, resume=True, storage=storage) as server:
        assert (state_of(server), ledger_of(server), repr(server.rows)) == before
        assert server.events[:-1] == events
        assert server.events[-1].kind == "server_restarted"


def test_time_goes_on_where_it_was(tmp_path):
    storage = Storage(tmp_path / "run")
    run("agn", storage, clock=lambda: 50.0).close()
    with serve("agn", resume=True, storage=storage, clock=lambda: 1.0) as server:
        assert server.events[-1].seconds == 50.0


def test_without_a_log_a_run_falls_back_to_its_last_snapshot(tmp_path):
    storage = Storage(tmp_path / "run", log=False, snapshot_commits=4)
    crash = CrashEvery("applied", every=9, most=1)
    with run("downpour", storage, crash) as server:
        assert server.done
        assert crash.crashes == 1
        assert sum(row.samples for row in server.rows) == 60


def test_a_lock_free_center_that_outlived_its_server_is_kept(tmp_path):
    storage = Storage(tmp_path / "run")
    with run("hogwild", storage) as server:
        rows = server.rows
        assert [row.clock for row in rows] == list(range(1, 31))
    live = np.full(SIZE, 3, np.float32)
    options = {"storage": storage, "clock": lambda: 0.0}
    with Server.resume(job(), make_rule("hogwild"), live, keeps_theta=True, **options) as server:
        assert (server.theta == 3).all()
        assert repr(server.rows) == repr(rows)
    with Server.resume(job(), make_rule("hogwild"), live, **options) as server:
        assert (server.theta == start()).all()


def test_an_evicted_workers_samples_go_to_others_and_it_may_come_back():
    with serve("downpour") as server:
        workers = [Worker(index) for index in range(3)]
        for worker in workers:
            worker.join(server)
        held = server.take(workers[0].turn)[0].reply.lease
        server.evict(0)
        finish(server, workers)
        assert server.done
        assert sum(row.samples for row in server.rows) == 60
        assert held.number not in [lease.number for lease in server._state.ledger.leases.values()]
    kinds = [(event.kind, event.worker) for event in server.events]
    assert kinds == [("joined", 0), ("joined", 1), ("joined", 2), ("lost", 0)]


def test_a_turn_that_a_former_server_left_is_answered_to_nobody(tmp_path):
    """Else its worker, once back, would take that answer for the one to what it asks now."""
    storage, two = Storage(tmp_path / "run"), job(2)
    workers = [Worker(0), Worker(1)]
    with serve("sync", of=two, storage=storage) as server:
        for worker in workers:
            worker.join(server)
        assert server.take(workers[0].turn) == []
        for delivery in server.take(workers[1].turn):
            workers[delivery.worker].answered(delivery)
        assert server.take(workers[0].turn) == []  # it waits for the other one's part of the round
    with serve("sync", of=two, resume=True, storage=storage) as server:
        workers[1].join(server)
        assert [d.worker for d in server.take(workers[1].turn)] == [1]
        workers[0].join(server)
        assert workers[0].sequence == 1
        (delivery,) = server.take(Turn(0, lease=True, pull=True))
        assert (delivery.worker, delivery.reply.clock, delivery.reply.samples) == (0, 1, 4)


# Refused commits


def committed(server, workers=1):
    """A worker with a commit in its inbox, after some rounds that were taken."""
    worker = Worker(0)
    worker.join(server)
    for _ in range(3):
        worker.answered(server.take(worker.turn)[0])
    return worker


def broken(kind, worker):
    """(turn, checksum, vector) of a commit that is wrong in one way."""
    commit, vector, sent = worker.turn.commit, worker.inbox.copy(), None
    match kind:
        case Refusal.RUN:
            commit = replace(commit, run="another")
        case Refusal.LEASE:
            commit = replace(commit, lease=99)
        case "impostor":
            commit = replace(commit, worker=1)
        case Refusal.SEQUENCE:
            commit = replace(commit, sequence=99)
        case Refusal.SHAPE:
            vector = vector[:-1]
        case Refusal.CHECKSUM:
            sent = checksum(vector)
            vector.view(np.uint8)[SIZE // 3] ^= 4
        case Refusal.NORM:
            vector[:] = 1e3
        case "nan":
            vector[SIZE - 1] = np.nan
        case "inf":
            vector[0] = -np.inf
        case "float64":
            vector = vector.astype(np.float64)
    return replace(worker.turn, commit=commit), sent, vector


BROKEN = [(kind, kind) for kind in Refusal if kind is not Refusal.NOT_FINITE]
BROKEN += [
    ("impostor", Refusal.LEASE),
    ("nan", Refusal.NOT_FINITE),
    ("inf", Refusal.NOT_FINITE),
    ("float64", Refusal.SHAPE),
]


@pytest.mark.parametrize(("kind", "refusal"), BROKEN, ids=[str(kind) for kind, _ in BROKEN])
@pytest.mark.parametrize("name", ["adag", "async-diloco"])
def test_a_refused_commit_is_counted_and_changes_nothing(name, kind, refusal, tmp_path):
    storage = Storage(tmp_path / "run")
    guard = Guard(norm_limit=100.0)
    with serve(name, of=job(1), guard=guard, storage=storage) as server:
        worker = committed(server)
        turn, sent, vector = broken(kind, worker)
        before, rows, clock = state_of(server), list(server.rows), server.clock
        turn = replace(turn, pull=False)
        (delivery,) = server.take(turn, sent, vector)
        assert (delivery.reply.verdict, delivery.reply.refusal) == (Verdict.REFUSED, refusal)
        assert state_of(server) == before
        assert (server.rows, server.clock) == (rows, clock)
        assert server.refusals == {refusal: 1}
        assert [(e.worker, e.detail) for e in server.events if e.kind == "refused"] == [
            (0, str(refusal))
        ]
    with serve(name, resume=True, of=job(1), storage=storage) as server:
        assert state_of(server) == before
        assert server.refusals == {refusal: 1}
        worker.join(server)
        assert server.take(worker.turn)[0].reply.verdict is Verdict.APPLIED


def test_a_norm_is_compared_with_the_median_of_the_last_ones():
    guard = Guard(norm_factor=10.0)
    with serve("downpour", of=job(1, samples=60), guard=guard) as server:
        worker = Worker(0)
        worker.join(server)
        worker.answered(server.take(worker.turn)[0])
        verdicts = []
        for size in (1.0, *[100.0, 1.0] * 4, 1.0, 1.0, 9.0, 11.0, 1.0):
            worker.inbox[:] = size
            (delivery,) = server.take(worker.turn)
            verdicts.append(delivery.reply.verdict)
            worker.answered(delivery)
            worker.sequence = server.join(0, worker.inbox, worker.outbox)
            commit = replace(worker.turn.commit, sequence=worker.sequence + 1)
            worker.turn = replace(worker.turn, commit=commit)
        # Ten come first: whatever they are. Then the median is 1.
        assert verdicts[:12] == [Verdict.APPLIED] * 12
        assert verdicts[12:] == [Verdict.REFUSED, Verdict.APPLIED]
        assert server.refusals == {Refusal.NORM: 1}


def test_a_float64_that_cannot_be_squared_is_too_large_and_not_infinite():
    rule, run_job = make_rule("downpour"), Job("r", 4, 10, 1, 1, 1, 1, dtype="float64")
    with Server(run_job, rule, np.zeros(4), clock=lambda: 0.0) as server:
        inbox, outbox = np.full(4, 1e200), np.zeros(4)
        server.join(0, inbox, outbox)
        worker = Worker(0)
        reply = server.take(worker.turn)[0].reply
        (delivery,) = server.take(Turn(0, worker.commit(reply)))
        assert delivery.reply.refusal is Refusal.NORM
        assert (server.theta == 0).all()


def test_a_commit_that_comes_twice_is_answered_twice_and_applied_once():
    with serve("downpour", of=job(1)) as server:
        worker = committed(server)
        first = server.take(worker.turn)[0].reply
        theta = server.theta.copy()
        again = server.take(worker.turn)[0].reply
        assert (first.verdict, again.verdict) == (Verdict.APPLIED, Verdict.DUPLICATE)
        assert again.lease == first.lease
        assert again.clock == first.clock
        assert (server.theta == theta).all()
        assert (worker.outbox == theta).all()
        assert len(server.rows) == first.clock


def test_turns_are_taken_in_the_order_that_is_forced():
    with serve("downpour", order=(2, 0, 1, 1, 0, 2)) as server:
        workers = [Worker(index) for index in range(3)]
        for worker in workers:
            worker.join(server)
        assert server.take(workers[0].turn) == []
        assert server.take(workers[1].turn) == []
        deliveries = server.take(workers[2].turn)
        assert [delivery.worker for delivery in deliveries] == [2, 0, 1]
        for delivery in deliveries:
            workers[delivery.worker].answered(delivery)
        assert server.take(workers[2].turn) == []
        assert server.take(workers[0].turn) == []
        assert [delivery.worker for delivery in server.take(workers[1].turn)] == [1, 0, 2]
        assert [row.worker for row in server.rows] == [1, 0, 2]


# Shards


def test_every_pull_is_one_version_while_shards_work_on_several_commits(monkeypatch):
    monkeypatch.setattr("dovetail.training.center.BLOCK_BYTES", 4 * 64)
    size, workers, windows = 64 * 12 + 5, 4, 25
    run_job = Job("r", size, workers * windows, 1, 1, 1, workers)
    server = Server(
        run_job, make_rule("downpour"), np.zeros(size, np.float32), shards=3, clock=lambda: 0.0
    )
    pulled, failures = [], []

    def work(index):
        inbox, outbox = np.ones(size, np.float32), np.zeros(size, np.float32)
        worker = Worker(index)
        worker.sequence = server.join(index, inbox, outbox)
        turn = worker.turn
        try:
            while True:
                deliveries = server.take(turn)
                (reply,) = [d.reply for d in deliveries if d.worker == index]
                if reply.lease is None:
                    return
                pulled.append((reply.clock, outbox.copy()))
                turn = Turn(index, worker.commit(reply), lease=True, pull=True)
                worker.sequence += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
    for thread in threads:
        thread.start()
    # Who asks when no sample is free waits for the last one, and is told by another's turn.
    for thread in threads:
        thread.join(60)
    with server:
        assert (server.theta == workers * windows).all()
        assert [row.clock for row in server.rows] == list(range(1, workers * windows + 1))
    assert all((center == clock).all() for clock, center in pulled)
    assert all(isinstance(error, ValueError) for error in failures)


def test_a_shards_failure_is_raised_where_its_commit_was_taken(monkeypatch):
    monkeypatch.setattr("dovetail.training.center.BLOCK_BYTES", 4 * 16)
    armed = []

    def apply(part, arrival):
        if armed and part.theta.size < 16:  # the last block, which is the second shard's
            raise ZeroDivisionError("in a shard")

    rule = replace(make_rule("downpour"), apply=apply)
    with Server(job(1), rule, start(), shards=2, clock=lambda: 0.0) as server:
        worker = committed(server)
        armed.append(True)
        with pytest.raises(TrainingError) as caught:
            server.take(worker.turn)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        armed.clear()
        with pytest.raises(TrainingError):  # the shards are of different versions
            server.take(worker.turn)


def test_the_crash_hook_sees_every_point_in_order(tmp_path):
    seen = []
    storage = Storage(tmp_path / "run", snapshot_commits=1)
    with (
        faulty_files(seen.append),
        serve("downpour", of=job(1), storage=storage, crash=seen.append) as server,
    ):
        worker = Worker(0)
        worker.join(server)
        worker.answered(server.take(worker.turn)[0])
        seen.clear()
        server.take(worker.turn)
    first = list(dict.fromkeys(seen))
    assert sorted(first) == sorted(CRASH_POINTS)
    assert first[:5] == ["received", "checked", "journal-half", "journalled", "applied"]
    assert first[-1] == "answered"
    with pytest.raises(Crash):
        CrashEvery("x", every=1)("x")


def test_the_server_needs_no_torch():
    code = (
        "import sys, dovetail.training.server, dovetail.training.wire, dovetail.training.rules\n"
        "from dovetail.training import checks\n"
        "import numpy; checks.check(numpy.ones(100, 'f4'))\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_commit_from_before_a_loss_does_not_count_for_a_lease_of_the_same_number(tmp_path):
    """Without a log a restarted server goes back to its snapshot, and hands out leases again."""
    storage = Storage(tmp_path / "run", log=False)
    with serve("downpour", storage=storage) as server:
        worker = Worker(0)
        worker.join(server)
        worker.answered(server.take(worker.turn)[0])
        late, vector = worker.turn, worker.inbox.copy()
    with serve("downpour", resume=True, storage=storage) as server:
        server.join(0)
        for _ in range(2):
            (answer,) = server.take(late, None, vector)
            assert answer.reply.refusal is Refusal.LEASE
        assert server.samples == 0
