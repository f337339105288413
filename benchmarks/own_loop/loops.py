"""Loops as people write them, drawn by a seed, in plain PyTorch and through `dt.training_step`.

conv, rmsprop in 2 groups, one-cycle, clip_value, accumulate 2, scaler, ema, last batch, resumed
"""

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dovetail as dt

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-3),
    "nesterov": partial(torch.optim.SGD, momentum=0.8, nesterov=True),
    "dampened": partial(torch.optim.SGD, momentum=0.9, dampening=0.1),
    "adam": partial(torch.optim.Adam, weight_decay=1e-3),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5),
    "centered": partial(torch.optim.RMSprop, centered=True),
    "adagrad": torch.optim.Adagrad,
}
CALLS = 50
"""Calls of the step in a loop."""


def warmed_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """A linear warm-up, then a cosine."""
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, CALLS - 10)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [10])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any] | None] = {
    "no schedule": None,
    "by hand": None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, CALLS),
    "warm-up": warmed_up,
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 7, 0.5),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=CALLS + 1, cycle_momentum=False
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.97**epoch),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
}
EVENTS = ("", "loaded", "resumed")
"""What happens in the middle: nothing; the state of an earlier call is loaded; all objects are made
anew, and load what `torch.save` wrote."""


@dataclass(frozen=True)
class Loop:
    """How a network is trained.

    groups       of parameters: 1, or weights and biases apart
    clip         "", "clip" or "clip_value"
    last_batch   each fourth batch is a smaller one
    """

    network: str = "mlp"
    optimizer: str = "adamw"
    groups: int = 2
    schedule: str = "warm-up"
    clip: str = "clip"
    accumulate: int = 1
    scaler: bool = False
    ema: bool = False
    last_batch: bool = False
    event: str = ""
    seed: int = 0

    def __str__(self) -> str:
        flags = ("scaler", "ema", "last_batch")
        texts = (
            self.network,
            f"{self.optimizer} in {self.groups} groups",
            self.schedule,
            self.clip,
            f"accumulate {self.accumulate}",
            *(name for name in flags if getattr(self, name)),
            self.event,
        )
        return f"{self.seed}: " + ", ".join(filter(None, texts))


def drawn_loop(seed: int) -> Loop:
    """The loop of this seed."""
    draw = random.Random(seed)
    return Loop(
        network=draw.choice(("mlp", "conv")),
        optimizer=draw.choice(sorted(OPTIMIZERS)),
        groups=draw.choice((1, 2)),
        schedule=draw.choice(sorted(SCHEDULES)),
        clip=draw.choice(("", "clip", "clip_value")),
        accumulate=draw.choice((1, 1, 2, 3)),
        scaler=draw.random() < 0.25,
        ema=draw.random() < 0.25,
        last_batch=draw.random() < 0.5,
        event=draw.choice(EVENTS),
        seed=seed,
    )


def network_of(loop: Loop) -> nn.Module:
    """A small network in float64. The bias before a normalisation has a gradient of noise alone,
    which Adam makes large: so it shows whether a step computes bit for bit what torch does."""
    torch.manual_seed(loop.seed)
    if loop.network == "mlp":
        layers: list[nn.Module] = [nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)]
    else:
        layers = [
            nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Flatten(), nn.Linear(48, 3),
        ]  # fmt: skip
    return nn.Sequential(*layers).double()


class _Objects:
    """What a user makes before the loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.model = loop, network_of(loop)
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters}]
        if loop.groups == 2:
            biases = [p for p in parameters if p.dim() < 2]
            weights = [p for p in parameters if p.dim() >= 2]
            groups = [{"params": weights}, {"params": biases, "lr": 0.003, "weight_decay": 0.0}]
        self.optimizer = OPTIMIZERS[loop.optimizer](groups, lr=0.01)
        make = SCHEDULES[loop.schedule]
        self.schedule = None if make is None else make(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=3) if loop.scaler else None
        self.ema: AveragedModel | None = None
        if loop.ema:
            self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def states(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        named = {
            "model": self.model, "optimizer": self.optimizer, "schedule": self.schedule,
            "scaler": self.scaler, "ema": self.ema,
        }  # fmt: skip
        return {key: value.state_dict() for key, value in named.items() if value is not None}

    def load(self, states: dict[str, Any]) -> None:
        for key, state in states.items():
            getattr(self, key).load_state_dict(state)

    def plain_step(self, inputs: Tensor, targets: Tensor, call: int) -> Tensor:
        loop, parameters = self.loop, list(self.model.parameters())
        if call % loop.accumulate == 0:
            self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        divided = loss / loop.accumulate
        (divided if self.scaler is None else self.scaler.scale(divided)).backward()
        if (call + 1) % loop.accumulate == 0:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if loop.clip == "clip":
                nn.utils.clip_grad_norm_(parameters, 0.5)
            elif loop.clip:
                nn.utils.clip_grad_value_(parameters, 0.1)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if self.ema is not None:
                self.ema.update_parameters(self.model)
        return loss.detach()

    def planned_step(self, **options: Any) -> "dt.pipeline.TrainingStep":
        limits = {"clip": 0.5, "clip_value": 0.1}
        return dt.training_step(
            self.model,
            nn.functional.cross_entropy,
            self.optimizer,
            accumulate=self.loop.accumulate,
            scaler=self.scaler,
            ema=self.ema,
            **{name: limits[name] for name in filter(None, [self.loop.clip])},
            **options,
        )


def outcome(loop: Loop, *, planned: bool, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """(the losses, the last states of model, optimizer, schedule, scaler and EMA).

    planned   through `dt.training_step`, with these options of its plans; else in plain PyTorch
    """
    objects, losses = _Objects(loop), []
    step = objects.planned_step(**options) if planned else None
    draw = torch.Generator().manual_seed(loop.seed)
    # An event comes where no sum of gradients is half done.
    middle, saved = CALLS // 2 // loop.accumulate * loop.accumulate, io.BytesIO()
    for call in range(CALLS):
        size = 3 if loop.last_batch and call % 4 == 3 else 6
        inputs = torch.randn(size, 12, dtype=torch.float64, generator=draw)
        targets = torch.randint(3, (size,), generator=draw)
        if loop.event and call == middle - 2 * loop.accumulate:
            torch.save(objects.states(), saved)
        if loop.event and call == middle:
            saved.seek(0)
            if loop.event == "resumed":
                if step is not None:
                    step.close()
                objects = _Objects(loop)
                step = objects.planned_step(**options) if planned else None
            objects.load(torch.load(saved, weights_only=False))
        if loop.schedule == "by hand":
            for group in objects.optimizer.param_groups:
                group["lr"] *= 1.1 if call % 5 else 0.6
        if step is None:
            losses.append(objects.plain_step(inputs, targets, call))
        else:
            losses.append(step(inputs, targets))
        if isinstance(objects.schedule, lr_scheduler.ReduceLROnPlateau):
            objects.schedule.step(losses[-1])
        elif objects.schedule is not None:
            objects.schedule.step()
    if step is not None:
        step.close()
    return losses, objects.states()


def largest_difference(one: Any, other: Any) -> float:
    """Of all numbers in two structures; inf where these differ in anything else."""
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, dict):
        if list(one) != list(other):
            return float("inf")
        return max((largest_difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return float("inf")
        return max(map(largest_difference, one, other), default=0.0)
    if isinstance(one, float):
        return abs(one - other)
    return 0.0 if one == other or callable(one) else float("inf")
