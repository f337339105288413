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

import numpy as np

from dovetail.graph import Graph
from dovetail.placers.learned.tape import Tape

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
