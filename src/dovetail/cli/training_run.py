"""Runs `dovetail train`: shows a run while it goes on, then writes the results and a summary."""

import math
import os
import shlex
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.cli.output import RunView, foreign, listed, progress_bar, say, show, show_json, write
from dovetail.cli.weights import save_weights
from dovetail.errors import CallbackError, DovetailError, UsageError
from dovetail.runtime.user_code import UserCode
from dovetail.training import (
    DivergenceWarning,
    Event,
    History,
    Outcome,
    Row,
    Watcher,
    advice,
    bind_rule,
    launched_rank,
    load_backend,
    parameters_of,
    prepare,
    resolve_optimizer,
    train,
)
from dovetail.units import format_count, format_seconds, printable

if TYPE_CHECKING:
    from dovetail.cli.training import Setup, TrainingOutputs

# --- Progress on standard error ---

RECENT = 50
"""Staleness, loss and rate of a worker are means over its last commits, as many as this. Those of
all n workers are means over n times as many."""
MOST_REFUSALS = 5
"""The first refused commits, as many as this, get a line each. The history has all of them."""
STATES = {"joined": "working", "restarted": "restarted", "lost": "lost", "left": "done"}
"""Maps a kind of event to the state of a worker after it, as the table shows it."""
HAPPENED = {
    "server_restarted": "was restarted",
    "restarted": "was restarted",
    "lost": "was lost",
    "refused": "had a commit refused",
}
"""Maps a kind of event to what is said of it."""


@dataclass
class _Recent:
    """The last commits of a worker, or of all workers.

    rows   (seconds, staleness, loss) of each
    """

    samples: int = 0
    commits: int = 0
    state: str = "waiting"
    rows: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, row: Row) -> None:
        self.samples += row.samples
        self.commits += 1
        self.rows.append((row.seconds, row.staleness, row.loss))

    @property
    def staleness(self) -> float:
        return sum(tau for _, tau, _ in self.rows) / len(self.rows) if self.rows else math.nan

    @property
    def loss(self) -> float:
        return sum(loss for _, _, loss in self.rows) / len(self.rows) if self.rows else math.nan

    @property
    def commits_per_second(self) -> float:
        if len(self.rows) < 2 or self.rows[-1][0] <= self.rows[0][0]:
            return math.nan
        return (len(self.rows) - 1) / (self.rows[-1][0] - self.rows[0][0])


class TrainingProgress:
    """Keeps the rows and events of a run, and shows it on standard error, as a table that changes:

        agn, 4 workers  ━━━━━━━━━━━╺━━━━━━━  3,400 of 5,600 samples (61 %)  0:00:12
        commits/s 120  loss 0.412  staleness 2.98  validation accuracy 0.91
        worker 0   working       850 samples   30 commits/s   staleness 2.97   loss 0.41
        worker 1   lost ...

    If standard error is no terminal, it writes a line every `LINE_SECONDS`, and one for each event.

    total    samples over all epochs; None for a stream whose end is not known
    tell     a function that writes a line
    clock    a function that returns seconds, by which lines are paced
    """

    def __init__(
        self,
        title: str,
        workers: int,
        total: int | None,
        tell: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.total = title, total
        self.all = _Recent()
        self.all.rows = deque(maxlen=RECENT * max(1, workers))
        self.workers = {worker: _Recent() for worker in range(workers)}
        self.figures: dict[str, float] = {}  # of the center's last evaluation
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.view = RunView(title, self.table, self.line, tell, clock)
        self._news = News()
        self._lock = threading.Lock()

    @property
    def watcher(self) -> Watcher:
        """The watcher that is told of the run."""

        def evaluated(figures: list[dict[str, float]]) -> bool:
            self.figures = figures[-1]
            return False

        return Watcher(
            rows=self.add, resumed=self.add, forgotten=self.forget, event=self.happened,
            should_stop=evaluated,
        )  # fmt: skip

    def add(self, rows: list[Row]) -> None:
        """Count commits that were applied, and write a line if one is due."""
        with self._lock:
            self.rows += rows
            for row in rows:
                self.all.add(row)
                mine = self.workers.setdefault(row.worker, _Recent())
                mine.add(row)
                if mine.state == "waiting":
                    mine.state = "working"
        self.view.moved()

    def forget(self, kept: int) -> None:
        """Forget all rows but the first ones, which a server without a log has lost."""
        with self._lock:
            del self.rows[kept:]
            self.all.samples = sum(row.samples for row in self.rows)

    def happened(self, event: Event) -> None:
        """Note what happened to a worker or to the server, and write a line if it is bad news."""
        with self._lock:
            self.events.append(event)
            if event.worker >= 0 and event.kind in STATES:
                self.workers.setdefault(event.worker, _Recent()).state = STATES[event.kind]
            line = self._news.line(event)
        if line:
            self.view.tell(line)

    def line(self) -> str:
        """The run in one line."""
        parts = [self.title, self._counted()]
        parts += [f"{name} {value:.4g}" for name, value in self._numbers().items()]
        lost = sum(worker.state == "lost" for worker in self.workers.values())
        return ", ".join([*parts, *([f"{lost} lost"] if lost else [])])

    def table(self) -> RenderableType:
        """The run, with a row for each worker."""
        styles = {"lost": "red", "working": "green", "restarted": "yellow"}
        with self._lock:
            share = min(self.all.samples / self.total, 1.0) if self.total else None
            numbers = "  ".join(f"{foreign(k)} {v:.4g}" for k, v in self._numbers().items())
            rows = [
                (
                    f"worker {worker}",
                    f"[{styles.get(mine.state, 'dim')}]{mine.state}[/]",
                    f"{mine.samples:,} samples",
                    ""
                    if math.isnan(rate := mine.commits_per_second)
                    else f"{format_count(rate)} commits/s",
                    "" if math.isnan(tau := mine.staleness) else f"staleness {tau:.2f}",
                    "" if math.isnan(loss := mine.loss) else f"loss {loss:.4g}",
                )
                for worker, mine in sorted(self.workers.items())
            ]
            below = listed(Table.grid(padding=(0, 2)), rows)
            return Group(self.view.bar(share, self._counted()), numbers, below)

    def _counted(self) -> str:
        seen = f"{self.all.samples:,}"
        if not self.total:
            return f"{seen} samples"
        share = 100 * self.all.samples / self.total
        return f"{seen} of {self.total:,} samples ({share:.0f} %)"

    def _numbers(self) -> dict[str, float]:
        numbers = {
            "commits/s": self.all.commits_per_second,
            "loss": self.all.loss,
            "staleness": self.all.staleness,
        }
        numbers |= {f"validation {name}": value for name, value in self.figures.items()}
        return {name: value for name, value in numbers.items() if not math.isnan(value)}


class News:
    """Events as lines for the user.

    worker   what a worker is called
    """

    def __init__(self, worker: str = "worker") -> None:
        self._worker, self._refusals = worker, 0

    def line(self, event: Event) -> str:
        """The event in one line, with the last line of its traceback; "" for one that is no news,
        and for refusals after the first `MOST_REFUSALS`, because a diverging run has thousands."""
        if event.kind in ("joined", "left"):
            return ""
        self._refusals += event.kind == "refused"
        if event.kind == "refused" and self._refusals > MOST_REFUSALS:
            return ""
        who = "the server" if event.worker < 0 else f"{self._worker} {event.worker}"
        line = f"{format_seconds(event.seconds)}: {who} {HAPPENED.get(event.kind, event.kind)}"
        if event.detail.strip():
            line += f": {event.detail.strip().splitlines()[-1]}"
        if event.kind == "refused" and self._refusals == MOST_REFUSALS:
            line += "; further refusals are not shown"
        return line


def train_and_write(
    function: str, setup: "Setup", outputs: "TrainingOutputs", as_json: bool
) -> None:
    """Train, write what was asked for, and print the summary or one JSON object.

    If the run fails, its history until then is written as well, and its error is raised.
    """
    request = setup.request
    if launched_rank():
        train(request, setup.dataset, setup.validation)
        return
    dataset = setup.dataset
    samples: int | None = None
    with UserCode("the length of the data set", dataset), suppress(TypeError):
        # An iterable has no length.
        samples = len(dataset[0] if isinstance(dataset, tuple) and dataset else dataset)
    backend = request.backend
    if not isinstance(backend, str):
        backend = getattr(backend, "__name__", "its own backend")
    title = f"{function} by {request.rule_name}"
    say(f"training {title} with {request.workers} workers on {backend}")
    progress = TrainingProgress(title, request.workers, samples and samples * request.epochs)
    try:
        with progress.view.drawn(), _warnings_said():
            history = train(request, setup.dataset, setup.validation, watcher=progress.watcher)
    except DovetailError as error:
        if progress.rows or progress.events:
            rows = tuple(progress.rows)
            job = {"workers": request.workers, "batch": request.batch, "epochs": request.epochs}
            outcome = Outcome(
                theta=np.zeros(0, np.float32),
                clock=max((row.clock for row in rows), default=0),
                samples=sum(row.samples for row in rows),
                seconds=max((row.seconds for row in rows), default=0.0),
                rows=rows,
                events=tuple(progress.events),
                stopped=True,
                meta={
                    "rule": request.rule_name,
                    "backend": backend,
                    "job": job,
                    "failed": str(error),
                },
            )
            failed = History(outcome)
            _write(failed, outputs, request.model if isinstance(error, CallbackError) else None)
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
    """The history that `train --history` wrote. Raises `FileFormatError`."""
    return History.from_csv(path) if path.suffix == ".csv" else History.load(path)


def typed() -> str:
    """The command that is running, as it was typed."""
    return shlex.join(["dovetail", *sys.argv[1:]])


@contextmanager
def _warnings_said() -> Iterator[None]:
    """Tells the user of each warning that the run diverges in a line, while the block runs."""
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


def _write(history: History, outputs: "TrainingOutputs", model: Any) -> None:
    """Write what was asked for. `model` is None for a run that failed and so has no weights."""
    is_csv = outputs.history is not None and outputs.history.suffix == ".csv"
    write(outputs.history, history.to_csv if is_csv else history.save)
    write(outputs.tensorboard, history.to_tensorboard)
    if outputs.report is not None:
        from dovetail.reports.kit import save_page
        from dovetail.reports.training_page import render_training

        write(outputs.report, partial(save_page, render_training([history], made=typed())))
    if outputs.weights and model is not None:
        save_weights(model, outputs.weights)
        say(f"wrote {outputs.weights}")


def summary(
    function: str, history: History, outputs: "TrainingOutputs", error: str | None = None
) -> dict[str, Any]:
    """The object that `train --json` prints. Its keys are stable; what is not known is null."""
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
        **history.counts,
        "diverged": None if divergence is None else divergence.detail,
        "stopped": outcome.stopped,
        "interrupted": history.interrupted,
        "error": error,
        **{
            name: None if path is None else str(path)
            for name in ("history", "tensorboard", "report")
            for path in (getattr(outputs, name),)
        },
        "out": outputs.weights or None,
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


# --- `dovetail train --suggest` ---

CHOSEN = ("function", "rule", "option", "workers", "window", "suggest", "budget", "as_json")
"""The suggested command leaves these options out, because the advice sets them or a run has no use
for them. It keeps the others that the user typed."""


def suggest_and_show(
    function: str, setup: "Setup", budget_seconds: float, as_json: bool, context: typer.Context
) -> None:
    """Measure for a part of the budget, simulate for the rest, and print the advice or one JSON
    object.

    context   that of `dovetail train`. The suggested command has the other options that were typed
    """
    if setup.request.partition != "leased":
        raise UsageError("--suggest", "simulates parts of the data, leased; leave --partition out")
    if setup.request.device != "cpu" and not torch.cuda.is_available():
        # The backend `ray` could train it, in a cluster that has GPUs.
        says = "simulates on this machine, where torch sees no GPU; give --device cpu"
        raise UsageError("--suggest", says)
    request = replace(setup.request, folder=None, resume=False)
    prepared = prepare(request, setup.dataset, setup.validation)
    assignment = prepared.assignment
    name = request.backend if isinstance(request.backend, str) else "processes"
    # The simulated backend has no times of its own that could be measured.
    if name == "simulated":
        name = "processes"
    settings = request.backend_options if name == request.backend else {}
    cores = None if name == "ray" else len(os.sched_getaffinity(0))
    with progress_bar() as bar:
        measuring_seconds = advice.MEASURING_SHARE * budget_seconds
        bar(f"measuring on {name}", 0.0, None)
        measured = advice.measure(
            assignment, load_backend(name, **settings), measuring_seconds, cores
        )
        # The rules are bound with this optimizer. The request's own rule is bound already.
        optimizer = resolve_optimizer(request.optimizer, request.lr, parameters_of(request.model))
        rules = []
        for suggested in advice.SUGGESTED:
            try:
                is_own = suggested == assignment.rule.name
                rules.append(assignment.rule if is_own else bind_rule(suggested, optimizer))
            except UsageError as error:
                say(f"{suggested} is left out: {error}")
        if assignment.rule.name not in advice.SUGGESTED:
            rules.append(assignment.rule)
        result = advice.suggest(
            assignment,
            measured,
            rules=rules,
            budget_seconds=budget_seconds - measuring_seconds,
            progress=lambda what, share: bar(what, share, None),
        )
    chosen = result.chosen
    words = ["dovetail", "train", function, "--rule", chosen.rule]
    words += ["--workers", str(chosen.workers), "--window", str(chosen.window)]
    # The command has the options that the user typed, without those of `CHOSEN`; the options of the
    # rule stay if the advice is the rule that the user named.
    for parameter in context.command.params:
        option = parameter.name or ""
        source = context.get_parameter_source(option)
        is_kept = option == "option" and chosen.rule == request.rule_name
        if source is None or source.name != "COMMANDLINE" or (option in CHOSEN and not is_kept):
            continue
        value = context.params[option]
        if value is True:
            words.append(parameter.opts[0])
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(item)]
    command = shlex.join(words)
    if as_json:
        # These keys are stable; what is not known is null.
        show_json(
            {
                "function": function,
                "step_seconds": measured.mean_seconds,
                "transfer_seconds": measured.transfer_seconds,
                "start_seconds": measured.start_seconds,
                "measured_steps": len(measured.step_seconds),
                "cores": measured.cores,
                "simulated_steps": result.steps,
                "rule": chosen.rule,
                "workers": chosen.workers,
                "window": chosen.window,
                "why": result.why,
                "against": result.against or None,
                "command": command,
                "level": _number(result.level),
                "evidence": [
                    {
                        **vars(evidence.candidate),
                        "samples_per_second": _number(evidence.samples_per_second),
                        "staleness": _number(evidence.staleness),
                        "loss": _number(evidence.loss),
                        "seconds": _number(evidence.seconds),
                        "diverged": evidence.diverged or None,
                        "limit": evidence.limit or None,
                    }
                    for evidence in result.evidence
                ],
            }
        )
        return
    if result.against:
        show(Text(result.against))
    say(
        f"measured: a step takes {format_seconds(measured.mean_seconds)}, a transfer "
        f"{format_seconds(measured.transfer_seconds)}"
    )
    show(_table(result))
    for evidence in result.evidence:
        what = advice.describe(evidence.candidate)
        if evidence.diverged:
            show(Text(f"{what}: diverges: {evidence.diverged}", style="dim"))
        elif evidence.limit:
            says = f"{what}: {evidence.limit}, which is known to diverge in longer runs"
            show(Text(says, style="dim"))
    show(Text(f"{advice.describe(chosen)}: {result.why}"))
    show(Text(printable(command)))


def _table(result: advice.Advice) -> Table:
    """The candidates: the chosen one first, then the stable ones, then the others, each by time."""

    def place(evidence: advice.Evidence) -> tuple[bool, bool, float, float]:
        seconds = evidence.seconds if math.isfinite(evidence.seconds) else math.inf
        rate = evidence.samples_per_second if math.isfinite(evidence.samples_per_second) else 0.0
        return evidence.candidate != result.chosen, not evidence.stable, seconds, -rate

    def shown(value: float, form: Callable[[float], str]) -> str:
        return form(value) if math.isfinite(value) else "-"

    level = "time" if math.isnan(result.level) else f"to {result.level:.3g}"
    table = Table("rule", "workers", "window", "samples/s", "stale", "best loss", level, "")
    for evidence in sorted(result.evidence, key=place):
        is_chosen = evidence.candidate == result.chosen
        table.add_row(
            evidence.candidate.rule,
            str(evidence.candidate.workers),
            str(evidence.candidate.window),
            shown(evidence.samples_per_second, format_count),
            shown(evidence.staleness, "{:.3g}".format),
            shown(evidence.loss, "{:.4g}".format),
            shown(evidence.seconds, format_seconds),
            "use" if is_chosen else "" if evidence.stable else "no",
            style="bold" if is_chosen else "" if evidence.stable else "dim",
        )
    return table
