"""Keras 3 models and optimizers on torch, where they differ from torch's own.

A Keras model on torch is an `nn.Module`. Its trainable variables are parameters. Its other
variables (statistics, seeds) are parameters without a gradient, so each worker keeps its own. The
model is told in each call whether it trains, and its dropout layers draw from seeds of their own.

Keras: https://keras.io/api/models/model/. Written against Keras 3.15, whose `_flatten_layers` is
private by its name. As in Keras' `fit`, the losses of regularizers and `add_loss` are added to the
loss of training. The loss on a validation set is the loss function's alone. If nobody has imported
Keras, no model is a Keras model, and this module does not import it.

An optimizer of Keras is made anew for each worker from its configuration, and Keras' own code
steps. torch's optimizers of the same names would differ: Adam's epsilon is added before the bias
correction of the velocity, RMSprop's below the root, and weights decay before a step.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from dovetail.errors import ModelError, UsageError


def is_keras(model: Any) -> bool:
    """Whether `model` is a Keras model or layer."""
    layer = getattr(getattr(sys.modules.get("keras"), "layers", None), "Layer", None)
    return isinstance(layer, type) and isinstance(model, layer)


def check_keras(model: Any) -> None:
    """Raises `ModelError` if Keras runs on another backend, or the model is not built yet."""
    backend = sys.modules["keras"].backend.backend()
    if backend != "torch":
        raise ModelError(
            model.name, f"Keras runs on {backend}; set KERAS_BACKEND=torch before keras is imported"
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


# Optimizers


def is_keras_optimizer(optimizer: Any) -> bool:
    """Whether `optimizer` is an optimizer of Keras."""
    kind = getattr(getattr(sys.modules.get("keras"), "optimizers", None), "Optimizer", None)
    return isinstance(kind, type) and isinstance(optimizer, kind)


def keras_optimizer(
    optimizer: Any, lr: float | None
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Makes optimizers with the settings of the user's own.

    lr   replaces its learning rate

    Raises `UsageError` for settings that a worker cannot follow, and for what would be lost.
    """
    name = type(optimizer).__name__
    config = optimizer.get_config()
    if sys.modules["keras"].backend.backend() != "torch":
        says = (
            "is one of Keras on another backend; set KERAS_BACKEND=torch before keras is imported"
        )
        raise UsageError("optimizer", says)
    if not type(optimizer).__module__.startswith("keras."):
        raise UsageError("optimizer", f"{name} is no optimizer of Keras' own; give one of torch's")
    if int(optimizer.iterations):
        raise UsageError("optimizer", f"this {name} has stepped, and its state would be lost")
    for setting in _NOT_FOLLOWED:
        if config.get(setting):
            raise UsageError("optimizer", f"{setting} of Keras' {name} is not done here")
    if any(getattr(optimizer, attribute, None) for attribute in _EXCLUDED):
        says = f"variables that Keras' {name} excludes from weight decay are not known to workers"
        raise UsageError("optimizer", says)
    if lr is not None:
        config["learning_rate"] = lr
    elif not isinstance(config["learning_rate"], int | float):
        says = f"Keras' {name} has a schedule, which counts its own steps; give a rate and schedule"
        raise UsageError("optimizer", says)
    plain = {"learning_rate", "name", "ema_momentum"}
    if name == "SGD" and not any(config[key] for key in config if key not in plain):
        # Servers that step know it by this name.
        return partial(torch.optim.SGD, lr=float(config["learning_rate"]))
    return partial(KerasStepper, kind=name, config=config)


_EXCLUDED = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
"""Where Keras 3.15 keeps what `exclude_from_weight_decay` was told. No configuration has it."""
_NOT_FOLLOWED = (
    "use_ema",
    "gradient_accumulation_steps",
    "loss_scale_factor",
    "initial_scale",
    "inner_optimizer",
)
"""Settings of Keras' optimizers that change more than a step, or need more than a gradient. The
last two are those of its wrapper for scaled losses."""


class KerasStepper(torch.optim.Optimizer):
    """Steps by an optimizer of Keras, at the learning rate of the one group of parameters.

    kind     name of its class
    config   what its `get_config` returned
    """

    def __init__(self, parameters: list[nn.Parameter], kind: str, config: dict[str, Any]) -> None:
        # Workers import Keras with the first optimizer, if the model has not done so.
        import keras

        super().__init__(parameters, {"lr": float(config["learning_rate"])})
        self._held: list[nn.Parameter] = self.param_groups[0]["params"]
        with keras.device(str(self._held[0].device)):
            made = getattr(keras.optimizers, kind)
            self._keras = made.from_config(dict(config))
            # A variable of a parameter is that parameter, and not a copy.
            self._variables = [
                keras.Variable(each, dtype=str(each.dtype).removeprefix("torch."))
                for each in self._held
            ]
            self._keras.build(self._variables)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        import keras

        assert closure is None
        self._keras.learning_rate = self.param_groups[0]["lr"]
        with keras.device(str(self._held[0].device)):
            self._keras.apply([each.grad for each in self._held])
