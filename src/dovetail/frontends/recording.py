"""Records the operators that a function calls on fake tensors, as an `fx.Graph`.

What torch's `make_fx` does, at a fraction of its cost: no proxies, no copies of values, no source
lines, no generated Python. Differences: a recorded value is the call's own result, not a snapshot
of it, so where a later call changes the layout of a value in place, the value says what became of
it; shapes are never symbolic; control flow that is itself an operator is refused.
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
    without_dispatch,
)

# Fake tensors: shape, strides and dtype without data.


def fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """The tensor's fake twin in `mode`, detached; the tensor itself if it is one already."""
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
    """The mode of the first fake tensor, or a new one."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """True if the tensor has no data."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


aten = torch.ops.aten
_NO_DEFAULT = object()
Rules = dict[OpOverload, Callable[..., Any]]


class TracingError(Exception):
    """The model cannot be traced; the message says why. Its cause, if any, has the traceback."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A graph whose nodes have their value as `meta["val"]`.

    constants   target of a get_attr node -> the tensor
    marks       what `mark()` said right before each call node was recorded
    draws       random call node -> the state of the random generator that it draws from: a
                checkpoint that computes something anew goes back to the state it had before
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
    """The operators that `function(*values)` calls below autograd. Runs it, in the fake tensor
    mode that is on; `rules` says what to call in the place of some operators.

    `outside` knows which tensors from outside must not become constants.

    Raises `TracingError`, or whatever the function raises. About 0.3 ms per operator.
    """
    recorder = _Recorder(mark, rules, outside or Outside({}))
    for index, value in enumerate(values):
        recorder.bind(recorder.graph.placeholder(f"value_{index}"), value)
    torch.clear_autocast_cache()  # what it holds was cast outside of the graph
    try:
        with recorder, torch.random.fork_rng(devices=[]), _drawing_from_torch():
            results = function(*values)
    finally:
        torch.clear_autocast_cache()
    recorder.graph.output(recorder.argument(list(results)))
    return Recording(recorder.graph, recorder.constants, recorder.marks, recorder.draws)


@contextlib.contextmanager
def _drawing_from_torch() -> Iterator[None]:
    """Raise `TracingError` if the block draws from other generators than torch's own, or seeds that
    one: the graph would draw other numbers. They are put back where they were."""
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
"""The seed of torch's generator while a step is recorded; afterwards it tells whether the model has
set another one."""


class Outside:
    """Tensors that were made before the step and must not become constants of its graph.

    owners   what a tensor is, as in "parameter a.weight" -> the tensor
    stale    identity of a tensor of the step before -> may it be a constant nevertheless?
    mode     fake tensors must not become constants, as they hold no numbers; None: they may. The
             mode tells those that the step made from those of an earlier capture
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
    """The identity of the tensor's memory; 0 for what is no tensor, or a sparse one."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return 0
    return int(value.untyped_storage()._cdata)


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """The span of addresses that the tensor's elements lie in; (0, 0) where it has none.

    A fake tensor has no address: two of one storage get spans that overlap, others none.
    """
    try:
        storage = tensor.untyped_storage()
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
    """The message about a tensor of the model's that is read past its module."""
    return (
        f"{what} is read through a tensor that shares its memory but was made before the step (an "
        "attribute, a closure, a custom autograd function or a hook that holds it); read it from "
        "its module while the model runs"
    )


def is_random(target: Any) -> bool:
    """Does the operator draw random numbers?"""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types no __init_subclass__
    supports_higher_order_operators = True  # so that they come here, to be refused

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
        # Identity of a fake tensor -> itself, which must live as long, and its value.
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        self.forms: dict[tuple[Any, Any], tuple[bool, list[Any]]] = {}
        self.constants: dict[str, Tensor] = {}
        self.marks: dict[fx.Node, Any] = {}
        # By identity: every tensor in it is kept alive, as a node's value or as a constant.
        self.node_of: dict[int, fx.Node] = {}
        self.constant_of: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].device  # half of all calls: autograd asks every tensor
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
            with self:
                return rule(*args, **kwargs)
        known = self.known_arguments(traits, args, kwargs)
        if traits.is_number and known is not None:
            with unset_fake_temporarily():
                return func(*known[0], **known[1])
        # What is lifted belongs to the graph's constants: what follows may write to a copy only.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node_args, node_kwargs = self.argument(_without_defaults(traits, args, kwargs))
        if traits.is_random and kwargs.get("generator") not in (None, torch.default_generator):
            raise TracingError(
                f"{func} draws from a generator of the model's own, where a graph has none; use "
                "torch's default one"
            )
        mark = self.mark()
        if traits.is_pure:
            result = self.remembered(target, args, kwargs)
        elif traits.is_view:
            result = self.remembered_view(target, args, kwargs)
        else:
            result = target(*args, **kwargs)
        if traits.is_number:
            return result  # the number that a constant tensor holds
        if traits.is_factory and "dtype" not in node_kwargs and isinstance(result, Tensor):
            # Without one it is torch's default, which may be another one where the graph runs.
            node_kwargs["dtype"] = result.dtype
        self.note_known(func, traits, args, known, result)
        node = self.call(target, node_args, node_kwargs)
        self.marks[node] = mark
        if traits.is_random:
            self.draws[node] = _drawn_from()
        self.bind(node, result)
        return result

    def known_arguments(
        self, traits: "_Traits", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """The arguments with real tensors for all fake ones, where those are integers that the
        model wrote as numbers, or follow from such; else None."""
        if traits.is_random:
            return None
        tensors = tensors_of((args, kwargs))
        if any(is_fake(value) and id(value) not in self.known for value in tensors):
            return None
        real = {id(value): self.known.get(id(value), (value, value))[1] for value in tensors}
        return tuple(_replaced(value, real) for value in args), _replaced(kwargs, real)

    def note_known(
        self, func: OpOverload, traits: "_Traits", args: Any, known: Any, result: Any
    ) -> None:
        """Compute with known integers (lengths, indices) beside recording what computes them:
        shapes may depend on them, as those of packed sequences do."""
        if traits.is_mutable:
            touched = {storage_of(value) for value in tensors_of(args)}
            self.known = {
                key: pair for key, pair in self.known.items() if storage_of(pair[0]) not in touched
            }
            return
        if known is None:
            return
        outputs = tensors_of(result)
        is_seed = func in (aten.lift_fresh.default, aten.arange.default, aten.arange.start)
        if not outputs or not all(map(_may_be_known, outputs)):
            return
        if not is_seed and not tensors_of(args):
            return
        with unset_fake_temporarily():
            values = func(*known[0], **known[1])
        for fake, value in zip(outputs, tensors_of(values), strict=True):
            self.known[id(fake)] = fake, value

    def remembered(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns, made from what it returned for arguments of the same form.

        Layers repeat: half of the time of a capture went into running the same fake operators.
        """
        key = _form((args, kwargs))
        form = None if key is None else self.forms.get((target, key))
        if form is not None:
            outputs = [_new_fake(*item) for item in form[1]]
            return tuple(outputs) if form[0] else outputs[0]
        result = target(*args, **kwargs)
        values = result if isinstance(result, tuple) else (result,)
        # A result may share memory with an argument although its schema does not say so. It must
        # not be made anew then, as what is written to one of them would not reach the other.
        given = {storage_of(value) for value in tensors_of((args, kwargs))} - {0}
        apart = not any(storage_of(value) in given for value in values)
        if key is not None and apart and all(map(_is_plain_fake, values)):
            mode = values[0].fake_mode
            forms = [(mode, tuple(v.shape), v.stride(), v.dtype, v.device) for v in values]
            self.forms[target, key] = isinstance(result, tuple), forms
        return result

    def remembered_view(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns, a view of its first argument, made as `remembered` does."""
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
        """A new call node. Named, as to make up a name from the target's would take longer."""
        name = f"call_{next(self.calls)}"
        return self.graph.create_node("call_function", target, args, kwargs, name)

    def bind(self, node: fx.Node, value: Any) -> None:
        """Note that the value is the node's, and its elements' are getitem nodes'."""
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self.node_of[id(value)] = node
        elif isinstance(value, (tuple, list)):
            for index, element in enumerate(value):
                if isinstance(element, (Tensor, tuple, list)):
                    self.bind(self.call(operator.getitem, (node, index), {}), element)

    def argument(self, value: Any) -> Any:
        """The value with nodes for its tensors; unknown tensors become constants."""
        if isinstance(value, Tensor):
            node = self.node_of.get(id(value))
            return self.constant(value) if node is None else node
        if isinstance(value, (tuple, list)):
            return type(value)([self.argument(element) for element in value])
        if isinstance(value, dict):
            return {key: self.argument(element) for key, element in value.items()}
        return value

    def constant(self, value: Tensor) -> fx.Node:
        """A new get_attr node; the nodes of one tensor share their name."""
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
"""The most elements of an integer tensor whose values are followed."""


def _may_be_known(value: Tensor) -> bool:
    kinds = (torch.int64, torch.int32, torch.bool)
    return value.dtype in kinds and value.device.type == "cpu" and value.numel() <= MOST_KNOWN


def _replaced(tree: Any, tensors: dict[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return tensors[id(tree)]
    if isinstance(tree, (tuple, list)):
        return type(tree)([_replaced(value, tensors) for value in tree])
    if isinstance(tree, dict):
        return {key: _replaced(value, tensors) for key, value in tree.items()}
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested arguments or results, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for value in tree for tensor in tensors_of(value)]


def _is_plain_fake(value: Any) -> bool:
    """Is it a fake tensor that its shape, strides and type tell all about?"""
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
        and value.constant is None
    )


def _form(value: Any) -> Any:
    """A key of all that a pure operator's result depends on; None where that is not known."""
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
        return type(value), value
    return None


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _new_fake(
    mode: Any, shape: Any, strides: Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A new fake tensor."""
    with without_dispatch():
        empty = aten.empty_strided.default(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, empty, device)


class _Traits(NamedTuple):
    """Properties of an operator, read from its schema once.

    is_composite   it is written in terms of others, for autograd to go through
    is_number      it returns what is inside a tensor
    is_random      it draws random numbers
    is_mutable     it writes over some of its arguments
    is_factory     it takes a dtype and no tensor
    is_pure        it reads tensors, and returns new ones of which the shape follows from theirs
    is_view        it returns a view of its first argument
    defaults       position and name of an argument -> its default, where it has one
    """

    is_composite: bool
    is_number: bool
    is_random: bool
    is_mutable: bool
    is_factory: bool
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
    aliases = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    tensors = all(str(item.type) == "Tensor" for item in schema.returns)
    pure = tensors and not (
        aliases or number or factory or torch.Tag.dynamic_output_shape in func.tags
    )
    aliased = [index for index, item in enumerate(schema.arguments) if item.alias_info is not None]
    view = tensors and len(schema.returns) == 1 and aliased == [0] and not schema.is_mutable
    if func is aten._unsafe_view.default:  # its schema does not say that it is one
        pure, view = False, True
    return _Traits(
        composite, number, is_random(func), schema.is_mutable, factory, pure, view, defaults
    )


def _drawn_from() -> bytes:
    """The state of torch's generator, which then moves on: fake tensors would leave it there."""
    state = torch.default_generator.get_state()
    with unset_fake_temporarily():
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
        torch.rand(())
    return digest


def _would_decompose(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """True unless the tensors' device has a kernel of its own, as autograd decides it."""
    if func in (aten.size.default, aten.stride.default, aten.storage_offset.default):
        return False
    return autograd_would_have_decomposed(func, pytree.tree_leaves((args, kwargs)))


def _without_defaults(
    traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments less those that are so anyhow. torch drops them before it comes here, but not
    what stands before a tensor that autograd does not have, which arrives as None."""
    count = len(args)
    while count and _is_default(traits, count - 1, args[count - 1]):
        count -= 1
    return args[:count], {k: v for k, v in kwargs.items() if not _is_default(traits, k, v)}


def _is_default(traits: _Traits, argument: int | str, value: Any) -> bool:
    default = traits.defaults.get(argument, _NO_DEFAULT)
    return default is value or (type(default) is type(value) and bool(default == value))
