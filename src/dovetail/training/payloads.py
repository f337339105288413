"""A commit's vector as it came, and what is wrong with it."""

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np

from dovetail.training.backends.contract import Guard
from dovetail.training.center import Center
from dovetail.training.checks import Check, check
from dovetail.training.records import Refusal, Vector

NORMS = 100
"""Commits whose median norm the guard compares with, and how few of them it starts at."""
FEWEST_NORMS = 10


@dataclass(frozen=True)
class Payload:
    """What came with a turn; nothing, for a turn without a commit or a commit without a vector."""

    vector: Vector | None = None
    found: Check | None = None
    refusal: Refusal | None = None

    @property
    def norm(self) -> float:
        """L2 norm of the vector; nan without one."""
        return math.nan if self.found is None else self.found.norm


def examine(center: Center, vector: Vector | None, checksum: int | None) -> Payload:
    """Whether `center` can take the vector: its size and type, its checksum if the sender gave it,
    and whether it is finite. A float64 too large to be squared counts as a norm too large."""
    if vector is None or not center.fits(vector):
        return Payload(refusal=Refusal.SHAPE)
    found = check(vector)
    if checksum is not None and found.checksum != checksum:
        return Payload(refusal=Refusal.CHECKSUM)
    if not found.finite:
        large = bool(np.isfinite(vector).all())
        return Payload(refusal=Refusal.NORM if large else Refusal.NOT_FINITE)
    return Payload(vector, found)


class Norms:
    """Norms of the last commits that were taken, and whether another one has exploded."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.last: deque[float] = deque(maxlen=NORMS)

    def refuse(self, norm: float) -> bool:
        """Whether the guard refuses a commit of this norm. Beside the median of fewer than
        `FEWEST_NORMS` norms, or of zeros, nothing is large."""
        guard = self._guard
        if guard.norm_limit is not None and norm > guard.norm_limit:
            return True
        if guard.norm_factor is None or len(self.last) < FEWEST_NORMS:
            return False
        return 0 < guard.norm_factor * statistics.median(self.last) < norm
