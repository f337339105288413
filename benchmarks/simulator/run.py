"""Placements simulated per second: this package beside C++, a Python heap and SimPy.

    python benchmarks/simulator/run.py [--ops 50000] [--placements 8] [--repeats 40]

The C++ port is built with g++ -O3; its values and peaks must equal ours. One thread, two threads
and C++ take turns in short blocks, and a block counts only if every core was undisturbed before
and after it and nothing else ran meanwhile: a ratio is the median of the ratios within blocks.
"""

import heapq
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from calm import Calm
from harness import parser_of, quartiles, table

from dovetail.costs import Costs
from dovetail.graph import Graph
from dovetail.machine import Device, Link, Machine
from dovetail.simulator import BatchEvaluation, Simulator
from dovetail.simulator.flat import StepModel, flatten

HERE = Path(__file__).parent
READS = 3
SHARED = 0.03
"""Of a core's time: what other processes may use during a block that counts."""
REACH = 2000  # an op reads from the ops that stand so many places before it, at most


def random_case(ops: int, devices: int, rng: np.random.Generator, *, carried: bool = False):
    """A graph of `ops` ops with `READS` producers each, a linked machine, and random costs.

    carried   devices make their own copies, instead of a channel per link
    """
    # The last ops read more, for what the first could not: ops * READS pairs in all.
    counts = [min(op, READS + (op >= ops - READS * (READS + 1) // 2)) for op in range(ops)]
    reads = [
        np.sort(rng.choice(min(op, REACH), counts[op], replace=False) + max(0, op - REACH))
        for op in range(ops)
    ]
    none = np.zeros(ops, np.int64)
    graph = Graph(
        names=tuple(f"op{i}" for i in range(ops)),
        kinds=("aten.mm",) * ops,
        signatures=("",) * ops,
        modules=("",) * ops,
        phases=none + 1,
        flops=none,
        accessed_bytes=none,
        colocation=none - 1,
        gradient_of=none - 1,
        device_kinds=((),) * ops,
        producers=np.arange(ops),
        shapes=((),) * ops,
        strides=((),) * ops,
        dtypes=("uint8",) * ops,
        tensor_bytes=rng.integers(0, 1 << 20, ops),
        storages=np.arange(ops),
        overwrites=none > 0,
        input_offsets=np.cumsum([0] + [len(of_op) for of_op in reads]),
        input_tensors=np.concatenate(reads),
        outputs=np.array([ops - 1]),
        control=np.zeros((0, 2)),
    )
    names = [f"gpu{i}" for i in range(devices)]
    machine = Machine(
        "benchmark",
        tuple(Device(name, "gpu", "m", 12 << 30, {}, 1e11, 1e-6) for name in names),
        names[0],
        tuple(
            Link(a, b, 1.2e10, 1e-5, a if carried else f"{a}-{b}")
            for a in names
            for b in names
            if a != b
        ),
    )
    return graph, machine, Costs(rng.uniform(1e-5, 2e-4, (ops, devices)), "given")


def rate(simulator: Simulator, placements, threads: int) -> float:
    start = time.perf_counter()
    simulator.evaluate(placements, threads=threads)
    return len(placements) / (time.perf_counter() - start)


def write_port_input(path: Path, flat: StepModel, placements) -> None:
    """Every array as its int64 length and its bytes, in `StepModel` order; then placements."""
    arrays = [np.array(flat[:5], np.int64)]
    arrays += [
        v for k, v in flat._asdict().items() if isinstance(v, np.ndarray) and k != "resident"
    ]
    with path.open("wb") as file:
        for array in (*arrays, placements):
            flattened = np.ascontiguousarray(array).reshape(-1)
            file.write(np.int64(len(flattened)).tobytes() + flattened.tobytes())


class Port:
    """The C++ port, built and fed in a folder that is thrown away."""

    def __init__(self, folder: Path, flat: StepModel, placements) -> None:
        self.folder, self.rows, self.devices = folder, len(placements), flat.devices
        command = ["g++", "-O3", "-ffp-contract=off", "-o", folder / "port", HERE / "port.cpp"]
        subprocess.run(command, check=True)
        write_port_input(folder / "in", flat, placements)

    def check(self, ours: BatchEvaluation) -> None:
        """Raise `AssertionError` unless every value and peak is ours, bit for bit."""
        _, values, peaks = self.run()
        assert (values == ours.values).all() and (peaks == ours.peak_memory_bytes).all()

    def run(self):
        """(placements per second, values, peaks)."""
        command = [self.folder / "port", self.folder / "in", self.folder / "out", "1"]
        subprocess.run(command, check=True)
        numbers = np.fromfile(self.folder / "out")
        table = numbers[1:].reshape(self.rows, 1 + self.devices)
        return self.rows / numbers[0], table[:, 0], table[:, 1:].astype(np.int64)


@dataclass(frozen=True)
class Block:
    """Placements per second, taken one after another; `shared`: other processes ran meanwhile."""

    one: float
    two: float
    port: float
    shared: bool

    @property
    def seconds(self) -> float:
        """Of one placement each; inf where other processes ran."""
        return math.inf if self.shared else 1 / self.one + 1 / self.two + 1 / self.port


def others_seconds() -> float:
    """Processor seconds that all processes but this one and its children have used."""
    columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _waiting, *interrupts = map(int, columns)
    total = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return total - sum(os.times()[:4])


def measured_block(simulator: Simulator, port: Port, placements) -> Block:
    start, others = time.perf_counter(), others_seconds()
    one, two = rate(simulator, placements, 1), rate(simulator, placements, 2)
    found = port.run()[0]
    shared = others_seconds() - others > SHARED * (time.perf_counter() - start)
    return Block(one, two, found, shared)


def undisturbed(calm: Calm, call: Callable[[], Block], repeats: int) -> Iterator[Block]:
    """The blocks of `repeats` that did not have to be given up."""
    for _ in range(repeats):
        given_up = calm.disturbed
        block = calm.measure(call, lambda b: b.seconds)
        if calm.disturbed == given_up:
            yield block


def check_port(carried: bool, rng: np.random.Generator) -> None:
    """Raise `AssertionError` unless a small case has equal values and peaks in C++."""
    graph, machine, costs = random_case(2000, 4, rng, carried=carried)
    placements = rng.integers(0, 4, (20, 2000)).astype(np.int32)
    ours = Simulator(graph, machine, costs).evaluate(placements)
    with tempfile.TemporaryDirectory() as folder:
        Port(Path(folder), flatten(graph, machine, costs), placements).check(ours)


def needs(flat: StepModel, placement):
    """Per op the distinct (producer, sent or not) it waits for, and per op its destinations."""
    ops = range(flat.ops)
    reads = [
        flat.input_tensors[flat.input_offsets[o] : flat.input_offsets[o + 1]].tolist() for o in ops
    ]
    readers = [{} for _ in ops]
    for op in ops:
        for producer in reads[op]:
            readers[producer].setdefault(int(placement[op]), []).append(op)
    return reads, readers


def heap_step_seconds(flat: StepModel, placement) -> float:
    """The same rules with heapq, without memory: for graphs without sources, views and relays."""
    reads, readers = needs(flat, placement)
    waiting = [len(of_op) for of_op in reads]
    ready = [[] for _ in range(flat.devices)]
    queues = [[] for _ in range(flat.channels)]
    busy, events, now = set(), [], 0.0
    for op in range(flat.ops):
        if not waiting[op]:
            heapq.heappush(ready[placement[op]], op)

    def start():
        for channel, queue in enumerate(queues):
            if queue and ("channel", channel) not in busy:
                _, tensor, there, link = heapq.heappop(queue)
                size = flat.tensor_bytes[tensor] / flat.link_bandwidths[link]
                busy.add(("channel", channel))
                end = now + (flat.link_latencies[link] + size)
                heapq.heappush(events, (end, 1, tensor, there, channel))
        for device, heap in enumerate(ready):
            if heap and ("device", device) not in busy:
                op = heapq.heappop(heap)
                busy.add(("device", device))
                end = now + flat.compute_seconds[op, device]
                heapq.heappush(events, (end, 0, op, device, 0))

    def arrive(tensor, there):
        for op in readers[tensor].get(there, ()):
            waiting[op] -= 1
            if not waiting[op]:
                heapq.heappush(ready[there], op)

    start()
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, transfer, unit, there, channel = heapq.heappop(events)
            busy.discard(("channel", channel) if transfer else ("device", there))
            arrive(unit, there)
            for destination in () if transfer else readers[unit]:
                if destination != there:
                    link = int(flat.link_of[there, destination])
                    entry = (now, unit, destination, link)
                    heapq.heappush(queues[flat.link_channels[link]], entry)
        start()
    return float(now)


def simpy_step_seconds(flat: StepModel, placement) -> float:
    """The same traffic in SimPy's own words: priority resources, one process per op and send.

    SimPy settles ties at one instant by its own event order, so values may differ a little.
    """
    import simpy

    reads, readers = needs(flat, placement)
    env = simpy.Environment()
    devices = [simpy.PriorityResource(env) for _ in range(flat.devices)]
    channels = [simpy.PriorityResource(env) for _ in range(flat.channels)]
    here = {(t, d): env.event() for t in range(flat.ops) for d in {*readers[t], int(placement[t])}}

    def transfer(tensor, there, link):
        with channels[flat.link_channels[link]].request(priority=tensor) as turn:
            yield turn
            size = flat.tensor_bytes[tensor] / flat.link_bandwidths[link]
            yield env.timeout(flat.link_latencies[link] + size)
        here[tensor, there].succeed()

    def compute(op):
        device = int(placement[op])
        yield env.all_of([here[tensor, device] for tensor in reads[op]])
        with devices[device].request(priority=op) as turn:
            yield turn
            yield env.timeout(flat.compute_seconds[op, device])
        here[op, device].succeed()
        for there in readers[op]:
            if there != device:
                env.process(transfer(op, there, int(flat.link_of[device, there])))

    for op in range(flat.ops):
        env.process(compute(op))
    env.run()
    return float(env.now)


def ratio(ratios) -> str:
    low, middle, high = quartiles(ratios)
    return f"{middle:.2f} x (quartiles {low:.2f} to {high:.2f})"


def slow_rates(simulator: Simulator, flat: StepModel, placements):
    """(heapq's, SimPy's) placements per second, one placement each."""
    heap, simpy = [], []
    for placement in placements:
        start = time.perf_counter()
        seconds = heap_step_seconds(flat, placement)
        heap.append(1 / (time.perf_counter() - start))
        assert seconds == simulator.timeline(placement).step_seconds
        start = time.perf_counter()
        simpy_step_seconds(flat, placement)
        simpy.append(1 / (time.perf_counter() - start))
    return heap, simpy


def main() -> None:
    parser = parser_of(__doc__, repeats=40)
    parser.add_argument("--ops", type=int, default=50_000)
    parser.add_argument("--placements", type=int, default=8)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    graph, machine, costs = random_case(options.ops, 4, rng)
    placements = rng.integers(0, 4, (options.placements, options.ops)).astype(np.int32)
    simulator, flat = Simulator(graph, machine, costs), flatten(graph, machine, costs)
    start = time.perf_counter()
    simulator.evaluate(placements[:1], threads=1)
    print(f"first call: {time.perf_counter() - start:.1f} s (compiles where nothing is cached)")
    for carried in (False, True):
        check_port(carried, rng)

    calm = Calm()
    with tempfile.TemporaryDirectory() as folder:
        port = Port(Path(folder), flat, placements)
        port.check(simulator.evaluate(placements))
        block = partial(measured_block, simulator, port, placements)
        blocks = list(undisturbed(calm, block, options.repeats))
    heap, simpy = slow_rates(simulator, flat, placements[:2])

    print(f"{options.ops} ops, {len(graph.input_tensors)} pairs, 4 devices;", end=" ")
    print(f"{calm.taken} blocks, {calm.disturbed} of them given up on as disturbed\n")
    gain = ratio([b.two / b.one for b in blocks])
    share = ratio([b.one / b.port for b in blocks])
    measured = (
        ("dovetail, 1 thread", [b.one for b in blocks], ""),
        ("dovetail, 2 threads", [b.two for b in blocks], f"{gain} one thread"),
        ("C++, g++ -O3", [b.port for b in blocks],
         f"same values and peaks; dovetail's one thread is {share} this"),
        ("Python heapq, no memory", heap, "same step seconds"),
        ("SimPy, no memory", simpy, ""),
    )  # fmt: skip
    rows = [
        (name, f"{statistics.median(rates):.3g}", f"{min(rates):.3g} to {max(rates):.3g}", note)
        for name, rates, note in measured
    ]
    print(table(("simulator", "placements/s, median", "spread", ""), rows))


if __name__ == "__main__":
    main()
