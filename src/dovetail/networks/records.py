"""Network: a module by name, with what makes it, its examples and its loss."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from torch import Tensor, nn

Option = int | float | bool
Options = dict[str, Option]
Examples = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
Built = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Network:
    """A network by name.

    paper      authors, where and when, URL
    defaults   option -> value; an option's type is its default's. "batch" is always one
    small      options of a size that trains in well under a second on one core
    modules    options -> the module
    examples   options -> (inputs, targets), drawn from torch's generator
    loss       loss(output, *targets) is a scalar
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
        """(module, inputs, loss, targets); options left out have their defaults."""
        full = self.defaults | options
        inputs, targets = self.examples(**full)
        return self.modules(**full), inputs, self.loss, targets


@dataclass(frozen=True)
class Sizes:
    """How large a network is at its default options, from a table that captures made:
    `python benchmarks/capture/run.py --write`.

    flops                of one inference, 2 a multiply-add
    ops, training_ops    of one inference and of one training step, sources apart
    """

    parameters: int
    parameter_bytes: int
    flops: int
    ops: int
    training_ops: int


def load_sizes() -> dict[str, Sizes]:
    """network -> its sizes. A network that was not captured yet is absent."""
    text = resources.files("dovetail.networks").joinpath("sizes.json").read_text("utf-8")
    return {name: Sizes(**row) for name, row in json.loads(text).items()}
