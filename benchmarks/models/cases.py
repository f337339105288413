"""A model of the table: how to build it, what to feed it, and what is expected of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
"""Keyword arguments of `forward`, or "0", "1", ... for positional ones."""


@dataclass
class Model:
    """A network with small random weights.

    draw          generator -> one batch; every step gets another
    loss          (output, *targets) -> scalar; None: the output itself is one
    targets       generator -> targets of one batch
    labels        names in the batch that only training gives to `forward`
    checkpoint    switches gradient checkpointing on; None where the library has none
    """

    module: nn.Module
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[..., Tensor] | None = None
    targets: Callable[[torch.Generator], tuple[Tensor, ...]] = lambda generator: ()
    labels: tuple[str, ...] = ()
    checkpoint: Callable[[nn.Module], None] | None = None


@dataclass(frozen=True)
class Case:
    """family    heading of the table
    refused     why it is expected to be refused; "" where it should work
    training    False where the model cannot be trained by anyone (integer weights, no loss)
    double      its float64 twin is comparable (False where it has float32 in its code)
    packages    it needs packages of the folder that `--packages` names
    exports     its plans are exported too
    """

    name: str
    family: str
    build: Callable[[], Model]
    refused: str = ""
    training: bool = True
    double: bool = True
    packages: bool = False
    exports: bool = True


@dataclass
class Registry:
    cases: dict[str, Case] = field(default_factory=dict)

    def add(self, name: str, family: str, **expected: Any) -> Callable[..., Callable[[], Model]]:
        def register(build: Callable[[], Model]) -> Callable[[], Model]:
            assert name not in self.cases, name
            self.cases[name] = Case(name, family, build, **expected)
            return build

        return register


REGISTRY = Registry()


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def whole(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator)


def without_chance(module: nn.Module) -> nn.Module:
    """The module with all dropout at 0: what is compared with plain must not depend on chance."""
    for inner in module.modules():
        for name, value in list(vars(inner).items()):
            if ("drop" in name or name == "p") and isinstance(value, float):
                setattr(inner, name, 0.0)
    return module
