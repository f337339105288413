"""What things take in virtual time, and what befalls the workers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

from dovetail.errors import UsageError
from dovetail.training.step_times import StepTimes


@dataclass(frozen=True)
class World:
    """What things take, and what befalls the workers; times in virtual seconds.

    slow             worker -> factor on its step times
    latency_seconds, bandwidth_bytes_per_second   of each message, each way; links are not shared
    apply_seconds    the server's, for each commit
    deaths           worker -> when it dies, once
    joins            worker -> when it joins, instead of at 0; may lie beyond the job's workers
    restart_seconds  from a death to the new worker's start
    """

    times: StepTimes = field(default_factory=StepTimes)
    slow: Mapping[int, float] = field(default_factory=dict)
    latency_seconds: float = 0.0
    bandwidth_bytes_per_second: float = math.inf
    apply_seconds: float = 0.0
    deaths: Mapping[int, float] = field(default_factory=dict)
    joins: Mapping[int, float] = field(default_factory=dict)
    restart_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "apply_seconds", "restart_seconds"):
            if not (_is_number(getattr(self, name)) and 0 <= getattr(self, name) < math.inf):
                raise UsageError(name, "must be finite and not negative")
        if not isinstance(self.times, StepTimes):
            raise UsageError("times", f"must be StepTimes, not {self.times!r}")
        for name in ("slow", "deaths", "joins"):
            found = getattr(self, name)
            if not (isinstance(found, Mapping) and all(map(_is_number, found.values()))):
                raise UsageError(name, f"must be a dict of worker: number, not {found!r}")
        bandwidth = self.bandwidth_bytes_per_second
        if not (_is_number(bandwidth) and bandwidth > 0):
            raise UsageError("bandwidth_bytes_per_second", "must be positive")
        if any(not 0 < factor < math.inf for factor in self.slow.values()):
            raise UsageError("slow", "factors must be positive and finite")

    def transfer_seconds(self, vector_bytes: float) -> float:
        """One message, with a vector of so many bytes or without one (0)."""
        return self.latency_seconds + vector_bytes / self.bandwidth_bytes_per_second


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
