"""Where the graph of a step comes from, and the contract of what may be done to a step."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Source:
    """The origin of a captured step, so that it can be captured again.

    model      the MODEL text, such as "zoo:rnnlm?layers=2"; for a saved graph its file's name
    training   the optimizer's text, such as "adam"; "" for inference
    shapes     shapes of the inputs of the step as it was captured, in order: of one part of the
               batch, one micro-batch or one tower, where it was transformed into a step of several
    constants  (name, value as text) of the model's arguments that are no tensors; the plan holds
               for these values alone
    aliases    (other name, name) of each parameter and buffer of the model that has several names:
               it is tied, or its module has several paths
    """

    model: str
    training: str
    shapes: tuple[tuple[int, ...], ...]
    torch_version: str
    constants: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


class Transform(Protocol):
    """Makes another step of a step, such as that of several towers. It is a frozen record."""

    def apply(self, step: Any) -> Any:
        """Return the transformed step, captured or a graph alone as the given one is."""
