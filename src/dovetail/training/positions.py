"""Says which sample of the data set each position of a run is, and whose it is.

    leased              one pool, from which all workers lease:
                        position p is sample order(epoch)[p % samples] of epoch p // samples
    fixed, by-label     a pool for each worker, its share of the data set: worker k of n has the
                        samples [b_k, b_k+1), where b_k = k samples // n, and of E epochs the
                        positions [E b_k, E b_k+1), one epoch after the other

A share is a slice of the data set as it is arranged, and `arrangement` says how: drawn by the seed
for `fixed`, sorted by label for `by-label`. Each epoch of a share has an order of its own.

Algorithm 1 of J. Hermans, "On Scalable Deep Learning and Parallelizing Gradient Descent", 2017,
https://github.com/JoeriHermans/master-thesis, chapter 1, gives each worker a partition of the data
set before the start, as `fixed` does. `leased` differs from it: the workers share one pool, so that
a slow one holds up nobody. This module imports no torch, so that the server starts without it.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.training.records import LEASED, Job


@dataclass(frozen=True)
class Stretch:
    """Positions [start, stop) of one epoch of one pool. `stop` None: a stream, which has one."""

    pool: int
    epoch: int
    start: int
    stop: int | None


class Positions:
    """The positions of a job.

    pools   positions [start, stop) of each pool, in order; `stop` None: a stream, whose end is not
            known
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        if job.samples is None:
            if job.partition != LEASED:
                raise UsageError("partition", "a stream of unknown length has no shares to fix")
            self.pools: list[tuple[int, int | None]] = [(0, None)]
            return
        count = 1 if job.partition == LEASED else job.workers
        # The first sample of each share, as they are arranged.
        self._firsts = [k * job.samples // count for k in range(count)]
        ends = [*self._firsts[1:], job.samples]
        self._sizes = [end - first for first, end in zip(self._firsts, ends, strict=True)]
        self._starts = [job.epochs * first for first in self._firsts]
        self.pools = [
            (start, start + job.epochs * size)
            for start, size in zip(self._starts, self._sizes, strict=True)
        ]

    def pool_of(self, position: int) -> int:
        """The number of the pool that a position belongs to."""
        # Of pools that start at one position, all but the last are empty.
        return 0 if self._job.samples is None else bisect_right(self._starts, position) - 1

    def stretch(self, position: int) -> Stretch:
        """The stretch that holds a position."""
        if self._job.samples is None:
            return Stretch(0, 0, 0, None)
        pool = self.pool_of(position)
        size = self._sizes[pool]
        epoch = (position - self._starts[pool]) // size
        start = self._starts[pool] + epoch * size
        return Stretch(pool, epoch, start, start + size)

    def passes(self, position: int) -> float:
        """Passes over its pool before a position, with the fraction of the present one; 0 for a
        stream."""
        if self._job.samples is None:
            return 0.0
        pool = self.pool_of(position)
        return (position - self._starts[pool]) / self._sizes[pool]

    def order(self, stretch: Stretch) -> NDArray[np.int64] | None:
        """The samples [stop - start] of the arranged data set at a stretch's positions; None for a
        stream, whose samples keep their own order."""
        job = self._job
        if job.samples is None:
            return None
        if job.partition == LEASED:
            return np.random.default_rng((job.seed, stretch.epoch)).permutation(job.samples)
        rng = np.random.default_rng((job.seed, stretch.epoch, stretch.pool))
        return self._firsts[stretch.pool] + rng.permutation(self._sizes[stretch.pool])

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the positions [start, stop) of local steps. None crosses an epoch's end."""
        while start < stop:
            end = min(start + self._job.batch, stop)
            limit = self.stretch(start).stop
            end = end if limit is None else min(end, limit)
            yield start, end
            start = end


def arrangement(partition: str, labels: NDArray[np.generic], seed: int) -> NDArray[np.int64]:
    """The samples [samples] of a data set in the order from which shares are cut.

    labels   [samples] a label each; `fixed` uses their number alone
    seed     of the run; it has no effect on `by-label`, where samples of one label keep their order
    """
    if partition == "by-label":
        return np.argsort(labels, kind="stable").astype(np.int64)
    # A third number keeps these draws apart from those of `Positions.order`.
    return np.random.default_rng((seed, 0, 2**32)).permutation(len(labels))
