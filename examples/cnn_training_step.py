"""Train a small residual network on scikit-learn's digits, in a loop of one's own, by a plan.

    python examples/cnn_training_step.py

Needs scikit-learn: pip install -e '.[bench]'. The loop has batch normalization, SGD with momentum,
a rate that changes at each step, and a last batch that is smaller. It is trained once in plain
PyTorch and once by `dt.training_step`. Nothing is compiled, so that the losses are those of plain
training.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, relu

import dovetail as dt

EPOCHS, BATCH = 3, 64


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = relu(self.norms[0](self.convolutions[0](x)))
        return relu(x + self.norms[1](self.convolutions[1](y)))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), Residual(16), nn.MaxPool2d(2), Residual(16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def train(*, planned: bool) -> tuple[list[float], float]:
    """The loss of each step, and the share of held-out digits that are told right."""
    digits = load_digits()
    images = torch.from_numpy((digits.images / 16).astype(np.float32))[:, None]
    classes = torch.from_numpy(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    training, held_out = order[:1500], order[1500:]

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    steps = EPOCHS * -(-len(training) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
    if planned:
        step = dt.training_step(model, cross_entropy, optimizer, budget="1s", compile=False)
    losses = []
    for _ in range(EPOCHS):
        for batch in training[torch.randperm(len(training))].split(BATCH):
            if planned:
                loss = step(images[batch], classes[batch])
            else:
                optimizer.zero_grad()
                loss = cross_entropy(model(images[batch]), classes[batch])
                loss.backward()
                optimizer.step()
            schedule.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = model(images[held_out]).argmax(1) == classes[held_out]
    return losses, float(right.float().mean())


def main() -> None:
    (plain, _), (ours, right) = train(planned=False), train(planned=True)
    print("learns:", right > 0.9)
    print("the same losses:", max(abs(a - b) for a, b in zip(plain, ours, strict=True)) < 1e-2)


if __name__ == "__main__":
    main()
