"""Keras models trained by dovetail: run with KERAS_BACKEND=torch, prints one JSON object."""

import functools
import json
import sys

import keras
import numpy as np
import torch
from keras import layers

from dovetail.errors import DovetailError
from dovetail.training.modules import ModuleLearner, flatten, loss_of, parameters_of
from dovetail.training.trainer import Trainer

cross_entropy = torch.nn.functional.cross_entropy
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def data(rows=40):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, 6)).astype(np.float32)
    return torch.from_numpy(features), torch.from_numpy(features[:, :3].argmax(1))


def perceptron(norm=False, dropout=0.0):
    keras.utils.set_random_seed(0)
    inside = [layers.Dense(8, activation="tanh")]
    inside += [layers.BatchNormalization(momentum=0.9)] if norm else []
    inside += [layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([keras.Input((6,)), *inside, layers.Dense(3)])


def fit(model, **options):
    options = {"workers": 1, "backend": "simulated", "batch": 8, **options}
    return Trainer(model, cross_entropy, SGD, "downpour", **options).fit(data(), data())


def regularized():
    keras.utils.set_random_seed(0)
    first = layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.1))
    return keras.Sequential(
        [keras.Input((6,)), first, layers.ActivityRegularization(l2=0.05), layers.Dense(3)]
    )


def wrapped_losses():
    """Losses of a batch by a Keras model inside a torch module, and of it alone."""
    batch = (data()[0][:8], data()[1][:8])
    alone, inside = regularized(), torch.nn.Sequential(regularized())
    return [float(loss_of(module.eval(), cross_entropy, batch)) for module in (alone, inside)]


def plainly(model):
    """torch's own loop, over the run's samples in their order."""
    features, labels = data()
    optimizer = SGD([v.value for v in model.trainable_variables])
    for rows in np.random.default_rng((0, 0)).permutation(40).reshape(5, 8):
        optimizer.zero_grad()
        loss = cross_entropy(model(features[rows], training=True), labels[rows])
        (loss + sum(model.losses)).backward()
        optimizer.step()
    return flatten(model)


def relative(found, expected):
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def two_inputs():
    a, b = keras.Input((4,)), keras.Input((2,))
    return keras.Model([a, b], layers.Dense(3)(layers.Concatenate()([a, b])))


def several_inputs():
    features, labels = data()
    trainer = Trainer(two_inputs(), cross_entropy, SGD, workers=1, backend="simulated")
    return trainer.fit(((features[:, :4], features[:, 4:]), labels)).outcome.samples


def dropped(epoch):
    model = perceptron(dropout=0.5)
    learner = ModuleLearner(model, cross_entropy, SGD, data())
    return learner.gradient(flatten(model), np.arange(8), epoch).vector.tolist()


def statistics():
    """Largest difference of the batch norm's from the mean over batches of its inputs."""
    model = perceptron(norm=True)
    fit(model)
    first, norm = model.layers[:2]
    with torch.no_grad():
        batches = first(data()[0]).split(8)
    means = torch.stack([b.mean(0) for b in batches]).mean(0)
    variances = torch.stack([b.var(0, correction=0) for b in batches]).mean(0)
    errors = (norm.moving_mean.value - means).abs(), (norm.moving_variance.value - variances).abs()
    return max(float(e.max()) for e in errors), norm.momentum


def sizes_in_order():
    """Of two equal models' parameters, where torch sorts the second one's names otherwise."""
    found = []
    for names in (("dense_8", "dense_9"), ("dense_9", "dense_10")):
        first, last = (layers.Dense(n, name=name) for n, name in zip((8, 3), names, strict=True))
        model = keras.Sequential([keras.Input((6,)), first, last])
        found.append([p.numel() for p in parameters_of(torch.nn.Sequential(model))])
    return found


def predicted():
    """Largest difference of predictions and figures from the model's own, dropout being off."""
    model = perceptron(norm=True, dropout=0.5)
    fit(model)
    features, labels = data()
    with torch.no_grad():
        own = model(features, training=False)
    trainer = Trainer(model, cross_entropy, SGD, backend="simulated", batch=40)
    error = float((trainer.predict((features, labels)) - own).abs().max())
    loss = trainer.evaluate((features, labels))["loss"]
    return max(error, abs(loss - float(cross_entropy(own, labels))))


def complaint(model):
    try:
        fit(model)
    except DovetailError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def everything():
    model, penalised = perceptron(), regularized()
    history = fit(model)
    fit(penalised)
    return {
        "error": relative(flatten(model), plainly(perceptron())),
        "regularized_error": relative(flatten(penalised), plainly(regularized())),
        "figures": history.outcome.evaluations[-1].figures,
        "inputs": several_inputs(),
        "drawn": [dropped(0), dropped(0), dropped(1)],
        "sizes_in_order": sizes_in_order(),
        "wrapped_losses": wrapped_losses(),
        "statistics": statistics(),
        "predicted": predicted(),
        "unbuilt": complaint(keras.Sequential([layers.Dense(3)])),
        "parameters": flatten(perceptron(norm=True)).size,
    }


def elsewhere():
    keras.backend.backend = lambda: "jax"
    return complaint(perceptron())


if __name__ == "__main__":
    sys.stdout.write(json.dumps({**everything(), "elsewhere": elsewhere()}))
