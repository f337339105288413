"""Program: the executable calls behind a graph. Captured: graph, program and source together."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload

from dovetail.graph import Graph
from dovetail.plans import Source


@dataclass(frozen=True)
class Ref:
    """Stands in a call's arguments for a tensor of the graph."""

    tensor: int


@dataclass(frozen=True)
class Call:
    """One op's call: `target(*args, **kwargs)` with every `Ref` replaced by its tensor.

    results   per element of what the call returns (a lone tensor counts as one element), the
              graph tensor it becomes, or -1 where nobody wants it
    random    draws random numbers: seed torch from (seed, step, op index) right before it
    in_place  writes over some of its arguments (an update); its results alias them
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[int, ...] = (0,)
    random: bool = False
    in_place: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # torch's operators do not pickle; their names do, so that a Program travels to a worker.
        # A memory format or layout would be looked for in every module that imports torch.
        target = _Operator(str(self.target)) if isinstance(self.target, OpOverload) else self.target
        args, kwargs = pytree.tree_map_only(
            (torch.memory_format, torch.layout),
            lambda value: _Constant(str(value).removeprefix("torch.")),
            (self.args, self.kwargs),
        )
        return _call, (target, args, kwargs, self.results, self.random, self.in_place)


@dataclass(frozen=True)
class _Operator:
    """An operator by name, e.g. "aten.mm.default"."""

    name: str


@dataclass(frozen=True)
class _Constant:
    """A name in torch, e.g. "preserve_format"."""

    name: str


def _call(target: Any, args: Any, kwargs: Any, *rest: Any) -> Call:
    if isinstance(target, _Operator):
        target = attrgetter(target.name)(torch.ops)
    args, kwargs = pytree.tree_map_only(
        _Constant, lambda value: getattr(torch, value.name), (args, kwargs)
    )
    return Call(target, args, kwargs, *rest)


@dataclass(frozen=True)
class SourceValue:
    """What a source op stands for.

    role   "input" | "parameter" | "state" | "buffer" | "constant"
    name   "input.0", "target.0", the name in the model's state_dict, or for optimizer state
           "PARAMETER/exp_avg"
    fill   initial value of optimizer state (all elements equal); None otherwise
    value  of a constant; None otherwise
    """

    role: str
    name: str
    fill: float | None = None
    value: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """calls, sources   [ops], one of the two is None at each op; aligned with the graph.
    loss            the tensor that is the loss, -1 in inference
    outputs         pytree of `Ref`s: what the plain model returns (inference), or the loss
    aliases         other state_dict names -> the name that holds the value (tied parameters)
    """

    calls: tuple[Call | None, ...]
    sources: tuple[SourceValue | None, ...]
    loss: int
    outputs: Any
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Captured:
    """A network as dovetail sees it.

    module   the module it came from: real weights, or fake ones
    make     builds the module anew with real weights, where the module's are fake; or None
    inputs, targets   the example tensors, as given (fake or real)
    examples          draws real (inputs, targets), where those are fake; or None
    """

    graph: Graph
    program: Program
    source: Source
    module: torch.nn.Module
    make: Callable[[], torch.nn.Module] | None = None
    inputs: tuple[torch.Tensor, ...] = ()
    targets: tuple[torch.Tensor, ...] = ()
    examples: Callable[[], tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] | None = None
