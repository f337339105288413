"""Measures how many cores other programs keep busy, and decides how long waiting threads spin.

A thread that spins holds its core. If another program wants that core, the kernel gives it whole
time slices of some milliseconds, in which ops of microseconds stand still. So threads stop
spinning on evidence that others want the cores, and a measurement made beside other programs says
so.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Collection

from dovetail.runtime.timers import clock

BUSY_CORES = 0.25
"""Other programs that use this many cores or more disturb a measurement. A desktop at rest and the
kernel's own threads stay below it."""
WINDOW_SECONDS = 0.25
"""The least time between two looks. The kernel counts busy cores in ticks of 1 to 10 ms. Over this
time the count is right to about a tenth of a core."""
SPIN_SECONDS = 1e-3
"""A wait spins this long on a core that nobody else wants; most hand-overs take less."""
CLOSE_SECONDS = 0.005
"""Pauses that begin within this time of each other count as one: a small share of a look."""
GAP_SECONDS = 0.02
"""After a pause of this length others may have had the cores with good reason: the user's program
between two steps, or what a plan is measured beside in turns."""
BRIEF_SECONDS = 2e-5
"""A wait spins this long on a core that others may want: as long as some hops between cores."""

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


def disturbs(others_cores: float) -> bool:
    """True if other programs used so many cores that a measurement cannot be relied on."""
    return others_cores >= BUSY_CORES


def is_calm(cores: Collection[int]) -> bool:
    """True if no other program disturbs measurements on these cores now. Looking takes
    `WINDOW_SECONDS`."""
    return not disturbs(Neighbours(cores).settled() or 0.0)


class Neighbours:
    """Measures how many of some cores other programs keep busy.

    cores       the cores that are watched
    processes   ids of processes whose work, like this process's, does not count as other programs'
    """

    def __init__(self, cores: Collection[int], processes: Collection[int] = ()) -> None:
        self.cores = frozenset(cores)
        self._processes = tuple(processes)
        self._before = self._sample()
        self._paused: tuple[float, float | None, float] | None = None

    def look(self) -> float | None:
        """How many cores others kept busy since the last look, or since the beginning.

        None if the last look was less than `WINDOW_SECONDS` ago (the next look then covers this
        time too), or if the system does not report it.
        """
        if clock() - self._before[0] < WINDOW_SECONDS:
            return None
        now, before = self._sample(), self._before
        self._before = now
        if now[1] is None or before[1] is None:
            return None
        busy, our_seconds = now[1] - before[1], now[2] - before[2]
        return max(0.0, (busy - our_seconds) / (now[0] - before[0]))

    def leave_out(self, processes: Collection[int]) -> None:
        """From now on the work of these processes does not count as other programs'."""
        if tuple(processes) != self._processes:
            self._processes = tuple(processes)
            self._before, self._paused = self._sample(), None

    def pause(self) -> None:
        """From now on until `resume`, other programs' work does not count. Of pauses that follow
        closely the first one's reading serves for all, as it takes some 50 us."""
        if self._paused is None or clock() - self._paused[0] > CLOSE_SECONDS:
            self._paused = self._sample()

    def resume(self) -> None:
        """Count on from `pause`; without one, from now on."""
        now, paused, before = self._sample(), self._paused, self._before
        self._paused = None
        if paused is None or now[1] is None or paused[1] is None or before[1] is None:
            self._before = now
            return
        self._before = (
            before[0] + now[0] - paused[0],
            before[1] + now[1] - paused[1],
            before[2] + now[2] - paused[2],
        )

    def settled(self, sleep: Callable[[float], None] = time.sleep) -> float | None:
        """`look`, after sleeping until `WINDOW_SECONDS` have passed since the last look."""
        sleep(max(0.0, WINDOW_SECONDS - (clock() - self._before[0])))
        return self.look()

    def _sample(self) -> tuple[float, float | None, float]:
        """(now, seconds that the cores were busy, seconds of our own processes)."""
        our_seconds = time.process_time() + sum(_process_seconds(pid) for pid in self._processes)
        return clock(), busy_seconds(self.cores), our_seconds


def busy_seconds(cores: Collection[int]) -> float | None:
    """Seconds that these cores have worked since the machine started; None if /proc/stat is silent.

    On a virtual machine, time that the host gave to other machines ("stolen") counts as work.
    `psutil.cpu_times(percpu=True)` takes 13 us where this takes 23, but its list has no numbers of
    cores: if one is offline, those after it would be taken for others.
    """
    ticks, cores_read = 0, 0
    try:
        with open("/proc/stat") as lines:
            for line in lines:
                name, *fields = line.split()
                if not name.startswith("cpu"):
                    # The lines on cores come first. A long line on interrupts follows.
                    break
                if name[3:].isdigit() and int(name[3:]) in cores:
                    cores_read += 1
                    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(
                        int, fields[:8]
                    )
                    ticks += user + nice + system + interrupts + soft + stolen
    except (OSError, ValueError):
        # This is not Linux, or a sandbox without the file.
        return None
    return ticks * _TICK_SECONDS if cores_read == len(cores) else None


def _process_seconds(pid: int) -> float:
    """Processor time of a process in seconds, of all its threads; 0 for a process that ended."""
    # The clock's number, as clock_getcpuclockid(3) computes it: the complement of the process id
    # in the upper bits, and 2 for "as scheduled". It takes 0.3 us; psutil, which reads /proc, 9.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class Spinning:
    """Decides how long threads of this process spin: its OpenMP threads, and waits for flags.

    OpenMP's threads spin as long as GOMP_SPINCOUNT says, and waits for `SPIN_SECONDS`. Once a look
    finds that others want the cores, OpenMP's threads sleep after a microsecond, and waits for
    flags sleep after `BRIEF_SECONDS`, until two looks in a row find that nobody does. A process
    that began with sleeping would run its first half second at a tenth of its pace: waking a thread
    takes some 90 us.
    """

    def __init__(
        self,
        cores: Collection[int],
        threads: int,
        *,
        neighbours: Neighbours | None = None,
        hold_back: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        """`hold_back` replaces `hold_back_openmp`."""
        self._neighbours = neighbours or Neighbours(cores)
        self._hold_back = hold_back or hold_back_openmp
        self._team = len(cores) + 1 if threads > 1 else 0
        self._calm = 0
        self._release: Callable[[], None] | None = None
        self._paused, self._has_pauses = clock(), False
        self.spin_seconds = SPIN_SECONDS

    def pause(self) -> None:
        """The process does nothing from now on until it looks again; if it already did not look
        since the last pause, that pause goes on."""
        if self._paused < math.inf:
            return
        self._paused = clock()
        # What others do is read only where there are pauses.
        if self._has_pauses:
            self._neighbours.pause()

    def beside(self, processes: Collection[int]) -> None:
        """The work of these processes does not count as that of others."""
        self._neighbours.leave_out(processes)

    def look(self) -> None:
        """Look at the neighbours, if the last look is some time ago. Call it before each step."""
        if clock() - self._paused > GAP_SECONDS:
            self._neighbours.resume()
            self._has_pauses = True
        self._paused = math.inf
        others_cores = self._neighbours.look()
        if others_cores is None:
            return
        self._calm = 0 if disturbs(others_cores) else self._calm + 1
        if not self._calm:
            self.spin_seconds = BRIEF_SECONDS
            if self._team and self._release is None:
                self._release = self._hold_back(self._team)
        elif self._calm >= 2:
            self.close()

    def close(self) -> None:
        """Let threads spin as they did at first."""
        self.spin_seconds = SPIN_SECONDS
        if self._release is not None:
            self._release()
            self._release = None


def hold_back_openmp(team: int) -> Callable[[], None]:
    """Have OpenMP's threads spin for a microsecond only, until what is returned is called.

    GNU's OpenMP does so by itself while it has more threads than the process has cores. So a thread
    of ours holds a second team of `team` threads, more than there are cores, which sleeps. Other
    OpenMP libraries do not change.
    """
    ready, end = threading.Event(), threading.Event()

    def hold() -> None:
        # Imported here, because the rest of the package runs without torch.
        import torch

        try:
            # A new thread takes over the number that was set last, so it is set back afterwards.
            threads = torch.get_num_threads()
            torch.set_num_threads(team)
            # An op of one grain per thread makes OpenMP start the whole team.
            torch.ones(team * _OPENMP_GRAIN).add_(1)
            torch.set_num_threads(threads)
        finally:
            ready.set()
        # The team ends with this thread.
        end.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    ready.wait()

    def release() -> None:
        end.set()
        thread.join()

    return release


_OPENMP_GRAIN = 2**15
"""ATen gives a thread no work of its own below this many elements (`at::internal::GRAIN_SIZE`)."""
