"""What backends whose server may die share: where its state is kept, and how tests kill it."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.training.backends.contract import Assignment, Storage

LOG_BYTES = 1 << 28
"""What the log of a run without a folder of its own may grow to between two snapshots."""


@contextmanager
def temporary_storage(assignment: Assignment) -> Iterator[Storage]:
    """A storage of the run's own, gone with it: the run survives its server all the same."""
    folder = Path(tempfile.mkdtemp(prefix="dovetail-"))
    try:
        commits = LOG_BYTES // max(assignment.theta.nbytes, 1)
        yield Storage(folder, snapshot_commits=min(max(commits, 4), 1000))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def crashes_of(crash: Sequence[Any] | None) -> tuple[tuple[str, int], ...]:
    """One (crash point, count) for each life of the server, in their order; `crash`: one or
    several."""
    if not crash:
        return ()
    several = crash if not isinstance(crash[0], str) else [crash]
    return tuple((str(point), int(count)) for point, count in several)
