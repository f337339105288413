"""The record of a network: functions that build its module and its examples, and its loss."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from inspect import signature
from typing import Any

from torch import Tensor, nn

Option = int | float | bool
Options = dict[str, Option]
Examples = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""(inputs, targets) of one batch."""
Built = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor], tuple[Tensor, ...]]
"""(module, inputs, loss, targets)."""


@dataclass(frozen=True)
class Network:
    """A network of the zoo.

    paper         the paper's authors, where and when it was published, and its URL
    description   what the network is, in one phrase, for `dovetail networks`
    defaults      option -> default value, whose type is the option's. Every network has "batch"
    small         options of a size that trains in well under a second on one core. An option that
                  is not listed keeps its default
    modules       the module's class, or a function that returns the module
    examples      a function that returns (inputs, targets), drawn from torch's generator
    loss          a function (output, *targets) -> a scalar

    `modules` and `examples` may name some of the options. They are called with all, and what they
    do not name is left out.
    """

    name: str
    paper: str
    description: str
    defaults: Options
    small: Options
    modules: Callable[..., nn.Module]
    examples: Callable[..., Examples]
    loss: Callable[..., Any]

    def __post_init__(self) -> None:
        for name in ("modules", "examples"):
            taking = partial(_call, getattr(self, name), frozenset(self.defaults))
            object.__setattr__(self, name, taking)

    def build(self, **options: Option) -> Built:
        """Returns (module, inputs, loss, targets). An option that is not given has its default."""
        full = self.defaults | options
        inputs, targets = self.examples(**full)
        return self.modules(**full), inputs, self.loss, targets


def _call(function: Callable[..., Any], known: frozenset[str], /, **options: Option) -> Any:
    """Calls the function with those of the options that it names. Raises TypeError for options that
    are not known."""
    if unknown := options.keys() - known:
        raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
    parameters = signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(**options)
    return function(**{p.name: options[p.name] for p in parameters if p.name in options})


@dataclass(frozen=True)
class Sizes:
    """The sizes of a network at its default options. They come from a table of captures that
    `python benchmarks/capture/run.py --write` writes.

    flops                FLOPs of one inference, with 2 for a multiply-add
    ops, training_ops    number of ops of one inference and of one training step, without sources
    """

    parameters: int
    parameter_bytes: int
    flops: int
    ops: int
    training_ops: int


def load_sizes() -> dict[str, Sizes]:
    """Returns the sizes of each network, by name. A network that was not captured yet is absent."""
    text = resources.files("dovetail.networks").joinpath("sizes.json").read_text("utf-8")
    return {name: Sizes(**row) for name, row in json.loads(text).items()}
