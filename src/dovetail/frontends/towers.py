"""Captured -> Captured: data-parallel towers that run, from one replica's training step."""

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


def towers(captured: Captured, replicas: int, *, synchronous: bool = True) -> Captured:
    """The step of `replicas` towers, each of which is `captured`: its batch is a tower's.

    A step takes the inputs of all towers, tower after tower, then all targets likewise: with two
    inputs a tower and one target, (x0, y0, x1, y1, ..., t0, t1, ...). It returns the mean of the
    towers' losses. Parameters, buffers and state keep their names. Examples that are drawn are
    drawn for each tower; those given as real tensors are every tower's.

    What the graph is, what becomes of the statistics of batch norm, and what is raised: see
    `graph.replicate`.
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
        signature=_signature(captured.signature, replicas),
        examples=_drawn(captured.examples, replicas),
    )


def average(*values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The sum of the values, in their order, divided by their number; of the given strides."""
    first, second, *rest = values
    total = first.new_empty(0).new_empty_strided(first.shape, strides)
    torch.add(first, second, out=total)
    for value in rest:
        total.add_(value)
    return total.div_(len(values))


def _program(captured: Captured, replicated: Replicated) -> Program:
    program, graph, origins = captured.program, replicated.graph, replicated.origins.tolist()
    calls: list[Call | None] = []
    sources: list[SourceValue | None] = []
    towers = replicated.towers.tolist()
    copy_of = {key: op for op, key in enumerate(zip(origins, towers, strict=True))}
    for op, (origin, tower) in enumerate(zip(origins, towers, strict=True)):
        call = _average(graph, op) if origin < 0 else _copy(captured, graph, op, origin)
        if call is not None and call.draws_of >= 0:
            call = replace(call, draws_of=copy_of[call.draws_of, tower])
        calls.append(call)
        source = None if origin < 0 else program.sources[origin]
        if source is not None and source.role == "input":
            source = replace(source, name=_input_name(captured, source.name, tower))
        sources.append(source)
    loss = int(graph.outputs[0])  # the one thing that a training step returns
    outputs = Ref(loss)
    return replace(program, calls=tuple(calls), sources=tuple(sources), loss=loss, outputs=outputs)


def _copy(captured: Captured, graph: Graph, op: int, origin: int) -> Call | None:
    """The origin's call, on the tensors of its copy."""
    call, single = captured.program.calls[origin], captured.graph
    if call is None:
        return None
    reads = zip(single.inputs_of(origin).tolist(), graph.inputs_of(op).tolist(), strict=True)
    refs = {old: Ref(new) for old, new in reads}
    moved = graph.outputs_of(op).start - single.outputs_of(origin).start
    return replace(
        call,
        args=fill_refs(call.args, refs),
        kwargs=fill_refs(call.kwargs, refs),
        results=tuple(tensor + moved if tensor >= 0 else -1 for tensor in call.results),
    )


def _average(graph: Graph, op: int) -> Call:
    (result,) = graph.outputs_of(op)
    values = tuple(Ref(tensor) for tensor in graph.inputs_of(op).tolist())
    return Call(average, values, {"strides": graph.strides[result]}, (result,))


def _signature(signature: Signature, replicas: int) -> Signature:
    """Positional tensors alone: the inputs of each tower, then the targets of each."""
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


def _input_name(captured: Captured, name: str, tower: int) -> str:
    """ "target.5" of tower 2's "target.1" where each has two."""
    kind, _, index = name.partition(".")
    count = len(captured.inputs) if kind == "input" else len(captured.targets)
    return f"{kind}.{tower * count + int(index)}"


def _drawn(draw: Callable[[], Examples] | None, replicas: int) -> Callable[[], Examples] | None:
    if draw is None:
        return None

    def draw_all() -> Examples:
        drawn = [draw() for _ in range(replicas)]
        inputs, targets = zip(*drawn, strict=True)
        return tuple(x for single in inputs for x in single), tuple(
            x for single in targets for x in single
        )

    return draw_all
