"""What is checked before a run starts, and the assignment that comes of it."""

import copy
import hashlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from dovetail.errors import ModelError, UnknownRuleError, UsageError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Assignment, Backend, Storage
from dovetail.training.checkpoint import RunFolder, open_folder
from dovetail.training.datasets import Source, StreamSource, open_dataset
from dovetail.training.group import GroupLearners
from dovetail.training.keras_models import check_keras, is_keras
from dovetail.training.learner import MakeLearner
from dovetail.training.modules import (
    MakeOptimizer,
    ModuleLearner,
    ModuleLearners,
    flatten,
    loss_of,
)
from dovetail.training.optimizers import make_optimizer
from dovetail.training.pickling import check_travels
from dovetail.training.records import Job, Vector
from dovetail.training.rules import RULES, make_rule
from dovetail.training.rules.contract import Rule
from dovetail.training.torch_optimizers import is_plain_sgd, resolve_optimizer, served_settings
from dovetail.training.validation import Evaluator, batches_of, resolve_metrics
from dovetail.training.wire import make_wire

if TYPE_CHECKING:
    from dovetail.training.trainer import Trainer

WINDOWS: dict[str, int | None] = {
    "one-shot": None,
    "averaging": 10,
    "easgd": 10,
    "aeasgd": 10,
    "eamsgd": 10,
    "diloco": 50,
    "async-diloco": 50,
}
"""Windows of rules that are not made for one step; all others commit each."""
_PLAIN = ("dc-asgd", "dc-asgd-adaptive")
"""Rules whose server steps by -lr g itself."""
_AVERAGING = ("averaging", "one-shot")
"""Rules whose workers send their parameters, of which none may be left out."""
_IN_PROCESS = ("simulated", "threads")


@dataclass(frozen=True)
class Prepared:
    """All that `Trainer.fit` needs."""

    assignment: Assignment
    run: Backend
    evaluator: Evaluator
    every_samples: int | None
    every_seconds: float | None
    folder: RunFolder | None


def prepare(trainer: "Trainer", dataset: Any, validation: Any) -> Prepared:
    """Checks everything, and makes the folder's records. Raises `InvalidError`."""
    _check_numbers(trainer)
    _check_model(trainer.model)
    optimizer = resolve_optimizer(trainer.optimizer, trainer.lr)
    rule = bind_rule(trainer.rule, optimizer)
    run = _backend(trainer)
    source = open_dataset(dataset, trainer.collate, trainer.epochs)
    learners = ModuleLearners(
        trainer.model, trainer.loss, optimizer, dataset, trainer.schedule, trainer.collate,
        trainer.epochs, trainer.seed,
    )  # fmt: skip
    theta = flatten(trainer.model)
    _try_out(learners, theta, trainer.batch)
    evaluator = _evaluator(trainer, source, validation)
    if trainer.backend not in _IN_PROCESS:
        _check_travels(learners)
    job = _job(trainer, rule, source, theta)
    _check_wire(trainer.wire, job, rule)
    folder = None
    if trainer.folder is not None:
        folder = open_folder(trainer.folder, _facts(trainer.model, job, rule), trainer.resume)
    elif trainer.resume:
        raise UsageError("resume", "needs the folder of the run")
    make: MakeLearner = learners if trainer.group == 1 else GroupLearners(learners, trainer.group)
    assignment = Assignment(
        job=Job(**{**vars(job), "run": folder.run if folder else uuid.uuid4().hex}),
        rule=rule,
        theta=theta,
        learner=make,
        guard=trainer.guard,
        policy=trainer.policy,
        storage=_storage(trainer, folder),
        shards=trainer.shards,
        wire=trainer.wire,
        order=trainer.order,
    )
    length = source.length if isinstance(source, StreamSource) else source.samples
    every_samples, every_seconds = _moments(trainer.validate, length)
    return Prepared(assignment, run, evaluator, every_samples, every_seconds, folder)


def bind_rule(rule: Rule | str, optimizer: MakeOptimizer) -> Rule:
    """The rule; `sync` gets the optimizer for its server. Raises `UsageError` where a server that
    steps by itself cannot do what this optimizer does."""
    name = rule if isinstance(rule, str) else rule.name
    if not isinstance(name, str) or name not in RULES:
        raise UnknownRuleError(str(name), tuple(RULES))
    if name in _PLAIN and not is_plain_sgd(optimizer):
        raise UsageError(
            "optimizer",
            f"the server of {name} steps by -lr g, as torch.optim.SGD without momentum does; give "
            "that, or a rule whose workers step, as adag-agn",
        )
    if name != "sync":
        return make_rule(rule) if isinstance(rule, str) else rule
    kind, settings = served_settings(optimizer)
    if isinstance(rule, str):
        return make_rule(name, optimizer=kind, **settings)
    theirs = {key: value for key, value in rule.options.items() if key not in ("optimizer", "lr")}
    if make_optimizer(rule.options["optimizer"], **theirs) != make_optimizer(kind, **settings):
        raise UsageError(
            "optimizer",
            f"is {kind}, but the rule was made with {rule.options['optimizer']} and other settings "
            'for its server; give the rule as "sync"',
        )
    return rule


def _check_numbers(trainer: "Trainer") -> None:
    for name in ("workers", "epochs", "batch", "group"):
        _check_count(name, getattr(trainer, name))
    for name in ("window", "patience", "shards"):
        value = getattr(trainer, name)
        if value is not None and not (name == "window" and isinstance(value, str)):
            _check_count(name, value)
    if not isinstance(trainer.seed, int) or trainer.seed < 0:
        raise UsageError("seed", f"must be a whole number of at least 0, not {trainer.seed!r}")
    if not callable(trainer.loss):
        raise UsageError("loss", f"{trainer.loss!r} is not callable")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(name, f"must be a whole number of at least 1, not {value!r}")


def _check_model(model: Any) -> None:
    if is_keras(model):
        check_keras(model)
    if not isinstance(model, nn.Module):
        raise ModelError(type(model).__name__, "is no torch.nn.Module")
    check_travels({"model": model})


def _backend(trainer: "Trainer") -> Backend:
    if isinstance(trainer.backend, str):
        return load_backend(trainer.backend, **trainer.backend_options)
    if not callable(trainer.backend):
        raise UsageError("backend", f"{trainer.backend!r} is no name, and not callable")
    if trainer.backend_options:
        raise UsageError("backend_options", "go with a backend's name")
    return trainer.backend


def _try_out(learners: ModuleLearners, theta: Vector, batch: int) -> None:
    """One batch forward and backward: what is wrong there is wrong in every worker."""
    module = copy.deepcopy(learners.module).train()
    source = open_dataset(learners.dataset, learners.collate, learners.epochs)
    found = next(batches_of(source, batch, 1), None)
    if found is None:
        raise UsageError("dataset", "is empty")
    loss: Any = loss_of(module, learners.loss, found[0])
    if not isinstance(loss, Tensor):
        raise UsageError("loss", f"returns {type(loss).__name__}, not a tensor")
    if loss.numel() != 1:
        raise UsageError("loss", f"is of shape {tuple(loss.shape)}; it must be one number, a mean")
    if not loss.requires_grad:
        raise UsageError("loss", "does not depend on any parameter of the model that is trained")
    learner = ModuleLearner(
        module, learners.loss, learners.optimizer, source, learners.schedule, seed=learners.seed
    )
    indices = np.arange(found[1], dtype=np.int64)
    gradient = learner.gradient(theta.copy(), indices, 0)
    learner.update(theta, gradient.vector, 0.0)


def _evaluator(trainer: "Trainer", source: Source, validation: Any) -> Evaluator:
    metrics = resolve_metrics(trainer.metrics)
    held = None if validation is None else open_dataset(validation, trainer.collate)
    if held is None:
        for option, given in (("metrics", metrics), ("patience", trainer.patience)):
            if given:
                raise UsageError(option, "needs a validation set; give one to fit")
    evaluator = Evaluator(
        copy.deepcopy(trainer.model), trainer.loss, metrics, source, held, trainer.batch
    )
    if held is not None and trainer.monitor not in evaluator.figures:
        known = ", ".join(evaluator.figures)
        raise UsageError("monitor", f"no figure {trainer.monitor!r}; there are {known}")
    evaluator.try_out()
    return evaluator


def _check_wire(wire: str, job: Job, rule: Rule) -> None:
    make_wire(wire, job.size, job.dtype)  # raises what is wrong with it
    if wire.startswith("topk") and rule.name in _AVERAGING:
        raise UsageError(
            "wire",
            f"{rule.name} sends parameters, and what {wire} leaves out would be 0 in the mean; "
            "give float16 or bfloat16, or a rule that sends updates, as agn",
        )


def _check_travels(learners: ModuleLearners) -> None:
    parts: Mapping[str, object] = {
        "loss": learners.loss,
        "optimizer": learners.optimizer,
        "schedule": learners.schedule,
        "collate": learners.collate,
        "dataset": learners.dataset,
    }
    check_travels(parts)


def _job(trainer: "Trainer", rule: Rule, source: Source, theta: Vector) -> Job:
    window = trainer.window
    if isinstance(window, str):
        if window != "auto":
            raise UsageError("window", f'must be a whole number, None or "auto", not {window!r}')
        window = WINDOWS.get(rule.name, 1)
    if window is None and source.samples is None:
        raise UsageError(
            "window", "a stream has no shares, for its end is not known; give a window"
        )
    return Job(
        run="",
        size=theta.size,
        samples=source.samples,
        epochs=trainer.epochs,
        batch=trainer.batch,
        window=window,
        workers=trainer.workers,
        seed=trainer.seed,
        dtype=str(theta.dtype),
    )


def _facts(model: nn.Module, job: Job, rule: Rule) -> dict[str, Any]:
    """What makes a run that run."""
    text = repr([(n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()])
    facts = {key: value for key, value in vars(job).items() if key != "run"}
    model_facts = f"{type(model).__name__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return {"rule": rule.name, "options": rule.options, "model": model_facts, **facts}


def _storage(trainer: "Trainer", folder: RunFolder | None) -> Storage | None:
    if folder is None:
        if trainer.storage:
            raise UsageError("storage", "needs a folder")
        return None
    for name in trainer.storage:
        if name not in ("log", "snapshot_commits", "sync"):
            raise UsageError("storage", f"has no {name!r}; it has log, snapshot_commits, sync")
    return Storage(Path(folder.center), resume=trainer.resume, **trainer.storage)


def _moments(validate: int | str, samples: int | None) -> tuple[int | None, float | None]:
    """(every so many samples, every so many seconds) of an evaluation."""
    if validate == "epoch":
        return samples, None
    if isinstance(validate, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*s\s*", validate)
        if match is None or float(match[1]) <= 0:
            raise UsageError("validate", f'must be "epoch", samples, or "30s", not {validate!r}')
        return None, float(match[1])
    _check_count("validate", validate)
    return validate, None
