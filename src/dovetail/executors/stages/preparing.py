"""Prepares a captured inference step for a device: one function per kernel.

This is done once, when a step is loaded:

* ops that depend on parameters and constants alone are computed (`FOLDED` ops);
* a batch normalisation y = (x - mean) / sqrt(var + eps) * gamma + beta after a convolution is
  folded into the convolution's weight and bias: w' = w s, b' = beta + (b - mean) s, with
  s = gamma / sqrt(var + eps);
* images and the weights of convolutions are laid out channels last, if the caller asks for it.

On CPU cores convolutions run by oneDNN on one thread too, as they do on several threads.

Folding changes the order of roundings: outputs equal the plain model's within float round-off.
Buffers that a step writes stay among the constants and are written in place. Every step draws the
random numbers that `run_step` draws at seed 0 and step 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dovetail.frontends.interpret import (
    Values,
    call_arguments,
    initial_values,
    run_call,
    seed_for,
)
from dovetail.frontends.program import Call, Captured, Ref, kind_of
from dovetail.frontends.structures import leaves
from dovetail.graph import Graph
from dovetail.graph.kernels import (
    CONVOLUTION,
    FOLDED,
    NORMALISATIONS,
    Kernels,
    written_sources,
)

Function = Callable[..., tuple[Tensor, ...]]

aten = torch.ops.aten
_one_dnn: Any = torch.backends.mkldnn
_NEEDS_STRIDES = (aten.as_strided.default, aten.view_as_complex.default)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of a step.

    calls    the kernel's calls, in order
    reads    tensors of the graph that the kernel gets from other kernels or from the inputs
    writes   tensors of the graph that other kernels or the caller need from it
    """

    calls: tuple[Call, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PreparedKernels:
    """A step's kernels, prepared.

    kernels     in the order of `Kernels`
    constants   tensor -> value, for constant tensors that kernels or the caller need: those of the
                graph, and those that preparing added
    inputs      tensors that each step is given, in the order of the model's inputs
    outputs     what the step returns, as in `Program`
    """

    kernels: tuple[Kernel, ...]
    constants: Values
    inputs: tuple[int, ...]
    outputs: Any
    channels_last: bool

    @cached_property
    def returned(self) -> frozenset[int]:
        """The tensors that the step returns."""
        return frozenset(_refs(self.outputs))

    @cached_property
    def readers(self) -> dict[int, set[int]]:
        """Each tensor that a kernel writes or reads -> the kernels that read it."""
        found: dict[int, set[int]] = {t: set() for k in self.kernels for t in k.writes}
        for number, kernel in enumerate(self.kernels):
            for tensor in kernel.reads:
                found.setdefault(tensor, set()).add(number)
        return found

    def laid_out(self, value: Tensor) -> Tensor:
        """The input in the memory layout that the kernels expect."""
        if self.channels_last and value.dim() == 4:
            return value.contiguous(memory_format=torch.channels_last)
        return value

    def function(self, numbers: Sequence[int]) -> tuple[Function, tuple[int, ...], tuple[int, ...]]:
        """(function that runs these kernels in order, the tensors it takes, those it returns).

        It returns the tensors that other kernels or the caller need.
        """
        calls = [call for number in numbers for call in self.kernels[number].calls]
        made = dict.fromkeys(t for number in numbers for t in self.kernels[number].writes)
        reads = dict.fromkeys(t for number in numbers for t in self.kernels[number].reads)
        takes = tuple(t for t in reads if t not in made)
        here = set(numbers)
        returns = tuple(t for t in made if t in self.returned or not self.readers[t] <= here)

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            tensors = Layered(dict(zip(takes, given, strict=True)), self.constants)
            for call in calls:
                run_prepared(call, tensors)
            return tuple(tensors[t] for t in returns)

        return run, takes, returns


class Layered(dict[int, Tensor]):
    """A step's values by tensor; a tensor that has none is looked up among the constants."""

    def __init__(self, values: Values, constants: Values) -> None:
        super().__init__(values)
        self._constants = constants

    def __missing__(self, tensor: int) -> Tensor:
        return self._constants[tensor]


def prepare(
    captured: Captured, kernels: Kernels, *, channels_last: bool = False
) -> PreparedKernels:
    """Prepare the kernels of a captured inference step, with real weights."""
    graph, program = captured.graph, captured.program
    constants = initial_values(captured)
    of_ops = [_seeded(call, op) for op, call in enumerate(program.calls)]
    with torch.inference_mode():
        for op, call in enumerate(of_ops):
            if call is not None and kernels.of_op[op] == FOLDED:
                run_call(call, constants, 0)
        calls = [
            [_laid_out(call, graph, channels_last) for call in of_kernel]
            for of_kernel in _Folding(graph, kernels, constants).calls(of_ops)
        ]
        if channels_last:
            _lay_out(calls, constants)
    inputs = tuple(
        graph.outputs_of(op)[0]
        for op, source in enumerate(program.sources)
        if source is not None and source.role == "input"
    )
    found = tuple(_kernel(graph, kernels, number, own) for number, own in enumerate(calls))
    wanted = {*_refs(program.outputs), *(t for own in calls for call in own for t in refs_of(call))}
    constants = {tensor: value for tensor, value in constants.items() if tensor in wanted}
    return PreparedKernels(found, constants, inputs, program.outputs, channels_last)


def run_prepared(call: Call, tensors: Values) -> None:
    """Run one call of a kernel, and store its results in `tensors`."""
    if call.target is aten.convolution.default:
        call = replace(call, target=_convolution)
    run_call(call, tensors, 0)


def _convolution(  # noqa: PLR0917  those of aten.convolution
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """aten.convolution, which on one thread runs as it does on several threads.

    ATen uses oneDNN for 1x1 convolutions only on several threads. Without it they took 1.4 to 2.3
    times as long on one thread here.
    """
    # On several threads ATen uses oneDNN under this condition.
    several_threads_use_it = (
        groups > 1 or len(images) > 1 or min(weight.shape[2:]) > 3 or images.numel() > 20480
    )
    if (
        images.device.type == "cpu"
        and images.dtype == torch.float32
        and images.dim() == 4
        and not transposed
        and several_threads_use_it
        and _one_dnn.is_available()
    ):
        padding, stride, dilation = (
            list(given) * (2 // len(given)) for given in (padding, stride, dilation)
        )
        several: Tensor = aten.mkldnn_convolution.default(
            images, weight, bias, padding, stride, dilation, groups
        )
        return several
    one: Tensor = aten.convolution.default(
        images, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    return one


def refs_of(call: Call) -> list[int]:
    """The tensors that a call reads, in order."""
    return _refs((call.args, call.kwargs))


def _refs(tree: Any) -> list[int]:
    return [leaf.tensor for leaf in leaves(tree, Ref)]


def _seeded(call: Call | None, op: int) -> Call | None:
    """The call with its seed built in, if it draws random numbers; otherwise not random."""
    if call is None or not call.random:
        return call
    return replace(
        call, target=Seeded(call.target, seed_for(0, 0, call.seed_index(op))), random=False
    )


@dataclass(frozen=True)
class Seeded:
    """A target that draws the numbers of one seed."""

    target: Callable[..., Any]
    seed: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(self.seed)
        return self.target(*args, **kwargs)


class _Folding:
    """Folds normalisations into the convolutions before them."""

    def __init__(self, graph: Graph, kernels: Kernels, constants: Values) -> None:
        self.graph, self.kernels, self.constants = graph, kernels, constants
        self.written = written_sources(graph)
        self.fresh = graph.tensors

    def calls(self, calls: Sequence[Call | None]) -> list[list[Call]]:
        """[kernels] the calls of each kernel, after folding."""
        found: list[list[Call]] = [[] for _ in range(self.kernels.count)]
        for op, call in enumerate(calls):
            number = int(self.kernels.of_op[op])
            if call is None or number == FOLDED:
                continue
            own = found[number]
            before = own[-1] if own else None
            if before is not None and self._normalises(op, call, before):
                own[-1] = self._folded(before, call)
            else:
                own.append(call)
        return found

    def _normalises(self, op: int, call: Call, before: Call) -> bool:
        """True if `call` normalises what convolution `before` makes, and all else is constant."""
        if self.graph.kinds[op] not in NORMALISATIONS or kind_of(before.target) != CONVOLUTION:
            return False
        arguments = _named(call)
        known = refs_of(call)[1:] + refs_of(before)[1:]
        return (
            isinstance(call.args[0], Ref)
            and call.args[0].tensor == before.results[0]
            and not before.args[6]  # transposed
            and not arguments.get("training", False)
            and arguments["running_mean"] is not None
            and all(t in self.constants and t not in self.written for t in known)
        )

    def _folded(self, convolution: Call, normalisation: Call) -> Call:
        """The convolution with the normalisation in its weight and bias.

        It is computed in float64, so that only the new weight and bias are rounded.
        """
        (_, weight, bias, *rest), _ = call_arguments(
            replace(convolution, args=(None, *convolution.args[1:])), self.constants
        )
        known = {
            name: self.constants[value.tensor].double() if isinstance(value, Ref) else value
            for name, value in _named(normalisation).items()
            if name != "input"
        }
        scale = torch.rsqrt(known["running_var"] + known["eps"])
        scale = scale if known["weight"] is None else scale * known["weight"]
        shift = ((0 if bias is None else bias.double()) - known["running_mean"]) * scale
        shift = shift if known["bias"] is None else shift + known["bias"]
        folded = weight.double() * scale.reshape(-1, *[1] * (weight.dim() - 1))
        arguments = (
            convolution.args[0],
            self._constant(folded.to(weight.dtype)),
            self._constant(shift.to(weight.dtype)),
            *rest,
        )
        return replace(convolution, args=arguments, results=(normalisation.results[0],))

    def _constant(self, value: Tensor) -> Ref:
        """Add a constant under a number above those of the graph's tensors."""
        self.constants[self.fresh] = value
        self.fresh += 1
        return Ref(self.fresh - 1)


def _named(call: Call) -> dict[str, Any]:
    """The arguments of an operator's call, by name."""
    names = [argument.name for argument in call.target._schema.arguments]  # type: ignore[attr-defined]
    return dict(zip(names, call.args, strict=False)) | call.kwargs


def _lay_out(calls: Sequence[Sequence[Call]], constants: Values) -> None:
    """Lay out the weights of two-dimensional convolutions channels last, in `constants`."""
    for of_kernel in calls:
        for call in of_kernel:
            if kind_of(call.target) == CONVOLUTION and isinstance(call.args[1], Ref):
                tensor = call.args[1].tensor
                if tensor in constants and constants[tensor].dim() == 4:
                    constants[tensor] = constants[tensor].contiguous(
                        memory_format=torch.channels_last
                    )


def _laid_out(call: Call, graph: Graph, channels_last: bool) -> Call:
    """The call, made safe for tensors whose strides differ from those of the capture.

    Views become reshapes, which copy where a view is impossible. Ops that depend on strides get a
    copy with the strides of the capture.
    """
    if call.target in (aten.view.default, aten._unsafe_view.default):
        return replace(call, target=aten.reshape.default)
    if not channels_last or call.target not in _NEEDS_STRIDES:
        return call
    target, tensor = call.target, call.args[0].tensor
    shape, strides = graph.shapes[tensor], graph.strides[tensor]

    def run(given: Tensor, *args: Any) -> Any:
        if given.stride() != strides:
            given = torch.empty_strided(
                shape, strides, dtype=given.dtype, device=given.device
            ).copy_(given)
        return target(given, *args)

    return replace(call, target=run)


def _kernel(graph: Graph, kernels: Kernels, number: int, calls: Sequence[Call]) -> Kernel:
    made = [tensor for call in calls for tensor in call.results if tensor >= 0]
    read = [tensor for call in calls for tensor in refs_of(call)]
    reads = tuple(
        t
        for t in dict.fromkeys(read)
        if t not in made and t < graph.tensors and not _is_constant(graph, kernels, t)
    )
    outputs = set(graph.outputs.tolist())
    writes = tuple(
        t
        for t in made
        if t in outputs
        or any(int(kernels.of_op[reader]) != number for reader in graph.consumers_of(t))
    )
    return Kernel(tuple(calls), reads, writes)


def _is_constant(graph: Graph, kernels: Kernels, tensor: int) -> bool:
    producer = int(graph.producers[tensor])
    return int(kernels.of_op[producer]) == FOLDED and graph.kinds[producer] != "input"
