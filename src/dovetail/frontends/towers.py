"""Makes a step of data-parallel towers from one replica's training step, with calls to run it.

`graph.replicate` makes the graph; this file makes the program and the signature that go with it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.frontends.optimizers import SCALE
from dovetail.frontends.program import (
    Call,
    Captured,
    Program,
    Ref,
    Signature,
    SourceValue,
    fill_refs,
)
from dovetail.frontends.structures import TensorSlot
from dovetail.graph import Graph, Replicated, replicate

Examples = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""(inputs, targets) of a step."""


def towers(captured: Captured, replicas: int, *, synchronous: bool = True) -> Captured:
    """Return the step of `replicas` towers. Each tower is `captured` and takes its batch size.

    The step takes the inputs of all towers, tower after tower, then all targets in the same order:
    with two inputs and one target per tower, (x0, y0, x1, y1, ..., t0, t1, ...). It returns the
    mean of the towers' losses. Parameters, buffers and state keep their names. Drawn examples are
    drawn for each tower; every tower has the same examples if they were given as real tensors.

    `graph.replicate` describes the graph and the statistics of batch norm, and raises the errors.
    Raises `UsageError` for a step with a gradient scaler.
    """
    names = [source.name for source in captured.program.sources if source is not None]
    if SCALE in names:
        raise UsageError("replicas", "do not go with a gradient scaler; leave one of them out")
    replicated = replicate(captured.graph, replicas, synchronous=synchronous)
    return replace(
        captured,
        graph=replicated.graph,
        program=_program(captured, replicated),
        source=replace(captured.source, replicas=replicas, asynchronous=not synchronous),
        plain=None,
        signature=signature_of_copies(captured.signature, replicas),
        examples=draw_for_copies(captured.examples, replicas),
    )


def average(*values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the mean of two values or more, with the given strides. They are summed in order."""
    first, second, *rest = values
    total = first.new_empty(0).new_empty_strided(first.shape, strides)
    torch.add(first, second, out=total)
    for value in rest:
        total.add_(value)
    return total.div_(len(values))


def _program(captured: Captured, replicated: Replicated) -> Program:
    """Return the calls and sources of the replicated graph's ops."""
    program, graph, origins = captured.program, replicated.graph, replicated.origins.tolist()
    calls: list[Call | None] = []
    sources: list[SourceValue | None] = []
    towers = replicated.towers.tolist()
    copy_of = {key: op for op, key in enumerate(zip(origins, towers, strict=True))}
    for op, (origin, tower) in enumerate(zip(origins, towers, strict=True)):
        call = averaging_call(graph, op) if origin < 0 else copied_call(captured, graph, op, origin)
        if call is not None and call.draws_of >= 0:
            # It repeats a draw of its own tower.
            call = replace(call, draws_of=copy_of[call.draws_of, tower])
        calls.append(call)
        source = None if origin < 0 else program.sources[origin]
        if source is not None and source.role == "input":
            source = replace(source, name=input_name(captured, source.name, tower))
        sources.append(source)
    # A training step returns its loss and nothing else.
    loss = int(graph.outputs[0])
    outputs = Ref(loss)
    return replace(program, calls=tuple(calls), sources=tuple(sources), loss=loss, outputs=outputs)


def copied_call(captured: Captured, graph: Graph, op: int, origin: int) -> Call | None:
    """Return the origin's call on the tensors of its copy, op `op`; None for a source."""
    call, single = captured.program.calls[origin], captured.graph
    if call is None:
        return None
    reads = zip(single.inputs_of(origin).tolist(), graph.inputs_of(op).tolist(), strict=True)
    refs = {old: Ref(new) for old, new in reads}
    # An op's outputs stand together in both graphs, so one shift serves all of them.
    moved = graph.outputs_of(op).start - single.outputs_of(origin).start
    return replace(
        call,
        args=fill_refs(call.args, refs),
        kwargs=fill_refs(call.kwargs, refs),
        results=tuple(tensor + moved if tensor >= 0 else -1 for tensor in call.results),
    )


def averaging_call(graph: Graph, op: int) -> Call:
    """Return the call of an op that averages one tensor of each tower."""
    (result,) = graph.outputs_of(op)
    values = tuple(Ref(tensor) for tensor in graph.inputs_of(op).tolist())
    return Call(average, values, {"strides": graph.strides[result]}, (result,))


def signature_of_copies(signature: Signature, replicas: int) -> Signature:
    """Return a signature that takes only tensors, by position: the inputs of each tower, then the
    targets of each tower."""
    inputs, targets = signature.inputs * replicas, signature.targets * replicas
    return Signature(
        {str(index): TensorSlot(index) for index in range(len(inputs))},
        tuple(map(str, range(len(inputs)))),
        tuple(map(TensorSlot, range(len(targets)))),
        inputs,
        targets,
        tuple(f"{tower}.{name}" for tower in range(replicas) for name in signature.names),
        tuple(f"{tower}.{name}" for tower in range(replicas) for name in signature.target_names),
    )


def input_name(captured: Captured, name: str, tower: int) -> str:
    """Return the name of a tower's input in the step of all towers: "target.5" for "target.1" of
    tower 2, if each tower has two targets."""
    kind, _, index = name.partition(".")
    count = len(captured.inputs) if kind == "input" else len(captured.targets)
    return f"{kind}.{tower * count + int(index)}"


def draw_for_copies(
    draw: Callable[[], Examples] | None, replicas: int
) -> Callable[[], Examples] | None:
    """Return a function that draws examples for each tower; None if there is no `draw`."""
    if draw is None:
        return None

    def draw_all() -> Examples:
        drawn = [draw() for _ in range(replicas)]
        inputs, targets = zip(*drawn, strict=True)
        return tuple(x for single in inputs for x in single), tuple(
            x for single in targets for x in single
        )

    return draw_all
