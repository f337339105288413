"""Small random problems to learn on, with the real simulator behind them."""

import numpy as np

from dovetail.costs import Costs
from dovetail.graph import Groups, Phase
from dovetail.placers.learned.records import PlacementTask
from dovetail.simulator import Simulator
from tests.support.builders import Op, graph_of, machine_of, source

BANDWIDTH = 1e6  # bytes per second: an output takes .1 to 1 s to send


def random_graph(seed, groups=8, training=True):
    """(graph, groups): a network of so many layers, with branches that join again. A layer is one
    group: a forward op, its parameter where it has one, and in training gradient and update."""
    rng = np.random.default_rng((seed, groups, training))
    reads, has_parameter = [], rng.random(groups) < 0.7
    for layer in range(groups):
        near = [layer - 1 - int(back) for back in rng.geometric(0.6, size=2) if layer - back > 0]
        reads.append(sorted(set(near[: 1 + int(rng.random() < 0.5)])) if layer else [])
    sizes = rng.integers(100_000, 1_000_000, size=groups)
    parameter_bytes = rng.integers(100_000, 3_000_000, size=groups)
    flops = rng.lognormal(0.0, 0.8, size=groups) * 1e9
    ops = [source("x", kind="input", output_bytes=1000)]
    of_op = [0]

    def add(layer, op):
        ops.append(op)
        of_op.append(layer)

    for layer in range(groups):
        if has_parameter[layer]:
            add(layer, source(f"w{layer}", output_bytes=int(parameter_bytes[layer])))
    for layer in range(groups):
        inputs = [f"f{r}" for r in reads[layer]] or ["x"]
        inputs += [f"w{layer}"] * bool(has_parameter[layer])
        kind = ("mm", "conv", "cell")[layer % 3] if has_parameter[layer] else "relu"
        add(
            layer,
            Op(
                f"f{layer}", tuple(inputs), f"test.{kind}",
                output_bytes=int(sizes[layer]), flops=int(flops[layer]), module=f"layers.{layer}",
            ),
        )  # fmt: skip
    for layer in reversed(range(groups) if training else ()):
        readers = [f"g{c}" for c in range(groups) if layer in reads[c]]
        add(
            layer,
            Op(
                f"g{layer}", (*readers, f"f{layer}"), "test.backward", Phase.BACKWARD,
                output_bytes=int(sizes[layer]), flops=int(2 * flops[layer]),
                module=f"layers.{layer}", gradient_of=f"f{layer}",
            ),
        )  # fmt: skip
    for layer in range(groups if training else 0):
        if has_parameter[layer]:
            add(
                layer,
                Op(
                    f"u{layer}", (f"g{layer}", f"w{layer}"), "test.sgd", Phase.UPDATE,
                    output_bytes=int(parameter_bytes[layer]), module=f"layers.{layer}",
                    overwrites=f"w{layer}",
                ),
            )  # fmt: skip
    ends = [f"f{layer}" for layer in range(groups) if not any(layer in r for r in reads)]
    graph = graph_of(*ops, outputs=ends)
    return graph, Groups(np.array(of_op, dtype=np.int32), groups)


def random_task(seed, groups=8, devices=2, *, training=True, tight=None):
    """A task on devices of unlike speed. `tight`: one device cannot hold all, but half of the
    groups on each of two fit; by default every third seed."""
    graph, of_groups = random_graph(seed, groups, training)
    rng = np.random.default_rng((seed, devices, 1))
    speeds = rng.uniform(0.7, 1.4, size=devices)
    by_kind = {kind: rng.uniform(0.7, 1.3, size=devices) for kind in sorted(set(graph.kinds))}
    seconds = graph.flops[:, None] / 1e9 / speeds * np.stack([by_kind[k] for k in graph.kinds])
    seconds[graph.is_source] = 0.0
    costs = Costs(seconds, "given")
    machine = machine_of(devices, bandwidth=BANDWIDTH, latency=1e-3)
    if tight if tight is not None else seed % 3 == 0:
        simulator = Simulator(graph, machine, costs)
        halves = (np.arange(groups) * 2 // groups)[of_groups.of_op].astype(np.int32)
        one = np.zeros_like(halves)
        split, whole = simulator.evaluate(np.stack([halves, one])).peak_memory_bytes.max(axis=1)
        memory = int(min(1.05 * split, 0.98 * whole) if 1.02 * split < whole else 1.05 * split)
        machine = machine_of(devices, memory_bytes=memory, bandwidth=BANDWIDTH, latency=1e-3)
    return PlacementTask(f"random {seed}", graph, machine, costs, of_groups)


def random_problem(seed, groups=8, devices=2, **options):
    """The problem of `random_task`."""
    return random_task(seed, groups, devices, **options).problem(seed=seed)
