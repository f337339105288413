"""Calls bound to a table of values: an instruction becomes a function without arguments.

    values   [ tensor 0 | tensor 1 | ... | constants of all calls ... ]
                  └──────── itemgetter ──────┘
             values[result] = target(*get(values))

Constant arguments stand in the table beside the tensors, so that one `itemgetter` collects all
arguments of an ordinary call without a Python loop.
"""

from collections.abc import Callable
from operator import itemgetter
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from dovetail.frontends.arguments import fill_refs
from dovetail.frontends.program import Call, Ref

Values = list[Any]
Getter = Callable[[Values], tuple[Any, ...]]
Bound = Callable[[], None]

_GENERATOR = Lock()
"""Held from seeding torch's generator, which all threads share, until the op has drawn."""


def bind(call: Call, values: Values, frees: tuple[int, ...], seed: Callable[[], int]) -> Bound:
    """A function that runs the call on `values`, files its results and forgets `frees`.

    `values` grows by the call's constants. `seed` says what to seed torch with, if it is random.
    """
    invoke = _invocation(call, values)
    if call.random:
        invoke = _seeded(invoke, seed)
    if len(call.results) == 1:
        return _filing_one(invoke, values, call.results[0], frees)
    wanted = tuple((i, tensor) for i, tensor in enumerate(call.results) if tensor >= 0)
    return _filing_many(invoke, values, wanted, frees)


def _invocation(call: Call, values: Values) -> Callable[[], Any]:
    target = call.target
    if isinstance(target, torch._ops.OpOverload):
        target = target._op  # what calling it calls, less one Python frame
    names, keywords = tuple(call.kwargs), tuple(call.kwargs.values())
    get = _getter(call.args, values)
    if not any(map(_has_refs, keywords)):
        return _plain(target, get, call.kwargs, values)
    get_keywords = _getter(keywords, values)
    return lambda: target(*get(values), **dict(zip(names, get_keywords(values), strict=True)))


def _plain(
    target: Callable[..., Any], get: Getter, kwargs: dict[str, Any], values: Values
) -> Callable[[], Any]:
    if kwargs:
        return lambda: target(*get(values), **kwargs)
    return lambda: target(*get(values))


def _getter(args: tuple[Any, ...], values: Values) -> Getter:
    """A function that collects the arguments from the table."""
    lists = [i for i, arg in enumerate(args) if not isinstance(arg, Ref) and _has_refs(arg)]
    if lists:
        return lambda values: tuple(
            [values[a.tensor] if isinstance(a, Ref) else fill_refs(a, values) for a in args]
        )
    places = [_place(arg, values) for arg in args]
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    place = places[0]
    return lambda values: (values[place],)


def _place(arg: Any, values: Values) -> int:
    """Where the argument stands in the table; constants are added to it."""
    if isinstance(arg, Ref):
        return arg.tensor
    values.append(arg)
    return len(values) - 1


def _has_refs(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_has_refs, tree.values()))
    if isinstance(tree, (list, tuple)):
        return any(map(_has_refs, tree))
    return isinstance(tree, Ref)


def _seeded(invoke: Callable[[], Any], seed: Callable[[], int]) -> Callable[[], Any]:
    def seeded() -> Any:
        with _GENERATOR:
            torch.manual_seed(seed())
            return invoke()

    return seeded


def _filing_one(
    invoke: Callable[[], Any], values: Values, result: int, frees: tuple[int, ...]
) -> Bound:
    def run() -> None:
        found = invoke()
        values[result] = found if isinstance(found, Tensor) else found[0]
        for tensor in frees:
            values[tensor] = None

    def discard() -> None:
        invoke()
        for tensor in frees:
            values[tensor] = None

    return run if result >= 0 else discard


def _filing_many(
    invoke: Callable[[], Any],
    values: Values,
    wanted: tuple[tuple[int, int], ...],
    frees: tuple[int, ...],
) -> Bound:
    def run() -> None:
        found = invoke()
        for i, tensor in wanted:
            values[tensor] = found[i]
        for tensor in frees:
            values[tensor] = None

    return run
