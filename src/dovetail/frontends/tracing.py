"""One functional graph of forward, loss and backward, traced from fake tensors.

The model and its loss's `backward` run, and `recording.record` records every operator that they
call. They run again where the model asks for the truth of data (`checks`) or may keep state.
Forward hooks tell which module a forward op belongs to. Autograd's sequence numbers tell which
forward op's gradient a backward op computes. Then `purified` removes the ops that write in place.
No weight is allocated, until `compare_with_real` runs a small step on real tensors.

A tensor that shares memory with a parameter, a buffer or an example must not become a constant of
the graph, because its numbers would be stale from the second step on. Four measures prevent it:

* The modules hold the fake twins of their parameters and buffers until the backward pass has ended.
  So ops that the backward pass computes again (gradient checkpointing) read the twins too.
* `_Twins` replaces a parameter by its twin where the model reads it from somewhere other than its
  module.
* The recorder refuses, by name, every other tensor that shares memory with one of them.
* Where a step changes attributes of a module, a second step is traced and must give the same graph.
"""

import contextlib
import copy
import itertools
import logging
import operator
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import (
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.overrides import TorchFunctionMode

from dovetail.frontends import recurrent
from dovetail.frontends.checks import CHECK, LossTracingError, Questions, TracingError, settled
from dovetail.frontends.leftovers import clear_caches
from dovetail.frontends.optimizers import SCALE
from dovetail.frontends.plain import loss_of
from dovetail.frontends.program import Signature, replace_nodes
from dovetail.frontends.recording import (
    SEEDS,
    Outside,
    Recording,
    Rules,
    digest_of,
    is_fake,
    is_random,
    memory_of,
    read_past,
    record,
    references,
    storage_of,
    tensors_of,
)
from dovetail.frontends.structures import TensorSlot, constants, fill, flatten, is_plain_object
from dovetail.graph import LOSS_MODULE, Phase
from dovetail.runtime.torch_versions import (
    FAKE_TENSOR_LOGGER,
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    backward_passes_run_by,
    run_backward,
    sequence_number,
    unset_fake_temporarily,
    without_autocast,
    without_fused_kernels,
)

# Making a recorded graph pure.
#
# In a pure graph no op writes in place, and no op merely protects or renames a value. If the
# recorded graph has ops that write in place, it is run and recorded again through `functionalize`,
# which replaces them by pure ops. Then the ops that move no data are removed: detach, alias, and
# clones that protected a value from an op that wrote in place.


aten = torch.ops.aten
_NO_OPS = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)


def purified(first: Recording, mode: FakeTensorMode, names: Sequence[str]) -> Recording:
    """Return the recording without ops that write in place, move no data or are not needed.

    Each call node of the result is marked with the node of `first` that it stands for, or with
    None. `names` are the names of the values that the recorded function was given. The function
    may change `first`'s graph.

    What it writes over parameters comes after its results, in the order of these parameters, whose
    nodes have `meta["is_written"]`. Raises `TracingError` where an op writes over another value
    that was given to the recorded function.
    """
    if any(_writes(node) for node in first.marks):
        _check_constants(first.graph)
        second = _functionalize(first, mode)
    else:  # a second trace would be a copy
        second = replace(first, marks={node: node for node in first.marks})
    graph = second.graph
    # The placeholders are the graph's first nodes, in the order of `names`.
    given = dict(zip(graph.nodes, names, strict=False))
    # New values of parameters are returned, instead of copied over the old ones at the end.
    output, values = next(iter(reversed(graph.nodes))), dict[fx.Node, Any]()
    for node in list(graph.nodes):
        target: Any = node.args[0] if node.target is aten.copy_.default else None
        if target in given and given[target].startswith("parameter ") and not node.users:
            values[target] = node.args[1]
            target.meta["is_written"] = True
            _erase(graph, node)
    output.args = ([*output.args[0], *(values[node] for node in given if node in values)],)
    # The readers of an op that moves no data read what it reads.
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        moves_nothing = node.target in _NO_OPS
        if node.target is aten.clone.default:
            # No op writes in place any more, so a copy in the same layout protects nothing. A copy
            # in another layout stays, because it moves data.
            moves_nothing = node.meta["val"].stride() == node.args[0].meta["val"].stride()
        if moves_nothing:
            base = node.args[0]
            # Views of the copy become views of the base. `building` tells storages apart by these
            # values, so the base keeps those of the copy.
            aliases = [node.meta["val"], *node.meta.get("same_storage", ())]
            base.meta.setdefault("same_storage", []).extend(aliases)
            node.replace_all_uses_with(base)
            _erase(graph, node)
    for node in graph.nodes:
        if _writes(node):
            what = given.get(node.args[0], "a parameter or an input")
            raise TracingError(
                f"{node.target} writes over {what} in a way that cannot be made part of the graph; "
                "write to a buffer, or return the new value"
            )
        value = node.meta.get("val") if node.op == "call_function" else None
        if isinstance(value, (tuple, list)) and any(isinstance(v, (tuple, list)) for v in value):
            raise TracingError(f"{node.target} returns lists inside a tuple; split it up")
    # Calls and constants that no node reads are removed. From the end to the start, so that one
    # pass also removes what only removed nodes read.
    for node in reversed(list(graph.nodes)):
        kept = node.users or node.target is CHECK
        if not kept and node.op in ("call_function", "get_attr"):
            _erase(graph, node)
    return second


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase the node, and drop its value: the graph's table of names keeps the node."""
    graph.erase_node(node)
    node.meta.clear()


def _check_constants(graph: fx.Graph) -> None:
    """Raise `TracingError` if an op writes over a constant or a view of one. A constant is a tensor
    that the model keeps but that is neither a parameter nor a buffer."""
    constant: set[fx.Node] = set()  # get_attr nodes, and what shares their memory
    for node in graph.nodes:
        if node.op == "get_attr":
            constant.add(node)
        if not isinstance(node.target, OpOverload):
            continue
        for given, is_written in _aliased(node):
            if given not in constant:
                continue
            if is_written:
                value = given.meta["val"]
                raise TracingError(
                    f"{node.target} writes over a tensor of shape {tuple(value.shape)} that the "
                    "model keeps but has not registered; make it a buffer (register_buffer)"
                )
            constant.add(node)


def _aliased(node: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """Yield (argument, is it written over) of each argument of the operator whose memory its result
    may have."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        # `out=` comes by its name.
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(value, fx.Node):
                yield value, argument.alias_info.is_write


def _functionalize(first: Recording, mode: FakeTensorMode) -> Recording:
    """Run the graph through `functionalize` and record that run, in which pure ops replace those
    that write. Each mark is the node of `first` that was running."""
    running: list[fx.Node | None] = []

    def rerun(*values: Tensor) -> list[Any]:
        rest, env = iter(values), dict[fx.Node, Any]()
        for node in first.graph.nodes:
            args, kwargs = replace_nodes((node.args, dict(node.kwargs)), env.__getitem__)
            if node.op == "placeholder":
                env[node] = next(rest)
            elif node.op == "get_attr":
                env[node] = first.constants[node.target]
            elif node.op == "call_function":
                running[:] = [node]
                env[node] = _written_as_it_lies(node.target, args, kwargs)
            else:
                # The ops that still follow write results back and belong to no node.
                running[:] = [None]
                return list(args[0])
        raise AssertionError("a graph ends with its output")

    values = [n.meta["val"] for n in first.graph.nodes if n.op == "placeholder"]
    # The first recording already holds autocast's casts as ops, so they must not be added again.
    with mode, torch.no_grad(), without_autocast():
        return record(functionalize(rerun, remove="mutations"), values, lambda: running[0], {})


def _written_as_it_lies(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator; if it writes over a turned tensor, that lies in memory as it did.

    `functionalize` calls the pure op of the same name, and some pure ops, such as masked_fill, lay
    their results row by row. A view that the model makes of the tensor would fail then.
    """
    name = target._schema.name.removeprefix("aten::") if isinstance(target, OpOverload) else ""
    if name.endswith("_") and not is_random(target) and isinstance(args[0], Tensor):
        written = args[0]
        overload = target._schema.overload_name or "default"
        pure = getattr(getattr(aten, name[:-1], None), overload, None)
        # Ops such as unsqueeze_ write no numbers. A tensor with gaps gets no view that would fail.
        if (
            not written.is_contiguous()
            and isinstance(pure, OpOverload)
            and not pure.is_view
            and torch.empty_like(written).stride() == written.stride()
        ):
            value = pure(*args, **kwargs)
            if value.stride() != written.stride():
                return written.copy_(value)
    return target(*args, **kwargs)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


# Saving a module's attributes before a step, to notice changes and to undo them afterwards.
#
# A model may keep what it computes in its attributes. Without this a traced step would leave fake
# tensors there, and a step would run on the values that an earlier step had left.


_CONTAINERS = (dict, list, set, deque)
_MEMORY = (np.ndarray, bytearray, array)
"""Types that hold plain memory, which tensors may share."""
_OF_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that `nn.Module` itself sets, except its mode."""
_TREE = tuple(key for key, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
"""The dicts and sets among those attributes. They hold submodules, parameters, buffers and
hooks."""
_OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")
"""In these attributes torch's recurrent layers list their parameters. A layer makes the lists again
when its parameters are replaced, as they are by their twins, so a change there means nothing."""
_MOST_OF_VARIABLES = 50e6
"""Of the global variables of all modules together so many bytes are saved."""
_DESCRIPTORS = (property, classmethod, staticmethod, MemberDescriptorType, GetSetDescriptorType)
_DEPTH = 3
"""The search for containers and plain objects goes this many levels into an attribute."""
STEPS_AHEAD = 1000 * 5040
"""Numbers that a step has changed are tried as they would be so many steps later. A whole one is a
multiple of 5040 in that step, and so of each number up to 10."""


@dataclass(frozen=True, eq=False)
class _Saved:
    """The object that held attributes or elements, and a copy of its content before the step."""

    name: str
    container: Any
    content: Any


class Attributes:
    """Saves the attributes of a module and its submodules, and the content of their containers.

    It also saves the tree of modules itself: submodules, parameters, buffers, hooks and modes. And
    it saves data among the attributes of their classes, and among the global variables of the
    modules that define these classes and the `functions`, as models keep caches there; and what the
    functions hold in closures or, if they are objects or modules, in attributes.
    """

    def __init__(self, module: nn.Module, *functions: Any) -> None:
        self.saved: list[_Saved] = []
        self.seen: set[int] = set()
        self.room_bytes = float("inf")
        defined_in: dict[str, None] = {}  # names of modules, in order
        roots = (module, *(f for f in functions if isinstance(f, nn.Module)))
        for path, part in (found for root in roots for found in root.named_modules()):
            inside = {k: v for k, v in vars(part).items() if k not in _OF_MODULE}
            self.saved.append(_Saved(path, part, inside))
            for key in _TREE:
                self.saved.append(_Saved(path, vars(part)[key], vars(part)[key].copy()))
            for key, value in inside.items():
                self._save(f"{path}.{key}" if path else key, value, _DEPTH)
            functions += tuple(value for value in inside.values() if callable(value))
            for kind in type(part).__mro__:
                if _is_users(kind.__module__) and id(kind) not in self.seen:
                    defined_in[kind.__module__] = None
                    self._save_names(kind.__qualname__, kind, kind.__module__)
                    functions += tuple(f for f in vars(kind).values() if type(f) is FunctionType)
        # A program's global variables may be its data, so only so much of them is copied.
        self.room_bytes = _MOST_OF_VARIABLES
        for function in functions:
            defined_in[getattr(function, "__module__", None) or ""] = None
            self._save_function(function)
        for name in filter(_is_users, defined_in):
            if name in sys.modules:
                self._save_names(name, sys.modules[name], name)

    def _save_function(self, function: Any) -> None:
        """Save the variables of a function's closure, or the attributes of what is called so."""
        if isinstance(function, MethodType):
            self._save(type(function.__self__).__qualname__, function.__self__, _DEPTH)
            function = function.__func__
        if isinstance(function, FunctionType) and _is_users(function.__module__ or ""):
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            for variable, cell in cells:
                if id(cell) not in self.seen and (inside := _entries(cell)):
                    self.seen.add(id(cell))
                    name = f"{function.__qualname__}.{variable}"
                    self.saved.append(_Saved(name, cell, inside))
                    self._save(name, cell.cell_contents, _DEPTH)
                    if isinstance(cell.cell_contents, (FunctionType, MethodType)):
                        self._save_function(cell.cell_contents)
        elif (
            id(function) not in self.seen
            and not isinstance(function, (nn.Module, type))
            and _is_users(type(function).__module__)
        ):
            self.seen.add(id(function))
            with contextlib.suppress(TypeError):  # not each has attributes
                inside = dict(vars(function))
                name = type(function).__qualname__
                self.saved.append(_Saved(name, function, inside))
                for key, value in inside.items():
                    self._save(f"{name}.{key}", value, _DEPTH)

    def _save_names(self, name: str, container: type | ModuleType, module: str) -> None:
        """Save the data among the attributes of a class, or among a module's global variables."""
        self.seen.add(id(container))
        inside = _entries(container)
        self.saved.append(_Saved(name, container, inside))
        for key, value in inside.items():
            # Objects of other modules, such as logs, are left alone, and tables that do something
            # when they are read.
            kind = type(value)
            if kind in (*_CONTAINERS, *_MEMORY) or (
                kind.__module__ == module and not issubclass(kind, _CONTAINERS)
            ):
                self._save(f"{name}.{key}", value, _DEPTH)

    def _save(self, name: str, value: Any, depth: int) -> None:
        if not depth or id(value) in self.seen:
            return
        if isinstance(value, (*_CONTAINERS, *_MEMORY)):
            # An entry of a container takes about as long to compare as a hundred bytes.
            size_bytes = 100 * len(value)
            if isinstance(value, np.ndarray):
                size_bytes = value.nbytes
            elif isinstance(value, (bytearray, array)):
                size_bytes = len(value) * getattr(value, "itemsize", 1)
            if size_bytes > self.room_bytes:
                return
            self.room_bytes -= size_bytes
        if isinstance(value, _CONTAINERS):
            self.seen.add(id(value))
            self.saved.append(_Saved(name, value, value.copy()))
            inside: Any = value.items() if isinstance(value, dict) else enumerate(value)
        elif isinstance(value, _MEMORY):
            self.seen.add(id(value))
            self.saved.append(_Saved(name, value, copy.copy(value)))
            return
        elif is_plain_object(value):
            self.seen.add(id(value))
            inside = dict(vars(value))
            self.saved.append(_Saved(name, value, inside))
            inside = inside.items()
        else:
            return
        for key, element in inside:
            if isinstance(element, (*_CONTAINERS, *_MEMORY)) or is_plain_object(element):
                self._save(f"{name}.{key}", element, depth - 1)

    def changed(self) -> list[str]:
        """Return the names of the attributes that hold another object or other numbers than before
        the step."""
        names = [name for saved in self.saved for name in _find_changes(saved)]
        return [name for name in names if not name.endswith(_OF_PARAMETERS)]

    def advance(self) -> list[str]:
        """Put back all that has changed, except that whole and real numbers become what they would
        be `STEPS_AHEAD` steps later. Return their names."""
        counters: list[tuple[_Saved, Any, Any, Any]] = []  # (where, key, number before, number now)
        for saved in self.saved:
            if isinstance(saved.container, (set, *_MEMORY)):
                continue
            if isinstance(saved.container, (list, deque)):
                before, now = dict(enumerate(saved.content)), dict(enumerate(saved.container))
            else:
                before, now = saved.content, _entries(saved.container)
            counters += [
                (saved, key, before[key], value)
                for key, value in now.items()
                if type(value) in (int, float)
                and type(before.get(key)) is type(value)
                and value != before[key]
            ]
        arrays = [
            (saved, saved.container - saved.content)
            for saved in self.saved
            if isinstance(saved.container, np.ndarray) and saved.container.dtype.kind in "iuf"
            if _find_changes(saved)
        ]
        self.restore()
        for saved, change in arrays:
            saved.container[...] += (STEPS_AHEAD * change).astype(change.dtype)
        for saved, key, number, value in counters:
            later = number + STEPS_AHEAD * (value - number)
            if isinstance(later, int):
                # Most models count before they look, so the multiple is what the count leads to.
                later += -later % 5040 - (value - number)
            if isinstance(saved.container, (dict, list, deque)):
                saved.container[key] = later
            else:
                _put_back(saved.container, {**_entries(saved.container), key: later})
        names = [_name_of_entry(saved, key) for saved, key, _, _ in counters]
        return names + [saved.name for saved, _ in arrays]

    def check_apart(self, owners: Mapping[str, Tensor]) -> None:
        """Raise `TracingError` if an array that has changed shares memory with one of the owners:
        the step would have written over a parameter, a buffer or an example past torch."""
        for saved in self.saved:
            if isinstance(saved.container, np.ndarray) and _find_changes(saved):
                begin, end = np.lib.array_utils.byte_bounds(saved.container)
                for what, value in owners.items():
                    other_begin, other_end = memory_of(value)
                    if begin < other_end and other_begin < end:
                        raise TracingError(
                            f"the model writes through the array {saved.name} over {what}, which "
                            "no graph can show; write in place with torch"
                        )

    def restore(self) -> None:
        """Put back every attribute and container content that has changed."""
        for saved in self.saved:
            if not _find_changes(saved):
                continue
            container, content = saved.container, saved.content
            if isinstance(container, np.ndarray):
                container[...] = content
            elif isinstance(container, _MEMORY):
                container[:] = content
            elif isinstance(container, (list, deque)):
                container.clear()
                container.extend(content)
            elif isinstance(container, (dict, set)):
                container.clear()
                container.update(content)
            else:
                _put_back(container, content)


def _put_back(container: Any, content: dict[str, Any]) -> None:
    """Give an object, a module or a class the attributes that were saved."""
    is_plain = not isinstance(container, (type, CellType))
    for key in [key for key in _entries(container) if key not in content]:
        vars(container).pop(key) if is_plain else delattr(container, key)
    for key, value in content.items():
        if is_plain:
            vars(container)[key] = value
        elif _entries(container).get(key) is not value:
            setattr(container, key, value)


def _find_changes(saved: _Saved) -> list[str]:
    """Return the names of the entries that differ from the saved content."""
    container, before = saved.container, saved.content
    if isinstance(container, np.ndarray):
        equal = container.shape == before.shape and container.tobytes() == before.tobytes()
        return [] if equal else [saved.name]
    if isinstance(container, _MEMORY):
        return [] if container == before else [saved.name]
    if isinstance(container, set):
        return [] if container == before else [saved.name]
    if isinstance(container, (list, deque)):
        if len(container) == len(before) and all(map(_same, container, before)):
            return []
        return [saved.name]
    now = _entries(container)
    names = [key for key in now if key not in before or not _same(now[key], before[key])]
    names += [key for key in before if key not in now]
    return [_name_of_entry(saved, key) for key in names]


def _name_of_entry(saved: _Saved, key: Any) -> str:
    if isinstance(saved.container, CellType):
        return saved.name
    return f"{saved.name}.{key}" if saved.name else str(key)


def _entries(container: Any) -> dict[Any, Any]:
    """Return what is saved of a dict, of an object's attributes or of a closure's variable."""
    if isinstance(container, dict):
        return container
    if isinstance(container, CellType):
        try:
            return {"cell_contents": container.cell_contents}
        except ValueError:  # it has no value yet
            return {}
    attributes: Any = vars(container)
    if isinstance(container, nn.Module):
        return {key: value for key, value in attributes.items() if key not in _OF_MODULE}
    if isinstance(container, (type, ModuleType)):
        return {
            key: value
            for key, value in attributes.items()
            if not key.startswith("__")
            and not callable(value)
            and not isinstance(value, (ModuleType, *_DESCRIPTORS))
        }
    return attributes  # type: ignore[no-any-return]


def _is_users(module: str) -> bool:
    """Return True unless a module is of torch, of Python's builtins, or of this package."""
    return module.partition(".")[0] not in ("", "torch", "builtins", "dovetail")


def _same(value: Any, other: Any) -> bool:
    """Return True for one and the same object, and for equal numbers or texts of one type."""
    if value is other:
        return True
    # Two tensors never count as the same: a fake one has no numbers to compare.
    if isinstance(value, Tensor) or isinstance(other, Tensor) or type(value) is not type(other):
        return False
    return isinstance(value, (int, float, str, bytes)) and bool(value == other)


NO_SEQUENCE = -2
"""The sequence number of a backward op that runs between autograd's functions. No forward op has
it: `_Position.mark` gives forward ops -1 or more."""


@dataclass(frozen=True, eq=False)
class Request:
    """The step to trace. All tensors except the originals and owners are fake, of `mode`, or all
    are real.

    originals   the module's own parameters and buffers, by name
    signature   where `inputs` and `targets` stand among the arguments of the module and its loss
    loss        the loss function; None: the output, or the loss that the model itself returns
    trainable   names of the parameters to differentiate for; () in inference
    owners      description, such as "parameter a.weight" -> that tensor of the module or of the
                examples, as the caller gave it
    scale       the factor of the loss before the backward pass; None: no factor
    channels_last   inputs of four dimensions are laid out so before the module reads them, and
                results are contiguous
    chunks      recurrent layers are computed by fused kernels, each of a layer in so many chunks of
                time steps, where torch has such kernels; 0: by the ops of each time step
    holds_fakes   True if the caller's module or examples were fake, so that constants may be fake
    """

    module: nn.Module
    mode: FakeTensorMode
    originals: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    signature: Signature
    loss: Callable[..., Any] | None
    training: bool
    trainable: tuple[str, ...]
    owners: dict[str, Tensor]
    holds_fakes: bool
    scale: Tensor | None = None
    chunks: int = 0
    channels_last: bool = False


class Origin(NamedTuple):
    """The phase and module that a node comes from, and the forward node whose gradient it computes,
    or None."""

    phase: Phase
    module: str
    forward: fx.Node | None


@dataclass(frozen=True, eq=False)
class Trace:
    """A functional graph of one step, and the meaning of its nodes.

    sources     node -> (role, name), for the request's tensors, in their order
    constants   get_attr node -> its value
    origins     call node -> its origin
    results     structure of nodes: the loss (training) or the model's output
    made        weak references to this capture's fake tensors, some of which the model may keep
    draws       random call node -> the call node whose random numbers it draws. That is the node
                itself, except where a checkpoint computes an earlier draw again
    written_inputs   indices of the inputs that the model writes over
    fused_steps   the most time steps of a recurrent layer that has fused kernels; 0: there is none
    differentiates   autograd noted some ops, as it does in training
    counters    names of the numbers that each step changes in Python, and none of its values uses
    numbers     its value numbers, which a step on real tensors must have too; None for a long step
    numbered    those of its results, and the constants among the results, as texts
    states      random call node -> number of the generator's state that it draws from
    gradients   parameter -> node; parameters that the loss does not reach are absent
    written     buffer or parameter -> node of its new value; an optimizer updates that one
    """

    graph: fx.Graph
    sources: dict[fx.Node, tuple[str, str]]
    constants: dict[fx.Node, Tensor]
    origins: dict[fx.Node, Origin]
    results: Any
    gradients: dict[str, fx.Node]
    written: dict[str, fx.Node]
    draws: dict[fx.Node, fx.Node]
    made: list["weakref.ref[Tensor]"]
    written_inputs: tuple[int, ...] = ()
    fused_steps: int = 0
    differentiates: bool = False
    counters: tuple[str, ...] = ()
    numbers: "_Numbers | None" = None
    numbered: tuple[str, str] = ("", "")
    states: dict[fx.Node, int] = field(default_factory=dict)


TRACED_TWICE = 2000
"""A step of at most this many calls is traced a second time even if it changed no attribute,
because a model may also keep state in a closure, an iterator or a global variable. The second trace
takes up to about a second."""


COMPARED = 6000
"""A step of at most this many calls can be compared with one on real tensors, whose calls take
about a tenth of the time of calls on fake ones."""


def trace(request: Request) -> Trace:
    """Return the trace of the requested step.

    Raises `TracingError`, or whatever the model or torch raises. The module's attributes are put
    back in either case.
    """
    attributes = Attributes(request.module, request.loss)
    flat = [
        *request.parameters.values(), *request.buffers.values(), *request.inputs, *request.targets,
    ]  # fmt: skip
    if request.scale is not None:
        flat.append(request.scale)
    recordings: list[Recording] = []  # of all runs
    layouts: dict[int, tuple[int, Any]] = {}  # identity of a recording -> as in `_flat_step`
    steps: list[int] = []  # of the recurrent layers that the last run has met
    made: list[weakref.ref[Tensor]] = []  # the fake tensors of all recordings
    numbers, results, counters = _Numbers({}), ("", ""), list[str]()
    attempts = itertools.count()

    def run(stale: Mapping[int, bool], questions: Questions) -> Recording:
        at, layout = _Position(), list[tuple[int, Any]]()
        steps.clear()
        step = _flat_step(request, at, layout, steps, questions)
        # Of a run that only tries an answer nothing is kept.
        may_be_fake = request.holds_fakes or questions.probed is not None
        outside = Outside(request.owners, stale, None if may_be_fake else request.mode)
        recording = record(step, flat, at.mark, _RULES, outside, questions, made=made)
        recordings.append(recording)
        layouts[id(recording)] = layout[0]
        return recording

    def run_first(questions: Questions) -> Recording:
        """Record a run that finds the module as it was."""
        if next(attempts) and questions.probed is None:
            # An earlier run may have left its tensors there.
            clear_caches(lambda x: isinstance(x, FakeTensor) and x.fake_mode is request.mode)
        attributes.restore()
        return run({}, questions)

    def compute_the_same(one: Recording, other: Recording, untouched: list[Tensor]) -> bool:
        """Return True if the second run also writes over none of these tensors."""
        compared, written = _Numbers({}), _written_storages(other)
        first, second = (compared.of_results(r, layouts[id(r)]) for r in (one, other))
        return first == second and all(storage_of(value) not in written for value in untouched)

    def run_again() -> tuple[str, str]:
        """Run the step after its first run, and return the numbers of what it computes then."""
        node_of = {
            id(value): node
            for node in first.graph.nodes
            if node.op == "call_function" and isinstance(value := node.meta["val"], Tensor)
        }
        lasting = _lasting(request, first)
        second = run({key: node in lasting for key, node in node_of.items()}, step.again())
        # A value that the first run left behind and the second reads has the number it had there.
        numbers.given = {key: numbers.of_node[node] for key, node in node_of.items()}
        found = numbers.of_results(second, layouts[id(second)])
        forget(second.graph)
        return found

    try:
        with request.mode, _silence_log(), _traceable_modules():
            step = settled(run_first, compute_the_same)
            first = step.result
            for tried in recordings:
                if tried is not first:
                    forget(tried.graph)
            changed = attributes.changed()
            attributes.check_apart(request.owners)
            _check_held(request)
            is_compared = len(first.marks) <= COMPARED
            # What `forward` writes between two steps into memory that is not torch's, such as that
            # of an array, goes past torch.
            borrows = any(
                first.digests[name] and not value.untyped_storage().resizable()
                for name, value in first.constants.items()
            )
            is_repeated = changed or len(first.marks) <= TRACED_TWICE or borrows
            if is_repeated or is_compared:
                results = numbers.of_results(first, layouts[id(first)])
            if is_repeated:
                # The next step, and one much later, must compute the same.
                later = Attributes(request.module, request.loss) if changed else None
                if run_again() != results:
                    raise TracingError(_describe_changes("its next step", changed))
                counters = later.advance() if later else []
                try:
                    is_other = bool(counters) and run_again() != results
                except Exception as error:
                    raise TracingError(_describe_changes("a later step", counters)) from error
                if is_other:
                    raise TracingError(_describe_changes("a later step", counters))
            # They are compared once more on real tensors, when no fake one is left.
            numbers.given, numbers.of_node = {}, {}
    finally:
        attributes.restore()
    for node in first.marks:
        if node.target is CHECK and not node.args[2]:
            number: Any = node.args[3]
            node.args = (*node.args[:2], *step.raised[int(number)])
    # The first recording is read here, before `purified`, which may change its graph.
    written_inputs = _written_inputs(request, first)
    recorded = list(first.graph.nodes)
    origins = _first_origins(first)
    second = purified(first, request.mode, [f"{role} {name}" for role, name in _roles(request)])
    made += references(second.graph)
    traced = _clean(request, first, second, origins, layouts[id(first)], made)
    states = {
        node: first.draws[second.marks[node]]
        for node in traced.graph.nodes
        if second.marks.get(node) in first.draws and is_random(node.target)
    }
    traced = replace(
        traced,
        written_inputs=written_inputs,
        fused_steps=max(steps, default=0),
        counters=tuple(counters),
        numbers=numbers if is_compared else None,
        numbered=results,
        states=states,
    )
    left = set(traced.graph.nodes)
    for node in recorded:
        if node not in left:
            # Nodes that were removed must not keep their values alive.
            node.meta.clear()
    return traced


def compare_with_real(request: Request, traced: Trace) -> str:
    """Run the step on the real tensors of the request, whose parameters and buffers are the
    originals. Return a note if the model calls other operators then, and its results are the same
    but for rounding.

    A model may look at more of a tensor than its shape, such as its class, and fake tensors have
    another one. Raises `TracingError` if the real step has other numbers, or whatever the model
    raises. The module's attributes are put back in either case.
    """
    numbers = traced.numbers
    assert numbers is not None, "a long step is not compared"
    layout: list[Any] = []
    flat = _real_values(request)
    at = _Position()
    step = _flat_step(request, at, layout, [], Questions({}))
    attributes = Attributes(request.module, request.loss)
    try:
        outside = Outside(request.owners)
        with _traceable_modules():
            real = record(step, flat, at.mark, _RULES, outside, seed=next(SEEDS))
    finally:
        attributes.restore()
    known = len(numbers.table)
    results = numbers.of_results(real, layout[0])
    if results == traced.numbered:
        return ""
    of_node = numbers.of_node
    new = (node for node in real.marks if of_node[node] >= known)
    node = next(new, None)
    where = ""
    if node is not None:
        module = real.marks[node][1]
        where = f" ({node.target}{f' in {module}' if module else ''})"
    (output,) = (node for node in real.graph.nodes if node.op == "output")
    # The traced step on real tensors, with the random numbers that the real step has drawn.
    found: list[Tensor | None] = []
    rest, env = iter(_real_values(request)), dict[fx.Node, Any]()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), without_autocast():
        for node in traced.graph.nodes:
            args, kwargs = replace_nodes((node.args, dict(node.kwargs)), env.__getitem__)
            if node.op == "placeholder":
                env[node] = next(rest)
            elif node.op == "get_attr":
                env[node] = traced.constants[node]
            elif node.op == "call_function":
                state, drawn = real.drawn.get(traced.states.get(node, -1), (None, None))
                if state is not None:
                    torch.default_generator.set_state(state)
                made = env[node] = node.target(*args, **kwargs)
                pairs = list(zip(tensors_of(made), tensors_of(drawn), strict=False))
                shapes = all(own.shape == other.shape for own, other in pairs)
                strides = all(own.stride() == other.stride() for own, other in pairs)
                # A tensor that lies otherwise would get other numbers of the same state.
                if pairs and shapes and not strides:
                    env[node] = drawn
            else:
                found = list(args[0])
    expected = [None if node is None else node.meta["val"] for node in output.args[0]]
    # The graph also returns what it writes over parameters, behind its results.
    error = _largest_error(found[: len(expected)], expected)
    if error > _MOST_ERROR or results[1] != traced.numbered[1]:
        raise TracingError(
            f"it computes something else on real tensors than while it is captured{where}; it "
            "looks at what only real tensors have, such as their class (type(x) is torch.Tensor), "
            "or reads their numbers; use isinstance, and torch.where"
        )
    return (
        f"on real tensors the model calls other operators than those captured{where}; on the "
        f"examples the results agree within {_MOST_ERROR:g} of their size"
    )


def _real_values(request: Request) -> list[Tensor]:
    """Return copies of parameters and buffers, which the model may write over, and each input and
    target as a tensor of its own, since one tensor may be given as several inputs."""
    given = (*request.inputs, *request.targets)
    flat = [value.detach().clone() for value in request.originals.values()]
    flat += [value.detach() for value in given]
    return flat if request.scale is None else [*flat, request.scale]


_MOST_ERROR = 1e-3
"""Results that differ by at most this part of their size differ by rounding."""


def _largest_error(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """Return the largest difference of two results, relative to the result's largest number. What
    is much smaller than all other results counts as rounding."""
    if len(found) != len(expected):
        return float("inf")
    # A complex tensor counts as one of pairs of numbers.
    found, expected = (
        [
            torch.view_as_real(value.detach().resolve_conj())
            if value is not None and value.is_complex()
            else value
            for value in values
        ]
        for values in (found, expected)
    )
    numbers = [value.detach() for value in expected if value is not None and _is_float(value)]
    sizes = [float(value.abs().max()) for value in numbers]
    least = 1e-3 * max((size for size in sizes if size < float("inf")), default=0.0)
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            if one is not other:
                return float("inf")
        elif not _is_float(other):
            worst = worst if torch.equal(one, other) else float("inf")
        else:
            one, other = one.detach().double(), other.detach().double()
            if not torch.equal(one.isfinite(), other.isfinite()):
                return float("inf")
            one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
            size = max(float(other.abs().max()), least)
            difference = float((one - other).abs().max())
            worst = max(worst, difference / size if size else float(difference > 0))
    return worst


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.numel())


def forget(graph: fx.Graph) -> None:
    """Drop the graph's references to fake values, so that those without other owners are freed."""
    for node in graph.nodes:
        node.meta.clear()


def _check_held(request: Request) -> None:
    """Raise `TracingError` if the step created or removed a parameter or buffer."""
    held = {*request.module.parameters(), *request.module.buffers()}
    originals = set(request.originals.values())
    now = [*request.module.named_parameters(), *request.module.named_buffers()]
    for name, value in now:
        if value not in originals:
            raise TracingError(
                f"{name} is made while the model runs; make it in __init__, or run the model once "
                "before"
            )
    for name, value in request.originals.items():
        if value not in held:
            raise TracingError(f"{name} is removed while the model runs; keep its module")


def _describe_changes(step: str, changed: list[str]) -> str:
    what = list_names(changed) or (
        "what is in no module (a closure, an iterator, a global variable)"
    )
    return (
        f"{step} is another one, as this one changes {what}; keep in buffers, written in "
        "place, what goes from step to step, and call the model once before if only its first call "
        "makes it"
    )


def _lasting(request: Request, first: Recording) -> set[fx.Node]:
    """Return the nodes whose values are the same in every step.

    They are constants, buffers that are neither written over nor assigned, in inference also
    parameters, and what pure ops that draw no random numbers compute from these.
    """
    written, given = _written_storages(first), _placeholders(first)
    (output,) = (node for node in first.graph.nodes if node.op == "output")
    returned, count = set(output.all_input_nodes), len(request.parameters)
    lasting = {
        node
        for node in given[count : count + len(request.buffers)]
        if any(copy in returned for copy in _copies(node))
        and all(storage_of(copy.meta["val"]) not in written for copy in _copies(node))
    }
    if not request.training:
        lasting.update(given[:count])
    for node in first.graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function"
            and node not in first.draws
            and not _writes(node)
            and all(read in lasting for read in node.all_input_nodes)
        ):
            lasting.add(node)
    return lasting


def _placeholders(recording: Recording) -> list[fx.Node]:
    return [node for node in recording.graph.nodes if node.op == "placeholder"]


def _copies(placeholder: fx.Node) -> list[fx.Node]:
    """Return the clones of a placeholder. The step works on such a clone instead of the value that
    it is given."""
    return [user for user in placeholder.users if user.target is aten.clone.default]


def _written_storages(recording: Recording) -> set[int]:
    """Return the identities of the storages that the recorded ops write over."""
    written: set[int] = set()
    for node in recording.marks:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            written |= {storage_of(v.meta["val"]) for v, is_written in _aliased(node) if is_written}
    return written


def _written_inputs(request: Request, first: Recording) -> tuple[int, ...]:
    """Return the indices of the inputs that the model writes over.

    Raises `TracingError` if such an input shares memory with another tensor of the model or the
    examples: the step works on copies, which share none, so the other tensor would not change.
    """
    written = _written_storages(first)
    before = len(request.parameters) + len(request.buffers)
    indices = [
        index
        for index, node in enumerate(_placeholders(first)[before : before + len(request.inputs)])
        if any(storage_of(copy.meta["val"]) in written for copy in _copies(node))
    ]
    spans = {name: memory_of(value) for name, value in request.owners.items()}
    for index in indices:
        name = f"input {request.signature.names[index]}"
        begin, end = spans[name]
        for other, (other_begin, other_end) in spans.items():
            if other != name and begin < other_end and other_begin < end:
                raise TracingError(
                    f"{name} is written over and shares memory with {other}; give a clone of one"
                )
    return tuple(indices)


class _Numbers:
    """Numbers the values of several recordings so that equal numbers mean equal computations.

    A node's number stands for its operator and the numbers of its arguments (value numbering).

    given   identity of a constant -> the number that it has in another recording
    """

    def __init__(self, given: dict[int, int]) -> None:
        self.given = given
        self.table: dict[Any, int] = {}
        self.constants: list[Tensor] = []
        self.of_node: dict[fx.Node, int] = {}

    def of_results(self, recording: Recording, layout: tuple[int, Any]) -> tuple[str, str]:
        """Return, as texts, the numbers of the values that the recording returns, and the constants
        among them.

        layout   number of its results, and their template
        """
        of_storage: dict[int, list[fx.Node]] = {}
        for position, node in enumerate(recording.graph.nodes):
            if node.op == "output":
                return repr(fx.map_arg(node.args, self._named)), repr(constants(layout[1]))
            if node.op == "placeholder":
                key: Any = ("given", position)
            elif node.op == "get_attr":
                name = node.target
                key = self._of_constant(recording.constants[name], recording.digests[name])
            elif node.target in (aten.detach.default, aten.alias.default):
                # Parameters on fake tensors have one of these that real ones do not have.
                key = None
            else:
                arguments = repr(fx.map_arg((node.args, node.kwargs), self._named))
                key = (node.target, arguments, recording.draws.get(node))
            number = (
                self.of_node[node.args[0]]
                if key is None
                else self.table.setdefault(key, len(self.table))
            )
            self.of_node[node] = number
            if _writes(node):
                # After a write every value in the same memory is a new value: it gets a new number.
                for read in node.all_input_nodes:
                    for alias in of_storage.get(storage_of(read.meta["val"]), ()):
                        after = ("after", self.of_node[alias], number)
                        self.of_node[alias] = self.table.setdefault(after, len(self.table))
            if isinstance(node.meta["val"], Tensor):
                of_storage.setdefault(storage_of(node.meta["val"]), []).append(node)
        raise AssertionError("a graph ends with its output")

    def _named(self, node: fx.Node) -> str:
        """Return the node's number as text, which differs from a number among the arguments."""
        return f"%{self.of_node[node]}"

    def _of_constant(self, value: Tensor, digest: bytes) -> Any:
        """Return the key of a constant in `table`; equal constants have one key."""
        if id(value) in self.given:
            number = self.given[id(value)]
            return next(key for key, entry in self.table.items() if entry == number)
        if digest:
            return "constant", digest, value.shape, value.dtype
        for index, other in enumerate(self.constants):
            if value is other:
                return "constant", index
            if is_fake(value) or is_fake(other):
                continue
            if value.shape == other.shape and value.dtype == other.dtype:
                with unset_fake_temporarily():
                    if torch.equal(value, other):
                        return "constant", index
        self.constants.append(value)
        return "constant", len(self.constants) - 1


def list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


@dataclass
class _Position:
    """The phase, module and autograd function that the running step is in."""

    phase: Phase = Phase.FORWARD
    module: str = ""
    sequence: int = NO_SEQUENCE

    def mark(self) -> tuple[Phase, str, int]:
        """Return (phase, module, sequence number) of the op that is about to be recorded.

        The number is that of the autograd function that a forward op creates, or that a backward op
        runs in.
        """
        if self.phase == Phase.BACKWARD:
            return self.phase, self.module, self.sequence
        # Autograd numbers its functions upwards and creates an op's function before the recorder
        # sees the op, so the function has the last number that was given out.
        number = sequence_number() - 1
        return self.phase, self.module, number


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    *options: Any,
) -> Any:
    """Compute `native_batch_norm` by operators whose schema declares which statistics they write.

    The schema of `native_batch_norm` does not, so the recorder would take it for a pure op.
    """
    training, momentum, eps = options
    if not training:
        return aten._native_batch_norm_legit_no_training(
            x, weight, bias, mean, variance, momentum, eps
        )
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    return aten._native_batch_norm_legit(x, weight, bias, mean, variance, True, momentum, eps)


def _torch_equal(value: Tensor, other: Tensor) -> bool:
    """Compute `torch.equal` by an op of whose result the model asks the truth."""
    return value.shape == other.shape and bool((value == other).all())


def _assert(value: Tensor, text: str = "") -> None:
    """Record `torch._assert_async` as a check, since a graph drops an op without a result."""
    CHECK(value != 0, True, "RuntimeError", text or "Expected Tensor to be nonzero")


def _check_factors(info: Tensor, name: str, *, is_matrix: bool) -> None:
    """Record as a check, too, that a factorisation has been completed, as `cholesky` and `inv` ask
    of theirs. torch tells where each one fails, and the check does not."""
    says = "could not be completed, as a matrix is singular or not positive-definite"
    CHECK((info == 0).all(), True, "RuntimeError", f"LinAlgError: {name}: it {says}")


@contextlib.contextmanager
def _traceable_modules() -> Iterator[None]:
    """Let two methods of torch's modules do the same within by what a graph can hold.

    `to` and the like: torch puts new parameters in the place of fake ones even where nothing
    changes. Batch normalisation with momentum=None: torch makes a number of the count of steps.
    """
    norm = nn.modules.batchnorm._BatchNorm
    original_apply: Any = nn.Module._apply
    original_forward: Any = norm.forward

    def apply(module: nn.Module, function: Any, recurse: bool = True) -> Any:
        with torch.no_grad():
            values = (*module.parameters(recurse), *module.buffers(recurse))
            if all(function(value) is value for value in values):
                return module
        return original_apply(module, function, recurse)

    def forward(module: Any, input: Tensor) -> Any:
        count = module.num_batches_tracked
        if module.momentum is not None or not module.training or count is None:
            return original_forward(module, input)
        module._check_input_dim(input)
        with torch.no_grad():
            count.add_(1)
            dimensions = [0, *range(2, input.dim())]
            values = input.float() if input.dtype.itemsize < 4 else input
            variance, mean = torch.var_mean(values, dimensions)
            share = 1 / count.to(mean.dtype)
            for running, value in ((module.running_mean, mean), (module.running_var, variance)):
                running.copy_(running * (1 - share) + value * share)
        return nn.functional.batch_norm(
            input, None, None, module.weight, module.bias, training=True, eps=module.eps
        )

    nn.Module._apply = apply  # type: ignore[method-assign]
    norm.forward = forward  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module._apply = original_apply  # type: ignore[method-assign]
        norm.forward = original_forward  # type: ignore[method-assign]


@contextlib.contextmanager
def _silence_log() -> Iterator[None]:
    """Silence torch's log of failures under fake tensors, which are raised with their traceback
    anyway."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _flat_step(
    request: Request, at: _Position, layout: list[Any], steps: list[int], questions: Questions
) -> Callable[..., list[Any]]:
    """Return the step as a function of flat tensors.

    Each run of it appends to `layout` the number of its results and their template, and to `steps`
    the numbers of time steps of recurrent layers that have fused kernels.
    """

    def step(*flat: Tensor) -> list[Any]:
        rest, trainable = iter(flat), frozenset(request.trainable)
        leaves = {name: _leaf(request, name, next(rest)) for name in request.parameters}
        frozen = {name: leaf for name, leaf in leaves.items() if name not in trainable}
        buffers = {
            name: _as_seen(next(rest).clone(), request.originals[name]) for name in request.buffers
        }
        inputs = []
        for like, original in zip(request.inputs, request.signature.inputs, strict=True):
            copied = next(rest).clone()  # the model may write over it
            if request.channels_last:
                copied = last_of_channels(copied)
            if like.requires_grad:
                copied.requires_grad_()
            inputs.append(_as_seen(copied, original))
        targets = [next(rest).clone() for _ in request.targets]
        args, kwargs = request.signature.call(inputs)
        differentiated = request.training or any(value.requires_grad for value in inputs)
        grad = torch.enable_grad() if differentiated else torch.no_grad()
        # The twins stay in place until the backward pass has ended, because gradient checkpointing
        # computes parts of the forward pass again in it and reads the parameters there.
        standing_in = _standing_in(request, leaves | buffers, steps, questions)
        with grad, without_fused_kernels(), standing_in as slots:
            with _module_paths(at, request.module):
                with _place(at, Phase.FORWARD):
                    output = request.module(*args, **kwargs)
                if not request.training:
                    results, _, template = flatten(output)
                    if request.channels_last:
                        # The user gets images as they lie in the module's own results.
                        results = [r.contiguous() if r.dim() == 4 else r for r in results]
                    layout.append((len(results), template))
                    return results + _collect_written(slots, frozen | buffers)
                with _place(at, Phase.FORWARD, LOSS_MODULE):
                    # Without a loss function the targets have no arguments to fill.
                    own = request.loss is None
                    arguments = () if own else request.signature.loss_arguments(targets)
                    loss = loss_of(request.loss, output, arguments)
                    if loss is None and own:
                        raise TracingError(
                            f"the model returns {type(output).__name__}, which has no loss; give "
                            "`loss=`, a function loss(output, *targets) that returns a scalar, or "
                            "what the model needs to compute its own (such as labels=)"
                        )
                leaf_list = [leaves[name] for name in request.trainable]
                scale = None if request.scale is None else next(rest)
                loss, gradients = _gradients(at, loss, scale, leaf_list, request)
            written = _collect_written(slots, frozen | buffers)
        layout.append((1, TensorSlot(0)))
        return [loss.detach(), *gradients, *written]

    return step


def _leaf(request: Request, name: str, value: Tensor) -> Tensor:
    """Return the twin of a parameter that the model sees, with the hooks that its user put on it.

    A parameter that is not trained is cloned, so that the model may write over it as over a buffer.
    Embeddings with a largest norm do so, and encoders that follow others by momentum.
    """
    original = request.originals[name]
    start = value.detach() if name in request.trainable else value.clone()
    # A fake parameter is one for `isinstance`, but not of its class.
    leaf = nn.Parameter(start, requires_grad=False) if is_fake(start) else start
    leaf = _as_seen(leaf, original).requires_grad_(original.requires_grad)
    if getattr(original, "_post_accumulate_grad_hooks", None):
        raise TracingError(
            f"parameter {name} has a hook that runs once its gradient is accumulated "
            "(register_post_accumulate_grad_hook), where an update stands in a graph; remove it"
        )
    if name in request.trainable:
        for hook in (original._backward_hooks or {}).values():
            if getattr(hook, "__module__", "") == "torch.autograd.graph":
                raise TracingError(
                    f"parameter {name} has a hook on the gradients of several tensors "
                    "(register_multi_grad_hook), which only a whole backward pass can call; "
                    "register a hook on each"
                )
            leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    return leaf


def _as_seen(twin: Tensor, original: Tensor) -> Tensor:
    """Return the twin with what else a model may see of the original: the attributes that its user
    has given it, and its class, which only a real tensor can have."""
    if isinstance(original, FakeTensor):
        return twin
    if not is_fake(twin):
        twin.__class__ = type(original)
    vars(twin).update(vars(original))
    return twin


def last_of_channels(value: Tensor) -> Tensor:
    """Return the tensor with its channels last in memory if it has four dimensions; else itself."""
    if value.dim() != 4:
        return value
    return value.contiguous(memory_format=torch.channels_last)


_BACKWARD = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)


class _Twins(TorchFunctionMode):
    """Replaces the module's parameters and buffers by their fake twins in every call of torch.

    The model may read such a tensor from a closure, a list or another attribute instead of its
    module. The mode acts above autograd, so that gradients flow to the twin.
    """

    def __init__(
        self, twins: dict[int, Tensor], chunks: int, steps: list[int], questions: Questions
    ) -> None:
        super().__init__()
        self.questions = questions
        self.twins = twins
        self.chunks = chunks
        self.steps = steps

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0].dtype != torch.bool:
            return bool(self._twin_of(args[0]) != 0)
        if func in _BACKWARD:
            # Reentrant checkpoints and penalties on gradients start a backward pass within the
            # step. torch switches this mode off while it handles a call, but ops that the backward
            # pass computes again still need it.
            def run(*given: Any, **options: Any) -> Any:
                with self:
                    return run_backward(*given, **options)

            with backward_passes_run_by(run):
                twins = {key: self._twin_of(value) for key, value in (kwargs or {}).items()}
                return func(*self._twin_of(args), **twins)
        if func == _SET_DATA:
            # `target.data = value` becomes a write in place.
            target, value = self._twin_of(args[0]), self._twin_of(args[1])
            is_twin = any(target is twin for twin in self.twins.values())
            if not is_twin or (target.shape, target.dtype) != (value.shape, value.dtype):
                raise TracingError(
                    "the model assigns to the .data of a tensor, which a graph cannot show; write "
                    "in place (copy_) into a buffer, or return the new value"
                )
            target.detach().copy_(value.detach())
            return None
        rule = _PACKING.get(getattr(func, "__name__", ""))
        if rule is not None:
            return rule(*args, **(kwargs or {}))
        if any(map(self._reads_original, args)):
            args = tuple(map(self._twin_of, args))
        if kwargs and any(map(self._reads_original, kwargs.values())):
            kwargs = {key: self._twin_of(value) for key, value in kwargs.items()}
        if func in (torch.ctc_loss, nn.functional.ctc_loss):
            # torch makes tensors of lengths that are numbers by code that fails under fake tensors.
            kwargs = kwargs or {}
            lengths = [*args[2:4], kwargs.get("input_lengths"), kwargs.get("target_lengths")]
            of_numbers = {
                id(numbers): torch.tensor(numbers)
                for numbers in lengths
                if isinstance(numbers, (tuple, list))
            }
            args = tuple(of_numbers.get(id(value), value) for value in args)
            kwargs = {name: of_numbers.get(id(value), value) for name, value in kwargs.items()}
        if func is torch.where and len(args) == 3 and args[0].dtype == torch.uint8:
            # torch still takes bytes for truths, but not where its tensors are fake.
            args = (args[0] != 0, *args[1:])
        if func is torch.lstm and not kwargs and recurrent.has_fused_kernel(args):
            self.steps.append(recurrent.time_steps(args))
            if self.chunks:
                return recurrent.lstm(args, self.chunks)
        return self.questions.call(func, args, kwargs or {})

    def _reads_original(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self._reads_original, value))
        return id(value) in self.twins

    def _twin_of(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            twins = [self._twin_of(element) for element in value]
            return twins if isinstance(value, list) else tuple.__new__(type(value), twins)
        return self.twins.get(id(value), value)


def _pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Compute `torch._pack_padded_sequence` as one gather of rows.

    torch's own function reads the lengths, which fake tensors do not have. Here they must be known
    numbers. Step after step, a row is taken from each sequence that is long enough. Raises
    `TracingError`.
    """
    counts = _known_lengths("pack_padded_sequence", lengths)
    if batch_first:
        padded = padded.transpose(0, 1)
    steps, width = padded.shape[:2]
    if max(counts) > steps or min(counts) <= 0 or sorted(counts, reverse=True) != counts:
        raise TracingError(
            f"pack_padded_sequence takes lengths from {steps} to 1, the longest first, but got "
            f"{counts}; use enforce_sorted=False for any order"
        )
    sizes = [sum(length > step for length in counts) for step in range(max(counts))]
    rows = [step * width + row for step, size in enumerate(sizes) for row in range(size)]
    flat = padded.reshape(steps * width, *padded.shape[2:])
    with unset_fake_temporarily():
        index, batch_sizes = torch.tensor(rows), torch.tensor(sizes)
    return flat.index_select(0, index), batch_sizes


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Compute `torch._pad_packed_sequence` as one copy of rows into a padded tensor.

    It is the inverse of `_pack`, and the sizes must be known numbers too. Raises `TracingError`.
    """
    sizes = _known_lengths("pad_packed_sequence", batch_sizes)
    steps, width = max(len(sizes), total_length), sizes[0]
    rows = [step * width + row for step, size in enumerate(sizes) for row in range(size)]
    counts = [sum(size > row for size in sizes) for row in range(width)]
    with unset_fake_temporarily():
        index, lengths = torch.tensor(rows), torch.tensor(counts)
    flat = data.new_full((steps * width, *data.shape[1:]), padding).index_copy(0, index, data)
    padded = flat.reshape(steps, width, *data.shape[1:])
    return (padded.transpose(0, 1) if batch_first else padded), lengths


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, labels: Tensor, *options: Any
) -> Any:
    """Compute `torch.ctc_loss` by the operator that takes the lengths as numbers."""
    lengths = _known_lengths("ctc_loss", inputs), _known_lengths("ctc_loss", labels)
    return aten._ctc_loss.default(log_probs, targets, *lengths, *options)


def _ctc_loss_backward(
    gradient: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, labels: Tensor, *rest: Any
) -> Any:
    """Compute the gradient of `_ctc_loss`."""
    lengths = _known_lengths("ctc_loss", inputs), _known_lengths("ctc_loss", labels)
    return aten._ctc_loss_backward.default(gradient, log_probs, targets, *lengths, *rest)


def _known_lengths(function: str, lengths: Tensor) -> list[int]:
    """Return the lengths as numbers. Raises `TracingError` if they depend on data."""
    try:
        return [int(length) for length in lengths]
    except DataDependentOutputException:
        raise TracingError(
            f"{function} makes tensors whose shapes depend on the lengths; give it its lengths as "
            "numbers, a list or tuple, which the graph holds constant"
        ) from None


def _as_strided(
    value: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """Return the diagonal if that is the view, as it is in `fill_diagonal_`. Writes through
    as_strided cannot be made part of a graph."""
    if (
        value.dim() == 2
        and list(size) == [min(value.shape)]
        and list(stride) == [sum(value.stride())]
        and storage_offset in (None, value.storage_offset())
    ):
        return value.diagonal()
    return NotImplemented


_RULES: Rules = {
    aten.as_strided.default: _as_strided,
    aten.native_batch_norm.default: _batch_norm,
    aten.equal.default: _torch_equal,
    aten._assert_async.default: _assert,
    aten._assert_async.msg: _assert,
    aten._linalg_check_errors.default: _check_factors,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}

_PACKING: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _pad,
}

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class _Held:
    """A place where a module holds a parameter or a buffer, and the twin that stands there.

    path    its name in the module's state_dict
    name    the parameter's or buffer's name; of a tied one the first of its names
    table   the dict of the module that holds it, under `key`
    hooks   the number of hooks on its gradient
    """

    path: str
    name: str
    table: dict[str, Tensor | None]
    key: str
    twin: Tensor
    hooks: int

    @property
    def now(self) -> Tensor | None:
        return self.table.get(self.key)


def _count_hooks(value: Tensor) -> int:
    return len(value._backward_hooks or ()) + len(value._post_accumulate_grad_hooks or ())


@contextlib.contextmanager
def _standing_in(
    request: Request, twins: dict[str, Tensor], steps: list[int], questions: Questions
) -> Iterator[list[_Held]]:
    """Put the twins of parameters and buffers into the modules, and the originals back at exit.

    `steps` gets the number of time steps of each recurrent layer that has fused kernels.
    """
    name_of = {id(value): name for name, value in request.originals.items()}
    held = [
        _Held(
            f"{path}.{key}" if path else key,
            name,
            table,
            key,
            twin := twins[name],
            _count_hooks(twin),
        )
        for path, part in request.module.named_modules()
        for table in (part._parameters, part._buffers)
        for key, value in table.items()
        if value is not None and (name := name_of[id(value)])
    ]
    before = [(slot.table, slot.key, slot.now) for slot in held]
    for slot in held:
        slot.table[slot.key] = slot.twin
    try:
        of_original = {id(value): twins[name] for name, value in request.originals.items()}
        with _Twins(of_original, request.chunks, steps, questions):
            yield held
    finally:
        for table, key, value in before:
            table[key] = value


def _collect_written(held: list[_Held], writable: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensors that buffers and frozen parameters hold after the step, in the order of
    `writable`: those they held before, perhaps written in place, or those assigned to them.

    Raises `TracingError` if a trained parameter was replaced or got a hook, if one was removed, or
    if two names of one buffer hold different tensors.
    """
    values: dict[str, Tensor] = {}
    for slot in held:
        if slot.name not in writable:
            if slot.now is not slot.twin:
                raise TracingError(
                    f"parameter {slot.path} is replaced while the model runs; write to a buffer"
                )
            if _count_hooks(slot.twin) != slot.hooks:
                raise TracingError(
                    f"{slot.path} gets a hook on its gradient each time that the model runs, beside"
                    " those of the steps before; register it once, when the model is made"
                )
        elif slot.now is None:
            raise TracingError(f"{slot.path} is removed while the model runs")
        elif values.setdefault(slot.name, slot.now) is not slot.now:
            raise TracingError(
                f"{slot.path} and {slot.name} are one buffer, but are given different values"
            )
    return [values[name] for name in writable]


def _gradients(
    at: _Position, loss: Any, scale: Tensor | None, leaves: list[Tensor], request: Request
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss as one number, and the gradients of the leaves.

    With a scale the gradients are those of loss x scale; the returned loss is never scaled. A
    gradient is None if the loss does not depend on the leaf. Raises `TracingError`.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LossTracingError(
            f"the loss must be one number, but is of {kind}; give `loss=`, a function "
            "loss(output, *targets) that returns a scalar"
        )
    if not loss.requires_grad:
        raise LossTracingError(
            "the loss does not depend on any trainable parameter; check requires_grad, and that "
            "nothing on the way is detached"
        )
    loss = loss.reshape(()) if loss.dim() else loss
    plain = loss
    if scale is not None:
        with _place(at, Phase.FORWARD, LOSS_MODULE):
            loss = loss * scale
    # Users run the backward pass outside of autocast, and so does this.
    with _place(at, Phase.BACKWARD), without_autocast():
        # Hooks make `at` follow the backward pass, so that a backward op has its forward op's
        # number: the sequence number of an autograd function is that of the forward op that created
        # it. Between functions autograd sums gradients; these ops get `NO_SEQUENCE`.
        name_of = {id(value): name for name, value in request.originals.items()}

        def enter(sequence: int) -> Callable[..., None]:
            def hook(_: Any) -> None:
                at.sequence = sequence

            return hook

        def leave(*_: Any) -> None:
            at.sequence = NO_SEQUENCE

        outside: list[Tensor] = []  # leaves that are not fake, so no parameters of the module
        is_custom = False
        waiting, visited = [loss.grad_fn], set()
        while waiting:
            function = waiting.pop()
            if function is None or function in visited:
                continue
            visited.add(function)
            is_custom |= isinstance(function, torch.autograd.function.BackwardCFunction)
            if type(function).__name__ == "AccumulateGrad":
                variable = function.variable
                if id(variable) in name_of:  # reached directly and not by its twin
                    raise TracingError(read_past(f"parameter {name_of[id(variable)]}"))
                if not isinstance(variable, FakeTensor):
                    outside.append(variable)
            else:
                function.register_prehook(enter(function._sequence_nr()))
                function.register_hook(leave)
            waiting += [next_function for next_function, _ in function.next_functions]
        if is_custom:
            # A reentrant checkpoint is a custom function that calls `backward` itself and refuses
            # `torch.autograd.grad`. So gradients are accumulated, and those that this adds to
            # tensors outside of the model are put back.
            others = set(outside).difference(leaves)
            before = [(other, other.grad) for other in others]
            try:
                run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
            finally:
                for other, gradient in before:
                    other.grad = gradient
            gradients = [leaf.grad for leaf in leaves]
        else:
            # A model may freeze a parameter while it runs, and autograd refuses those.
            differentiable = [leaf for leaf in leaves if leaf.requires_grad]
            # `torch.autograd.grad` calls this function. Calling `grad` itself, or
            # `Tensor.backward`, would switch off `_Twins` for ops that the backward pass computes
            # again.
            computed = run_backward(
                (loss,), (torch.ones_like(loss),), False, False, tuple(differentiable),
                allow_unreachable=True, accumulate_grad=False,
            )  # fmt: skip
            of_leaf = dict(zip(map(id, differentiable), computed, strict=True))
            gradients = [of_leaf.get(id(leaf)) for leaf in leaves]
    for gradient in gradients:
        if gradient is not None and gradient.layout != torch.strided:
            raise TracingError("a gradient is sparse; use sparse=False in embeddings")
    return plain, gradients


@contextlib.contextmanager
def _place(at: _Position, phase: Phase, module: str = "") -> Iterator[None]:
    """Set the position's phase and module within the block."""
    before = at.phase, at.module
    at.phase, at.module = phase, module
    try:
        yield
    finally:
        at.phase, at.module = before


@contextlib.contextmanager
def _module_paths(at: _Position, model: nn.Module) -> Iterator[None]:
    """Set the position's module to the path of the submodule that runs, within the block."""
    handles = []
    callers: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            callers.append(at.module)
            at.module = path

        return hook

    def leave(*_: Any) -> None:
        at.module = callers.pop()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_origins(first: Recording) -> dict[fx.Node, Origin]:
    """Return the origin of each call node of the first recording. An origin's `forward` is a node
    of the first recording too."""
    of_sequence: dict[int, fx.Node] = {}
    origins: dict[fx.Node, Origin] = {}
    for node, (phase, module, sequence) in first.marks.items():
        forward = None
        if phase == Phase.FORWARD:
            # Ops that create no autograd function carry the number of the function before them, so
            # the first op of a number is the one that created it.
            of_sequence.setdefault(sequence, node)
        else:
            forward = of_sequence.get(sequence)
            # A backward op inside another module's call belongs to a forward pass that
            # checkpointing computes again, so it is the gradient of no op.
            if forward is not None and module not in ("", origins[forward].module):
                forward = None
            elif forward is not None:
                module = origins[forward].module
        origins[node] = Origin(phase, module, forward)
    return origins


def _clean(
    request: Request,
    first: Recording,
    recording: Recording,
    origins: dict[fx.Node, Origin],
    layout: tuple[int, Any],
    made: list["weakref.ref[Tensor]"],
) -> Trace:
    """Return the trace of the pure recording of the first one.

    Raises `TracingError` if a buffer changes its shape or dtype, or if what the step writes shares
    memory with another parameter or buffer.
    """
    graph = recording.graph
    count, template = layout
    output = next(iter(reversed(graph.nodes))).args[0]
    results = fill(template, output[:count])
    end = count + len(request.trainable)
    names = zip(request.trainable, output[count:end], strict=True)
    gradients = {name: node for name, node in names if node is not None}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    sources = dict(zip(placeholders, _roles(request), strict=True))
    held = ("parameter", "buffer")
    old = {name: node for node, (role, name) in sources.items() if role in held}
    writable = [*(n for n in request.parameters if n not in request.trainable), *request.buffers]
    written = {
        name: node
        for name, node in zip(writable, output[end : end + len(writable)], strict=True)
        if node is not None and node is not old[name]
    }
    over_parameters = [n for n, node in old.items() if node.meta.pop("is_written", False)]
    written |= zip(over_parameters, output[end + len(writable) :], strict=True)
    # A parameter or buffer that shares memory with one that the step writes would change with it,
    # which a graph cannot show. Sorted by address, spans that overlap show up between neighbours.
    changed = {*request.trainable, *written}
    spans = sorted((*memory_of(value), name) for name, value in request.originals.items())
    for (_, end_address, lower), (begin_address, _, upper) in itertools.pairwise(spans):
        if 0 != begin_address < end_address and (lower in changed or upper in changed):
            raise TracingError(
                f"{lower} and {upper} share memory without being one tensor; register one tensor "
                "under both names, or clone one of them"
            )
    for name, node in written.items():
        value, before = node.meta["val"], old[name].meta["val"]
        if value.shape != before.shape or value.dtype != before.dtype:
            raise TracingError(
                f"{name} changes from {before.dtype} of shape {tuple(before.shape)} to "
                f"{value.dtype} of shape {tuple(value.shape)}; give it its full size and type at "
                "once"
            )
    constants = {
        node: recording.constants[str(node.target)] for node in graph.nodes if node.op == "get_attr"
    }
    # All that the step changed has been put back, so constants hold what the step read.
    constant_names = {id(value): name for name, value in first.constants.items()}
    for constant in constants.values():
        key = constant_names.get(id(constant))
        if key is not None and digest_of(constant) != first.digests[key]:
            raise TracingError(
                "the model writes past torch (through NumPy, a bytearray) over the memory of a "
                f"tensor of shape {tuple(constant.shape)} that it reads; compute it with torch, in "
                "a buffer that is written in place"
            )
    # An origin's forward node is one of the pure recording, or None if none is left of it. A random
    # node draws what the first node drew that draws from the same state of the generator.
    left: dict[fx.Node | None, fx.Node] = {}
    first_with: dict[int, fx.Node] = {}
    final: dict[fx.Node, Origin] = {}
    draws: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        mark = recording.marks[node]
        left.setdefault(mark, node)
        origin = origins[mark] if mark is not None else Origin(Phase.FORWARD, "", None)
        forward = left.get(origin.forward) if origin.forward is not None else None
        final[node] = origin._replace(forward=forward)
        state = first.draws.get(mark) if is_random(node.target) else None
        if state is not None:
            draws[node] = first_with.setdefault(state, node)
    return Trace(
        graph, sources, constants, final, results, gradients, written, draws, made,
        differentiates=first.differentiates,
    )  # fmt: skip


def _roles(request: Request) -> list[tuple[str, str]]:
    """Return (role, name) of each value that the step is given, in the order of its arguments."""
    return (
        [("parameter", name) for name in request.parameters]
        + [("buffer", name) for name in request.buffers]
        + [("input", f"input.{i}") for i in range(len(request.inputs))]
        + [("input", f"target.{i}") for i in range(len(request.targets))]
        + ([] if request.scale is None else [("state", SCALE)])
    )
