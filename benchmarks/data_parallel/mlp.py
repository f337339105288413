"""Small multilayer perceptrons in numpy: some 60 us a step, where torch takes three times as long.

    x ─► (W, b) ─ relu ─► ... ─► (W, b) ─► softmax ─► mean cross-entropy

All weights are one flat float32 vector, layer by layer, each weight [inputs, outputs] before its
bias. `MlpLearner` is what a worker trains with; its optimizer's state is its own, and outlives
pulls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.training import Gradient, Vector
from dovetail.training.optimizers import make_optimizer

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """Data to learn, split once: inputs [samples, features], labels [samples]."""

    name: str
    inputs: Floats
    labels: Integers
    test_inputs: Floats
    test_labels: Integers
    hidden: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        classes = 1 + int(max(self.labels.max(), self.test_labels.max()))
        return (self.inputs.shape[1], *self.hidden, classes)


def views(theta: Vector, sizes: Sequence[int]) -> list[tuple[Vector, Vector]]:
    """(weight [inputs, outputs], bias [outputs]) of each layer, in `theta`."""
    layers, start = [], 0
    for inputs, outputs in pairwise(sizes):
        middle = start + inputs * outputs
        end = middle + outputs
        layers.append((theta[start:middle].reshape(inputs, outputs), theta[middle:end]))
        start = end
    return layers


def start(sizes: Sequence[int], seed: int) -> Vector:
    """Where training begins: uniform within 1/sqrt(inputs), as `torch.nn.Linear`."""
    rng = np.random.default_rng(seed)
    parts = []
    for inputs, outputs in pairwise(sizes):
        bound = inputs**-0.5
        parts.append(rng.uniform(-bound, bound, inputs * outputs + outputs))
    return np.concatenate(parts).astype(np.float32)


def logits(theta: Vector, sizes: Sequence[int], inputs: Floats) -> Floats:
    """[samples, classes]"""
    layers = views(theta, sizes)
    out = inputs
    for weight, bias in layers[:-1]:
        out = np.maximum(out @ weight + bias, 0)
    weight, bias = layers[-1]
    return out @ weight + bias


def figures(
    theta: Vector, sizes: Sequence[int], inputs: Floats, labels: Integers
) -> dict[str, Any]:
    """Mean loss and accuracy; of a center that is not finite, nan and 0."""
    out = logits(theta, sizes, inputs).astype(np.float64)
    if not np.isfinite(out).all():
        return {"loss": float("nan"), "accuracy": 0.0}
    out -= out.max(axis=1, keepdims=True)
    chosen = out[np.arange(len(labels)), labels] - np.log(np.exp(out).sum(axis=1))
    return {
        "loss": float(-chosen.mean()),
        "accuracy": float((out.argmax(axis=1) == labels).mean()),
    }


class MlpLearner:
    """Gradients of the mean cross-entropy, and an optimizer at a constant rate."""

    def __init__(self, task: Task, optimizer: str, rate: float) -> None:
        self.task, self.sizes, self.learning_rate = task, task.sizes, rate
        self.optimizer = make_optimizer(optimizer, lr=rate)
        size = sum((a + 1) * b for a, b in pairwise(self.sizes))
        self.slots = {name: np.zeros(size, np.float32) for name in self.optimizer.slots}
        self.counts: dict[str, int] = {}
        self.vector = np.empty(size, np.float32)
        self.parts = views(self.vector, self.sizes)

    def gradient(self, theta: Vector, indices: Integers, epoch: int) -> Gradient:
        layers = views(theta, self.sizes)
        labels = self.task.labels[indices]
        activations = [self.task.inputs[indices]]
        for weight, bias in layers[:-1]:
            out = activations[-1] @ weight
            out += bias
            activations.append(np.maximum(out, 0, out=out))
        weight, bias = layers[-1]
        error = activations[-1] @ weight
        error += bias
        error -= error.max(axis=1, keepdims=True)
        every = np.arange(len(labels))
        chosen = error[every, labels]
        np.exp(error, out=error)
        total = error.sum(axis=1)
        loss = float((np.log(total) - chosen).mean())
        error /= total[:, None]
        error[every, labels] -= 1
        error /= np.float32(len(labels))
        for i in range(len(layers) - 1, -1, -1):
            weight_part, bias_part = self.parts[i]
            np.matmul(activations[i].T, error, out=weight_part)
            error.sum(axis=0, out=bias_part)
            if i:
                error = error @ layers[i][0].T
                error *= activations[i] > 0
        return Gradient(self.vector, loss, len(labels))

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        return self.optimizer.update(theta, gradient, self.slots, self.counts, self.learning_rate)

    def rate(self, epoch: float) -> float:
        return self.learning_rate
