"""nn.Module -> Captured."""

import contextlib
import functools
import gc
import linecache
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dovetail.errors import CaptureError, ModelError
from dovetail.frontends.building import build
from dovetail.frontends.keras_models import is_keras, keras_module
from dovetail.frontends.optimizers import GradScaler, Optimizer, format_optimizer
from dovetail.frontends.program import Captured, Signature
from dovetail.frontends.recording import TracingError, fake, fake_mode_of, is_fake, memory_of
from dovetail.frontends.tracing import Request, forget, trace
from dovetail.plans import Source
from dovetail.runtime.torch_versions import FakeTensorMode, is_traceable_wrapper_subclass

# Preparing models of transformers, and unwrapping modules, before they are captured.
#
# transformers is not imported here: its models are recognised by their attributes.


BATCHED = "batched_mm"
"""transformers' implementation of experts by one batched product over (token, expert) pairs. Its
other ones count tokens per expert, so that shapes depend on data, or call kernels that exist for
bfloat16 alone."""
FOLLOWS_DATA = ("eager", "grouped_mm")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside of `nn.DataParallel` and `DistributedDataParallel`: placement replaces what
    they do, and their copies of the module cannot be captured."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers):
        model = model.module
    return model


@contextmanager
def batched_experts(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Within it, mixtures of experts of transformers compute by their batched implementation.

    Yields one note where something was switched, else (). Afterwards the model is as before. An
    implementation that somebody chose and that can be captured is left alone, and a model without
    a batched one (older releases, experts in a loop) is too: its capture says what it fails at.
    """
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        # `_apply_gate` marks the experts of `transformers.integrations.moe`.
        if hasattr(module, "_apply_gate") and (
            getattr(config, "_experts_implementation", None) in FOLLOWS_DATA
        ):
            configs[id(config)] = config
    before = [(config, config._experts_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._experts_implementation = BATCHED
        names = " and ".join(sorted({repr(name) for _, name in before}))
        note = (
            f"experts are computed by transformers' {BATCHED!r} instead of {names}, whose shapes "
            "depend on data: the same numbers but for rounding"
        )
        yield (note,) if before else ()
    finally:
        for config, name in before:
            config._experts_implementation = name


def capture(
    model: nn.Module,
    *args: Any,
    loss: Callable[..., Tensor] | None = None,
    targets: Any = (),
    train: Optimizer | None = None,
    scaler: GradScaler | None = None,
    **kwargs: Any,
) -> Captured:
    """The module's forward pass, or with `train` one whole training step, as graph and program.

    `args` and `kwargs` are the module's own: tensors, and lists, dicts, dataclasses and other
    structures of tensors. What is no tensor (None, flags, numbers) is held constant, as are the
    tensors' shapes. Runs the model on fake tensors, in the training or evaluation mode it is
    in; its weights, real or fake, are neither read nor changed, nor are its attributes.

    `loss(output, *targets)` is a scalar; `targets` is a tensor, one structure of tensors, or a
    tuple or list of what the loss takes. Without a loss the output is, or its `loss` where it has
    one, as models of transformers do when they are given labels. Parameters that do not require
    gradients stay as they are.

    `scaler` scales the loss as `torch.amp.GradScaler` does: a step with gradients that are not
    finite updates nothing. Captured under `torch.autocast`, forward and loss compute under it, and
    the backward pass, as users run it, outside. Mixtures of experts of transformers are captured by
    their batched implementation, and `Captured.notes` says so.

    A Keras 3 model on torch counts as its module in `keras_models`, in training mode with `train`.

    Raises `ModelError` for arguments that do not fit, `CaptureError` for what has no graph. About
    0.6 ms per op (`benchmarks/capture`); twice that for steps of up to 2,000 calls, which are
    traced twice to find state that no buffer holds, and where the model writes in place.
    """
    return capture_call(model, args, kwargs, loss=loss, targets=targets, train=train, scaler=scaler)


@contextlib.contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Hardly any of what a capture makes is garbage before it ends, and Python's collector looks
    through all of it again and again: a sixth of the time went there."""
    thresholds = gc.get_threshold()
    if thresholds[0]:
        gc.set_threshold(max(thresholds[0], 100_000), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@_seldom_collecting()
def capture_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[..., Tensor] | None = None,
    targets: Any = (),
    train: Optimizer | None = None,
    scaler: GradScaler | None = None,
) -> Captured:
    """`capture` of a module whose own keywords may be called `loss`, `targets` or `train`."""
    name = type(model).__name__
    if is_keras(model):
        model = keras_module(model, train is not None)
    if isinstance(model, nn.Module):
        model = unwrap(model)
    _check(name, model, train)
    _check_loss(name, targets, loss)
    _check_scaler(name, model, train, scaler)
    signature = Signature.of(model, args, kwargs, targets)
    if not signature.inputs:
        raise ModelError(name, "has no inputs; give at least one example tensor")
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    originals = {**parameters, **buffers}
    _check_apart(name, parameters, buffers, signature)
    inputs, targets = signature.inputs, signature.targets if train else ()
    mode = fake_mode_of([*originals.values(), *inputs, *targets])
    request = Request(
        module=model,
        mode=mode,
        originals=originals,
        parameters={key: fake(value, mode) for key, value in parameters.items()},
        buffers={key: fake(value, mode) for key, value in buffers.items()},
        inputs=tuple(_fake_input(value, mode) for value in inputs),
        targets=tuple(fake(value, mode) for value in targets),
        signature=signature,
        scale=None if scaler is None else fake(torch.tensor(scaler.init_scale), mode),
        loss=loss,
        training=train is not None,
        trainable=tuple(k for k, v in parameters.items() if v.requires_grad) if train else (),
        owners=_owners(parameters, buffers, signature),
        holds_fakes=any(map(is_fake, (*originals.values(), *inputs, *targets))),
    )
    try:
        with batched_experts(model) as notes:
            traced = trace(request)
    except TracingError as error:
        raise CaptureError(name, str(error), _location(error)) from error
    except Exception as error:
        raise CaptureError(name, _advice(error), _location(error)) from error
    graph, program = build(name, traced, train, _aliases(model), scaler)
    notes += tuple(
        f"input {signature.names[index]} is written over by the model; a step leaves the tensor "
        "that it is given as it is"
        for index in traced.written_inputs
    )
    cached_values = [weakref.ref(value) for value in traced.follow_from_constants]
    if cached_values:
        forget(traced)
        del traced, request
        _clear_caches(cached_values)
    source = Source(
        model=name,
        training=format_optimizer(train) if train else "",
        shapes=tuple(tuple(value.shape) for value in inputs),
        torch_version=torch.__version__,
        constants=signature.constants,
    )
    return Captured(graph, program, source, model, signature, notes=notes)


def _check(name: str, model: nn.Module, train: Optimizer | None) -> None:
    """Raise `ModelError` for modules that cannot be traced, by the kind they are."""
    if not isinstance(model, nn.Module):
        raise ModelError(name, "is no torch.nn.Module; wrap the function in one")
    for path, part in model.named_modules():
        where = f"{path} ({type(part).__name__})" if path else "the model"
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                name, f"{where} is TorchScript, which hides its ops; use the module it is made from"
            )
        if ".quantized" in type(part).__module__ and type(part).__module__.startswith("torch."):
            raise ModelError(
                name,
                f"{where} is quantised: its weights are packed in no tensor that can be placed; "
                "capture the float model it is made from",
            )
        for key, value in (*part._parameters.items(), *part._buffers.items()):
            full = f"{path}.{key}" if path else key
            if is_lazy(value):
                raise ModelError(name, f"{full} has no shape yet; run the lazy module once before")
            if value is not None and is_traceable_wrapper_subclass(value):
                raise ModelError(
                    name,
                    f"{full} is a {type(value).__name__}, a tensor made of others (quantised, "
                    "sharded or nested); capture the module with plain tensors",
                )
            if value is not None and (value.layout != torch.strided or value.is_quantized):
                raise ModelError(
                    name, f"{full} is no dense tensor; use .to_dense() or .dequantize()"
                )
    if train is not None and not isinstance(train, Optimizer):
        raise ModelError(
            name, f"train is a {type(train).__name__}; give dt.SGD, dt.RMSProp, dt.Adam or dt.AdamW"
        )
    if train is not None and not any(p.requires_grad for p in model.parameters()):
        raise ModelError(name, "has no parameter that requires gradients; nothing can be trained")


def _check_loss(name: str, targets: Any, loss: Callable[..., Tensor] | None) -> None:
    if loss is not None and not callable(loss):
        raise ModelError(name, f"loss must be callable, not {type(loss).__name__}")
    given = targets is not None and not (isinstance(targets, (tuple, list)) and not targets)
    if given and loss is None:
        raise ModelError(
            name, "targets are given, but no loss to compare with them; give loss(output, *targets)"
        )


def _check_scaler(
    name: str, model: nn.Module, train: Optimizer | None, scaler: GradScaler | None
) -> None:
    if scaler is None:
        return
    if train is None:
        raise ModelError(name, "a scaler is for training; give train= as well")
    for key, value in model.named_parameters():
        if value.requires_grad and value.dtype == torch.float16:
            raise ModelError(
                name,
                f"{key} is float16, whose gradients torch does not unscale either; keep parameters "
                "in float32 and compute under torch.autocast",
            )


def _check_apart(
    name: str,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    signature: Signature,
) -> None:
    """Raise `ModelError` for an example that shares memory with a parameter or buffer: what a run
    trains or writes is its own."""
    kept = {f"parameter {key}": value for key, value in parameters.items()}
    kept |= {f"buffer {key}": value for key, value in buffers.items()}
    spans = [(memory_of(value), what) for what, value in kept.items()]
    for label, value in zip(signature.names, signature.inputs, strict=True):
        begin, end = memory_of(value)
        for (other_begin, other_end), what in spans:
            if begin < other_end and other_begin < end:
                raise ModelError(name, f"input {label} shares memory with {what}; give a clone")


def _owners(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], signature: Signature
) -> dict[str, Tensor]:
    """What of the model's or of the examples a tensor is -> the tensor."""
    return {
        f"{what} {name}": value
        for what, names, values in (
            ("parameter", parameters.keys(), parameters.values()),
            ("buffer", buffers.keys(), buffers.values()),
            ("input", signature.names, signature.inputs),
            ("target", signature.target_names, signature.targets),
        )
        for name, value in zip(names, values, strict=True)
    }


def _fake_input(value: Tensor, mode: FakeTensorMode) -> Tensor:
    """The fake twin of an input, which requires gradients where the input does."""
    twin = fake(value, mode)
    return twin.requires_grad_() if value.requires_grad else twin


def _aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters and buffers -> the first name."""
    aliases = {}
    for members in (model.named_parameters, model.named_buffers):
        first: dict[int, str] = {}
        for name, value in members(remove_duplicate=False):
            if first.setdefault(id(value), name) != name:
                aliases[name] = first[id(value)]
    return aliases


def _clear_caches(cached_values: list["weakref.ref[Tensor]"]) -> None:
    """Clear the caches of functions (`functools.lru_cache`) that keep one of these fake tensors:
    the user's model would go on with it. A cache can always be cleared."""
    if not _alive(cached_values):
        return
    gc.collect()
    if not (left := _alive(cached_values)):
        return
    for cached in [value for value in gc.get_objects() if type(value) is _LRU_CACHE]:
        inside = gc.get_referents(cached)
        inside += [value for part in inside if type(part) in (tuple, list) for value in part]
        if any(id(value) in left for value in inside):
            cached.cache_clear()


def _alive(cached_values: list["weakref.ref[Tensor]"]) -> set[int]:
    return {id(tensor) for reference in cached_values if (tensor := reference()) is not None}


_LRU_CACHE = type(functools.lru_cache(len))

_ADVICE = {
    "DataDependentOutputException": "the model turns a tensor into a number (.item(), bool(), "
    "if on a tensor); decide on shapes or on Python values, or use torch.where",
    "DynamicOutputShapeException": "the shape of a result depends on the data (nonzero, boolean "
    "masks, unique); use torch.where or a fixed size",
    "GuardOnDataDependentSymNode": "the model branches on data; use torch.where",
}


def _advice(error: BaseException) -> str:
    """Advice for an error of torch's, followed by the error's own text."""
    said = str(error).strip().splitlines() or [""]
    for kind in type(error).__mro__:
        if kind.__name__ in _ADVICE:
            return f"cannot be captured: {_ADVICE[kind.__name__]} [{said[0]}]"
    if "modified by an inplace operation" in str(error):
        return (
            "cannot be captured: the backward pass needs a value that the model has since written "
            "over in place (so it counts here what is assigned to .data, too); clone it before"
        )
    if "tracing tensor" in str(error) or "Cannot copy out of meta" in str(error):
        return f"cannot be captured: {_ADVICE['DataDependentOutputException']} [{said[0]}]"
    return (
        f"failed while it ran on fake tensors of these inputs' shapes: {type(error).__name__}: "
        f"{said[0]}"
    )


def _location(error: BaseException) -> str:
    """ "file.py:12: the line" of the deepest frame that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if not path.startswith((*ours, "<")):
            location = f"{Path(path).name}:{line}: {linecache.getline(path, line).strip()}"
    return location
