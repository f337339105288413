"""Arguments of calls: what they refer to, and the signature that they add up to."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from dovetail.frontends.program import Ref


def replace_nodes(tree: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    """The arguments with every node replaced, in plain tuples, lists and dicts: those pickle, and
    are fast to walk."""
    if isinstance(tree, fx.Node):
        return of_node(tree)
    if isinstance(tree, tuple):
        return tuple(replace_nodes(value, of_node) for value in tree)
    if isinstance(tree, list):
        return [replace_nodes(value, of_node) for value in tree]
    if isinstance(tree, dict):
        return {key: replace_nodes(value, of_node) for key, value in tree.items()}
    return tree


def distinct_refs(tree: Any) -> list[int]:
    """The distinct tensors that nested arguments refer to, in order."""
    found: dict[int, None] = {}
    _collect(tree, found)
    return list(found)


def _collect(tree: Any, found: dict[int, None]) -> None:
    if isinstance(tree, Ref):
        found.setdefault(tree.tensor)
    elif isinstance(tree, dict):
        _collect(tuple(tree.values()), found)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _collect(value, found)


def fill_refs(tree: Any, tensors: Any) -> Any:
    """The arguments with every `Ref` replaced by `tensors[its tensor]`."""
    if isinstance(tree, Ref):
        return tensors[tree.tensor]
    if isinstance(tree, list):
        return [fill_refs(value, tensors) for value in tree]
    if isinstance(tree, tuple):
        return tuple(fill_refs(value, tensors) for value in tree)
    if isinstance(tree, dict):
        return {key: fill_refs(value, tensors) for key, value in tree.items()}
    return tree


def kind_of(target: Any) -> str:
    """ "aten.mm" of the overload aten.mm.default."""
    if isinstance(target, OpOverload):
        return str(target.overloadpacket)
    return f"python.{getattr(target, '__name__', target)}"


def signature(kind: str, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """kind(arguments), each tensor as dtype[shape](strides)."""
    parts = [_text(arg) for arg in args]
    parts += [f"{key}={_text(value)}" for key, value in sorted(kwargs.items())]
    return f"{kind}({', '.join(parts)})"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        shape, strides = ("x".join(map(str, sizes)) for sizes in (value.shape, value.stride()))
        return f"{dtype_of(value)}[{shape}]({strides})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def dtype_of(value: Tensor) -> str:
    """ "float32" of torch.float32."""
    return str(value.dtype).removeprefix("torch.")
