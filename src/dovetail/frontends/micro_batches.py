"""Makes the step over M micro-batches from one micro-batch's training step, with calls to run it.

`graph.micro_batches` makes the graph; this file makes the program and the signature that go with
it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.frontends.optimizers import SCALE
from dovetail.frontends.program import Call, Captured, Program, Ref, SourceValue
from dovetail.frontends.towers import (
    averaging_call,
    copied_call,
    draw_for_copies,
    input_name,
    signature_of_copies,
)
from dovetail.graph.micro_batches import AGAIN, COPY, MEAN, SUM, MicroBatched, micro_batched
from dovetail.plans import Pipelining


def micro_batches(captured: Captured, pipelining: Pipelining) -> Captured:
    """Return the step over several micro-batches. Each is `captured` and takes its batch size.

    The step takes the inputs of all micro-batches, one after another, then all targets in the same
    order: with two inputs and one target for each, (x0, y0, x1, y1, ..., t0, t1, ...). It returns
    the mean of the losses, and steps once by the mean of the gradients. Parameters, buffers and
    state keep their names. Drawn examples are drawn for each micro-batch.

    Raises what `graph.micro_batched` raises, and `UsageError` for a step with a gradient scaler.
    """
    names = [source.name for source in captured.program.sources if source is not None]
    if SCALE in names:
        raise UsageError("micro_batches", "do not go with a gradient scaler; leave one of them out")
    count = pipelining.micro_batches
    ops = len(captured.graph)
    if pipelining.stages and len(pipelining.stages) != ops:
        raise UsageError(
            "stages", f"are of {len(pipelining.stages)} ops, and the network has {ops}"
        )
    made = micro_batched(captured.graph, count, *pipelining.arrays)
    return replace(
        captured,
        graph=made.graph,
        program=_program(captured, made),
        source=replace(captured.source, pipelining=pipelining),
        plain=None,
        signature=signature_of_copies(captured.signature, count),
        examples=draw_for_copies(captured.examples, count),
    )


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


def _program(captured: Captured, made: MicroBatched) -> Program:
    """Return the calls and sources of the graph's ops."""
    program, graph = captured.program, made.graph
    kinds, origins, micro, _ = (column.tolist() for column in made.rows)
    place_of = {
        (origin, k): op
        for op, (kind, origin, k) in enumerate(zip(kinds, origins, micro, strict=True))
        if kind == COPY
    }
    calls: list[Call | None] = []
    sources: list[SourceValue | None] = []
    for op, (kind, origin, k) in enumerate(zip(kinds, origins, micro, strict=True)):
        call: Call | None
        if kind == MEAN:
            call = averaging_call(graph, op)
        elif kind == SUM:
            call = _accumulating_call(graph.inputs_of(op).tolist(), made, op, k)
        else:
            call = copied_call(captured, graph, op, origin)
        if call is not None and kind == COPY and call.draws_of >= 0:
            # It repeats a draw of its own micro-batch.
            call = replace(call, draws_of=place_of[call.draws_of, k])
        elif call is not None and kind == AGAIN and call.random:
            drawn = call.draws_of if call.draws_of >= 0 else origin
            call = replace(call, draws_of=place_of[drawn, k])
        calls.append(call)
        source = None if origin < 0 else program.sources[origin]
        if source is not None and source.role == "input":
            source = replace(source, name=input_name(captured, source.name, k))
        sources.append(source)
    # A training step returns its loss and nothing else.
    loss = int(graph.outputs[0])
    return replace(
        program, calls=tuple(calls), sources=tuple(sources), loss=loss, outputs=Ref(loss)
    )


def _accumulating_call(reads: list[int], made: MicroBatched, op: int, k: int) -> Call:
    graph = made.graph
    (result,) = graph.outputs_of(op)
    options = {
        "new": k == 1,
        "strides": graph.strides[result],
        "parts": made.micro_batches if k == made.micro_batches - 1 else 1,
    }
    total, gradient = map(Ref, reads)
    return Call(accumulate, (total, gradient), options, (result,), in_place=k > 1)
