"""Transforms of a step: what makes another step of it, and is kept in a plan as a list.

    captured step ──► Form ──► Parts ──► MicroBatches ──► Towers ──► SharedCopies ──► planned step

Each is a frozen record with `apply`, which takes a captured step or a graph alone. A plan is of one
step; how that came about is the list of its transforms, and opening a plan is applying it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar
from weakref import WeakKeyDictionary

from pydantic import Discriminator

from dovetail.errors import DovetailError
from dovetail.graph.copies import ACCUMULATE, tower_count
from dovetail.graph.records import Graph
from dovetail.transforms.copying import Replicated
from dovetail.transforms.forms import Form
from dovetail.transforms.micro_batches import MicroBatches, micro_batched
from dovetail.transforms.parts import Parts, batch_of, with_examples_of
from dovetail.transforms.shared import Copies, SharedCopies, duplicate
from dovetail.transforms.towers import Towers, replicate, towers

if TYPE_CHECKING:
    from dovetail.frontends.program import Captured

AnyTransform = Annotated[Form | Parts | MicroBatches | Towers | SharedCopies, Discriminator("kind")]
"""Any transform, as a plan's file tells them apart: by their `kind`."""
One = TypeVar("One")


def the(kind: type[One], transforms: Sequence[object]) -> One | None:
    """Return the transform of this class; None if there is none."""
    return next((transform for transform in transforms if isinstance(transform, kind)), None)


def without(kind: type[object], transforms: Sequence[AnyTransform]) -> tuple[AnyTransform, ...]:
    """Return the transforms but for that of this class."""
    return tuple(transform for transform in transforms if not isinstance(transform, kind))


def repeats(transforms: Sequence[object]) -> int:
    """Return how often the captured step runs in one step: towers times micro-batches."""
    counts = (t.count for t in (the(MicroBatches, transforms), the(Towers, transforms)) if t)
    return math.prod(counts)


_RECAPTURED: "WeakKeyDictionary[Captured, dict[Form | Parts, Captured]]" = WeakKeyDictionary()


def applied(step: "Captured", transforms: Sequence[AnyTransform]) -> "Captured":
    """Return the step with these transforms. What it has already is not done again, and a step that
    was captured again, in another form or of a part of its batch, is kept.

    A step of all parts of a batch is called with the whole batch. Copies of ops that the step does
    not have are left out, so that the step is seen to be another one. Raises what the transforms
    raise.
    """
    form = the(Form, transforms) or Form()
    if form != (the(Form, step.transforms) or Form()) and repeats(step.transforms) == 1:
        step = _recaptured(step, form)
    whole: tuple[Captured, int] | None = None
    for transform in transforms:
        if the(type(transform), step.transforms) is not None:
            continue
        if isinstance(transform, Parts):
            whole = step, transform.count
            step = _recaptured(step, transform)
        elif not isinstance(transform, SharedCopies) or transform.fits(step.graph):
            step = transform.apply(step)
    if whole is not None and repeats(step.transforms) > 1:
        step = with_examples_of(whole[0], step, whole[1])
    return step


def _recaptured(step: "Captured", transform: Form | Parts) -> "Captured":
    again = _RECAPTURED.setdefault(step, {})
    if transform not in again:
        again[transform] = transform.apply(step)
    return again[transform]


def applied_to_graph(graph: Graph, transforms: Sequence[AnyTransform]) -> Graph:
    """Return the graph with these transforms, but for those that need the network, and those that
    it is seen to have already. A graph that they do not fit is returned as it is."""
    transformed = graph
    for transform in transforms:
        needs_network = isinstance(transform, Form | Parts)
        has_towers = isinstance(transform, Towers) and tower_count(transformed) > 1
        has_micro = isinstance(transform, MicroBatches) and ACCUMULATE in transformed.kinds
        if needs_network or has_towers or has_micro:
            continue
        try:
            transformed = transform.apply(transformed)
        except DovetailError:
            return graph
    return transformed


__all__ = [
    "AnyTransform",
    "Copies",
    "Form",
    "MicroBatches",
    "Parts",
    "Replicated",
    "SharedCopies",
    "Towers",
    "applied",
    "applied_to_graph",
    "batch_of",
    "duplicate",
    "micro_batched",
    "repeats",
    "replicate",
    "the",
    "towers",
    "without",
]
