"""Wraps Keras 3 models on torch as plain modules that can be captured.

A Keras model on torch is an `nn.Module` that hides its state: it assigns to statistics and seeds,
which it holds as parameters, and calls its layers in a way that torch's hooks do not see. The
wrapper has what the capture expects. Trainable variables are parameters and the others buffers,
each named "LAYER.VARIABLE", and each layer is a submodule with the layer's name.

    forward(inputs):  outputs, state', losses = model.stateless_call(trainable, state, inputs)
                      state <- state'          state: the variables that are not trainable

Keras: https://keras.io/api/models/model/, `stateless_call`. Written against Keras 3.15;
`_flatten_layers` is private by name only. As in Keras' `fit`, the losses of regularizers and
`add_loss` are added to the caller's loss. So in training the module returns (outputs, losses), and
`KerasLoss` takes both.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dovetail.errors import ModelError
from dovetail.training import check_keras, with_added_losses


def keras_module(model: Any, training: bool) -> nn.Module:
    """Return the Keras model as a plain module that shares its weights, in training mode if
    `training`.

    Raises `ModelError` if Keras runs on another backend, the model is not built yet, or a layer
    would draw from a seed of its own in training.
    """
    check_keras(model)
    seeded = [
        layer.name
        for layer in model._flatten_layers()
        if hasattr(layer, "seed_generator") and getattr(layer, "seed", None) is not None
    ]
    if training and seeded:
        raise ModelError(
            model.name,
            f"layer {seeded[0]!r} draws from a seed of its own, whose value a graph cannot hold; "
            "leave seed out: runs draw from theirs",
        )
    return KerasModule(model).train(training)


@dataclass(frozen=True)
class KerasLoss:
    """A loss function on what a `KerasModule` returns in training.

    loss   the caller's loss(output, *targets); None: the output is the loss
    """

    loss: Callable[..., Tensor] | None

    def __call__(self, returned: tuple[Any, list[Any]], *targets: Any) -> Tensor:
        output, added = returned
        plain = output if self.loss is None else self.loss(output, *targets)
        return with_added_losses(plain, added)


class KerasModule(nn.Module):
    """A built Keras model as a plain module. Its inputs are the model's, in order.

    variable_names   id of a variable -> the name of its parameter or buffer in this module
    scopes           each layer that the model calls, with the submodule that stands for it
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        # `object.__setattr__` keeps the model from becoming a submodule: its variables are
        # registered here, under names of their own.
        object.__setattr__(self, "keras_model", model)
        self.variable_names: dict[int, str] = {}
        self.scopes: list[tuple[Any, _KerasLayer]] = []
        for layer in _sublayers(model):
            self._add_layer(self, layer)
        self._add_variables(self, "", model.variables)

    def _add_layer(self, parent: nn.Module, layer: Any, prefix: str = "") -> None:
        """Add a submodule for the layer and for each layer inside it, with their variables."""
        name = _free_name(parent, layer.name)
        scope, path = _KerasLayer(), f"{prefix}{name}"
        parent.add_module(name, scope)
        self.scopes.append((layer, scope))
        for inner in _sublayers(layer):
            self._add_layer(scope, inner, f"{path}.")
        self._add_variables(scope, f"{path}.", layer.variables)

    def _add_variables(self, scope: nn.Module, prefix: str, variables: list[Any]) -> None:
        """Register the variables that no layer inside has registered."""
        for variable in variables:
            # A layer also lists the variables of the layers inside it, and layers may share some.
            if id(variable) in self.variable_names:
                continue
            name = _free_name(scope, variable.name)
            self.variable_names[id(variable)] = prefix + name
            if variable.trainable:
                scope.register_parameter(name, variable.value)
            else:
                scope.register_buffer(name, variable.value.detach())

    def forward(self, *inputs: Tensor) -> Any:
        """Return the model's outputs, and write the new state over the buffers.

        In training return (outputs, losses of regularizers and `add_loss`).
        """
        model: Any = self.keras_model
        # A capture swaps this module's tensors for fake ones, so they are looked up in each call.
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        trainable, state = (
            [tensors[self.variable_names[id(variable)]] for variable in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        model_inputs = inputs[0] if len(inputs) == 1 else list(inputs)
        # Each layer's call runs inside its submodule, so that hooks see it. The calls are replaced
        # in the layers' dicts, because Keras tracks what is assigned to a layer. A layer may stand
        # in `scopes` twice, so all calls are kept before any is replaced.
        own_calls = [(layer, layer.__dict__.get("call")) for layer, _ in self.scopes]
        for layer, scope in self.scopes:
            layer.__dict__["call"] = functools.partial(scope, layer.call)
        try:
            outputs, new_state, losses = model.stateless_call(
                trainable, state, model_inputs, training=self.training, return_losses=True
            )
        finally:
            for layer, own_call in own_calls:
                if own_call is None:
                    layer.__dict__.pop("call", None)
                else:
                    layer.__dict__["call"] = own_call
        for old, new in zip(state, new_state, strict=True):
            if new is not old:
                old.copy_(new.detach())
        return (outputs, losses) if self.training else outputs


class _KerasLayer(nn.Module):
    """Stands for one layer: it holds the layer's variables, and the layer's calls run inside it."""

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)


def _sublayers(layer: Any) -> list[Any]:
    """Return the layers directly inside, except input layers, which do nothing."""
    inside = layer._flatten_layers(include_self=False, recursive=False)
    return [inner for inner in inside if type(inner).__name__ != "InputLayer"]


def _free_name(module: nn.Module, keras_name: str) -> str:
    """Return the name without dots, which torch does not allow, and with _1, _2, ... appended if
    the module has an attribute of that name."""
    name = free = keras_name.replace(".", "_")
    number = 0
    while hasattr(module, free):
        number += 1
        free = f"{name}_{number}"
    return free
