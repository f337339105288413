"""Finds the fake tensors that a capture has left in the user's process, and takes them from there.

A model may keep what it computes beyond its modules: in a cached function, a closure, an object of
another module. After a capture the user's own model would read a tensor without numbers there.
"""

import contextlib
import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FrameType
from typing import Any

from torch import Tensor

from dovetail.runtime.torch_versions import FakeTensor, FakeTensorMode

_LRU_CACHE = type(functools.lru_cache(len))
_MOST_NAMED = 3
_MOST_SEARCHED = 100


def take_back(made: Sequence["weakref.ref[Tensor]"]) -> list[str]:
    """Return the names of those who hold one of the tensors, and let them hold it no more.

    A cache of `functools` is cleared and not named, as it may be cleared at any time. The caller
    has dropped its own references. Looks through all objects of Python, unless all are gone.
    """
    if not any(reference() is not None for reference in made):
        return []
    # Tensors that only cycles of garbage hold are freed first, so that the search is rare.
    gc.collect()
    return _take_back(made)


def _take_back(made: Sequence["weakref.ref[Tensor]"]) -> list[str]:
    """`take_back` after garbage was collected."""
    if not _alive(made):
        return []
    identities = set(map(id, _alive(made)))
    clear_caches(lambda value: id(value) in identities)
    with _nothing_frozen():
        held: list[Any] = _alive(made)
        names: dict[str, None] = {}
        # A tuple cannot give up a tensor, so whoever holds the tuple does.
        while held:
            identities = set(map(id, held))
            holders = [
                holder
                for holder in gc.get_referrers(*held)
                if holder is not held and not isinstance(holder, FrameType)
            ]
            tuples: list[Any] = [holder for holder in holders if isinstance(holder, tuple)]
            owners = _owners_of(
                [each for each in holders if isinstance(each, dict) and not _is_variables(each)]
            )
            for holder in holders:
                if not isinstance(holder, tuple):
                    owner = owners.get(id(holder))
                    given_up = _give_up(holder, owner, identities, len(names) < _MOST_NAMED)
                    # A partial function, an iterator or a generator gives nothing up.
                    names |= dict.fromkeys(given_up or [f"an object of class {_class_of(holder)}"])
            # These lists are no holders of the tuples.
            del holders, owners
            held = tuples
        return list(names)


def take_all_back(mode: FakeTensorMode) -> None:
    """Let nobody hold a fake tensor of this mode any more. Where very many are still held, as by a
    debugger, only caches are cleared: the search takes time with their number."""
    gc.collect()
    with _nothing_frozen():
        values = [v for v in gc.get_objects() if issubclass(type(v), FakeTensor)]
        made = [weakref.ref(value) for value in values if value.fake_mode is mode]
        del values
        if len(made) <= _MOST_SEARCHED:
            _take_back(made)
        else:
            clear_caches(lambda value: isinstance(value, FakeTensor) and value.fake_mode is mode)


def clear_caches(is_made: Callable[[Any], bool]) -> None:
    """Clear each cache of `functools` that holds such an object, or something that holds one."""
    with _nothing_frozen():
        for cache in [value for value in gc.get_objects() if type(value) is _LRU_CACHE]:
            if _holds(cache, is_made, depth=4):
                cache.cache_clear()


@contextlib.contextmanager
def _nothing_frozen() -> Iterator[None]:
    """Let the collector tell of the objects that are frozen, too, within the block."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        # Garbage that is frozen would never be freed. Afterwards it would take much longer to find.
        gc.collect()
        gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()


def _alive(made: Sequence["weakref.ref[Tensor]"]) -> list[Tensor]:
    return [tensor for reference in made if (tensor := reference()) is not None]


def _holds(holder: Any, is_made: Callable[[Any], bool], depth: int) -> bool:
    """Return True if such an object is in the holder, or in what it holds."""
    inside = gc.get_referents(holder)
    return any(map(is_made, inside)) or (
        depth > 1
        and any(
            _holds(value, is_made, depth - 1)
            for value in inside
            if type(value) in (dict, list, tuple)
        )
    )


def _give_up(holder: Any, owner: Any, identities: set[int], is_named: bool) -> list[str]:
    """Remove the objects from the holder; return the names of the places where they were.

    owner      the object whose attributes the holder, a dict, holds; None for any other holder
    is_named   who holds the holder is looked for, through all objects of Python
    """
    name_of = _name_of if is_named else _class_of
    if isinstance(holder, CellType):
        holder.cell_contents = None
        return ["a closure"]
    if isinstance(holder, (list, deque)):
        name = name_of(holder)
        rest = [value for value in holder if id(value) not in identities]
        holder.clear()
        holder.extend(rest)
        return [name]
    if isinstance(holder, set):
        name = name_of(holder)
        holder -= {value for value in holder if id(value) in identities}
        return [name]
    if isinstance(holder, dict):
        keys = [key for key, value in holder.items() if id(value) in identities]
        if _is_variables(holder):
            holder.update(dict.fromkeys(keys))
            name = name_of(holder)
            return [f"{name}.{key}" for key in keys]
        if owner is None:
            name = name_of(holder)
            for key in keys:
                del holder[key]
            return [f"{name}[{key!r}]" for key in keys]
        holder = owner
    return _give_up_attributes(holder, identities)


def _give_up_attributes(holder: Any, identities: set[int]) -> list[str]:
    """Remove the objects from an object's attributes; return their names."""
    kind = type(holder)
    inside = dict(getattr(holder, "__dict__", {}))
    for cls in kind.__mro__:
        for key in getattr(cls, "__slots__", ()):
            inside[key] = getattr(holder, key, None)
    keys = [key for key, value in inside.items() if id(value) in identities]
    for key in keys:
        if isinstance(getattr(kind, key, None), functools.cached_property):
            vars(holder).pop(key)
        elif isinstance(holder, type):
            setattr(holder, key, None)
        else:  # a frozen dataclass forbids plain assignment
            object.__setattr__(holder, key, None)
    name = _class_of(holder)
    return [f"{name}.{key}" for key in keys]


def _owners_of(dicts: list[dict[Any, Any]]) -> dict[int, Any]:
    """Return, by the id of each dict that holds the attributes of an object, that object. All are
    looked for at once, since a search is through all objects of Python."""
    owners = gc.get_referrers(*dicts) if dicts else []
    by_dict = {id(getattr(owner, "__dict__", None)): owner for owner in reversed(owners)}
    return {id(inside): by_dict[id(inside)] for inside in dicts if id(inside) in by_dict}


def _name_of(container: Any) -> str:
    """Return the name of a container by whoever holds it."""
    if isinstance(container, dict) and _is_variables(container):
        return str(container["__name__"])
    for owner in gc.get_referrers(container):
        if isinstance(owner, CellType):
            return "a closure"
        variables = isinstance(owner, dict) and _is_variables(owner)
        inside = owner if variables else getattr(owner, "__dict__", {})
        if inside is container:
            return _class_of(owner)
        name = owner["__name__"] if variables else _class_of(owner)
        for key, value in inside.items():
            if value is container:
                return f"{name}.{key}"
    return f"a {type(container).__name__}"


def _class_of(holder: Any) -> str:
    kind = holder if isinstance(holder, type) else type(holder)
    return kind.__qualname__


def _is_variables(inside: dict[Any, Any]) -> bool:
    """Return True for the global variables of a module."""
    name = inside.get("__name__")
    return isinstance(name, str) and name in sys.modules and vars(sys.modules[name]) is inside
