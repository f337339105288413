"""Options that are records of their own, and checks of the values of options.

Each check raises a `UsageError` that names the option. This file imports neither torch nor numpy.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import UsageError


@dataclass(frozen=True)
class Guard:
    """Which commits the server refuses by their norm. Broken and foreign ones are always refused.

    norm_factor   a commit's norm may be at most so many times the median of the last 100 norms
                  (None: no limit)
    norm_limit    a commit's norm may be at most this (None: no limit)
    """

    norm_factor: float | None = None
    norm_limit: float | None = None


@dataclass(frozen=True)
class FailurePolicy:
    """Which failures a run survives. Any other failure ends it, with the first traceback.

    worker_restarts   how many dead workers are started again, over the whole run
    worker_losses     how many workers may be lost once the restarts are used up; one must remain
    worker_errors     how many exceptions in workers count as deaths; one more ends the run
    server_restarts   how often the server is started again
    refusals          how many commits may be refused, other than for a lost lease, before the run
                      counts as diverged
    lease_seconds     a worker that is silent for longer counts as hung and loses its lease. Every
                      local step is a sign of life, and so is a call of `alive()` within a long one
    """

    worker_restarts: int = 3
    worker_losses: int = 0
    worker_errors: int = 0
    server_restarts: int = 3
    refusals: int = 100
    lease_seconds: float = 60.0


@dataclass(frozen=True)
class Storage:
    """Where a run keeps its state, so that nothing is lost with the server.

    log               every commit is written before it is applied; without a log, a restart goes
                      back to the last snapshot
    snapshot_commits  commits between two snapshots
    sync              every commit waits for the disk, so that the log survives the death of the
                      machine too, and not only the server's
    resume            the run that the folder holds is continued
    """

    folder: Path
    log: bool = True
    snapshot_commits: int = 1000
    sync: bool = False
    resume: bool = False


def positive(option: str, value: Any) -> None:
    """Raises unless `value` is a finite number above 0."""
    if not _is_number(value) or value <= 0:
        raise UsageError(option, f"must be a number above 0, not {value!r}")


def not_negative(option: str, value: Any) -> None:
    """Raises unless `value` is a finite number of at least 0."""
    if not _is_number(value) or value < 0:
        raise UsageError(option, f"must be a number of at least 0, not {value!r}")


def fraction(option: str, value: Any) -> None:
    """Raises unless `value` is a finite number of at least 0 and below 1."""
    if not _is_number(value) or not 0 <= value < 1:
        raise UsageError(option, f"must be at least 0 and below 1, not {value!r}")


def count(option: str, value: Any, least: int = 1) -> None:
    """Raises unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(option, f"must be a whole number of at least {least}, not {value!r}")


def window(value: Any) -> None:
    """Raises unless `value` is a number of local steps, None or "auto"."""
    if isinstance(value, str):
        if value != "auto":
            says = f'must be a whole number, None or "auto", not {value!r}'
            raise UsageError("window", says)
    elif value is not None:
        count("window", value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
