"""The trainer: a module, a loss, an optimizer and a rule; `fit` trains the module on a data set.

check ─► assignment ─► backend ─► center ─► the module, its batch norms' statistics computed
                         │  ▲
                  evaluations, early stop
"""

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dovetail.errors import DivergedError
from dovetail.training.backends.contract import Backend, FailurePolicy, Guard, Watcher
from dovetail.training.datasets import Collate
from dovetail.training.divergence import LossWatch, remedy
from dovetail.training.history import History
from dovetail.training.modules import Loss, MakeOptimizer, unflatten
from dovetail.training.preparing import Prepared, prepare
from dovetail.training.progress import Progress
from dovetail.training.records import Evaluation, Outcome
from dovetail.training.rules.contract import Rule
from dovetail.training.schedules import Schedule
from dovetail.training.validation import Metrics


@dataclass(frozen=True)
class Trainer:
    """How a module is trained. `fit` does it, and raises what is wrong before anything starts.

    model       any `nn.Module` on the CPU, or a Keras 3 model on torch; it is trained in place
    loss        (output, *targets) -> the mean over the batch's samples
    optimizer   a callable of parameters, a name with `lr`, or a record; each worker has its own,
                and for the rule `sync` the server has it
    rule        a name in `RULES`, or `make_rule(name, **options)`
    backend     a name in `BACKENDS`, with its own settings in `backend_options`
    window      local steps between commits; "auto": 1, but `WINDOWS` for rules that ask for more
    schedule    a factor of the learning rate by epoch, or a torch scheduler (see `schedules`)
    metrics     beside the loss, on the validation set: "accuracy", or callables as the loss
    validate    when: each "epoch", after so many samples, or "30s"; and at the end
    monitor     the figure that early stop goes by: a loss or error is to fall, all else to rise
    patience    evaluations without a better one before the run stops; the best center is kept
    collate     items -> batch, for data sets that are not arrays
    folder      where the run's state is kept, so that nothing is lost with the server; `storage`:
                further settings of `Storage`
    resume      continue the run in `folder`. Workers' optimizers start anew, as after any restart
    group       processes of each worker, their gradients averaged (see `group`)
    shards, wire, guard, policy, order   see `backends.contract`
    """

    model: nn.Module
    loss: Loss
    optimizer: MakeOptimizer | str | Any
    rule: Rule | str = "adag-agn"
    workers: int = 2
    backend: Backend | str = "processes"
    _: KW_ONLY
    epochs: int = 1
    batch: int = 32
    window: int | str | None = "auto"
    lr: float | None = None
    schedule: Schedule | None = None
    metrics: Metrics = ()
    validate: int | str = "epoch"
    monitor: str = "loss"
    patience: int | None = None
    collate: Collate | None = None
    folder: str | os.PathLike[str] | None = None
    resume: bool = False
    storage: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    group: int = 1
    guard: Guard = field(default_factory=Guard)
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    wire: str = "none"
    shards: int | None = None
    order: tuple[int, ...] | None = None
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def fit(
        self, dataset: Any, validation: Any = None, *, watcher: Watcher | None = None
    ) -> History:
        """Train on `dataset`; the model holds the result, and is in the mode that it was in.

        Data sets: see `datasets`. `watcher` is told all that happens, and may stop the run; its
        figures join the validation's. Ctrl-C ends the run and keeps the best center so far, the
        last one without a validation set; `KeyboardInterrupt` where there is none yet.
        Raises `InvalidError` for what cannot be trained, `TrainingError` or `RunError` for a run
        that failed; the model is then as it was.
        """
        with torch.random.fork_rng(devices=[]):
            prepared = prepare(self, dataset, validation)
            progress = Progress(
                prepared.evaluator,
                self.monitor,
                self.patience,
                prepared.folder,
                also=watcher or Watcher(),
                losses=LossWatch(self.workers),
                advice=_advice(prepared),
            )
            if self.resume:
                progress.resume()
            outcome = _run(prepared, progress)
            if not outcome.meta.get("interrupted"):
                outcome = _finish(prepared, progress, outcome)
            unflatten(self.model, outcome.theta)
            prepared.evaluator.refresh(self.model)
        return History(_described(self, prepared, outcome))


def _run(prepared: Prepared, progress: Progress) -> Outcome:
    watcher = progress.watcher(prepared.every_samples, prepared.every_seconds)
    try:
        return prepared.run(prepared.assignment, watcher)
    except KeyboardInterrupt:
        return progress.interrupted()
    except DivergedError as error:
        if error.advice:
            raise
        advice = _advice(prepared)
        if "not finite" in error.detail:
            advice += "; if its loss did not grow before, look for NaN or infinities in the data"
        raise DivergedError(error.rule, error.detail, advice) from error


def _finish(prepared: Prepared, progress: Progress, outcome: Outcome) -> Outcome:
    """The outcome with the last evaluation, and with the best center if the run looked for it."""
    evaluated = progress.evaluations[-1].clock if progress.evaluations else -1
    if prepared.evaluator.figures and evaluated != outcome.clock:
        progress.on_evaluation(outcome.theta, outcome.clock, outcome.samples, outcome.seconds)
    theta = outcome.theta
    if progress.patience is not None and progress.theta is not None:
        theta = progress.theta
    kept: tuple[Evaluation, ...] = tuple(e for e in progress.evaluations if e.figures)
    ends = [event.detail for event in outcome.events if event.kind == "stopped"]
    by_user = outcome.stopped and ends[-1:] == ["interrupted"]  # a backend may end it in order
    meta = {**outcome.meta, **({"interrupted": True} if by_user else {})}
    return replace(outcome, theta=theta, evaluations=kept, meta=meta)


def _described(trainer: Trainer, prepared: Prepared, outcome: Outcome) -> Outcome:
    assignment = prepared.assignment
    backend = trainer.backend
    meta = {
        "name": trainer.name or assignment.rule.name,
        "rule": assignment.rule.name,
        "options": dict(assignment.rule.options),
        "backend": backend if isinstance(backend, str) else getattr(backend, "__name__", "own"),
        "job": asdict(assignment.job),
        "model": type(trainer.model).__name__,
    }
    return replace(outcome, meta={**outcome.meta, **meta})


def _advice(prepared: Prepared) -> str:
    """What to do if this run diverges."""
    job = prepared.assignment.job
    return remedy(prepared.assignment.rule.name, job.window, job.workers)
