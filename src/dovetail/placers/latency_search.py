"""Searches for low latency: fills accelerators greedily, then anneals.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423, appendix F: the *greedy* baseline goes through the
groups in topological order, depth first, and puts as many as fit into the memory of the first
accelerator, then of the second, and so on. The rest goes to a CPU. Groups that wait for each other
in a circle are one block.

Differences: it tries four orders instead of one. Then it anneals, with geometrically falling
temperatures and restarts from the best placement so far, where the paper solves an integer
programme. It serves only the objective `latency`: for any other it returns the best placement so
far, or else every group on its fastest device.
"""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.graph.grouping import numbered
from dovetail.graph.records import csr_offsets
from dovetail.placers.budget import Budget
from dovetail.placers.load_search import UInt64, random_bits
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator.flat import Float64, Int32
from dovetail.simulator.kernel import copy
from dovetail.simulator.latency import (
    LatencyModel,
    LatencyWorkspace,
    latency_model,
    latency_work,
    walk,
)

# ── Annealing of the latency: kernels over flat arrays ──────────────────────────────────────────
#
# Changes are proposed one after another, and for each the latency is computed from scratch, by a
# walk through the graph. A change moves a group to another device, exchanges two groups, or moves
# all of a device's groups before or after one group. A walk takes O(ops + reads), some microseconds
# for the published instances, so only the placement and the used bytes are kept between changes.
# With
#
#     energy = latency + penalty x (number of calls that wait for themselves or for such calls
#                                   + for each over-full device, 1 + its excess / its capacity)
#
# and an exponentially distributed X of mean 1, a change is accepted if
#
#     energy' <= energy + temperature x X


# Places in `LatencyAnnealing.scalars`. They are in an array because a kernel cannot assign to the
# fields of a named tuple, but can write into its arrays.
ENERGY, BEST, PENALTY = range(3)


class LatencyAnnealing(NamedTuple):
    """The state of one annealing search.

    free                      groups that have a choice
    choice_offsets, choices   CSR of the devices that each group may be on
    near_offsets, near        CSR of the groups that share a tensor with each group
    member_offsets, members   CSR of the ops of each group
    sizes                     [groups] bytes that stay where the group is
    capacities, used_bytes    [devices]
    groups, saved             [groups] device of each group now, and before the change under way
    placement                 [ops] device of each op now
    best                      [groups] the placement with the least energy so far
    scalars                   energy now, energy of `best`, and the penalty
    random                    [1] state of the generator
    """

    free: Int32
    choice_offsets: Int32
    choices: Int32
    near_offsets: Int32
    near: Int32
    member_offsets: Int32
    members: Int32
    sizes: Float64
    capacities: Float64
    used_bytes: Float64
    groups: Int32
    saved: Int32
    placement: Int32
    best: Int32
    scalars: Float64
    random: UInt64


@kernel
def start(model: LatencyModel, work: LatencyWorkspace, search: LatencyAnnealing) -> None:
    """Compute bytes, placement and energy of `search.groups` from scratch."""
    search.used_bytes[:] = 0.0
    for group in range(len(search.groups)):
        put(search, group, search.groups[group])
        search.used_bytes[search.groups[group]] += search.sizes[group]
    search.scalars[ENERGY] = energy(model, work, search)


@kernel
def anneal(
    model: LatencyModel,
    work: LatencyWorkspace,
    search: LatencyAnnealing,
    temperature: float,
    changes: int,
) -> None:
    """Propose `changes` changes, and accept or undo each."""
    for _ in range(changes):
        # A group goes, in 3 of 4 cases, to the device of one that shares a tensor with it, else to
        # any where it may be.
        group = search.free[draw(search, len(search.free))]
        old = search.groups[group]
        near = search.near_offsets[group + 1] - search.near_offsets[group]
        if near and draw(search, 4):
            new = search.groups[search.near[search.near_offsets[group] + draw(search, near)]]
        else:
            first, last = search.choice_offsets[group], search.choice_offsets[group + 1]
            new = search.choices[first + draw(search, last - first)]
        if new == old or not may(search, group, new):
            continue
        for g in range(len(search.groups)):
            search.saved[g] = search.groups[g]
        # In one case of eight, a random group may come back in exchange. In one of eight, the later
        # groups of the old device move too, and in another one the earlier groups.
        kind = draw(search, 8)
        shift(search, group, new)
        if kind == 0:
            other = search.free[draw(search, len(search.free))]
            if search.saved[other] == new and may(search, other, old):
                shift(search, other, old)
        elif kind <= 2:
            for g in search.free:
                beyond = (g > group) == (kind == 1)
                if beyond and search.saved[g] == old and may(search, g, new):
                    shift(search, g, new)
        after = energy(model, work, search)
        # Uniform over (0, 1], never 0, so that its logarithm is finite.
        chance = (draw(search, 1 << 30) + 1) / (1 << 30)
        if after <= search.scalars[ENERGY] - temperature * np.log(chance):
            search.scalars[ENERGY] = after
            if after < search.scalars[BEST]:
                search.scalars[BEST] = after
                copy(search.groups, search.best)
        else:
            for g in range(len(search.groups)):
                if search.groups[g] != search.saved[g]:
                    shift(search, g, search.saved[g])


@inlined
def energy(model: LatencyModel, work: LatencyWorkspace, search: LatencyAnnealing) -> float:
    """Return the energy of the current placement.

    If the placement does not fit, no walk is made, since the penalty is above every latency anyway.
    """
    excess = 0.0
    for device in range(len(search.used_bytes)):
        over = search.used_bytes[device] - search.capacities[device]
        if over > 0:
            excess += 1 + over / (search.capacities[device] + 1)
    latency = 0.0
    if excess == 0.0:
        latency = walk(model, work, search.placement)
        # A negative result is minus the number of calls that never become ready.
        if latency < 0:
            excess, latency = -latency, 0.0
    total: float = latency + search.scalars[PENALTY] * excess
    return total


@inlined
def may(search: LatencyAnnealing, group: int, device: int) -> bool:
    """Whether the group may be on the device."""
    allowed = False
    for i in range(search.choice_offsets[group], search.choice_offsets[group + 1]):
        allowed = allowed or search.choices[i] == device
    return allowed


@inlined
def shift(search: LatencyAnnealing, group: int, device: int) -> None:
    """Move a group and its bytes to a device."""
    search.used_bytes[search.groups[group]] -= search.sizes[group]
    search.used_bytes[device] += search.sizes[group]
    search.groups[group] = device
    put(search, group, device)


@inlined
def put(search: LatencyAnnealing, group: int, device: int) -> None:
    """Write a group's device to all its ops in `placement`."""
    for i in range(search.member_offsets[group], search.member_offsets[group + 1]):
        search.placement[search.members[i]] = device


@inlined
def draw(search: LatencyAnnealing, count: int) -> int:
    """Draw a number from 0 to count - 1."""
    return int(random_bits(search.random) % count)


CHANGES_PER_EVALUATION = 10
"""An evaluation of the budget buys this many changes, because a simulated step of the same graph
takes as long as about ten walks."""
CALL_OPS = 10**6
"""Changes x ops of one call of the kernel are at most this, so that a call takes a few hundredths
of a second and the budget is looked at in between."""
STEPS = 40
"""Number of temperatures of one cooling."""
HOTTEST, COLDEST = 0.05, 1e-5
"""First and last temperature of a cooling, relative to the latency at its start."""


def latency_search(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best placement at the budget's end, of the greedy and then the annealed ones.

    Each cooling starts from the best placement so far and proposes twice the changes of the one
    before. The best that it meets is evaluated, so that the budget holds it. Ties: the earlier one.
    """
    ledger = budget.ledger
    if problem.objective == "latency":
        budget.score(problem, np.stack(greedy_placements(problem)), always=True)
    if ledger.best is None:
        return problem.fastest.copy()
    if problem.objective != "latency" or not len(problem.free):
        return ledger.best[1].copy()
    model = latency_model(problem.graph, problem.machine, problem.costs)
    work = latency_work(model)
    rng = np.random.default_rng([problem.seed, ledger.next_round()])
    count, of_op = problem.groups.count, problem.groups.of_op
    rows, choices = np.nonzero(problem.allowed)
    edges = _group_edges(problem)
    both = np.unique(np.concatenate([edges, edges[:, ::-1]]), axis=0)
    search = LatencyAnnealing(
        free=problem.free,
        choice_offsets=csr_offsets(rows, count),
        choices=choices.astype(np.int32),
        near_offsets=csr_offsets(both[:, 0], count),
        near=both[:, 1].astype(np.int32),
        member_offsets=csr_offsets(of_op, count),
        members=np.argsort(of_op, kind="stable").astype(np.int32),
        sizes=problem.load.resident_bytes.astype(np.float64),
        capacities=problem.capacities.astype(np.float64),
        used_bytes=np.zeros(problem.devices),
        groups=np.zeros(count, np.int32),
        saved=np.zeros(count, np.int32),
        placement=np.zeros(len(problem.graph), np.int32),
        best=np.zeros(count, np.int32),
        scalars=np.zeros(3),
        random=rng.integers(1, 2**63, 1, dtype=np.uint64),
    )
    finite = np.where(np.isfinite(problem.work_seconds), problem.work_seconds, 0.0)
    moved = model.in_seconds.max(axis=1) + model.out_seconds.max(axis=1)
    longest = finite.max(axis=1).sum() + problem.devices * moved.sum()
    # All work and all moves one after another take longer than any placement, so no placement that
    # fits and completes is ever worse than one that does not.
    search.scalars[PENALTY] = longest
    changes, most = 50 * len(problem.free), max(1, CALL_OPS // model.ops)
    while not budget.exhausted and not budget.closed:
        search.groups[:] = search.best[:] = ledger.best[1]
        start(model, work, search)
        search.scalars[BEST] = search.scalars[ENERGY]
        # One cooling proposes about `changes` changes. The energy of a start that does not fit
        # contains penalties, which are no latency.
        warm = min(float(search.scalars[ENERGY]), float(longest))
        for share in np.linspace(0.0, 1.0, STEPS).tolist():
            temperature = warm * HOTTEST ** (1 - share) * COLDEST**share
            left = -(-changes // STEPS)
            while left > 0 and not budget.exhausted:
                affordable = int(min(budget.left * CHANGES_PER_EVALUATION, most))
                some = max(1, min(left, affordable))
                anneal(model, work, search, temperature, some)
                budget.charge(some / CHANGES_PER_EVALUATION)
                left -= some
        budget.score(problem, search.best[None], always=True)
        changes *= 2
    return ledger.best[1].copy()


def greedy_placements(problem: PlacementProblem) -> list[GroupPlacement]:
    """Return the greedy placements along four orders, the paper's first, then every group on its
    fastest device, then all groups on CPUs."""
    # Groups that wait for each other in a circle are one block. Blocks are numbered in the order of
    # their first groups.
    groups, edges = problem.groups.count, _group_edges(problem)
    matrix = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), (groups, groups))
    numbering = numbered(connected_components(matrix.tocsr(), connection="strong")[1])
    blocks, count = numbering.of_op, numbering.count
    pairs = blocks[edges]
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).reshape(-1, 2)

    devices = problem.machine.devices
    accelerators = [index for index, device in enumerate(devices) if device.kind == "gpu"]
    sizes = problem.load.resident_bytes
    # Every group on its fastest CPU, or on its fastest device if it may be on no CPU.
    on_cpu = np.array([device.kind != "gpu" for device in devices])
    seconds = np.where(problem.allowed & on_cpu, problem.work_seconds, np.inf)
    has_cpu = np.isfinite(seconds).any(axis=1)
    on_cpus = np.where(has_cpu, seconds.argmin(axis=1), problem.fastest).astype(np.int32)
    placements = []
    # Of the ready blocks, the one that became ready last comes next, or else the first. Blocks that
    # become ready at once do so in the order of their numbers, or in reverse.
    for depth_first, ascending in itertools.product((True, False), repeat=2):
        waits = np.bincount(pairs[:, 1], minlength=count)
        after: list[list[int]] = [[] for _ in range(count)]
        for a, b in pairs.tolist() if ascending else pairs[::-1].tolist():
            after[a].append(b)
        ready = np.flatnonzero(waits == 0).tolist()
        placement = on_cpus.copy()
        turn, used_bytes = 0, 0.0
        while ready:
            block = ready.pop(-1 if depth_first else 0)
            for b in after[block]:
                waits[b] -= 1
                if not waits[b]:
                    ready.append(b)
            members = np.flatnonzero(blocks == block)
            size = float(sizes[members].sum())
            while turn < len(accelerators):
                device = accelerators[turn]
                # A block that the current accelerator cannot take even when empty goes to a CPU. It
                # does not close the accelerator for the blocks after it.
                if not problem.allowed[members, device].all() or size > problem.capacities[device]:
                    break
                if used_bytes + size <= problem.capacities[device]:
                    placement[members] = device
                    used_bytes += size
                    break
                turn, used_bytes = turn + 1, 0.0
        placements.append(problem.settle(placement))
    return [*placements, problem.fastest, problem.settle(on_cpus)]


def _group_edges(problem: PlacementProblem) -> NDArray[np.int32]:
    """Return [edges, 2] distinct (from group, to group) with a tensor that an op makes between
    them."""
    graph, of_op = problem.graph, problem.groups.of_op
    makers = graph.producers[graph.input_tensors]
    moves = ~graph.is_source[makers]
    pairs = np.stack([of_op[makers[moves]], of_op[graph.readers[moves]]], axis=1)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).reshape(-1, 2).astype(np.int32)
