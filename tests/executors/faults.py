"""Calls that go wrong in a worker, to stand in for an op's own."""

import dataclasses
import os
import signal
import time


def fail(*args, **kwargs):
    raise ArithmeticError("the numbers are off")


def kill_self(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*args, **kwargs):
    time.sleep(600)


def leave(*args, **kwargs):
    os._exit(5)


def with_fault(captured, op, fault):
    """The captured network, with `fault` in place of what the op calls."""
    calls = list(captured.program.calls)
    calls[op] = dataclasses.replace(calls[op], target=fault)
    program = dataclasses.replace(captured.program, calls=tuple(calls))
    return dataclasses.replace(captured, program=program)
