"""Starts a worker process: `python child.py DESCRIPTOR PARENT CORES ENTRY PATHS`.

It runs as a file, not as a module, so that nothing (numpy starts threads) is imported before the
process is pinned and bound to its parent's life.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
# glibc's mallopt parameters, and the most that each takes.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MOST_INT, _TOP_PAD_BYTES, _MOST_MMAP_BYTES = 2**31 - 1, 2**26, 2**25


def main(arguments: list[str]) -> int:
    """Serve an object of the class "package.module:Class", or run the function
    "package.module:function" with the channel; return the exit status."""
    descriptor, parent, cores, entry, paths = arguments
    numbers = [int(core) for core in cores.split(",") if core]
    return live(int(descriptor), int(parent), numbers, entry, json.loads(paths))


def live(descriptor: int, parent: int, cores: list[int], entry: str, paths: list[str]) -> int:
    """A worker's life, on these cores ([]: on its parent's); return the exit status."""
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    keep_memory()
    if cores:
        os.sched_setaffinity(0, cores)
    sys.path[:] = paths
    from dovetail.runtime.processes import Channel, Exiting, Failure, serve_calls
    from dovetail.runtime.user_code import exits_noticed, line_of, running_at

    channel = Channel(descriptor)

    def say_where(_status: object) -> None:
        # The process still ends as the user's code wants it to.
        with suppress(ConnectionError):
            channel.send(Exiting(running_at()))

    try:
        module, name = entry.split(":")
        with exits_noticed(say_where):
            target = getattr(importlib.import_module(module), name)
            if isinstance(target, type):
                serve_calls(channel, target)
            else:
                target(channel)
    except EOFError:
        # The parent closed its end, which is the ordinary way to stop a worker.
        return 0
    except BaseException as error:
        # If the parent has closed its end, nobody reads the failure.
        with suppress(ConnectionError):
            channel.send(Failure(traceback.format_exc(), line_of(error)))
        return 1
    return 0


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call above.
    if os.getppid() != parent:
        os._exit(1)


def keep_memory() -> None:
    """Have malloc keep what is freed, as far as it can be told to.

    A step frees and allocates the same sizes over and over, and each fresh page costs a page fault:
    a log-softmax took 29 us with the faults and 15 to 18 without, and five convolutions for a
    batch of images 42 and 22 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # A libc without mallopt has a policy of its own.
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _MOST_INT)
        mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # There is nothing to tear down, and torch would take long over it.
    os._exit(status)
