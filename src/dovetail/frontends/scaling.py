"""Gradient scaling for mixed precision: `torch.amp.GradScaler` as part of a training step.

The loss is multiplied by a scale, so that small gradients survive 16-bit formats; gradients are
divided by it again; a step with a gradient that is not finite updates nothing and makes the scale
smaller, and after `growth_interval` steps without one it grows. Micikevicius et al., Mixed
Precision Training, 2018, https://arxiv.org/abs/1710.03740, section 3.2.

    loss ──► x scale ──► backward ──► unscale (each gradient) ──► any not finite? ──► updates
                ▲                                                        │
                └──────────────── next scale ◄───────────────────────────┘

Differences from `torch.amp.GradScaler`: none in numbers; the check is one op for all gradients, on
which every update waits, as `scaler.step` does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError

SCALE, TRACKER = "scaler/scale", "scaler/growth_tracker"


@dataclass(frozen=True)
class GradScaler:
    """`torch.amp.GradScaler`: its settings, with its defaults."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not (math.isfinite(self.init_scale) and self.init_scale > 0):
            raise UsageError("init_scale", f"is {self.init_scale}; it must be above 0")
        if not self.growth_factor > 1:
            raise UsageError("growth_factor", f"is {self.growth_factor}; it must be above 1")
        if not 0 < self.backoff_factor < 1:
            raise UsageError("backoff_factor", f"is {self.backoff_factor}; it must be in (0, 1)")
        if self.growth_interval < 1:
            raise UsageError("growth_interval", f"is {self.growth_interval}; it must be 1 or more")


def unscale(gradient: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient divided by the scale, and 1.0 if it has an element that is not finite."""
    # As torch computes it: in double, then rounded once.
    unscaled = gradient.clone()
    found = torch.zeros((), dtype=torch.float32, device=gradient.device)
    inverse = scale.double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_([unscaled], found, inverse)
    return unscaled, found


def any_found(*found: Tensor) -> Tensor:
    """1.0 if one of the flags is."""
    return torch.stack(found).amax()


def next_scale(
    scale: Tensor, tracker: Tensor, found: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Write over the scale and the number of steps since it last changed; returns both."""
    torch._amp_update_scale_(
        scale, tracker, found, settings["growth_factor"], settings["backoff_factor"],
        settings["growth_interval"],
    )  # fmt: skip
    return scale, tracker


def update_unless_found(
    found: Tensor,
    parameter: Tensor,
    gradient: Tensor,
    *states: Tensor,
    update: Callable[..., tuple[Tensor, ...]],
    **options: Any,
) -> tuple[Tensor, ...]:
    """The optimizer's update, or nothing where a gradient was not finite."""
    if bool(found):
        return (parameter, *states)
    return update(parameter, gradient, *states, **options)
