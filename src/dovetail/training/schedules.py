"""Learning rates over a run: a factor as a function of the epoch, or a torch scheduler.

lambda epoch: 0.95**epoch                                     of the epoch as a fraction
functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)   steps at each epoch's start
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.errors import UsageError

Schedule = Callable[[float], float] | Callable[[torch.optim.Optimizer], LRScheduler]
"""Epoch -> factor of each group's learning rate, or optimizer -> scheduler."""


class Rates:
    """An optimizer's settings at an epoch. Any epoch can be asked for, in any order."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._scheduler = _scheduler(optimizer, schedule)
        self._epochs = [_settings(optimizer)]  # a scheduler's, by epoch; else as they were made

    def at(self, epoch: float) -> float:
        """The first group's learning rate."""
        return float(self._lookup(epoch)[0]["lr"])

    def set(self, epoch: float) -> None:
        """Give the optimizer its settings."""
        for group, settings in zip(self._optimizer.param_groups, self._lookup(epoch), strict=True):
            group.update(settings)

    def _lookup(self, epoch: float) -> list[dict[str, Any]]:
        if self._scheduler is not None:
            while len(self._epochs) <= int(epoch):
                self._epochs.append(self._next())
            return self._epochs[int(epoch)]
        if self._schedule is None:
            return self._epochs[0]
        factor = _factor(self._schedule, epoch)
        return [{**group, "lr": group["lr"] * factor} for group in self._epochs[0]]

    def _next(self) -> list[dict[str, Any]]:
        """The settings of the epoch after the last one known."""
        assert self._scheduler is not None
        for group, settings in zip(self._optimizer.param_groups, self._epochs[-1], strict=True):
            group.update(settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no step of the optimizer came before
            self._scheduler.step()
        return _settings(self._optimizer)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _scheduler(optimizer: torch.optim.Optimizer, schedule: Any) -> LRScheduler | None:
    """The scheduler that `schedule` makes; None for a function of the epoch."""
    if schedule is None or _is_function_of_epoch(schedule):
        return None
    try:
        made = schedule(optimizer)
    except Exception as error:
        raise UsageError(
            "schedule", f"is neither a function of the epoch nor of the optimizer: {error}"
        ) from error
    if isinstance(made, ReduceLROnPlateau) or not isinstance(made, LRScheduler):
        raise UsageError(
            "schedule",
            f"made {type(made).__name__}; it must make a scheduler that steps by epochs alone",
        )
    return made


def _is_function_of_epoch(schedule: Any) -> bool:
    if not callable(schedule):
        raise UsageError("schedule", f"{schedule!r} is not callable")
    try:
        return isinstance(float(schedule(0.0)), float)
    except Exception:  # a scheduler is of an optimizer, and a number is none
        return False


def _factor(schedule: Any, epoch: float) -> float:
    factor = float(schedule(epoch))
    if not 0 <= factor < float("inf"):
        raise UsageError("schedule", f"gives the factor {factor} at epoch {epoch}")
    return factor
