"""The graphs and machines that the shipped policy is pretrained on.

Random networks on random machines, and small variants of the zoo's networks on the papers' and on
random machines, grouped as placers group them and, every third, finer. The families in `HELD_OUT`
are in none of them, so that what the policy does on those is zero-shot. Captured graphs are kept
in the folder of the run, so that a repeat captures nothing.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dovetail.costs import analytic_costs
from dovetail.frontends import parse_optimizer, resolve
from dovetail.graph import Graph, Groups, colocate, group
from dovetail.graph.files import load_graph, save_graph
from dovetail.graph.grouping import merge_single_consumers
from dovetail.machine import Machine
from dovetail.machine.papers import paper_machine
from dovetail.placers.learned.random_graphs import FAMILIES, random_graph
from dovetail.placers.learned.random_machines import random_machine
from dovetail.placers.learned.records import Task

HELD_OUT = ("gnmt", "amoebanet", "llama")
"""Families of networks that the shipped policy has never seen."""
NETWORKS: tuple[tuple[str, str], ...] = (
    ("zoo:rnnlm?layers=2&steps=8&hidden=1024", "adam"),
    ("zoo:rnnlm?layers=4&steps=8&batch=32", "adam"),
    ("zoo:rnnlm?layers=2&steps=20", "adam"),
    ("zoo:rnnlm?layers=8&steps=6&batch=128", "adam"),
    ("zoo:nmt?steps=5", "adam"),
    ("zoo:nmt?steps=10&batch=128", "adam"),
    ("zoo:nmt?steps=16&hidden=512", "adam"),
    ("zoo:nmt?layers=4&steps=6", "adam"),
    ("zoo:nmt?layers=6&steps=4&batch=128", "adam"),
    ("zoo:inception_v3?batch=16", "rmsprop"),
    ("zoo:inception_v3?batch=64", "rmsprop"),
    ("zoo:wavenet?stacks=2&layers=9", "adam"),
    ("zoo:wavenet?stacks=2&layers=18", "adam"),
    ("zoo:wavenet?stacks=3&layers=12&batch=4", "adam"),
    ("zoo:transformer_xl?layers=2", "adam"),
    ("zoo:transformer_xl?layers=4", "adam"),
    ("zoo:transformer_xl?layers=8&batch=8", "adam"),
    ("zoo:gpt2?layers=4&batch=4", "adam"),
    ("zoo:gpt2?layers=6&batch=4", "adam"),
    ("zoo:gpt2?layers=12&batch=2", "adam"),
    ("zoo:moe?layers=2&context=512", "adam"),
    ("zoo:vit?layers=6", "adam"),
    ("zoo:vit?layers=12&batch=16", "adam"),
    ("zoo:squeezenet_1_1", "rmsprop"),
    ("zoo:nasnet_a_mobile?cells=1", "rmsprop"),
    ("zoo:nasnet_a_mobile?cells=2", "rmsprop"),
    ("zoo:nasnet_a_large?cells=1", "rmsprop"),
    ("zoo:nasnet_a_large?cells=2&batch=8", "rmsprop"),
    ("zoo:randwire?nodes=10", "rmsprop"),
    ("zoo:randwire?nodes=20&seed=3", "rmsprop"),
    ("zoo:randwire?nodes=32", "rmsprop"),
    ("zoo:two_tower", "adam"),
)
"""(model, optimizer) in small sizes: what is to be learned is their structure."""
MACHINES = ("gdp/2", "gdp/4", "gdp/8")
FINEST_SHARE = 1 / 128
MOST_GROUPS = 600
"""Of a task: a coarser grouping is taken instead of one with more."""


@dataclass(frozen=True)
class Wanted:
    """What the set consists of.

    random        random networks, the families in turn
    networks      (model, optimizer) of the zoo
    machines      on how many machines each of `networks` is
    size          of random networks
    """

    random: int = 200
    networks: tuple[tuple[str, str], ...] = NETWORKS
    machines: int = 4
    size: float = 1.0


def training_set(
    folder: Path, wanted: Wanted, seed: int, tell: Callable[[str], None]
) -> list[Task]:
    """All tasks, the random ones first. `tell` hears of each network that is captured."""
    tasks = [random_task(seed, number, wanted.size) for number in range(wanted.random)]
    for number, (model, optimizer) in enumerate(wanted.networks):
        graph = captured(folder, model, optimizer, tell)
        for turn in range(wanted.machines):
            which = number * wanted.machines + turn
            if turn < len(MACHINES):
                machine = paper_machine(MACHINES[turn])
            else:
                machine = random_machine(_mixed(seed, 10**6 + which), graph)
            tasks.append(_task(f"{model} {optimizer} on {machine.name}", graph, machine, which))
    return tasks


def random_task(seed: int, number: int, size: float) -> Task:
    """Random network `number` of the set with that seed: of the families in turn, and each of them
    in turn in sizes from 0.4 to 1 times `size`."""
    families = list(FAMILIES)
    family, mixed = families[number % len(families)], _mixed(seed, number)
    optimizer = ("adam", "adam", "rmsprop", "sgd")[mixed % 4]
    size *= 0.4 + 0.05 * (number // len(families) % 13)
    graph = random_graph(mixed, family=family, size=size, optimizer=optimizer)
    machine = random_machine(mixed, graph)
    return _task(f"random {family} {mixed}", graph, machine, number)


def captured(folder: Path, model: str, optimizer: str, tell: Callable[[str], None]) -> Graph:
    """The graph of a network's step, from its file if it is there."""
    key = hashlib.sha256(f"{model} {optimizer}".encode()).hexdigest()[:12]
    path = folder / "graphs" / f"{key}.json.gz"
    if path.is_file():
        return load_graph(path)
    tell(f"capturing {model}")
    graph = resolve(model, train=parse_optimizer(optimizer)).graph
    path.parent.mkdir(parents=True, exist_ok=True)
    save_graph(graph, path)
    return graph


def _task(name: str, graph: Graph, machine: Machine, number: int) -> Task:
    costs = analytic_costs(graph, machine)
    return Task(name, graph, machine, costs, _groups(graph, fine=number % 3 == 2))


def _groups(graph: Graph, *, fine: bool) -> Groups:
    """Those of placers; `fine`: the finest that keep to the limit."""
    if not fine:
        return group(graph)
    finest = colocate(graph)
    if finest.count <= MOST_GROUPS:
        return finest
    finer = merge_single_consumers(graph, finest, largest_share=FINEST_SHARE)
    return finer if finer.count <= MOST_GROUPS else group(graph)


def _mixed(seed: int, number: int) -> int:
    """A seed for each number, with none in common between neighbouring seeds."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:6], "little")
