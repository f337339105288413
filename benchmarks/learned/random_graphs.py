"""Random networks that look like real ones, and random machines: what a policy is pretrained on.

Every family writes a network of drawn sizes on a `Tape`, which adds gradients and updates:

    recurrent     layers of LSTM cells, unrolled over steps, weights shared by all of them
    translation   two such stacks, the second attends to the first at every step
    cells         modules of branches of convolutions, joined, one after the other
    wired         cells whose nodes read two earlier ones each, drawn anew, as searched cells do
    attention     residual blocks of self-attention and a wide layer
    experts       the same with a layer of many experts side by side
    dilated       gated convolutions, with a sum of what all of them skip
    towers        many tables and towers side by side, joined by a few layers

No network of the zoo is copied: sizes, depths and wiring are drawn. Same seed, same graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dovetail.graph import Graph, Phase
from dovetail.graph.records import csr_offsets
from dovetail.machine import Device, Link, Machine

# Random machines: accelerators of one or two models, their links, and a host.


LEAST_DEVICES, MOST_DEVICES = 2, 8


def random_machine(seed: int, graph: Graph | None = None) -> Machine:
    """2 to 8 accelerators and a CPU that is their host.

    Rates are drawn between those of the K80 and of the A100 in an old and in a new framework;
    links are PCIe or ten times that. `graph`: in half of the machines memory is so drawn that one
    accelerator can hold less than what the graph keeps; else it is ample.
    """
    rng = np.random.default_rng((seed, 78))
    count = int(rng.integers(LEAST_DEVICES, MOST_DEVICES + 1))
    models = 1 if rng.random() < 0.7 or count < 3 else 2
    memory_bytes = _memory(rng, graph, count)
    rates = [_rates(rng) for _ in range(models)]
    if models == 2:  # one of them is at most three times as fast
        factor = rng.uniform(0.33, 0.9)
        rates[1] = (factor * rates[0][0], factor * rates[0][1], rates[0][2])
    devices = [
        Device(
            f"gpu:{i}",
            "gpu",
            f"gpu{i * models // count}",
            memory_bytes,
            {"float32": rates[i * models // count][0]},
            rates[i * models // count][1],
            rates[i * models // count][2],
        )
        for i in range(count)
    ]
    slower = rng.uniform(5, 40)
    host = Device(
        "cpu", "cpu", "cpu", 256 * 2**30,
        {"float32": rates[0][0] / slower}, rates[0][1] / 8, rates[0][2] / 2,
    )  # fmt: skip
    rate, latency = 10 ** rng.uniform(9.5, 10.5), 10 ** rng.uniform(-5.3, -4.2)
    quicker = rng.choice([1.0, 1.0, 10.0])
    links = [
        Link(
            a.name, b.name, rate if host in (a, b) else quicker * rate, latency,
            f"{a.name}->{b.name}",
        )
        for a in (*devices, host)
        for b in (*devices, host)
        if a is not b
    ]  # fmt: skip
    return Machine(f"random {seed}", (*devices, host), host.name, tuple(links))


def _rates(rng: np.random.Generator) -> tuple[float, float, float]:
    """FLOPs per second, bytes per second, seconds an op."""
    return 10 ** rng.uniform(12.0, 13.5), 10 ** rng.uniform(11.0, 12.2), 10 ** rng.uniform(-5.4, -4)


def _memory(rng: np.random.Generator, graph: Graph | None, count: int) -> int:
    if graph is None or rng.random() < 0.5:
        return 64 * 2**30
    owned = graph.is_source[graph.producers] & (graph.residences[graph.producers] >= 0)
    kept = int(graph.tensor_bytes[owned].sum())
    late = np.isin(graph.phases[graph.readers], (Phase.BACKWARD, Phase.UPDATE))
    read_late = np.zeros(graph.tensors, dtype=bool)
    read_late[graph.input_tensors[late]] = True
    read_late &= (graph.phases[graph.producers] == Phase.FORWARD) & (graph.bases < 0)
    kept += int(graph.tensor_bytes[read_late].sum())
    share = rng.uniform(min(0.95, 1.8 / count), 1.3)
    return int(max(share * kept, 2**26)) + 2**28


# A tape on which networks are written down op by op, and which adds gradients and updates.
#
#     x, w ──► op ──► op ──► loss          what is written
#              │      │
#     grads ◄──┴──◄───┘                    added in reverse, as an automatic differentiator would
#       └────► update w                    one op a parameter
#
# Kinds carry the names that captured graphs have ("aten.addmm", "dovetail.adam"), so that a policy
# meets the same ones. Nothing is computed: shapes, FLOPs and bytes are all there is. Float32.


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
class _TapeOp:
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

    _ops: list[_TapeOp] = field(default_factory=list)
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
            _TapeOp(kind, module, phase, reads, tuple(tensors), counted, flops >= 0, gradient_of)
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

    def _gradients(
        self, index: int, op: _TapeOp, arrived: tuple[int, ...]
    ) -> list[tuple[int, int]]:
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

    def _apart(self, index: int, op: _TapeOp, arrived: tuple[int, ...], tensor: int) -> int:
        """A small op for each input by itself."""
        kind = APART[op.kind.removeprefix("aten.")]
        others = tuple(o for o in op.reads if o != tensor) if op.kind == "aten.mul" else ()
        shapes, flops = (self._shapes[tensor],), -1 if kind == "aten.view" else 0
        reads = (*arrived, *others)
        return self._add(kind, op.module, Phase.BACKWARD, reads, shapes, flops, index)[0]

    def _of_product(self, index: int, op: _TapeOp, arrived: int, tensor: int) -> int:
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
            gradient_of=np.array([op.gradient_of for op in ops], np.int32),
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


Rng = np.random.Generator


def random_graph(
    seed: int, *, family: str | None = None, size: float = 1.0, optimizer: str | None = "adam"
) -> Graph:
    """A network of `family` (None: drawn).

    size        multiplies depth or steps: at 1 about 300 to 3,000 ops
    optimizer   "sgd", "rmsprop", "adam", or None: forward alone
    """
    rng = np.random.default_rng((seed, 77))
    names = list(FAMILIES)
    drawn = names[int(rng.integers(len(names)))]
    tape = Tape()
    losses = FAMILIES[family or drawn](tape, rng, size)
    return tape.graph(losses, optimizer)


def _power(rng: Rng, least: int, most: int) -> int:
    """A power of two, or one and a half of it."""
    exponent = rng.uniform(np.log2(least), np.log2(most))
    return int(2 ** int(exponent) * rng.choice([1, 1.5]))


def _count(rng: Rng, least: int, most: int, size: float = 1.0) -> int:
    return max(1, round(size * int(rng.integers(least, most + 1))))


class _Cell:
    """An LSTM cell: its weights, and a step."""

    def __init__(self, tape: Tape, module: str, inputs: int, hidden: int) -> None:
        self.tape, self.module, self.hidden = tape, module, hidden
        self.of_input = tape.parameter(module, inputs, 4 * hidden)
        self.of_state = tape.parameter(module, hidden, 4 * hidden)

    def step(self, x: int, state: tuple[int, int] | None) -> tuple[int, int]:
        """(output, memory)"""
        tape, module = self.tape, self.module
        gates = tape.linear(module, x, self.of_input)
        if state is not None:
            gates = tape.each(module, "add", gates, tape.linear(module, state[0], self.of_state))
        enters, forgets, leaves, new = tape.split(module, gates, 4)
        memory = tape.each(
            module,
            "mul",
            tape.each(module, "sigmoid", enters),
            tape.each(module, "tanh", new),
        )
        if state is not None:
            kept = tape.each(module, "mul", tape.each(module, "sigmoid", forgets), state[1])
            memory = tape.each(module, "add", kept, memory)
        out = tape.each(module, "sigmoid", leaves)
        return tape.each(module, "mul", out, tape.each(module, "tanh", memory)), memory


def _stack(
    tape: Tape, rng: Rng, module: str, layers: int, hidden: int, steps: list[int]
) -> list[int]:
    """Outputs of the top layer at every step; some stacks add what enters a layer."""
    first = tape.shape(steps[0])[1]
    cells = [
        _Cell(tape, f"{module}.{i}", first if i == 0 else hidden, hidden) for i in range(layers)
    ]
    residual = rng.random() < 0.4
    states: list[tuple[int, int] | None] = [None] * layers
    outputs = []
    for x in steps:
        for i, cell in enumerate(cells):
            state = states[i] = cell.step(x, states[i])
            skips = residual and i > 0
            x = tape.each(cell.module, "add", state[0], x) if skips else state[0]
        outputs.append(x)
    return outputs


def _recurrent(tape: Tape, rng: Rng, size: float) -> list[int]:
    layers, steps = int(rng.integers(1, 9)), _count(rng, 4, 14, size)
    hidden, batch = _power(rng, 256, 2048), _power(rng, 16, 128)
    vocabulary = _power(rng, 1000, 40_000)
    table = tape.parameter("embedding", vocabulary, hidden)
    words = [tape.embedding("embedding", table, batch) for _ in range(steps)]
    tops = _stack(tape, rng, "layers", layers, hidden, words)
    weight = tape.parameter("softmax", hidden, vocabulary)
    losses = [tape.loss("softmax", tape.linear("softmax", x, weight)) for x in tops]
    return [tape.op("loss", "aten.sum", tuple(losses), ())]


def _translation(tape: Tape, rng: Rng, size: float) -> list[int]:
    layers, steps = int(rng.integers(1, 5)), _count(rng, 3, 8, size)
    hidden, batch = _power(rng, 256, 1024), _power(rng, 16, 128)
    vocabulary = _power(rng, 4000, 40_000)
    tables = [tape.parameter(f"{side}_words", vocabulary, hidden) for side in ("from", "to")]
    words = [tape.embedding("from_words", tables[0], batch) for _ in range(steps)]
    encoded = _stack(tape, rng, "reader", layers, hidden, words)
    memory = tape.view("look", tape.join("look", *encoded), batch, hidden, steps)
    words = [tape.embedding("to_words", tables[1], batch) for _ in range(steps)]
    tops = _stack(tape, rng, "writer", layers, hidden, words)
    weight, output = (tape.parameter("look", hidden, hidden) for _ in range(2))
    head = tape.parameter("softmax", hidden, vocabulary)
    losses = []
    for x in tops:
        asked = tape.linear("look", x, weight)
        shares = tape.product("look", asked, memory, (batch, steps), hidden)
        shares = tape.each("look", "_softmax", shares)
        found = tape.product("look", shares, memory, (batch, hidden), steps)
        joined = tape.each("look", "add", x, tape.linear("look", found, output))
        joined = tape.each("look", "tanh", joined)
        losses.append(tape.loss("softmax", tape.linear("softmax", joined, head)))
    return [tape.op("loss", "aten.sum", tuple(losses), ())]


def _unit(tape: Tape, module: str, x: int, channels: int, kernel: int, stride: int = 1) -> int:
    """Convolution, normalisation, rectifier."""
    x = tape.convolution(f"{module}.conv", x, channels, kernel, stride)
    x = tape.normalise(f"{module}.norm", x, "_native_batch_norm_legit_functional")
    return tape.each(module, "relu", x)


def _classes(tape: Tape, rng: Rng, x: int) -> list[int]:
    batch, channels, _ = tape.shape(x)
    mean = tape.op("head", "aten.mean", (x,), (batch, channels))
    return [tape.loss("loss", tape.dense("head", mean, _power(rng, 100, 4000)))]


def _images(tape: Tape, rng: Rng) -> tuple[int, int]:
    """(images after a first convolution, channels)"""
    batch, channels = _power(rng, 8, 64), _power(rng, 16, 128)
    pixels = int(rng.integers(24, 80)) ** 2
    images = tape.input(batch, 3, pixels)
    return _unit(tape, "stem", images, channels, 9), channels


def _cells(tape: Tape, rng: Rng, size: float) -> list[int]:
    x, channels = _images(tape, rng)
    for i in range(_count(rng, 4, 12, size)):
        branches = []
        for b in range(int(rng.integers(2, 6))):
            y, width = x, max(8, int(channels * rng.uniform(0.25, 1.0)))
            for depth in range(int(rng.integers(1, 5))):
                kernel = int(rng.choice([1, 3, 7, 9]))
                y = _unit(tape, f"cells.{i}.branches.{b}.{depth}", y, width, kernel)
            branches.append(y)
        x = tape.join(f"cells.{i}", *branches)
        if rng.random() < 0.25:
            channels = int(1.5 * channels)
            x = _unit(tape, f"cells.{i}.reduce", x, channels, 1, stride=4)
    return _classes(tape, rng, x)


def _wired(tape: Tape, rng: Rng, size: float) -> list[int]:
    x, channels = _images(tape, rng)
    last, nodes = x, int(rng.integers(3, 7))
    wiring = [[int(n) for n in rng.integers(0, 2 + node, size=2)] for node in range(nodes)]
    kernels = rng.choice([1, 3, 9], size=(nodes, 2))
    for i in range(_count(rng, 3, 9, size)):
        module = f"stages.{i}"
        states = [
            _unit(tape, f"{module}.before.{k}", y, channels, 1) for k, y in enumerate((last, x))
        ]
        for node, reads in enumerate(wiring):
            ends = [
                _unit(tape, f"{module}.nodes.{node}.{k}", states[r], channels, int(kernel))
                for k, (r, kernel) in enumerate(zip(reads, kernels[node], strict=True))
            ]
            states.append(tape.each(f"{module}.nodes.{node}", "add", *ends))
        last, x = x, tape.join(module, *states[2:])
    return _classes(tape, rng, x)


def _attend(tape: Tape, module: str, x: int, batch: int) -> int:
    rows, width = tape.shape(x)
    normal = tape.normalise(f"{module}.norm", x, "native_layer_norm")
    asks, keys, values = (tape.dense(f"{module}.{name}", normal, width) for name in "qkv")
    length = rows // batch
    scores = tape.product(module, asks, keys, (rows, length), width)
    shares = tape.each(module, "_softmax", scores)
    mixed = tape.product(module, shares, values, (rows, width), length)
    return tape.each(module, "add", x, tape.dense(f"{module}.out", mixed, width))


def _widen(tape: Tape, module: str, x: int, factor: int) -> int:
    width = tape.shape(x)[1]
    normal = tape.normalise(f"{module}.norm", x, "native_layer_norm")
    inner = tape.each(module, "gelu", tape.dense(f"{module}.up", normal, factor * width))
    return tape.each(module, "add", x, tape.dense(f"{module}.down", inner, width))


def _words(tape: Tape, rng: Rng) -> tuple[int, int, int]:
    """(embedded words [batch x length, width], batch, vocabulary)"""
    batch, length = _power(rng, 2, 16), _power(rng, 64, 512)
    width, vocabulary = _power(rng, 256, 1024), _power(rng, 4000, 40_000)
    table = tape.parameter("embedding", vocabulary, width)
    return tape.embedding("embedding", table, batch * length), batch, vocabulary


def _attention(tape: Tape, rng: Rng, size: float) -> list[int]:
    x, batch, vocabulary = _words(tape, rng)
    factor = int(rng.integers(2, 5))
    for i in range(_count(rng, 2, 16, size)):
        x = _attend(tape, f"blocks.{i}.attend", x, batch)
        x = _widen(tape, f"blocks.{i}.wide", x, factor)
    return [tape.loss("loss", tape.dense("softmax", x, vocabulary))]


def _experts(tape: Tape, rng: Rng, size: float) -> list[int]:
    x, batch, vocabulary = _words(tape, rng)
    experts, factor = int(rng.integers(3, 9)), int(rng.integers(2, 5))
    rows, width = tape.shape(x)
    for i in range(_count(rng, 2, 6, size)):
        x = _attend(tape, f"blocks.{i}.attend", x, batch)
        gate = tape.each(f"blocks.{i}", "_softmax", tape.dense(f"blocks.{i}.gate", x, experts))
        parts = []
        for expert in range(experts):
            module = f"blocks.{i}.experts.{expert}"
            own = tape.op(module, "aten.index", (x, gate), (max(1, rows // experts), width))
            wide = tape.each(module, "gelu", tape.dense(f"{module}.up", own, factor * width))
            back = tape.dense(f"{module}.down", wide, width)
            parts.append(tape.op(module, "aten.index_add", (back,), (rows, width)))
        while len(parts) > 1:
            parts.append(tape.each(f"blocks.{i}", "add", parts.pop(), parts.pop()))
        x = tape.each(f"blocks.{i}", "add", x, parts[0])
    return [tape.loss("loss", tape.dense("softmax", x, vocabulary))]


def _dilated(tape: Tape, rng: Rng, size: float) -> list[int]:
    batch, channels = _power(rng, 2, 16), _power(rng, 32, 256)
    skipped, length = _power(rng, 64, 512), _power(rng, 1024, 8192)
    x = _unit(tape, "stem", tape.input(batch, 1, length), channels, 2)
    skips: list[int] = []
    layers = _count(rng, 6, 24, size)
    for i in range(layers):
        module = f"layers.{i}"
        gate = tape.convolution(f"{module}.gate", x, channels, 2)
        signal = tape.convolution(f"{module}.signal", x, channels, 2)
        y = tape.each(
            module,
            "mul",
            tape.each(module, "sigmoid", gate),
            tape.each(module, "tanh", signal),
        )
        skips.append(tape.convolution(f"{module}.skip", y, skipped, 1))
        if i < layers - 1:
            x = tape.each(module, "add", x, tape.convolution(f"{module}.out", y, channels, 1))
    total = skips[0]
    for i, skip in enumerate(skips[1:], 1):
        total = tape.each(f"layers.{i}", "add", total, skip)
    head = _unit(tape, "head.0", total, skipped, 1)
    return _classes(tape, rng, _unit(tape, "head.1", head, 256, 1))


def _towers(tape: Tape, rng: Rng, size: float) -> list[int]:
    batch, width = _power(rng, 256, 4096), _power(rng, 32, 256)
    ends = []
    for i in range(_count(rng, 4, 20, size)):
        table = tape.parameter(f"tables.{i}", _power(rng, 2000, 200_000), width)
        x = tape.embedding(f"tables.{i}", table, batch)
        for depth in range(int(rng.integers(0, 4))):
            module = f"towers.{i}.{depth}"
            x = tape.each(module, "relu", tape.dense(module, x, _power(rng, 64, 1024)))
        ends.append(x)
    x = tape.join("top", *ends)
    for depth in range(_count(rng, 2, 5)):
        module = f"top.{depth}"
        x = tape.each(module, "relu", tape.dense(module, x, _power(rng, 128, 2048)))
    return [tape.loss("loss", tape.dense("head", x, 2))]


FAMILIES: dict[str, Callable[[Tape, Rng, float], list[int]]] = {
    "recurrent": _recurrent,
    "translation": _translation,
    "cells": _cells,
    "wired": _wired,
    "attention": _attention,
    "experts": _experts,
    "dilated": _dilated,
    "towers": _towers,
}
"""Family -> writes a network on a tape, and returns its losses."""
