"""The record of a network: functions that build its module and its examples, and its loss."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
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
    modules       a function of all options that returns the module
    examples      a function of all options that returns (inputs, targets), drawn from torch's
                  generator
    loss          a function (output, *targets) -> a scalar
    """

    name: str
    paper: str
    description: str
    defaults: Options
    small: Options
    modules: Callable[..., nn.Module]
    examples: Callable[..., Examples]
    loss: Callable[..., Any]

    def build(self, **options: Option) -> Built:
        """Returns (module, inputs, loss, targets). An option that is not given has its default."""
        full = self.defaults | options
        inputs, targets = self.examples(**full)
        return self.modules(**full), inputs, self.loss, targets


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
