"""The interface to a network: its gradient, and one step of its optimizer. It knows arrays only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.training.records import Vector


@dataclass(frozen=True)
class Gradient:
    """The mean gradient over some samples. `vector` [size] is valid until the next call."""

    vector: Vector
    loss: float
    samples: int


class Stepper(Protocol):
    """A worker's optimizer."""

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        """Returns U(g) [size], a new vector: what the optimizer would add to `theta`. Advances the
        optimizer's state. `epoch`, which may be a fraction, is where the step stands in the
        learning rate's schedule."""
        ...

    def rate(self, epoch: float) -> float:
        """The learning rate at that epoch."""
        ...


class Learner(Stepper, Protocol):
    """A worker's network, data and optimizer. `gradient` may take as long as it likes."""

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        """The gradient at `theta` [size] over the data set's samples `indices`. For a stream,
        `indices` are positions in it."""
        ...


MakeLearner = Callable[[int], Learner]
"""Makes a worker's learner by the worker's index. It is called in the worker's own process."""
