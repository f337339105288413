"""Statistics of batch norms for parameters that no worker has seen.

    mean, variance of a norm's input = averages over batches of training data at theta~

Workers' running statistics belong to their own copies of the parameters, the center's to none: so
they are not sent, but computed anew before each evaluation and for the trained model, in a pass
over some batches: "precise" batch norm. All else is in evaluation mode meanwhile, dropout too.
Other buffers of a model stay as they were before training.

Y. Wu, J. Johnson: Rethinking "Batch" in BatchNorm, 2021, https://arxiv.org/abs/2105.07576,
section 3; P. Izmailov et al.: Averaging Weights Leads to Wider Optima, 2018,
https://arxiv.org/abs/1803.05407, section 3.2. Differences: batches' variances are averaged, as by
torch's `update_bn`, not pooled with the spread of their means.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from dovetail.training.keras_models import is_keras, keras_norms
from dovetail.training.modules import outputs


def has_statistics(module: nn.Module) -> bool:
    """Does any norm of it keep running statistics?"""
    return bool(keras_norms(module) if is_keras(module) else _norms(module))


@torch.no_grad()
def compute_statistics(module: nn.Module, batches: Iterable[Any]) -> None:
    """Replace the running statistics by averages over the batches. Its mode stays as it was."""
    modes = {part: part.training for part in module.modules()}
    try:
        if is_keras(module):
            _compute_keras(module, batches)
        else:
            _compute(module, batches)
    finally:
        for part, mode in modes.items():
            part.training = mode


def _norms(module: nn.Module) -> list[_NormBase]:
    return [
        part
        for part in module.modules()
        if isinstance(part, _NormBase) and part.running_mean is not None
    ]


def _compute(module: nn.Module, batches: Iterable[Any]) -> None:
    norms = _norms(module)
    momenta = [norm.momentum for norm in norms]
    module.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
    try:
        for batch in batches:
            outputs(module, batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _compute_keras(module: nn.Module, batches: Iterable[Any]) -> None:
    """Keras knows one mode for a whole call, so dropout draws; a momentum of i/(i + 1) in batch i
    makes the moving average a plain one."""
    norms = keras_norms(module)
    momenta = [norm.momentum for norm in norms]
    module.train()
    try:
        for number, batch in enumerate(batches):
            for norm in norms:
                norm.momentum = number / (number + 1)
            outputs(module, batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
