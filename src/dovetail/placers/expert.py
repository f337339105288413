"""Places by the rules of RL17's expert: each layer of an RNN on a device of its own, other networks
in runs of layers.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.1 and table 2: each LSTM layer on its own device,
attention and softmax with the top layer, the embedding with the first; Inception in contiguous
parts of equal layer count.

`expert_apart` has the rule with which the paper compares the training of NMT, section 4.4 and
figure 6: each LSTM layer, the attention and the softmax on a GPU of its own. It is known here from
excerpts of the paper and from its introduction; the section itself was not read.

Differences: if there are more layers than devices, layer i goes to device i x devices // layers. A
network is an RNN if modules named after recurrent layers have an index ("lstm.0", "cells.1"); a
network with other indexed layers ("layers.2") is treated alike. A group goes where most of its
forward work belongs, or else where its updates belong; a group with neither goes to the neighbours
with which it exchanges most bytes. Data-parallel towers get a device each, in order. What they
share is spread over all devices, about as many modules to each.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.graph import Graph, Phase
from dovetail.graph.copies import tower_count, towers_of
from dovetail.placers.budget import Budget
from dovetail.placers.problem import GroupPlacement, PlacementProblem

_LAYER = re.compile(
    r"(?:^|\.)((?:\w*_)?(?:lstms?|grus?|rnns?|cells?|layers?))[._]?(\d+)(?=\.|$)", re.IGNORECASE
)
"""Finds an indexed layer in a module's path: "lstm.0", "encoder_layers.3", "cell_1"."""
_ATTENTION = re.compile(r"attention|memory", re.IGNORECASE)
"""Finds the module of an attention, or of what it reads, in a module's path."""


@dataclass(frozen=True)
class _StackLayer:
    """A layer of a stack.

    stack   path without the index; it tells encoder layers from decoder layers
    index   as the module's path has it
    """

    stack: str
    index: int


def expert(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the expert's placement on the GPUs, or without GPUs on the CPUs. Evaluates nothing."""
    graph, devices = problem.graph, np.array(_expert_devices(problem), dtype=np.int32)
    layers = {module: _layer_of(module) for module in dict.fromkeys(graph.modules)}
    count, towers = len(devices), tower_count(graph)
    if towers > 1:
        # A tower is a part. Shared modules with updates are spread over all parts; all other shared
        # ops belong to part 0.
        tower_of = towers_of(graph)
        updates = (tower_of < 0) & (graph.phases == Phase.UPDATE)
        shared = dict.fromkeys(
            m for m, updated in zip(graph.modules, updates, strict=True) if updated
        )
        place = {module: i * count // len(shared) for i, module in enumerate(shared)}
        spread = np.array([place.get(module, 0) for module in graph.modules])
        parts = tower_of if towers <= count else tower_of * count // towers
        part_of_op = np.where(tower_of < 0, spread, parts)
    else:
        if any(layers.values()):
            place = _by_layer(graph, layers, count)
        else:
            # Layers are the modules with forward ops, in the order in which they first run; other
            # modules belong to the last part.
            forward = graph.phases == Phase.FORWARD
            ran = dict.fromkeys(m for m, runs in zip(graph.modules, forward, strict=True) if runs)
            place = dict.fromkeys(graph.modules, count - 1)
            place |= {module: i * count // len(ran) for i, module in enumerate(ran)}
        part_of_op = np.array([place[module] for module in graph.modules])
    return problem.settle(devices[_vote(problem, part_of_op, count)])


def expert_apart(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return `expert`'s placement of an RNN, but with attention and softmax each on a device of
    their own, and layers of equal rank in encoder and decoder on one. Evaluates nothing.

    Modules named after attention or its memory are the attention. What else runs outside all layers
    and not before the first is the softmax. A network without recurrent layers is placed as by
    `expert`.
    """
    devices = np.array(_expert_devices(problem), dtype=np.int32)
    modules = problem.graph.modules
    layers = {module: _layer_of(module) for module in dict.fromkeys(modules)}
    if not any(layers.values()):
        return expert(problem, budget)
    # With as many devices as modules every layer is a part, and the top one is the largest.
    part_of = _by_layer(problem.graph, layers, len(layers))
    before, top = _before_layers(problem.graph, layers), max(part_of.values())
    for module, layer in layers.items():
        if layer is None and module not in before:
            part_of[module] = top + (1 if _ATTENTION.search(module) else 2)
    count = top + 3
    part_of_op = np.array([part_of[module] for module in modules])
    if count > len(devices):
        part_of_op = part_of_op * len(devices) // count
    return problem.settle(devices[_vote(problem, part_of_op, len(devices))])


def _expert_devices(problem: PlacementProblem) -> list[int]:
    """Return the devices that an expert would use: the GPUs, or if there are none the CPUs."""
    kinds = [device.kind for device in problem.machine.devices]
    expert_kind = "gpu" if "gpu" in kinds else "cpu"
    return [d for d, kind in enumerate(kinds) if kind == expert_kind]


def _layer_of(module: str) -> _StackLayer | None:
    """Return the outermost indexed layer that `module` is or lies in; None if there is none."""
    match = _LAYER.search(module)
    return _StackLayer(module[: match.end(1)], int(match[2])) if match else None


def _by_layer(graph: Graph, layers: dict[str, _StackLayer | None], devices: int) -> dict[str, int]:
    """Return the part of each module. Modules that run before the first layer (the embedding, a
    stem) belong to part 0; other modules outside all layers belong to the top layer's part.

    Layers are counted per stack, because a stack's indices may begin anywhere and have holes.
    """
    stacks: dict[str, list[int]] = {}
    for layer in layers.values():
        if layer is not None:
            stacks.setdefault(layer.stack, []).append(layer.index)
    ranks = {
        _StackLayer(stack, index): (rank, len(set(indices)))
        for stack, indices in stacks.items()
        for rank, index in enumerate(sorted(set(indices)))
    }

    def part(rank: int, count: int) -> int:
        return rank if count <= devices else rank * devices // count

    before = _before_layers(graph, layers)
    top = max(part(rank, count) for rank, count in ranks.values())
    return {
        module: part(*ranks[layer]) if layer else 0 if module in before else top
        for module, layer in layers.items()
    }


def _before_layers(graph: Graph, layers: dict[str, _StackLayer | None]) -> set[str]:
    """Return the modules that run before the first layer."""
    # Ops stand in topological order, so what precedes the first op of any layer runs before it.
    before: set[str] = set()
    for module, phase in zip(graph.modules, graph.phases.tolist(), strict=True):
        if phase == Phase.FORWARD:
            if layers[module]:
                break
            before.add(module)
    return before


def _vote(problem: PlacementProblem, part_of_op: NDArray[np.int_], parts: int) -> NDArray[np.int_]:
    """Return [groups] the part that has most of the group's forward work, or if it has none, of its
    update work; ties: the first part.

    Groups with neither (sums of gradients) take the part with which they exchange most bytes.
    """
    graph, of_op = problem.graph, problem.groups.of_op
    # The small number lets ops that cost nothing vote too.
    seconds = problem.costs.compute_seconds.min(axis=1) + 1e-12
    votes = np.zeros((problem.groups.count, parts))
    for phase in (Phase.FORWARD, Phase.UPDATE):
        of_phase = np.zeros_like(votes)
        np.add.at(of_phase, (of_op, part_of_op), (graph.phases == phase) * seconds)
        undecided = ~votes.any(axis=1)
        votes[undecided] = of_phase[undecided]
    sources, destinations, one_way = problem.edges
    ends, far_ends = np.append(sources, destinations), np.append(destinations, sources)
    sizes = np.append(one_way, one_way)
    # Decisions spread edge by edge. A group that no decided group reaches ends in part 0.
    while True:
        decided = np.asarray(votes.any(axis=1))
        pulled = np.zeros_like(votes)
        is_decided = decided[far_ends]
        parts_there = votes.argmax(axis=1)[far_ends[is_decided]]
        # The added byte lets empty tensors pull too.
        np.add.at(pulled, (ends[is_decided], parts_there), sizes[is_decided] + 1)
        follows = ~decided & pulled.any(axis=1)
        if not follows.any():
            return np.asarray(votes.argmax(axis=1))
        votes[follows] = pulled[follows]
