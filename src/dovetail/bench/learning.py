"""Loss against simulated time: real training of small networks, each step as long as simulated.

    one batch               batch of 4 x b ─► gradient ─► update           expert, planned
    synchronous towers      4 batches of b ─► 4 gradients ─► mean ─► update
    asynchronous towers     4 batches of b ─► 4 gradients at one value ─► 4 updates, in turn

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, figures 6 (NMT) and 7 (Inception-V3), section 4.4.

`train` gives losses, step by step; they are real, and the same for every placement, which does not
change what is computed. `curves` joins them with the seconds of a step, which come from a
simulation of the full-size graphs. Every step of a curve reads 4 x b examples.
Differences: the paper trains full size on its machines. Here Inception-V3 is a tenth as wide at
75 x 75 and learns the 1,797 handwritten digits of scikit-learn; NMT is 64 wide and learns to write
8 words backwards. Batch norm of a tower sees the tower's batch, as in the paper. Asynchronous
towers stay in step: each gradient of a round is of the value before the round, where processes of
their own drift apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dovetail.bench.records import Curve
from dovetail.errors import MissingLibraryError
from dovetail.networks import NETWORKS
from dovetail.networks.records import Options

INCEPTION, NMT = "Inception-V3", "NMT"
ONE_BATCH, SYNCHRONOUS, ASYNCHRONOUS = "one batch", "synchronous towers", "asynchronous towers"
LEARNS_AS = {
    "expert": ONE_BATCH,
    "planned": ONE_BATCH,
    SYNCHRONOUS: SYNCHRONOUS,
    ASYNCHRONOUS: ASYNCHRONOUS,
}
"""Name of a curve -> the way its losses come about."""
Part = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # inputs, targets of one tower
Losses = dict[str, dict[str, list[float]]]
"""title -> way -> [steps]"""


@dataclass(frozen=True)
class Task:
    """What is learned, and how.

    options    of the network; "batch" is a tower's
    batch_axis of inputs and targets
    data       (options, steps x towers, generator) -> a part each
    """

    title: str
    network: str
    options: Options
    batch_axis: int
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    data: Callable[[Options, int, torch.Generator], list[Part]]
    ways: tuple[str, ...]
    steps: int
    towers: int = 4


def train(tasks: Sequence[Task] | None = None, seed: int = 0) -> Losses:
    """Losses of each task in each of its ways, on one core; equal seeds give equal losses.

    About 95 s for the default tasks. Raises `MissingLibraryError` without scikit-learn.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            task.title: {way: losses_of(task, way, seed) for way in task.ways}
            for task in (TASKS if tasks is None else tasks)
        }
    finally:
        torch.set_num_threads(threads)


def curves(step_seconds: Mapping[str, Mapping[str, float]], losses: Losses) -> list[Curve]:
    """Losses as curves: step_seconds is title -> name of the curve (`LEARNS_AS`) -> seconds of one
    step; what it leaves out has no curve."""
    return [
        Curve(title, name, seconds, losses[title][LEARNS_AS[name]])
        for title, of_name in step_seconds.items()
        for name, seconds in of_name.items()
    ]


def losses_of(task: Task, way: str, seed: int) -> list[float]:
    """[steps] the loss of each step's 4 x b examples, before its update: the mean of the towers'.

    Start, batches and their order depend on the seed alone, so that all ways learn the same.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = task.data(task.options, task.steps * task.towers, generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, _, loss, _ = NETWORKS[task.network].build(**task.options)
        module.train()
        optimizer = task.optimizer(list(module.parameters()))
        found = []
        for step in range(task.steps):
            of_step = parts[step * task.towers : (step + 1) * task.towers]
            if way == ONE_BATCH:
                of_step = [_joined(of_step, task.batch_axis)]
            found.append(_step(module, loss, optimizer, of_step, way == ASYNCHRONOUS))
    return found


def _step(
    module: nn.Module,
    loss: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Part],
    asynchronous: bool,
) -> float:
    """One step of towers, a part each: a single one is plain training."""
    parameters = list(module.parameters())
    total, gradients = 0.0, []
    for inputs, targets in parts:
        value = loss(module(*inputs), *targets)
        gradients.append(torch.autograd.grad(value, parameters))
        total += value.item()
    if not asynchronous:
        gradients = [tuple(torch.stack(of_one).mean(0) for of_one in zip(*gradients, strict=True))]
    for of_update in gradients:
        for parameter, gradient in zip(parameters, of_update, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return total / len(parts)


def _joined(parts: Sequence[Part], axis: int) -> Part:
    inputs, targets = (
        tuple(torch.cat(tensors, axis) for tensors in zip(*side, strict=True))
        for side in zip(*parts, strict=True)
    )
    return inputs, targets


def _digits(options: Options, count: int, generator: torch.Generator) -> list[Part]:
    """Handwritten digits, drawn with repeats: 8 x 8 grey images as [batch, 3, size, size], each of
    mean 0 and deviation 1 over the data set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingLibraryError("scikit-learn", "pip install 'dovetail[bench]'") from None
    images, labels = (torch.from_numpy(found) for found in load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8)
    images = (images - images.mean()) / images.std()
    size, batch = int(options["size"]), int(options["batch"])
    drawn = torch.randint(len(images), (count, batch), generator=generator)
    return [
        (
            (nn.functional.interpolate(images[of], (size, size), mode="bilinear")
             .expand(-1, 3, -1, -1),),
            (labels[of],),
        )
        for of in drawn
    ]  # fmt: skip


def _reversals(options: Options, count: int, generator: torch.Generator) -> list[Part]:
    """Random sentences and the same backwards: (source, target given), target; word 0 begins."""
    steps, batch, vocabulary = (int(options[key]) for key in ("steps", "batch", "vocabulary"))
    parts: list[Part] = []
    for _ in range(count):
        source = torch.randint(1, vocabulary, (steps, batch), generator=generator)
        target = source.flip(0)
        given = torch.cat([torch.zeros_like(target[:1]), target[:-1]])
        parts.append(((source, given), (target,)))
    return parts


def _rmsprop(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, alpha=0.9, eps=1e-3)


def _adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)


TASKS = (
    Task(
        title=INCEPTION,
        network="inception_v3",
        options={"batch": 16, "size": 75, "classes": 10, "width": 0.1, "dropout": 0.0},
        batch_axis=0,
        optimizer=_rmsprop,
        data=_digits,
        ways=(ONE_BATCH, SYNCHRONOUS, ASYNCHRONOUS),
        steps=100,
    ),
    Task(
        title=NMT,
        network="nmt",
        options={"layers": 2, "hidden": 64, "steps": 8, "batch": 16, "vocabulary": 20},
        batch_axis=1,
        optimizer=_adam,
        data=_reversals,
        ways=(ONE_BATCH,),
        steps=200,
    ),
)
"""The default tasks: about 95 s on one core."""
