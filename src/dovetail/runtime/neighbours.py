"""Measures how many cores other programs keep busy, and decides how long waiting threads spin.

A thread that spins holds its core. Where another program wants that core the kernel gives it whole
time slices of some milliseconds, in which ops of microseconds stand still. So threads spin only on
evidence that cores are free, and where a measurement was made beside others it says so.
"""

import os
import threading
import time
from collections.abc import Callable, Collection

from dovetail.runtime.timers import clock

BUSY_CORES = 0.25
"""From this many cores on, other programs disturb what is measured. A desktop at rest and the
kernel's own threads stay below it."""
WINDOW_SECONDS = 0.25
"""The least time between two looks. The kernel counts busy cores in ticks of 1 to 10 ms: over this
time that is right to about a tenth of a core."""
SPIN_SECONDS = 1e-3
"""How long a wait spins on a core that nobody else wants: longer than most hand-overs take."""
BRIEF_SECONDS = 2e-5
"""How long a wait spins on a core that others want, or may want: some hops between cores."""

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


def disturbs(others_cores: float) -> bool:
    """True if other programs used so many cores that a measurement cannot be relied on."""
    return others_cores >= BUSY_CORES


class Neighbours:
    """Cores that other programs keep busy, of some cores.

    cores       those that count
    processes   whose work does not count as other programs', beside this process
    """

    def __init__(self, cores: Collection[int], processes: Collection[int] = ()) -> None:
        self.cores = frozenset(cores)
        self._processes = tuple(processes)
        self._before = self._sample()

    def look(self) -> float | None:
        """Cores that others kept busy since the last look, or since the beginning. None if the
        last look was less than `WINDOW_SECONDS` ago (the next one then covers this time too), or if
        the system does not report it."""
        if clock() - self._before[0] < WINDOW_SECONDS:
            return None
        now, before = self._sample(), self._before
        self._before = now
        if now[1] is None or before[1] is None:
            return None
        busy, our_seconds = now[1] - before[1], now[2] - before[2]
        return max(0.0, (busy - our_seconds) / (now[0] - before[0]))

    def settled(self, sleep: Callable[[float], None] = time.sleep) -> float | None:
        """`look`, after as much more time as it needs."""
        sleep(max(0.0, WINDOW_SECONDS - (clock() - self._before[0])))
        return self.look()

    def _sample(self) -> tuple[float, float | None, float]:
        """(now, seconds that the cores were busy, seconds of our own processes)."""
        our_seconds = time.process_time() + sum(_process_seconds(pid) for pid in self._processes)
        return clock(), busy_seconds(self.cores), our_seconds


def busy_seconds(cores: Collection[int]) -> float | None:
    """Seconds that these cores have worked since the machine started, for programs or, stolen from
    a virtual machine, for other machines. None where /proc/stat does not say."""
    ticks, cores_read = 0, 0
    try:
        with open("/proc/stat") as lines:
            for line in lines:
                name, *fields = line.split()
                if not name.startswith("cpu"):
                    break  # what follows are interrupts, a long line
                if name[3:].isdigit() and int(name[3:]) in cores:
                    cores_read += 1
                    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(
                        int, fields[:8]
                    )
                    ticks += user + nice + system + interrupts + soft + stolen
    except (OSError, ValueError):
        return None  # not Linux, or a sandbox without the file
    return ticks * _TICK_SECONDS if cores_read == len(cores) else None


def _process_seconds(pid: int) -> float:
    """Seconds of processor time of a process, all its threads together; 0 for one that ended."""
    # What clock_getcpuclockid(3) computes: the complement of the id, and 2 for "as scheduled".
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class Spinning:
    """Decides how long threads of this process spin: its OpenMP threads, and waits for flags.

    At first, and while others want the cores, OpenMP's threads sleep after a microsecond, and
    waits for flags after `BRIEF_SECONDS`. Where two looks in a row find that nobody wants the
    cores, they spin: OpenMP's as long as GOMP_SPINCOUNT says.
    """

    def __init__(
        self,
        cores: Collection[int],
        threads: int,
        *,
        look: Callable[[], float | None] | None = None,
        hold_back: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        """look, hold_back: as `Neighbours.look` and `hold_back_openmp`."""
        self._look = look or Neighbours(cores).look
        self._hold_back = hold_back or hold_back_openmp
        self._team = len(cores) + 1 if threads > 1 else 0
        self._calm = 0
        self._release: Callable[[], None] | None = None
        self.spin_seconds = BRIEF_SECONDS
        self._wait()

    def look(self) -> None:
        """Look at the neighbours, if the last look is some time ago. Call it between steps."""
        others_cores = self._look()
        if others_cores is None:
            return
        self._calm = 0 if disturbs(others_cores) else self._calm + 1
        if not self._calm:
            self._wait()
        elif self._calm >= 2:
            self._spin()

    def _wait(self) -> None:
        self.spin_seconds = BRIEF_SECONDS
        if self._team and self._release is None:
            self._release = self._hold_back(self._team)

    def _spin(self) -> None:
        self.spin_seconds = SPIN_SECONDS
        if self._release is not None:
            self._release()
            self._release = None


def hold_back_openmp(team: int) -> Callable[[], None]:
    """Have OpenMP's threads spin for a microsecond only, until what is returned is called.

    GNU's OpenMP does so by itself while it has more threads than the process has cores, so a
    thread of ours holds a second team that sleeps. team: more than the cores. Other OpenMP
    libraries go on as they were.
    """
    ready, end = threading.Event(), threading.Event()

    def hold() -> None:
        import torch  # here: the rest of the package runs without it

        try:
            threads = torch.get_num_threads()  # a new thread takes over what was set last
            torch.set_num_threads(team)
            torch.ones(team * _OPENMP_GRAIN).add_(1)  # as many threads as there are grains
            torch.set_num_threads(threads)
        finally:
            ready.set()
        end.wait()  # the team ends with the thread

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    ready.wait()

    def release() -> None:
        end.set()
        thread.join()

    return release


_OPENMP_GRAIN = 2**15
"""Elements below which ATen gives a thread no work of its own (`at::internal::GRAIN_SIZE`)."""
