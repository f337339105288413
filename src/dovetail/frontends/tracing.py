"""One functional graph of forward, loss and backward, traced from fake tensors.

Two traces. The first runs the model and `torch.autograd.grad` under `make_fx`; forward hooks and
autograd's sequence numbers tell where each node comes from. The second reruns that graph through
`functionalize`, which turns in-place ops into pure ones. Then what moves no data goes: detach,
alias, and clones that protected something from an in-place op. No weight is ever allocated.

Written against torch 2.13. `OpOverload`, `FakeTensorMode` and `torch.utils._pytree` are private by
name only and used wherever they are needed; the rest of torch's private names stands here, but for
an operator's `_op` in `binding` and a storage's `_cdata` in `building`.
"""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from dovetail.graph import Phase

aten = torch.ops.aten
_NO_OPS = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
LOSS_MODULE = "loss"


class TracingError(Exception):
    """The model cannot be traced; the message says why. Its cause, if any, has the traceback."""


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
    step = _flat_step(request, layout)
    flat = [
        *request.parameters.values(), *request.buffers.values(), *request.inputs, *request.targets
    ]  # fmt: skip
    with request.mode, fx_traceback.preserve_node_meta(), _quiet():
        first = make_fx(step, {aten.native_batch_norm.default: _batch_norm})(*flat)
    origins = _first_origins(first)
    second = _functionalized(first, request.mode)
    return _clean(request, second, origins, layout)


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


def _flat_step(request: Request, layout: list[Any]) -> Callable[..., list[Any]]:
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
        with grad, _no_mkldnn():
            with _phase(Phase.FORWARD), _module_paths(request.module):
                output = functional_call(request.module, state, tuple(inputs))
            if not request.training:
                results, spec = pytree.tree_flatten(output)
                layout.append((len(results), spec))
                return results + [state[name] for name in request.buffers]
            with _phase(Phase.FORWARD, LOSS_MODULE):
                loss = output if request.loss is None else request.loss(output, *targets)
            gradients = _gradients(loss, [leaves[name] for name in request.trainable])
        layout.append((1, pytree.tree_structure(0)))
        return [loss.detach(), *gradients, *(state[name] for name in request.buffers)]

    return step


@contextlib.contextmanager
def _no_mkldnn() -> Iterator[None]:
    """With oneDNN on, a float32 `nn.LSTM` would be one opaque op."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _gradients(loss: Any, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
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
    with _phase(Phase.BACKWARD):
        _mark_gradients(loss)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    for gradient in gradients:
        if gradient is not None and gradient.layout != torch.strided:
            raise TracingError("a gradient is sparse; use sparse=False in embeddings")
    return gradients


def _mark_gradients(loss: Tensor) -> None:
    """Let every node that autograd makes while it runs one of its functions carry the sequence
    number of that function, which the forward op that made it carries too. What autograd does
    between its functions, summing gradients, carries none."""

    def enter(sequence: int) -> Callable[..., None]:
        def hook(_: Any) -> None:
            _annotation()["sequence"] = sequence

        return hook

    def leave(*_: Any) -> None:
        _annotation().pop("sequence", None)

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


def _annotation() -> dict[str, Any]:
    """What nodes made now get as their "custom" metadata; each takes a copy."""
    annotation: dict[str, Any] = fx_traceback.current_meta["custom"]
    return annotation


@contextlib.contextmanager
def _phase(phase: Phase, module: str = "") -> Iterator[None]:
    with fx_traceback.annotate({"phase": int(phase), "module": module}):
        yield


@contextlib.contextmanager
def _module_paths(model: nn.Module) -> Iterator[None]:
    """While a submodule runs, annotate nodes with its path."""
    handles = []
    callers: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            callers.append(_annotation()["module"])
            _annotation()["module"] = path

        return hook

    def leave(*_: Any) -> None:
        _annotation()["module"] = callers.pop()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _custom(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _first_origins(module: fx.GraphModule) -> list[tuple[int, str, int]]:
    """Per node of the first trace (phase, module, index of the forward node or -1); marks each
    node with its index, which the second trace copies."""
    nodes = list(module.graph.nodes)
    of_sequence: dict[int, int] = {}
    origins: list[tuple[int, str, int]] = []
    for index, node in enumerate(nodes):
        custom = _custom(node)
        phase, path = custom.get("phase", int(Phase.FORWARD)), custom.get("module", "")
        forward = -1
        if node.op == "call_function" and phase == Phase.FORWARD:
            of_sequence.setdefault(node.meta.get("seq_nr", -1), index)
        elif phase == Phase.BACKWARD:
            forward = of_sequence.get(custom.get("sequence", -2), -1)
            path = origins[forward][1] if forward >= 0 else ""
        origins.append((phase, path, forward))
        node.meta["custom"] = {"node": index}
    return origins


class _Marked(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        with fx_traceback.set_current_meta(n):
            return super().run_node(n)


def _functionalized(first: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    values = [n.meta["val"] for n in first.graph.nodes if n.op == "placeholder"]
    interpreter = _Marked(first)
    with mode, fx_traceback.preserve_node_meta(), torch.no_grad():
        return make_fx(functionalize(interpreter.run, remove="mutations"))(*values)


def _clean(
    request: Request,
    module: fx.GraphModule,
    origins: list[tuple[int, str, int]],
    layout: list[Any],
) -> Trace:
    graph = module.graph
    _remove_no_ops(graph)
    _check_pure(graph, module)
    _remove_dead(graph)
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
        node: getattr(module, str(node.target)) for node in graph.nodes if node.op == "get_attr"
    }
    return Trace(graph, sources, constants, _origins(graph, origins), results, gradients, written)


def _check_pure(graph: fx.Graph, module: fx.GraphModule) -> None:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise TracingError(
                f"{node.target} writes over a parameter or an input in a way that cannot be made "
                "part of the graph; write to a buffer, or return the new value"
            )
        if node.op == "get_attr" and not isinstance(getattr(module, str(node.target)), Tensor):
            raise TracingError(
                "the model has control flow that is part of the graph (torch.cond and the like); "
                "write it with torch.where"
            )
        if node.op == "call_function" and isinstance(node.meta.get("val"), (tuple, list)):
            nested = [v for v in node.meta["val"] if isinstance(v, (tuple, list))]
            if nested:
                raise TracingError(f"{node.target} returns lists inside a tuple; split it up")


def _roles(request: Request) -> list[tuple[str, str]]:
    return (
        [("parameter", name) for name in request.parameters]
        + [("buffer", name) for name in request.buffers]
        + [("input", f"input.{i}") for i in range(len(request.inputs))]
        + [("input", f"target.{i}") for i in range(len(request.targets))]
    )


def _remove_no_ops(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = node.target in _NO_OPS
        if node.target is aten.clone.default:
            # Nothing is written in place any more, so a copy in the same layout protects nothing.
            same = node.meta["val"].stride() == node.args[0].meta["val"].stride()
        if same:
            base = node.args[0]
            # What was a view of the copy is now a view of the base: let its storage say so.
            aliases = [node.meta["val"], *node.meta.get("same_storage", ())]
            base.meta.setdefault("same_storage", []).extend(aliases)
            node.replace_all_uses_with(base)
            graph.erase_node(node)


def _remove_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr"):
            graph.erase_node(node)


def _origins(graph: fx.Graph, origins: list[tuple[int, str, int]]) -> dict[fx.Node, Origin]:
    by_index: dict[int, fx.Node] = {}
    found: dict[fx.Node, Origin] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        index = _custom(node).get("node", -1)
        phase, module, forward = origins[index] if index >= 0 else (int(Phase.FORWARD), "", -1)
        by_index.setdefault(index, node)
        found[node] = Origin(Phase(phase), module, by_index.get(forward) if forward >= 0 else None)
    return found
