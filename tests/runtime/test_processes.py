import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dovetail.errors import ProcessDiedError, ProcessError
from dovetail.runtime import launch, processes
from dovetail.runtime.processes import ready
from tests.support.ending import gone


def test_a_worker_answers():
    with launch("tests.support.runtime_entries:echo") as worker:
        for message in (1, "two", {"three": [3]}):
            worker.send(message)
            assert worker.receive() == message


def test_a_worker_is_pinned_before_it_imports_anything():
    core = min(os.sched_getaffinity(0))
    with launch("tests.support.runtime_entries:describe", cores=(core,), threads=1) as worker:
        found = worker.receive()
    assert found["cores"] == {core}
    assert found["threads"] == "1"
    assert found["path"] == sys.path
    assert not found["imported"]
    assert found["interrupt"]


@pytest.mark.parametrize(
    ("threads", "chosen", "spins"), [(2, None, "10000"), (1, None, None), (2, "77", "77")]
)
def test_threads_that_wait_for_each_other_soon_sleep(threads, chosen, spins, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", chosen)
    with launch("tests.support.runtime_entries:describe", threads=threads) as worker:
        assert worker.receive()["spins"] == spins


def test_a_failing_worker_brings_its_traceback():
    with launch("tests.support.runtime_entries:fail", name="cook") as worker:
        worker.send("stones")
        with pytest.raises(ProcessError) as raised:
            worker.receive()
    assert raised.value.process == "cook"
    assert "in fail" in raised.value.traceback
    assert "ValueError: cannot digest stones" in raised.value.traceback


def test_an_entry_that_does_not_exist_is_a_failure_with_its_name():
    with (
        launch("tests.support.runtime_entries:nonsense") as worker,
        pytest.raises(ProcessError, match="nonsense"),
    ):
        worker.receive()


def test_a_core_that_does_not_exist_is_a_failure():
    with (
        launch("tests.support.runtime_entries:echo", cores=(4095,)) as worker,
        pytest.raises(ProcessDiedError),
    ):
        worker.receive()


def test_a_worker_that_leaves_is_reported_with_its_status():
    with launch("tests.support.runtime_entries:leave", name="guest") as worker:
        worker.send("go")
        with pytest.raises(ProcessDiedError) as raised:
            worker.receive()
    assert (raised.value.process, raised.value.status) == ("guest", "exit status 3")


def test_a_killed_worker_is_reported_with_its_signal():
    with launch("tests.support.runtime_entries:sleep") as worker:
        os.kill(worker.receive(), signal.SIGKILL)
        with pytest.raises(ProcessDiedError) as raised:
            worker.receive()
        assert raised.value.status == "killed by SIGKILL"
        with pytest.raises(ProcessDiedError):
            worker.send("anyone there?")


def test_a_reply_that_does_not_come_in_time_is_an_error():
    with launch("tests.support.runtime_entries:echo") as worker, pytest.raises(TimeoutError):
        worker.receive(timeout_seconds=0.01)


def test_leaving_the_context_ends_a_busy_worker():
    with pytest.raises(RuntimeError), launch("tests.support.runtime_entries:sleep") as worker:
        worker.receive()
        raise RuntimeError
    assert gone(worker.pid)


@pytest.fixture
def patient(monkeypatch):
    """Workers that are to end by themselves may take their time over it."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 600.0)


def test_a_worker_whose_reply_nobody_reads_ends_quietly(capfd, patient):
    with launch("tests.support.runtime_entries:echo") as worker:
        worker.send("anything")
        assert ready([worker]) == [worker]
    assert worker._process.returncode == 0  # the channel was reset, not merely closed
    assert capfd.readouterr().err == ""


def test_a_worker_that_fails_when_nobody_listens_ends_quietly(capfd, patient):
    with launch("tests.support.runtime_entries:shout") as worker:
        worker.receive()
    assert worker._process.returncode == 1
    assert capfd.readouterr().err == ""


def test_the_first_of_several_workers_to_answer_is_found():
    with (
        launch("tests.support.runtime_entries:echo") as a,
        launch("tests.support.runtime_entries:echo") as b,
    ):
        b.send("me")
        assert ready([a, b]) == [b]


# The script has no `if __name__ == "__main__"` guard, as users' scripts have none.
SCRIPT = textwrap.dedent("""
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    from dovetail.runtime import launch
    with launch("tests.support.runtime_entries:sleep") as worker:
        print(worker.receive(), flush=True)
        worker.receive()
""")


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent(kill, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.send_signal(kill)
        errors = parent.stderr.read()
    assert gone(pid)
    assert errors.count("Traceback") == (1 if kill == signal.SIGINT else 0)
