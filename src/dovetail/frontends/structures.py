"""Takes tensors out of nested arguments and results, and puts others in their place.

A *structure* is anything that holds tensors: lists, tuples, named tuples, dicts, dataclasses,
classes that are registered with `torch.utils._pytree` (such as the outputs of transformers), packed
sequences, and plain objects with tensors among their attributes (such as a key-value cache). All
other values are constants of the structure. A *template* is a structure with a `TensorSlot` in the
place of each tensor.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dovetail.runtime.torch_versions import pytree

Path = tuple[str, ...]
"""The keys that lead from a structure to a value inside it."""


@dataclass(frozen=True)
class TensorSlot:
    """Stands in a template for the tensor of this index."""

    index: int


_FLAT = frozenset({TensorSlot, bool, int, float, str, type(None)})
"""Types of a template's values in which there are no others."""


def substitute(tree: Any, leaf: type | tuple[type, ...], replace: Callable[..., Any]) -> Any:
    """Return the structure with `replace(value)` in the place of each value of type `leaf`.

    The given structure does not change: parts that hold such a value are built anew, and all other
    parts are returned as they are. An object inside itself is not replaced there.
    """
    if isinstance(tree, leaf):
        return replace(tree)
    return _Substitution(leaf, lambda value, _path: replace(value)).of(tree, ())


def flatten(tree: Any, path: Path = ()) -> tuple[list[Tensor], list[str], Any]:
    """Return the structure's tensors, their names ("past.layers.0.keys"), and the template.

    A tensor object that stands in several places is listed once for each.
    """
    tensors: list[Tensor] = []
    names: list[str] = []

    def take(tensor: Tensor, where: Path) -> TensorSlot:
        tensors.append(tensor)
        names.append(".".join(where))
        return TensorSlot(len(tensors) - 1)

    template = _Substitution(Tensor, take).of(tree, path)
    return tensors, names, template


def fill(template: Any, values: Sequence[Any]) -> Any:
    """Return the template's structure with these values in its slots."""
    # Every step passes here, and most take nothing but tensors and plain constants.
    if type(template) is dict and _FLAT.issuperset(map(type, template.values())):
        return {k: values[v.index] if type(v) is TensorSlot else v for k, v in template.items()}
    if type(template) is tuple and _FLAT.issuperset(map(type, template)):
        return tuple(values[v.index] if type(v) is TensorSlot else v for v in template)
    return substitute(template, TensorSlot, lambda slot: values[slot.index])


def leaves(tree: Any, leaf: type) -> list[Any]:
    """Return the values of type `leaf` in the structure, in order."""
    values: list[Any] = []

    def take(value: Any, _path: Path) -> Any:
        values.append(value)
        return value

    _Substitution(leaf, take).of(tree, ())
    return values


class Mismatch(Exception):
    """Says that two structures differ; the message names the place and both values."""


def matched(template: Any, tree: Any, name: str = "") -> list[Tensor]:
    """Return the tensors of `tree` in the order of the template's slots.

    Raises `Mismatch` if the two differ in more than tensors. The graph holds the template's
    constants, so another value would silently be ignored.
    """
    # Most arguments are one dict or tuple of tensors alone.
    pairs: list[tuple[Any, Any]] = [(None, None)]
    if type(template) is dict and type(tree) is dict and template.keys() == tree.keys():
        pairs = [(slot, tree[key]) for key, slot in template.items()]
    elif type(template) is tuple and type(tree) is tuple and len(template) == len(tree):
        pairs = list(zip(template, tree, strict=True))
    if all(type(slot) is TensorSlot and isinstance(value, Tensor) for slot, value in pairs):
        return [value for _, value in sorted(pairs, key=lambda pair: pair[0].index)]
    tensors, names, given = flatten(tree, tuple(filter(None, (name,))))
    of_slot: dict[int, Tensor] = {}
    _match(template, given, name or "the arguments", of_slot, tensors)
    assert len(of_slot) == len(names)
    return [of_slot[index] for index in sorted(of_slot)]


def constants(template: Any, path: Path = ()) -> list[tuple[str, Any]]:
    """Return (name, value) of the template's plain constants, in order: None, booleans, numbers
    and text."""
    if isinstance(template, (bool, int, float, str, type(None))):
        return [(".".join(path), template)]
    opaque = isinstance(template, TensorSlot) or is_plain_object(template)
    inside = None if opaque else _children(template)
    if inside is None:
        return []
    return [constant for key, value in inside for constant in constants(value, (*path, key))]


def _match(template: Any, given: Any, name: str, of_slot: dict[int, Tensor], tensors: Any) -> None:
    """Note in `of_slot` the tensor of each slot of the template. Raises `Mismatch`.

    template, given   two templates; a slot of `given` is an index into `tensors`
    """
    if isinstance(template, TensorSlot) or isinstance(given, TensorSlot):
        if not isinstance(template, TensorSlot) or not isinstance(given, TensorSlot):
            expected, got = _describe(template), _describe(given)
            raise Mismatch(f"{name} is {got}, but the network was captured with {expected}")
        of_slot[template.index] = tensors[given.index]
        return
    inside = _children(template)
    if template is given:
        return
    if is_plain_object(template) and not leaves(template, TensorSlot):
        # A user's object without tensors is compared as a whole: it may refer to itself, so a walk
        # through it might not end.
        inside = None
    if inside is None or type(template) is not type(given):
        # `template is given` has been asked already.
        both_tensors = isinstance(template, Tensor) and isinstance(given, Tensor)
        equal = False
        if both_tensors:
            equal = template.dtype == given.dtype and torch.equal(template, given)
        elif type(template) is type(given):
            # An object's comparison may fail or give no truth value.
            with contextlib.suppress(Exception):
                equal = bool(template == given)
        if not equal:
            if both_tensors:
                raise Mismatch(f"{name} holds other numbers than when the network was captured")
            raise Mismatch(
                f"{name} is {_describe(given)}, but the network was captured with "
                f"{_describe(template)}, which the graph holds constant; capture it again"
            )
        return
    expected_parts, given_parts = dict(inside), dict(_children(given) or ())
    if set(expected_parts) != set(given_parts):
        lacks = sorted(set(expected_parts) - set(given_parts))
        has = sorted(set(given_parts) - set(expected_parts))
        differs = [f"lacks {', '.join(lacks)}"] if lacks else []
        differs += [f"has {', '.join(has)} too many"] if has else []
        raise Mismatch(f"{name} {' and '.join(differs)}, compared with what was captured")
    for key, value in expected_parts.items():
        prefix = "" if name == "the arguments" else f"{name}."
        _match(value, given_parts[key], f"{prefix}{key}", of_slot, tensors)


def _describe(value: Any) -> str:
    """Return how an error message calls the value."""
    if isinstance(value, TensorSlot):
        return "a tensor"
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """Return (key, value) of the values directly inside a structure; None for other values."""
    # The order of these cases matters: named tuples are tuples, and outputs of transformers are
    # mappings that are registered with pytree as well.
    if isinstance(tree, Mapping):
        return [(str(key), value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return [(str(index), value) for index, value in enumerate(tree)]
    if type(tree) in pytree.SUPPORTED_NODES:
        values, _ = pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)
        return [(str(index), value) for index, value in enumerate(values)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name, None)) for field in dataclasses.fields(tree)]
    if is_plain_object(tree):
        return [(key, value) for key, value in vars(tree).items() if not callable(value)]
    return None


_OPAQUE = (nn.Module, torch.Generator, torch.dtype, torch.device, torch.Size, type, str, bytes)


def is_plain_object(tree: Any) -> bool:
    """Return True for an object of a user's class, whose attributes may hold tensors."""
    return (
        not isinstance(tree, (*_OPAQUE, TensorSlot, Tensor))
        and not callable(tree)
        and hasattr(tree, "__dict__")
        and not isinstance(tree, type(torch))
        and type(tree).__module__ != "builtins"
    )


class _Substitution:
    """One walk through a structure.

    `inside` holds the identities of the objects around the current one, so that the walk does not
    follow an object that contains itself.
    """

    def __init__(self, leaf: type | tuple[type, ...], replace: Callable[[Any, Path], Any]) -> None:
        self.leaf = leaf
        self.replace = replace
        self.inside: set[int] = set()

    def of(self, tree: Any, path: Path) -> Any:
        if isinstance(tree, self.leaf):
            return self.replace(tree, path)
        if id(tree) in self.inside:
            return tree
        inside = _children(tree)
        if not inside:
            return tree
        self.inside.add(id(tree))
        if isinstance(tree, PackedSequence):
            # Only the data are variable. Shapes depend on batch sizes and orders, so these are
            # constants.
            values = [self.of(tree.data, path), *tree[1:]]
        else:
            values = [self.of(value, (*path, key)) for key, value in inside]
        self.inside.discard(id(tree))
        # A part in which nothing was replaced is returned itself and not copied.
        if all(new is old for new, (_, old) in zip(values, inside, strict=True)):
            return tree
        return _rebuild(tree, [key for key, _ in inside], values)


def _rebuild(tree: Any, keys: list[str], values: list[Any]) -> Any:
    """Return a structure like `tree` with these values inside."""
    kind = type(tree)
    if kind in pytree.SUPPORTED_NODES and not isinstance(tree, (dict, list, tuple)):
        node = pytree.SUPPORTED_NODES[kind]
        return node.unflatten_fn(values, node.flatten_fn(tree)[1])
    if isinstance(tree, Mapping):
        # Subclasses of dict may hold more than their items, so they are copied and get new items.
        built: Any = dict(tree) if kind is dict else copy.copy(tree)
        for key, value in zip(tree, values, strict=True):
            built[key] = value
        return built
    if isinstance(tree, tuple):
        # `topk` and the like return a tuple that Python cannot make from its elements.
        is_of_torch = hasattr(kind, "n_sequence_fields")
        return kind(values) if is_of_torch else tuple.__new__(kind, values)
    if isinstance(tree, list):
        return values if kind is list else kind(values)
    built = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        # A frozen dataclass forbids plain assignment.
        object.__setattr__(built, key, value)
    return built
