import os
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
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


SUMS = "tests.support.runtime_entries:Sums"


def test_methods_of_an_object_in_the_process_are_called_in_order():
    with launch(SUMS) as worker:
        assert worker.ask("make", 1) is None
        worker.post("add", 2, 3)
        assert worker.ask("add") == 6
        worker.begin("add", 10)
        worker.begin("add", 100)
        assert (worker.receive(), worker.receive()) == (16, 116)
        assert worker.ask("paused") == 5


def test_a_method_gets_copies_of_open_files_behind_its_arguments(tmp_path):
    with launch(SUMS) as worker, ExitStack() as files:
        worker.post("make", 0)
        opened = []
        for number in (3, 4):
            (tmp_path / str(number)).write_text(str(number))
            opened.append(files.enter_context((tmp_path / str(number)).open()))
        assert worker.ask("add_of", files=[file.fileno() for file in opened]) is None
        assert worker.ask("add") == 7


def test_what_a_method_raises_ends_the_process_though_no_reply_was_wanted():
    with launch(SUMS, name="sums") as worker:
        worker.post("make", 0)
        worker.post("fail", 7)
        worker.begin("add", 1)
        with pytest.raises(ProcessError, match="cannot add 7") as raised:
            worker.receive()
        assert "in fail" in raised.value.traceback
        with pytest.raises(ProcessDiedError):
            worker.ask("add", 1)


@pytest.mark.parametrize("method", ["_secret", "__class__", "is_odd", "make", "nothing"])
def test_nothing_but_public_methods_is_called(method):
    with launch(SUMS) as worker:
        worker.ask("make", 0)
        with pytest.raises(ProcessError, match=f"KeyError: '{method}'"):
            worker.ask(method)


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
