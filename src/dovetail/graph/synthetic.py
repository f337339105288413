"""Makes a layered synthetic network of any size, to plan for and to measure with.

            blocks.0                          blocks.1
    ┌─► branch.0: mm ─► relu ─► mm ─► add ─┬─► branch.0: mm ─► relu ─► mm ─► add ─► …
    │                                      └──────────┐
    x ─► branch.1: mm ─► relu ─► mm ─► add ───► branch.1: mm ─► relu ─► mm ─► add ─► …      loss

Blocks repeat one shape, as the layers of real networks do. A branch reads the output of the same
branch of the block before, and its last op adds that output again. Some branches also add the
output of any branch of an earlier block. Branches differ in depth, and the inner widths of their
products change from stage to stage, so that small ops mix with large ones. In training every
forward op has a gradient op, which reads the gradients of the op's consumers. Every product also
has a gradient of its parameter, which an update reads.

The order of ops is sources, forward, backward, update. Each op has one output, so tensor i is the
output of op i.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import GraphError
from dovetail.graph.records import Graph, Phase, csr_offsets

Ints = NDArray[np.int64]
Value = TypeVar("Value")

ROWS, FEATURES = 256, 256
"""The shape of the tensors that go from block to block."""
WIDTHS = (32, 64, 128, 256, 512)
"""Possible numbers of features inside a branch; one is drawn for each branch in each stage."""
STAGES = 4
SKIP_SHARE, LONGEST_SKIP = 0.25, 8
"""The share of branches that add an output of an earlier block, and the most blocks that it goes
back."""
ITEM_BYTES = 4

KINDS = ("mm", "relu", "add")
_MM, _RELU, _ADD = range(len(KINDS))


@dataclass(frozen=True)
class _Network:
    """The indices of the network's ops. Forward ops are [blocks, size] and gradients likewise, last
    block first.

    kinds, branches   [size] kind and branch of each op of a block
    inner             [stages, width] features inside a branch
    skips             [blocks, width] (block, branch) whose output is added, as one index; -1: none
    head              number of ops after the loss, which have no gradient
    """

    kinds: Ints
    branches: Ints
    inner: Ints
    skips: Ints
    head: int
    training: bool

    @property
    def blocks(self) -> int:
        return len(self.skips)

    @property
    def size(self) -> int:
        return len(self.kinds)

    @cached_property
    def products(self) -> Ints:
        """Positions of the products in a block."""
        return np.flatnonzero(self.kinds == _MM)

    @property
    def parameters(self) -> Ints:
        """[blocks, products] op of each parameter; op 0 is the input."""
        return 1 + self._grid(len(self.products))

    @property
    def forward(self) -> Ints:
        """[blocks, size] op of each position."""
        return 1 + self.blocks * len(self.products) + self._grid(self.size)

    @property
    def loss(self) -> int:
        """The op after the last block; the head follows."""
        return 1 + self.blocks * (len(self.products) + self.size)

    @property
    def backward(self) -> tuple[Ints, Ints]:
        """([blocks, size] gradient of each forward op, [blocks, products] of each parameter), one
        after the other, after the loss's own."""
        each = self.size + len(self.products)
        before = each * np.arange(self.blocks - 1, -1, -1, dtype=np.int64)[:, None]
        first = before + self.loss + self.head + 2
        ops = 1 + (self.kinds == _MM)
        places = np.cumsum(ops[::-1])[::-1] - ops
        return first + places, first + places[self.products] + 1

    @property
    def updates(self) -> Ints:
        """[blocks, products] op of each parameter's update."""
        first = self.loss + self.head + 2 + self.blocks * (self.size + len(self.products))
        return first + self._grid(len(self.products))

    @cached_property
    def ends(self) -> Ints:
        """[width] positions of the last op of each branch."""
        return np.flatnonzero(self.kinds == _ADD)

    @property
    def inputs(self) -> Ints:
        """[blocks, width] op whose output each branch begins with."""
        inputs = np.zeros((self.blocks, len(self.ends)), np.int64)
        inputs[1:] = self.forward[:-1, self.ends]
        return inputs

    def _grid(self, columns: int) -> Ints:
        return np.arange(self.blocks * columns, dtype=np.int64).reshape(self.blocks, columns)

    @cached_property
    def features(self) -> tuple[Ints, Ints]:
        """[blocks, size] columns that each op reads and makes."""
        stage = np.arange(self.blocks) * STAGES // max(1, self.blocks)
        made_columns = self.inner[stage][:, self.branches]
        read_columns = made_columns.copy()
        made_columns[:, self.ends] = made_columns[:, self.ends - 1] = FEATURES
        read_columns[:, np.append(0, self.ends[:-1] + 1)] = read_columns[:, self.ends] = FEATURES
        return read_columns, made_columns


def layered(
    ops: int, *, width: int = 8, depth: int = 12, seed: int = 0, training: bool = False
) -> Graph:
    """Return a network of exactly `ops` ops, sources included.

    It has blocks of `width` branches with up to `depth` ops each, and at the end a chain of ops
    that fills up the number. The same arguments give the same graph. Half a million ops take a few
    seconds. Raises `GraphError` for fewer than four ops, or if `width` or `depth` is below one.
    """
    if ops < 4 or width < 1 or depth < 1:
        raise GraphError(f"no network has {ops} ops in blocks of {width} branches of {depth} ops")
    rng = np.random.default_rng(seed)
    # An odd number of ops before the addition, so that they begin and end with a product.
    depths = 2 * rng.integers((depth + 3) // 4, (depth + 1) // 2 + 1, size=width) - 1
    branches = np.repeat(np.arange(width), depths + 1)
    kinds = np.concatenate([np.append(np.arange(n) % 2, _ADD) for n in depths])
    products = int((kinds == _MM).sum())
    fixed, each = 2 + training, len(kinds) + products
    each += training * (len(kinds) + 2 * products)
    blocks, head = divmod(ops - fixed, each)
    inner = rng.choice(np.array(WIDTHS), size=(STAGES, width))
    column = np.arange(width)
    skipped = rng.integers(width, size=(blocks, width))
    back = rng.integers(1, LONGEST_SKIP, size=(blocks, width)) + (skipped == column)
    source_blocks = np.arange(blocks)[:, None] - back
    skipping = (rng.random((blocks, width)) < SKIP_SHARE) & (source_blocks >= 0)
    skips = np.where(skipping, source_blocks * width + skipped, -1)
    net = _Network(kinds, branches, inner, skips, head, training)
    readers, tensors = _reads(net)
    order = np.argsort(readers, kind="stable")
    # [ops] rows and columns of each output.
    rows, columns = np.full(ops, ROWS), np.full(ops, FEATURES)
    read_columns, made_columns = net.features
    columns[net.forward] = made_columns
    rows[net.loss] = columns[net.loss] = 1
    # FLOPs: two per multiply-add, and one per element of other ops.
    multiplied = (2 * ROWS * read_columns * made_columns)[:, net.products]
    # Phases, storages, and the op whose gradient each op computes.
    phases, storages = np.full(ops, Phase.FORWARD.value), np.arange(ops)
    gradient_of = np.full(ops, -1)
    phases[0] = phases[net.parameters] = Phase.SOURCE
    of_parts, gradients, of_parameters = [net.parameters], *net.backward
    control = np.zeros((0, 2), np.int64)
    if training:
        columns[gradients] = np.where(net.kinds == _MM, read_columns, made_columns)
        of_parts += [of_parameters, net.updates]
        phases[net.loss + net.head + 1 :] = Phase.BACKWARD
        phases[net.updates] = Phase.UPDATE
        storages[net.updates] = net.parameters
        gradient_of[net.loss + net.head + 1] = net.loss
        gradient_of[gradients] = net.forward
        gradient_of[of_parameters] = net.forward[:, net.products]
        # The gradient of a product reads its parameter, and the update waits for it.
        ends = [gradients[:, net.products].ravel(), net.updates.ravel()]
        control = np.stack(ends, axis=1)
    for of_part in of_parts:
        rows[of_part] = read_columns[:, net.products]
        columns[of_part] = made_columns[:, net.products]
    flops = rows * columns
    flops[net.forward[:, net.products]] = multiplied
    flops[0] = flops[net.parameters] = 0
    if training:
        flops[gradients[:, net.products]] = flops[of_parameters] = multiplied
        flops[net.updates] *= 2
    tensor_bytes = rows * columns * ITEM_BYTES
    accessed = np.bincount(readers, weights=tensor_bytes[tensors], minlength=ops) + tensor_bytes
    accessed[phases == Phase.SOURCE] = 0
    names, op_kinds, modules = _names(net)
    shape_of = rows * 2**20 + columns
    kind_of = np.unique(op_kinds, return_inverse=True)[1].reshape(-1)
    return Graph(
        names=names,
        kinds=op_kinds,
        signatures=_share_values(
            shape_of * 32 + kind_of, lambda op: f"{op_kinds[op]} {rows[op]}x{columns[op]}"
        ),
        modules=modules,
        phases=phases.astype(np.int8),
        flops=flops,
        accessed_bytes=accessed.astype(np.int64),
        gradient_of=gradient_of.astype(np.int32),
        producers=np.arange(ops, dtype=np.int32),
        shapes=_share_values(shape_of, lambda op: (int(rows[op]), int(columns[op]))),
        strides=_share_values(shape_of, lambda op: (int(columns[op]), 1)),
        dtypes=("float32",) * ops,
        tensor_bytes=tensor_bytes,
        storages=storages.astype(np.int32),
        overwrites=phases == Phase.UPDATE,
        input_offsets=csr_offsets(readers, ops),
        input_tensors=tensors[order].astype(np.int32),
        outputs=np.array([net.loss + net.head], dtype=np.int32),
        control=control.astype(np.int32),
    )


def _reads(net: _Network) -> tuple[Ints, Ints]:
    """Return (ops, tensors) of all reads; those of one op are in the order of its arguments."""
    forward = net.forward
    # Of the op before, and of what the branch begins with.
    starts = np.append(0, net.ends[:-1] + 1)
    chained = np.setdiff1d(np.arange(net.size), starts)
    made = [forward[:, chained], forward[:, starts], forward[:, net.ends]]
    read = [forward[:, chained - 1], net.inputs, net.inputs]
    parts = [(np.concatenate(made, axis=1).ravel(), np.concatenate(read, axis=1).ravel())]
    parts.append((forward[:, net.products].ravel(), net.parameters.ravel()))
    ends = forward[:, net.ends]
    skipping = net.skips >= 0
    parts.append((ends[skipping], ends.ravel()[net.skips[skipping]]))
    last = ends[-1] if net.blocks else np.zeros(1, np.int64)
    parts.append((np.full(len(last), net.loss), last))
    head = net.loss + 1 + np.arange(net.head)
    parts.append((head, head - 1))
    if net.training:
        parts.extend(_gradient_reads(net, *map(np.concatenate, zip(*parts, strict=True))))
    readers, tensors = (np.concatenate(ends) for ends in zip(*parts, strict=True))
    return readers.astype(np.int64), tensors.astype(np.int64)


def _gradient_reads(net: _Network, readers: Ints, tensors: Ints) -> list[tuple[Ints, Ints]]:
    """Reads of the backward and update ops, from those of the forward ops."""
    gradients, of_parameters = net.backward
    parameters, updates = net.parameters, net.updates
    gradient = np.full(net.loss + net.head + 1, -1)
    gradient[net.forward.ravel()] = gradients.ravel()
    gradient[net.loss] = net.loss + net.head + 1
    weight = np.full(len(gradient), -1)
    weight[net.forward[:, net.products].ravel()] = of_parameters.ravel()
    arrives = gradient[readers] >= 0
    through = arrives & (gradient[tensors] >= 0)
    into = arrives & (weight[tensors] >= 0)
    activation = (weight[readers] >= 0) & ~np.isin(tensors, parameters)
    relus = np.flatnonzero(net.kinds == _RELU)
    return [
        (gradient[tensors[through]], gradient[readers[through]]),
        (weight[tensors[into]], gradient[readers[into]]),
        (weight[readers[activation]], tensors[activation]),
        (gradients[:, net.products].ravel(), parameters.ravel()),
        (gradients[:, relus].ravel(), net.forward[:, relus].ravel()),
        (gradient[[net.loss]], np.array([net.loss])),
        (updates.ravel(), of_parameters.ravel()),
        (updates.ravel(), parameters.ravel()),
    ]


def _names(net: _Network) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """[ops] names, kinds and modules."""
    inside = [f".branch.{b}" for b in net.branches.tolist()]
    kinds = [KINDS[kind] for kind in net.kinds.tolist()]
    forward = [(inside[p], kinds[p], f"/{kinds[p]}_{p}") for p in range(net.size)]
    weights = [(inside[p], p) for p in net.products.tolist()]
    parameters = [(module, "parameter", f"/weight_{p}") for module, p in weights]
    columns = [("", "input", "input")]
    blocks = range(net.blocks)
    columns += _repeat(parameters, blocks)
    columns += _repeat(forward, blocks)
    columns += [("", "loss", "loss")]
    columns += [("head", "relu", f"head/relu_{i}") for i in range(net.head)]
    if net.training:
        backward = []
        for p in reversed(range(net.size)):
            backward.append((inside[p], f"{kinds[p]}_backward", f"/{kinds[p]}_{p}_backward"))
            if net.kinds[p] == _MM:
                backward.append((inside[p], "mm", f"/weight_{p}_backward"))
        updates = [(module, "sgd", f"/weight_{p}_update") for module, p in weights]
        columns += [("", "loss_backward", "loss_backward")]
        columns += _repeat(backward, reversed(blocks))
        columns += _repeat(updates, blocks)
    modules, of_kind, names = zip(*columns, strict=True)
    return names, of_kind, modules


def _repeat(
    template: list[tuple[str, str, str]], blocks: Iterable[int]
) -> list[tuple[str, str, str]]:
    """(module, kind, name) of each op of a part, block after block; modules are shared."""
    rows = []
    for block in blocks:
        around = f"blocks.{block}"
        modules = {inside: around + inside for inside, _, _ in template}
        rows += [(modules[inside], kind, modules[inside] + name) for inside, kind, name in template]
    return rows


def _share_values(codes: Ints, make: Callable[[int], Value]) -> tuple[Value, ...]:
    """`make(op)` of every op, made once for all ops of one code."""
    _, first, of_op = np.unique(codes, return_index=True, return_inverse=True)
    values = [make(op) for op in first.tolist()]
    return tuple(values[i] for i in of_op.reshape(-1).tolist())
