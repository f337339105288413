"""Runs and times calls: pinned worker processes, shared memory, waiting on it, and timers.

The package knows callables and arrays only. This file imports nothing but the standard library,
because a worker passes through it before it is told what to import.
"""

from dovetail.runtime.processes import Worker, launch
from dovetail.runtime.timers import Timing, clock, time_call

__all__ = ["Timing", "Worker", "clock", "launch", "time_call"]
