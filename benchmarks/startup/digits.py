"""Digits: what is trained, by the command and plainly (`python digits.py [most steps]`)."""

import sys
from functools import partial
from itertools import islice

import torch

EPOCHS, BATCH = 20, 32


def digits():
    """(model, loss, optimizer, data set, validation set)"""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
    optimizer = partial(torch.optim.Adam, lr=3e-3)
    return model, torch.nn.functional.cross_entropy, optimizer, train, test


def main() -> None:
    model, loss_of, make, (images, labels), (unseen, expected) = digits()
    optimizer = make(model.parameters())
    parts = (p for _ in range(EPOCHS) for p in torch.randperm(len(images)).split(BATCH))
    for part in islice(parts, int(sys.argv[1]) if sys.argv[1:] else None):
        optimizer.zero_grad()
        loss_of(model(images[part]), labels[part]).backward()
        optimizer.step()
    accuracy = (model(unseen).argmax(1) == expected).float().mean().item()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
