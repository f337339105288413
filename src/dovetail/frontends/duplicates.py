"""Captured -> Captured: with copies of what several devices compute for themselves."""

from collections.abc import Sequence
from dataclasses import replace

from dovetail.frontends.arguments import fill_refs
from dovetail.frontends.program import Call, Captured, Ref
from dovetail.frontends.structures import substitute
from dovetail.graph.duplicates import Copies, duplicate


def duplicated(captured: Captured, copies: Sequence[Copies]) -> Captured:
    """The step with these copies: each copy makes its origin's call on its own tensors, so that the
    step gives the same bits."""
    program, made = captured.program, duplicate(captured.graph, copies)
    seen = [[Ref(int(tensor)) for tensor in row] for row in made.tensors]
    reader_of = {op: i + 1 for i, one in enumerate(copies) for op in one.readers}
    calls: list[Call | None] = []
    for origin, copy in zip(made.origins.tolist(), made.copy_of.tolist(), strict=True):
        call = program.calls[origin]
        view = copy + 1 if copy >= 0 else reader_of.get(origin, 0)
        own = seen[copy + 1]
        calls.append(
            call
            and replace(
                call,
                args=fill_refs(call.args, seen[view]),
                kwargs=fill_refs(call.kwargs, seen[view]),
                results=tuple(own[t].tensor if t >= 0 else -1 for t in call.results),
                # Copies move ops to other indices; random numbers stay those of the old ones.
                draws_of=call.seed_index(origin) if call.random else call.draws_of,
            )
        )
    return replace(
        captured,
        graph=made.graph,
        program=replace(
            program,
            calls=tuple(calls),
            sources=tuple(program.sources[origin] for origin in made.origins.tolist()),
            loss=seen[0][program.loss].tensor if program.loss >= 0 else -1,
            outputs=substitute(program.outputs, Ref, lambda ref: seen[0][ref.tensor]),
        ),
    )
