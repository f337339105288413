"""Captures a module: `capture` returns its step as graph and program.

It checks the module and its arguments, traces the step on fake tensors, builds graph and program
from the trace, and turns failures into errors that say what to change in the model.
"""

import contextlib
import gc
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dovetail.errors import CaptureError, ModelError, ModelRaisedError, UserCodeError
from dovetail.frontends.building import build
from dovetail.frontends.checks import LossTracingError, TracingError
from dovetail.frontends.keeping import keep, key_of, laid, reopened
from dovetail.frontends.keras_models import KerasLoss, KerasModule, keras_module
from dovetail.frontends.leftovers import take_all_back, take_back
from dovetail.frontends.optimizers import (
    GradScaler,
    Optimizer,
    OptimizerLike,
    format_optimizer,
    optimizer_of,
)
from dovetail.frontends.program import Captured, PlainStep, Ref, Signature
from dovetail.frontends.recording import (
    INSTEAD_OF_FLEX,
    fake,
    fake_mode_of,
    is_fake,
    memory_of,
)
from dovetail.frontends.structures import leaves
from dovetail.frontends.tracing import (
    Request,
    Trace,
    compare_with_real,
    forget,
    last_of_channels,
    list_names,
    trace,
)
from dovetail.graph import Graph
from dovetail.graph.source import Source
from dovetail.runtime.torch_versions import dynamo_later, is_traceable_wrapper_subclass
from dovetail.runtime.user_code import UserCode, defined_at, raised_by_user, said, text_of
from dovetail.training import is_keras

BATCHED = "batched_mm"
"""The name of transformers' implementation of experts by one batched product over (token, expert)
pairs. Its other implementations count tokens per expert, so that shapes depend on data, or call
kernels that exist for bfloat16 alone."""
FOLLOWS_DATA = ("eager", "grouped_mm")
"""The names of the implementations whose shapes depend on data."""
_ADVICE = {
    "DataDependentOutputException": "the model turns a tensor into a number (.item(), bool(), "
    "if on a tensor); decide on shapes, on Python values or on tensors that are plain attributes, "
    "or use torch.where",
    "DynamicOutputShapeException": "the shape of a result depends on the data (nonzero, boolean "
    "masks, unique); use torch.where or a fixed size",
    "GuardOnDataDependentSymNode": "the model branches on data; use torch.where",
}
"""Name of a class of torch's errors -> what to change in the model."""
_READING = ("tracing tensor", "Cannot copy out of meta", ".numpy() is not supported")
"""Texts of torch's errors when a fake tensor's values are read."""


def capture(
    model: nn.Module,
    *args: Any,
    loss: Callable[..., Tensor] | None = None,
    targets: Any = (),
    train: OptimizerLike | None = None,
    scaler: GradScaler | None = None,
    **kwargs: Any,
) -> Captured:
    """Return the module's forward pass, or with `train` one training step, as graph and program.

    `args` and `kwargs` are the module's own: tensors, and lists, dicts, dataclasses and other
    structures of tensors. Other values (None, flags, numbers) are held constant, and so are the
    tensors' shapes. The model runs on fake tensors, in the training or evaluation mode that it is
    in; a small step on the CPU also runs once on copies of the real ones, which must give the same.
    Weights and attributes do not change.

    `train` is dt.SGD, dt.RMSProp, dt.Adam or dt.AdamW, a text such as "adam:lr=1e-3", or what
    `dt.Trainer` takes: an optimizer of torch, its class, or what makes one of parameters, if it is
    one of these four and has the same settings for all parameters.

    `loss(output, *targets)` returns a scalar. `targets` is a tensor, one structure of tensors, or a
    tuple or list of the loss's arguments. Without a loss function the loss is the output, or its
    `loss` if it has one, as outputs of transformers do when the model is given labels. Parameters
    that do not require gradients are not updated.

    `scaler` scales the loss as `torch.amp.GradScaler` does: a step with gradients that are not
    finite updates nothing. Under `torch.autocast` forward and loss are captured with its casts, and
    the backward pass without, as users run it. Mixtures of experts of transformers are captured by
    their batched implementation, and `Captured.notes` says so.

    A Keras 3 model on torch is captured as its module in `keras_models`, which is in training mode
    if `train` is given.

    Raises `ModelError` for arguments that do not fit, `CaptureError` for a step that has no graph.
    Takes about 0.6 ms per op (`benchmarks/capture`). It takes twice that for a step of up to 2,000
    calls, which is traced twice to find state that no buffer holds, and for a model that writes in
    place. The real step takes up to about a second more.
    """
    return capture_call(model, args, kwargs, loss=loss, targets=targets, train=train, scaler=scaler)


@contextlib.contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Let Python's garbage collector run seldom within the block.

    Hardly any object that a capture makes is garbage before the capture ends, and the collector
    looks through all of them again and again. That took a sixth of the time.
    """
    thresholds = gc.get_threshold()
    if thresholds[0]:
        gc.set_threshold(max(thresholds[0], 100_000), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@_seldom_collecting()
@dynamo_later()
def capture_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[..., Tensor] | None = None,
    targets: Any = (),
    train: OptimizerLike | None = None,
    scaler: GradScaler | None = None,
    chunks: int = 0,
    channels_last: bool = False,
) -> Captured:
    """Capture as `capture` does, also a module whose own keywords are called `loss`, `targets`,
    `train` or `scaler`.

    chunks, channels_last   as the fields of `transforms.Form`
    """
    name = type(model).__name__
    if is_keras(model):
        model = keras_module(model, train is not None)
    model = unwrap(model)
    _check_module(name, model)
    if train is not None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise ModelError(
                name, "has no parameter that requires gradients; nothing can be trained"
            )
        train = optimizer_of(train, trained)
    _check_training(name, model, loss, targets, train, scaler)
    # A step that is captured again has such a loss already.
    if isinstance(model, KerasModule) and train is not None and not isinstance(loss, KerasLoss):
        loss = KerasLoss(loss)
    signature = Signature.of(model, args, kwargs, targets)
    if not signature.inputs:
        raise ModelError(name, "has no inputs; give at least one example tensor")
    parameters = dict[str, Tensor](model.named_parameters())
    buffers = dict(model.named_buffers())
    originals = {**parameters, **buffers}
    owners = {f"parameter {key}": value for key, value in parameters.items()}
    owners |= {f"buffer {key}": value for key, value in buffers.items()}
    # A run trains and writes copies of these, so an input that shares their memory would not change
    # with them.
    spans = [(memory_of(value), owner) for owner, value in owners.items()]
    for label, value in zip(signature.names, signature.inputs, strict=True):
        begin, end = memory_of(value)
        for (owner_begin, owner_end), owner in spans:
            if begin < owner_end and owner_begin < end:
                raise ModelError(name, f"input {label} shares memory with {owner}; give a clone")
        owners[f"input {label}"] = value
    for label, value in zip(signature.target_names, signature.targets, strict=True):
        owners[f"target {label}"] = value
    inputs = signature.inputs
    targets = signature.targets if train else ()  # an inference step computes no loss
    mode = fake_mode_of([*originals.values(), *inputs, *targets])
    twin = last_of_channels if channels_last else lambda value: value
    request = Request(
        module=model,
        mode=mode,
        originals=originals,
        parameters={key: twin(fake(value, mode)) for key, value in parameters.items()},
        buffers={key: twin(fake(value, mode)) for key, value in buffers.items()},
        inputs=tuple(fake(value, mode).requires_grad_(value.requires_grad) for value in inputs),
        targets=tuple(fake(value, mode) for value in targets),
        signature=signature,
        scale=None if scaler is None else fake(torch.tensor(scaler.init_scale), mode),
        loss=loss,
        training=train is not None,
        trainable=tuple(key for key, value in parameters.items() if train and value.requires_grad),
        owners=owners,
        chunks=chunks,
        channels_last=channels_last,
        holds_fakes=any(map(is_fake, (*originals.values(), *inputs, *targets))),
    )
    code = (model, loss) if train else (model,)
    try:
        with batched_experts(model) as notes, UserCode("the model", *code):
            traced = trace(request)
    except UserCodeError as error:
        failure = _failure(name, error, loss)
        if not request.holds_fakes:
            # The functions that the error has left hold fake tensors in their variables.
            del request
            left: BaseException | None = error
            while left is not None:
                traceback.clear_frames(left.__traceback__)
                left = left.__cause__ or left.__context__
            take_all_back(mode)
        raise failure from error.__cause__
    graph, program = build(name, traced, train, _aliases(model), scaler)
    if graph.is_source.all() and not leaves(program.outputs, Ref):
        what = "None" if program.outputs is None else f"a {type(program.outputs).__name__}"
        raise CaptureError(name, f"returns {what}, which holds no tensor", defined_at(model))
    notes += tuple(
        f"input {signature.names[index]} is written over by the model; a step leaves the tensor "
        "that it is given as it is"
        for index in traced.written_inputs
    )
    if traced.counters:
        names = list_names(traced.counters)
        notes += (f"the model changes numbers of Python at each step, a plan does not: {names}",)
    # A plain step would write over its inputs where the model does, and torch's scaler keeps its
    # state elsewhere.
    plain: PlainStep | None = None
    if scaler is None and not traced.written_inputs:
        casts = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if casts else None
        modes, gradients = _modes(model)
        plain = PlainStep(loss, train, dtype, modes, gradients, traced.differentiates)
    real = replace(
        request,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        targets=targets,
        scale=None if scaler is None else torch.tensor(scaler.init_scale),
    )
    forget(traced.graph)
    del request  # the last reference of this capture to its fake tensors
    if holders := take_back(traced.made):
        raise CaptureError(
            name,
            f"a step leaves a tensor in {' and '.join(holders[:3])}, and one of a capture has no "
            "numbers; keep in a module, as an attribute or a buffer, what is computed once",
            defined_at(model),
        )
    # Other forms are of steps that were compared before.
    if not (real.holds_fakes or chunks or channels_last):
        notes += _compare_with_real(name, real, traced, graph, code)
    source = Source(
        model=name,
        training=format_optimizer(train) if train else "",
        shapes=tuple(tuple(value.shape) for value in inputs),
        torch_version=torch.__version__,
        constants=signature.constants,
        aliases=tuple(program.aliases.items()),
    )
    return Captured(
        graph,
        program,
        source,
        lambda: model,
        signature,
        notes=notes,
        plain=plain,
        fused_steps=traced.fused_steps,
    )


COMPARED_FLOPS, COMPARED_BYTES = 4e9, 512e6
"""A step of at most so many FLOPs, with values of at most so many bytes, is run once on real
tensors when it is captured. That takes up to about a second."""


def _compare_with_real(
    name: str, real: Request, traced: Trace, graph: Graph, owners: tuple[Any, ...]
) -> tuple[str, ...]:
    """Return a note on how the step compares with one on real tensors, if there is something to
    say. Raises `CaptureError` if it computes something else."""
    said_of = "the step was not compared with one on real tensors"
    tensors = (*real.originals.values(), *real.inputs, *real.targets)
    if any(value.device.type != "cpu" for value in tensors):
        return (f"{said_of}, as its tensors are not all on the CPU",)
    flops, held_bytes = int(graph.flops.sum()), int(graph.tensor_bytes.sum())
    if traced.numbers is None or flops > COMPARED_FLOPS or held_bytes > COMPARED_BYTES:
        return (
            f"{said_of}, as it is too large; a model that asks for a tensor's class may differ",
        )
    try:
        with batched_experts(real.module), UserCode("the model", *owners):
            note = compare_with_real(real, traced)
    except UserCodeError as error:
        cause = error.__cause__
        if isinstance(cause, TracingError):
            raise _failure(name, error) from cause
        assert cause is not None
        return (f"{said_of}, which fails: {said(cause)}",)
    return (note,) if note else ()


def recaptured(step: Captured, *, chunks: int = 0, channels_last: bool = False) -> Captured:
    """Return the step captured again in another form; see `transforms.Form`, which lists it.

    The module is in the modes that it was captured in; afterwards it is in those of before. Raises
    `ModelError` for a step that cannot be captured again, and `CaptureError`.
    """
    name, plain = step.source.model, step.plain
    if plain is None:
        raise ModelError(
            name,
            "cannot be captured again, as it has several towers or a scaler, or writes over its "
            "inputs",
        )
    # It may be of a part of the batch.
    shapes = [laid(value) for value in (*step.inputs, *step.targets)]
    key = step.kept_under and key_of(step.kept_under, chunks, channels_last, shapes)
    kept = reopened(key, step.module_of, plain, step.make, step.examples)
    if kept is not None:
        return replace(kept, source=step.source, notes=step.notes)
    args, kwargs = step.signature.call(step.inputs)
    before, wanted = _modes(step.module), (plain.training, plain.gradients)
    if tuple(map(len, before)) != tuple(map(len, wanted)):
        raise ModelError(
            type(step.module).__name__, "has other modules or parameters than when captured"
        )

    def enter(modes: tuple[bool, ...], gradients: tuple[bool, ...]) -> None:
        if before != wanted:
            for module, mode in zip(step.module.modules(), modes, strict=True):
                module.training = mode
            for parameter, required in zip(step.module.parameters(), gradients, strict=True):
                parameter.requires_grad_(required)

    enter(*wanted)
    try:
        with torch.autocast("cpu", dtype=plain.autocast, enabled=plain.autocast is not None):
            found = capture_call(
                step.module,
                args,
                kwargs,
                loss=plain.loss,
                targets=step.signature.loss_arguments(step.targets),
                train=plain.optimizer,
                chunks=chunks,
                channels_last=channels_last,
            )
    finally:
        enter(*before)
    found = replace(
        found, source=step.source, make=step.make, examples=step.examples, notes=step.notes
    )
    return keep(found, key)


def _modes(model: nn.Module) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """(training mode of each module, whether each parameter requires gradients)."""
    return (
        tuple(module.training for module in model.modules()),
        tuple(parameter.requires_grad for parameter in model.parameters()),
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside `nn.DataParallel` and `DistributedDataParallel`; any other model as
    it is.

    Placement replaces what these wrappers do, and their copies of the module cannot be captured.
    """
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers):
        model = model.module
    return model


def _check_module(name: str, model: nn.Module) -> None:
    """Raise `ModelError` for a module of a kind that cannot be traced."""
    if not isinstance(model, nn.Module):
        raise ModelError(name, "is no torch.nn.Module; wrap the function in one")
    for path, module in model.named_modules():
        kind = type(module)
        where = f"{path} ({kind.__name__})" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                name, f"{where} is TorchScript, which hides its ops; use the module it is made from"
            )
        if kind.__module__.startswith("torch.") and ".quantized" in kind.__module__:
            raise ModelError(
                name,
                f"{where} is quantised: its weights are packed in no tensor that can be placed; "
                "capture the float model it is made from",
            )
        for key, value in (*module._parameters.items(), *module._buffers.items()):
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


def _check_training(
    name: str,
    model: nn.Module,
    loss: Callable[..., Tensor] | None,
    targets: Any,
    train: Optimizer | None,
    scaler: GradScaler | None,
) -> None:
    """Raise `ModelError` for a loss that is not callable, for targets without a loss, for a loss
    with parameters of its own, which a step would not train, for a scaler in inference, and with a
    scaler for trained parameters in float16 or of complex numbers."""
    if loss is not None and not callable(loss):
        raise ModelError(name, f"loss must be callable, not {type(loss).__name__}")
    none_given = targets is None or (isinstance(targets, (tuple, list)) and not targets)
    if loss is None and not none_given:
        raise ModelError(
            name, "targets are given, but no loss to compare with them; give loss(output, *targets)"
        )

    if train is not None and isinstance(loss, nn.Module):
        of_model = set(map(id, model.parameters()))
        for key, value in loss.named_parameters():
            if value.requires_grad and id(value) not in of_model:
                raise ModelError(
                    name,
                    f"the loss has a parameter {key} that requires gradients, and a step trains "
                    "those of the model alone; call the loss within the model's forward, or freeze "
                    "the parameter (requires_grad_(False))",
                )
    if scaler is None:
        return
    if train is None:
        raise ModelError(name, "a scaler is for training; give train= as well")
    for key, value in model.named_parameters():
        if value.requires_grad and (value.dtype == torch.float16 or value.is_complex()):
            dtype = str(value.dtype).removeprefix("torch.")
            raise ModelError(
                name,
                f"{key} is {dtype}, whose gradients torch does not unscale either; keep parameters "
                "in float32 and compute under torch.autocast",
            )


@contextmanager
def batched_experts(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Switch transformers' mixtures of experts to their batched implementation within the block.

    The models are recognised by their attributes, so that transformers need not be imported.

    Yields one note if something was switched, else (). Afterwards the model is as before. An
    implementation that can be captured is left alone. So is a model without a batched one (older
    releases, experts in a loop); its capture then fails with a reason.
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


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return each further name of a tied parameter or buffer -> its first name."""
    aliases = {}
    for named_tensors in (model.named_parameters, model.named_buffers):
        first_names: dict[int, str] = {}
        for name, value in named_tensors(remove_duplicate=False):
            first = first_names.setdefault(id(value), name)
            if first != name:
                aliases[name] = first
    return aliases


def _failure(name: str, raised: UserCodeError, loss: Any = None) -> CaptureError:
    """Return the error for whatever was raised while the step was traced."""
    error, location = raised.__cause__, raised.location
    assert error is not None, "it says what it comes from"
    if isinstance(error, LossTracingError):
        location = defined_at(loss) or location
    if isinstance(error, TracingError):
        return CaptureError(name, str(error), location)
    # An error of the user's own line, and not of torch on the line's behalf, has no graph either
    # way. The text is advice, followed by the first line of what was raised.
    by_user = raised_by_user(error) or not isinstance(error, Exception)
    kind = ModelRaisedError if by_user else CaptureError
    whole, text = said(error), text_of(error)
    line = (text.splitlines() or [""])[0]
    known = [_ADVICE[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _ADVICE]
    if not known and "FlexAttention" in text:
        known = [f"flex_attention is code that torch compiles; {INSTEAD_OF_FLEX}"]
    elif not known and "modified by an inplace operation" in text:
        advice = (
            "cannot be captured: the backward pass needs a value that the model has since written "
            "over in place (so it counts here what is assigned to .data, too); clone it before"
        )
        return kind(name, advice, location)
    elif not known and any(part in text for part in _READING):
        known = [_ADVICE["DataDependentOutputException"]]
    if known:
        return kind(name, f"cannot be captured: {known[0]} [{line}]", location)
    # The model may ask for a tensor's exact class in a function that was running.
    folders = (Path(__file__).parents[1], Path(torch.__file__).parent)
    ours = tuple(f"{folder}{os.sep}" for folder in folders)
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    asks = any("type" in c.co_names for c in codes if not c.co_filename.startswith(ours))
    hint = " (they are of another class: instead of type(x) use isinstance)" if asks else ""
    advice = f"failed while it ran on fake tensors of these inputs' shapes{hint}: {whole}"
    return kind(name, advice, location)
