"""Real processes, really killed. `count`'s center says how often each sample was committed."""

import gc
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import (
    DivergedError,
    NoWorkersError,
    ProcessDiedError,
    ProcessError,
    ServerLostError,
    UsageError,
)
from dovetail.runtime.forking import SWITCH, end_fork_server, fork_server, start_fork_server
from dovetail.training.backends.contract import FailurePolicy, Storage, Watcher
from dovetail.training.backends.processes import run, transport
from dovetail.training.backends.processes.transport import (
    SERVER,
    ProcessesOptions,
    ProcessesTransport,
)
from dovetail.training.supervisor import Stop
from tests.support.doors import Doors
from tests.support.faulty_server_process import LIVES
from tests.support.named_memory import named_memory
from tests.support.process_learners import Counting, Long, Sitting, assign, count
from tests.support.server_faults import CRASH_POINTS, Lives

pytestmark = pytest.mark.filterwarnings("error")


def children():
    """Our processes, by id: what they run."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(") ", 1)[1].split()
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found[int(path.parent.name)] = path.with_name("cmdline").read_text()
        except OSError:
            continue
    ours = ("backends.processes", "faulty_server_process")
    return {pid: line for pid, line in found.items() if any(name in line for name in ours)}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()  # what an earlier test's error still held
    files, shared = len(os.listdir("/proc/self/fd")), named_memory()
    yield
    assert children() == {}
    assert len(os.listdir("/proc/self/fd")) <= files
    assert named_memory() == shared
    assert list(tmp_path.glob("dovetail-*")) == []


@pytest.fixture
def doors(tmp_path):
    return Doors(tmp_path)


@pytest.fixture
def dying(tmp_path, monkeypatch):
    """Has each life of the server end at a (crash point, count) of its own."""

    def ends(*crashes):
        Lives(tmp_path / "lives.json", crashes)
        monkeypatch.setenv(LIVES, str(tmp_path / "lives.json"))
        monkeypatch.setattr(transport, "SERVER_ENTRY", "tests.support.faulty_server_process:serve")

    return ends


class Killer:
    """Kills a worker, any, each time so many more commits were made; nobody goes on before that.
    The first time both workers have made some."""

    def __init__(self, doors, *plan, seed=5):
        self.doors, self.plan, self.rng = doors, plan, np.random.default_rng(seed)
        self.commits = self.kills = 0
        self.workers = set()

    def hold(self):
        """Of commits of 8 samples."""
        doors, plan = self.doors, self.plan

        def hold(worker, committed):
            doors.meet("begun", worker, of=2)
            for kill, commits in enumerate(plan):
                if committed >= 8 * commits:
                    doors.wait(f"killed-{kill}")

        return hold

    def rows(self, rows):
        self.commits += len(rows)
        self.workers |= {row.worker for row in rows}
        due = self.kills < len(self.plan) and self.commits >= self.plan[self.kills]
        if due and self.workers == {0, 1}:
            alive = [pid for pid, line in children().items() if "processes.worker" in line]
            os.kill(alive[self.rng.integers(len(alive))], signal.SIGKILL)
            self.doors.open(f"killed-{self.kills}")
            self.kills += 1


def kinds(outcome):
    return [event.kind for event in outcome.events]


def test_killed_workers_lose_nothing_and_every_sample_counts_exactly_once(doors):
    killer = Killer(doors, 2, 17, 40)
    outcome = run(count(240, epochs=2, hold=killer.hold()), Watcher(rows=killer.rows))
    assert killer.kills == 3
    assert (outcome.theta == 2).all()
    assert outcome.samples == sum(row.samples for row in outcome.rows) == 480
    assert 1 <= kinds(outcome).count("lost") <= 3  # one may die before it has joined
    assert {row.worker for row in outcome.rows} == {0, 1}


def test_others_do_the_work_of_a_worker_that_stays_away():
    def learner(worker):
        return Counting(40, 0.05) if worker else Sitting("kill", 2, samples=40, size=40)

    policy = FailurePolicy(worker_restarts=1, worker_losses=1)
    outcome = run(assign(learner=learner, samples=40, size=40, policy=policy), Watcher())
    assert (outcome.theta == 2).all()
    assert {row.worker for row in outcome.rows} == {1}
    details = {event.detail for event in outcome.events if event.kind == "lost"}
    assert details <= {"killed by SIGKILL", "its link broke"}


def test_a_policy_that_allows_no_death_ends_the_run():
    policy = FailurePolicy(worker_restarts=1)
    learner = lambda worker: Sitting("kill", 2)  # noqa: E731
    with pytest.raises(NoWorkersError) as raised:
        run(assign(learner=learner, policy=policy), Watcher())
    assert (raised.value.lost, raised.value.status) == (2, "killed by SIGKILL")


def test_an_exception_in_a_worker_ends_the_run_with_its_traceback():
    learner = lambda worker: Sitting("raise", 3)  # noqa: E731
    with pytest.raises(ProcessError) as raised:
        run(assign(learner=learner), Watcher())
    assert re.fullmatch("worker [01]", raised.value.process)
    assert "ValueError: the data are gone" in raised.value.traceback
    assert "process_learners.py" in raised.value.traceback


def test_exceptions_that_the_policy_allows_count_as_deaths_and_the_first_is_kept():
    def learner(worker):
        return Sitting("raise", 2 if worker else 10**9)

    policy = FailurePolicy(worker_errors=2, worker_restarts=1, worker_losses=1)
    outcome = run(assign(learner=learner, policy=policy), Watcher())
    assert outcome.samples == 128
    assert {row.worker for row in outcome.rows} == {0}


def numbers(outcome):
    """What each commit counted as. Whoever says a turn again may pull a newer center than the one
    it was not answered with, so staleness may differ."""
    return [(r.clock, r.worker, r.sequence, r.steps, r.samples) for r in outcome.rows]


def test_a_server_killed_at_every_point_of_a_commit_loses_none_and_applies_none_twice(
    tmp_path, dying
):
    """One life after the other ends at the next point; the order of turns is forced."""
    order = tuple(np.random.default_rng(1).permutation(np.repeat([0, 1], 40)).tolist())
    storage = Storage(tmp_path / "run", snapshot_commits=5)
    policy = FailurePolicy(server_restarts=len(CRASH_POINTS))
    common = {"order": order, "epochs": 8, "samples": 64}
    expected = run(count(**common), Watcher())
    dying(*((point, 1 if point[0] == "s" else 4) for point in CRASH_POINTS))
    disturbed = run(count(storage=storage, policy=policy, **common), Watcher())
    assert disturbed.meta["server_restarts"] == len(CRASH_POINTS)
    assert (disturbed.theta == 8).all()
    assert disturbed.theta.tobytes() == expected.theta.tobytes()
    assert disturbed.samples == expected.samples == 8 * 64
    assert numbers(disturbed) == numbers(expected)
    assert "lost" not in kinds(disturbed)


def test_a_run_without_a_folder_survives_its_server_and_a_worker_with_it(doors, dying):
    dying(("applied", 14), ("received", 9))
    killer = Killer(doors, 8)
    outcome = run(count(120, hold=killer.hold()), Watcher(rows=killer.rows))
    assert (outcome.theta == 2).all()
    assert kinds(outcome).count("server_restarted") == 2
    assert killer.kills == 1


def test_a_server_that_dies_too_often_ends_the_run(dying):
    dying(("applied", 2), ("applied", 2))
    with pytest.raises(ServerLostError) as raised:
        run(count(policy=FailurePolicy(server_restarts=1)), Watcher())
    assert (raised.value.restarts, raised.value.status) == (1, "killed by SIGKILL")


@pytest.mark.parametrize("answers", [5, 10])
def test_what_a_server_without_a_log_has_lost_is_trained_again(answers, tmp_path, dying):
    """The first snapshot knows no worker; the tenth answer is to the only worker's leaving."""
    assignment = count(60, workers=1, epochs=1, storage=Storage(tmp_path, log=False), seconds=0.002)
    dying(("answered", answers))
    outcome = run(assignment, Watcher())
    assert outcome.meta["server_restarts"] == 1
    assert (outcome.theta == 1).all()
    assert sum(row.samples for row in outcome.rows) == 60


class Waker:
    """Stops worker 1 after its first commit, and wakes it once that was noticed. It goes no further
    before it was stopped, nor does worker 0 before it is back."""

    def __init__(self, doors):
        self.doors, self.pid = doors, None
        self.stopped = self.lost = False

    def hold(self):
        doors = self.doors

        def hold(worker, committed):
            doors.meet("begun", worker, of=2)
            if committed >= 8:  # a commit, or two
                doors.wait("stopped" if worker == 1 else "back")

        return hold

    def event(self, event):
        if event.worker == 1 and event.kind in ("joined", "restarted"):
            self.pid = int(re.search(r"process (\d+)|$", event.detail)[1] or self.pid)
        if event.worker == 1 and event.kind == "lost":
            self.lost = event.seconds
            os.kill(self.pid, signal.SIGCONT)

    def rows(self, rows):
        told = [row.seconds for row in rows if row.worker == 1]
        if told and not self.stopped:
            self.stop()
        if self.lost and told and told[-1] > self.lost:
            self.doors.open("back")

    def stop(self):
        os.kill(self.pid, signal.SIGSTOP)
        self.doors.open("stopped")
        self.stopped = True


def test_a_servers_death_is_told_once_however_much_it_was_still_to_be_told():
    with ProcessesTransport(count(8, workers=1), ProcessesOptions(), None) as processes:
        processes.start_server()
        assert [number for number, _ in processes.wait(60.0)] == [SERVER]  # it is ready
        processes.kill(SERVER)
        while not processes._errors:  # the first words to a dead process may still be taken
            processes.tell(Stop("it is dead"))
        processes.tell(Stop("it is dead"))
        told = processes.wait(0.0) + processes.wait(0.0)
    assert [type(word) for _, word in told] == [ProcessDiedError]


def test_a_server_whose_fork_server_dies_leaves_the_log_to_the_next(monkeypatch, tmp_path):
    monkeypatch.delenv(SWITCH, raising=False)
    start_fork_server()
    folder = tmp_path / "state"
    try:
        storage = Storage(folder, snapshot_commits=4)
        with ProcessesTransport(count(8, workers=1), ProcessesOptions(), storage) as processes:
            processes.start_server()
            assert [number for number, _ in processes.wait(60.0)] == [SERVER]  # it is ready
            os.kill(fork_server()._process.pid, signal.SIGKILL)
            ((_, error),) = processes.wait(60.0)
            assert isinstance(error, ProcessDiedError)
            assert list(folder.iterdir())
    finally:
        end_fork_server()


def test_a_run_that_keeps_nothing_ends_with_its_server(dying):
    dying(("applied", 2))
    with pytest.raises(ServerLostError) as raised:
        run(count(), Watcher(), log=False)
    assert raised.value.restarts == 0


def test_a_hung_worker_is_noticed_by_its_lease_and_may_come_back(doors):
    waker = Waker(doors)
    assignment = count(80, hold=waker.hold(), policy=FailurePolicy(lease_seconds=1.0))
    outcome = run(assignment, Watcher(rows=waker.rows, event=waker.event))
    assert waker.stopped
    assert (outcome.theta == 2).all()
    lost = next(event for event in outcome.events if event.kind == "lost" and event.worker == 1)
    assert lost.detail.startswith("no sign of life for ")
    after = [row for row in outcome.rows if row.seconds > lost.seconds]
    assert {row.worker for row in after} == {0, 1}
    refused = [event.detail for event in outcome.events if event.kind == "refused"]
    assert set(refused) <= {"lease not held"}


class ServersKiller(Waker):
    """Kills the server as well."""

    def stop(self):
        super().stop()
        (server,) = [pid for pid, line in children().items() if "processes.server" in line]
        os.kill(server, signal.SIGKILL)


def test_a_worker_that_hangs_when_its_server_dies_is_noticed_by_the_next_one(doors):
    killer = ServersKiller(doors)
    assignment = count(80, hold=killer.hold(), policy=FailurePolicy(lease_seconds=2.0))
    outcome = run(assignment, Watcher(rows=killer.rows, event=killer.event))
    assert killer.stopped
    assert (outcome.theta == 2).all()
    assert kinds(outcome).count("server_restarted") == 1
    lost = [event for event in outcome.events if event.kind == "lost"]
    assert [(event.worker, event.detail[:15]) for event in lost] == [(1, "no sign of life")]


def test_workers_that_all_hang_are_killed_and_replaced():
    learner = lambda worker: Sitting("stop", 3)  # noqa: E731
    policy = FailurePolicy(lease_seconds=0.3, worker_restarts=1)
    with pytest.raises(NoWorkersError) as raised:
        run(assign(learner=learner, workers=1, policy=policy), Watcher())
    assert raised.value.lost == 2


def test_long_irregular_workers_are_not_judged_by_their_commits():
    """A window, or a step, takes several times the lease's seconds; only signs of life count."""
    assignment = assign(
        learner=lambda worker: Counting(60, 0.3) if worker else Long(60),
        samples=60,
        size=60,
        window=8,
        batch=3,
        epochs=1,
        policy=FailurePolicy(lease_seconds=1.0),
    )
    outcome = run(assignment, Watcher(every_samples=24, evaluate=lambda *_: {}, should_stop=bool))
    assert not {"lost", "refused", "restarted"} & set(kinds(outcome))
    assert max(row.end_seconds - row.begin_seconds for row in outcome.rows) > 2


def test_refusals_beyond_the_policy_are_divergence():
    def learner(worker):
        found = Counting(60)
        found.update = lambda theta, gradient, epoch: gradient * np.float32(np.nan)
        return found

    assignment = assign(learner=learner, samples=60, size=60, policy=FailurePolicy(refusals=4))
    with pytest.raises(DivergedError) as raised:
        run(assignment, Watcher())
    assert raised.value.rule == "downpour"
    assert raised.value.detail == "5 commits were refused, the last one as not finite"


def test_an_unknown_option_is_named():
    with pytest.raises(UsageError) as raised:
        run(count(), Watcher(), colour="red")
    assert raised.value.option == "colour"


def test_an_interrupted_run_keeps_what_it_has():
    def interrupt(rows):
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    pressed = []
    outcome = run(count(60, epochs=10**6), Watcher(rows=interrupt))
    assert outcome.stopped
    assert outcome.samples == sum(row.samples for row in outcome.rows) == outcome.theta.sum() > 0
    assert ("stopped", "interrupted") in {(e.kind, e.detail) for e in outcome.events}


def test_a_failing_watcher_ends_the_run():
    def fail(rows):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(count(), Watcher(rows=fail))
