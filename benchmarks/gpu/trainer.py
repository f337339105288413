"""Four asynchronous workers on one GPU, beside one process and torch's DDP with four.

    python benchmarks/gpu/trainer.py --out trainer.json [--device cuda] [--epochs 3]

The same network, optimizer and random images everywhere, each system with the same number of
samples. `one process` takes batches of four times the size. DDP has four processes on the one
device, over gloo, since NCCL refuses several on a GPU. The trainer has four workers around a
parameter server (`adag-agn`). The rate counts what is trained after the first step (of the trainer
after the first commit), so starting is left out. The loss is that of all samples, after training.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from harness import error_line, keep_json, parser_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dovetail as dt

WORKERS, BATCH, CLASSES, RATE = 4, 64, 10, 0.0002


def data(samples: int) -> tuple[Tensor, Tensor]:
    """Images whose class is a pattern that is added to noise."""
    torch.manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 32, 32)
    labels = torch.randint(0, CLASSES, (samples,))
    return patterns[labels] * 0.3 + torch.randn(samples, 3, 32, 32), labels


def network() -> nn.Module:
    torch.manual_seed(1)
    blocks: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
        blocks += [nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256 * 16, CLASSES))


stepper = partial(torch.optim.SGD, lr=RATE, momentum=0.9)


def train(
    module: nn.Module, given: tuple[Tensor, Tensor], device: str, steps: list[Tensor]
) -> float:
    """Train on the rows of each step; return samples a second after the first step."""
    optimizer = stepper(module.parameters())
    images, labels = given
    began = 0.0
    for number, rows in enumerate(steps):
        if number == 1:  # the first one warms up
            _wait(device)
            began = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(module(images[rows].to(device)), labels[rows].to(device)).backward()
        optimizer.step()
    _wait(device)
    return sum(map(len, steps[1:])) / (time.perf_counter() - began)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def batches(samples: int, epochs: int, size: int, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    """The rows of each step of a rank, in an order drawn anew each epoch."""
    found = []
    for epoch in range(epochs):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
        found += list(order[rank::ranks].split(size))
    return found


def loss_of(module: nn.Module, given: tuple[Tensor, Tensor], device: str) -> float:
    module = module.to(device).eval()
    with torch.no_grad():
        losses = [
            float(cross_entropy(module(images.to(device)), labels.to(device)))
            for images, labels in zip(*(part.split(512) for part in given), strict=True)
        ]
    return sum(losses) / len(losses)


def one_process(given: tuple[Tensor, Tensor], device: str, epochs: int) -> dict[str, float]:
    module = network().to(device)
    steps = batches(len(given[1]), epochs, BATCH * WORKERS)
    rate = train(module, given, device, steps)
    return {"samples a second": rate, "loss": loss_of(module, given, device)}


def _rank(rank: int, given: tuple[Tensor, Tensor], device: str, epochs: int, folder: str) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORKERS))
    store = dist.FileStore(str(Path(folder) / "store"), WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    module = DistributedDataParallel(network().to(device))
    rate = train(module, given, device, batches(len(given[1]), epochs, BATCH, rank, WORKERS))
    if rank == 0:
        loss = loss_of(module.module, given, device)
        row = {"samples a second": rate * WORKERS, "loss": loss}
        (Path(folder) / "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def ddp(given: tuple[Tensor, Tensor], device: str, epochs: int) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        processes.spawn(_rank, (given, device, epochs, folder), nprocs=WORKERS)
        found: dict[str, float] = json.loads((Path(folder) / "row.json").read_text())
        return found


def trainer(given: tuple[Tensor, Tensor], device: str, epochs: int) -> dict[str, float]:
    module = network()
    history = dt.Trainer(
        module, cross_entropy, stepper, workers=WORKERS, batch=BATCH, epochs=epochs, device=device
    ).fit(TensorDataset(*given))
    seconds, seen = history.columns["seconds"], history.columns["seen"]
    rate = float((seen[-1] - seen[0]) / (seconds[-1] - seconds[0]))
    return {"samples a second": rate, "loss": loss_of(module, given, device)}


def main() -> None:
    parser = parser_of(__doc__, out=..., device="cuda:0")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16384)
    arguments = parser.parse_args()
    given = data(arguments.samples)
    rows: dict[str, Any] = {}
    systems = {"one process": one_process, "DDP": ddp, "trainer": trainer}
    for name, system in systems.items():
        try:
            row: dict[str, Any] = system(given, arguments.device, arguments.epochs)
        except Exception as error:  # the next one is worth its own try
            row = {"raised": error_line(error)}
        rows[name] = row
        print(name, row, flush=True)
        keep_json(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
