"""Random machines: accelerators of one or two models, their links, and a host."""

import numpy as np

from dovetail.graph import Graph, Phase
from dovetail.machine import Device, Link, Machine

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
