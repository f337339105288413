"""What a search takes: states, transitions, distinct stages and seconds, with a table of costs.

    python benchmarks/stages/counts.py --write

Nothing is run: a stage costs what a rule says, and a network need not fit in memory. On one thread.
"Their" counts are of the graphs of Y. Ding et al., "IOS", MLSys 2021 (its published networks).
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import networkx as nx
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import parser_of, show, table

from dovetail.frontends import Captured
from dovetail.graph.kernels import fuse
from dovetail.pipeline import resolve_model
from dovetail.schedulers.blocks import Narrowed, cut, narrowed
from dovetail.schedulers.dos import dos
from dovetail.schedulers.ios import ios
from dovetail.schedulers.records import BlockSchedule, KernelBlock, OpSet, StageTiming, members
from dovetail.schedulers.scheduling import MOST_STATES
from dovetail.schedulers.timing import OnceTimer, block_of, signatures_of

README = Path(__file__).parent / "README.md"
NETWORKS = {
    "SqueezeNet 1.0": "zoo:squeezenet_1_0?batch=1",
    "InceptionV3": "zoo:inception_v3?batch=1",
    "RandWire": "zoo:randwire?batch=1",
    "NASNet-A large": "zoo:nasnet_a_large?batch=1",
}
SEARCHES = (("InceptionV3", "ios"), ("RandWire", "dos"), ("NASNet-A large", "dos"))
THEIR_RANDOM_GRAPHS = ((16, 2), (32, 3), (32, 4), (32, 5))
"""(nodes, seed) of their RandWire: Watts-Strogatz with 4 neighbours, rewired with .75."""


def by_size(stages: Sequence[OpSet]) -> list[StageTiming]:
    """A table of costs; what it says changes no count."""
    return [StageTiming(1.0 + 0.5 * stage.bit_count()) for stage in stages]


class Network:
    def __init__(self, model: str) -> None:
        step = resolve_model(model, "")
        assert isinstance(step, Captured)
        kernels = fuse(step.graph)
        self.block = block_of(step.graph, kernels)
        self.signatures = signatures_of(step.graph, kernels)

    def parts(self, scheduler: str) -> Narrowed:
        return narrowed(self.block, MOST_STATES[scheduler])

    def search(self, scheduler: str) -> tuple[list[BlockSchedule], OnceTimer]:
        """Of every part."""
        once = OnceTimer()
        search = {"dos": dos, "ios": ios}[scheduler]
        found = []
        for part in self.parts(scheduler).parts:
            own = [self.signatures[op] for op in part.ops]
            found.append(search(part.block, once.of(part.block, own, by_size)))
        return found, once


def whole(networks: dict[str, Network]) -> str:
    """Of `dos`, a row a network."""
    head = ("network", "kernels", "states", "transitions", "distinct stages", "distinct / states")
    rows = []
    for name, network in networks.items():
        found, once = network.search("dos")
        states = sum(of_part.states for of_part in found)
        transitions = sum(of_part.transitions for of_part in found)
        figures = (len(network.block), states, transitions, once.timed)
        rows.append((name, *(f"{figure:,}" for figure in figures), f"{once.timed / states:.3f}"))
    return table(head, rows)


def by_part(networks: dict[str, Network]) -> str:
    """Of `dos`, a row for each kind of part of several kernels."""
    head = ("network: part", "kernels", "states", "transitions", "such parts")
    rows = []
    for name, network in networks.items():
        kept = network.parts("dos").parts
        parts = Counter(part.block for part in kept if len(part.block) > 1)
        rows += [
            _row(f"{name}: {place + 1}", block, many)
            for place, (block, many) in enumerate(parts.items())
        ]
    for nodes, seed in THEIR_RANDOM_GRAPHS:
        block = random_graph(nodes, seed)
        rows.append(_row(f"their generator: {nodes} nodes, seed {seed}", block, 1))
    for block, many in Counter(_without_inner_joins(networks["InceptionV3"].block)).items():
        rows.append(_row("InceptionV3's last, inner concatenations dissolved", block, many))
    return table(head, rows)


def _row(name: str, block: KernelBlock, many: int) -> tuple[str, ...]:
    found = dos(block, by_size)
    figures = (len(block), found.states, found.transitions, many)
    return (name, *(f"{figure:,}" for figure in figures))


def random_graph(nodes: int, seed: int) -> KernelBlock:
    """With an op that joins what nobody reads."""
    graph = nx.connected_watts_strogatz_graph(nodes, 4, 0.75, tries=200, seed=seed)
    return _block([
        *({min(edge) for edge in graph.edges(node) if max(edge) == node} for node in range(nodes)),
        {node for node in range(nodes) if all(min(edge) != node for edge in graph.edges(node))},
    ])  # fmt: skip


def _without_inner_joins(block: KernelBlock) -> Iterable[KernelBlock]:
    """The parts with concatenations inside, whose readers read what those read."""
    for part in cut(block):
        before = [set(members(ops)) for ops in part.block.predecessors]
        inner = [op for op in range(len(before) - 1) if len(before[op]) > 1]
        for join in inner:
            before = [ops - {join} | (before[join] if join in ops else set()) for ops in before]
        kept = [op for op in range(len(before)) if op not in inner]
        if inner:
            yield _block([{kept.index(producer) for producer in before[op]} for op in kept])


def _block(before: Sequence[set[int]]) -> KernelBlock:
    return KernelBlock(tuple(sum(1 << op for op in ops) for ops in before))


def seconds(networks: dict[str, Network], rounds: int) -> str:
    """Of whole searches, signatures included."""
    head = ("search", "states", "transitions", "distinct stages", "s, median", "least", "most")
    rows = []
    for name, scheduler in SEARCHES:
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            found, once = networks[name].search(scheduler)
            took.append(time.perf_counter() - began)
        counts = (sum(f.states for f in found), sum(f.transitions for f in found), once.timed)
        times = (statistics.median(took), min(took), max(took))
        cells = [*(f"{c:,}" for c in counts), *(f"{t:.2f}" for t in times)]
        rows.append((f"{name} `{scheduler}`", *cells))
    return table(head, rows)


def main(given: Sequence[str]) -> None:
    arguments = parser_of(__doc__, rounds=3, write=False).parse_args(given)
    torch.set_num_threads(1)
    networks = {name: Network(model) for name, model in NETWORKS.items()}
    parts = (whole(networks), by_part(networks), seconds(networks, arguments.rounds))
    show("\n\n".join(parts), README if arguments.write else None, "tables of counts.py")


if __name__ == "__main__":
    main(sys.argv[1:])
