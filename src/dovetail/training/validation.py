"""Computes the figures of a model on a validation set: its loss, and metrics.

Each figure is a mean over samples: the mean of the batches' means, weighted by their samples.

No worker has batch-norm statistics that belong to the center, since running statistics belong to a
worker's own copy of the parameters. So they are not sent. Before each evaluation, and for the
trained model, they are computed anew in a pass over some batches of training data ("precise" batch
norm). All other layers, dropout too, are in evaluation mode during that pass:

    mean, variance of a norm's input = averages over batches of training data at theta~

Other buffers of a model stay as they were before training.

On another device the evaluator's copy of the model is there, and so is each batch. With `autocast`
model and loss run under `torch.autocast`, as in training's forward pass, for the figures and for
the statistics. Metrics are computed outside of it, on what the model returned.

Y. Wu, J. Johnson: Rethinking "Batch" in BatchNorm, 2021, https://arxiv.org/abs/2105.07576,
section 3; P. Izmailov et al.: Averaging Weights Leads to Wider Optima, 2018,
https://arxiv.org/abs/1803.05407, section 3.2. Differences: batches' variances are averaged, as by
torch's `update_bn`, not pooled with the spread of their means.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dovetail.errors import UsageError
from dovetail.runtime.user_code import UserCode, at
from dovetail.training.datasets import SampleSource
from dovetail.training.keras_models import is_keras, keras_norms
from dovetail.training.modules import (
    Loss,
    autocasting,
    fill,
    flatten,
    outputs,
    parameters_of,
    to_device,
)
from dovetail.training.records import Vector

Metric = Callable[..., Any]
"""metric(output, *targets): a number, the mean over the batch's samples."""
Metrics = Sequence[str | Metric] | Mapping[str, Metric]
MakeContext = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a model and its loss are called for one batch."""
MOST_NORM_BATCHES = 100
"""Batch-norm statistics are computed from at most so many batches of training data. Their mean is
then within a tenth of one batch's spread. Wu and Johnson, 2021, section 3.2, find 10^3 to 10^4
samples enough."""


@torch.no_grad()
def accuracy(output: Tensor, target: Tensor) -> float:
    """The share of right predictions.

    Classes: output [batch, classes, ...], target [batch, ...] of indices, or probabilities in the
    output's shape. Two classes: output [batch] or [batch, 1], one logit per sample, target 0 or 1.
    """
    if output.ndim == 1 or (output.shape[1] == 1 and target.numel() == output.numel()):
        predicted, expected = output.reshape(-1) > 0, target.reshape(-1) > 0.5
    else:
        predicted = output.argmax(1)
        expected = target if target.ndim < output.ndim else target.argmax(1)
        expected = expected.reshape(predicted.shape)
    return float((predicted == expected).double().mean())


METRICS: dict[str, Metric] = {"accuracy": accuracy}


def resolve_metrics(metrics: Metrics) -> dict[str, Metric]:
    """Returns metrics by name. A callable's name is its `__name__`. Raises `UsageError`."""
    if isinstance(metrics, str):
        metrics = (metrics,)
    pairs = (
        metrics.items()
        if isinstance(metrics, Mapping)
        else [(m if isinstance(m, str) else getattr(m, "__name__", ""), m) for m in metrics]
    )
    resolved: dict[str, Metric] = {}
    for name, metric in pairs:
        if isinstance(metric, str):
            if metric not in METRICS:
                raise UsageError("metrics", f"no {metric!r}; there are {', '.join(METRICS)}")
            metric = METRICS[metric]
        if not callable(metric):
            raise UsageError("metrics", f"{metric!r} is not callable")
        if not name or name == "loss" or name in resolved:
            raise UsageError("metrics", f"{name!r} is no name of its own; give a dictionary")
        resolved[name] = metric
    return resolved


class Evaluator:
    """Computes figures of theta: the loss and the metrics on a validation set.

    `module` belongs to this evaluator from then on. Batch-norm statistics are computed from
    `training`.

    device     where figures and statistics are computed, as torch names it
    autocast   dtype of `torch.autocast` around model and loss, as workers have it; "": none
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        metrics: Mapping[str, Metric],
        training: SampleSource,
        validation: SampleSource | None,
        batch: int,
        *,
        device: str = "cpu",
        autocast: str = "",
    ) -> None:
        self._module, self._loss, self._metrics = module, loss, dict(metrics)
        self._training, self._validation, self._batch = training, validation, batch
        self._device, self._autocast = torch.device(device), autocast
        self._parameters = parameters_of(module)
        # A model that is never called here takes no memory of the device.
        is_called = validation is not None or has_statistics(module)
        self._is_away = device != "cpu" and is_called
        if self._is_away:
            module.to(self._device)

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures that a call returns."""
        return () if self._validation is None else ("loss", *self._metrics)

    @torch.no_grad()
    def try_out(self) -> None:
        """Computes the figures of one batch, so that an error shows now and not at a run's end."""
        if self._validation is None:
            return
        self._module.eval()
        first = next(self._batches(self._validation, 1), None)
        if first is None:
            raise UsageError("validation", "is empty")
        figures_of(self._module, self._loss, self._metrics, first[0], self._casting)

    @torch.no_grad()
    def __call__(self, theta: Vector) -> dict[str, float]:
        """The figures at `theta` [size]; {} without a validation set."""
        if self._validation is None:
            return {}
        fill(self._parameters, theta)
        self.refresh(self._module)
        self._module.eval()
        return mean_of(
            self.figures,
            (
                (figures_of(self._module, self._loss, self._metrics, batch, self._casting), samples)
                for batch, samples in self._batches(self._validation)
            ),
        )

    def refresh(self, module: nn.Module) -> None:
        """Computes the batch-norm statistics of the module's present parameters, if it has any.
        The module is the evaluator's own or one like it on the CPU."""
        if not has_statistics(module):
            return
        there = module
        if self._is_away and module is not self._module:
            # The evaluator's own module computes them, because the other one must not leave the
            # CPU.
            there = self._module
            fill(self._parameters, flatten(module))
        batches = self._batches(self._training, MOST_NORM_BATCHES)
        compute_statistics(there, (batch for batch, _ in batches), self._casting)
        if there is not module:
            for norm, twin in zip(norms_of(there), norms_of(module), strict=True):
                for name in ("running_mean", "running_var", "num_batches_tracked"):
                    getattr(twin, name).copy_(getattr(norm, name))

    def _batches(self, source: SampleSource, most: int | None = None) -> Iterator[tuple[Any, int]]:
        """The batches of `batches_of`, where the evaluator's module is."""
        for batch, samples in batches_of(source, self._batch, most):
            yield (to_device(batch, self._device) if self._is_away else batch), samples

    def _casting(self) -> AbstractContextManager[Any]:
        return autocasting(self._device, self._autocast) if self._autocast else nullcontext()


def figures_of(
    module: nn.Module,
    loss: Loss,
    metrics: Mapping[str, Metric],
    batch: Any,
    casting: MakeContext = nullcontext,
) -> dict[str, float]:
    """The loss and the metrics of one batch, in the mode that the module is in. Model and loss are
    called in the context."""
    with casting():
        output, targets = outputs(module, batch)
        with UserCode("the loss", loss, module):
            mean = loss(output, *targets)
    figures = {"loss": _number("loss", mean, loss)}
    for name, metric in metrics.items():
        with UserCode(f"the metric {name}", metric, module):
            value = metric(output, *targets)
        figures[name] = _number(name, value, metric)
    return figures


def mean_of(
    names: Iterable[str], batches: Iterable[tuple[Mapping[str, float], int]]
) -> dict[str, float]:
    """The mean over all samples of each figure, from (figures, samples) of each batch."""
    sums, total = dict.fromkeys(names, 0.0), 0
    for figures, samples in batches:
        for name, value in figures.items():
            sums[name] += samples * value
        total += samples
    return {name: value / total for name, value in sums.items()}


def batches_of(
    source: SampleSource, batch: int, most: int | None = None
) -> Iterator[tuple[Any, int]]:
    """Yields (batch, samples) over the whole source, or `most` batches evenly spread over it.

    In a stream, the `most` first batches are taken, since it cannot be read from its middle.
    """
    starts: Iterator[int] = itertools.count(0, batch)
    if source.samples is not None:
        whole = range(0, source.samples, batch)
        count = len(whole) if most is None else min(most, len(whole))
        starts = (whole[number * len(whole) // count] for number in range(count))
    for start in itertools.islice(starts, most):
        stop = start + batch if source.samples is None else min(start + batch, source.samples)
        content, samples = source.batch(np.arange(start, stop, dtype=np.int64), 0)
        if samples:
            yield content, samples
        if samples < stop - start:
            return


def _number(name: str, value: Any, function: Callable[..., Any]) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            "loss" if name == "loss" else "metrics",
            f"{name} is not one number for a batch but {type(value).__name__}: {error}"
            f"{at(function)}",
        ) from None


def has_statistics(module: nn.Module) -> bool:
    """Whether any norm of the module keeps running statistics."""
    return bool(keras_norms(module) if is_keras(module) else norms_of(module))


@torch.no_grad()
def compute_statistics(
    module: nn.Module, batches: Iterable[Any], casting: MakeContext = nullcontext
) -> None:
    """Replaces the running statistics by averages over the batches. Each part of the module stays
    in the mode that it was in. The model is called in the context, except a Keras model."""
    of_keras = is_keras(module)
    norms: list[Any] = keras_norms(module) if of_keras else list(norms_of(module))
    modes = {part: part.training for part in module.modules()}
    momenta = [norm.momentum for norm in norms]
    try:
        if of_keras:
            # Keras has one mode for a whole call, so dropout is active in this pass.
            module.train()
        else:
            module.eval()
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
                # With the momentum None, torch computes a plain average over all batches.
                norm.momentum = None
        for number, batch in enumerate(batches):
            if of_keras:
                # The momentum i/(i + 1) in batch i makes the moving average a plain one.
                for norm in norms:
                    norm.momentum = number / (number + 1)
                outputs(module, batch)
            else:
                with casting():
                    outputs(module, batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for part, mode in modes.items():
            part.training = mode


def norms_of(module: nn.Module) -> list[_NormBase]:
    """The module's batch norms, and others that keep running statistics."""
    return [
        part
        for part in module.modules()
        if isinstance(part, _NormBase) and part.running_mean is not None
    ]
