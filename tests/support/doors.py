"""Doors that learners wait at, in whatever process they are, until a test opens them.

What must happen before a run's end is made certain by them, however slow the machine is, or fast.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from dovetail.training.liveness import alive


@dataclass(frozen=True)
class Doors:
    """A file each, in a folder: open once it is there. A door that never opens ends by pytest's
    own limit."""

    folder: Path

    def open(self, name):
        (self.folder / name).touch()

    def is_open(self, name):
        return (self.folder / name).exists()

    def wait(self, name):
        """Until it is open; whoever waits says meanwhile that it lives."""
        while not self.is_open(name):
            alive()
            time.sleep(0.005)

    def meet(self, name, one, of):
        """Until all of so many have come here; again later, nobody waits."""
        self.open(f"{name}-{one}")
        for other in range(of):
            self.wait(f"{name}-{other}")
