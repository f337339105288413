"""Builds a graph and a program from a trace.

The builder gives each tensor its storage, adds one update op per trained parameter and one per
written buffer, and adds the control edges that keep readers of an old value before its writer.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from dovetail.errors import CaptureError
from dovetail.frontends.checks import CHECK
from dovetail.frontends.flops import count_bytes, count_flops, tensor_bytes
from dovetail.frontends.optimizers import (
    SCALE,
    TRACKER,
    GradScaler,
    Optimizer,
    any_found,
    next_scale,
    unscale,
    update_unless_found,
    update_written,
)
from dovetail.frontends.program import (
    Call,
    Program,
    Ref,
    SourceValue,
    distinct_refs,
    dtype_of,
    kind_of,
    replace_nodes,
    signature,
)
from dovetail.frontends.structures import leaves, substitute
from dovetail.frontends.tracing import Trace
from dovetail.graph import Graph, Phase
from dovetail.graph.copies import WRITTEN

# Control edges, which put all readers of a value before the op that writes over it.


def control_edges(
    model: str,
    names: Sequence[str],
    reads: Sequence[Sequence[int]],
    producers: Sequence[int],
    storages: Sequence[int],
    overwrites: Sequence[bool],
) -> list[tuple[int, int]]:
    """Return a (reader, writer) edge for every op that reads a value, or an alias of it, which
    `writer` writes over. Pairs that data already orders get no edge.

    names, reads                       [ops]
    producers, storages, overwrites    [tensors]

    Takes O(reads x writers / 64). Raises `CaptureError` if a reader can only run after its writer.
    """
    written = [tensor for tensor, over in enumerate(overwrites) if over]
    writer_of = {storages[tensor]: producers[tensor] for tensor in written}
    bit = {writer: 1 << i for i, writer in enumerate(sorted(set(writer_of.values())))}
    # Bit w of reaches[op] says that data flows from the op to writer w. Ops stand in topological
    # order, so backwards every op is complete before its producers are visited.
    reaches = [0] * len(names)
    for op in reversed(range(len(names))):
        below = reaches[op] | bit.get(op, 0)
        for tensor in reads[op]:
            reaches[producers[tensor]] |= below
    edges = []
    for reader, of_reader in enumerate(reads):
        writers = {writer_of.get(storages[tensor], reader) for tensor in of_reader} - {reader}
        for writer in sorted(writers):
            if reader > writer:
                raise CaptureError(
                    model,
                    f"{names[reader]} reads what {names[writer]} has written over; clone the "
                    "value in the model",
                )
            if not reaches[reader] & bit[writer]:
                edges.append((reader, writer))
    return edges


aten = torch.ops.aten


@dataclass
class _CapturedOp:
    """A row of the graph's columns of ops, and its call or source."""

    name: str
    kind: str
    signature: str
    module: str
    phase: Phase
    flops: int = 0
    accessed_bytes: int = 0
    colocation: int = -1
    gradient_of: int = -1
    reads: list[int] = field(default_factory=list)
    call: Call | None = None
    source: SourceValue | None = None


@dataclass
class _CapturedTensor:
    """A row of the graph's columns of tensors."""

    producer: int
    value: Tensor  # fake: shape, strides, dtype
    storage: int
    overwrites: bool = False


class _Builder:
    """Collects ops and tensors, and notes which tensor and op each node of the trace became."""

    def __init__(self) -> None:
        self.ops: list[_CapturedOp] = []
        self.tensors: list[_CapturedTensor] = []
        self.names: dict[str, int] = {}
        self.tensor_of: dict[fx.Node, int] = {}
        self.op_of: dict[fx.Node, int] = {}
        self.source_of: dict[tuple[str, str], int] = {}  # (role, name) -> tensor
        self.storage_of: dict[int, int] = {}  # identity of a fake storage -> storage id
        self.storages = 0
        self.colocations = 0

    def unique(self, name: str) -> str:
        """Return the name, with _1, _2, ... appended where it is taken."""
        count = self.names.get(name, -1) + 1
        self.names[name] = count
        return self.unique(f"{name}_{count}") if count else name

    def op(self, op: _CapturedOp) -> int:
        """Add the op under a unique name, and return its index."""
        op.name = self.unique(op.name)
        self.ops.append(op)
        return len(self.ops) - 1

    def tensor(self, value: Tensor, storage: int = -1, overwrites: bool = False) -> int:
        """Add an output of the last op and return its index. It gets a new storage if none is
        given."""
        if storage < 0:
            storage = self.storages
            self.storages += 1
        self.tensors.append(_CapturedTensor(len(self.ops) - 1, value, storage, overwrites))
        return len(self.tensors) - 1

    def source(self, source: SourceValue, value: Tensor) -> int:
        """Add a source op and return the index of its one tensor."""
        kind = source.role
        module = source.name.rpartition(".")[0] if kind in ("parameter", "buffer") else ""
        self.op(_CapturedOp(source.name, kind, kind, module, Phase.SOURCE, source=source))
        tensor = self.tensor(value)
        self.source_of[source.role, source.name] = tensor
        return tensor

    def ref(self, node: fx.Node) -> Ref:
        return Ref(self.tensor_of[node])

    def colocate_with(self, op: int, other: int) -> None:
        """Give an op without a colocation that of another one, or both a new one."""
        if self.ops[other].colocation < 0:
            self.colocate([op, other])
        else:
            self.ops[op].colocation = self.ops[other].colocation

    def colocate(self, ops: Iterable[int]) -> None:
        """Give the ops a new colocation id."""
        for op in ops:
            self.ops[op].colocation = self.colocations
        self.colocations += 1


def build(
    model: str,
    trace: Trace,
    optimizer: Optimizer | None,
    aliases: dict[str, str],
    scaler: GradScaler | None = None,
) -> tuple[Graph, Program]:
    """Return the graph and the program of a trace, with one update op per parameter that has a
    gradient.

    `model` names the model in errors. `aliases` are other names of tied parameters and buffers.
    Takes O(nodes + edges x written storages / 64).
    """
    builder = _Builder()
    for node, (role, source) in trace.sources.items():
        fill = scaler.init_scale if scaler is not None and source == SCALE else None
        _bind(builder, node, builder.source(SourceValue(role, source, fill), node.meta["val"]))
    for node, constant in trace.constants.items():
        held = SourceValue("constant", str(node.target), value=constant.detach())
        _bind(builder, node, builder.source(held, constant))
    # Parameter -> the tensors of its optimizer state.
    states: dict[str, list[int]] = {}
    scalar = torch.empty((), dtype=torch.float32, device="meta")
    # Asking a fake tensor for one like it takes long, so each layout is asked for once.
    strides_of: dict[Any, Any] = {}
    for parameter in trace.gradients:
        assert optimizer is not None, "only training has gradients"
        like = builder.tensors[builder.source_of["parameter", parameter]].value
        layout = tuple(like.shape), like.stride()
        if layout not in strides_of:
            strides_of[layout] = torch.empty_like(like).stride()
        shape, strides = layout[0], strides_of[layout]
        states[parameter] = []
        for state in optimizer.states:
            value = scalar
            if not state.scalar:
                value = torch.empty_strided(shape, strides, dtype=like.dtype, device="meta")
            begun = SourceValue("state", f"{parameter}/{state.name}", fill=state.fill)
            states[parameter].append(builder.source(begun, value))
    for node in trace.origins:
        _add_call(builder, trace, node)
    gradients = {name: builder.tensor_of[node] for name, node in trace.gradients.items()}
    skip_flag = -1 if scaler is None else _add_scaler(builder, gradients, scaler)
    for parameter, gradient in gradients.items():
        assert optimizer is not None
        written = trace.written.get(parameter)
        over = -1 if written is None else builder.tensor_of[written]
        _add_update(builder, parameter, gradient, states[parameter], optimizer, skip_flag, over)
    for name, node in trace.written.items():
        if name in gradients:
            continue
        # The new value of a buffer or frozen parameter is written over the old one.
        role = "buffer" if ("buffer", name) in builder.source_of else "parameter"
        old, new = builder.source_of[role, name], builder.tensor_of[node]
        pair = [builder.tensors[t].value for t in (old, new)]
        op = _CapturedOp(
            name=f"{name}/copy_",
            kind="aten.copy_",
            signature=signature("aten.copy_.default", pair, {}),
            module=name.rpartition(".")[0],
            phase=Phase.UPDATE,
            accessed_bytes=sum(map(tensor_bytes, pair)),
            reads=[old, new],
        )
        copied = _write(builder, op, [old])
        op.call = Call(aten.copy_.default, (Ref(old), Ref(new)), {}, copied, in_place=True)
    results = substitute(trace.results, fx.Node, builder.ref)
    ops, tensors = builder.ops, builder.tensors
    values = [t.value for t in tensors]
    control = control_edges(
        model,
        [op.name for op in ops],
        [op.reads for op in ops],
        [t.producer for t in tensors],
        [t.storage for t in tensors],
        [t.overwrites for t in tensors],
    )
    graph = Graph(
        names=tuple(op.name for op in ops),
        kinds=tuple(op.kind for op in ops),
        signatures=tuple(op.signature for op in ops),
        modules=tuple(op.module for op in ops),
        phases=np.array([op.phase for op in ops]),
        flops=np.array([op.flops for op in ops]),
        accessed_bytes=np.array([op.accessed_bytes for op in ops]),
        colocation=np.array([op.colocation for op in ops]),
        gradient_of=np.array([op.gradient_of for op in ops]),
        # oneDNN's recurrent kernels are of CPUs, and nothing else keeps their workspace.
        device_kinds=tuple(("cpu",) if "mkldnn" in op.kind else () for op in ops),
        producers=np.array([t.producer for t in tensors]),
        shapes=tuple(tuple(v.shape) for v in values),
        strides=tuple(v.stride() for v in values),
        dtypes=tuple(dtype_of(v) for v in values),
        tensor_bytes=np.array([tensor_bytes(v) for v in values]),
        storages=np.array([t.storage for t in tensors]),
        overwrites=np.array([t.overwrites for t in tensors]),
        input_offsets=np.cumsum([0, *(len(op.reads) for op in ops)]),
        input_tensors=np.array([t for op in ops for t in op.reads], dtype=np.int64),
        outputs=np.array([ref.tensor for ref in leaves(results, Ref)], dtype=np.int64),
        control=np.array(control, dtype=np.int32).reshape(-1, 2),
    )
    program = Program(
        calls=tuple(op.call for op in ops),
        sources=tuple(op.source for op in ops),
        loss=results.tensor if optimizer is not None else -1,
        outputs=results,
        aliases=aliases,
    )
    return graph, program


def _bind(builder: _Builder, node: fx.Node, tensor: int) -> None:
    """Note that the node became this tensor, and that its fake storages became the tensor's."""
    builder.tensor_of[node] = tensor
    builder.op_of[node] = builder.tensors[tensor].producer
    for value in (node.meta.get("val"), *node.meta.get("same_storage", ())):
        if value is not None:
            builder.storage_of.setdefault(_identity(value), builder.tensors[tensor].storage)


def _identity(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _add_call(builder: _Builder, trace: Trace, node: fx.Node) -> None:
    """Add the op of a call node, its tensors and its call."""
    target: Any = node.target
    origin = trace.origins[node]
    args, kwargs = replace_nodes((node.args, dict(node.kwargs)), builder.ref)
    fakes, fake_kwargs = replace_nodes((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    reads = distinct_refs((args, kwargs))
    result = node.meta["val"]
    forward = builder.op_of.get(origin.forward, -1) if origin.forward is not None else -1
    kind, module = kind_of(target), origin.module
    if not module and origin.phase == Phase.BACKWARD and reads:
        # A backward op without a forward op, such as a sum of gradients.
        module = builder.ops[builder.tensors[reads[0]].producer].module
    values = [result] if isinstance(result, Tensor) else [v for v in result if v is not None]
    # All results share the storage of a tensor that the op reads.
    view = bool(values) and all(
        isinstance(v, Tensor) and _shared_storage(builder, reads, v) >= 0 for v in values
    )
    op = _CapturedOp(
        name=f"{module}/{kind.rpartition('.')[2]}" if module else kind.rpartition(".")[2],
        kind=kind,
        # The text of a check is no part of what it costs.
        signature=signature(str(target), fakes[:1] if target is CHECK else fakes, fake_kwargs),
        module=module,
        phase=origin.phase,
        flops=0 if view else count_flops(target, fakes, fake_kwargs, result),
        accessed_bytes=0 if view else count_bytes(target, fakes, fake_kwargs, result),
        gradient_of=forward,
        reads=reads,
    )
    builder.op_of[node] = builder.op(op)
    results = []
    if isinstance(result, Tensor):
        results.append(builder.tensor(result, _shared_storage(builder, reads, result)))
        _bind(builder, node, results[0])
    else:
        users: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if user.target is operator.getitem:
                users.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
        for index, value in enumerate(result):
            # Only what is read or has elements is a tensor of the graph.
            if not isinstance(value, Tensor) or not (index in users or value.numel()):
                results.append(-1)
                continue
            results.append(builder.tensor(value, _shared_storage(builder, reads, value)))
            for user in users.get(index, ()):
                _bind(builder, user, results[-1])
    first = trace.draws.get(node)
    draws_of = -1 if first is None or first is node else builder.op_of[first]
    op.call = Call(
        target, args, kwargs, tuple(results), random=first is not None, draws_of=draws_of
    )
    if draws_of >= 0:
        # Generators of unlike devices draw other numbers from one seed.
        builder.colocate_with(builder.op_of[node], draws_of)


def _shared_storage(builder: _Builder, reads: list[int], value: Tensor) -> int:
    """Return the storage of the read tensor that the value aliases; -1 if it is fresh memory."""
    storage = builder.storage_of.get(_identity(value), -1)
    return storage if any(builder.tensors[t].storage == storage for t in reads) else -1


def _add_scaler(builder: _Builder, gradients: dict[str, int], scaler: GradScaler) -> int:
    """Add the ops that unscale all gradients, check that they are finite and update the scale.

    The entries of `gradients` become the unscaled tensors. Returns the tensor that says whether a
    gradient is not finite; all updates and the scale's own update wait for it.
    """
    scale = builder.source_of["state", SCALE]
    flags = []
    flag = torch.empty((), dtype=torch.float32, device="meta")
    for parameter, gradient in gradients.items():
        like = builder.tensors[gradient].value
        flat = torch.empty(like.shape, dtype=like.dtype, device="meta")
        unscaled, not_finite = _add_plain(
            builder, f"{parameter}/unscale", unscale, [gradient, scale], [flat, flag]
        )
        gradients[parameter] = unscaled
        flags.append(not_finite)
    (skip_flag,) = _add_plain(builder, "scaler/any_found", any_found, flags, [flag])
    tracker_value = torch.empty((), dtype=torch.int32, device="meta")
    tracker = builder.source(SourceValue("state", TRACKER, fill=0.0), tracker_value)
    op = _CapturedOp(
        name="scaler/next_scale",
        kind="dovetail.next_scale",
        signature=signature("dovetail.next_scale", [flag, tracker_value], asdict(scaler)),
        module="",
        phase=Phase.UPDATE,
        flops=1,
        accessed_bytes=12,
        reads=[scale, tracker, skip_flag],
    )
    results = _write(builder, op, [scale, tracker])
    args = (Ref(scale), Ref(tracker), Ref(skip_flag))
    op.call = Call(next_scale, args, asdict(scaler), results, in_place=True)
    return skip_flag


def _add_plain(
    builder: _Builder, name: str, target: Any, reads: list[int], results: list[Tensor]
) -> list[int]:
    """Add an op of dovetail's own in the backward phase; return its new tensors."""
    values = [builder.tensors[t].value for t in reads]
    kind = f"dovetail.{target.__name__}"
    op = _CapturedOp(
        name=name,
        kind=kind,
        signature=signature(kind, values, {}),
        module=name.rpartition("/")[0].rpartition(".")[0],
        phase=Phase.BACKWARD,
        flops=values[0].numel(),
        accessed_bytes=sum(map(tensor_bytes, [*values, *results])),
        reads=list(dict.fromkeys(reads)),
    )
    builder.op(op)
    outputs = [builder.tensor(value) for value in results]
    op.call = Call(target, tuple(map(Ref, reads)), {}, tuple(outputs))
    return outputs


def _add_update(
    builder: _Builder,
    parameter: str,
    gradient: int,
    states: list[int],
    optimizer: Optimizer,
    skip_flag: int,
    value: int,
) -> None:
    """Add the update of one parameter.

    skip_flag   the tensor that says not to update; -1: none
    value       the tensor that the step has written over the parameter; -1: none
    """
    kind = f"{'dovetail.' if value < 0 else WRITTEN}{optimizer.name}"
    written = [builder.source_of["parameter", parameter], *states]
    options = asdict(optimizer)
    reads = [written[0], gradient, *states]
    others = [t for t in (skip_flag, value) if t >= 0]
    values = [builder.tensors[t].value for t in reads]
    # All reads, and the parameter and its state once more: these are written as well.
    traffic = sum(tensor_bytes(v) for v in [*values, *values[:1], *values[2:]])
    op = _CapturedOp(
        name=f"{parameter}/{optimizer.name}",
        kind=kind,
        signature=signature(kind, values, options),
        module=parameter.rpartition(".")[0],
        phase=Phase.UPDATE,
        flops=optimizer.flops_per_element * values[0].numel(),
        accessed_bytes=traffic,
        reads=list(dict.fromkeys([*reads, *others])),
    )
    results = _write(builder, op, written)
    args = tuple(Ref(t) for t in reads)
    target: Any = optimizer.update
    if skip_flag >= 0:
        options |= {"update": target}
        target, args = update_unless_found, (Ref(skip_flag), *args)
    if value >= 0:
        options |= {"then": target}
        target, args = update_written, (Ref(value), Ref(reads[0]), *args)
    op.call = Call(target, args, options, results, in_place=True)


def _write(builder: _Builder, op: _CapturedOp, written: list[int]) -> tuple[int, ...]:
    """Add an op that writes over these tensors; return the new ones. It is colocated with their
    source ops."""
    index = builder.op(op)
    old = [builder.tensors[tensor] for tensor in written]
    made = tuple(builder.tensor(o.value, o.storage, overwrites=True) for o in old)
    builder.colocate([index, *(o.producer for o in old)])
    return made
