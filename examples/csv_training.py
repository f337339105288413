"""Train on a CSV file of one's own: python csv_training.py [FILE.csv]

The last column is the class, a whole number from 0; all others are features. Without a file it
writes one, of two noisy rings, and trains on that. The rule is synchronous, so that the same file
gives the same model again; workers are threads, for so little is trained before processes start.
Leave `backend` out for processes.
"""

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dovetail.training import Trainer


def write_rings(path: Path, rows: int = 600) -> None:
    """Two classes: points near a circle of radius 1, and near one of radius 2."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, rows)
    angles = rng.uniform(0, 2 * np.pi, rows)
    radii = 1 + labels + rng.normal(0, 0.15, rows)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x", "y", "ring"])
        writer.writerows(zip(radii * np.cos(angles), radii * np.sin(angles), labels, strict=True))


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [rows, columns], scaled, and classes [rows]."""
    table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    features, labels = table[:, :-1], table[:, -1]
    scaled = (features - features.mean(0)) / np.maximum(features.std(0), 1e-12)
    return torch.tensor(scaled, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def train(path: Path) -> None:
    features, labels = read(path)
    torch.manual_seed(0)
    classes = int(labels.max()) + 1
    model = nn.Sequential(nn.Linear(features.shape[1], 32), nn.Tanh(), nn.Linear(32, classes))
    split = len(labels) * 4 // 5
    history = Trainer(
        model,
        nn.functional.cross_entropy,
        "adam",
        lr=0.01,
        rule="sync",
        workers=2,
        backend="threads",
        epochs=20,
        batch=16,
        metrics=["accuracy"],
    ).fit((features[:split], labels[:split]), (features[split:], labels[split:]))
    best = history.best("accuracy")
    print(f"{split} rows to train on, {len(labels) - split} to validate, {classes} classes")
    print(f"rounds: {history.outcome.clock}, staleness: {history.columns['staleness'].max()}")
    print(f"best accuracy: {best.figures['accuracy']:.2f}")


def main() -> None:
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rings.csv"
        write_rings(path)
        train(path)


if __name__ == "__main__":
    main()
