"""Checks a request with its data before a run starts, and makes the assignment for the backend."""

import copy
import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dovetail.errors import ModelError, UsageError
from dovetail.runtime.torch_versions import dynamo_later, has_parameter_hooks, pytree
from dovetail.runtime.user_code import UserCode, at
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Assignment, Backend, Storage
from dovetail.training.callbacks import check_callbacks
from dovetail.training.checkpoint import RunFolder, open_folder
from dovetail.training.datasets import (
    ArraySource,
    SampleSource,
    StreamSource,
    labels_of,
    open_dataset,
)
from dovetail.training.group import GroupLearners
from dovetail.training.keras_models import is_keras
from dovetail.training.modules import (
    ModuleLearner,
    ModuleLearners,
    check_gpu_name,
    check_module,
    device_of,
    flatten,
    loss_of,
    named_parameters,
    parameters_of,
)
from dovetail.training.optimizers import make_optimizer
from dovetail.training.pickling import check_travels
from dovetail.training.positions import arrangement
from dovetail.training.records import LEASED, Job, Vector
from dovetail.training.request import TrainRequest, launched_rank
from dovetail.training.rules import RULES, entry_of, make_rule
from dovetail.training.rules.contract import Rule
from dovetail.training.torch_optimizers import (
    MakeOptimizer,
    check_server_steps,
    resolve_optimizer,
    served_settings,
)
from dovetail.training.validation import Evaluator, batches_of, norms_of, resolve_metrics
from dovetail.training.wire import make_wire

_IN_PROCESS = ("simulated", "threads")
"""Backends whose workers live in this process, so that nothing is sent to another one."""
COMPARED_ROWS = 64
"""Ranks compare so many samples of arrays, evenly spread."""


@dataclass(frozen=True)
class PreparedTraining:
    """A checked request, and everything that its run needs."""

    request: TrainRequest
    assignment: Assignment
    run: Backend
    evaluator: Evaluator
    epoch_samples: int | None
    folder: RunFolder | None


@dynamo_later()
def prepare(request: TrainRequest, dataset: Any, validation: Any) -> PreparedTraining:
    """Checks the request with its data, and opens the run's folder. Raises `InvalidError`."""
    if request.backend == "ranks" and launched_rank():
        # Rank 0 alone keeps the run's state and calls back.
        request = replace(request, folder=None, resume=False, storage={}, callbacks=())
    model = request.model
    check_module(model)
    check_travels({"model": model})
    _check_device(request)
    parameters = parameters_of(model)
    for path, parameter in named_parameters(model):
        if has_parameter_hooks(parameter):
            says = f"{path} has a hook, which workers' copies would lack; put it into the model"
            raise ModelError(type(model).__name__, f"{says} or the optimizer{at(model)}")
    optimizer = resolve_optimizer(request.optimizer, request.lr, parameters)
    rule = bind_rule(request.rule, optimizer)
    run = (
        load_backend(request.backend, **request.backend_options)
        if isinstance(request.backend, str)
        else request.backend
    )
    source = open_dataset(dataset, request.collate, request.epochs)
    length = source.length if isinstance(source, StreamSource) else source.samples
    check_callbacks(request.callbacks, length)
    # The order [samples] of the data set from which shares are cut; None: there are no shares.
    order = None
    if request.partition != LEASED:
        if source.samples is None:
            raise UsageError("partition", f"{request.partition} needs a data set of known length")
        if source.samples < request.workers:
            says = f"{source.samples} samples are too few for a share for each of "
            raise UsageError("partition", f"{says}{request.workers} workers")
        by_label = request.partition == "by-label"
        labels = labels_of(source) if by_label else np.zeros(source.samples, np.bool_)
        order = arrangement(request.partition, labels, request.seed)
    learners = ModuleLearners(
        model, request.loss, optimizer, dataset, request.schedule, request.collate,
        request.epochs, request.seed, order, request.device, request.autocast,
    )  # fmt: skip
    theta = flatten(model)
    here = _device_here(request)
    learner = _try_out(learners, theta, request.batch, here)
    evaluator = _evaluator(request, source, validation, here)
    if request.backend not in _IN_PROCESS:
        sent = ("loss", "optimizer", "schedule", "collate", "dataset")
        check_travels({name: getattr(learners, name) for name in sent})
    window = request.window
    if isinstance(window, str):  # "auto"
        window = RULES[rule.name].window
    if window is None and source.samples is None:
        says = "a stream has no shares, for its end is not known; give a window"
        raise UsageError("window", says)
    job = Job(
        run="",
        size=theta.size,
        samples=source.samples,
        epochs=request.epochs,
        batch=request.batch,
        window=window,
        workers=request.workers,
        seed=request.seed,
        dtype=str(theta.dtype),
        partition=request.partition,
    )
    wire = request.wire
    make_wire(wire, job.size, job.dtype)  # raises what is wrong with it
    if wire.startswith("topk") and RULES[rule.name].sends_parameters:
        raise UsageError(
            "wire",
            f"{rule.name} sends parameters, and what {wire} leaves out would be 0 in the mean; "
            "give float16 or bfloat16, or a rule that sends updates, as agn",
        )
    folder = storage = None
    if request.folder is not None:
        folder = open_folder(request.folder, _facts(model, job, rule), request.resume)
        storage = Storage(Path(folder.center), resume=request.resume, **request.storage)
    facts = {}
    if request.backend == "ranks":
        facts = _facts_of_ranks(request, job, rule, learner, source)
    assignment = Assignment(
        job=replace(job, run=folder.run if folder else uuid.uuid4().hex),
        rule=rule,
        theta=theta,
        learner=learners if request.group == 1 else GroupLearners(learners, request.group),
        guard=request.guard,
        policy=request.policy,
        storage=storage,
        shards=request.shards,
        wire=wire,
        order=request.order,
        device=request.device,
        facts=facts,
    )
    return PreparedTraining(request, assignment, run, evaluator, length, folder)


def bind_rule(rule: Rule | str, optimizer: MakeOptimizer) -> Rule:
    """Returns the rule with its options bound. `sync` gets the optimizer for its server.

    Raises `UsageError` if the rule's server steps by itself and cannot do what this optimizer does.
    """
    entry = entry_of(rule)
    name = entry.name
    check_server_steps(entry, optimizer)
    if name != "sync":
        return make_rule(rule) if isinstance(rule, str) else rule
    kind, settings = served_settings(optimizer)
    if isinstance(rule, str):
        return make_rule(name, optimizer=kind, **settings)
    bound = {key: value for key, value in rule.options.items() if key not in ("optimizer", "lr")}
    if make_optimizer(rule.options["optimizer"], **bound) != make_optimizer(kind, **settings):
        raise UsageError(
            "optimizer",
            f"is {kind}, but the rule was made with {rule.options['optimizer']} and other settings "
            'for its server; give the rule as "sync"',
        )
    return rule


def _check_device(request: TrainRequest) -> None:
    """Raises `UsageError` for a device that is not here, or on which this cannot train."""
    device = request.device
    if device == "cpu":
        return
    if is_keras(request.model):
        raise UsageError("device", "a Keras model trains on the CPU; leave it out")
    if request.backend == "ray":
        if device != "cuda":
            says = f"Ray chooses the GPU of each worker; give cuda, not {device!r}"
            raise UsageError("device", says)
        # The GPUs are in the cluster, and perhaps not here. The backend counts them.
        return
    check_gpu_name(device)


def gpus_of(request: TrainRequest) -> Sequence[int]:
    """Numbers of this process's GPUs, on which a run's learners may draw random numbers; () if the
    run is on the CPU. Raises `UsageError` for a device that is not here."""
    _check_device(request)
    return range(torch.cuda.device_count()) if request.device != "cpu" else ()


def _device_here(request: TrainRequest) -> str:
    """The device of this process's own computing, trial steps and evaluations: the first worker's.

    Only the caller of `ray` may be without GPUs that its workers have. It computes on the CPU then.
    """
    if request.backend == "ray" and not torch.cuda.is_available():
        return "cpu"
    return device_of(request.device, 0)


def _try_out(learners: ModuleLearners, theta: Vector, batch: int, device: str) -> ModuleLearner:
    """Runs one batch forward and backward, so that an error shows now and not in every worker. An
    optimizer takes a step unless it is torch's own. Returns the learner that did so."""
    with UserCode("copying the model", learners.module):
        module = copy.deepcopy(learners.module).train()
    source = open_dataset(learners.dataset, learners.collate, learners.epochs)
    first = next(batches_of(source, batch, 1), None)
    if first is None:
        raise UsageError("dataset", "is empty")
    loss: Any = loss_of(module, learners.loss, first[0])
    if not loss.requires_grad:
        says = "does not depend on any parameter of the model that is trained"
        raise UsageError("loss", f"{says}{at(learners.loss)}")
    learner = ModuleLearner(
        module, learners.loss, learners.optimizer, source, learners.schedule, seed=learners.seed,
        device=device, autocast=learners.autocast,
    )  # fmt: skip
    indices = np.arange(first[1], dtype=np.int64)
    gradient = learner.gradient(theta.copy(), indices, 0)
    if learner.steps_as_torch_does:
        learner.rate(0.0)
    else:
        learner.update(theta, gradient.vector, 0.0)
    return learner


def _evaluator(
    request: TrainRequest, source: SampleSource, validation: Any, device: str
) -> Evaluator:
    metrics = resolve_metrics(request.metrics)
    held = None if validation is None else open_dataset(validation, request.collate)
    if held is None:
        for option, given in (("metrics", metrics), ("patience", request.patience)):
            if given:
                raise UsageError(option, "needs a validation set; give one to fit")
    evaluator = Evaluator(
        copy.deepcopy(request.model), request.loss, metrics, source, held, request.batch,
        device=device, autocast=request.autocast if request.device != "cpu" else "",
    )  # fmt: skip
    if held is not None and request.monitor not in evaluator.figures:
        offered = ", ".join(evaluator.figures)
        raise UsageError("monitor", f"no figure {request.monitor!r}; there are {offered}")
    evaluator.try_out()
    return evaluator


def _facts(model: nn.Module, job: Job, rule: Rule) -> dict[str, Any]:
    """The facts that a resumed run must share with the run that it continues. A hash stands for the
    names and shapes of the model's parameters."""
    text = repr([(n, tuple(p.shape), p.requires_grad) for n, p in named_parameters(model)])
    model_facts = f"{type(model).__name__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return {"rule": rule.name, "options": rule.options, "model": model_facts, **job.facts()}


def _facts_of_ranks(
    request: TrainRequest, job: Job, rule: Rule, learner: ModuleLearner, source: SampleSource
) -> dict[str, Any]:
    """What is compared between ranks, each of which has made the model and the data set by itself.

    Initial weights may differ, since rank 0's are trained, and so may batch norms' statistics,
    which are computed after training. Frozen parameters and other buffers are not sent, so they
    must be equal. Of arrays some rows are compared, of other data sets the length alone.
    """
    model = request.model
    facts: dict[str, Any] = {
        "model": _facts(model, job, rule)["model"],
        "optimizer": learner.settings,
        "autocast": request.autocast,
        "group": request.group,
    }
    # Keras keeps the states of random generators among them, which each rank draws for itself.
    if not is_keras(model):
        frozen = [p for _, p in named_parameters(model) if not p.requires_grad]
        statistics = {id(buffer) for norm in norms_of(model) for buffer in norm.buffers()}
        buffers = [buffer for buffer in model.buffers() if id(buffer) not in statistics]
        facts["buffers"] = _digest_of(*frozen, *buffers)
    if isinstance(source, ArraySource) and source.samples:
        rows = np.unique(np.linspace(0, source.samples - 1, COMPARED_ROWS).astype(np.int64))
        facts["dataset"] = _digest_of(*pytree.tree_leaves(source.batch(rows, 0)[0]))
    return facts


def _digest_of(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        digest.update(f"{dense.dtype} {tuple(dense.shape)}".encode())
        digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
