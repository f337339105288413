"""Updates of many parameters by one call of fused kernels.

    update a, update b, update c ──► FusedUpdates ──► one kernel over the lists of their tensors

The kernels go over all memory once, where the single-tensor functions of `optimizers` make seven or
more passes with temporaries in between, and one call of a list costs as little as one of a single
parameter. SGD, Adam and AdamW are torch's own kernels, which `torch.optim` calls if it is given
`fused=True`; RMSprop is ours (`runtime.rmsprop`), for CPUs. Their roundings differ: Adam drives a
parameter elsewhere whose gradient is nothing but noise, such as a bias in front of a normalisation.
So plans take them only where they run compiled code, whose roundings differ too. `step_fused` does
the same for an optimizer of torch in a loop of the user's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.frontends.optimizers import (
    SGD,
    Adam,
    AdamW,
    Optimizer,
    RMSProp,
    update_adam,
    update_adamw,
    update_rmsprop,
    update_sgd,
)
from dovetail.frontends.program import Call
from dovetail.runtime.rmsprop import fused_rmsprop
from dovetail.runtime.torch_versions import count_up, fused_adam, fused_sgd, is_step_watched

Lists = Sequence[Sequence[Tensor]]
"""[tensors of an update, parameters] the tensors of several updates: parameters, gradients, and
each state."""


def has_fused_kernel(update: Callable[..., Any]) -> bool:
    """True if an update's function has a fused form."""
    return update in _KERNELS


def fused_updates(calls: Sequence[Call]) -> Call:
    """Return updates as one call, which returns what they return, one after another. Each has a
    fused kernel, and none reads what another one writes."""
    return Call(
        FusedUpdates(tuple(OneUpdate(c.target, len(c.args), c.kwargs) for c in calls)),
        tuple(chain.from_iterable(call.args for call in calls)),
        results=tuple(chain.from_iterable(call.results for call in calls)),
        in_place=True,
    )


@dataclass(frozen=True)
class OneUpdate:
    """The update of one parameter: its function, how many tensors it takes, and its settings."""

    function: Callable[..., tuple[Tensor, ...]]
    count: int
    settings: Mapping[str, Any]


@dataclass(eq=False)
class FusedUpdates:
    """Writes over parameters and their states, and returns them: those of the first update, then
    those of the second, and so on.

    The layouts of the tensors of the first call are those of all later ones, as in a plan's steps.
    Which updates one kernel does is found then: a call knows no dtype and no layout of its tensors.
    """

    updates: tuple[OneUpdate, ...]
    _lists: list[tuple[OneUpdate, list[int]]] = field(default_factory=list, init=False)
    _single: list[int] = field(default_factory=list, init=False)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        of_update, first = [], 0
        for update in self.updates:
            of_update.append(tensors[first : first + update.count])
            first += update.count
        if not self._lists and not self._single:
            # Find the lists of updates that one kernel does, and those that none does.
            lists: dict[Any, tuple[OneUpdate, list[int]]] = {}
            for number, (update, given) in enumerate(zip(self.updates, of_update, strict=True)):
                if not _may_be_fused(update.function, *given):
                    self._single.append(number)
                    continue
                settings = tuple(sorted(update.settings.items()))
                kind = update.function, update.count, settings, given[0].dtype
                lists.setdefault(kind, (update, []))[1].append(number)
            self._lists = list(lists.values())
        for number in self._single:
            update = self.updates[number]
            update.function(*of_update[number], **update.settings)
        for update, numbers in self._lists:
            parameters, gradients, *states = zip(*(of_update[n] for n in numbers), strict=True)
            alike = list(map(_like, gradients, parameters))
            _KERNELS[update.function]((parameters, alike, *states), update.settings)
        return [tensor for own in of_update for tensor in (own[0], *own[2:])]


def _sgd(lists: Lists, settings: Mapping[str, Any]) -> None:
    parameters, gradients, *buffers = lists
    fused_sgd(parameters, gradients, buffers[0] if buffers else [], **settings)


def _adam(lists: Lists, settings: Mapping[str, Any], decoupled: bool = False) -> None:
    parameters, gradients, steps, exp_avgs, exp_avg_sqs = lists
    count_up(steps)
    fused_adam(parameters, gradients, steps, exp_avgs, exp_avg_sqs, decoupled=decoupled, **settings)


def _adamw(lists: Lists, settings: Mapping[str, Any]) -> None:
    _adam(lists, settings, decoupled=True)


def _rmsprop(lists: Lists, settings: Mapping[str, Any]) -> None:
    parameters, gradients, steps, square_avgs, *rest = lists
    count_up(steps)
    buffers = rest.pop(0) if settings["momentum"] > 0 else []
    fused_rmsprop(parameters, gradients, square_avgs, buffers, rest[0] if rest else [], **settings)


_KERNELS: dict[Callable[..., Any], Callable[[Lists, Mapping[str, Any]], None]] = {
    update_sgd: _sgd,
    update_rmsprop: _rmsprop,
    update_adam: _adam,
    update_adamw: _adamw,
}


def step_fused(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, where fused kernels have done all updates that they can do.

    They are SGD, RMSprop, Adam and AdamW of torch as its users make them, on CPUs, of parameters
    that have state already: torch's own first step makes it. Groups, rates and states are read
    anew, so that whatever was changed or loaded since the last step counts.
    """
    updated: list[tuple[Tensor, Tensor]] = []  # parameter, gradient
    for group in () if is_step_watched(optimizer) else optimizer.param_groups:
        record = _record_of(optimizer, group)
        if record is None:
            continue
        names = [state.name for state in record.states]
        lists: dict[torch.dtype, list[tuple[Tensor, ...]]] = {}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            tensors: list[Any] = [parameter, parameter.grad, *map(state.get, names)]
            if (
                parameter.device.type == "cpu"
                and all(isinstance(tensor, Tensor) for tensor in tensors)
                and tensors[1].layout is torch.strided
                # The kernels count steps in float32; by default torch makes no others.
                and ("step" not in names or tensors[2].dtype is torch.float32)
                and _may_be_fused(record.update, *tensors)
            ):
                tensors[1] = _like(tensors[1], parameter)
                lists.setdefault(parameter.dtype, []).append(tuple(tensors))
                updated.append((parameter, parameter.grad))
        with torch.no_grad():
            for rows in lists.values():
                _KERNELS[record.update](tuple(zip(*rows, strict=True)), vars(record))
                # RMSprop's kernel writes to memory that torch does not see written.
                torch.autograd.graph.increment_version([row[0] for row in rows])
    # What has no gradient is left alone by torch's step, which schedulers count.
    for parameter, _ in updated:
        parameter.grad = None
    try:
        optimizer.step()
    finally:
        for parameter, gradient in updated:
            parameter.grad = gradient


_RECORDS = {
    torch.optim.SGD: SGD, torch.optim.RMSprop: RMSProp, torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}  # fmt: skip
_OTHERWISE = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "amsgrad",
    "maximize",
    "dampening",
)
"""Settings of a group with which torch has another form of the update, or another update."""


def _record_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Optimizer | None:
    """The settings of a group as a record, or None for those that no record holds."""
    record, held = _RECORDS.get(type(optimizer)), group["params"]
    # A parameter that is there twice is updated twice, one after the other.
    if record is None or any(map(group.get, _OTHERWISE)) or len(set(held)) < len(held):
        return None
    settings = dict(group)
    if record in (Adam, AdamW):
        record = AdamW if group["decoupled_weight_decay"] else Adam
        settings["beta1"], settings["beta2"] = group["betas"]
    values = {entry.name: settings[entry.name] for entry in fields(record)}
    # A rate may be a tensor, or below zero. Torch's own step has its ways with these.
    if all(isinstance(value, (int, float)) for value in values.values()):
        with suppress(UsageError):
            found: Optimizer = record(**values)
            return found
    return None


def _may_be_fused(
    function: Callable[..., Any], parameter: Tensor, gradient: Tensor, *states: Tensor
) -> bool:
    """Return True if the fused kernel computes what the single-tensor function does, but for
    rounding.

    It reads all tensors as flat memory, and rounds 16-bit formats less often. A state of one number
    is a count of steps.
    """
    whole = [state for state in states if state.dim() or not parameter.dim()]
    return (
        (parameter.is_contiguous() or is_dense(parameter.shape, parameter.stride()))
        # RMSprop's kernel is ours, and for CPUs.
        and (parameter.device.type == "cpu" or function is not update_rmsprop)
        and parameter.dtype in (torch.float32, torch.float64)
        and gradient.dtype == parameter.dtype
        and all(s.dtype == parameter.dtype and s.stride() == parameter.stride() for s in whole)
    )


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if elements of these strides fill the memory from the first to the last, in any order,
    each a place of its own."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient in the memory layout of the parameter."""
    if gradient.stride() == parameter.stride() and not (gradient.is_neg() or gradient.is_conj()):
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
