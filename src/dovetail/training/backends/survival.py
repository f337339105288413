"""Where backends whose server may die keep its state."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
