"""Whatever fails, the caller learns the device and the op, and nothing is left behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from dovetail.errors import RunError, WorkerDiedError, WorkerError
from dovetail.executors import Workers, run
from dovetail.frontends import SGD, capture
from tests.support import faults, forked
from tests.support.checked_models import Wrapped, normal
from tests.support.ending import gone
from tests.support.named_memory import named_memory
from tests.support.placing import plan_for, two_devices
from tests.support.plain_steps import plain_steps

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def workers(forked_workers):
    """The processes of two devices. Those of other modules are not forked, and outlive these."""
    with Workers(two_devices()) as started:
        yield started


def captured_pair(fault=None):
    """relu on device 0, then exp on device 1; `fault` stands in for relu."""

    class Pair(nn.Module):
        def forward(self, x):
            return x.relu().exp()

    captured = capture(Pair(), torch.ones(2))
    relu = captured.graph.kinds.index("aten.relu")
    if fault is not None:
        captured = faults.with_fault(captured, relu, fault)
    placement = [1 if kind == "aten.exp" else 0 for kind in captured.graph.kinds]
    return captured, plan_for(captured, placement), captured.graph.names[relu]


def shared_blocks():
    return Path("/proc/self/maps").read_text().count("memfd:dovetail")


def test_an_op_that_raises_is_named_and_frees_the_other_device(workers):
    captured, plan, op = captured_pair(faults.fail)
    before = shared_blocks()
    with run(plan, captured, workers=workers) as placed:
        with pytest.raises(WorkerError, match="the numbers are off") as raised:
            placed.step(torch.ones(2))
        assert (raised.value.device, raised.value.op) == ("cpu0", op)
        assert "in fail" in raised.value.traceback
        with pytest.raises(RunError, match="closed: a step failed"):
            placed.step(torch.ones(2))
    del placed, raised
    assert shared_blocks() == before


def test_a_model_that_checks_data_runs_on_two_devices_and_its_error_is_told(workers, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    module, x = Wrapped(normal), torch.randn(2, 3)
    captured = capture(Wrapped(normal), x, train=SGD(0.01))
    placement = [int("check" in kind or "_is_all" in kind) for kind in captured.graph.kinds]
    optimizer = torch.optim.SGD(module.parameters(), 0.01, foreach=False)
    with run(plan_for(captured, placement), captured, workers=workers) as placed:
        for loss in plain_steps(optimizer, lambda: module(x), 3):
            torch.testing.assert_close(placed.step(x), loss)
        with pytest.raises(WorkerError, match="Expected parameter loc") as raised:
            placed.step(x * float("nan"))
    assert raised.value.said.startswith("ValueError: Expected parameter loc")
    assert "check" in raised.value.op


def test_a_run_that_nobody_holds_ends_its_processes():
    captured, plan, _ = captured_pair()
    placed = run(plan, captured)
    pids = placed.workers.pids
    assert torch.equal(placed.step(torch.ones(2)), torch.ones(2).exp())
    del placed
    gc.collect()
    assert len(pids) == 2
    assert all(map(gone, pids))


def test_borrowed_workers_go_on_after_an_op_raised(workers):
    captured, plan, _ = captured_pair(faults.fail)
    with run(plan, captured, workers=workers) as placed, pytest.raises(WorkerError):
        placed.step(torch.ones(2))
    captured, plan, _ = captured_pair()
    with run(plan, captured, workers=workers) as placed:
        assert torch.equal(placed.step(torch.ones(2)), torch.ones(2).exp())


@pytest.mark.parametrize(
    ("fault", "status"), [(faults.kill_self, "killed by SIGKILL"), (faults.leave, "exit status 5")]
)
def test_a_device_that_dies_in_an_op_is_named_and_nothing_is_left(fault, status):
    captured, plan, op = captured_pair(fault)
    names, blocks = named_memory(), shared_blocks()
    files = len(os.listdir("/proc/self/fd"))
    with Workers(two_devices()) as workers, run(plan, captured, workers=workers) as placed:
        pids = workers.start((0, 1)) and workers.pids
        assert not set().union(*map(named_memory, pids))
        with pytest.raises(WorkerDiedError) as raised:
            placed.step(torch.ones(2))
    error = raised.value
    assert (error.device, error.op, error.status) == ("cpu0", op, status)
    assert all(map(gone, pids))
    assert named_memory() <= names
    del placed, raised, error
    assert shared_blocks() == blocks
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_device_that_was_killed_between_steps_is_reported_at_the_next():
    captured, plan, _ = captured_pair()
    with run(plan, captured) as placed:
        placed.step(torch.ones(2))
        victim = placed.workers.pids[1]
        os.kill(victim, signal.SIGKILL)
        assert gone(victim)
        with pytest.raises(WorkerDiedError, match="between steps") as raised:
            placed.step(torch.ones(2))
        assert raised.value.device == "cpu1"
        assert all(map(gone, placed.workers.pids))
        with pytest.raises(RunError, match="closed"):
            placed.step(torch.ones(2))


SCRIPT = textwrap.dedent("""
    import torch
    from tests.support import faults
    from tests.executors.test_failures import captured_pair
    from dovetail.executors import run
    captured, plan, _ = captured_pair(faults.hang)
    placed = run(plan, captured)
    print(*placed.workers.pids, flush=True)
    placed.step(torch.ones(2))
""")


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_no_device_outlives_a_caller_killed_in_a_step(kill, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # Devices are bound to their caller, or to a server that forks them and is bound to the caller.
    forks = kill == signal.SIGINT
    parent = forked.start(["-c", SCRIPT], cwd=tmp_path, env=environment, forks=forks)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not set().union(*map(named_memory, (parent.pid, *pids)))
    while parent.poll() is None:
        parent.send_signal(kill)  # again: Python drops an interrupt that lands in a callback
        with suppress(subprocess.TimeoutExpired):
            parent.wait(25)
    _, errors = parent.communicate()
    assert all(map(gone, pids))
    assert errors.count("Traceback") == (1 if kill == signal.SIGINT else 0)
