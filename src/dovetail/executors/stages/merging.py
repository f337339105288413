"""Merges kernels that read one tensor: says which may be merged, and builds the merged function.

*Convolutions* of one input: a kernel of k weights with padding p, in each dimension, equals one of
K > k weights, zeros around those k, with padding P, where

    P - p = dilation (K - k) / 2    and    K - k is even

So convolutions may be merged if their stride and dilation, their 2 p - dilation (k - 1) and their
k mod 2 are equal. All of them then give images of one size. *Matrix products* may be merged if they
have the same left operand and constant right operands. The weights are concatenated, and the output
is split again. Activations that follow must be the same; they run before the split. The outputs
equal the unmerged ones within float round-off as long as all values are finite: a zero of the
padding times an infinite input is NaN.

"Accelerate DNN Inference by Inter-Operator Parallelism", 2019, section 3 (its "merge" strategy);
Z. Jia et al., "Optimizing DNN Computation with Relaxed Graph Substitutions", MLSys 2019.
Differences: two operands count as the same if they have the same *value*, which means that the same
calls of the same tensors make them (value numbering). So the three views that a language model
takes of one tensor, and equal calls in front of the products, are recognised.

The split has a price. An output is a strided view of the whole, unless images are of batch 1 and
not channels last. Pointwise ops, products and concatenation read a strided view as it is. Any other
reader would make a dense copy each time it runs, so outputs with such readers are copied here once,
where the seconds of the merged kernel include the copy.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.executors.stages.preparing import (
    Function,
    Kernel,
    Layered,
    PreparedKernels,
    refs_of,
    run_prepared,
)
from dovetail.frontends.program import Call, Ref, kind_of
from dovetail.graph import Graph
from dovetail.graph.kernels import (
    ACTIVATIONS,
    CONVOLUTION,
    POINTWISE,
    PRODUCTS,
    Kernels,
    written_sources,
)
from dovetail.schedulers.merge import can_merge as can_merge

aten = torch.ops.aten
_RIGHT_OPERANDS = {"aten.mm": 1, "aten.addmm": 2}
_READ_STRIDED = POINTWISE | PRODUCTS | {"aten.cat"}
_RESHAPES = (aten.reshape.default, aten._unsafe_view.default)
_NEEDS_STRIDES = (aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype)


@dataclass(frozen=True, eq=False)
class _MergeHead:
    """The parts of a kernel that may be merged, in order.

    before        calls in front of the convolution or product
    call          the convolution or product itself
    activations   calls on its output
    views         views of the activations' output
    """

    before: tuple[Call, ...]
    call: Call
    activations: tuple[Call, ...]
    views: tuple[Call, ...]

    @property
    def is_convolution(self) -> bool:
        return kind_of(self.call.target) == CONVOLUTION

    @property
    def operand(self) -> Ref:
        """The tensor that all merged kernels read: the images, or the left operand."""
        place = 0 if self.is_convolution else _RIGHT_OPERANDS[kind_of(self.call.target)] - 1
        operand = self.call.args[place]
        assert isinstance(operand, Ref)
        return operand

    @property
    def weight_and_bias(self) -> tuple[Any, Any]:
        """`Ref`s of the weight and of the bias; None in place of a bias that is not there."""
        if self.is_convolution:
            return self.call.args[1], self.call.args[2]
        right = _RIGHT_OPERANDS[kind_of(self.call.target)]
        return self.call.args[right], self.call.args[0] if right == 2 else None

    @property
    def output(self) -> int:
        """The tensor after the activations and before the views."""
        return (self.call, *self.activations)[-1].results[0]


def merge_keys(graph: Graph, kernels: Kernels, prepared: PreparedKernels) -> list[Hashable | None]:
    """[kernels] keys for `schedulers.merge.merge`. Takes O(calls).

    Any kernels of equal keys may be merged with each other. None stands for a kernel that cannot be
    merged.
    """
    values = _value_numbers(prepared)
    # Weights that a step writes are not constant, and a merged copy of them would go stale.
    written = written_sources(graph)
    constants = {t: value for t, value in prepared.constants.items() if t not in written}
    made_by = {t: n for n, kernel in enumerate(prepared.kernels) for t in kernel.writes}
    keys: list[Hashable | None] = []
    for kernel in prepared.kernels:
        keys.append(None)
        head = _head_of(kernel)
        if head is None:
            continue
        weight, bias = (
            value if value is None else constants.get(value.tensor)
            for value in head.weight_and_bias
        )
        if weight is None or (bias is None) != (head.weight_and_bias[1] is None):
            continue
        channels = weight.shape[0] if head.is_convolution else weight.shape[1]
        if bias is not None and (bias.shape != (channels,) or bias.dtype != weight.dtype):
            continue
        # The convolutions or products must agree in all of these.
        own: Hashable = ("product", weight.dtype)
        if head.is_convolution:
            stride, padding, dilation = (_each(head, place) for place in (3, 4, 5))
            sizes = tuple(weight.shape[2:])
            sides = zip(padding, dilation, sizes, strict=True)
            shifts = tuple(2 * p - d * (k - 1) for p, d, k in sides)
            odd = tuple(size % 2 for size in sizes)
            own = ("convolution", weight.dtype, stride, dilation, shifts, odd)
        # Two kernels may each make a view of equal value, at different times. So what a kernel
        # reads must come from the same kernels as well.
        made = frozenset(made_by.get(t, -1) for t in kernel.reads)
        activations = tuple(
            (str(call.target), _frozen((call.args[1:], call.kwargs), {}))
            for call in head.activations
        )
        keys[-1] = (own, values[head.operand.tensor], made, activations)
    assert len(keys) == kernels.count
    return keys


def merged_function(
    prepared: PreparedKernels, numbers: Sequence[int]
) -> tuple[Function, tuple[int, ...], tuple[int, ...]]:
    """(one function in place of kernels of one key, the tensors it takes, the tensors it returns).

    The result has the form of `PreparedKernels.function`. The weights are concatenated here, once.
    """
    heads = [head for number in numbers if (head := _head_of(prepared.kernels[number])) is not None]
    assert len(heads) == len(numbers), "only kernels that have a key are merged"
    first = heads[0]
    # The weights' dimension of outputs.
    dimension = 0 if first.is_convolution else 1
    refs = [head.weight_and_bias for head in heads]
    weights = [prepared.constants[weight.tensor] for weight, _ in refs]
    sizes = [weight.shape[dimension] for weight in weights]
    with torch.inference_mode():
        bias = None
        if any(of_head is not None for _, of_head in refs):
            # A kernel without bias gets zeros.
            bias = torch.cat(
                [
                    weight.new_zeros(size)
                    if of_head is None
                    else prepared.constants[of_head.tensor]
                    for weight, size, (_, of_head) in zip(weights, sizes, refs, strict=True)
                ]
            )
        if first.is_convolution:
            largest = [max(sides) for sides in zip(*(w.shape[2:] for w in weights), strict=True)]
            padded = []
            for weight in weights:
                # `F.pad` takes the last dimension first, and each dimension's begin and end.
                around = [
                    (most - k) // 2 for most, k in zip(largest, weight.shape[2:], strict=True)
                ]
                padded.append(F.pad(weight, [side for n in reversed(around) for side in (n, n)]))
            dilations = zip(largest, weights[0].shape[2:], _each(first, 5), strict=True)
            more = [d * (most - k) // 2 for most, k, d in dilations]
            padding = [p + added for p, added in zip(_each(first, 4), more, strict=True)]
            joined = torch.cat(padded)
            if prepared.channels_last and joined.dim() == 4:
                joined = joined.contiguous(memory_format=torch.channels_last)
            _, _, _, stride, _, *rest = first.call.args
            arguments = (first.operand, joined, bias, stride, padding, *rest)
            call = replace(first.call, args=arguments)
        else:
            # It is the transpose of a dense tensor, as a linear layer's weight is.
            joined = torch.cat([weight.t() for weight in weights]).t()
            operands = (first.operand, joined)
            if bias is None:
                call = replace(first.call, target=aten.mm.default, args=operands)
            else:
                call = replace(first.call, target=aten.addmm.default, args=(bias, *operands))
    whole = (*first.before, call, *first.activations)
    # All tensors that any of the kernels reads, even those of equal value: they are different
    # tensors, and `PreparedKernels.function` takes each of them.
    takes = tuple(dict.fromkeys(t for n in numbers for t in prepared.kernels[n].reads))
    returns = tuple(dict.fromkeys(t for n in numbers for t in prepared.kernels[n].writes))
    # Outputs with a reader that would copy a strided tensor, or would fail on it, are copied once.
    outputs = {head.output for head in heads}
    copied: set[int] = set()
    for each in (each for kernel in prepared.kernels for each in kernel.calls):
        if _is_view(each):
            reads_strided = each.target not in _NEEDS_STRIDES
        else:
            reads_strided = kind_of(each.target) in _READ_STRIDED
        if not reads_strided:
            copied |= outputs.intersection(refs_of(each))
    image = torch.channels_last if prepared.channels_last else torch.contiguous_format

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        tensors = Layered(dict(zip(takes, given, strict=True)), prepared.constants)
        for each in whole:
            run_prepared(each, tensors)
        parts = torch.split_with_sizes(tensors[first.output], sizes, 1)
        for head, part in zip(heads, parts, strict=True):
            if head.output in copied:
                layout = image if part.dim() == 4 else torch.contiguous_format
                part = part.contiguous(memory_format=layout)
            tensors[head.output] = part
            for each in head.views:
                run_prepared(each, tensors)
        return tuple(tensors[t] for t in returns)

    return run, takes, returns


def _head_of(kernel: Kernel) -> _MergeHead | None:
    """The parts of the kernel; None if it does not consist of such parts."""
    calls = kernel.calls
    places = [
        place
        for place, call in enumerate(calls)
        if kind_of(call.target) == CONVOLUTION or kind_of(call.target) in _RIGHT_OPERANDS
    ]
    if not places or any(call.random or call.in_place for call in calls):
        return None
    # The last convolution or product is the one to merge; those in front of it count as `before`.
    at = places[-1]
    end = at + 1
    while end < len(calls) and kind_of(calls[end].target) in ACTIVATIONS:
        if refs_of(calls[end]) != [calls[end - 1].results[0]]:
            return None
        end += 1
    head = _MergeHead(calls[:at], calls[at], calls[at + 1 : end], calls[end:])
    made = {head.output}
    for call in head.views:
        if not (_is_view(call) and set(refs_of(call)) <= made):
            return None
        made |= set(call.results)
    if not set(kernel.writes) <= made:
        return None
    call = head.call
    if head.is_convolution:
        # Transposed ones, and those of several groups, are not merged.
        has_known_form = not call.args[6] and call.args[8] == 1 and isinstance(call.args[0], Ref)
    else:
        left = _RIGHT_OPERANDS[kind_of(call.target)] - 1
        has_known_form = not call.kwargs and isinstance(call.args[left], Ref)
    return head if has_known_form else None


def _is_view(call: Call) -> bool:
    return call.target in _RESHAPES or bool(getattr(call.target, "is_view", False))


def _each(head: _MergeHead, place: int) -> tuple[int, ...]:
    """An argument of a convolution, repeated for each dimension if it is given once."""
    given, dimensions = tuple(head.call.args[place]), len(head.call.args[7])
    return given if len(given) == dimensions else given * dimensions


def _value_numbers(prepared: PreparedKernels) -> dict[int, int]:
    """Tensor -> its value number, equal for tensors made by the same calls of the same tensors."""
    numbers: dict[Hashable, int] = {}
    values: dict[int, int] = {}

    def number_of(what: Hashable) -> int:
        return numbers.setdefault(what, len(numbers))

    for kernel in prepared.kernels:
        for call in kernel.calls:
            for tensor in refs_of(call):
                if tensor not in values:
                    values[tensor] = number_of(("tensor", tensor))
            # Such calls may give another value each time, so their results are values of their own.
            if call.random or call.in_place:
                continue
            name = str(call.target) if hasattr(call.target, "_schema") else id(call.target)
            made = (name, _frozen((call.args, call.kwargs), values))
            for place, tensor in enumerate(call.results):
                if tensor >= 0:
                    values[tensor] = number_of((made, place))
    return values


def _frozen(tree: Any, values: dict[int, int]) -> Hashable:
    """The arguments in a hashable form, with each `Ref` replaced by the number of its value."""
    if isinstance(tree, Ref):
        return "value", values[tree.tensor]
    if isinstance(tree, dict):
        return tuple((name, _frozen(value, values)) for name, value in sorted(tree.items()))
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(value, values) for value in tree)
    return type(tree).__name__, tree
