"""Runs a program in one process. Every executor must give the same result bit for bit.

`run_step` is the plain reference. `bind` makes calls into functions that executors run.
"""

import hashlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import ModelError
from dovetail.frontends.program import Call, Captured, Ref, SourceValue, fill_refs
from dovetail.frontends.recording import is_fake
from dovetail.frontends.structures import substitute
from dovetail.graph import Graph
from dovetail.runtime.setup import float32_by_default
from dovetail.runtime.torch_versions import OpOverload

Values = dict[int, Tensor]
"""Index of a tensor in the graph -> its value. Between steps it holds the tensors of all source ops
except inputs."""


def seed_for(seed: int, step: int, op: int) -> int:
    """Return the seed for torch before a random op: the same wherever the op runs."""
    digest = hashlib.blake2b(f"{seed} {step} {op}".encode(), digest_size=8).digest()
    # 63 bits, which a signed integer holds.
    return int.from_bytes(digest, "little") >> 1


def call_arguments(call: Call, tensors: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return (args, kwargs) of a call; `tensors` maps a tensor of the graph to its value."""
    return fill_refs(list(call.args), tensors), fill_refs(call.kwargs, tensors)


def initial_values(captured: Captured, seed: int = 0) -> Values:
    """Return the values of all parameters, buffers, optimizer state and constants before the first
    step.

    Parameters and buffers are copies of the module's. If the module is fake they are copies of one
    that `make` builds after `torch.manual_seed(seed)`. Raises `ModelError` if there is no `make`.
    """
    held = held_values(captured, seed)
    values: Values = {}
    for op, source in enumerate(captured.program.sources):
        if source is None or source.role == "input":
            continue
        tensor = captured.graph.outputs_of(op)[0]
        if source.role in ("parameter", "buffer"):
            # The strides matter, because a signature, and so a measured cost, holds for one layout.
            value, strides = held[source.name].detach(), captured.graph.strides[tensor]
            if value.stride() == strides:
                values[tensor] = value.clone()
            else:
                empty = torch.empty_strided(value.shape, strides, dtype=value.dtype)
                values[tensor] = empty.copy_(value)
        else:
            values[tensor] = source_value(captured.graph, tensor, source)
    return values


def held_values(captured: Captured, seed: int = 0) -> dict[str, Tensor]:
    """Return name -> parameter or buffer of the real module, named as the program's sources are.

    Raises `ModelError` if the module is fake and cannot be built.
    """
    if captured.make is None:
        module = captured.module
        if any(map(is_fake, (*module.parameters(), *module.buffers()))):
            raise ModelError(
                captured.source.model, "its weights are fake; capture a module with real ones"
            )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = captured.make()
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def example_values(
    captured: Captured, seed: int = 0
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return real (inputs, targets): those that were captured, or if they are fake, examples drawn
    with `seed`. Raises `ModelError` if none can be drawn."""
    if not any(map(is_fake, (*captured.inputs, *captured.targets))):
        return captured.inputs, captured.targets
    if captured.examples is None:
        raise ModelError(captured.source.model, "its example inputs are fake; give real ones")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return captured.examples()


def source_value(graph: Graph, tensor: int, source: SourceValue) -> Tensor:
    """Return a new tensor of optimizer state, or the constant itself."""
    if source.value is not None:
        return source.value
    assert source.fill is not None
    dtype = getattr(torch, graph.dtypes[tensor])
    value = torch.empty_strided(graph.shapes[tensor], graph.strides[tensor], dtype=dtype)
    return value.fill_(source.fill)


def run_step(
    captured: Captured,
    values: Values,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor] = (),
    *,
    seed: int = 0,
    step: int = 0,
) -> Any:
    """Run one step and return `Program.outputs` with tensors in place of refs.

    Updates write over the tensors in `values`.
    """
    graph, program = captured.graph, captured.program
    given = {f"input.{i}": value for i, value in enumerate(inputs)}
    given |= {f"target.{i}": value for i, value in enumerate(targets)}
    tensors = dict(values)
    for op, source in enumerate(program.sources):
        if source is not None and source.role == "input":
            tensors[graph.outputs_of(op)[0]] = given[source.name]
    no_longer_used = last_uses(graph)
    with torch.no_grad(), float32_by_default():
        for op, call in enumerate(program.calls):
            if call is not None:
                run_call(
                    call, tensors, seed_for(seed, step, call.seed_index(op)) if call.random else 0
                )
            for tensor in no_longer_used[op]:
                tensors.pop(tensor, None)
    return substitute(program.outputs, Ref, lambda ref: tensors[ref.tensor])


def run_call(call: Call, tensors: Values, seed: int) -> None:
    """Run one call and store its results in `tensors`."""
    if call.random:
        torch.manual_seed(seed)
    for tensor, value in zip(call.results, call_results(call, tensors), strict=True):
        if tensor >= 0:
            tensors[tensor] = value


def call_results(call: Call, tensors: Values) -> Sequence[Any]:
    """Return what a call returns; a single tensor counts as one element."""
    args, kwargs = call_arguments(call, tensors)
    with torch.set_grad_enabled(call.in_grad_mode):
        result = call.target(*args, **kwargs)
    return (result,) if isinstance(result, Tensor) else result


def last_uses(graph: Graph) -> list[list[int]]:
    """Return [ops] the tensors that no later op or output needs once the op has run."""
    last = graph.producers.tolist()
    for reader, tensor in zip(graph.readers.tolist(), graph.input_tensors.tolist(), strict=True):
        last[tensor] = max(last[tensor], reader)
    kept = set(graph.outputs.tolist())
    uses: list[list[int]] = [[] for _ in range(len(graph))]
    for tensor, op in enumerate(last):
        if tensor not in kept and not graph.is_source[op]:
            uses[op].append(tensor)
    return uses


# Binding calls to a table of values, so that each call becomes a function without arguments.
#
#     values   [ tensor 0 | tensor 1 | ... | constants of all calls ... ]
#                   └──────── itemgetter ──────┘
#              values[result] = target(*get(values))
#
# Constant arguments stand in the table beside the tensors, so that one `itemgetter` collects all
# arguments of an ordinary call without a Python loop.


Cells = list[Any]
"""A table of values: first the graph's tensors, by index, then the constants of bound calls."""
Getter = Callable[[Cells], tuple[Any, ...]]
"""Collects the arguments of a call from a table."""
Bound = Callable[[], None]
"""Runs one bound call."""

GENERATOR = Lock()
"""All threads share torch's generator. A thread holds this lock from seeding the generator until
its op has drawn."""


def bind(call: Call, values: Cells, frees: tuple[int, ...], seed: Callable[[], int]) -> Bound:
    """Return a function that runs the call on `values`, stores its results there and drops `frees`.

    Binding appends the call's constants to `values`. `seed` returns the seed of a random call; it
    is called before each run.
    """
    target, kwargs = call.target, call.kwargs
    if isinstance(target, OpOverload):
        # `OpOverload.__call__` does nothing else but call `_op`; this saves its Python frame.
        target = target._op
    get = _getter(call.args, values)
    invoke: Callable[[], Any]
    if any(map(_has_refs, kwargs.values())):
        names, get_keywords = tuple(kwargs), _getter(tuple(kwargs.values()), values)
        invoke = lambda: target(  # noqa: E731  the functions of a call stand one below the other
            *get(values), **dict(zip(names, get_keywords(values), strict=True))
        )
    elif kwargs:
        invoke = lambda: target(*get(values), **kwargs)  # noqa: E731
    else:
        invoke = lambda: target(*get(values))  # noqa: E731
    if call.in_grad_mode:
        invoke = torch.enable_grad()(invoke)
    plain, results = invoke, call.results
    if call.random:

        def seeded() -> Any:
            with GENERATOR:
                torch.manual_seed(seed())
                return plain()

        invoke = seeded
    stored = tuple((i, tensor) for i, tensor in enumerate(results) if tensor >= 0)

    def run_one() -> None:
        returned = invoke()
        values[results[0]] = returned if isinstance(returned, Tensor) else returned[0]
        for tensor in frees:
            values[tensor] = None

    def run() -> None:
        returned = invoke()
        for i, tensor in stored:
            values[tensor] = returned[i]
        for tensor in frees:
            values[tensor] = None

    return run_one if len(results) == 1 and stored else run


def _getter(args: tuple[Any, ...], values: Cells) -> Getter:
    """Return a function that collects the arguments from the table."""
    lists = [i for i, arg in enumerate(args) if not isinstance(arg, Ref) and _has_refs(arg)]
    if lists:
        return lambda values: tuple(
            [values[a.tensor] if isinstance(a, Ref) else fill_refs(a, values) for a in args]
        )
    places = []
    for arg in args:
        if isinstance(arg, Ref):
            places.append(arg.tensor)
        else:
            values.append(arg)
            places.append(len(values) - 1)
    # With a single place `itemgetter` would return the value itself instead of a tuple.
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    place = places[0]
    return lambda values: (values[place],)


def _has_refs(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_has_refs, tree.values()))
    if isinstance(tree, (list, tuple)):
        return any(map(_has_refs, tree))
    return isinstance(tree, Ref)
