"""Calls and seeds Keras 3 models on torch, where they differ from torch's own modules.

A Keras model on torch is an `nn.Module`. Its trainable variables are parameters. Its other
variables (statistics, seeds) are parameters without a gradient, so each worker keeps its own. The
model is told in each call whether it trains, and its dropout layers draw from seeds of their own.

Keras: https://keras.io/api/models/model/. Written against Keras 3.15, whose `_flatten_layers` is
private by its name. As in Keras' `fit`, the losses of regularizers and `add_loss` are added to the
loss of training. The loss on a validation set is the loss function's alone. This module does not
import Keras: if nobody has imported it, no model is a Keras model.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dovetail.errors import ModelError


def is_keras(model: Any) -> bool:
    """Whether `model` is a Keras model or layer."""
    layer = getattr(getattr(sys.modules.get("keras"), "layers", None), "Layer", None)
    return isinstance(layer, type) and isinstance(model, layer)


def check_keras(model: Any) -> None:
    """Raises `ModelError` if Keras runs on another backend, or the model is not built yet."""
    backend = sys.modules["keras"].backend.backend()
    if backend != "torch":
        raise ModelError(
            model.name,
            f"Keras runs on {backend}; set KERAS_BACKEND=torch before keras is imported",
        )
    if not model.built:
        raise ModelError(model.name, "is not built; call it once, or give it an Input layer")


def call_keras(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Calls the model. Keras takes several inputs as one list."""
    inputs = arguments if len(arguments) <= 1 else (list(arguments),)
    return module(*inputs, **keywords, training=module.training)


def added_losses(module: Any) -> Iterator[Any]:
    """Yields what Keras models, the module itself or inside it, add to the loss since they were
    called last."""
    if is_keras(module):
        yield from module.losses
    elif "keras" in sys.modules:
        for inner in module.children():
            yield from added_losses(inner)


def with_added_losses(loss: torch.Tensor, added: Iterable[Any]) -> torch.Tensor:
    """The loss with what regularizers and `add_loss` add, each summed to one number, as Keras'
    `Trainer.compute_loss` does.

    added   `model.losses` after a call
    """
    for more in added:
        loss = loss + torch.sum(torch.as_tensor(more)).to(loss.dtype)
    return loss


def seed_keras(module: Any, draw: int) -> None:
    """Sets the seed of each layer that draws random numbers, to `draw` plus the layer's number."""
    for number, layer in enumerate(module._flatten_layers()):
        generator = getattr(layer, "seed_generator", None)
        if generator is not None:
            start = torch.tensor([(draw + number) % 2**31, 0])
            generator.state.assign(start.to(generator.state.value.dtype))


def keras_norms(module: Any) -> list[Any]:
    """The trainable layers that keep statistics of batches, such as batch normalisation."""
    return [
        layer
        for layer in module._flatten_layers()
        if hasattr(layer, "moving_mean") and hasattr(layer, "momentum") and layer.trainable
    ]
