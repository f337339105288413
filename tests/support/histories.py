"""Histories made by hand, for what shows them."""

import math

import numpy as np

from dovetail.training.history import History
from dovetail.training.records import Evaluation, Event, Outcome, Row


def make_history(commits=60, workers=3, rule="agn", accuracy=0.9, **changes):
    """Workers in turn, each computing .8 s of every second; an evaluation every 10 commits."""
    rows = tuple(
        Row(
            clock=i + 1,
            worker=i % workers,
            sequence=i // workers + 1,
            staleness=min(i, workers - 1),
            steps=2,
            samples=20,
            loss=2 / (1 + i / commits),
            norm=1.0,
            seconds=i // workers + 0.9 + i % workers / 100,
            begin_seconds=i // workers + i % workers / 100,
            end_seconds=i // workers + 0.8 + i % workers / 100,
            momentum=math.nan if i < 3 else 0.6,
        )
        for i in range(commits)
    )
    evaluations = tuple(
        Evaluation(
            clock=i,
            samples=20 * i,
            seconds=i / workers,
            figures={"loss": 2 - i / commits, "accuracy": accuracy * i / commits},
        )
        for i in range(0, commits + 1, max(1, commits // 6))
    )
    meta = {
        "rule": rule,
        "options": {"gamma": 1e-4},
        "backend": "simulated",
        "job": {"samples": 400, "epochs": 3, "batch": 10, "window": 2, "workers": workers},
    }
    fields = {
        "theta": np.zeros(5, dtype=np.float32),
        "clock": commits,
        "samples": 20 * commits,
        "seconds": commits / workers,
        "rows": rows,
        "events": (Event("joined", 0, 0.0), Event("lost", 1, 4.0, "killed by SIGKILL")),
        "evaluations": evaluations,
        "meta": meta,
    }
    return History(Outcome(**(fields | changes)))
