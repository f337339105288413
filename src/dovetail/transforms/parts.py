"""Splits the batch of a training step into equal parts: the step of one part, and the batch's
examples for a step of all parts.

    step of the batch ──► step of one part ──► micro-batches of it ──► towers of these
            └────────────────── examples, part after part ───────────────────▲

Dimension 0 of every input and target is the batch, as torch's `DataParallel` and
`torch.distributed.pipelining` have it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field

from dovetail.errors import ModelError, UsageError
from dovetail.graph.records import Graph, Phase
from dovetail.transforms.forms import Form

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.frontends.program import Captured
    from dovetail.transforms.programs import Examples

Step = TypeVar("Step", "Captured", Graph)


@dataclass(frozen=True)
class Parts:
    """Equal parts of a batch. The transformed step is that of the first part."""

    count: Annotated[int, Field(ge=2, le=2**20)]
    kind: Literal["parts"] = "parts"

    def apply(self, step: Step) -> Step:
        """Return the step of the first part of the batch, captured again.

        Raises `UsageError` if the batch has no such parts, or if dimension 0 is seen to be no batch
        of independent examples, and what `recaptured` raises.
        """
        if isinstance(step, Graph):
            raise ModelError("a graph", "has no batch; give the network that it was captured from")
        from dovetail.frontends.capturing import recaptured

        batch = batch_of(step)
        _check_mean(step)
        if batch % self.count:
            raise UsageError(
                "parts", f"are {self.count}, and a batch of {batch} is no multiple of that"
            )
        signature = step.signature
        first = replace(
            signature,
            inputs=_slices(signature.inputs, self.count)[0],
            targets=_slices(signature.targets, self.count)[0],
        )
        form = next((t for t in step.transforms if isinstance(t, Form)), Form())
        part = recaptured(
            replace(step, signature=first, examples=None),
            chunks=form.recurrent_chunks,
            channels_last=form.channels_last,
        )
        # The ops of a part are those of the whole, and each result of its forward pass has as many
        # elements or 1/parts of them: what depends on pairs of examples has fewer.
        one, whole = part.graph, step.graph
        is_part = one.kinds == whole.kinds and one.tensors == whole.tensors
        if is_part:
            forward = np.flatnonzero((whole.phases == Phase.FORWARD)[whole.producers]).tolist()
            sizes = ([math.prod(graph.shapes[t]) for t in forward] for graph in (one, whole))
            pairs = zip(*sizes, strict=True)
            is_part = all(of_whole in (size, size * self.count) for size, of_whole in pairs)
        if not is_part:
            raise UsageError(
                "replicas",
                f"auto splits dimension 0 of all inputs, but the step of 1/{self.count} of it "
                "computes other things than the whole step, so it is no batch, or examples depend "
                "on each other; give a number of replicas, and the batch of one",
            )
        shapes = tuple(tuple(value.shape) for value in part.inputs)
        return replace(
            part,
            source=replace(part.source, shapes=shapes),
            transforms=(*step.transforms, self),
            examples=_drawn(step.examples, self.count, whole=False),
        )


def batch_of(captured: "Captured") -> int:
    """Return the number of examples in the step's batch.

    Raises `UsageError` for a step without inputs, and for an input or target whose dimension 0 is
    another number than that of the first input, as it would have to be split in another way.
    """
    signature = captured.signature
    names = (*signature.names, *signature.target_names)
    values = (*signature.inputs, *signature.targets)
    if not values:
        raise UsageError("replicas", "auto splits the batch, and the step has no inputs")
    batch = int(values[0].shape[0]) if values[0].dim() else 1
    for name, value in zip(names, values, strict=True):
        if value.dim() == 0 or value.shape[0] != batch:
            shape = "x".join(map(str, value.shape)) or "no dimensions"
            raise UsageError(
                "replicas",
                f"auto splits dimension 0 of all inputs, which is {batch} of {names[0]}, but "
                f"{name} has {shape}; give a number of replicas, and the batch of one",
            )
    return batch


SUM = 2
"""The `reduction` of a loss of torch that is a sum."""


def _check_mean(captured: "Captured") -> None:
    """Raise `UsageError` if the loss is seen to be a sum over examples: the mean of its parts is
    another loss, with other gradients."""
    graph, program = captured.graph, captured.program
    op = int(graph.producers[program.loss])
    call = program.calls[op]
    if call is None:
        return
    kind = graph.kinds[op]
    is_sum = kind == "aten.sum" and graph.phases[op] == Phase.FORWARD
    place = _REDUCED.get(kind, len(call.args))
    if is_sum or SUM in call.args[place : place + 1]:
        raise UsageError(
            "replicas",
            f"auto takes the mean of the parts' losses, but the loss is a sum ({kind} of "
            f"{graph.names[op]!r}); give a loss that is a mean",
        )


_REDUCED = {
    "aten.mse_loss": 2, "aten.smooth_l1_loss": 2, "aten.huber_loss": 2,
    "aten.nll_loss_forward": 3, "aten.nll_loss2d_forward": 3, "aten.binary_cross_entropy": 3,
}  # fmt: skip
"""Kind of a loss -> the place of `reduction` among its arguments."""


def with_examples_of(captured: "Captured", made: "Captured", parts: int) -> "Captured":
    """Return `made`, a step of all parts of `captured`'s batch, with the examples of that batch. It
    is called as `captured` is, with the whole batch."""
    signature = captured.signature
    inputs, targets = (
        tuple(value for part in _slices(values, parts) for value in part)
        for values in (signature.inputs, signature.targets)
    )
    return replace(
        made,
        signature=replace(
            signature,
            inputs=inputs,
            targets=targets,
            names=made.signature.names,
            target_names=made.signature.target_names,
            parts=parts,
        ),
        examples=_drawn(captured.examples, parts, whole=True),
    )


def _slices(values: "tuple[Tensor, ...]", parts: int) -> "list[tuple[Tensor, ...]]":
    """Return of each part its slices of the tensors. They are leaves, as the tensors are."""
    return [
        tuple(
            value.detach()
            .narrow(0, part * (size := value.shape[0] // parts), size)
            .requires_grad_(value.requires_grad)
            for value in values
        )
        for part in range(parts)
    ]


def _drawn(
    draw: "Callable[[], Examples] | None", parts: int, *, whole: bool
) -> "Callable[[], Examples] | None":
    """Return a function that draws a batch and returns its parts, one after another, or the first
    part alone; None if there is no `draw`."""
    if draw is None:
        return None

    def draw_parts() -> "Examples":
        inputs, targets = (_slices(values, parts)[: None if whole else 1] for values in draw())
        return (
            tuple(value for part in inputs for value in part),
            tuple(value for part in targets for value in part),
        )

    return draw_parts
