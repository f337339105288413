"""One functional graph of forward, loss and backward, traced from fake tensors.

The model and `torch.autograd.grad` run once, and every operator that they call is recorded
(`recording`); forward hooks and autograd's sequence numbers tell where each comes from. Then the
graph is made pure (`purifying`). No weight is ever allocated.

Written against torch 2.13. `OpOverload`, `FakeTensorMode`, `TorchDispatchMode` and
`torch.utils._pytree` are private by name only and used wherever they are needed; the rest of
torch's private names stands here and in `recording`, but for an operator's `_op` in `binding` and a
storage's `_cdata` in `building`.
"""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from dovetail.frontends.purifying import purified
from dovetail.frontends.recording import Recording, TracingError, record
from dovetail.graph import Phase

aten = torch.ops.aten
LOSS_MODULE = "loss"
NO_SEQUENCE = -2


@dataclass(frozen=True, eq=False)
class Request:
    """What to trace. All tensors are fake, of `mode`. loss None: the output is the loss.

    trainable   names of the parameters to differentiate for; () in inference
    """

    module: nn.Module
    mode: FakeTensorMode
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Callable[..., Any] | None
    training: bool
    trainable: tuple[str, ...]


class Origin(NamedTuple):
    """Where a node comes from; `forward` is the node whose gradient it computes, or None."""

    phase: Phase
    module: str
    forward: fx.Node | None


@dataclass(frozen=True, eq=False)
class Trace:
    """A functional graph.

    sources     node -> (role, name), for the request's tensors, in their order
    constants   get_attr node -> its value
    origins     of every call node
    results     pytree of nodes: the loss (training) or the model's output
    gradients   parameter -> node; parameters that the loss does not reach are absent
    written     buffer -> node of its new value
    """

    graph: fx.Graph
    sources: dict[fx.Node, tuple[str, str]]
    constants: dict[fx.Node, Tensor]
    origins: dict[fx.Node, Origin]
    results: Any
    gradients: dict[str, fx.Node]
    written: dict[str, fx.Node]


def trace(request: Request) -> Trace:
    """Trace the request. Raises `TracingError`, or whatever the model or torch raises."""
    layout: list[Any] = []
    at = _Position()
    step = _flat_step(request, at, layout)
    flat = [
        *request.parameters.values(), *request.buffers.values(), *request.inputs, *request.targets
    ]  # fmt: skip
    with request.mode, _quiet():
        first = record(step, flat, at.mark, {aten.native_batch_norm.default: _batch_norm})
    origins = _first_origins(first)
    second = purified(first, request.mode)
    return _clean(request, second, origins, layout)


@dataclass
class _Position:
    """Where the step is while it runs."""

    phase: Phase = Phase.FORWARD
    module: str = ""
    sequence: int = NO_SEQUENCE

    def mark(self) -> tuple[Phase, str, int]:
        """(phase, module, sequence number of the autograd function that the op makes or is of)"""
        if self.phase == Phase.BACKWARD:
            return self.phase, self.module, self.sequence
        made = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        return self.phase, self.module, made


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    *options: Any,
) -> Any:
    """`native_batch_norm` by the operators whose schema admits that they write the statistics."""
    training, momentum, eps = options
    if not training:
        return aten._native_batch_norm_legit_no_training(
            x, weight, bias, mean, variance, momentum, eps
        )
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    return aten._native_batch_norm_legit(x, weight, bias, mean, variance, True, momentum, eps)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What fails under fake tensors is raised; torch would log its traceback as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _flat_step(request: Request, at: _Position, layout: list[Any]) -> Callable[..., list[Any]]:
    """The step as a function of flat tensors; `layout` receives the pytree of its results."""

    trainable = set(request.trainable)

    def step(*flat: Tensor) -> list[Any]:
        rest = iter(flat)
        leaves = {
            name: next(rest).detach().requires_grad_(name in trainable)
            for name in request.parameters
        }
        state = leaves | {name: next(rest).clone() for name in request.buffers}
        inputs = [next(rest).clone() for _ in request.inputs]
        targets = [next(rest).clone() for _ in request.targets]
        grad = torch.enable_grad() if request.training else torch.no_grad()
        with grad, _unfused():
            with _module_paths(at, request.module):
                output = functional_call(request.module, state, tuple(inputs))
            if not request.training:
                results, spec = pytree.tree_flatten(output)
                layout.append((len(results), spec))
                return results + [state[name] for name in request.buffers]
            with _place(at, Phase.FORWARD, LOSS_MODULE):
                loss = output if request.loss is None else request.loss(output, *targets)
            gradients = _gradients(at, loss, [leaves[name] for name in request.trainable])
        layout.append((1, pytree.tree_structure(0)))
        return [loss.detach(), *gradients, *(state[name] for name in request.buffers)]

    return step


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """With oneDNN on, a float32 `nn.LSTM` would be one opaque op; with the fast path of attention,
    an `nn.TransformerEncoderLayer` in evaluation mode."""
    mkldnn, fastpath = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fastpath)


def _gradients(at: _Position, loss: Any, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TracingError(
            f"the loss must be one number, but is of {found}; give `loss=`, a function "
            "loss(output, *targets) that returns a scalar"
        )
    if not loss.requires_grad:
        raise TracingError(
            "the loss does not depend on any trainable parameter; check requires_grad, and that "
            "nothing on the way is detached"
        )
    loss = loss.reshape(()) if loss.dim() else loss
    with _place(at, Phase.BACKWARD):
        _mark_gradients(at, loss)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    for gradient in gradients:
        if gradient is not None and gradient.layout != torch.strided:
            raise TracingError("a gradient is sparse; use sparse=False in embeddings")
    return gradients


def _mark_gradients(at: _Position, loss: Tensor) -> None:
    """Let every node that autograd makes while it runs one of its functions carry the sequence
    number of that function, which the forward op that made it carries too. What autograd does
    between its functions, summing gradients, carries none."""

    def enter(sequence: int) -> Callable[..., None]:
        def hook(_: Any) -> None:
            at.sequence = sequence

        return hook

    def leave(*_: Any) -> None:
        at.sequence = NO_SEQUENCE

    waiting, seen = [loss.grad_fn], set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if type(function).__name__ != "AccumulateGrad":
            function.register_prehook(enter(function._sequence_nr()))
            function.register_hook(leave)
        waiting += [next_function for next_function, _ in function.next_functions]


@contextlib.contextmanager
def _place(at: _Position, phase: Phase, module: str = "") -> Iterator[None]:
    before = at.phase, at.module
    at.phase, at.module = phase, module
    try:
        yield
    finally:
        at.phase, at.module = before


@contextlib.contextmanager
def _module_paths(at: _Position, model: nn.Module) -> Iterator[None]:
    """While a submodule runs, the position has its path."""
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
    """Per call node of the first trace where it comes from, itself a node of the first trace."""
    of_sequence: dict[int, fx.Node] = {}
    origins: dict[fx.Node, Origin] = {}
    for node, (phase, module, sequence) in first.marks.items():
        forward = None
        if phase == Phase.FORWARD:
            of_sequence.setdefault(sequence, node)
        else:
            forward = of_sequence.get(sequence)
            module = origins[forward].module if forward is not None else ""
        origins[node] = Origin(phase, module, forward)
    return origins


def _clean(
    request: Request,
    recording: Recording,
    origins: dict[fx.Node, Origin],
    layout: list[Any],
) -> Trace:
    graph = recording.graph
    count, spec = layout[0]
    output = next(iter(reversed(graph.nodes))).args[0]
    results = pytree.tree_unflatten(output[:count], spec)
    end = count + len(request.trainable)
    names = zip(request.trainable, output[count:end], strict=True)
    gradients = {name: node for name, node in names if node is not None}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    sources = dict(zip(placeholders, _roles(request), strict=True))
    first_buffer = len(request.parameters)
    written = {
        name: node
        for name, node, old in zip(
            request.buffers, output[end:], placeholders[first_buffer:], strict=False
        )
        if node is not None and node is not old
    }
    for name, node in written.items():
        if node.meta["val"].shape != request.buffers[name].shape:
            raise TracingError(f"buffer {name} changes its shape; give it its full size at once")
    constants = {
        node: recording.constants[str(node.target)] for node in graph.nodes if node.op == "get_attr"
    }
    final = _origins(recording, origins)
    return Trace(graph, sources, constants, final, results, gradients, written)


def _roles(request: Request) -> list[tuple[str, str]]:
    return (
        [("parameter", name) for name in request.parameters]
        + [("buffer", name) for name in request.buffers]
        + [("input", f"input.{i}") for i in range(len(request.inputs))]
        + [("input", f"target.{i}") for i in range(len(request.targets))]
    )


def _origins(recording: Recording, origins: dict[fx.Node, Origin]) -> dict[fx.Node, Origin]:
    """Per call node that is left where it comes from; nodes of the first trace become those that
    are left of them."""
    left: dict[fx.Node | None, fx.Node] = {}
    found: dict[fx.Node, Origin] = {}
    for node in recording.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        first = recording.marks[node]
        left.setdefault(first, node)
        origin = origins[first] if first is not None else Origin(Phase.FORWARD, "", None)
        forward = left.get(origin.forward) if origin.forward is not None else None
        found[node] = origin._replace(forward=forward)
    return found
