"""What `optimizer` may be, as a callable that makes a `torch.optim` optimizer.

    partial(torch.optim.Adam, lr=1e-3)   any callable of the parameters
    "adam", with lr                      a name
    dovetail.Adam(1e-3)                  a record of settings

and back, for rules whose server applies it: the name and settings that `optimizers.py` knows.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from torch import nn

from dovetail.errors import UsageError
from dovetail.training.modules import MakeOptimizer, check_optimizer

_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}
# Settings of each kind that the server's optimizer has; all others must have torch's default.
_SERVED = {
    "sgd": ("momentum", "nesterov", "weight_decay"),
    "adam": ("betas", "eps", "weight_decay"),
    "adamw": ("betas", "eps", "weight_decay"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("alpha", "eps", "weight_decay", "momentum"),
}
_FREE = {"lr", "foreach", "fused", "capturable", "differentiable"}
"""Settings that change nothing but speed, or are known otherwise."""


def resolve_optimizer(optimizer: Any, lr: float | None = None) -> MakeOptimizer:
    """The callable that `optimizer` stands for. Raises `UsageError`."""
    if isinstance(optimizer, str):
        if optimizer not in _KINDS:
            raise UsageError("optimizer", f"no {optimizer!r}; there are {', '.join(_KINDS)}")
        if lr is None:
            raise UsageError("lr", f"{optimizer!r} needs a learning rate")
        named, others = _KINDS[optimizer]
        return functools.partial(named, lr=_positive(lr), **others)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "optimizer",
            f"is a {type(optimizer).__name__} of parameters that the workers do not have; give "
            f"what makes one, as functools.partial(torch.optim.{type(optimizer).__name__}, lr=...)",
        )
    kind = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        settings: dict[str, Any] = {} if lr is None else {"lr": _positive(lr)}
        return functools.partial(optimizer, **settings)
    if lr is not None:
        raise UsageError("lr", "goes into the optimizer, which is neither a name nor a class")
    if is_dataclass(optimizer) and not isinstance(optimizer, type):
        return _of_record(optimizer)
    if not callable(optimizer):
        raise UsageError(
            "optimizer", f"{optimizer!r} is no name, no record, and no callable of parameters"
        )
    return optimizer  # type: ignore[no-any-return]


def _positive(lr: float) -> float:
    if not 0 < lr < float("inf"):
        raise UsageError("lr", f"must be a number above 0, not {lr!r}")
    return lr


def _of_record(record: Any) -> MakeOptimizer:
    name = getattr(record, "name", type(record).__name__.lower())
    if name not in _KINDS:
        raise UsageError("optimizer", f"no {name!r}; there are {', '.join(_KINDS)}")
    settings = asdict(record)
    if "beta1" in settings:
        settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
    return functools.partial(_KINDS[name][0], **settings)


def served_settings(optimizer: MakeOptimizer) -> tuple[str, dict[str, Any]]:
    """Name and settings, without its learning rate, of the same optimizer on the server.

    Raises `UsageError` for one that the server has not.
    """
    twin = nn.Parameter(torch.zeros(1))
    made = check_optimizer(optimizer([twin]), [twin])
    names = {kind: name for name, (kind, settings) in _KINDS.items() if not settings}
    name = names.get(type(made))
    if name is None:
        raise _not_served(f"{type(made).__name__} is not one of {', '.join(_SERVED)}")
    defaults = _defaults(type(made))
    group = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    for key, value in group.items():
        known = key in _SERVED[name] or key in _FREE
        if not known and key in defaults and value != defaults[key]:
            raise _not_served(f"{type(made).__name__} there has no {key}")
    return name, {key: group[key] for key in _SERVED[name]}


def _defaults(kind: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """The settings of a kind of optimizer as torch sets them."""
    return kind([nn.Parameter(torch.zeros(1))], lr=1e-3).defaults


def is_plain_sgd(optimizer: MakeOptimizer) -> bool:
    """Is its step -lr g, and nothing else?"""
    try:
        name, settings = served_settings(optimizer)
    except UsageError:
        return False
    return name == "sgd" and not any(settings.values())


def _not_served(detail: str) -> UsageError:
    return UsageError(
        "optimizer",
        f"by this rule the server applies it, and {detail}; choose another, or a rule whose "
        "workers apply it, as adag-agn or averaging",
    )
