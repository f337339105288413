"""Entry functions of the worker processes that the tests start."""

import os
import signal
import sys
import time

import numpy as np

from dovetail.runtime.shared import Block
from dovetail.runtime.waiting import SPIN_NS, address_of, barrier, publish, wait


def echo(channel):
    while True:
        channel.send(channel.receive())


class Sums:
    """Adds up what it is given, and counts its pauses."""

    pauses = 0

    def __init__(self, first):
        self._sum = first

    def add(self, *numbers):
        self._sum += sum(numbers)
        return self._sum

    def add_of(self, *descriptors):
        for descriptor in descriptors:
            with open(descriptor) as file:
                self.add(int(file.read()))

    def fail(self, number):
        raise ValueError(f"cannot add {number}")

    def _secret(self):
        return self._sum

    @property
    def is_odd(self):
        raise AssertionError("it was not asked")

    def pause(self):
        self.pauses += 1

    def paused(self):
        return self.pauses


def describe(channel):
    channel.send(
        {
            "cores": os.sched_getaffinity(0),
            "threads": os.environ["OMP_NUM_THREADS"],
            "spins": os.environ.get("GOMP_SPINCOUNT"),
            "path": sys.path,
            "imported": "torch" in sys.modules,
            "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        }
    )


def surroundings(channel):
    """What a worker has from its parent, and what only a process of its own would have."""
    import random

    print("heard", file=sys.stderr, flush=True)
    print("said", flush=True)
    channel.send(
        {
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "group": os.getpgid(0) == os.getpid(),
            "parent": os.getppid(),
            "threads": int(_status()["Threads"]),
            "input": sys.stdin.read() if sys.stdin else "",
            "drawn": (random.random(), np.random.random()),  # noqa: NPY002  as users draw
            "torch": "torch" in sys.modules,
            "descriptors": len(os.listdir("/proc/self/fd")),
        }
    )
    channel.receive()


def _status():
    with open("/proc/self/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file)


def fail(channel):
    raise ValueError(f"cannot digest {channel.receive()}")


def leave(channel):
    channel.receive()
    os._exit(3)


def sleep(channel):
    channel.send(os.getpid())
    time.sleep(600)


def shout(channel):
    while True:
        channel.send("anyone there?")


def add_one(channel):
    """Add one to every element of the shared array, when told to by flag 0; then set flag 8."""
    block = Block(channel.receive_descriptor())
    values = block.view(1024, (channel.receive(),), np.float64)
    flags = block.view(0, (128,), np.int64)
    wait(address_of(flags, 0), 1, address_of(flags, 16), SPIN_NS)
    values += 1
    publish(address_of(flags, 8), 1)
    channel.receive()


def spin(channel):
    """Wait for what never comes, and tell how it ended."""
    block = Block(channel.receive_descriptor())
    flags = block.view(0, (128,), np.int64)
    channel.send("spinning")
    channel.send(wait(address_of(flags, 0), 1, address_of(flags, 16), SPIN_NS))


def race(channel):
    """[rounds] sums over both processes' cells, each read after a barrier of its round."""
    block, own, rounds = Block(channel.receive_descriptor()), *channel.receive()
    flags = block.view(0, (128,), np.int64)
    cells = block.view(1024, (2,), np.int64)
    sums = []
    for value in range(1, 2 * rounds, 2):
        cells[own] = value
        barrier(address_of(flags), 2, own, value, address_of(flags, 16), SPIN_NS)
        sums.append(int(cells.sum()))
        barrier(address_of(flags), 2, own, value + 1, address_of(flags, 16), SPIN_NS)
    channel.send(sums)
