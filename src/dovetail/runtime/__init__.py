"""Runtime: pinned worker processes, shared memory, waiting on it, and timing of calls.

Knows callables and arrays only. This file imports nothing but the standard library: a worker
passes through it before it is told what to import.
"""

from dovetail.runtime.processes import Worker, launch
from dovetail.runtime.timers import Timing, clock, time_call

__all__ = ["Timing", "Worker", "clock", "launch", "time_call"]
