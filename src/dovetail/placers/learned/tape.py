"""A tape on which networks are written down op by op, and which adds gradients and updates.

    x, w ──► op ──► op ──► loss          what is written
             │      │
    grads ◄──┴──◄───┘                    added in reverse, as an automatic differentiator would
      └────► update w                    one op a parameter

Kinds carry the names that captured graphs have ("aten.addmm", "dovetail.adam"), so that a policy
meets the same ones. Nothing is computed: shapes, FLOPs and bytes are all there is. Float32.
"""

from dataclasses import dataclass, field

import numpy as np

from dovetail.graph import Graph, Phase
from dovetail.graph.records import csr_offsets

ITEM_BYTES = 4
PASSED = ("aten.add", "aten.sum")
"""Their gradient is the one that arrives."""
APART = {"mul": "aten.mul", "cat": "aten.slice", "view": "aten.view", "split": "aten.cat"}
"""Kinds whose inputs have a gradient op each, and what it is."""
BACKWARD_NAMES = {
    "embedding": "embedding_dense_backward",
    "relu": "threshold_backward",
    "_log_softmax": "_log_softmax_backward_data",
    "_softmax": "_softmax_backward_data",
    "nll_loss_forward": "nll_loss_backward",
    "_native_batch_norm_legit_functional": "native_batch_norm_backward",
}
"""Of the others one op for all; where the name is not that of the op and "_backward"."""
STATES = {"sgd": 0, "rmsprop": 1, "adam": 2}
"""Tensors of state a parameter has in each optimizer."""


@dataclass(frozen=True)
class _Op:
    kind: str
    module: str
    phase: Phase
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int
    moves: bool
    gradient_of: int


@dataclass
class Tape:
    """Tensors are numbered in the order in which they are made; every op stands after what it
    reads, sources where they are first needed."""

    _ops: list[_Op] = field(default_factory=list)
    _shapes: list[tuple[int, ...]] = field(default_factory=list)
    _producers: list[int] = field(default_factory=list)
    _storages: list[int] = field(default_factory=list)
    _overwrites: list[bool] = field(default_factory=list)
    _parameters: list[int] = field(default_factory=list)
    _plain: set[int] = field(default_factory=set)  # tensors that have no gradient

    def input(self, *shape: int) -> int:
        tensor = self._source("input", "", shape)
        self._plain.add(tensor)
        return tensor

    def parameter(self, module: str, *shape: int) -> int:
        tensor = self._source("parameter", module, shape)
        self._parameters.append(tensor)
        return tensor

    def op(
        self, module: str, kind: str, reads: tuple[int, ...], shape: tuple[int, ...], flops: int = 0
    ) -> int:
        """An op of the forward pass with one output; 0 FLOPs: one for each of its elements."""
        return self._add(kind, module, Phase.FORWARD, reads, (shape,), flops)[0]

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self._shapes[tensor]

    # What most networks are made of.

    def linear(self, module: str, x: int, weight: int) -> int:
        """x [rows, in] times weight [in, out]."""
        (rows, inner), columns = self.shape(x), self.shape(weight)[1]
        flops = 2 * rows * inner * columns
        return self.op(module, "aten.addmm", (x, weight), (rows, columns), flops)

    def dense(self, module: str, x: int, columns: int) -> int:
        """A linear layer with a weight of its own."""
        return self.linear(module, x, self.parameter(module, self.shape(x)[1], columns))

    def convolution(self, module: str, x: int, channels: int, kernel: int, stride: int = 1) -> int:
        """x [batch, channels, pixels], square kernels as products of their size."""
        batch, before, pixels = self.shape(x)
        weight = self.parameter(module, channels, before, kernel)
        after = max(1, pixels // stride)
        flops = 2 * batch * after * before * channels * kernel
        shape = (batch, channels, after)
        return self.op(module, "aten.convolution", (x, weight), shape, flops)

    def each(self, module: str, kind: str, *reads: int) -> int:
        """Element by element; the shape is that of the first."""
        return self.op(module, f"aten.{kind}", reads, self.shape(reads[0]))

    def normalise(self, module: str, x: int, kind: str) -> int:
        """With a scale of its own."""
        scale = self.parameter(module, self.shape(x)[1])
        shape = self.shape(x)
        return self.op(module, f"aten.{kind}", (x, scale), shape, 8 * int(np.prod(shape)))

    def join(self, module: str, *reads: int) -> int:
        """Along the second axis."""
        first = self.shape(reads[0])
        width = sum(self.shape(x)[1] for x in reads)
        return self.op(module, "aten.cat", reads, (first[0], width, *first[2:]))

    def view(self, module: str, x: int, *shape: int) -> int:
        """The same elements, without moving any."""
        return self._add("aten.view", module, Phase.FORWARD, (x,), (shape,), -1)[0]

    def split(self, module: str, x: int, parts: int) -> list[int]:
        """Equal parts of the second axis, without moving any."""
        rows, columns = self.shape(x)
        shapes = ((rows, columns // parts),) * parts
        return self._add("aten.split", module, Phase.FORWARD, (x,), shapes, -1)

    def embedding(self, module: str, table: int, rows: int) -> int:
        """Rows of a table [entries, columns], by indices that are an input."""
        indices = self.input(rows)
        return self.op(module, "aten.embedding", (table, indices), (rows, self.shape(table)[1]))

    def product(self, module: str, a: int, b: int, shape: tuple[int, ...], inner: int) -> int:
        """A batch of products of two activations."""
        flops = 2 * int(np.prod(shape)) * inner
        return self.op(module, "aten.bmm", (a, b), shape, flops)

    def loss(self, module: str, scores: int) -> int:
        """Of scores [rows, classes]."""
        log = self.each(module, "_log_softmax", scores)
        return self.op(module, "aten.nll_loss_forward", (log,), ())

    def graph(self, losses: list[int], optimizer: str | None) -> Graph:
        """The step's graph: with gradients of the losses' sum and updates; None: forward alone."""
        if optimizer is None:
            return self._finished(losses)
        of_losses = {
            loss: [self._add("aten.ones_like", "loss", Phase.BACKWARD, (loss,), ((),), 1)[0]]
            for loss in losses
        }
        gradients = self._backward(of_losses)
        for parameter in self._parameters:
            if parameter in gradients:
                self._update(parameter, self._sum(parameter, gradients[parameter]), optimizer)
        return self._finished(losses)

    def _source(self, kind: str, module: str, shape: tuple[int, ...]) -> int:
        return self._add(kind, module, Phase.SOURCE, (), (shape,), -1)[0]

    def _add(
        self,
        kind: str,
        module: str,
        phase: Phase,
        reads: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...],
        flops: int,
        gradient_of: int = -1,
    ) -> list[int]:
        """The op's outputs. flops: -1 moves nothing: a source, or a view; 0: one an element."""
        view = flops < 0 and bool(reads)
        tensors = list(range(len(self._shapes), len(self._shapes) + len(shapes)))
        for tensor, shape in zip(tensors, shapes, strict=True):
            self._shapes.append(shape)
            self._producers.append(len(self._ops))
            self._storages.append(self._storages[reads[0]] if view else tensor)
            self._overwrites.append(False)
        elements = sum(int(np.prod(shape)) for shape in shapes)
        counted = elements if flops == 0 else max(flops, 0)
        reads = tuple(dict.fromkeys(reads))
        self._ops.append(
            _Op(kind, module, phase, reads, tuple(tensors), counted, flops >= 0, gradient_of)
        )
        return tensors

    def _backward(self, gradients: dict[int, list[int]]) -> dict[int, list[int]]:
        """tensor -> the gradients that arrive at it."""
        for index in range(len(self._ops) - 1, -1, -1):
            op = self._ops[index]
            if op.phase == Phase.FORWARD and any(tensor in gradients for tensor in op.outputs):
                arrived = tuple(
                    self._sum(tensor, gradients[tensor])
                    for tensor in op.outputs
                    if tensor in gradients
                )
                for tensor, gradient in self._gradients(index, op, arrived):
                    gradients.setdefault(tensor, []).append(gradient)
        return gradients

    def _sum(self, tensor: int, gradients: list[int]) -> int:
        """Of several gradients, as a chain of additions."""
        total, module = gradients[0], self._ops[self._producers[tensor]].module
        for gradient in gradients[1:]:
            shape = (self._shapes[tensor],)
            total = self._add("aten.add", module, Phase.BACKWARD, (total, gradient), shape, 0)[0]
        return total

    def _gradients(self, index: int, op: _Op, arrived: tuple[int, ...]) -> list[tuple[int, int]]:
        """(tensor that it read, gradient) of each that has one."""
        wanted = [tensor for tensor in op.reads if tensor not in self._plain]
        short = op.kind.removeprefix("aten.")
        if op.kind in PASSED:
            return [(tensor, arrived[0]) for tensor in wanted]
        if short in ("addmm", "bmm"):
            return [(t, self._of_product(index, op, arrived[0], t)) for t in wanted]
        if short in APART:
            return [(t, self._apart(index, op, arrived, t)) for t in wanted]
        if not wanted:
            return []
        shapes = tuple(self._shapes[tensor] for tensor in wanted)
        kind = f"aten.{BACKWARD_NAMES.get(short, short + '_backward')}"
        saved = op.reads if short in ("convolution", "embedding") else (*op.outputs, *op.reads[1:])
        flops = len(wanted) * op.flops
        back = Phase.BACKWARD
        made = self._add(kind, op.module, back, (*arrived, *saved), shapes, flops, index)
        return list(zip(wanted, made, strict=True))

    def _apart(self, index: int, op: _Op, arrived: tuple[int, ...], tensor: int) -> int:
        """A small op for each input by itself."""
        kind = APART[op.kind.removeprefix("aten.")]
        others = tuple(o for o in op.reads if o != tensor) if op.kind == "aten.mul" else ()
        shapes, flops = (self._shapes[tensor],), -1 if kind == "aten.view" else 0
        reads = (*arrived, *others)
        return self._add(kind, op.module, Phase.BACKWARD, reads, shapes, flops, index)[0]

    def _of_product(self, index: int, op: _Op, arrived: int, tensor: int) -> int:
        """A product as large as the op's own, with its other factor transposed by a view."""
        other = next((o for o in op.reads if o != tensor), tensor)
        turned = tuple(reversed(self._shapes[other]))
        back = Phase.BACKWARD
        transposed = self._add("aten.t", op.module, back, (other,), (turned,), -1, index)[0]
        kind = "aten.mm" if op.kind == "aten.addmm" else op.kind
        shapes = (self._shapes[tensor],)
        return self._add(kind, op.module, back, (arrived, transposed), shapes, op.flops, index)[0]

    def _update(self, parameter: int, gradient: int, optimizer: str) -> None:
        """Writes the parameter and its state anew."""
        module, shape = self._ops[self._producers[parameter]].module, self._shapes[parameter]
        states = [self._source("state", module, shape) for _ in range(STATES[optimizer])]
        written = (parameter, *states)
        flops = (2 + 4 * len(states)) * int(np.prod(shape))
        made = self._add(
            f"dovetail.{optimizer}", module, Phase.UPDATE, (*written, gradient),
            (shape,) * len(written), flops,
        )  # fmt: skip
        for old, new in zip(written, made, strict=True):
            self._storages[new] = self._storages[old]
            self._overwrites[new] = True

    def _finished(self, outputs: list[int]) -> Graph:
        ops, shapes = self._ops, self._shapes
        sizes = np.array([ITEM_BYTES * int(np.prod(shape)) for shape in shapes], dtype=np.int64)
        accessed = [
            int(sizes[list(op.reads + op.outputs)].sum()) if op.moves and op.phase else 0
            for op in ops
        ]
        counts: dict[str, int] = {}
        names = []
        for op in ops:
            stem = f"{op.module}/{op.kind.rpartition('.')[2]}".lstrip("/")
            names.append(f"{stem}_{counts.setdefault(stem, 0)}")
            counts[stem] += 1
        read_shapes = [tuple(shapes[t] for t in op.reads) for op in ops]
        readers = np.repeat(np.arange(len(ops)), [len(op.reads) for op in ops])
        return Graph(
            names=tuple(names),
            kinds=tuple(op.kind for op in ops),
            signatures=tuple(f"{op.kind} {r}" for op, r in zip(ops, read_shapes, strict=True)),
            modules=tuple(op.module for op in ops),
            phases=np.array([op.phase for op in ops], np.int8),
            flops=np.array([op.flops for op in ops], np.int64),
            accessed_bytes=np.array(accessed, np.int64),
            colocation=np.full(len(ops), -1, np.int32),
            gradient_of=np.array([op.gradient_of for op in ops], np.int32),
            device_kinds=((),) * len(ops),
            producers=np.array(self._producers, np.int32),
            shapes=tuple(shapes),
            strides=tuple(_strides(shape) for shape in shapes),
            dtypes=("float32",) * len(shapes),
            tensor_bytes=sizes,
            storages=np.array(self._storages, np.int32),
            overwrites=np.array(self._overwrites),
            input_offsets=csr_offsets(readers, len(ops)),
            input_tensors=np.array([t for op in ops for t in op.reads], np.int32),
            outputs=np.array(outputs, np.int32),
            control=np.array(self._waits(), np.int32),
        )

    def _waits(self) -> list[tuple[int, int]]:
        """(reader of a parameter, its update): what writes over it waits for all that read it."""
        update = {
            self._storages[op.outputs[0]]: index
            for index, op in enumerate(self._ops)
            if op.phase == Phase.UPDATE
        }
        return [
            (index, update[tensor])
            for index, op in enumerate(self._ops)
            if op.phase in (Phase.FORWARD, Phase.BACKWARD)
            for tensor in op.reads
            if tensor in update
        ]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps = np.cumprod((1, *reversed(shape[1:]))) if shape else ()
    return tuple(int(step) for step in reversed(steps))
