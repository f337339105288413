"""What both sides of the benchmark train: digits, a perceptron of 1 M parameters, a slow worker.

A step is 20 ms of sleep (a device that is waited for) and the computation. A slowed worker sleeps
so much longer that its step takes `slow` times as long.
"""

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn

WORKERS = 4
BATCH = 16
SLEEP_SECONDS = 0.020
TARGET = 0.97


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and validation images [n, 64] in [0, 1] and labels; a fifth is kept for validation."""
    data = load_digits()
    images = torch.tensor(data.data / 16, dtype=torch.float32)
    labels = torch.tensor(data.target)
    order = torch.tensor(np.random.default_rng(0).permutation(len(labels)))
    images, labels = images[order], labels[order]
    held = len(labels) // 5
    return images[held:], labels[held:], images[:held], labels[:held]


def network(seed: int) -> nn.Module:
    """64-960-960-10, 994,570 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(64, 960), nn.ReLU(), nn.Linear(960, 960), nn.ReLU(), nn.Linear(960, 10))
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


@dataclass(frozen=True)
class Run:
    """One training: `slow` is the factor of worker 0; 1 for none."""

    system: str
    rate: float
    slow: float
    seed: int
    seconds: float  # it may take


def adam(parameters: Iterable[Tensor], lr: float) -> torch.optim.Adam:
    """What every worker on both sides steps with: torch's own, in one pass."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def compute_seconds() -> float:
    """Median seconds of a step's computation here: forward, backward, Adam; without any waiting."""
    images, labels, *_ = digits()
    model, found = network(0), []
    optimizer = adam(model.parameters(), 1e-3)
    for _ in range(40):
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[:BATCH]), labels[:BATCH]).backward()
        optimizer.step()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[10:])


def wait_a_step(slow: float, computed_seconds: float) -> None:
    """The waiting of one step, before its computation."""
    time.sleep(SLEEP_SECONDS + (slow - 1) * (computed_seconds + SLEEP_SECONDS))


def time_to_target(kept: list[tuple[float, NDArray[np.float32]]]) -> float:
    """Seconds of the first of the kept parameter vectors that reaches the target; inf if none."""
    _, _, images, labels = digits()
    model = network(0)
    for seconds, theta in kept:
        nn.utils.vector_to_parameters(torch.from_numpy(theta), model.parameters())
        if accuracy(model, images, labels) >= TARGET:
            return seconds
    return float("inf")
