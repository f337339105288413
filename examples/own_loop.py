"""Train scikit-learn's digits by a rule in a loop of one's own.

    python examples/own_loop.py                                             one worker
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py           two

Needs scikit-learn: pip install -e '.[bench]'. Only what holds of any number of workers is printed.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import dovetail as dt


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    # Each rank trains a part of the data: here, every so many samples.
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mine = train[rank::ranks]

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = dt.Optimizer(torch.optim.Adam(model.parameters(), lr=3e-3), "adag-agn", window=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for _ in range(20):
        for indices in mine[torch.randperm(len(mine))].split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
        schedule.step()
    optimizer.finish()  # every rank has the same model now

    if rank == 0:
        with torch.no_grad():
            right = model(images[test]).argmax(1) == labels[test]
        print("more than 9 in 10 digits right:", right.float().mean().item() > 0.9)


if __name__ == "__main__":
    main()
