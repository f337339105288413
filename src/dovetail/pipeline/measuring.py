"""Learning from measured trials: one controller, in the process that waits for the devices.

theta ─► draw K ─► each runs on the devices, in turn ─► U(g) ─► theta
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dovetail.placers.learned.records import Judge, Learned, Point, Settings, Task

if TYPE_CHECKING:
    from dovetail.pipeline.courses import Course
    from dovetail.placers.learned.policy import Policy


def train_here(
    policy: "Policy",
    task: Task,
    judge: Judge,
    settings: Settings,
    course: "Course",
    progress: Callable[[Point], None] | None,
) -> Learned:
    """Train `policy` itself until the course's trials are judged or its seconds are over, whichever
    it has. Ctrl-C ends it: what the update under way had judged is not among its points."""
    from dovetail.placers.learned.learner import PolicyLearner

    learner = PolicyLearner(policy, [task], [judge], settings, seed=course.seed, listen=progress)
    began, theta, interrupted = time.monotonic(), learner.theta, False
    assert course.trials is not None, "its caller has chosen a number"
    seconds = float("inf") if course.seconds is None else course.seconds
    updates = 0
    try:
        while (
            updates + 1
        ) * settings.trials <= course.trials and time.monotonic() - began < seconds:
            indices = np.arange(updates * settings.trials, (updates + 1) * settings.trials)
            gradient = learner.gradient(theta, indices, 0)
            theta += learner.update(theta, gradient.vector, 0.0)
            updates += 1
    except KeyboardInterrupt:
        interrupted = True
    learner.flat.write(theta)
    return Learned(
        theta=theta,
        placements={name: best.placement for name, best in learner.best.items()},
        values={name: best.seconds for name, best in learner.best.items()},
        found={name: best.found for name, best in learner.best.items()},
        trials=learner.trials,
        updates=learner.updates,
        seconds=time.monotonic() - began,
        points=tuple(learner.points),
        interrupted=interrupted,
    )
