"""Train a Keras 3 model, on torch, with two workers.

Needs Keras: pip install -e '.[keras]'. Statistics of its batch norm are those of the trained
weights, so that `predict` uses what was trained. Workers are threads, for so little is trained
before processes start; leave `backend` out for those.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported; workers inherit it

import keras
import numpy as np
from keras import layers
from torch import nn

from dovetail.training import Trainer


def main() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(32, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(900, 8)).astype(np.float32)
    classes = np.abs(inputs[:, :3]).argmax(1)

    history = Trainer(
        model,
        nn.functional.cross_entropy,
        "adam",
        lr=3e-3,
        rule="downpour",
        workers=2,
        backend="threads",
        epochs=12,
    ).fit((inputs[:800], classes[:800]))

    guesses = model.predict(inputs[800:], verbose=0).argmax(1)
    print(f"{history.outcome.samples} samples, {model.count_params()} parameters")
    print("more than 3 in 4 right:", bool((guesses == classes[800:]).mean() > 0.75))


if __name__ == "__main__":
    main()
