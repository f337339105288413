"""Processes that somebody has stopped are not waited for for ever."""

import gc
import os
import signal
import threading

import pytest

from dovetail.errors import ProcessDiedError
from dovetail.runtime import stopped
from dovetail.runtime.forking import (
    SWITCH,
    ForkedProcess,
    end_fork_server,
    fork_server,
    start_fork_server,
)
from dovetail.runtime.processes import launch, ready
from tests.support.ending import gone

ENTRIES = "tests.support.runtime_entries"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(stopped, "LOOK_SECONDS", 0.05)


@pytest.fixture
def forks(monkeypatch):
    if not hasattr(os, "pidfd_open"):
        pytest.skip("needs Linux 5.3")
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(stopped, "STOPPED_SECONDS", 0.2)
    start_fork_server()
    yield fork_server()._process.pid
    end_fork_server()


def test_a_stopped_worker_is_killed_and_its_end_says_so():
    with launch(f"{ENTRIES}:sleep", name="w", patience_seconds=0.2) as worker:
        os.kill(worker.receive(), signal.SIGSTOP)
        assert ready([worker]) == [worker]
        with pytest.raises(ProcessDiedError) as raised:
            worker.receive()
    assert raised.value.process == "w"
    assert raised.value.status == "killed, as it was stopped for 0.2 s"


def test_a_stopped_worker_that_reads_nothing_more_does_not_block_its_parent():
    with launch(f"{ENTRIES}:sleep", name="w", patience_seconds=0.2) as worker:
        os.kill(worker.receive(), signal.SIGSTOP)
        with pytest.raises(ProcessDiedError, match="stopped"):
            worker.send(bytes(2**24))  # more than the channel holds


@pytest.mark.parametrize(
    ("states", "killed"), [("TTS" * 5 + "Z", 0), ("TTT", 1), ("ttttttZ", 0), ("", 0)]
)
def test_only_looks_in_a_row_at_a_stopped_process_count(monkeypatch, states, killed):
    left, kills, over = list(states), [], threading.Event()

    class Process:
        def kill(self):
            kills.append(over.set())

    process = Process()
    monkeypatch.setattr(stopped, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(stopped, "state_of", lambda _pid: left.pop(0) if left else over.set() or "")
    # Two looks more count for 0.002 s at least, and one for 0.0015 s at most.
    stopped.watch(-1, process.kill, 0.0018)
    thread = stopped._watch.thread
    if "Z" in states:
        thread.join(60)
        assert left == []
    else:
        assert over.wait(60)
        thread.join(60)
    assert len(kills) == killed
    assert not thread.is_alive()


def test_a_worker_that_nobody_holds_ends():
    worker = launch(f"{ENTRIES}:echo")
    pid = worker.pid
    worker.send(1)
    assert worker.receive() == 1
    del worker
    gc.collect()
    assert gone(pid)


def test_a_forked_worker_that_nobody_holds_ends_and_leaves_no_descriptor(forks):
    launch(f"{ENTRIES}:echo").close()
    before = set(os.listdir("/proc/self/fd"))
    worker = launch(f"{ENTRIES}:echo")
    pid = worker.pid
    del worker
    gc.collect()
    assert gone(pid)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_stopped_fork_server_is_replaced_by_processes_of_their_own(forks):
    with launch(f"{ENTRIES}:echo") as worker:
        assert isinstance(worker._process, ForkedProcess)
    os.kill(forks, signal.SIGSTOP)
    with launch(f"{ENTRIES}:echo") as worker:
        assert not isinstance(worker._process, ForkedProcess)
        worker.send(1)
        assert worker.receive() == 1
    assert fork_server() is None


def test_the_end_of_a_worker_whose_fork_server_is_stopped_is_told(forks):
    with launch(f"{ENTRIES}:sleep") as worker:
        pid = worker.receive()
        os.kill(forks, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="SIGKILL"):
            worker.receive()
