"""Networks of the papers, as plain modules: `NETWORKS["rnnlm"].build(hidden=64)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.networks.inception_v3 import InceptionV3, inception_loss
from dovetail.networks.rnnlm import RNNLM, rnnlm_loss

Option = int | float | bool
Built = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Network:
    """A network by name.

    defaults   option -> value; an option's type is its default's
    build      options -> (module, inputs, loss, targets), with loss(output, *targets)
    """

    name: str
    paper: str
    description: str
    defaults: dict[str, Option]
    build: Callable[..., Built]


def _build_rnnlm(**options: Any) -> Built:
    o = RNNLM_DEFAULTS | options
    module = RNNLM(o["layers"], o["hidden"], o["vocabulary"])
    tokens, targets = torch.randint(o["vocabulary"], (2, o["steps"], o["batch"])).unbind(0)
    return module, (tokens,), rnnlm_loss, (targets,)


def _build_inception_v3(**options: Any) -> Built:
    o = INCEPTION_DEFAULTS | options
    module = InceptionV3(o["classes"], aux=o["aux"], width=o["width"], dropout=o["dropout"])
    images = torch.randn(o["batch"], 3, o["size"], o["size"])
    targets = torch.randint(o["classes"], (o["batch"],))
    return module, (images,), inception_loss, (targets,)


RNNLM_DEFAULTS: dict[str, Any] = {
    "layers": 2,
    "hidden": 2048,
    "steps": 40,
    "batch": 64,
    "vocabulary": 10_000,
}
INCEPTION_DEFAULTS: dict[str, Any] = {
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
            _build_inception_v3,
        ),
        Network(
            "rnnlm",
            "Jozefowicz et al., 2016, https://arxiv.org/abs/1602.02410",
            "LSTM language model, unfused and unrolled",
            RNNLM_DEFAULTS,
            _build_rnnlm,
        ),
    )
}
