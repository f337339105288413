"""Records the operators that a function calls on fake tensors, as an `fx.Graph`.

It does what torch's `make_fx` does at a fraction of the cost: it makes no proxies, no copies of
values, no source lines and no Python code.

Differences: A recorded value is the call's own result and not a snapshot of it. If a later call
changes the value's layout in place, the value has the new layout. Shapes are never symbolic.
Control flow that is itself an operator is refused.
"""

import contextlib
import functools
import hashlib
import itertools
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from dovetail.runtime.torch_versions import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    autograd_would_have_decomposed,
    has_composite_kernel,
    in_kernel_invocation_manager,
    pytree,
    unset_fake_temporarily,
    with_real_forms,
    without_dispatch,
)

# Fake tensors, which have a shape, strides and a dtype but no data.


def fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a detached fake twin of the tensor in `mode`. A tensor that is fake in `mode` already
    is only detached."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor.detach()
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        device = "cpu" if tensor.is_meta else tensor.device
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
    return mode.from_tensor(tensor.detach())


def fake_mode_of(tensors: Sequence[Tensor]) -> FakeTensorMode:
    """Return the mode of the first fake tensor, or a new mode if none is fake."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """Return True if the tensor has no data: a fake tensor, or one on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


aten = torch.ops.aten
_NO_DEFAULT = object()
Rules = dict[OpOverload, Callable[..., Any]]
"""Operator -> the function that is called instead of it."""


class TracingError(Exception):
    """Says in its message why the model cannot be traced. Its cause, if any, has the traceback."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A graph whose nodes have their value as `meta["val"]`.

    constants   target of a get_attr node -> the tensor
    marks       call node -> the value of `mark()` right before the call ran
    draws       random call node -> a digest of the generator's state that it draws from. A
                checkpoint that computes a draw again restores the state, so both digests are equal
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    marks: dict[fx.Node, Any]
    draws: dict[fx.Node, bytes]


def record(
    function: Callable[..., Sequence[Any]],
    values: Sequence[Tensor],
    mark: Callable[[], Any],
    rules: Rules,
    outside: "Outside | None" = None,
) -> Recording:
    """Run `function(*values)` and return a recording of the operators that it calls below autograd.

    The caller turns the fake tensor mode on. `mark` is called before each operator, and `rules`
    replace some operators. `outside` refuses the tensors from before the step that must not become
    constants.

    Raises `TracingError`, or whatever the function raises. Takes about 0.3 ms per operator.
    """
    recorder = _Recorder(mark, rules, outside or Outside({}))
    for index, value in enumerate(values):
        recorder.bind(recorder.graph.placeholder(f"value_{index}"), value)
    # Autocast caches casts of parameters. One from before the step is no op of the graph, and one
    # from this step is fake and of no use after it. So the cache is cleared before and after.
    torch.clear_autocast_cache()
    try:
        with recorder, torch.random.fork_rng(devices=[]), _drawing_from_torch():
            results = function(*values)
    finally:
        torch.clear_autocast_cache()
    recorder.graph.output(recorder.argument(list(results)))
    return Recording(recorder.graph, recorder.constants, recorder.marks, recorder.draws)


@contextlib.contextmanager
def _drawing_from_torch() -> Iterator[None]:
    """Raise `TracingError` if the block draws from Python's or numpy's generator, or seeds torch's.

    The graph could not repeat such draws. Python's and numpy's generators are put back.
    """
    python, numpy_ = random.getstate(), np.random.get_state()  # noqa: NPY002  the one in use
    # `torch.manual_seed` would seed the generators of all accelerators too, which nobody restores.
    torch.default_generator.manual_seed(_SEED)
    try:
        yield
        if random.getstate() != python:
            source = "Python's random"
        elif str(np.random.get_state()) != str(numpy_):  # noqa: NPY002
            source = "numpy.random"
        elif torch.default_generator.initial_seed() != _SEED:
            raise TracingError(
                "the model sets torch's seed while it runs; a step draws by its own seed, so leave "
                "it out, or give what is to stay the same as a buffer"
            )
        else:
            return
        raise TracingError(
            f"the model draws from {source}, which would be drawn once for all steps; use torch's "
            "random functions and torch.where, or give the number as an input"
        )
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)  # noqa: NPY002


_SEED = 0x5EED_0F_D0E7A11
"""The seed of torch's generator while a step is recorded. If the generator has another seed
afterwards, the model has set one."""


class Outside:
    """Knows the tensors that were made before the step and must not become constants of its graph.

    owners   description, such as "parameter a.weight" -> the tensor
    stale    identity of a tensor of the step before -> True if it may be a constant nevertheless
    mode     the fake tensor mode of this capture: fake tensors must not become constants, because
             they hold no numbers. The mode tells tensors of this capture from those of an earlier
             one. None: fake tensors may become constants
    """

    def __init__(
        self,
        owners: Mapping[str, Tensor],
        stale: Mapping[int, bool] = MappingProxyType({}),
        mode: Any = None,
    ) -> None:
        self.stale = stale
        self.mode = mode
        self.spans = sorted((*memory_of(value), what) for what, value in owners.items())

    def check(self, value: Tensor) -> None:
        """Raise `TracingError` if the tensor is stale or shares memory with an owner."""
        begin, end = memory_of(value)
        for other_begin, other_end, what in self.spans:
            # The spans are sorted by their begin, so no later one overlaps either.
            if other_begin >= end:
                break
            if begin < other_end:
                raise TracingError(read_past(what))
        if self.stale.get(id(value), False):
            return
        if self.mode is not None and isinstance(value, FakeTensor):
            if value.fake_mode is not self.mode:
                raise TracingError(
                    "the model reads a tensor without numbers that an earlier capture has left, in "
                    "a cached function or a global variable; clear it (cache_clear), and let "
                    "modules keep what they compute"
                )
            raise TracingError(
                "a step reads what the step before has left in an attribute of a module; keep it "
                "in a buffer, written in place, or take it as an input and return it"
            )


def storage_of(value: Any) -> int:
    """Return the identity of the tensor's storage; 0 for a sparse tensor or another value."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return 0
    return int(value.untyped_storage()._cdata)


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return (begin, end) of the addresses of the tensor's elements; (0, 0) if it has no address.

    A fake tensor has no address. It gets an invented span: spans of two fake tensors can overlap
    only if both are of one storage.
    """
    try:
        storage = tensor.untyped_storage()
        # Invented addresses are negative, so they never meet real ones, and 2^64 apart, so that the
        # spans of different storages never meet.
        begin = -int(storage._cdata) << 64 if is_fake(tensor) else storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, quantised, ...
        return 0, 0
    if not tensor.numel() or not begin:
        return 0, 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in sizes) + 1
    width = tensor.element_size()
    begin += int(tensor.storage_offset()) * width
    return begin, begin + reach * width


def read_past(what: str) -> str:
    """Return the message for a tensor of the model that the step reads from somewhere other than
    its module."""
    return (
        f"{what} is read through a tensor that shares its memory but was made before the step (an "
        "attribute, a closure, a custom autograd function or a hook that holds it); read it from "
        "its module while the model runs"
    )


def is_random(target: Any) -> bool:
    """Return True if the operator draws random numbers.

    The kernel of CPUs for attention, which torch counts among these, refuses to drop anything."""
    if target is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return False
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types no __init_subclass__
    """Records each operator that comes below autograd, while the mode is on."""

    # Operators that are control flow come here too, so that they can be refused.
    supports_higher_order_operators = True

    def __init__(
        self,
        mark: Callable[[], Any],
        rules: Rules,
        outside: "Outside",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mark = mark
        self.rules = rules
        self.outside = outside
        self.draws: dict[fx.Node, bytes] = {}
        self.graph = fx.Graph()
        self.calls = itertools.count()
        # Identity of a fake tensor whose integers are known -> (the tensor, its value). The tensor
        # is held so that its identity is not given to another one.
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        # (operator, form of its arguments) -> form of its results: see `remembered`.
        self.forms: dict[tuple[Any, Any], tuple[bool, list[Any]]] = {}
        self.constants: dict[str, Tensor] = {}
        self.marks: dict[fx.Node, Any] = {}
        # Keys are identities. They stay unique, because every tensor here is kept alive as a node's
        # value or as a constant.
        self.node_of: dict[int, fx.Node] = {}
        self.constant_of: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            # Half of all calls are this one, because autograd asks every tensor for its device. So
            # it is answered first.
            return args[0].device
        if not isinstance(func, OpOverload):
            raise TracingError(
                f"the model has control flow that is part of the graph ({func}); write it with "
                "torch.where"
            )
        traits = _traits(func)
        rule = self.rules.get(func)
        if rule is None and traits.is_composite and _would_decompose(func, args, kwargs):
            rule = func.decompose
        if rule is not None:
            # torch switches this mode off inside this method; the rule's own operators must come
            # here too.
            with self:
                return rule(*args, **kwargs)
        known_args = self.known_arguments(traits, args, kwargs)
        if traits.is_number and known_args is not None:
            with unset_fake_temporarily():
                return func(*known_args[0], **known_args[1])
        # A lifted tensor becomes a constant of the graph. Later ops may write over it, so they get
        # a copy.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node_args, node_kwargs = self.argument(_without_defaults(traits, args, kwargs))
        if traits.is_random and kwargs.get("generator") not in (None, torch.default_generator):
            raise TracingError(
                f"{func} draws from a generator of the model's own, where a graph has none; use "
                "torch's default one"
            )
        mark = self.mark()
        if traits.is_view:
            result = self.remembered_view(target, args, kwargs)
        else:
            result = self.remembered(target, traits, args, kwargs)
        if traits.is_number:
            # A number that a constant tensor holds is itself constant and needs no node.
            return result
        if traits.is_factory and "dtype" not in node_kwargs and isinstance(result, Tensor):
            # Without a dtype the op would use torch's default, which may differ where the graph
            # runs.
            node_kwargs["dtype"] = result.dtype
        self.note_known(func, traits, args, known_args, result)
        node = self.call(target, node_args, node_kwargs)
        self.marks[node] = mark
        if traits.is_random:
            self.draws[node] = _digest_generator()
        self.bind(node, result)
        return result

    def known_arguments(
        self, traits: "_Traits", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Return the arguments with real tensors in place of fake ones, or None.

        It returns None unless the integers of every fake tensor are known: the model wrote them as
        numbers, or they follow from such numbers.
        """
        if traits.is_random:
            return None
        tensors = tensors_of((args, kwargs))
        if any(is_fake(value) and id(value) not in self.known for value in tensors):
            return None
        real = {id(value): self.known.get(id(value), (value, value))[1] for value in tensors}
        real_args = tuple(_replace_tensors(value, real) for value in args)
        return real_args, _replace_tensors(kwargs, real)

    def note_known(
        self, func: OpOverload, traits: "_Traits", args: Any, known_args: Any, result: Any
    ) -> None:
        """Compute the op's integers (lengths, indices) for real, where they are known.

        Shapes may depend on them, as those of packed sequences do. The op is recorded all the same.
        """
        if traits.is_mutable:
            # The op may have changed what is in this memory, so its integers are no longer known.
            touched = {storage_of(value) for value in tensors_of(args)}
            self.known = {
                key: pair for key, pair in self.known.items() if storage_of(pair[0]) not in touched
            }
            return
        if known_args is None:
            return
        outputs = tensors_of(result)
        is_seed = func in (aten.lift_fresh.default, aten.arange.default, aten.arange.start)
        if not outputs or not all(map(_may_be_known, outputs)):
            return
        if not is_seed and not tensors_of(args):
            return
        with unset_fake_temporarily():
            values = func(*known_args[0], **known_args[1])
        for fake, value in zip(outputs, tensors_of(values), strict=True):
            self.known[id(fake)] = fake, value

    def remembered(
        self, target: Any, traits: "_Traits", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of an operator; that of a pure one is made from its result for
        arguments of the same form where there was one.

        Layers repeat: running the same fake operators again took half of the time of a capture.
        """
        key = _form((args, kwargs)) if traits.is_pure else None
        form = None if key is None else self.forms.get((target, key))
        if form is not None:
            outputs = [_new_fake(*item) for item in form[1]]
            return tuple(outputs) if form[0] else outputs[0]
        result = target(*args, **kwargs)
        if not traits.is_fresh:
            return result
        result = with_real_forms(target, args, kwargs, result)
        values = result if isinstance(result, tuple) else (result,)
        # A result may share memory with an argument although its schema does not say so, or two
        # results may be one tensor. Then a remembered result would be wrong: it has memory of its
        # own, so writes to one of the two would not reach the other.
        given = {storage_of(value) for value in tensors_of((args, kwargs))} - {0}
        storages = [storage_of(value) for value in values]
        apart = given.isdisjoint(storages) and len(set(storages)) == len(storages)
        if key is not None and apart and all(map(_is_plain_fake, values)):
            mode = values[0].fake_mode
            forms = [(mode, tuple(v.shape), v.stride(), v.dtype, v.device) for v in values]
            self.forms[target, key] = isinstance(result, tuple), forms
        return result

    def remembered_view(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator that makes a view of its first argument, as `remembered`
        does for pure operators."""
        whole = args[0]
        form = _form((args, kwargs))
        if form is None:
            return target(*args, **kwargs)
        key = target, (form, whole.storage_offset())
        if key in self.forms:
            mode, device, *place = self.forms[key][1]
            with in_kernel_invocation_manager(mode):
                view = aten.as_strided.default(whole, *place)
            return FakeTensor(mode, view, device)
        result = target(*args, **kwargs)
        if result is not whole and _is_plain_fake(result):
            where = tuple(result.shape), result.stride(), result.storage_offset()
            if storage_of(result) == storage_of(whole) and result.dtype == whole.dtype:
                self.forms[key] = False, [result.fake_mode, result.device, *where]
        return result

    def call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Return a new call node. It is given a name, because torch would take longer to derive one
        from the target."""
        name = f"call_{next(self.calls)}"
        return self.graph.create_node("call_function", target, args, kwargs, name)

    def bind(self, node: fx.Node, value: Any) -> None:
        """Note that the node has this value, and make a getitem node for each of its elements that
        is a tensor, tuple or list."""
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self.node_of[id(value)] = node
        elif isinstance(value, (tuple, list)):
            for index, element in enumerate(value):
                if isinstance(element, (Tensor, tuple, list)):
                    self.bind(self.call(operator.getitem, (node, index), {}), element)

    def argument(self, value: Any) -> Any:
        """Return the argument with nodes in place of its tensors; unknown ones become constants."""
        if isinstance(value, Tensor):
            node = self.node_of.get(id(value))
            return self.constant(value) if node is None else node
        if isinstance(value, (tuple, list)):
            return type(value)([self.argument(element) for element in value])
        if isinstance(value, dict):
            return {key: self.argument(element) for key, element in value.items()}
        return value

    def constant(self, value: Tensor) -> fx.Node:
        """Return a new get_attr node for a tensor from outside; all nodes of one tensor have one
        target. Raises `TracingError` if `outside` refuses the tensor."""
        if id(value) not in self.constant_of:
            self.outside.check(value)
            kind = "param" if isinstance(value, nn.Parameter) else "tensor"
            taken = sum(name.startswith(f"_{kind}") for name in self.constants)
            self.constant_of[id(value)] = name = f"_{kind}_constant{taken}"
            self.constants[name] = value
        node = self.graph.create_node("get_attr", self.constant_of[id(value)])
        node.meta["val"] = value
        return node


MOST_KNOWN = 4096
"""Integers of a tensor with at most this many elements are computed while a step is recorded."""


def _may_be_known(value: Tensor) -> bool:
    kinds = (torch.int64, torch.int32, torch.bool)
    return value.dtype in kinds and value.device.type == "cpu" and value.numel() <= MOST_KNOWN


def _replace_tensors(tree: Any, tensors: dict[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return tensors[id(tree)]
    if isinstance(tree, (tuple, list)):
        return type(tree)([_replace_tensors(value, tensors) for value in tree])
    if isinstance(tree, dict):
        return {key: _replace_tensors(value, tensors) for key, value in tree.items()}
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for value in tree for tensor in tensors_of(value)]


def _is_plain_fake(value: Any) -> bool:
    """Return True for a fake tensor that its shape, strides, dtype and device describe in full."""
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
        and value.constant is None
    )


def _form(value: Any) -> Any:
    """Return a key of all that the form of a pure operator's result depends on, or None where that
    is not known."""
    if isinstance(value, Tensor):
        if not _is_plain_fake(value):
            return None
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        parts = [_form(element) for element in value]
        return None if None in parts else (type(value), *parts)
    if isinstance(value, dict):
        return _form([part for item in sorted(value.items()) for part in item])
    if value is None or isinstance(value, _PLAIN):
        # The type is part of the key, because 1, 1.0 and True are equal but give other dtypes.
        return type(value), value
    return None


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _new_fake(
    mode: Any, shape: Any, strides: Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a new fake tensor of this form in fresh memory."""
    with without_dispatch():
        empty = aten.empty_strided.default(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, empty, device)


class _Traits(NamedTuple):
    """Properties of an operator, read from its schema once.

    is_composite   it is written in terms of others, which autograd goes through
    is_number      it returns a number that depends on a tensor's elements
    is_random      it draws random numbers
    is_mutable     it writes over some of its arguments
    is_factory     it takes a dtype and no tensor
    is_fresh       it returns new tensors, whose shapes follow from the arguments
    is_pure        it reads tensors, and does nothing but return new ones as above
    is_view        it returns a view of its first argument
    defaults       position and name of an argument -> its default, where it has one
    """

    is_composite: bool
    is_number: bool
    is_random: bool
    is_mutable: bool
    is_factory: bool
    is_fresh: bool
    is_pure: bool
    is_view: bool
    defaults: dict[int | str, Any]


@functools.cache
def _traits(func: OpOverload) -> _Traits:
    composite = has_composite_kernel(func)
    defaults: dict[int | str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.has_default_value():
            defaults[position] = defaults[argument.name] = argument.default_value
    number = torch.Tag.data_dependent_output in func.tags
    schema = func._schema
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    factory = "dtype" in kinds and not any("Tensor" in kind for kind in kinds.values())
    returns = [str(item.type) for item in schema.returns]
    tensors = bool(returns) and set(returns) == {"Tensor"}
    fresh = tensors and not (
        any(item.alias_info is not None for item in schema.returns)
        or number
        or factory
        or torch.Tag.dynamic_output_shape in func.tags
    )
    pure = fresh and all(argument.alias_info is None for argument in schema.arguments)
    aliased = [index for index, item in enumerate(schema.arguments) if item.alias_info is not None]
    view = tensors and len(schema.returns) == 1 and aliased == [0] and not schema.is_mutable
    if func is aten._unsafe_view.default:  # its schema does not say that it returns a view
        fresh, pure, view = False, False, True
    return _Traits(
        composite, number, is_random(func), schema.is_mutable, factory, fresh, pure, view, defaults
    )


def _digest_generator() -> bytes:
    """Return a digest of the state of torch's generator, and move the generator on.

    A random op on fake tensors does not move it, so two different draws would have one digest.
    """
    state = torch.default_generator.get_state()
    with unset_fake_temporarily():
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
        torch.rand(())
    return digest


def _would_decompose(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return True if autograd would run the operator by its parts, because the tensors' device has
    no kernel of its own for it."""
    if func in (aten.size.default, aten.stride.default, aten.storage_offset.default):
        return False
    return autograd_would_have_decomposed(func, pytree.tree_leaves((args, kwargs)))


def _without_defaults(
    traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without those at the end that have their default value.

    torch itself drops them before a call comes here, but keeps those that stand before an optional
    tensor, which arrives as None.
    """
    count = len(args)
    while count and _is_default(traits, count - 1, args[count - 1]):
        count -= 1
    return args[:count], {k: v for k, v in kwargs.items() if not _is_default(traits, k, v)}


def _is_default(traits: _Traits, argument: int | str, value: Any) -> bool:
    default = traits.defaults.get(argument, _NO_DEFAULT)
    return default is value or (type(default) is type(value) and bool(default == value))
