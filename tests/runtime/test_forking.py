"""The fork server: its workers are like processes of their own."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from dovetail.errors import ProcessDiedError
from dovetail.runtime.forking import (
    SWITCH,
    ForkedProcess,
    end_fork_server,
    fork_server,
    start_fork_server,
)
from dovetail.runtime.processes import launch

ENTRIES = "tests.support.runtime_entries"
AROUND = f"{ENTRIES}:surroundings"
pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux 5.3")


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    start_fork_server(["torch"])


@pytest.fixture(scope="module", autouse=True)
def _no_server_afterwards():
    yield
    end_fork_server()


def is_forked(worker):
    return isinstance(worker._process, ForkedProcess)


def test_a_worker_has_its_parents_surroundings_of_now(monkeypatch, tmp_path, capfd):
    with launch(f"{ENTRIES}:echo"):
        pass  # the server has begun
    monkeypatch.setenv("DOVETAIL_TEST", "later")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    core = max(os.sched_getaffinity(0))
    with launch(AROUND, cores=(core,)) as worker:
        found = worker.receive()
        assert os.sched_getaffinity(worker.pid) == {core}
        worker.send(None)
    assert found["folder"] == str(tmp_path)
    assert found["environment"]["DOVETAIL_TEST"] == "later"
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    assert "HOME" not in found["environment"]
    assert found["group"] and found["input"] == ""
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split()) == ["heard", "said"]


def test_a_worker_is_forked_from_one_thread_that_has_imported_torch():
    with launch(AROUND) as worker:
        assert is_forked(worker)
        found = worker.receive()
        worker.send(None)
    assert found["torch"] and found["threads"] == 1
    assert found["parent"] == fork_server()._process.pid


def test_workers_draw_numbers_of_their_own_and_keep_no_descriptors():
    drawn, descriptors = set(), set()
    for _ in range(3):
        with launch(AROUND) as worker:
            found = worker.receive()
            worker.send(None)
        drawn.update(found["drawn"])
        descriptors.add(found["descriptors"])
    assert len(drawn) == 6
    assert len(descriptors) == 1


@pytest.mark.parametrize(("how", "said"), [("leave", "exit status 3"), ("kill", "SIGKILL")])
def test_the_status_of_a_worker_is_known(how, said):
    with launch(f"{ENTRIES}:{'leave' if how == 'leave' else 'sleep'}", name="w") as worker:
        assert is_forked(worker)
        if how == "leave":
            worker.send(None)
        else:
            os.kill(worker.receive(), signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match=said):
            worker.receive()


def test_many_workers_end_in_any_order():
    workers = [launch(f"{ENTRIES}:echo") for _ in range(6)]
    sleeper = launch(f"{ENTRIES}:sleep")
    for number, worker in enumerate(workers):
        worker.send(number)
    assert [worker.receive() for worker in workers] == list(range(6))
    sleeper.receive()
    for worker in (sleeper, *workers[::-1]):
        worker.close(kill=worker is sleeper)
    assert sleeper._process.returncode == -signal.SIGKILL
    assert {worker._process.returncode for worker in workers} == {0}


def test_a_server_that_died_takes_its_workers_along_and_is_done_without():
    with launch(f"{ENTRIES}:sleep", name="w") as worker:
        worker.receive()
        before = fork_server()
        os.kill(before._process.pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="SIGKILL"):
            worker.receive()
    with launch(f"{ENTRIES}:echo") as other:
        assert not is_forked(other)
        other.send(1)
        assert other.receive() == 1
    assert fork_server() is None
    start_fork_server()
    with launch(f"{ENTRIES}:echo") as other:
        assert is_forked(other)


def test_workers_of_a_server_that_was_given_up_are_told_as_dead():
    with launch(f"{ENTRIES}:sleep", name="w") as worker:
        worker.receive()
        os.kill(fork_server()._process.pid, signal.SIGKILL)
        with launch(f"{ENTRIES}:echo"):
            assert fork_server() is None
        with pytest.raises(ProcessDiedError, match="SIGKILL"):
            worker.receive()


def test_a_fork_whose_server_died_meanwhile_ends():
    script = f"""
        import os, socket, sys
        from dovetail.runtime import fork_server
        own, other = socket.socketpair()
        server = os.fork()
        if not server:
            os._exit(0)
        os.waitpid(server, 0)
        request = {{"entry": "{ENTRIES}:sleep", "environment": dict(os.environ), "folder": ""}}
        request |= {{"cores": [], "paths": sys.path}}
        if not os.fork():
            fork_server._live(request, other.detach(), os.dup(2), server)
        other.close()
        print(own.recv(1))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=False, timeout=120,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("b''\n", "")


def test_other_threads_and_other_numbers_of_threads_have_processes_of_their_own():
    found = []

    def from_a_thread():
        with launch(f"{ENTRIES}:echo") as worker:
            found.append(is_forked(worker))

    thread = threading.Thread(target=from_a_thread)
    thread.start()
    thread.join()
    with launch(f"{ENTRIES}:echo", threads=2) as worker:
        found.append(is_forked(worker))
    assert found == [False, False]


def test_the_switch(monkeypatch):
    end_fork_server()
    monkeypatch.setenv(SWITCH, "0")
    start_fork_server()
    assert fork_server() is None


def test_what_it_runs_is_seen_from_outside():
    with launch(AROUND) as worker:
        worker.receive()
        assert Path(f"/proc/{worker.pid}/comm").read_text().strip() == "support.runtime"
        worker.send(None)
