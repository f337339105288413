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
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from dovetail.frontends.checks import CHECK, Questions, TracingError
from dovetail.runtime.setup import float32_by_default
from dovetail.runtime.torch_versions import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    autograd_would_have_decomposed,
    fake_twin,
    has_composite_kernel,
    in_kernel_invocation_manager,
    laid_out_as_run,
    new_fake_mode,
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
    return fake_twin(tensor.detach(), mode)


def fake_mode_of(tensors: Sequence[Tensor]) -> FakeTensorMode:
    """Return the mode of the first fake tensor, or a new mode if none is fake."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return new_fake_mode()


def is_fake(tensor: Tensor) -> bool:
    """Return True if the tensor has no data: a fake tensor, or one on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


aten = torch.ops.aten
_NO_DEFAULT = object()
Rules = dict[OpOverload, Callable[..., Any]]
"""Operator -> the function that is called instead of it, unless that returns NotImplemented."""


INSTEAD_OF_FLEX = "use scaled_dot_product_attention with attn_mask="
_INITIAL_SEED = torch.initial_seed


@dataclass(frozen=True, eq=False)
class Recording:
    """A graph whose nodes have their value as `meta["val"]`.

    constants   target of a get_attr node -> the tensor
    digests     target of a get_attr node -> a digest of the tensor's memory when it was first read,
                or b"" where it has no memory that can be read. NumPy may write there, too, so the
                tensor itself does not tell what it was
    marks       call node -> the value of `mark()` right before the call ran
    draws       random call node -> the number of the generator's state that it draws from. A
                checkpoint that computes a draw again restores the state, so both numbers are equal
    drawn       number of the generator's state -> (the state after it, in which the op ran; what
                was drawn). Only a recording on real tensors has it
    differentiates   autograd noted some ops
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    digests: dict[str, bytes]
    marks: dict[fx.Node, Any]
    draws: dict[fx.Node, int]
    drawn: dict[int, tuple[Tensor, Any]]
    differentiates: bool


def record(  # noqa: PLR0917  what runs, and what its run is told
    function: Callable[..., Sequence[Any]],
    values: Sequence[Tensor],
    mark: Callable[[], Any],
    rules: Rules,
    outside: "Outside | None" = None,
    questions: Questions | None = None,
    seed: int | None = None,
    made: "list[weakref.ref[Tensor]] | None" = None,
) -> Recording:
    """Run `function(*values)` and return a recording of the operators that it calls below autograd.

    The caller turns the fake tensor mode on. `mark` is called before each operator, and `rules`
    replace some operators. `outside` refuses the tensors from before the step that must not become
    constants. `questions` answer what the function asks of data. `seed` seeds torch's generator,
    and is given where the values are real tensors. `made` gets weak references to the fake tensors,
    also if the function raises.

    Raises `TracingError`, or whatever the function raises. Takes about 0.3 ms per operator.
    """
    recorder = _Recorder(mark, rules, outside or Outside({}), questions, seed is None)
    for index, value in enumerate(values):
        recorder.bind(recorder.graph.placeholder(f"value_{index}"), value)
    # Autocast caches casts of parameters. One from before the step is no op of the graph, and one
    # from this step is fake and of no use after it. So the cache is cleared before and after.
    torch.clear_autocast_cache()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            _drawing_from_torch(next(SEEDS) if seed is None else seed),
        ):
            recorder.note_state()
            with recorder:
                results = function(*values)
            # A generator that is put back would give the same numbers in each step.
            recorder.check_state(len(recorder.states) - 1)
    finally:
        torch.clear_autocast_cache()
        if made is not None:
            made += references(recorder.graph)
    recorder.graph.output(recorder.argument(list(results)))
    return Recording(
        recorder.graph, recorder.constants, recorder.digests, recorder.marks, recorder.draws,
        recorder.drawn, recorder.differentiates,
    )  # fmt: skip


def references(graph: fx.Graph) -> list["weakref.ref[Tensor]"]:
    """Return weak references to the fake tensors that the graph's calls have made."""
    values = (node.meta["val"] for node in graph.nodes if node.op == "call_function")
    return [weakref.ref(value) for value in values if isinstance(value, FakeTensor)]


@contextlib.contextmanager
def _drawing_from_torch(seed: int) -> Iterator[None]:
    """Raise `TracingError` if the block draws from Python's or numpy's generator, or reads torch's
    seed.

    The graph could not repeat such draws. Python's and numpy's generators are put back.
    """

    recording = threading.get_ident()

    def refuse(*_: Any) -> int:
        if threading.get_ident() != recording:
            return torch.default_generator.initial_seed()
        raise TracingError(
            "the model reads torch's seed (initial_seed), but a step draws by its own seed; give "
            "the number to the model when it is made"
        )

    python, numpy_ = random.getstate(), np.random.get_state()  # noqa: NPY002  the one in use
    # `torch.manual_seed` would seed the generators of all accelerators too, which nobody restores.
    torch.default_generator.manual_seed(seed)
    torch.initial_seed = torch.random.initial_seed = refuse
    try:
        yield
        if random.getstate() != python:
            source = "Python's random"
        elif str(np.random.get_state()) != str(numpy_):  # noqa: NPY002
            source = "numpy.random"
        else:
            return
        raise TracingError(
            f"the model draws from {source}, which would be drawn once for all steps; use torch's "
            "random functions and torch.where, or give the number as an input"
        )
    finally:
        torch.initial_seed = torch.random.initial_seed = _INITIAL_SEED
        random.setstate(python)
        np.random.set_state(numpy_)  # noqa: NPY002


SEEDS = itertools.count(0x5EED_0F_D0E7A11)
"""The seeds of torch's generator while steps are recorded. Each has another one, so that a step
that depends on it differs from the next."""


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


def digest_of(tensor: Tensor) -> bytes:
    """Return a digest of the tensor's elements; b"" for a tensor without memory to be read."""
    if is_fake(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return b""
    with unset_fake_temporarily(), without_dispatch():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        elements: Any = plain.view(torch.uint8).numpy()
        return hashlib.blake2b(elements, digest_size=16).digest()


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


def _no_rule(*_: Any, **__: Any) -> Any:
    return NotImplemented


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types no __init_subclass__
    """Records each operator that comes below autograd, while the mode is on."""

    # Operators that are control flow come here too, so that they can be refused.
    supports_higher_order_operators = True

    def __init__(
        self,
        mark: Callable[[], Any],
        rules: Rules,
        outside: "Outside",
        questions: Questions | None = None,
        is_fake: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_fake = is_fake
        self.mark = mark
        self.rules = rules
        self.outside = outside
        self.questions = questions
        # Identity of a tensor whose truth was asked for -> the answer.
        self.answers: dict[int, bool] = {}
        self.draws: dict[fx.Node, int] = {}
        self.drawn: dict[int, tuple[Tensor, Any]] = {}
        self.differentiates = False
        # Digest of a state of torch's generator that draws of this step have led to -> its number.
        self.states: dict[bytes, int] = {}
        self.graph = fx.Graph()
        self.calls = itertools.count()
        # Identity of a fake tensor whose numbers are known -> (the tensor, its value). The tensor
        # is held so that its identity is not given to another one.
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        # (operator, form of its arguments) -> form of its results: see `remembered`.
        self.forms: dict[tuple[Any, Any], tuple[bool, list[Any]]] = {}
        # (operator, form of its arguments) -> the view's (mode, device, shape, strides, offset).
        self.views: dict[Any, tuple[Any, ...]] = {}
        self.constants: dict[str, Tensor] = {}
        self.digests: dict[str, bytes] = {}
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
            is_flex = "flex_attention" in str(func)
            cure = INSTEAD_OF_FLEX if is_flex else "write it with torch.where"
            raise TracingError(
                f"the model has control flow that is part of the graph ({func}); {cure}"
            )
        if not self.differentiates and torch.is_grad_enabled():
            self.differentiates = any(value.requires_grad for value in tensors_of((args, kwargs)))
        traits = _traits(func)
        rule = self.rules.get(func, _no_rule)
        # Autograd runs an operator by its parts where the tensors' device has no kernel for it.
        if (
            rule is _no_rule
            and traits.is_composite
            and func not in _ASKING_FOR_FORM
            and autograd_would_have_decomposed(func, pytree.tree_leaves((args, kwargs)))
        ):
            rule = func.decompose
        # torch switches this mode off inside this method; the rule's own operators must come here
        # too.
        with self:
            result = rule(*args, **kwargs)
        if result is not NotImplemented:
            return result
        is_usual = torch.get_default_dtype() == torch.float32
        if not is_usual and _goes_by_default(func, traits, args, kwargs):
            with self:
                whole_args, whole_kwargs = _cast_whole(args, kwargs)
                return func(*whole_args, **whole_kwargs)
        known_args = self.known_arguments(traits, args, kwargs) if self.is_fake else None
        if (
            self.is_fake
            and traits.is_number
            and (number := self.number(func, args, known_args)) is not None
        ):
            return number
        # A lifted tensor becomes a constant of the graph. Later ops may write over it, so they get
        # a copy.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node_args, node_kwargs = self.argument(_without_defaults(traits, args, kwargs))
        draw = self.draw(func, kwargs) if traits.is_random else None
        mark = self.mark()
        # `draw` has moved the generator on, and an op on real tensors would move it further.
        drawing: Any = contextlib.nullcontext()
        if traits.is_random:
            drawing = torch.random.fork_rng(devices=[])
        with drawing, laid_out_as_run(target):
            if not self.is_fake:
                result = target(*args, **kwargs)
            elif traits.is_view:
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
        self.note_known(func, traits, (args, kwargs), known_args, result)
        node = self.call(target, node_args, node_kwargs)
        self.marks[node] = mark
        if draw is not None:
            self.draws[node] = draw
            if not self.is_fake:
                state = torch.default_generator.get_state()
                self.drawn[draw] = state, pytree.tree_map_only(Tensor, torch.clone, result)
        self.bind(node, result)
        return result

    def draw(self, func: OpOverload, kwargs: dict[str, Any]) -> int:
        """Return the number of the state that a random op draws from, and move the generator on: an
        op on fake tensors does not."""
        if kwargs.get("generator") not in (None, torch.default_generator):
            raise TracingError(
                f"{func} draws from a generator of the model's own, where a graph has none; use "
                "torch's default one"
            )
        number = self.check_state()
        with unset_fake_temporarily(), without_dispatch():
            torch.rand(())
        self.note_state()
        return number

    def note_state(self) -> None:
        """Note that the generator is in a state that this step may draw from."""
        self.states.setdefault(_digest_generator(), len(self.states))

    def check_state(self, expected: int | None = None) -> int:
        """Return the number of the generator's state. Raises `TracingError` for a state that the
        draws of this step have not led to, or that is not the expected one."""
        number = self.states.get(_digest_generator())
        if number is None or expected not in (None, number):
            raise TracingError(
                "the model sets torch's seed or the state of its generator while it runs; a step "
                "draws by its own seed, so leave it out, or give what is to stay the same as a "
                "buffer"
            )
        return number

    def known_arguments(
        self, traits: "_Traits", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Return the arguments with real tensors in place of fake ones, or None.

        It returns None unless the numbers of every fake tensor are known: the model wrote them, or
        they follow from such numbers.
        """
        if traits.is_random or traits.is_unset:
            return None
        if traits.is_fill and is_fake(args[0]):
            # Only the form of this argument matters.
            like = args[0]
            with unset_fake_temporarily():
                form = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device="meta"
                )
            return (form, *args[1:]), {"device": like.device, **kwargs}
        tensors = tensors_of((args, kwargs))
        if any(is_fake(value) and id(value) not in self.known for value in tensors):
            return None
        real = {id(value): self.known.get(id(value), (value, value))[1] for value in tensors}
        real_args = tuple(_replace_tensors(value, real) for value in args)
        return real_args, _replace_tensors(kwargs, real)

    def number(self, func: OpOverload, args: tuple[Any, ...], known_args: Any) -> Any:
        """Return the number that the op reads from known tensors, or the truth with which the model
        goes on, of which a check is recorded; else None."""
        if known_args is None:
            if func is not aten._local_scalar_dense.default or args[0].dtype != torch.bool:
                return None
            asked = args[0]
            if self.questions is None or id(asked) in self.answers:
                return self.answers.get(id(asked))
            guess = self.guess(self.node_of.get(id(asked)))
            answered = self.questions.ask(asked, guess, record.__code__)
            if answered is None:  # the question is refused
                return None
            place, answer = answered
            if place >= 0:
                with self:
                    # The error that it raises is known once the other answer has been tried.
                    CHECK(asked, answer, "", str(place))
            self.answers[id(asked)] = answer
            return answer
        for value in tensors_of(args):
            if not is_fake(value):
                self.outside.check(value)
        with unset_fake_temporarily():
            return func(*known_args[0], **known_args[1])

    def guess(self, node: fx.Node | None) -> bool:
        """Return the more likely truth: models check that all is well, or that nothing is not."""
        target = None if node is None else node.target
        if target is aten.logical_not.default or target is aten.bitwise_not.default:
            return not self.guess(node.args[0])  # type: ignore[union-attr, arg-type]
        return getattr(target, "overloadpacket", None) not in (aten.any, aten._is_any_true)

    def note_known(
        self, func: OpOverload, traits: "_Traits", given: Any, known_args: Any, result: Any
    ) -> None:
        """Compute the op's numbers for real, where they are known.

        given   the op's (args, kwargs)

        Shapes may depend on them, as those of packed sequences do, and so may branches. The op is
        recorded all the same.
        """
        if traits.is_mutable:
            self.answers.clear()
            # The op may have changed what is in this memory, so its numbers are no longer known.
            touched = {storage_of(value) for value in tensors_of(given)}
            self.known = {
                key: pair for key, pair in self.known.items() if storage_of(pair[0]) not in touched
            }
            return
        if known_args is None:
            return
        outputs = tensors_of(result)
        if not outputs or not all(
            value.layout is torch.strided
            and value.device.type == "cpu"
            and value.numel() <= MOST_KNOWN
            for value in outputs
        ):
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
            outputs = []
            for mode, shape, strides, dtype, device in form[1]:
                with without_dispatch():
                    empty = aten.empty_strided.default(shape, strides, dtype=dtype, device="meta")
                outputs.append(FakeTensor(mode, empty, device))
            return tuple(outputs) if form[0] else outputs[0]
        result = _FORMS.get(target, target)(*args, **kwargs)
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
        if key in self.views:
            mode, device, *place = self.views[key]
            with in_kernel_invocation_manager(mode):
                view = aten.as_strided.default(whole, *place)
            return FakeTensor(mode, view, device)
        result = target(*args, **kwargs)
        if result is not whole and _is_plain_fake(result):
            where = tuple(result.shape), result.stride(), result.storage_offset()
            if storage_of(result) == storage_of(whole) and result.dtype == whole.dtype:
                self.views[key] = result.fake_mode, result.device, *where
        return result

    def call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Return a new call node. It is given a name, because torch would take longer to derive one
        from the target."""
        if self.questions is not None:
            self.questions.called()
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
            self.digests[name] = digest_of(value)
        node = self.graph.create_node("get_attr", self.constant_of[id(value)])
        node.meta["val"] = value
        return node


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """Return fake results of `_ctc_loss`, which torch refuses since their shape follows from the
    lengths."""
    steps, batch = log_probs.shape[0], len(input_lengths)
    states = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, states)


_FORMS: dict[OpOverload, Callable[..., Any]] = {aten._ctc_loss.default: _ctc_loss}
"""Operator -> a function that returns its results on fake tensors."""
MOST_KNOWN = 4096
"""Numbers of a tensor with at most this many elements are computed while a step is recorded, if
they follow from constants alone."""


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
    is_unset       it returns memory that was not written
    is_fill        its first argument gives the result a form and no numbers
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
    is_unset: bool
    is_fill: bool
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
    name = func.overloadpacket.__name__
    return _Traits(
        composite, number, is_random(func), schema.is_mutable, factory, fresh, pure, view,
        "empty" in name, name in _FILLS, defaults,
    )  # fmt: skip


_ASKING_FOR_FORM = (aten.size.default, aten.stride.default, aten.storage_offset.default)
_FILLS = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")


def _digest_generator() -> bytes:
    state = torch.default_generator.get_state()
    with unset_fake_temporarily():
        numbers: Any = state.numpy()
        return hashlib.blake2b(numbers, digest_size=16).digest()


def _goes_by_default(func: OpOverload, traits: _Traits, args: Any, kwargs: Any) -> bool:
    """Return True if the operator makes whole numbers floating by torch's default dtype, which is
    another one where the graph runs. Factories state theirs."""
    given = tensors_of((args, kwargs))
    floats = any(value.is_floating_point() or value.is_complex() for value in given)
    if not given or floats or traits.is_view or traits.is_mutable or traits.is_number:
        return False
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
        metas = {id(value): torch.empty_like(value, device="meta") for value in given}
        meta_args, meta_kwargs = _replace_tensors((args, kwargs), metas)
        try:
            here = tensors_of(func(*meta_args, **meta_kwargs))
            with float32_by_default():
                there = tensors_of(func(*meta_args, **meta_kwargs))
        except NotImplementedError:  # the shapes of its results follow from data
            return False
    if any(own.dtype != other.dtype for own, other in zip(here, there, strict=True)):
        return True
    # Whole numbers are compared with a float as numbers of the default dtype.
    truths = bool(here) and here[0].dtype == torch.bool
    return truths and any(isinstance(arg, float) for arg in args)


def _cast_whole(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with whole numbers cast to the default dtype; where none are whole
    numbers, truths are."""
    given = tensors_of((args, kwargs))
    whole = [value for value in given if value.dtype != torch.bool] or given
    casts = {id(value): value for value in given}
    casts |= {id(value): value.to(torch.get_default_dtype()) for value in whole}
    cast_args, cast_kwargs = _replace_tensors((args, kwargs), casts)
    return cast_args, cast_kwargs


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
