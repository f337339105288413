"""What is left of a run when the caller's own process ends, one way or another."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

from tests.support.named_memory import named_memory

ROOT = str(Path(__file__).parents[3])

# No `if __name__ == "__main__"`, as users' scripts have none; its class is the script's own.
SCRIPT = textwrap.dedent("""
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    sys.path.insert(0, {root!r})
    from tests.support.process_learners import Counting, assign
    from dovetail.training.backends.contract import Watcher
    from dovetail.training.backends.processes import run

    class Mine(Counting):
        def gradient(self, theta, indices, epoch):
            if {fails} and theta.sum() > 20:
                raise ValueError("mine went wrong")
            return super().gradient(theta, indices, epoch)

    def tell(rows):
        if not told:
            told.append(True)
            print("training", flush=True)

    told = []
    outcome = run(
        assign(learner=lambda worker: Mine(60, .01), samples=60, size=60, epochs={epochs}),
        Watcher(rows=tell),
    )
    print(int(outcome.theta.sum()), outcome.samples, outcome.stopped)
""")


def start(folder, *, epochs=10**6, fails=False):
    script = folder / "script.py"
    script.write_text(SCRIPT.format(root=ROOT, epochs=epochs, fails=fails))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )


def family(pid):
    """Process ids of the children of `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rsplit(") ", 1)[1].split()[1]) == pid:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "Z"
    except OSError:
        return True


def soon(is_so):
    """Wait until it is so; a test that hangs here fails by pytest's own limit."""
    while not is_so():
        time.sleep(0.02)


def listening():
    """Inodes of all TCP sockets that listen."""
    lines = []
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        lines += path.read_text().splitlines()[1:] if path.exists() else []
    return {line.split()[9] for line in lines if line.split()[3] == "0A"}


def sockets(pid):
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(path))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def test_a_script_without_a_main_guard_trains(tmp_path):
    out, err = start(tmp_path, epochs=2).communicate()
    assert out.splitlines() == ["training", "120 120 False"], err


def test_a_workers_failure_ends_the_script_with_its_traceback(tmp_path):
    script = start(tmp_path, fails=True)
    out, err = script.communicate()
    assert script.returncode == 1
    assert out in ("", "training\n")
    assert "ValueError: mine went wrong" in err
    assert "ProcessError" in err
    assert list(tmp_path.glob("dovetail-*")) == []


def test_ctrl_c_returns_what_was_reached(tmp_path):
    script = start(tmp_path)
    assert script.stdout.readline() == "training\n"
    script.send_signal(signal.SIGINT)
    out, err = script.communicate()
    total, samples, stopped = out.split()
    assert (total, stopped) == (samples, "True"), err
    assert script.returncode == 0
    assert list(tmp_path.glob("dovetail-*")) == []


def test_a_killed_caller_leaves_no_process_no_folder_and_nothing_listened(tmp_path):
    script = start(tmp_path)
    assert script.stdout.readline() == "training\n"
    processes = family(script.pid)
    assert len(processes) == 3
    assert len(list(tmp_path.glob("dovetail-*"))) == 1
    for pid in (script.pid, *processes):
        assert not sockets(pid) & listening()
        assert not named_memory(pid)
    script.kill()
    script.wait()
    soon(lambda: all(map(is_gone, processes)))
    assert list(tmp_path.glob("dovetail-*")) == []
    script.stdout.close()
    script.stderr.close()
