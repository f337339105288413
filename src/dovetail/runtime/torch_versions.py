"""Holds all that we use of torch beyond its public interface, which new versions may change.

Tried: torch 2.11, 2.13 and 2.15. Other modules import these names from here, so that a difference
between versions is settled here too, with the version and the reason beside it. So far there are
two, `with_real_forms` and `GENERATED_CODE_ALIGNS`. On 2.15 two tests fail that compare a recording
with what `make_fx` records.

Two private names are used elsewhere: the attributes `_schema` and `py_kernels` of `OpOverload`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._guards import Source
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    autograd_would_have_decomposed,
    is_traceable_wrapper_subclass,
)
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FAKE_TENSOR_LOGGER",
    "GENERATED_CODE_ALIGNS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "autograd_would_have_decomposed",
    "backend_of_graphs",
    "backward_passes_run_by",
    "broadcast",
    "calls_are_observed",
    "can_take_data_of",
    "compile_errors",
    "count_not_finite",
    "count_up",
    "fused_adam",
    "fused_sgd",
    "gloo_device",
    "gloo_group",
    "has_composite_kernel",
    "has_nccl",
    "hook_tables",
    "in_kernel_invocation_manager",
    "is_compiled_module",
    "is_step_watched",
    "is_traceable_wrapper_subclass",
    "named_store",
    "nccl_errors",
    "nccl_group",
    "open_archive",
    "plain_call",
    "pytree",
    "replace_call",
    "replaced_call",
    "run_backward",
    "sequence_number",
    "tcp_store",
    "unset_fake_temporarily",
    "update_scale",
    "view_operator",
    "with_real_forms",
    "without_autocast",
    "without_dispatch",
    "without_fused_kernels",
]

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""Name of the logger to which torch writes a failure under fake tensors."""


# Capturing: fake tensors, dispatch and autograd.


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Switches autocast off on all devices. The public `torch.autocast` takes one device."""
    return torch._C._DisableAutocast()


def without_dispatch() -> contextlib.AbstractContextManager[None]:
    """Hides all tensor subclasses and dispatch modes, so that a meta tensor is made as it is."""
    return torch._C._DisableTorchDispatch()


@contextlib.contextmanager
def backward_passes_run_by(run: Callable[..., Any]) -> Iterator[None]:
    """Within, `torch.autograd.backward` and `grad` call `run` in place of `run_backward`."""
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = before  # type: ignore[attr-defined]


def with_real_forms(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any
) -> Any:
    """The new outputs of an op on fake tensors, with the shapes, dtypes, strides and identities
    that real tensors would give.

    In torch 2.11 the fake attention of CPUs says float32 of its logarithms of sums, where the
    kernel returns float64 for inputs of float64. A device that got them from another one then read
    them as float32.

    The fake recurrent kernel of oneDNN says that its workspace is empty, and that of its gradient
    returns one tensor for the gradients of both biases at its first call alone.

    Where inputs do not lie row by row, some fake ops lay their results otherwise than the kernel:
    batch normalisation of [batch, channels, steps], the gradients of `mse_loss` and `softplus`.
    Where they have several dtypes, some say another one, as layer normalisation of bfloat16 by
    weights of float32, and others take what the kernel refuses, as products of float32 and float16.
    So the kernel is asked, on small tensors that lie alike. Raises what it says about dtypes.
    """
    aten = torch.ops.aten
    if op is aten._scaled_dot_product_flash_attention_for_cpu.default:
        attention, logarithms = outputs
        if attention.dtype == torch.float64 != logarithms.dtype:
            return attention, logarithms.to(torch.float64)
    if op is aten.mkldnn_rnn_layer.default:
        if not args[-1]:
            return outputs
        *results, workspace = outputs
        forms = tuple((tuple(value.shape), value.dtype) for value in args[:7])
        settings = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args[7:])
        return *results, workspace.new_empty(_workspace_bytes(forms, settings))
    if op is aten.mkldnn_rnn_layer_backward.default:
        return *outputs[:4], outputs[3], *outputs[5:]
    made = [outputs] if isinstance(outputs, Tensor) else outputs
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    strided = all(value.layout is torch.strided for value in (*inputs, *made) if value is not None)
    # A user's own kernel may do more than return tensors.
    if not strided or op.namespace != "aten":
        return outputs
    twins = _small_results(op, (args, kwargs), inputs, made)
    if twins is None:
        return outputs
    # Some return what they are given although their schema does not say so, which stays as it is.
    taken = {value.untyped_storage()._cdata for value in inputs}
    laid = tuple(
        value
        if twin is None or value is None or value.untyped_storage()._cdata in taken
        else _formed_alike(value, twin)
        for value, twin in zip(made, twins, strict=True)
    )
    return laid[0] if isinstance(outputs, Tensor) else laid


_FULL, _SMALL, _LEAST = 2**12, 2**22, 4
"""The kernel is asked on tensors of the real sizes if these have at most `_FULL` elements, or if
they have at most `_SMALL` and the op has numbers among its arguments that may be sizes. These are
all from `_LEAST` on: below it, dimensions and modes are numbered."""

_OF_DTYPES = ("dtype", "scalar type", "weight type")
"""One of these stands in a kernel's error about dtypes that do not go together."""


def _small_results(
    op: OpOverload, given: Any, inputs: Sequence[Tensor], outputs: Sequence[Any]
) -> Sequence[Any] | None:
    """What the op returns for real tensors that lie in memory as the given ones do, but are smaller
    if they can be. None if there is nothing to ask, or if the op cannot be asked. Raises the
    kernel's own error about dtypes."""
    mixed = len({value.dtype for value in inputs}) > 1
    # Fake products and convolutions of one dtype are right, and their kernels take longest.
    if not mixed and (op.overloadpacket in flop_registry or all(map(_lies_row_by_row, inputs))):
        return None
    elements = sum(value.numel() for value in (*inputs, *outputs) if value is not None)
    sizes: dict[int, int] = {}
    if elements > _FULL:
        numbers = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, int)]
        if all(number < _LEAST for number in numbers):
            different = {n for value in inputs for n in value.shape if n >= _LEAST}
            sizes = {n: _LEAST + number for number, n in enumerate(sorted(different))}
        elif elements > _SMALL:
            return None

    def small(value: Tensor) -> Tensor:
        shape = [sizes.get(n, n) for n in value.shape]
        strides = value.stride() if not sizes else _strides_like(shape, value)
        flat = torch.zeros(_extent(shape, strides), dtype=value.dtype, device="cpu")
        return flat.as_strided(shape, strides)

    with unset_fake_temporarily(), without_dispatch(), torch.no_grad():
        state = torch.default_generator.get_state()
        try:
            args, kwargs = pytree.tree_map_only(Tensor, small, given)
            found = op(*args, **kwargs)
        except Exception as error:
            if mixed and any(text in str(error) for text in _OF_DTYPES):
                raise
            return None  # the kernel wants other numbers than zeros, or there is none
        finally:
            torch.default_generator.set_state(state)
    return [found] if isinstance(found, Tensor) else list(found)


def _lies_row_by_row(value: Tensor) -> bool:
    """Whether the strides are those of a new tensor of this shape.

    `is_contiguous` asks nothing of dimensions of one element. But an image of one pixel lies with
    its channels last or not by their strides alone, and kernels lay larger results of it so.
    """
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _dense_strides(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    """The strides of dense memory whose dimensions are in the order of other strides; 0 stays."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        if like[dim]:
            strides[dim], step = step, step * max(shape[dim], 1)
    return strides


def _strides_like(shape: Sequence[int], like: Tensor) -> list[int]:
    """The strides of memory of this shape whose dimensions are in the order of the tensor's, and
    have a gap between them where the tensor's have one; 0 stays."""
    strides, step, dense = [0] * len(shape), 1, 1
    for dim in sorted(range(len(shape)), key=lambda d: (like.stride(d), -d)):
        if like.stride(dim):
            step += like.stride(dim) > dense
            dense = like.stride(dim) * max(like.shape[dim], 1)
            strides[dim], step = step, step * max(shape[dim], 1)
    return strides


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first of a tensor to its last."""
    ends = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return 0 if 0 in shape else 1 + sum(ends)


def _formed_alike(value: Tensor, twin: Tensor) -> Tensor:
    """The fake tensor with the dtype of its twin, and its dimensions in memory in the order in
    which the twin has them."""
    shape, wanted = value.shape, twin.stride()
    if twin.shape != shape:
        # Gaps in a kernel's result tell nothing of other sizes.
        is_dense = _extent(twin.shape, wanted) == twin.numel()
        wanted = tuple(_dense_strides(shape, wanted)) if is_dense else value.stride()
    if value.dtype == twin.dtype and (value.numel() == 0 or wanted == value.stride()):
        return value
    return value.new_empty_strided(shape, wanted, dtype=twin.dtype)


@functools.lru_cache(maxsize=1000)
def _workspace_bytes(forms: tuple[tuple[Any, torch.dtype], ...], rest: tuple[Any, ...]) -> int:
    """The bytes of the workspace of a recurrent kernel. Only a call of the kernel tells.

    forms   shape and dtype of each of its tensors
    rest    its other arguments, with tuples for lists
    """
    with unset_fake_temporarily(), without_dispatch(), torch.enable_grad():
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in forms]
        given = [list(value) if isinstance(value, tuple) else value for value in rest]
        results = torch.ops.aten.mkldnn_rnn_layer.default(*tensors, *given)
    return int(results[3].numel())


def sequence_number() -> int:
    """The number that autograd gives to the next function it makes in this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def has_composite_kernel(op: OpOverload) -> bool:
    """True if the op is written in terms of others, for autograd to go through.

    `py_kernels` has the ops that are written in Python; the dispatcher those in C++.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in op.py_kernels or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(),  # type: ignore[no-untyped-call]
            key,
        )
    )


@contextlib.contextmanager
def without_fused_kernels() -> Iterator[None]:
    """A context without oneDNN and without the fast path of attention.

    With oneDNN a float32 `nn.LSTM` would be one opaque op. With the fast path an
    `nn.TransformerEncoderLayer` in evaluation mode would be one.
    """
    # `torch.backends.mkldnn.flags` would do the first, but it sets oneDNN's other flags as well.
    mkldnn, fastpath = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fastpath)


def laid_out_as_run(op: OpOverload) -> contextlib.AbstractContextManager[None]:
    """A context for an op on fake tensors within `without_fused_kernels`.

    The kernel of a convolution, which is oneDNN's where it runs, decides how its result lies in
    memory: of images with channels last, oneDNN's lie so, too, and those of ATen's own do not.
    """
    aten = torch.ops.aten
    if op is aten.convolution.default or op is aten.convolution_backward.default:
        return _with_mkldnn()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _with_mkldnn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def open_archive(path: Any) -> Any:
    """The reader of an archive that `torch.export.save` wrote, a context manager: it reads what
    `torch.export.load` would, and loads nothing."""
    # Imported where it is used: it brings along much that nothing else here needs.
    from torch.export.pt2_archive._package import PT2ArchiveReader

    return PT2ArchiveReader(path)


def inductor_source(module: fx.GraphModule, examples: Sequence[Tensor]) -> str:
    """Return the Python source that Inductor compiles the module to. Its `call` takes the inputs in
    a list, which it empties, and returns the outputs in a tuple.

    The module must return no view of an input, and write over none.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    sources: list[str] = []

    def keep_source(*args: Any, **kwargs: Any) -> Any:
        code: Any = compile_fx_inner(*args, **kwargs)
        sources.append(code.source_code)
        return code

    with torch.no_grad():
        compile_fx(module, list(examples), inner_compile=keep_source)
    (source,) = sources
    return source


GENERATED_CODE_ALIGNS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Before 2.12 what copies misaligned inputs for a GPU's kernels stood outside the source that is
kept here."""


def view_operator() -> OpOverload:
    """The operator (tensor, shape, strides, offset) of the views in Inductor's code. The offset
    counts from where the tensor begins."""
    operator: OpOverload = torch.ops.inductor._reinterpret_tensor.default
    return operator


# Scaled losses: the ops of `torch.amp.GradScaler`, which has no functional form.


def count_not_finite(gradients: Sequence[Tensor], flag: Tensor, inverse_scale: Tensor) -> None:
    """Multiply the gradients in place, and write 1.0 to the flag if an element is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), flag, inverse_scale)


def update_scale(
    scale: Tensor, tracker: Tensor, flag: Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Write over the scale and the number of steps since it last changed."""
    torch._amp_update_scale_(scale, tracker, flag, growth, backoff, interval)


# Optimizers: the fused kernels of CPUs. `torch.optim` calls them where it is given `fused=True`.
#
# They go over all memory once, where one op after another makes seven or more passes with
# temporaries in between. Of 2 million float32 on one thread Adam took 1.5 ms instead of 17.4.


def count_up(steps: Sequence[Tensor]) -> None:
    """Add 1 to each."""
    torch._foreach_add_(list(steps), 1)


def fused_adam(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], steps: Sequence[Tensor],
    exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    *, decoupled: bool, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Adam, or with `decoupled` AdamW, after `steps` have been counted up."""
    run = torch._fused_adamw_ if decoupled else torch._fused_adam_
    run(
        list(parameters), list(gradients), list(exp_avgs), list(exp_avg_sqs), [], list(steps),
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, amsgrad=False,
        maximize=False,
    )  # fmt: skip


def fused_sgd(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], buffers: Sequence[Tensor],
    *, lr: float, momentum: float, nesterov: bool, weight_decay: float,
) -> None:  # fmt: skip
    """SGD with the momentum buffers of an earlier step; [] without momentum."""
    torch._fused_sgd_(
        list(parameters), list(gradients), list(buffers), lr=lr, momentum=momentum,
        nesterov=nesterov, weight_decay=weight_decay, dampening=0.0, maximize=False,
        is_first_step=False,
    )  # fmt: skip


# Moving a model's tensors between devices.


def can_take_data_of(tensor: Tensor, data: Tensor) -> bool:
    """True if `tensor.data = data` is allowed; `nn.Module.to` decides by this too."""
    return bool(torch._has_compatible_shallow_copy_type(tensor, data))


# Hooks, which copies lack.


def has_parameter_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks on its gradient. `copy.deepcopy` leaves them out."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_optimizer_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has hooks on its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def is_step_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks, those on all optimizers among them, or a step that is not its class's see what
    an optimizer's step is given. Schedulers wrap the step, only to count its calls."""
    of_all: Any = importlib.import_module("torch.optim.optimizer")
    own = vars(optimizer).get("step")
    counted = getattr(own, "_wrapped_by_lr_sched", False)
    return bool(
        has_optimizer_hooks(optimizer)
        or of_all._global_optimizer_pre_hooks
        or of_all._global_optimizer_post_hooks
        or (own is not None and not (counted and own.__wrapped__ is type(optimizer).step))
    )


# Calls of modules that go elsewhere, as `nn.Module.compile` has them go. Pickles and copies of a
# module do without.

_CALL = "_compiled_call_impl"


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's own call, with its hooks, wherever `module(...)` goes."""
    call: Callable[..., Any] = module._call_impl
    return call


def replaced_call(module: torch.nn.Module) -> Any:
    """What `module(...)` calls in place of the module's own call; None: nothing."""
    return getattr(module, _CALL, None)


def replace_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `module(...)` call this; None: the module's own call again."""
    if call is None:
        vars(module).pop(_CALL, None)
    else:
        vars(module)[_CALL] = call


def is_compiled_module(module: torch.nn.Module) -> bool:
    """True for what `torch.compile` makes of a module."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith(_DYNAMO)


def hook_tables(module: torch.nn.Module) -> list[Any]:
    """All tables of hooks that a call of the module heeds, each empty if it has none."""
    of_all = torch.nn.modules.module
    tables: list[Any] = [
        of_all._global_forward_hooks,
        of_all._global_forward_pre_hooks,
        of_all._global_backward_hooks,
        of_all._global_backward_pre_hooks,
    ]
    for part in module.modules():
        tables += part._forward_hooks, part._forward_pre_hooks
        tables += part._backward_hooks, part._backward_pre_hooks
    return tables


def backend_of_graphs(compile_graph: Callable[[fx.GraphModule, Any], Any]) -> Callable[..., Any]:
    """A backend of `torch.compile`: what this returns for the graph of a forward or backward pass,
    whose arguments are all tensors that it reads, is called in the graph's place."""
    from torch._dynamo.backends.common import aot_autograd

    # Calls take their arguments in a list, which some backends empty.
    boxed: Any = importlib.import_module("functorch.compile").make_boxed_func
    return aot_autograd(fw_compiler=lambda *given: boxed(compile_graph(*given)))


def compile_errors() -> tuple[type[BaseException], ...]:
    """What `torch.compile` raises where it fails at a function, and not the function itself."""
    errors = sys.modules.get(f"{_DYNAMO}.exc")
    return () if errors is None else (errors.TorchDynamoException,)


def calls_are_observed() -> bool:
    """True while torch traces, compiles or transforms what is called, or a mode sees each op."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


# `torch._dynamo`, which takes a process two seconds and more to import. torch imports it for fake
# tensors, which read a few of its settings and name where they come from, and to keep compilers
# away from some functions of its own when they are first called
# (`torch._compile._disable_dynamo`). Neither needs the package.

_DYNAMO = "torch._dynamo"
_SETTINGS = f"{_DYNAMO}.config"


@dataclass(frozen=True)
class _UnknownSource(Source):
    """The source of a tensor that torch is told nothing of."""

    source_name: str

    @property
    def _name_template(self) -> str:
        return self.source_name


class _SourcesLater(types.ModuleType):
    """Stands for `torch._dynamo.source` until more is asked of it than these two classes."""

    ConstantSource = _UnknownSource
    RandomValueSource = type("RandomValueSource", (), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(sys.modules[_DYNAMO].source, name)


class _DynamoLater(types.ModuleType):
    """Stands for `torch._dynamo` until more is asked of it than its settings, and `disable` for
    torch's own functions: any other attribute or submodule brings the package itself.

    config      the package's settings, which the package has as well once it is imported
    sources     stands for its module of names for where tensors come from
    undisabled  functions of torch's own that were called without keeping compilers away from them
    is_over     the block of `dynamo_later` has ended: torch asks the package itself
    """

    def __init__(self) -> None:
        super().__init__(_DYNAMO)
        # Submodules are found by `_DynamoFinder`.
        self.__path__: list[str] = []
        self.config = _dynamo_settings()
        self.sources = _SourcesLater(f"{_DYNAMO}.source")
        self.undisabled: list[Any] = []
        self.is_over = False

    def disable(
        self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **options: Any
    ) -> Any:
        """As `torch._dynamo.disable`. torch's own functions come with `wrapping` False."""
        if fn is None or wrapping or self.is_over:
            return self.package().disable(fn, recursive, wrapping=wrapping, **options)
        self.undisabled.append(fn)
        return fn

    def package(self) -> Any:
        """Import the package, and give its names to those who hold this module instead. Returns the
        package."""
        for module in (self, self.config, self.sources):
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
        package = importlib.import_module(_DYNAMO)
        vars(self).update(vars(package))
        return package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.package(), name)


class _DynamoFinder:
    """Finds submodules of `torch._dynamo`: any of them brings the package itself, and its settings
    are those that stood for them."""

    @staticmethod
    def find_spec(name: str, _path: Any = None, _target: Any = None) -> Any:
        """Return how to load the module; None: as if this were not here."""
        if name == _SETTINGS and not isinstance(sys.modules.get(_DYNAMO), _DynamoLater):
            return importlib.util.spec_from_loader(name, _LoadedModule(_dynamo_settings()))
        if name.startswith(f"{_DYNAMO}."):
            later = sys.modules.get(_DYNAMO)
            if isinstance(later, _DynamoLater):
                later.package()
                importlib.import_module(name)
                # Else Python would run the module's file again.
                return importlib.util.spec_from_loader(name, _LoadedModule(sys.modules.pop(name)))
        return None


class _LoadedModule(importlib.abc.Loader):
    """Loads a module that is there already."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, vars(module).get("__spec__")

    def create_module(self, spec: Any) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        # torch's settings take no other names by assignment.
        vars(module)["__spec__"] = self._spec


@functools.cache
def _dynamo_settings() -> types.ModuleType:
    """The module of settings, by itself: it is the rest of the package that takes long."""
    path = Path(torch.__file__).parent / "_dynamo" / "config.py"
    spec: Any = importlib.util.spec_from_file_location(_SETTINGS, path)
    settings = importlib.util.module_from_spec(spec)
    with _as_module(settings):
        spec.loader.exec_module(settings)
    return settings


@contextlib.contextmanager
def _as_module(module: types.ModuleType) -> Iterator[None]:
    """Within this, importing the module's name gives this module."""
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]


@contextlib.contextmanager
def dynamo_later() -> Iterator[None]:
    """Within this, torch does not import `torch._dynamo` where it can do without it. If several
    threads are in such blocks, it may do so for those that go on after the first has left."""
    if _DYNAMO in sys.modules:
        yield
        return
    later = _DynamoLater()
    if _DynamoFinder not in sys.meta_path:
        # It stays, so that the settings are one module in any case.
        sys.meta_path.insert(0, _DynamoFinder)
    try:
        with _as_module(later):
            yield
    finally:
        later.is_over = True
        name = "__dynamo_disable"
        for function in later.undisabled:
            if getattr(function, name, None) is function:
                delattr(function, name)


def new_fake_mode() -> FakeTensorMode:
    """Return a mode of fake tensors, to which real ones may be given."""
    with dynamo_later(), contextlib.ExitStack() as stack:
        if isinstance(later := sys.modules.get(_DYNAMO), _DynamoLater):
            stack.enter_context(_as_module(later.config))
        return FakeTensorMode(allow_non_fake_inputs=True)


def fake_twin(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return the fake tensor of a real one, the same each time."""
    with dynamo_later(), contextlib.ExitStack() as stack:
        if isinstance(later := sys.modules.get(_DYNAMO), _DynamoLater):
            stack.enter_context(_as_module(later.sources))
        return mode.from_tensor(tensor)


# Groups of ranks. `torch.distributed` does not say which of its names are public.


def tcp_store(host: str, port: int, is_kept: bool, timeout: timedelta) -> Any:
    """A connection with torch's store at this address, which this process keeps if `is_kept`."""
    made: Any = torch.distributed
    return made.TCPStore(
        host, port, is_master=is_kept, wait_for_workers=False, timeout=timeout, multi_tenant=is_kept
    )


def broadcast(group: Any, tensor: Tensor, root: int) -> None:
    """Copy the root's tensor to all members of a group of `gloo_group`."""
    made: Any = torch.distributed
    options = made.BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor], options).wait()


def named_store(name: str, store: Any) -> Any:
    """The store, in which all keys begin with a name."""
    made: Any = torch.distributed
    return made.PrefixStore(name, store)


def gloo_device(address: str, interface: str = "") -> Any:
    """The interface of gloo's connections: that of this name, or of this address."""
    made: Any = torch.distributed.ProcessGroupGloo
    if interface:
        return made.create_device(interface=interface)
    return made.create_device(hostname=address)


def gloo_group(store: Any, rank: int, ranks: int, device: Any, timeout: timedelta) -> Any:
    """A group over gloo that is registered nowhere, so that a program's own groups never meet it.

    Connects with the other ranks, which call this with the same store. `send`, `recv` and
    collectives of it return works, whose `wait` raises `RuntimeError`, as this does.
    """
    made: Any = torch.distributed.ProcessGroupGloo
    options = made._Options()
    options._devices, options._timeout = [device], timeout
    return made(store, rank, ranks, options)


def has_nccl() -> bool:
    """True if this torch can send between GPUs by NCCL."""
    made: Any = torch.distributed
    return bool(made.is_available() and made.is_nccl_available())


def nccl_errors() -> tuple[type[BaseException], ...]:
    """The errors of NCCL; a GPU's other errors are RuntimeErrors too."""
    made: Any = torch.distributed
    return (made.DistError,)


def nccl_group(store: Any, rank: int, timeout: timedelta) -> Any:
    """A group of two ranks over NCCL, otherwise as `gloo_group`. It connects with the first
    message."""
    # We end what a lost rank leaves behind, and nobody does before. torchrun sets the first to 1.
    for variable in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        os.environ[variable] = "0"
    made: Any = torch.distributed.ProcessGroupNCCL
    options = made.Options()
    options._timeout = timeout
    return made(store, rank, 2, options)


# GPUs.


def sleep_on_gpu(cycles: int) -> None:
    """Issue a kernel to the current stream that does nothing for so many cycles of the GPU."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
