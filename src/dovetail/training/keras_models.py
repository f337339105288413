"""Trains Keras 3 models on torch: what must be done differently from torch's own modules.

A Keras model on torch is an `nn.Module` whose trainable variables are its parameters, and whose
other variables (statistics, seeds) are parameters without a gradient, so they stay with a worker.
It is told in each call whether it trains, and its dropout draws from seeds of its own.

Keras: https://keras.io/api/models/model/. Written against Keras 3.15; `_flatten_layers` is
private by name only. Differences from `fit`: regularizers and `add_loss` do not join the loss.
This module does not import Keras: where no other module has, there is no Keras model.
"""

import sys
from typing import Any

import torch

from dovetail.errors import ModelError


def is_keras(model: Any) -> bool:
    """Tells whether `model` is a Keras model or layer."""
    layer = getattr(getattr(sys.modules.get("keras"), "layers", None), "Layer", None)
    return isinstance(layer, type) and isinstance(model, layer)


def check_keras(model: Any) -> None:
    """Raises `ModelError` where Keras runs on another backend, or the model is not built yet."""
    backend = sys.modules["keras"].backend.backend()
    if backend != "torch":
        raise ModelError(
            model.name,
            f"Keras runs on {backend}; set KERAS_BACKEND=torch before keras is imported",
        )
    if not model.built:
        raise ModelError(model.name, "is not built; call it once, or give it an Input layer")


def call_keras(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call the model. Keras takes several inputs as one list."""
    inputs = arguments if len(arguments) <= 1 else (list(arguments),)
    return module(*inputs, **keywords, training=module.training)


def seed_keras(module: Any, draw: int) -> None:
    """Start the layers' own random streams from `draw`."""
    for number, layer in enumerate(module._flatten_layers()):
        generator = getattr(layer, "seed_generator", None)
        if generator is not None:
            start = torch.tensor([(draw + number) % 2**31, 0])
            generator.state.assign(start.to(generator.state.value.dtype))


def keras_norms(module: Any) -> list[Any]:
    """The layers that keep statistics of batches and are trained."""
    return [
        layer
        for layer in module._flatten_layers()
        if hasattr(layer, "moving_mean") and hasattr(layer, "momentum") and layer.trainable
    ]
