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


def fit(model, optimizer=SGD, **options):
    options = {"workers": 1, "backend": "simulated", "batch": 8, **options}
    return Trainer(model, cross_entropy, optimizer, "downpour", **options).fit(data(), data())


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


def optimizers():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    adam, used = keras.optimizers.Adam, keras.optimizers.SGD(0.1)
    used.apply([torch.ones(1)], [keras.Variable([0.0])])
    excludes = adam(weight_decay=0.1)
    excludes.exclude_from_weight_decay(var_names=["bias"])
    taken = {
        "SGD": keras.optimizers.SGD(0.1),
        "momentum": keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "Adam": adam(0.01),
        "amsgrad": adam(0.01, amsgrad=True, clipnorm=0.1),
        "AdamW": keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=0.1),
        "RMSprop": keras.optimizers.RMSprop(0.01, epsilon=0.1, momentum=0.5, centered=True),
        "Adagrad": keras.optimizers.Adagrad(0.1, global_clipnorm=0.5),
        "Lion": keras.optimizers.Lion(0.01),
        "Ftrl": keras.optimizers.Ftrl(0.1),
    }
    refused = {
        "schedule": adam(decay),
        "ema": adam(use_ema=True),
        "scaled": keras.optimizers.LossScaleOptimizer(adam()),
        "used": used,
        "excludes": excludes,
        "own": type("Own", (adam,), {"__module__": "mine"})(),
    }
    errors = {name: kerasly(optimizer) for name, optimizer in taken.items()}
    return {
        "errors": errors,
        "refused": {n: complaint(perceptron(), o) for n, o in refused.items()},
    }


def kerasly(optimizer):
    """Relative distance of a trained model from one that Keras' own steps have trained, and how far
    the training has moved it."""
    features, labels = data()
    model, own = perceptron(), perceptron()
    start = flatten(own)
    own_optimizer = type(optimizer).from_config(optimizer.get_config())
    variables = own.trainable_variables
    for epoch in range(4):
        for rows in np.random.default_rng((0, epoch)).permutation(40).reshape(5, 8):
            loss = cross_entropy(own(features[rows], training=True), labels[rows])
            gradients = torch.autograd.grad(loss, [v.value for v in variables])
            own_optimizer.apply(list(gradients), variables)
    fit(model, optimizer, epochs=4)
    return relative(flatten(model), flatten(own)), relative(flatten(own), start)


def compiled():
    """A model's loss before and after training by the optimizer that it was compiled with, in
    processes."""
    model = perceptron()
    model.compile(optimizer="rmsprop")
    features, labels = data()
    before = float(cross_entropy(model(features), labels))
    fit(model, model.optimizer, backend="processes", epochs=10)
    return before, float(cross_entropy(model(features), labels))


def complaint(model, optimizer=SGD):
    try:
        fit(model, optimizer)
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
        "optimizers": optimizers(),
        "compiled": compiled(),
        "unbuilt": complaint(keras.Sequential([layers.Dense(3)])),
        "parameters": flatten(perceptron(norm=True)).size,
    }


def elsewhere():
    keras.backend.backend = lambda: "jax"
    return complaint(perceptron())


if __name__ == "__main__":
    sys.stdout.write(json.dumps({**everything(), "elsewhere": elsewhere()}))
