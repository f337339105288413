"""What a worker process runs first: `python child.py DESCRIPTOR PARENT CORES ENTRY PATHS`.

Run as a file, not as a module, so that nothing (numpy starts threads) is imported before the
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
    """Run the entry function "package.module:function" with the channel; the exit status."""
    descriptor, parent, cores, entry, paths = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _die_with(int(parent))
    _keep_memory()
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    sys.path[:] = json.loads(paths)
    from dovetail.runtime.processes import Channel, Failure

    channel = Channel(int(descriptor))
    try:
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(channel)
    except EOFError:
        return 0  # the parent closed its end: the ordinary way to stop a worker
    except BaseException:
        with suppress(ConnectionError):  # the parent closed its end: nobody asks any more
            channel.send(Failure(traceback.format_exc()))
        return 1
    return 0


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _keep_memory() -> None:
    """Have malloc keep what is freed, as far as it can be told: a step frees and asks for the same
    sizes over and over, and fresh pages cost a fault each (a log-softmax took 29 us; 15 to 18
    without).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # a libc without it has a policy of its own
        mallopt(_M_TRIM_THRESHOLD, _MOST_INT)
        mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # nothing to tear down, and torch takes its time over it
