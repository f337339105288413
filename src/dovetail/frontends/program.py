"""Records of a captured step.

`Program` holds the executable calls behind a graph, `Signature` says how a step is called, and
`Captured` holds graph, program and source together.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

import dovetail.frontends.checks  # noqa: F401  an operator that calls name
from dovetail.errors import UsageError
from dovetail.frontends.optimizers import Optimizer
from dovetail.frontends.structures import Mismatch, constants, fill, flatten, matched
from dovetail.graph import Graph
from dovetail.graph.source import Source, Transform
from dovetail.runtime.torch_versions import OpOverload, pytree

_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default


@dataclass(frozen=True)
class Ref:
    """Stands in a call's arguments for a tensor of the graph."""

    tensor: int


@dataclass(frozen=True)
class Call:
    """One op's call: `target(*args, **kwargs)` with every `Ref` replaced by its tensor.

    results   per element of the returned value (a single tensor counts as one element) the graph's
              tensor that it becomes, or -1 if no op or output needs it
    random    the call draws random numbers: seed torch from (seed, step, op index) right before it
    draws_of  the op whose index goes into the seed, if the call computes that op's result again;
              -1: the call's own op
    in_place  the call writes over some of its arguments (an update); its results alias them
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[int, ...] = (0,)
    random: bool = False
    in_place: bool = False
    draws_of: int = -1

    @property
    def in_grad_mode(self) -> bool:
        """True if the call must run in grad mode. Only there oneDNN's recurrent kernel keeps the
        workspace that the kernel of its gradient reads."""
        return self.target is _RECURRENT and self.args[-1] is True

    def seed_index(self, op: int) -> int:
        """Return the op index that goes into the seed; `op` is the index of the call's own op."""
        return op if self.draws_of < 0 else self.draws_of

    def __reduce__(self) -> tuple[Any, ...]:
        # torch's operators cannot be pickled, so a Program travels to a worker with their names.
        # Memory formats and layouts are named too, because pickle would search every module that
        # imports torch for them.
        target = _Operator(str(self.target)) if isinstance(self.target, OpOverload) else self.target
        args, kwargs = pytree.tree_map_only(
            (torch.memory_format, torch.layout),
            lambda value: _Constant(str(value).removeprefix("torch.")),
            (self.args, self.kwargs),
        )
        rest = self.results, self.random, self.in_place, self.draws_of
        return _call, (target, args, kwargs, *rest)


@dataclass(frozen=True)
class _Operator:
    """Stands in a pickled call for an operator, by its name such as "aten.mm.default"."""

    name: str


@dataclass(frozen=True)
class _Constant:
    """Stands in a pickled call for a constant of torch, by its name such as "preserve_format"."""

    name: str


def _call(target: Any, args: Any, kwargs: Any, *rest: Any) -> Call:
    """Return the call that `Call.__reduce__` took apart."""
    if isinstance(target, _Operator):
        target = attrgetter(target.name)(torch.ops)
    args, kwargs = pytree.tree_map_only(
        _Constant, lambda value: getattr(torch, value.name), (args, kwargs)
    )
    return Call(target, args, kwargs, *rest)


@dataclass(frozen=True)
class SourceValue:
    """Says where a source op's value comes from.

    role   "input" | "parameter" | "state" | "buffer" | "constant"
    name   "input.0", "target.0", the name in the model's state_dict, or for optimizer state
           "PARAMETER/exp_avg"
    fill   initial value of all elements of optimizer state; None for other roles
    value  the tensor of a constant; None for other roles
    """

    role: str
    name: str
    fill: float | None = None
    value: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """The executable calls behind a graph, aligned with its op indices.

    calls, sources  [ops] the call or the source of each op; the other one of the two is None
    loss            the tensor that is the loss; -1 in inference
    outputs         structure of `Ref`s: the plain model's output (inference), or the loss
    aliases         other state_dict names -> the name that holds the value (tied parameters)
    """

    calls: tuple[Call | None, ...]
    sources: tuple[SourceValue | None, ...]
    loss: int
    outputs: Any
    aliases: dict[str, str] = field(default_factory=dict)

    @cached_property
    def random_ops(self) -> frozenset[int]:
        """The ops that draw random numbers."""
        calls = enumerate(self.calls)
        return frozenset(op for op, call in calls if call is not None and call.random)


@dataclass(frozen=True, eq=False)
class Signature:
    """The arguments of a step: the model's own, then those of its loss.

    arguments          label -> argument, with a `Slot` for each tensor. A label is the name of the
                       parameter that takes it, or its number where it has none
    positional         labels of the arguments that are given by position, in order
    target_structure   tuple with a `Slot` for each tensor
    inputs, targets    the example tensors, as given (fake or real), by their slots
    names, target_names   their names, such as "input_ids" or "past_key_values.layers.0.keys"
    parts              the step is called with a batch of which each tensor is split into so many
                       equal parts along dimension 0. `inputs`, `targets` and their names are those
                       of all parts, one part after another
    """

    arguments: dict[str, Any]
    positional: tuple[str, ...]
    target_structure: tuple[Any, ...]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    names: tuple[str, ...]
    target_names: tuple[str, ...]
    parts: int = 1

    @staticmethod
    def of(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any
    ) -> "Signature":
        """Return the signature of `loss(module(*args, **kwargs), *targets)`."""
        # One target that is no tuple or list is the loss's only argument after the output.
        if isinstance(targets, Tensor) or not isinstance(targets, (tuple, list)):
            targets = () if targets is None else (targets,)
        try:
            parameters = list(inspect.signature(module.forward).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [parameter.name for parameter in parameters if parameter.kind in plain]
        labels = tuple(named[i] if i < len(named) else str(i) for i in range(len(args)))
        inputs, names, arguments = flatten(dict(zip(labels, args, strict=True)) | kwargs)
        target_tensors, target_names, structure = flatten(tuple(targets), ("target",))
        return Signature(
            arguments, labels, structure, tuple(inputs), tuple(target_tensors), tuple(names),
            tuple(target_names),
        )  # fmt: skip

    @cached_property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """(name of the source, name for the user) of each input, then of each target."""
        inputs = [(f"input.{i}", name) for i, name in enumerate(self.names)]
        return (*inputs, *((f"target.{i}", name) for i, name in enumerate(self.target_names)))

    @property
    def constants(self) -> tuple[tuple[str, str], ...]:
        """(name, value as text) of each plain value among the arguments."""
        return tuple((name, repr(value)) for name, value in constants(self.arguments))

    def call(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of the module with these values in place of its tensors."""
        kwargs = dict(fill(self.arguments, tensors))
        return tuple(kwargs.pop(label) for label in self.positional), kwargs

    def loss_arguments(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return the loss's arguments after the output, with these values in place of their
        tensors."""
        return tuple(fill(self.target_structure, tensors))

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors of a step's arguments, first inputs, then targets; with several parts
        those of every part.

        `args` are the model's positional arguments, then either none or all of the loss's. Raises
        `UsageError` for arguments that differ from the captured ones in more than their tensors.
        """
        by_position = [label for label in self.positional if label not in kwargs]
        count, target_count = len(by_position), len(self.target_structure)
        try:
            if len(args) not in (count, count + target_count):
                raise Mismatch(
                    f"takes {', '.join(by_position) or 'no arguments'} by position"
                    + (f" and {target_count} of the loss" if target_count else "")
                    + f", but got {len(args)}"
                )
            given = dict(zip(by_position, args, strict=False)) | kwargs
            inputs = matched(self.arguments, given)
            targets = args[count:]
            expected = matched(self.target_structure, targets, "target") if targets else []
        except Mismatch as error:
            raise UsageError("step", str(error)) from None
        if self.parts == 1:
            return (*inputs, *expected)
        return (*self._split(inputs), *self._split(expected))

    def _split(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of all values, part after part. Raises `UsageError`."""
        for value in values:
            if value.dim() == 0 or value.shape[0] % self.parts:
                shape = "x".join(map(str, value.shape)) or "no dimensions"
                raise UsageError(
                    "step",
                    f"takes a batch that is split into {self.parts} equal parts along dimension 0, "
                    f"but a tensor has {shape}",
                )
        return [
            part
            for parts in zip(*(v.chunk(self.parts) for v in values), strict=True)
            for part in parts
        ]


@dataclass(frozen=True, eq=False)
class PlainStep:
    """What a step was captured from, beside the module and its arguments.

    loss        loss(output, *targets); None: the output, or the loss that the model itself returns
    optimizer   None: inference
    autocast    the dtype of `torch.autocast` around the capture; None: it was off
    training    of each of the module's modules whether it was in training mode
    gradients   of each of its parameters whether it required gradients
    differentiates   an inference step takes gradients itself, so it cannot run in inference mode
    """

    loss: Callable[..., Any] | None = None
    optimizer: Optimizer | None = None
    autocast: torch.dtype | None = None
    training: tuple[bool, ...] = ()
    gradients: tuple[bool, ...] = ()
    differentiates: bool = False


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured step: graph, program and source, and the module they were captured from.

    module_of  returns the module that was captured, with real or fake weights, and the same one
               each time; that of a step that was kept as data is built when it is asked for
    signature  how a step is called, with the example tensors
    make       builds the module with real weights, if the module's are fake; or None
    examples   draws real (inputs, targets), if the example tensors are fake; or None
    notes      sentences for the user about how the module was captured
    plain      how the step runs without a plan; None: it cannot, as the step of several towers
    fused_steps   the most time steps of a recurrent layer for which torch has a fused kernel; 0:
               there is none
    transforms what made this step of the one that was captured, in order
    kept_under what the step is kept under in the cache, see `keeping`; "": it is not
    """

    graph: Graph
    program: Program
    source: Source
    module_of: Callable[[], torch.nn.Module]
    signature: Signature
    make: Callable[[], torch.nn.Module] | None = None
    examples: Callable[[], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] | None = None
    notes: tuple[str, ...] = ()
    plain: PlainStep | None = None
    fused_steps: int = 0
    transforms: tuple[Transform, ...] = ()
    kept_under: str = ""

    @property
    def module(self) -> torch.nn.Module:
        """The module that was captured."""
        return self.module_of()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The example inputs: every tensor of the model's arguments, in order."""
        return self.signature.inputs

    @property
    def targets(self) -> tuple[Tensor, ...]:
        """The example targets: every tensor of the loss's arguments after the output, in order."""
        return self.signature.targets


# Arguments of calls: the refs to tensors in them, and the text that is an op's signature.


def replace_nodes(tree: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    """Return the arguments with every node replaced, in plain tuples, lists and dicts. Unlike fx's
    own containers these can be pickled and are fast to walk."""
    if isinstance(tree, fx.Node):
        return of_node(tree)
    if isinstance(tree, tuple):
        return tuple(replace_nodes(value, of_node) for value in tree)
    if isinstance(tree, list):
        return [replace_nodes(value, of_node) for value in tree]
    if isinstance(tree, dict):
        return {key: replace_nodes(value, of_node) for key, value in tree.items()}
    return tree


def distinct_refs(tree: Any) -> list[int]:
    """Return the distinct tensors that nested arguments refer to, in order."""
    tensors: dict[int, None] = {}
    _collect(tree, tensors)
    return list(tensors)


def _collect(tree: Any, tensors: dict[int, None]) -> None:
    if isinstance(tree, Ref):
        tensors.setdefault(tree.tensor)
    elif isinstance(tree, dict):
        _collect(tuple(tree.values()), tensors)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _collect(value, tensors)


def fill_refs(tree: Any, tensors: Any) -> Any:
    """Return the arguments with every `Ref` replaced by `tensors[ref.tensor]`."""
    if isinstance(tree, Ref):
        return tensors[tree.tensor]
    if isinstance(tree, list):
        return [fill_refs(value, tensors) for value in tree]
    if isinstance(tree, tuple):
        return tuple(fill_refs(value, tensors) for value in tree)
    if isinstance(tree, dict):
        return {key: fill_refs(value, tensors) for key, value in tree.items()}
    return tree


def kind_of(target: Any) -> str:
    """Return an op's kind: "aten.mm" for aten.mm.default, "python.NAME" for another function."""
    if isinstance(target, OpOverload):
        return str(target.overloadpacket)
    return f"python.{getattr(target, '__name__', target)}"


def signature(kind: str, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """Return the text kind(arguments), with each tensor as dtype[shape](strides)."""
    parts = [_text(arg) for arg in args]
    parts += [f"{key}={_text(value)}" for key, value in sorted(kwargs.items())]
    return f"{kind}({', '.join(parts)})"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        shape, strides = ("x".join(map(str, sizes)) for sizes in (value.shape, value.stride()))
        return f"{dtype_of(value)}[{shape}]({strides})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def dtype_of(value: Tensor) -> str:
    """Return the tensor's dtype as text: "float32" for torch.float32."""
    return str(value.dtype).removeprefix("torch.")
