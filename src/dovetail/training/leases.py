"""A run's samples as positions, each handed out until a commit has ended its lease.

Positions [0, samples x epochs) are cut into windows, in order. What a dead worker held is handed
out again before anything new. A stream has no epochs here: its positions run on until somebody
finds the end. Deterministic; knows no workers, no vectors and no time.
"""

from typing import Any

from dovetail.errors import UsageError
from dovetail.training.records import Job, Lease


class Leases:
    """Which positions are free, held or committed.

    stop        positions of the whole run; None: a stream whose end is not known yet
    committed   samples
    """

    def __init__(self, job: Job) -> None:
        if job.samples is None and job.window is None:
            raise UsageError("window", "a stream of unknown length has no shares; give a window")
        self._job = job
        self.stop = None if job.samples is None else job.samples * job.epochs
        self.committed = 0
        self._next = 0  # the first position that was never handed out
        self._number = 0
        self._returned: list[tuple[int, int]] = []  # sorted
        self._held: dict[int, Lease] = {}

    @property
    def finished(self) -> bool:
        """Whether every position is committed."""
        if self.stop is None or self._returned or self._next < self.stop:
            return False
        return all(lease.start >= self.stop for lease in self._held.values())

    def take(self, steps: int | None = None) -> Lease | None:
        """The next free positions, at most `steps` batches of them (None: the job's window), never
        across an epoch's end; a whole share if there is one commit a worker. None: none is free."""
        if self._returned:
            start, end = self._returned.pop(0)
            stop = self._cut(start, end, steps)
            if stop < end:
                self._returned.insert(0, (stop, end))
        elif self.stop is None or self._next < self.stop:
            start = self._next
            stop = self._next = self._cut(start, self.stop, steps)
        else:
            return None
        lease = Lease(self._number, start, stop)
        self._number += 1
        self._held[lease.number] = lease
        return lease

    def _cut(self, start: int, end: int | None, steps: int | None) -> int:
        job = self._job
        if job.window is None:
            assert self.stop is not None
            stop = start + -(-self.stop // job.workers)
        else:
            stop = start + (steps or job.window) * job.batch
            if job.samples:
                stop = min(stop, (start // job.samples + 1) * job.samples)
        return stop if end is None else min(stop, end)

    def give_back(self, lease: Lease) -> None:
        """Its positions are free again, before all others."""
        del self._held[lease.number]
        stop = lease.stop if self.stop is None else min(lease.stop, self.stop)
        if lease.start < stop:
            self._returned.append((lease.start, stop))
            self._returned.sort()

    def complete(self, lease: Lease, samples: int) -> int:
        """Ends a lease; how many samples counted. A stream's commit of fewer than its lease's has
        met the end, which is kept; a data set's count all."""
        del self._held[lease.number]
        length = lease.stop - lease.start
        if self._job.samples is None and samples < length:
            length = max(samples, 0)
            self.end(lease.start + length)
        self.committed += length
        return length

    def end(self, stop: int) -> None:
        """The stream turned out to have no more than `stop` samples."""
        self.stop = stop if self.stop is None else min(stop, self.stop)
        kept = ((start, min(end, self.stop)) for start, end in self._returned)
        self._returned = [(start, end) for start, end in kept if start < end]

    def state(self) -> dict[str, Any]:
        """All of it, as JSON knows it."""
        return {
            "stop": self.stop,
            "committed": self.committed,
            "next": self._next,
            "number": self._number,
            "returned": [list(span) for span in self._returned],
            "held": [[lease.number, lease.start, lease.stop] for lease in self._held.values()],
        }

    @classmethod
    def restore(cls, job: Job, state: dict[str, Any]) -> "Leases":
        """The leases whose `state` that was."""
        leases = cls(job)
        leases.stop = state["stop"]
        leases.committed = state["committed"]
        leases._next = state["next"]
        leases._number = state["number"]
        leases._returned = [(start, stop) for start, stop in state["returned"]]
        leases._held = {number: Lease(number, start, stop) for number, start, stop in state["held"]}
        return leases
