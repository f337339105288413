"""Makes the calls of several copies of a captured step: of its towers or micro-batches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.frontends.optimizers import SCALE
from dovetail.frontends.program import Call, Captured, Ref, Signature, SourceValue, fill_refs
from dovetail.frontends.structures import TensorSlot
from dovetail.graph.source import Transform
from dovetail.transforms.copying import AGAIN, SUM, Replicated

Examples = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""(inputs, targets) of a step."""


def check_unscaled(captured: Captured, option: str) -> None:
    """Raise `UsageError` for a step with a gradient scaler, which would scale every copy's loss."""
    if any(source is not None and source.name == SCALE for source in captured.program.sources):
        raise UsageError(option, "do not go with a gradient scaler; leave one of them out")


def step_of_copies(captured: Captured, made: Replicated, transform: Transform) -> Captured:
    """Return the step of all copies of a captured step, whose graph is `made`.

    It takes only tensors, by position: the inputs of each copy, then the targets of each.
    """
    program, single, graph = captured.program, captured.graph, made.graph
    rows = list(zip(*(column.tolist() for column in made.rows), strict=True))
    # Ops that are computed again are no copies that a draw is repeated of.
    place_of = {
        (origin, copy): op
        for op, (kind, origin, copy, _) in enumerate(rows)
        if origin >= 0 and kind != AGAIN
    }
    calls: list[Call | None] = []
    sources: list[SourceValue | None] = []
    for op, (kind, origin, copy, _) in enumerate(rows):
        if origin < 0:
            (result,) = graph.outputs_of(op)
            read = tuple(map(Ref, graph.inputs_of(op).tolist()))
            options: dict[str, Any] = {"strides": graph.strides[result]}
            if kind == SUM:
                parts = made.count if copy == made.count - 1 else 1
                options = {"new": copy == 1, **options, "parts": parts}
            target: Callable[..., Tensor] = accumulate if kind == SUM else average
            calls.append(Call(target, read, options, (result,), in_place=kind == SUM and copy > 1))
            sources.append(None)
            continue
        call, source = program.calls[origin], program.sources[origin]
        if call is not None:
            tensors = zip(single.inputs_of(origin).tolist(), graph.inputs_of(op), strict=True)
            refs = {old: Ref(int(new)) for old, new in tensors}
            # An op's outputs stand together in both graphs, so one shift serves all of them.
            moved = graph.outputs_of(op).start - single.outputs_of(origin).start
            # A draw is repeated of the same copy.
            drawn = origin if kind == AGAIN and call.random else -1
            drawn = call.draws_of if call.draws_of >= 0 else drawn
            call = replace(
                call,
                args=fill_refs(call.args, refs),
                kwargs=fill_refs(call.kwargs, refs),
                results=tuple(tensor + moved if tensor >= 0 else -1 for tensor in call.results),
                draws_of=place_of[drawn, copy] if drawn >= 0 else -1,
            )
        if source is not None and source.role == "input":
            # "target.1" of copy 2 is "target.5", if each copy has two targets.
            name, _, index = source.name.partition(".")
            count = len(captured.inputs if name == "input" else captured.targets)
            source = replace(source, name=f"{name}.{copy * count + int(index)}")
        calls.append(call)
        sources.append(source)
    # A training step returns its loss and nothing else.
    loss = int(graph.outputs[0])
    signature, count = captured.signature, made.count
    inputs, targets = signature.inputs * count, signature.targets * count
    draw = captured.examples

    def draw_of_all() -> Examples:
        assert draw is not None, "it is left out where nothing is drawn"
        of_inputs, of_targets = zip(*(draw() for _ in range(count)), strict=True)
        return sum(of_inputs, ()), sum(of_targets, ())

    return replace(
        captured,
        graph=graph,
        program=replace(
            program, calls=tuple(calls), sources=tuple(sources), loss=loss, outputs=Ref(loss)
        ),
        transforms=(*captured.transforms, transform),
        plain=None,
        signature=Signature(
            {str(index): TensorSlot(index) for index in range(len(inputs))},
            tuple(map(str, range(len(inputs)))),
            tuple(map(TensorSlot, range(len(targets)))),
            inputs,
            targets,
            tuple(f"{copy}.{name}" for copy in range(count) for name in signature.names),
            tuple(f"{copy}.{name}" for copy in range(count) for name in signature.target_names),
        ),
        examples=None if draw is None else draw_of_all,
    )


def average(*values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the mean of two values or more, with the given strides. They are summed in order."""
    first, second, *rest = values
    total = first.new_empty(0).new_empty_strided(first.shape, strides)
    torch.add(first, second, out=total)
    for value in rest:
        total.add_(value)
    return total.div_(len(values))


def accumulate(
    total: Tensor, gradient: Tensor, *, new: bool, strides: tuple[int, ...], parts: int
) -> Tensor:
    """Return the sum of two gradients, divided by `parts`.

    new   True: the sum is a tensor of its own, with these strides; False: `total` becomes it
    """
    if new:
        result = total.new_empty(0).new_empty_strided(total.shape, strides)
        torch.add(total, gradient, out=result)
    else:
        result = total.add_(gradient)
    return result if parts == 1 else result.div_(parts)
