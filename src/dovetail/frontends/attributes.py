"""What a module's attributes were before a step, to be told from what the step made of them.

A traced step leaves fake tensors where a model keeps what it computes, and runs on what the model
kept before. So what changes is noticed, and put back afterwards.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from dovetail.frontends.structures import is_plain_object

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_CONTAINERS = (dict, list, set, deque)
# What nn.Module keeps of itself, but for its mode.
_OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
_TREE = tuple(key for key, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
"""Of these: its submodules, parameters, buffers and hooks."""
# Where recurrent layers of torch list their parameters, anew in each step where they are others.
_OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")
_DEPTH = 3
"""How many objects and containers inside one another are looked into."""


@dataclass(frozen=True, eq=False)
class _Saved:
    """A container as it was: the very object, and a copy of what was in it."""

    name: str
    container: Any
    content: Any


class Attributes:
    """The attributes of a module and its submodules, what is in their containers, and the tree that
    they are: submodules, names of parameters and buffers, hooks, modes."""

    def __init__(self, module: nn.Module) -> None:
        self.saved: list[_Saved] = []
        self.seen: set[int] = set()
        for path, part in module.named_modules():
            inside = {k: v for k, v in vars(part).items() if k not in _OF_MODULE}
            self.saved.append(_Saved(path, part, inside))
            for key in _TREE:
                self.saved.append(_Saved(path, vars(part)[key], vars(part)[key].copy()))
            for key, value in inside.items():
                self._save(f"{path}.{key}" if path else key, value, _DEPTH)

    def _save(self, name: str, value: Any, depth: int) -> None:
        if not depth or id(value) in self.seen:
            return
        if isinstance(value, _CONTAINERS):
            self.seen.add(id(value))
            self.saved.append(_Saved(name, value, value.copy()))
            inside: Any = value.items() if isinstance(value, dict) else enumerate(value)
        elif isinstance(value, np.ndarray):
            self.seen.add(id(value))
            self.saved.append(_Saved(name, value, value.copy()))
            return
        elif is_plain_object(value):
            self.seen.add(id(value))
            inside = dict(vars(value))
            self.saved.append(_Saved(name, value, inside))
            inside = inside.items()
        else:
            return
        for key, element in inside:
            if isinstance(element, (*_CONTAINERS, np.ndarray)) or is_plain_object(element):
                self._save(f"{name}.{key}", element, depth - 1)

    def changed(self) -> list[str]:
        """Names of the attributes that are not what they were: other objects, or other numbers."""
        names = [name for saved in self.saved for name in _changed(saved)]
        return [name for name in names if not name.endswith(_OF_PARAMETERS)]

    def restore(self) -> None:
        """Put everything back."""
        for saved in self.saved:
            if not _changed(saved):
                continue
            container, content = saved.container, saved.content
            if isinstance(container, nn.Module):
                for key in [k for k in vars(container) if k not in _OF_MODULE | content.keys()]:
                    vars(container).pop(key)
                vars(container).update(content)
            elif isinstance(container, np.ndarray):
                container[...] = content
            elif isinstance(container, (list, deque)):
                container.clear()
                container.extend(content)
            elif isinstance(container, (dict, set)):
                container.clear()
                container.update(content)
            else:
                vars(container).clear()
                vars(container).update(content)


def _changed(saved: _Saved) -> list[str]:
    container, before = saved.container, saved.content
    if isinstance(container, np.ndarray):
        equal = container.shape == before.shape and container.tobytes() == before.tobytes()
        return [] if equal else [saved.name]
    if isinstance(container, set):
        return [] if container == before else [saved.name]
    if isinstance(container, (list, deque)):
        if len(container) == len(before) and all(map(_same, container, before)):
            return []
        return [saved.name]
    is_module = isinstance(container, nn.Module)
    now = container if isinstance(container, dict) else vars(container)
    keys = [key for key in now if not (is_module and key in _OF_MODULE)]
    names = [key for key in keys if key not in before or not _same(now[key], before[key])]
    names += [key for key in before if key not in now]
    return [f"{saved.name}.{key}" if saved.name else str(key) for key in names]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    return isinstance(one, (int, float, str, bytes)) and bool(one == other)
