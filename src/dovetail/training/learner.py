"""What training knows of a network: its gradient, and one step of its optimizer. Arrays only."""

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


class Learner(Protocol):
    """A worker's network, data and optimizer. `gradient` may take as long as it likes."""

    def gradient(self, theta: Vector, indices: NDArray[np.int64], epoch: int) -> Gradient:
        """At `theta` [size], over the data set's samples `indices`; of a stream, positions."""
        ...

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        """U(g) [size], a new vector: what the optimizer would add to `theta`. Advances the
        optimizer's state. `epoch`, a fraction, places the step in the learning rate's schedule."""
        ...

    def rate(self, epoch: float) -> float:
        """The learning rate at that epoch."""
        ...


MakeLearner = Callable[[int], Learner]
"""Worker index -> its learner; called in the worker's own process."""
