"""Optimizers on one flat vector, without torch: for the server, and for learners in numpy.

The recurrences and the order of operations are those of `torch.optim` (2.13, its single-tensor path
on the CPU), with bias corrections in float64. So both agree up to rounding. An optimizer returns
U(g), the vector that it would add to theta, and advances its slots (vectors) and counts (numbers),
which start at zero. Differences: U(g) is a new vector, where torch changes theta in place.

The package has two other implementations of Adam, and neither can replace this one bit for bit. The
records of `frontends.optimizers` run torch's own functions, because captured training steps must
equal them, and so need torch. Learned placers compute the sums in another order of operations, by
which 82 % of a step's elements differ from this one's in the last bits. RMSprop agrees with
`runtime.rmsprop` bit for bit, but that changes tensors of torch where they lie, many by one call,
and a server that restarts should not import torch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from dovetail.errors import UsageError
from dovetail.training import kernels
from dovetail.training.options import fraction, not_negative
from dovetail.training.records import Vector

COUNT = "updates"


@dataclass(frozen=True)
class FlatOptimizer(ABC):
    """An optimizer, whose settings are the record's fields.

    lr   the learning rate if `update` is given none
    """

    lr: float

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("momentum", "alpha"):
                fraction(name, value)
            elif name in ("lr", "lr_decay", "weight_decay", "eps"):
                not_negative(name, value)

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the vectors that the optimizer keeps."""

    @abstractmethod
    def loop(self, lr: float, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        """The compiled loop of step 1, 2, ..., and its scalars. Its vectors are the change, theta,
        the gradient and the slots."""

    def update(
        self,
        theta: Vector,
        gradient: Vector,
        slots: dict[str, Vector],
        counts: dict[str, int],
        rate: float | None = None,
    ) -> Vector:
        """Returns U(g) [size] and advances slots and counts. theta [size] is not changed. `rate`
        replaces `lr`."""
        counts[COUNT] = step = counts.get(COUNT, 0) + 1
        loop, scalars = self.loop(self.lr if rate is None else rate, step)
        change = np.empty_like(theta)
        kernels.run(loop, change, (theta, gradient, *(slots[name] for name in self.slots)), scalars)
        return change


@dataclass(frozen=True)
class FlatSGD(FlatOptimizer):
    """b = momentum b + g;  U = -lr b, or -lr (g + momentum b) with `nesterov`."""

    lr: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov", "needs a momentum above 0")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def loop(self, lr: float, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        if not self.momentum:
            return _sgd_decayed, (lr, self.weight_decay)
        # One loop serves both forms: U = -lr (gradient_weight g + buffer_weight b).
        gradient_weight, buffer_weight = (1.0, self.momentum) if self.nesterov else (0.0, 1.0)
        return _sgd, (lr, self.momentum, gradient_weight, buffer_weight, self.weight_decay)

    def update(
        self,
        theta: Vector,
        gradient: Vector,
        slots: dict[str, Vector],
        counts: dict[str, int],
        rate: float | None = None,
    ) -> Vector:
        if self.momentum or self.weight_decay:
            return super().update(theta, gradient, slots, counts, rate)
        # Plain SGD, of which no loop has to be compiled.
        counts[COUNT] = counts.get(COUNT, 0) + 1
        return np.multiply(gradient, theta.dtype.type(-(self.lr if rate is None else rate)))


@dataclass(frozen=True)
class FlatAdam(FlatOptimizer):
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
    U = -lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps);  weight decay is added to g.

    Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015, https://arxiv.org/abs/1412.6980,
    algorithm 1.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name: ClassVar[str] = "adam"
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise UsageError("betas", f"must be two numbers, not {self.betas!r}")
        for beta in self.betas:
            fraction("betas", beta)
        object.__setattr__(self, "betas", tuple(self.betas))

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def loop(self, lr: float, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        first, second = self.betas
        coupled = 0.0 if self.decoupled else self.weight_decay
        pull = lr * self.weight_decay if self.decoupled else 0.0
        return _adam, (
            lr / (1.0 - first**step),
            math.sqrt(1.0 - second**step),
            1.0 - first,
            second,
            1.0 - second,
            self.eps,
            coupled,
            pull,
        )


@dataclass(frozen=True)
class FlatAdamW(FlatAdam):
    """Adam whose weight decay goes to theta: U = -lr decay theta - (Adam's, without it).

    Loshchilov, Hutter: Decoupled Weight Decay Regularization, 2019,
    https://arxiv.org/abs/1711.05101, algorithm 2.
    """

    weight_decay: float = 1e-2

    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True)
class FlatAdagrad(FlatOptimizer):
    """s = s + g^2;  U = -lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps).

    Duchi, Hazan, Singer: Adaptive Subgradient Methods, 2011,
    https://jmlr.org/papers/v12/duchi11a.html, section 1.1.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-10

    name: ClassVar[str] = "adagrad"

    @property
    def slots(self) -> tuple[str, ...]:
        return ("sum",)

    def loop(self, lr: float, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        return _adagrad, (lr / (1.0 + (step - 1) * self.lr_decay), self.eps, self.weight_decay)


@dataclass(frozen=True)
class FlatRMSprop(FlatOptimizer):
    """s = alpha s + (1 - alpha) g^2;  d = g / (sqrt(s) + eps);  b = momentum b + d;  U = -lr b.

    Hinton: Neural Networks for Machine Learning, 2012, lecture 6e,
    https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf.
    Differences: torch's `centered` is not offered.
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0

    name: ClassVar[str] = "rmsprop"

    @property
    def slots(self) -> tuple[str, ...]:
        return ("square", "momentum") if self.momentum else ("square",)

    def loop(self, lr: float, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        scalars = (lr, self.alpha, 1.0 - self.alpha, self.eps, self.weight_decay)
        return (
            (_rmsprop_momentum, (*scalars, self.momentum)) if self.momentum else (_rmsprop, scalars)
        )


OPTIMIZERS: dict[str, type[FlatSGD | FlatAdam | FlatAdagrad | FlatRMSprop]] = {
    FlatSGD.name: FlatSGD,
    FlatAdam.name: FlatAdam,
    FlatAdamW.name: FlatAdamW,
    FlatAdagrad.name: FlatAdagrad,
    FlatRMSprop.name: FlatRMSprop,
}


def make_optimizer(name: str, **settings: Any) -> FlatOptimizer:
    """The optimizer of that name. Raises a `UsageError` that names the setting, if the optimizer
    does not have it or its value is bad."""
    if name not in OPTIMIZERS:
        raise UsageError("optimizer", f"{name!r} is not one of {', '.join(OPTIMIZERS)}")
    kind: Any = OPTIMIZERS[name]
    offered = [field.name for field in fields(kind)]
    for setting in settings:
        if setting not in offered:
            raise UsageError(setting, f"{name} has no such setting; it has {', '.join(offered)}")
    optimizer: FlatOptimizer = kind(**settings)
    return optimizer


def _sgd_decayed(out: Vector, theta: Vector, gradient: Vector, lr: float, decay: float) -> None:
    for i in range(out.size):
        out[i] = -lr * (gradient[i] + decay * theta[i])


def _sgd(  # noqa: PLR0917  compiled: flat arguments
    out: Vector,
    theta: Vector,
    gradient: Vector,
    buffer: Vector,
    lr: float,
    momentum: float,
    gradient_weight: float,
    buffer_weight: float,
    decay: float,
) -> None:
    for i in range(out.size):
        g = gradient[i] + decay * theta[i]
        buffer[i] = momentum * buffer[i] + g
        out[i] = -lr * (gradient_weight * g + buffer_weight * buffer[i])


def _adam(  # noqa: PLR0917  compiled: flat arguments
    out: Vector,
    theta: Vector,
    gradient: Vector,
    mean: Vector,
    square: Vector,
    rate: float,
    correction: float,
    first_rest: float,
    second: float,
    second_rest: float,
    eps: float,
    coupled: float,
    pull: float,
) -> None:
    for i in range(out.size):
        g = gradient[i] + coupled * theta[i]
        mean[i] += first_rest * (g - mean[i])
        square[i] = second * square[i] + second_rest * g * g
        out[i] = -pull * theta[i] - rate * mean[i] / (math.sqrt(square[i]) / correction + eps)


def _adagrad(
    out: Vector,
    theta: Vector,
    gradient: Vector,
    total: Vector,
    rate: float,
    eps: float,
    decay: float,
) -> None:
    for i in range(out.size):
        g = gradient[i] + decay * theta[i]
        total[i] += g * g
        out[i] = -rate * g / (math.sqrt(total[i]) + eps)


def _rmsprop(  # noqa: PLR0917  compiled: flat arguments
    out: Vector,
    theta: Vector,
    gradient: Vector,
    square: Vector,
    lr: float,
    alpha: float,
    rest: float,
    eps: float,
    decay: float,
) -> None:
    for i in range(out.size):
        g = gradient[i] + decay * theta[i]
        square[i] = alpha * square[i] + rest * g * g
        out[i] = -lr * (g / (math.sqrt(square[i]) + eps))


def _rmsprop_momentum(  # noqa: PLR0917  compiled: flat arguments
    out: Vector,
    theta: Vector,
    gradient: Vector,
    square: Vector,
    buffer: Vector,
    lr: float,
    alpha: float,
    rest: float,
    eps: float,
    decay: float,
    momentum: float,
) -> None:
    for i in range(out.size):
        g = gradient[i] + decay * theta[i]
        square[i] = alpha * square[i] + rest * g * g
        buffer[i] = momentum * buffer[i] + g / (math.sqrt(square[i]) + eps)
        out[i] = -lr * buffer[i]
