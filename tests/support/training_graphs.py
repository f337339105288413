"""Training steps by hand: layers with a parameter each, their gradients and updates."""

from dataclasses import replace

import numpy as np

from dovetail.graph import Phase
from tests.support.builders import Op, graph_of, source


def layered_step(reads, rng=None, tied=(), whole=False):
    """A graph of layers. Layer i reads the outputs of the layers `reads[i]`, all earlier, and its
    parameter p.i, and makes f.i. b.i is the gradient of its inputs, w.i of its parameter, and u.i
    the update. What two layers read has a sum of two gradients.

    rng    draws FLOPs and bytes; None: all are equal, and parameters are small
    tied   (layer, earlier layer): the first reads the second's parameter too
    whole  the ops of a layer are colocated
    """
    tied = dict(tied)
    layers = range(len(reads))

    def numbers(low=1, high=2000):
        return int(rng.integers(low, high)) if rng is not None else 100

    ops = [source("x", "input", 40)]
    ops += [source(f"p.{i}", output_bytes=4 * numbers(1, 300)) for i in layers if i not in tied]
    sizes = {op.name: op.output_bytes for op in ops}
    for i in layers:
        size = 4 * numbers(1, 300)
        inputs = tuple(f"f.{j}" for j in reads[i]) or ("x",)
        parameter = f"p.{tied.get(i, i)}"
        ops.append(
            Op(
                f"f.{i}", (*inputs, parameter), kind="test.layer", output_bytes=size,
                flops=numbers(), accessed_bytes=8, module=f"layers.{i}",
            )
        )  # fmt: skip
        sizes[f"f.{i}"] = size
    last = len(reads) - 1
    ops.append(Op("loss", (f"f.{last}",), output_bytes=4, flops=1, module=f"layers.{last}"))
    gradients = {last: ["loss.b"]}
    backward = Phase.BACKWARD
    ops.append(
        Op(
            "loss.b", ("loss", f"f.{last}"), phase=backward, output_bytes=sizes[f"f.{last}"],
            gradient_of="loss", module=f"layers.{last}",
        )
    )  # fmt: skip
    weights = {}
    for i in reversed(layers):
        module = f"layers.{i}"
        parts = gradients[i]
        while len(parts) > 1:
            name = f"sum.{i}.{len(parts)}"
            ops.append(
                Op(name, tuple(parts[:2]), "aten.add", backward, sizes[f"f.{i}"], module=module)
            )
            parts = [name, *parts[2:]]
        of = dict(phase=backward, gradient_of=f"f.{i}", module=module)
        parameter = f"p.{tied.get(i, i)}"
        for j in reads[i]:
            name = f"b.{i}.{j}"
            ops.append(
                Op(
                    name, (parts[0], parameter, f"f.{i}"), output_bytes=sizes[f"f.{j}"],
                    flops=numbers(), **of,
                )
            )  # fmt: skip
            gradients.setdefault(j, []).append(name)
        inputs = tuple(f"f.{j}" for j in reads[i]) or ("x",)
        ops.append(
            Op(
                f"w.{i}", (parts[0], *inputs), output_bytes=sizes[parameter],
                flops=numbers(), **of,
            )
        )  # fmt: skip
        weights.setdefault(tied.get(i, i), []).append(f"w.{i}")
    control = []
    for i, made in weights.items():
        while len(made) > 1:
            name = f"tied.{i}.{len(made)}"
            ops.append(Op(name, tuple(made[:2]), "aten.add", backward, sizes[f"p.{i}"]))
            made = [name, *made[2:]]
        flops = numbers() if rng is not None else 1
        ops.append(
            Op(
                f"u.{i}", (f"p.{i}", made[0]), "test.update", Phase.UPDATE, sizes[f"p.{i}"],
                flops=flops, overwrites=f"p.{i}", module=f"layers.{i}",
            )
        )  # fmt: skip
        readers = [op.name for op in ops if f"p.{i}" in op.reads and op.phase != Phase.UPDATE]
        control += [(reader, f"u.{i}") for reader in readers]
    ops = [
        replace(op, colocation=int(op.module.rpartition(".")[2])) if op.module and whole else op
        for op in ops
    ]
    return graph_of(*ops, outputs=("loss",), control=control)


def random_step(seed, layers):
    """Colocated layers of random sizes. Each reads the one before it, and some an earlier one."""
    rng = np.random.default_rng(seed)
    reads = [()]
    for i in range(1, layers):
        skip = int(rng.integers(0, i))
        reads.append((i - 1,) if rng.random() < 0.6 or skip == i - 1 else (skip, i - 1))
    return layered_step(reads, rng, whole=True)


def micro_batches_of(graph):
    """[ops] the micro-batch that each op belongs to, by its name; -1: none."""
    heads = [name.partition("/")[0].rpartition(".") for name in graph.names]
    return np.array([int(n) if kind in ("micro", "accumulate") else -1 for kind, _, n in heads])
