"""Captures a step again in another form, whose kernels may be faster."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import Field

from dovetail.errors import ModelError
from dovetail.graph.records import Graph
from dovetail.graph.source import Transform

if TYPE_CHECKING:
    from dovetail.frontends.program import Captured

Step = TypeVar("Step", "Captured", Graph)


@dataclass(frozen=True)
class Form:
    """Another form of the same step.

    recurrent_chunks   recurrent layers are captured by fused kernels, each of a layer in so many
                       chunks of time steps; 0: by the ops of each time step
    channels_last      parameters, buffers and inputs of four dimensions lie channels last in memory
    """

    recurrent_chunks: Annotated[int, Field(ge=0)] = 0
    channels_last: bool = False
    kind: Literal["form"] = "form"

    def apply(self, step: Step) -> Step:
        """Return the step captured again. The module is in the modes that it was captured in.

        Raises `ModelError` for a step that cannot be captured again, and `CaptureError`.
        """
        if isinstance(step, Graph):
            raise ModelError("a graph", "has one form; give the network that it was captured from")
        from dovetail.frontends.capturing import recaptured

        again = recaptured(step, chunks=self.recurrent_chunks, channels_last=self.channels_last)
        others: tuple[Transform, ...] = tuple(
            other for other in step.transforms if not isinstance(other, Form)
        )
        # The form of the network as it is needs no entry in the list.
        return replace(again, transforms=others if self == Form() else (self, *others))
