"""Judges for evaluators' processes: they import nothing that takes its time."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.placers.learned.records import Trials

HUNG, DEADLY, RAISING = 4, 3, 2


def count_devices(task):
    """A judge: a second for each group, and one more for each that is on device 1."""

    def judge(placements):
        seconds = len(placements[0]) + placements.sum(axis=1).astype(float)
        return Trials(seconds, seconds < 12, np.ones(len(seconds), dtype=bool))

    return judge


@dataclass
class Deadly:
    """As `count_devices`, but a placement whose first group is on device 3 kills the evaluator, and
    one on device 2 raises. Leaves in the folder, by its process's id, whether torch was imported.
    """

    folder: Path

    def __call__(self, task):
        (self.folder / str(os.getpid())).write_text(str("torch" in sys.modules))
        judge = count_devices(task)

        def deadly(placements):
            if placements[0, 0] == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            if placements[0, 0] == RAISING:
                raise ValueError("a judge's own mistake")
            return judge(placements)

        return deadly


@dataclass
class Hanging:
    """As `count_devices`, but a placement whose first group is on device 4 never ends; it leaves
    "hung" in the folder."""

    folder: Path

    def __call__(self, task):
        judge = count_devices(task)

        def hanging(placements):
            while placements[0, 0] == HUNG:
                (self.folder / "hung").touch()
                time.sleep(1)
            return judge(placements)

        return hanging


@dataclass
class Mortal:
    """As `count_devices`, but the first evaluator of all dies of its placement number `at`."""

    folder: Path
    at: int

    def __call__(self, task):
        judge, number = count_devices(task), 0
        lives = len(list(self.folder.iterdir()))
        (self.folder / str(os.getpid())).touch()

        def mortal(placements):
            nonlocal number
            number += 1
            if lives == 0 and number == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return judge(placements)

        return mortal
