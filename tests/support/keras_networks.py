"""Keras models, and what comes of them: run with KERAS_BACKEND=torch, prints one JSON object."""

import json
import sys

import keras
import numpy as np
import torch
from keras import layers

from dovetail.errors import DovetailError
from dovetail.frontends import (
    SGD,
    Adam,
    capture,
    held_values,
    initial_values,
    resolve,
    run_step,
)
from dovetail.frontends.capturing import recaptured
from dovetail.graph import Phase


def convolutional(rate=0.0, seed=None):
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False, name="conv")(inputs)
    x = layers.BatchNormalization(name="norm", momentum=0.9)(x)
    x = layers.ReLU(name="relu")(x)
    y = layers.Conv2D(4, 3, padding="same", name="branch")(x)
    x = layers.MaxPooling2D(2, name="pool")(layers.Add(name="add")([x, y]))
    x = layers.Dropout(rate, seed=seed, name="drop")(layers.Flatten(name="flat")(x))
    return keras.Model(inputs, layers.Dense(5, name="head")(x))


def perceptron():
    inner = keras.Sequential([layers.Dense(8), layers.LayerNormalization()], name="inner")
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, activation="gelu", name="first"), inner]
    )


def two_inputs():
    a, b = keras.Input((4,)), keras.Input((3,))
    shared = layers.Dense(2, name="shared")
    return keras.Model([a, b], [shared(a), layers.Dense(2, name="other")(b)])


def regularized():
    """Two regularizers of weights, and `add_loss` by a layer that regularizes its inputs."""
    rules = keras.regularizers
    first = layers.Dense(
        5, kernel_regularizer=rules.L2(0.03), bias_regularizer=rules.L1(0.02), activation="tanh"
    )
    activity = layers.ActivityRegularization(l1=0.05, l2=0.01)
    return keras.Sequential([keras.Input((6,)), first, activity, layers.Dense(8)])


def build():
    """As MODEL names it."""
    torch.manual_seed(0)
    return perceptron(), (torch.randn(7, 6),), torch.nn.functional.mse_loss, (torch.randn(7, 8),)


def of_inference(model, *inputs):
    captured = capture(model, *inputs)
    found = run_step(captured, initial_values(captured), inputs)
    given = [x.numpy() for x in inputs]
    expected = model.predict(given if len(given) > 1 else given[0], verbose=0)
    pairs = zip(*((x if isinstance(x, list) else [x]) for x in (found, expected)), strict=True)
    graph = captured.graph
    return {
        "error": max(float(np.abs(a.numpy() - b).max()) for a, b in pairs),
        "names": graph.names,
        "modules": sorted(
            {m for m, s in zip(graph.modules, graph.is_source, strict=True) if not s}
        ),
        "flops": int(graph.flops.sum()),
    }


def of_training(model, x, target, steps=3):
    """Largest difference from Keras' own forward pass under torch's own backward and update."""
    loss = torch.nn.functional.mse_loss
    captured = capture(model, x, targets=target, loss=loss, train=SGD(0.05, momentum=0.9))
    values = initial_values(captured)
    losses = [run_step(captured, values, (x,), (target,), step=i).item() for i in range(steps)]
    trainable = [v.value for v in model.trainable_variables]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)
    expected = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(x, training=True), target) + sum(model.losses)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    held = held_values(captured)  # Keras has trained its variables: the module shares them
    errors = [
        float((values[captured.graph.outputs_of(op)[0]] - held[source.name]).abs().max())
        for op, source in enumerate(captured.program.sources)
        if source is not None and source.role in ("parameter", "buffer")
    ]
    updates = captured.graph.phases == Phase.UPDATE
    return {
        "again": recaptured(captured).graph.signatures == captured.graph.signatures,
        "losses": losses,
        "expected": expected,
        "errors": errors,
        "updated": [n for n, u in zip(captured.graph.names, updates, strict=True) if u],
    }


def complaint(call):
    try:
        call()
    except DovetailError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def keeps_a_call_of_its_own():
    """Whether a layer whose call was replaced still has it after a capture, which ran it."""
    model, ran = perceptron(), []
    layer = model.get_layer("first")
    plain = layer.call

    def call(*args, **kwargs):
        ran.append(True)
        return plain(*args, **kwargs)

    layer.call = call
    capture(model, torch.randn(7, 6))
    return bool(ran) and layer.call is call


def everything():
    keras.utils.set_random_seed(0)
    images, target = torch.randn(3, 12, 12, 3), torch.randn(3, 5)
    train = {"loss": torch.nn.functional.mse_loss, "train": Adam()}
    dropped = capture(convolutional(0.5), images, targets=target, **train)
    draws = [
        run_step(dropped, initial_values(dropped), (images,), (target,), seed=s) for s in (1, 1, 2)
    ]
    random = [c is not None and c.random for c in dropped.program.calls]
    unbuilt = keras.Sequential([layers.Dense(3)])
    return {
        "convolutional": of_inference(convolutional(), images),
        "perceptron": of_inference(perceptron(), torch.randn(7, 6)),
        "two_inputs": of_inference(two_inputs(), torch.randn(2, 4), torch.randn(2, 3)),
        "trained": of_training(convolutional(), images, target),
        "trained_perceptron": of_training(perceptron(), torch.randn(7, 6), torch.randn(7, 8)),
        "trained_regularized": of_training(regularized(), torch.randn(7, 6), torch.randn(7, 8)),
        "draws": [float(x) for x in draws],
        "random": [n for n, r in zip(dropped.graph.names, random, strict=True) if r],
        "named": len(resolve("tests.support.keras_networks:build", train=SGD()).graph),
        "seeded": complaint(
            lambda: capture(convolutional(0.5, seed=3), images, targets=target, **train)
        ),
        "seeded_inference": complaint(lambda: capture(convolutional(0.5, seed=3), images)),
        "own_call": keeps_a_call_of_its_own(),
        "unbuilt": complaint(lambda: capture(unbuilt, torch.randn(2, 4))),
    }  # fmt: skip


def elsewhere():
    """What is said where Keras runs on another backend, each of which is a large install."""
    keras.backend.backend = lambda: "jax"
    return [
        complaint(lambda: capture(perceptron(), torch.randn(7, 6))),
        complaint(lambda: resolve("tests.support.keras_networks:build")),
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({**everything(), "elsewhere": elsewhere()}))
