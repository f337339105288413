"""A run to look at: its outcome as columns, by epoch, as text, and as files.

    history = trainer.fit(dataset)
    history.columns["staleness"]                        # one entry a commit
    print(history.summary())
    history.save("run.json.gz"); history.to_csv("run.csv"); history.to_tensorboard("logs")

Imports no torch.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dovetail.training.analysis import Staleness, staleness
from dovetail.training.divergence import Divergence, diverging, remedy
from dovetail.training.records import Evaluation, Event, Outcome, Row
from dovetail.units import format_count, format_seconds, printable

Column = NDArray[Any]
COLUMNS = {field.name: field.type for field in fields(Row)}
"""Columns of a history and their types, in order: the fields of `Row`."""
LOWER_IS_BETTER = ("loss", "error", "perplexity")
SUMMARY_EPOCHS = 12
_COUNTED = ("lost", "restarted", "server_restarted", "refused")


@dataclass(frozen=True)
class Epoch:
    """A pass over the data set as the server saw it: the commits whose samples complete it.

    loss      mean over its samples, each at the parameters it was computed with
    seconds   when it ended
    figures   of the last evaluation in it
    """

    epoch: int
    commits: int
    samples: int
    loss: float
    seconds: float
    staleness: float
    figures: dict[str, float]


@dataclass(frozen=True, eq=False)
class History:
    """The history of one run. `outcome.meta` says what ran: keys `rule`, `options`, `backend` and
    `job`, a dictionary of `Job`'s fields; what is absent is not shown."""

    outcome: Outcome

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Each field of `Row` [commits], and `seen`: samples in the center after each commit."""
        found: dict[str, Column] = {
            name: np.array(
                [getattr(row, name) for row in self.outcome.rows],
                dtype=np.int64 if kind is int else np.float64,
            )
            for name, kind in COLUMNS.items()
        }
        found["seen"] = np.cumsum(found["samples"], dtype=np.int64)
        return found

    def __len__(self) -> int:
        return len(self.outcome.rows)

    @property
    def name(self) -> str:
        """A label: `meta["name"]`, else the rule's name."""
        return str(self.outcome.meta.get("name") or self.rule or "run")

    @property
    def rule(self) -> str:
        """The rule's name, "" where it is not known."""
        return str(self.outcome.meta.get("rule") or "")

    @property
    def backend(self) -> str:
        """The backend's name, "" where it is not known."""
        return str(self.outcome.meta.get("backend") or "")

    @property
    def interrupted(self) -> bool:
        """Was it ended by Ctrl-C, with the best so far kept?"""
        return bool(self.outcome.meta.get("interrupted"))

    def of_job(self, field: str) -> int | None:
        """A whole number of the job (`samples`, `epochs`, `batch`, `window`), if it is known."""
        job = self.outcome.meta.get("job")
        value = job.get(field) if isinstance(job, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def workers(self) -> int:
        """n that the run started with; where that is not known, the workers that committed."""
        known = self.of_job("workers")
        return known if known and known > 0 else len({row.worker for row in self.outcome.rows})

    @cached_property
    def staleness(self) -> Staleness:
        """Of all commits but the first n."""
        return staleness(self.outcome.rows, self.workers)[0]

    @property
    def momentum(self) -> float:
        """Implicit momentum: the median of the commits' estimates, nan where there are none."""
        estimates = self.columns["momentum"]
        known = estimates[np.isfinite(estimates)]
        return float(np.median(known)) if len(known) else math.nan

    @property
    def expected_momentum(self) -> float:
        """1 - 1/n: implicit momentum under memoryless step times (Mitliagkas et al., 2016)."""
        return 1 - 1 / max(self.workers, 1)

    @cached_property
    def divergence(self) -> Divergence | None:
        """Where its losses show that it diverged; None: nowhere."""
        return diverging(self.outcome.rows, self.workers)

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of what was evaluated, in order of appearance."""
        return tuple(dict.fromkeys(name for e in self.outcome.evaluations for name in e.figures))

    def curve(self, figure: str) -> tuple[Column, Column, Column]:
        """(seconds, samples, values) [evaluations] of one figure."""
        having = [e for e in self.outcome.evaluations if figure in e.figures]
        return (
            np.array([e.seconds for e in having], dtype=np.float64),
            np.array([e.samples for e in having], dtype=np.int64),
            np.array([e.figures[figure] for e in having], dtype=np.float64),
        )

    def best(self, figure: str) -> Evaluation | None:
        """The evaluation at which a figure was best, the first of equals; None without one."""
        known = [
            e for e in self.outcome.evaluations if math.isfinite(e.figures.get(figure, math.nan))
        ]
        sign = -1 if lower_is_better(figure) else 1
        return max(known, key=lambda e: sign * e.figures[figure], default=None)

    def seconds_to(self, figure: str, target: float) -> float | None:
        """When a figure was first seen to be as good as `target`; None: never."""
        sign = -1 if lower_is_better(figure) else 1
        seconds, _, values = self.curve(figure)
        reached = np.flatnonzero(sign * values >= sign * target)
        return float(seconds[reached[0]]) if len(reached) else None

    @cached_property
    def epochs(self) -> tuple[Epoch, ...]:
        """One entry a pass over the data set; of a stream of unknown length there is one."""
        columns, per_epoch = self.columns, self.of_job("samples")
        if not len(self):
            return ()
        whole = per_epoch if per_epoch and per_epoch > 0 else int(columns["seen"][-1]) or 1
        of_commit = np.maximum(columns["seen"] - 1, 0) // whole
        starts = np.flatnonzero(np.diff(of_commit, prepend=-1))
        found = []
        for start, stop in zip(starts, [*starts[1:], len(self)], strict=True):
            part = {name: column[start:stop] for name, column in columns.items()}
            epoch = int(of_commit[start])
            last = [e for e in self.outcome.evaluations if _epoch_of(e, whole) == epoch]
            found.append(
                Epoch(
                    epoch=epoch,
                    commits=int(stop - start),
                    samples=int(part["samples"].sum()),
                    loss=_weighted_mean(part["loss"], part["samples"]),
                    seconds=float(part["seconds"][-1]),
                    staleness=float(part["staleness"].mean()),
                    figures=dict(last[-1].figures) if last else {},
                )
            )
        return tuple(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all but the parameters as JSON (`history_files`), gzip where the name ends in
        `.gz`. Raises `UnwritableError`."""
        from dovetail.training.history_files import save_history

        save_history(self.outcome, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """What `save` wrote, with an empty `theta`. Raises `FileFormatError`."""
        from dovetail.training.history_files import load_history

        return cls(load_history(path))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write commits, evaluations and events, a line each. Raises `UnwritableError`."""
        from dovetail.training.history_files import write_csv

        write_csv(self.outcome, path)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Self:
        """What `to_csv` wrote: all but the meta and the parameters. Raises `FileFormatError`."""
        from dovetail.training.history_files import read_csv

        return cls(read_csv(path))

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write scalars for TensorBoard, by samples. Raises `MissingLibraryError`,
        `UnwritableError`."""
        from dovetail.training.tensorboard import write_events

        write_events(self, folder)

    def facts(self) -> list[tuple[str, str]]:
        """(label, text) pairs that sum the run up."""
        return _facts(self)

    def summary(self) -> str:
        """The facts, and a line an epoch; of many epochs some, the last among them."""
        facts = self.facts()
        width = max(len(label) for label, _ in facts)
        lines = [f"{label:<{width}}  {text}" for label, text in facts]
        if self.epochs:
            lines += ["", *_aligned(_epoch_cells(self))]
        return printable("\n".join(lines))


def lower_is_better(figure: str) -> bool:
    """Is a smaller value of the figure of that name the better one? Losses, errors, perplexity."""
    return any(word in figure.lower() for word in LOWER_IS_BETTER)


def common_level(histories: Sequence[History], figure: str) -> float | None:
    """The best value of a figure that all of these runs reached; None where one has none."""
    best = [found.figures[figure] for h in histories if (found := h.best(figure)) is not None]
    if not best or len(best) < len(histories):
        return None
    return max(best) if lower_is_better(figure) else min(best)


def events_of(outcome: Outcome, kind: str) -> list[Event]:
    """What of one kind happened, in order."""
    return [event for event in outcome.events if event.kind == kind]


def _epoch_of(evaluation: Evaluation, whole: int) -> int:
    return max(evaluation.samples - 1, 0) // whole


def _weighted_mean(values: Column, weights: Column) -> float:
    total = float(weights.sum())
    with np.errstate(all="ignore"):  # a run that diverged has losses without bounds
        return float((values * weights).sum() / total) if total else float(values.mean())


def _facts(history: History) -> list[tuple[str, str]]:
    outcome = history.outcome
    options = outcome.meta.get("options")
    facts = [("rule", history.rule + _options_text(options)), ("backend", history.backend)]
    sizes = [f"{history.workers} workers"]
    sizes += [
        f"{field} {value}"
        for field in ("window", "batch", "epochs")
        if (value := history.of_job(field)) is not None
    ]
    facts.append(("run", ", ".join(sizes)))
    working = outcome.seconds - min((row.begin_seconds for row in outcome.rows), default=0.0)
    rate = len(history) / working if working > 0 else math.nan
    facts.append(
        ("did", f"{len(history):,} commits of {outcome.samples:,} samples in "
                f"{format_seconds(outcome.seconds)}"
                + (f", {format_count(rate)} commits/s" if math.isfinite(rate) else ""))
    )  # fmt: skip
    for figure in history.figures:
        if (best := history.best(figure)) is not None:
            facts.append((f"best {figure}", f"{best.figures[figure]:.4g} after "
                          f"{best.samples:,} samples, {format_seconds(best.seconds)}"))  # fmt: skip
    tau = history.staleness
    if tau.commits:
        facts.append(("staleness", f"mean {tau.mean:.2f}, p50 {tau.p50:.3g}, p95 {tau.p95:.3g}, "
                      f"max {tau.max:.0f}"))  # fmt: skip
    if math.isfinite(history.momentum):
        facts.append(("implicit momentum", f"{history.momentum:.3g}, 1 - 1/n is "
                      f"{history.expected_momentum:.3g}"))  # fmt: skip
    counts = {kind: len(events_of(outcome, kind)) for kind in _COUNTED}
    if any(counts.values()):
        said = (f"{n} {kind.replace('_', ' ')}" for kind, n in counts.items() if n)
        facts.append(("events", ", ".join(said)))
    if (found := history.divergence) is not None:
        advice = remedy(history.rule, history.of_job("window"), history.workers)
        facts.append(("diverged", f"{found.detail}; {advice}"))
    if history.interrupted or outcome.stopped:
        facts.append(("ended", "interrupted" if history.interrupted else "before its epochs"))
    return [(label, text) for label, text in facts if text]


def _options_text(options: Any) -> str:
    if not isinstance(options, dict) or not options:
        return ""
    return " (" + ", ".join(f"{key} {value}" for key, value in options.items()) + ")"


def _epoch_cells(history: History) -> list[list[str]]:
    epochs = history.epochs
    kept = np.unique(np.linspace(0, len(epochs) - 1, SUMMARY_EPOCHS).round().astype(int))
    cells = [["epoch", "commits", "training loss", "staleness", "ended", *history.figures]]
    for epoch in (epochs[i] for i in kept):
        figures = [
            f"{epoch.figures[name]:.4g}" if name in epoch.figures else "-"
            for name in history.figures
        ]
        cells.append(
            [str(epoch.epoch + 1), str(epoch.commits), f"{epoch.loss:.4g}",
             f"{epoch.staleness:.2f}", format_seconds(epoch.seconds), *figures]
        )  # fmt: skip
    return cells


def _aligned(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]
