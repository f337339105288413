"""A training run from the command line: shown while it runs, then written and summed up."""

import math
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from dovetail.cli.output import drawn, say, show, show_json
from dovetail.cli.training_progress import TrainingProgress
from dovetail.cli.training_setup import Setup, save_weights
from dovetail.errors import DovetailError
from dovetail.training.backends.contract import Watcher
from dovetail.training.history import History, events_of
from dovetail.training.monitor import DivergenceWarning
from dovetail.training.records import Event, Outcome, Row
from dovetail.training.trainer import train


@dataclass(frozen=True)
class Outputs:
    """Files and folders to write; None: not asked for."""

    history: Path | None = None
    tensorboard: Path | None = None
    report: Path | None = None
    weights: Path | None = None


@dataclass
class _Kept:
    """What the run said so far, in case that it fails."""

    progress: TrainingProgress
    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def watcher(self) -> Watcher:
        return Watcher(rows=self.add, event=self.happened, should_stop=self.evaluated)

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        self.progress.add(rows)

    def happened(self, event: Event) -> None:
        self.events.append(event)
        self.progress.happened(event)

    def evaluated(self, figures: list[dict[str, float]]) -> bool:
        self.progress.evaluated(figures[-1])
        return False

    def history(self, setup: Setup, error: DovetailError) -> History:
        """Of a run that failed."""
        rows = tuple(self.rows)
        request = setup.request
        meta = {
            "rule": request.rule_name,
            "backend": _name(request.backend),
            "job": {"workers": request.workers, "batch": request.batch, "epochs": request.epochs},
            "failed": str(error),
        }
        return History(
            Outcome(
                theta=np.zeros(0, np.float32),
                clock=max((row.clock for row in rows), default=0),
                samples=sum(row.samples for row in rows),
                seconds=max((row.seconds for row in rows), default=0.0),
                rows=rows,
                events=tuple(self.events),
                stopped=True,
                meta=meta,
            )
        )


def train_and_write(function: str, setup: Setup, outputs: Outputs, as_json: bool) -> None:
    """Train; write what was asked for; print the summary, or one JSON object.

    Of a run that failed, what it said until then is written too, and its error is raised.
    """
    request = setup.request
    samples = len(setup.dataset) if hasattr(setup.dataset, "__len__") else None
    if isinstance(setup.dataset, tuple):
        samples = len(setup.dataset[0])
    progress = TrainingProgress(
        f"{function} by {request.rule_name}", request.workers, samples and samples * request.epochs
    )
    kept = _Kept(progress)
    say(
        f"training {function} by {request.rule_name} with {request.workers} workers on "
        f"{_name(request.backend)}"
    )
    try:
        with drawn(progress), _warnings_said():
            history = train(request, setup.dataset, setup.validation, watcher=kept.watcher)
    except DovetailError as error:
        if kept.rows or kept.events:
            failed = kept.history(setup, error)
            _write(failed, outputs, None)
            if as_json:
                show_json(summary(function, failed, outputs, str(error)))
        raise
    _write(history, outputs, request.model)
    if as_json:
        show_json(summary(function, history, outputs))
    else:
        show(Text(history.summary()))
    if history.interrupted:
        say("interrupted: this is the best so far")


def load(path: Path) -> History:
    """What `train --history` wrote. Raises `FileFormatError`."""
    return History.from_csv(path) if path.suffix == ".csv" else History.load(path)


def typed() -> str:
    """The command that runs, as it was typed."""
    return shlex.join(["dovetail", *sys.argv[1:]])


@contextmanager
def _warnings_said() -> Iterator[None]:
    """Warnings of a diverging run as lines for the user, each once."""
    shown_before = warnings.showwarning

    def tell(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if issubclass(category, DivergenceWarning):
            say(f"warning: {message}")
        else:
            shown_before(message, category, *rest, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DivergenceWarning)
        warnings.showwarning = tell
        yield


def _write(history: History, outputs: Outputs, model: Any) -> None:
    if outputs.history is not None:
        write = history.to_csv if outputs.history.suffix == ".csv" else history.save
        write(outputs.history)
    if outputs.tensorboard is not None:
        history.to_tensorboard(outputs.tensorboard)
    if outputs.report is not None:
        from dovetail.reports.training_page import write_training_page

        write_training_page([history], outputs.report, made=typed())
    written = [outputs.history, outputs.tensorboard, outputs.report]
    if outputs.weights is not None and model is not None:
        save_weights(model, outputs.weights)
        written.append(outputs.weights)
    for path in written:
        if path is not None:
            say(f"wrote {path}")


def summary(
    function: str, history: History, outputs: Outputs, error: str | None = None
) -> dict[str, Any]:
    """What `train --json` prints. Its keys are stable; what is not known is null."""
    outcome = history.outcome
    last = outcome.evaluations[-1].figures if outcome.evaluations else {}
    best = {name: history.best(name) for name in history.figures}
    tau = history.staleness
    divergence = history.divergence
    return {
        "function": function,
        "rule": history.rule,
        "options": outcome.meta.get("options"),
        "backend": history.backend,
        "workers": history.workers,
        **{name: history.of_job(name) for name in ("window", "batch", "epochs")},
        "samples": outcome.samples,
        "commits": len(history),
        "seconds": outcome.seconds,
        "figures": {name: _number(value) for name, value in last.items()},
        "best": {
            name: None if found is None else found.figures[name] for name, found in best.items()
        },
        "staleness": {name: _number(getattr(tau, name)) for name in ("mean", "p50", "p95", "max")},
        "implicit_momentum": _number(history.momentum),
        "expected_momentum": history.expected_momentum,
        **{
            name: len(events_of(outcome, kind))
            for name, kind in (
                ("lost", "lost"),
                ("restarted", "restarted"),
                ("server_restarted", "server_restarted"),
                ("refused", "refused"),
            )
        },
        "diverged": None if divergence is None else divergence.detail,
        "stopped": outcome.stopped,
        "interrupted": history.interrupted,
        "error": error,
        "history": _text(outputs.history),
        "tensorboard": _text(outputs.tensorboard),
        "report": _text(outputs.report),
        "out": _text(outputs.weights),
    }


def _name(backend: Any) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__name__", "its own backend")


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
