"""Calls that go wrong in a worker, to stand in for an op's own."""

import dataclasses
import os
import signal
import threading
import time

import torch


def fail(*args, **kwargs):
    raise ArithmeticError("the numbers are off")


def kill_self(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*args, **kwargs):
    time.sleep(600)


def leave(*args, **kwargs):
    os._exit(5)


_MEETING = threading.Barrier(2)


def meet(*args, **kwargs):
    """A tensor once two calls are at this point in one process, each with one intra-op thread."""
    assert torch.get_num_threads() == 1
    assert (torch.full((4,), 1e-38) * 0.01 == 0).all(), "denormals count"
    _MEETING.wait(timeout=60)
    return torch.ones(4)


def count_threads(*args, **kwargs):
    """Four times how many threads an op of this thread has."""
    return torch.full((4,), float(torch.get_num_threads()))


def with_fault(captured, op, fault):
    """The captured network, with `fault` in place of what the op calls."""
    calls = list(captured.program.calls)
    calls[op] = dataclasses.replace(calls[op], target=fault)
    program = dataclasses.replace(captured.program, calls=tuple(calls))
    return dataclasses.replace(captured, program=program)
