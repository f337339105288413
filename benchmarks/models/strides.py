"""Runs the captured steps of all models call by call, and compares what each call returns with what
the graph says of it: shape, strides and dtype.

    python benchmarks/models/strides.py [--only PATTERN,...]

Prints one line for each kind of op that returns something else, and ends with status 1 if there is
one. A wrong stride is no wrong number by itself, but a later view reads memory by it.
"""

import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

import torch
from cases import Case
from harness import parser_of, say
from measure import OPTIMIZERS, Drawn, Step, load_case, load_cases, prepared, wanted
from torch import Tensor

from dovetail.errors import DovetailError
from dovetail.frontends import example_values
from dovetail.frontends.interpret import last_uses, run_call


def differing(step: Step) -> list[tuple[int, str]]:
    """(op, what its call returned and what the graph says) of each result where these differ."""
    graph, program = step.captured.graph, step.captured.program
    inputs, targets = example_values(step.captured)
    given = {f"input.{i}": value for i, value in enumerate(inputs)}
    given |= {f"target.{i}": value for i, value in enumerate(targets)}
    tensors: dict[int, Tensor] = dict(step.values)
    for op, source in enumerate(program.sources):
        if source is not None and source.role == "input":
            tensors[graph.outputs_of(op)[0]] = given[source.name]
    found, uses = [], last_uses(graph)
    with torch.no_grad():
        for op, call in enumerate(program.calls):
            if call is None:
                continue
            run_call(call, tensors, 0)
            for tensor in graph.outputs_of(op):
                value = tensors[tensor]
                if value is None:  # a gradient that nobody asked for
                    continue
                shape, strides = graph.shapes[tensor], graph.strides[tensor]
                dtype = getattr(torch, graph.dtypes[tensor])
                form = written(value.shape, value.stride(), value.dtype)
                said = written(shape, strides, dtype)
                if form != said:
                    found.append((op, f"{form}, not {said}"))
                    # Later calls read what the graph promises, so that each is judged by itself.
                    laid = torch.empty_strided(shape, strides, dtype=dtype)
                    tensors[tensor] = laid.copy_(value)
            for tensor in uses[op]:
                tensors.pop(tensor, None)
    return found


def written(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> str:
    # The strides of nothing, and of single elements, say nothing.
    counted = [stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True)]
    return f"{dtype}{list(shape)}({'empty' if 0 in shape else counted})"


def steps_of(case: Case) -> Any:
    """(how it runs, the captured step) of each way to run a case."""
    for kind in ("", *OPTIMIZERS) if case.training else ("",):
        torch.manual_seed(0)
        model = case.build()
        record = OPTIMIZERS[kind][0] if kind else None
        drawn = Drawn(model, bool(kind), torch.float32)
        try:
            yield kind or "inference", Step(prepared(model, kind, torch.float32), drawn, record)
        except DovetailError:
            continue


def main() -> None:
    options = parser_of(__doc__, only="*", packages="").parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_cases()
    kinds: dict[str, list[str]] = defaultdict(list)
    calls = failed = 0
    for case in wanted(options.only):
        if case.packages and not options.packages:
            continue
        load_case(case.name, options.packages)
        try:
            for kind, step in steps_of(case):
                graph = step.captured.graph
                calls += int((~graph.is_source).sum())
                for op, differs in differing(step):
                    kinds[graph.kinds[op]].append(
                        f"{case.name} {kind}: {graph.names[op]} returns {differs}; "
                        f"{graph.signatures[op]}"
                    )
        except Exception:
            failed += 1
            say(f"{case.name} failed: {traceback.format_exc()}")
    for kind, lines in kinds.items():
        print(f"{kind}: {len(lines)} calls, such as {lines[0]}")
    print(f"{calls} calls, {sum(map(len, kinds.values()))} differ, of {len(kinds)} kinds of ops")
    sys.exit(bool(kinds or failed))


if __name__ == "__main__":
    main()
