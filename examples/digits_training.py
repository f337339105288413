"""Train a small network on scikit-learn's digits with two asynchronous worker processes.

Needs scikit-learn: pip install -e '.[bench]'. What asynchronous workers reach differs a little from
run to run, so only what holds of all of them is printed.
"""

from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from dovetail.training import Trainer


def main() -> None:
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1500], order[1500:]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = Trainer(
        model,
        nn.functional.cross_entropy,
        partial(torch.optim.Adam, lr=3e-3),
        rule="adag-agn",
        workers=2,
        epochs=10,
        batch=32,
        metrics=["accuracy"],
    )
    history = trainer.fit(
        (images[train], digits.target[train]), (images[test], digits.target[test])
    )

    with torch.no_grad():
        right = model(torch.from_numpy(images[test])).argmax(1).numpy() == digits.target[test]
    print(f"{history.outcome.samples} samples in {len(history)} commits")
    print("validation loss fell below half:", falls(history))
    print("more than 9 in 10 digits right:", bool(right.mean() > 0.9))


def falls(history) -> bool:
    """Is the last validation loss below half of the first?"""
    losses = history.curve("loss")[2]
    return bool(losses[-1] < losses[0] / 2)


if __name__ == "__main__":
    main()
