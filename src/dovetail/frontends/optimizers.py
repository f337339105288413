"""Optimizers as records, and the functions that update one parameter.

An update calls the single-tensor function of `torch.optim` itself, so that the order of operations
and the result are torch's bit for bit. Another order drifts by .14 (relative) within three Adam
steps of a deep convolutional net in float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from dovetail.errors import UsageError
from dovetail.runtime.torch_versions import count_not_finite, update_scale


@dataclass(frozen=True)
class OptimizerState:
    """One tensor of optimizer state per parameter. All its elements are `fill` before the first
    step.

    scalar   True: one float32 number (a step count); False: of the parameter's shape and dtype
    """

    name: str
    fill: float = 0.0
    scalar: bool = False


def _check(record: Any, of: str) -> None:
    """Raise `UsageError` for a field that is no finite number from 0 on, or no flag where it is
    one."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise UsageError(field.name, f"of {of} is {value!r}; give True or False")
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            kind = type(value).__name__
            raise UsageError(field.name, f"of {of} is no number but of type {kind}")
        if value < 0 or not value < math.inf:  # also for integers that no float holds
            raise UsageError(field.name, f"of {of} is {value}; it must be >= 0")
        if isinstance(field.default, int) and not isinstance(value, Integral):
            raise UsageError(field.name, f"of {of} is {value}; it must be a whole number")
        if not isinstance(value, (int, float)):  # a number of numpy, which texts cannot hold
            plain = int(value) if isinstance(value, Integral) else float(value)
            object.__setattr__(record, field.name, plain)


@dataclass(frozen=True)
class SGD:
    """The settings of `torch.optim.SGD`; momentum 0 means no momentum."""

    lr: float = 1e-3
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        _check(self, self.name)
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov", "needs momentum; give momentum=0.9, say")

    @property
    def states(self) -> tuple[OptimizerState, ...]:
        # At the first step torch takes the gradient itself as the buffer. With a buffer of -0.0,
        # `buffer * momentum + gradient` is the gradient bit for bit; 0.0 would turn a gradient of
        # -0.0 into 0.0.
        return (OptimizerState("momentum_buffer", -0.0),) if self.momentum else ()

    @property
    def flops_per_element(self) -> int:
        return 2 + 2 * bool(self.weight_decay) + 3 * bool(self.momentum) + 2 * self.nesterov

    @property
    def update(self) -> Callable[..., tuple[Tensor, ...]]:
        return update_sgd


@dataclass(frozen=True)
class RMSProp:
    """The settings of `torch.optim.RMSprop`."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    name: ClassVar[str] = "rmsprop"

    def __post_init__(self) -> None:
        _check(self, self.name)
        if self.alpha > 1:
            raise UsageError("alpha", f"of {self.name} is {self.alpha}; it must be <= 1")

    @property
    def states(self) -> tuple[OptimizerState, ...]:
        buffers = [OptimizerState("step", scalar=True), OptimizerState("square_avg")]
        if self.momentum > 0:
            buffers.append(OptimizerState("momentum_buffer"))
        if self.centered:
            buffers.append(OptimizerState("grad_avg"))
        return tuple(buffers)

    @property
    def flops_per_element(self) -> int:
        extra = 2 * bool(self.weight_decay) + 2 * bool(self.momentum) + 6 * self.centered
        return 9 + extra

    @property
    def update(self) -> Callable[..., tuple[Tensor, ...]]:
        return update_rmsprop


@dataclass(frozen=True)
class Adam:
    """The settings of `torch.optim.Adam`."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        _check(self, self.name)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if beta >= 1:
                raise UsageError(name, f"of {self.name} is {beta}; it must be < 1")

    @property
    def states(self) -> tuple[OptimizerState, ...]:
        return (
            OptimizerState("step", scalar=True),
            OptimizerState("exp_avg"),
            OptimizerState("exp_avg_sq"),
        )

    @property
    def flops_per_element(self) -> int:
        return 13 + 2 * bool(self.weight_decay)

    @property
    def update(self) -> Callable[..., tuple[Tensor, ...]]:
        return update_adam


@dataclass(frozen=True)
class AdamW(Adam):
    """The settings of `torch.optim.AdamW`: Adam whose weight decay does not pass through the
    gradient."""

    weight_decay: float = 1e-2

    name: ClassVar[str] = "adamw"

    @property
    def update(self) -> Callable[..., tuple[Tensor, ...]]:
        return update_adamw


Optimizer = SGD | RMSProp | Adam | AdamW
OptimizerLike = Optimizer | str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
"""An optimizer, as `optimizer_of` takes it."""

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9),
    "rmsprop": RMSProp(),
    "adam": Adam(),
    "adamw": AdamW(),
}
"""Name in `--train` -> the optimizer with its default settings."""


def torch_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return torch's own optimizer with these settings. How it updates (one parameter after
    another, `foreach`, fused) is left to torch."""
    options = asdict(optimizer)
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(parameters, **options)
    if isinstance(optimizer, RMSProp):
        return torch.optim.RMSprop(parameters, **options)
    betas = options.pop("beta1"), options.pop("beta2")
    kind = torch.optim.AdamW if isinstance(optimizer, AdamW) else torch.optim.Adam
    return kind(parameters, betas=betas, **options)


def optimizer_of(train: OptimizerLike, parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
    """Return the optimizer that `train` stands for: a record, a text as `parse_optimizer` reads, or
    an optimizer of torch, its class or what makes one of parameters, as `dt.Trainer` takes them.

    parameters   the model's trainable ones

    Raises `UsageError` for what no record holds, such as groups with rates of their own.
    """
    if isinstance(train, Optimizer):
        return train
    if isinstance(train, str):
        return parse_optimizer(train, "train")
    # The command line has texts, and needs none of this.
    from dovetail.training import settings_of_all

    known = {
        name: {"betas" if "beta" in field.name else field.name for field in fields(record)}
        for name, record in OPTIMIZERS.items()
    }
    name, settings = settings_of_all(train, parameters, known)
    if "betas" in settings:
        settings["beta1"], settings["beta2"] = settings.pop("betas")
    return replace(OPTIMIZERS[name], **settings)


def parse_optimizer(text: str, option: str = "--train") -> Optimizer:
    """Return the optimizer that a text such as "adam" or "adam:lr=1e-3,weight_decay=0.1" names.

    Raises `UsageError` for the option.
    """
    name, _, options = text.partition(":")
    if name not in OPTIMIZERS:
        raise UsageError(option, f"no optimizer named {name!r}; there are {', '.join(OPTIMIZERS)}")
    optimizer = OPTIMIZERS[name]
    values: dict[str, Any] = {}
    for setting in filter(None, options.split(",")):
        key, _, value = setting.partition("=")
        defaults = asdict(optimizer)
        if key not in defaults:
            raise UsageError(option, f"{name} has no option {key!r}; it has {', '.join(defaults)}")
        if isinstance(defaults[key], bool):
            if value.lower() not in ("true", "1", "false", "0"):
                raise UsageError(option, f"{name}'s {key} is true or false, not {value!r}")
            values[key] = value.lower() in ("true", "1")
            continue
        try:
            values[key] = float(value)
        except ValueError:
            raise UsageError(option, f"{name}'s {key} is a number, not {value!r}") from None
    return replace(optimizer, **values)


def format_optimizer(optimizer: Optimizer) -> str:
    """Return the text that `parse_optimizer` reads back. It has the settings that differ from the
    defaults."""
    default = OPTIMIZERS[optimizer.name]
    changed = [
        f"{field.name}={getattr(optimizer, field.name)}"
        for field in fields(optimizer)
        if getattr(optimizer, field.name) != getattr(default, field.name)
    ]
    return optimizer.name + (":" + ",".join(changed) if changed else "")


# The updates. Each writes over the parameter and its states and returns them, in the order of
# `states`. They are functions of this module, so that a call can be pickled with their names and
# sent to another process.


def update_sgd(
    parameter: Tensor, gradient: Tensor, *states: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    buffer = states[0] if states else None
    sgd(
        [parameter], [gradient], [buffer], foreach=False, fused=False, dampening=0,
        maximize=False, **options,
    )  # fmt: skip
    return (parameter, *states)


def update_rmsprop(
    parameter: Tensor, gradient: Tensor, step: Tensor, square_avg: Tensor, *states: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    rest = list(states)
    momentum_buffers = [rest.pop(0)] if options["momentum"] > 0 else []
    rmsprop(
        [parameter], [gradient], [square_avg], rest, momentum_buffers, [step], foreach=False,
        maximize=False, **options,
    )  # fmt: skip
    return (parameter, step, square_avg, *states)


def update_adam(
    parameter: Tensor, gradient: Tensor, step: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    adam(
        [parameter], [gradient], [exp_avg], [exp_avg_sq], [], [step], foreach=False, fused=False,
        amsgrad=False, maximize=False, **options,
    )  # fmt: skip
    return parameter, step, exp_avg, exp_avg_sq


def update_adamw(
    parameter: Tensor, gradient: Tensor, step: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return update_adam(
        parameter, gradient, step, exp_avg, exp_avg_sq, decoupled_weight_decay=True, **options
    )


# Gradient scaling for mixed precision: `torch.amp.GradScaler` as part of a training step.
#
# The loss is multiplied by a scale, so that small gradients survive 16-bit formats, and gradients
# are divided by it again. A step with a gradient that is not finite updates nothing and makes the
# scale smaller. After `growth_interval` steps without such a gradient the scale grows.
# Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740,
# section 3.2.
#
#     loss ──► x scale ──► backward ──► unscale (each gradient) ──► any not finite? ──► updates
#                 ▲                                                        │
#                 └──────────────── next scale ◄───────────────────────────┘
#
# Differences from `torch.amp.GradScaler`: none in numbers. One op combines the checks of all
# gradients, and every update waits for it, as `scaler.step` waits for all checks.


SCALE, TRACKER = "scaler/scale", "scaler/growth_tracker"
"""Names of the sources that hold the scale and the number of steps since it last changed."""


@dataclass(frozen=True)
class GradScaler:
    """The settings of `torch.amp.GradScaler`, with its defaults."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        _check(self, "the scaler")
        if not self.init_scale > 0:
            raise UsageError("init_scale", f"is {self.init_scale}; it must be above 0")
        if not self.growth_factor > 1:
            raise UsageError("growth_factor", f"is {self.growth_factor}; it must be above 1")
        if not 0 < self.backoff_factor < 1:
            raise UsageError("backoff_factor", f"is {self.backoff_factor}; it must be in (0, 1)")
        if self.growth_interval < 1:
            raise UsageError("growth_interval", f"is {self.growth_interval}; it must be 1 or more")


def unscale(gradient: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient divided by the scale, and a flag: 1.0 if an element is not finite, else
    0.0."""
    # The inverse is computed as torch does it: in double, then rounded once.
    unscaled = gradient.clone()
    found_inf = torch.zeros((), dtype=torch.float32, device=gradient.device)
    inverse = scale.double().reciprocal().float()
    count_not_finite([unscaled], found_inf, inverse)
    return unscaled, found_inf


def any_found(*flags: Tensor) -> Tensor:
    """Return 1.0 if one of the flags is 1.0, else 0.0."""
    return torch.stack(flags).amax()


def next_scale(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Write the new scale and the new number of steps since it changed over the old ones; return
    both."""
    growth, backoff = settings["growth_factor"], settings["backoff_factor"]
    update_scale(scale, tracker, found_inf, growth, backoff, settings["growth_interval"])
    return scale, tracker


def update_unless_found(
    found_inf: Tensor,
    parameter: Tensor,
    gradient: Tensor,
    *states: Tensor,
    update: Callable[..., tuple[Tensor, ...]],
    **options: Any,
) -> tuple[Tensor, ...]:
    """Run the optimizer's update, or leave everything as it is if a gradient was not finite."""
    if bool(found_inf):
        return (parameter, *states)
    return update(parameter, gradient, *states, **options)


def update_written(
    value: Tensor,
    parameter: Tensor,
    *args: Tensor,
    then: Callable[..., tuple[Tensor, ...]],
    **options: Any,
) -> tuple[Tensor, ...]:
    """Write over the parameter the value that the model has given it, then run the update."""
    parameter.copy_(value)
    return then(*args, **options)
