"""Networks of the papers, as plain modules: `NETWORKS["rnnlm"].build(hidden=64)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.networks.inception_v3 import InceptionV3, inception_loss
from dovetail.networks.rnnlm import RNNLM, rnnlm_loss

Option = int | float | bool
Examples = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
Built = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Network:
    """A network by name.

    defaults   option -> value; an option's type is its default's
    modules    options -> the module
    examples   options -> (inputs, targets), drawn from torch's generator
    loss       loss(output, *targets) is a scalar
    """

    name: str
    paper: str
    description: str
    defaults: dict[str, Option]
    modules: Callable[..., nn.Module]
    examples: Callable[..., Examples]
    loss: Callable[..., Tensor]

    def build(self, **options: Option) -> Built:
        """(module, inputs, loss, targets); options left out have their defaults."""
        full = self.defaults | options
        inputs, targets = self.examples(**full)
        return self.modules(**full), inputs, self.loss, targets


def _rnnlm(*, layers: int, hidden: int, vocabulary: int, **_: Any) -> nn.Module:
    return RNNLM(layers, hidden, vocabulary)


def _rnnlm_examples(*, steps: int, batch: int, vocabulary: int, **_: Any) -> Examples:
    tokens, targets = (torch.randint(vocabulary, (steps, batch)) for _ in range(2))
    return (tokens,), (targets,)


def _inception_v3(*, batch: int, size: int, **options: Any) -> nn.Module:
    return InceptionV3(**options)


def _inception_v3_examples(*, batch: int, size: int, classes: int, **_: Any) -> Examples:
    return (torch.randn(batch, 3, size, size),), (torch.randint(classes, (batch,)),)


RNNLM_DEFAULTS: dict[str, Option] = {
    "layers": 2,
    "hidden": 2048,
    "steps": 40,
    "batch": 64,
    "vocabulary": 10_000,
}
INCEPTION_DEFAULTS: dict[str, Option] = {
    "batch": 32,
    "size": 299,
    "classes": 1000,
    "aux": False,
    "width": 1.0,
    "dropout": 0.5,
}

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        Network(
            "inception_v3",
            "Szegedy et al., CVPR 2016, https://arxiv.org/abs/1512.00567",
            "image classifier whose blocks branch up to six ways",
            INCEPTION_DEFAULTS,
            _inception_v3,
            _inception_v3_examples,
            inception_loss,
        ),
        Network(
            "rnnlm",
            "Jozefowicz et al., 2016, https://arxiv.org/abs/1602.02410",
            "LSTM language model, unfused and unrolled",
            RNNLM_DEFAULTS,
            _rnnlm,
            _rnnlm_examples,
            rnnlm_loss,
        ),
    )
}
