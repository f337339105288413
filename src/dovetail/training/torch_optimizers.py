"""Turns the arguments `optimizer` and `schedule` into an optimizer of `torch.optim` and its rates.

An optimizer may be given as one of these:

    partial(torch.optim.Adam, lr=1e-3)                 any callable of the parameters
    torch.optim.Adam(model.parameters(), lr=1e-3)      an optimizer of the model, not yet used
    "adam"                                             a name; SGD needs lr beside it
    dovetail.Adam(1e-3)                                a record of settings
    keras.optimizers.Adam(1e-3), model.optimizer       Keras' own; see `keras_models`

For rules whose server steps, `served_settings` gives the name and the settings of the same
optimizer in `optimizers.py`.

A schedule is a function from the epoch to a factor of the learning rate, or makes a torch
scheduler:

    lambda epoch: 0.95**epoch                                          the epoch is a fraction
    functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)   steps at each epoch's start
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.errors import UsageError, UserCodeError
from dovetail.runtime.torch_versions import has_optimizer_hooks
from dovetail.runtime.user_code import UserCode, at
from dovetail.training.keras_models import is_keras_optimizer, keras_optimizer

if TYPE_CHECKING:  # the rules' kernels are of no use to who only names an optimizer
    from dovetail.training.rules.contract import RuleEntry

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the trainable parameters, which it gets in the module's order."""

Schedule = Callable[[float], float] | Callable[[torch.optim.Optimizer], LRScheduler]
"""Epoch -> factor of each group's learning rate, or optimizer -> scheduler."""

_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}
_SERVED = {
    "sgd": ("momentum", "nesterov", "weight_decay"),
    "adam": ("betas", "eps", "weight_decay"),
    "adamw": ("betas", "eps", "weight_decay"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("alpha", "eps", "weight_decay", "momentum"),
}
"""Name -> settings that the server's optimizer has too. All others must have torch's default."""
_ASKS_MORE = ("fused", "capturable", "differentiable")
"""Settings with which torch's steps ask more of the parameters."""
_FREE = {"lr", "foreach", "fused", "capturable", "differentiable"}
"""Settings that may have any value. The learning rate comes with each commit, and the others change
only speed."""


def resolve_optimizer(
    optimizer: Any, lr: float | None = None, parameters: Sequence[nn.Parameter] = ()
) -> MakeOptimizer:
    """Returns the callable that `optimizer` stands for. Raises `UsageError`.

    parameters   the model's trainable ones, which an optimizer of torch was made for
    """
    if isinstance(optimizer, str):
        if optimizer not in _KINDS:
            raise UsageError("optimizer", f"no {optimizer!r}; there are {', '.join(_KINDS)}")
        factory, settings = _KINDS[optimizer]
        if lr is not None:
            return functools.partial(factory, lr=_positive(lr), **settings)
        # The rate that SGD needs depends on the model. torch's default of 1e-3 is seldom meant.
        if factory is torch.optim.SGD:
            raise UsageError("lr", f"{optimizer!r} needs a learning rate")
        return functools.partial(factory, **settings)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _taken_over(optimizer, None if lr is None else _positive(lr), parameters)
    if is_keras_optimizer(optimizer):
        return keras_optimizer(optimizer, None if lr is None else _positive(lr))
    kind = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        rate: dict[str, Any] = {} if lr is None else {"lr": _positive(lr)}
        return functools.partial(optimizer, **rate)
    if lr is not None:
        raise UsageError("lr", "goes into the optimizer, which is neither a name nor a class")
    if is_dataclass(optimizer) and not isinstance(optimizer, type):
        name = getattr(optimizer, "name", type(optimizer).__name__.lower())
        if name not in _KINDS:
            raise UsageError("optimizer", f"no {name!r}; there are {', '.join(_KINDS)}")
        settings = asdict(optimizer)
        if "beta1" in settings:
            settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
        return functools.partial(_KINDS[name][0], **settings)
    if not callable(optimizer):
        raise UsageError(
            "optimizer", f"{optimizer!r} is no name, no record, and no callable of parameters"
        )
    return optimizer  # type: ignore[no-any-return]


def check_optimizer(
    optimizer: Any, parameters: list[nn.Parameter], make: MakeOptimizer
) -> torch.optim.Optimizer:
    """Returns `optimizer`, which the user's callable `make` has made. Raises `UsageError` unless it
    is an optimizer of `parameters` that needs one gradient a step."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "optimizer",
            f"made {type(optimizer).__name__}; give a callable of parameters that makes a "
            f"torch.optim.Optimizer, as functools.partial(torch.optim.Adam, lr=1e-3){at(make)}",
        )
    given = {id(parameter) for parameter in parameters}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if not set(held) <= given or not held:
        raise UsageError(
            "optimizer",
            f"holds other parameters than those given; make it of its argument{at(make)}",
        )
    check_steps(optimizer)
    return optimizer


def steps_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is torch's own and needs no trial: the first one imports `torch._dynamo`."""
    return (
        any(type(optimizer) is kind for kind, _ in _KINDS.values())
        and not has_optimizer_hooks(optimizer)
        and not any(group.get(key) for group in optimizer.param_groups for key in _ASKS_MORE)
    )


def check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UsageError` for an optimizer that needs more than one gradient a step."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            "optimizer",
            f"{type(optimizer).__name__} evaluates the loss several times a step; a worker has "
            "one gradient a step",
        )


@dataclass(frozen=True)
class TwinOptimizer:
    """Makes an optimizer like the user's own, of other parameters.

    arguments   of the class
    groups      (numbers of the parameters, or None for all; settings) of each group
    """

    kind: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    groups: tuple[tuple[tuple[int, ...] | None, dict[str, Any]], ...]

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": parameters if held is None else [parameters[i] for i in held], **settings}
            for held, settings in self.groups
        ]
        return self.kind(groups, **self.arguments)

    @property
    def is_of_all(self) -> bool:
        """Whether all parameters are in one group."""
        return self.groups[0][0] is None


def _taken_over(
    optimizer: torch.optim.Optimizer, lr: float | None, parameters: Sequence[nn.Parameter]
) -> TwinOptimizer:
    """Makes optimizers with the settings of the user's own, group by group. Raises `UsageError`
    for what would be lost."""
    name, kind = type(optimizer).__name__, type(optimizer)
    advice = f"give what makes one, as functools.partial(torch.optim.{name}, lr=...)"
    if optimizer.state:
        raise UsageError("optimizer", f"this {name} has stepped, and its state would be lost")
    if has_optimizer_hooks(optimizer):
        raise UsageError("optimizer", f"this {name} has hooks, which workers' own would lack")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError("optimizer", f"this {name} has a scheduler; give that as schedule")
    if lr is not None and len(optimizer.param_groups) > 1:
        raise UsageError("lr", f"this {name} has groups with rates of their own")
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    groups: list[tuple[tuple[int, ...] | None, dict[str, Any]]] = []
    for settings, group in zip(_settings(optimizer), optimizer.param_groups, strict=True):
        # Frozen parameters have no gradient, so that no optimizer would change them.
        held = [id(parameter) for parameter in group["params"] if parameter.requires_grad]
        if not set(held) <= number.keys():
            says = f"this {name} holds parameters that the model does not have; {advice}"
            raise UsageError("optimizer", says)
        if held:
            rate = {} if lr is None else {"lr": lr}
            of_all = [number[each] for each in held] == list(range(len(parameters)))
            indices = None if of_all else tuple(number[each] for each in held)
            # Of named parameters a group keeps the names, and takes them only together with
            # parameters.
            kept = {name: value for name, value in settings.items() if name != "param_names"}
            groups.append((indices, kept | rate))
    if not groups:
        raise UsageError("optimizer", f"this {name} holds no parameter that is trained")
    arguments = {}
    for argument in [*inspect.signature(kind).parameters.values()][1:]:
        if argument.name in optimizer.defaults:
            arguments[argument.name] = optimizer.defaults[argument.name]
        elif argument.default is argument.empty and argument.kind not in (
            argument.VAR_POSITIONAL,
            argument.VAR_KEYWORD,
        ):
            says = f"no other {name} can be made: it does not tell its {argument.name}; {advice}"
            raise UsageError("optimizer", says)
    return TwinOptimizer(kind, arguments, tuple(groups))


def _positive(lr: float) -> float:
    if not 0 < lr < float("inf"):
        raise UsageError("lr", f"must be a number above 0, not {lr!r}")
    return lr


def served_settings(optimizer: MakeOptimizer) -> tuple[str, dict[str, Any]]:
    """The name and the settings, without the learning rate, of the same optimizer on the server.

    Raises `UsageError` if the server has no such optimizer.
    """
    if isinstance(optimizer, TwinOptimizer) and not optimizer.is_of_all:
        raise _not_served("it knows no groups of parameters")
    twin = nn.Parameter(torch.zeros(1))
    with UserCode("making the optimizer", optimizer):
        made = optimizer([twin])
    stepper = check_optimizer(made, [twin], optimizer)
    names = {kind: name for name, (kind, settings) in _KINDS.items() if not settings}
    name = names.get(type(stepper))
    if name is None:
        raise _not_served(f"{type(stepper).__name__} is not one of {', '.join(_SERVED)}")
    (settings,) = _settings(stepper)
    if others := _others_set(type(stepper), settings, _SERVED[name]):
        raise _not_served(f"{type(stepper).__name__} there has no {others[0]}")
    return name, {key: settings[key] for key in _SERVED[name]}


def settings_of_all(
    optimizer: Any, parameters: Sequence[nn.Parameter], known: Mapping[str, Collection[str]]
) -> tuple[str, dict[str, Any]]:
    """The name and the settings of an optimizer of torch, or of what makes one, if it has the same
    ones for all `parameters`. Raises `UsageError` for what would be lost.

    known   name -> the settings that are wanted; all others must have torch's default
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        make = resolve_optimizer(optimizer)
        with UserCode("making the optimizer", make):
            made = make(list(parameters))
        optimizer = check_optimizer(made, list(parameters), make)
    kind = type(optimizer).__name__
    names = {of: name for name, (of, settings) in _KINDS.items() if name in known and not settings}
    name = names.get(type(optimizer))
    if name is None:
        raise UsageError("train", f"{kind} is not one of {', '.join(names.values())} here")
    groups = _taken_over(optimizer, None, parameters).groups
    held = {i for numbers, _ in groups for i in numbers or range(len(parameters))}
    if len(held) < len(parameters):
        raise UsageError(
            "train",
            f"this {kind} holds {len(held)} of the {len(parameters)} parameters that require "
            "gradients; freeze the others (requires_grad_(False))",
        )
    settings = groups[0][1]
    for key, value in settings.items():
        if key not in _FREE - {"lr"} and any(other[key] != value for _, other in groups):
            says = f"this {kind} has groups with different {key}, where a step has one for all"
            raise UsageError("train", says)
    if others := _others_set(type(optimizer), settings, known[name]):
        raise UsageError("train", f"{kind} has no {others[0]} here; leave it at its default")
    return name, {key: settings[key] for key in known[name]}


def _others_set(
    kind: Callable[..., torch.optim.Optimizer], settings: dict[str, Any], known: Collection[str]
) -> list[str]:
    """The settings beside `known` that change numbers and do not have torch's default."""
    defaults = kind([nn.Parameter(torch.zeros(1))], lr=1e-3).defaults
    return [
        key
        for key, value in settings.items()
        if key not in known and key not in _FREE and key in defaults and value != defaults[key]
    ]


def is_plain_sgd(optimizer: MakeOptimizer) -> bool:
    """Whether the optimizer's step is -lr g and nothing else."""
    try:
        name, settings = served_settings(optimizer)
    except UsageError:
        return False
    return name == "sgd" and not any(settings.values())


def check_server_steps(rule: "RuleEntry", optimizer: MakeOptimizer) -> None:
    """Raises `UsageError` if the rule's server steps by itself and does not do what this optimizer
    does."""
    if rule.server_steps and not is_plain_sgd(optimizer):
        raise UsageError(
            "optimizer",
            f"the server of {rule.name} steps by -lr g, as torch.optim.SGD without momentum does; "
            "give that, or a rule whose workers step, as adag-agn",
        )


def _not_served(detail: str) -> UsageError:
    return UsageError(
        "optimizer",
        f"by this rule the server applies it, and {detail}; choose another, or a rule whose "
        "workers apply it, as adag-agn or averaging",
    )


class Rates:
    """An optimizer's settings at any epoch. Epochs may be asked for in any order."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._scheduler = _scheduler(optimizer, schedule)
        # The settings of each epoch so far, because a scheduler can only step forwards. Without a
        # scheduler, only the first settings are kept.
        self._epochs = [_settings(optimizer)]

    def at(self, epoch: float) -> float:
        """The first group's learning rate at that epoch."""
        return float(self._lookup(epoch)[0]["lr"])

    def set(self, epoch: float) -> None:
        """Gives the optimizer its settings at that epoch."""
        for group, settings in zip(self._optimizer.param_groups, self._lookup(epoch), strict=True):
            group.update(settings)

    def _lookup(self, epoch: float) -> list[dict[str, Any]]:
        if self._scheduler is not None:
            while len(self._epochs) <= int(epoch):
                # Some schedulers compute from the present rate, so the last epoch's settings come
                # first.
                for group, settings in zip(
                    self._optimizer.param_groups, self._epochs[-1], strict=True
                ):
                    group.update(settings)
                with warnings.catch_warnings():
                    # torch warns if the optimizer has not stepped before the scheduler does. Here
                    # the scheduler only computes rates, so the order does not matter.
                    warnings.simplefilter("ignore")
                    with UserCode("the schedule", self._scheduler):
                        self._scheduler.step()
                self._epochs.append(_settings(self._optimizer))
            return self._epochs[int(epoch)]
        if self._schedule is None:
            return self._epochs[0]
        schedule: Any = self._schedule
        with UserCode("the schedule", schedule):
            factor = float(schedule(epoch))
        if not 0 <= factor < float("inf"):
            raise UsageError("schedule", f"gives the factor {factor} at epoch {epoch}")
        return [{**group, "lr": group["lr"] * factor} for group in self._epochs[0]]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _scheduler(optimizer: torch.optim.Optimizer, schedule: Any) -> LRScheduler | None:
    """The scheduler that `schedule` makes; None for a function of the epoch."""
    if schedule is None:
        return None
    if not callable(schedule):
        raise UsageError("schedule", f"{schedule!r} is not callable")
    # A function that makes a scheduler fails on a number, with an exception of any kind.
    with suppress(UserCodeError), UserCode("the schedule", schedule):
        float(schedule(0.0))
        return None
    try:
        with UserCode("the schedule", schedule):
            scheduler = schedule(optimizer)
    except UserCodeError as error:
        where = f" (at {error.location})" if error.location else ""
        raise UsageError(
            "schedule",
            f"is neither a function of the epoch nor of the optimizer: {error.said}{where}",
        ) from error
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise UsageError(
            "schedule",
            f"made {type(scheduler).__name__}; it must make a scheduler that steps by epochs alone",
        )
    return scheduler
