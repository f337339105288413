"""Local search for the `load` objective: annealing walks in parallel, from a pool of good plans.

Each *cycle* anneals one walk per core (`anneal`), each from a plan of the pool. During a walk the
temperature falls and the exponent of the loads rises: at first the loads of all devices count, at
the end almost only the largest one:

    temperature(t) = hot x COLD^t          power(t) = 2^(first + floor(3 t))       t from 0 to 1

`hot` is drawn anew for every walk: a walk with a low temperature refines its plan, one with a high
temperature leaves it. The best plan of each walk joins the pool, which keeps the best `POOL` plans.
So a cycle is one step of an iterated local search (Lourenco, Martin and Stutzle, 2003,
https://doi.org/10.1007/0-306-48056-5_11) whose descent is annealing (Kirkpatrick, Gelatt and
Vecchi, Science 220, 1983, https://doi.org/10.1126/science.220.4598.671). Loads are updated after
every move by the pin counts of nets, as in Fiduccia and Mattheyses, DAC 1982,
https://doi.org/10.1109/DAC.1982.1585498.

Differences: the energy is a sum of powers of the loads, not the largest load, which most moves do
not change. The gain of a move is computed when the move is proposed, not kept in buckets.

Memory: walks count the bytes that groups always occupy. If the evaluator finds a plan over
capacity, the walks count `PlacementProblem.group_bytes` instead, and the room of that device
shrinks by the overrun.

Budget: one evaluation buys as many proposed moves as there are groups. Under a budget of
evaluations there are `WALKS` walks on any number of cores, and no decision looks at a clock, so the
result depends on the seed alone. Ties fall to the earlier plan.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.graph.records import csr_offsets
from dovetail.placers.baselines import try_baselines
from dovetail.placers.budget import Budget, Score
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.runtime.compiling import inlined, kernel
from dovetail.simulator import LoadModel
from dovetail.simulator.flat import Float64, Int8, Int32, Int64
from dovetail.simulator.kernel import copy
from dovetail.simulator.loads import price

# ── Random draws in kernels: xorshift64*, whose state is an array of one number ──────────────────
#
# Marsaglia, "Xorshift RNGs", 2003, https://doi.org/10.18637/jss.v008.i14

UInt64 = NDArray[np.uint64]


@inlined
def random_bits(random: UInt64) -> np.int64:
    """Draw a number of 31 bits."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33))


@inlined
def below(random: UInt64, count: int) -> int:
    """Draw a number from 0 to count - 1, for a count of at most 2^31."""
    return int((random_bits(random) * count) >> 31)


# ── Annealing of the largest load: kernels over flat arrays ─────────────────────────────────────
#
# A change moves one group, a cluster of neighbours, or two clusters past each other. A *net* stands
# for all tensors of one group that the same set of other groups reads. `counts` holds how many
# readers a net has on each device, and `relays` how many remote destinations it reaches through the
# host. With both, updating the loads when a group moves takes
#
#     O(nets that it reads + nets that it makes x devices)
#
# In a *star*, where every transfer goes through a host whose load does not count, the factor
# `devices` falls away. The loads after a change are exact. Annealing does not minimise the largest
# load itself, which most changes leave as it is, but, with x(d) = load(d) / scale,
#
#     energy = sum over devices of x(d) ^ (2 ^ doublings)
#
# which falls whenever a device near the top is relieved. A change is accepted if
#
#     energy' <= energy x (1 + temperature x Exp(1))
#
# A change that makes memory lack more bytes is never accepted, and one that makes it lack fewer
# always is. Temperature falls geometrically, call by call.

# Places in `AnnealingState.scalars`. They are in an array because a kernel cannot assign to the
# fields of a named tuple, but can write into its arrays.
WORST, ENERGY, LACKING, BEST = range(4)


class LoadTables(NamedTuple):
    """What does not change during a walk.

    model                groups, nets and links; groups without a choice may only be on their
                         fastest device
    direct               [devices, devices] 1: a send takes one hop, not two through the host
    star                 no hop but those from the host is direct, and the host's load does not
                         count; then the host's load is not kept up to date
    free                 groups that have a choice
    choice_offsets, choices     CSR of the devices that each group may be on
    made_offsets         CSR into the nets by their source group, by which nets are sorted
    read_offsets, reads  CSR of the nets that each group reads
    """

    model: LoadModel
    direct: Int8
    star: bool
    free: Int32
    choice_offsets: Int32
    choices: Int32
    made_offsets: Int32
    read_offsets: Int32
    reads: Int32


class AnnealingState(NamedTuple):
    """The state of one annealing walk.

    placement, best      [groups] the current placement, and the best one so far
    counts               [nets, devices] readers of the net on the device
    relays               [nets] remote destinations that the net reaches through the host
    loads, used_bytes    [devices]; `saved_loads`, `saved_bytes` are copies that undo a change
    moved, ends          [groups] the change under way: groups, and where each goes
    stamps               [groups] number of the change in which a group was last moved, or -1
    scalars              worst device, energy, lacking bytes, largest load of `best`
    random               [1] state of the generator
    """

    placement: Int32
    best: Int32
    counts: Int32
    relays: Int32
    loads: Float64
    used_bytes: Float64
    saved_loads: Float64
    saved_bytes: Float64
    moved: Int32
    ends: Int32
    stamps: Int64
    scalars: Float64
    random: UInt64


class Temperature(NamedTuple):
    """What a call of `anneal` runs with.

    temperature     relative rise of the energy that is accepted, on average
    scale_seconds   the load whose power is 1
    doublings       loads are squared this many times
    """

    temperature: float
    scale_seconds: float
    doublings: int


@kernel
def start(tables: LoadTables, walk: AnnealingState, heat: Temperature) -> None:
    """Compute counts, loads and energy of `walk.placement` from scratch; `best` stays as it is."""
    model = tables.model
    walk.loads[:] = 0.0
    walk.used_bytes[:] = 0.0
    for group in range(model.groups):
        home = walk.placement[group]
        walk.loads[home] += model.work_seconds[group, home]
        walk.used_bytes[home] += model.resident_bytes[group]
        walk.stamps[group] = -1
    for net in range(len(model.net_sources)):
        walk.relays[net] = 0
        for device in range(model.devices):
            walk.counts[net, device] = 0
        for i in range(model.net_offsets[net], model.net_offsets[net + 1]):
            walk.counts[net, walk.placement[model.net_targets[i]]] += 1
        add_all_hops(tables, walk, net, home_of(model, walk, net), 1)
    walk.scalars[ENERGY] = energy(model, walk, heat)
    walk.scalars[LACKING] = lacking_bytes(model, walk)


@kernel
def anneal(tables: LoadTables, walk: AnnealingState, heat: Temperature, moves: int) -> int:
    """Propose `moves` changes, and accept or undo each.

    Returns how many of them moved something; for each of those, the exact loads were computed. The
    others led from a device to itself.
    """
    model, changes = tables.model, 0
    for move in range(moves):
        count = propose(tables, walk, move)
        if not count:
            continue
        changes += 1
        keep(walk.loads, walk.saved_loads)
        keep(walk.used_bytes, walk.saved_bytes)
        # The first turn makes the change. If it is not accepted, the second turn undoes it: `ends`
        # then holds where the groups came from, and the saved loads avoid sums that drift.
        for turn in range(2):
            for i in range(count):
                group = walk.moved[i]
                old = walk.placement[group]
                shift(tables, walk, group, old, walk.ends[i])
                walk.ends[i] = old
            if turn:
                keep(walk.saved_loads, walk.loads)
                keep(walk.saved_bytes, walk.used_bytes)
                break
            lacking = lacking_bytes(model, walk)
            # `energy` overwrites the worst device, so it is put back below if the change is undone.
            worst = walk.scalars[WORST]
            last = energy(model, walk, heat)
            before = walk.scalars[LACKING]
            accepted = lacking < before
            if lacking == before:
                accepted = last <= walk.scalars[ENERGY]
                if not accepted:
                    # From the exponential distribution of mean 1. The uniform number is above 0, so
                    # that its logarithm is finite.
                    drawn = -np.log((below(walk.random, 2**31 - 1) + 1) / 2.0**31)
                    accepted = last <= walk.scalars[ENERGY] * (1.0 + heat.temperature * drawn)
            if accepted:
                walk.scalars[ENERGY] = last
                walk.scalars[LACKING] = lacking
                largest = walk.loads[int(walk.scalars[WORST])]
                if lacking == 0.0 and largest < walk.scalars[BEST]:
                    walk.scalars[BEST] = largest
                    copy(walk.placement, walk.best)
                break
            walk.scalars[WORST] = worst
    # The next call numbers its changes from 0 again.
    for group in range(model.groups):
        walk.stamps[group] = -1
    return changes


@inlined
def keep(source: Float64, destination: Float64) -> None:
    """Copy `source` over `destination`."""
    for i in range(len(source)):
        destination[i] = source[i]


@inlined
def propose(tables: LoadTables, walk: AnnealingState, move: int) -> int:
    """Fill `moved` and `ends` with a change; return the number of its groups, 0 for no change.

    Half of the changes begin on the device with the largest load. Half go to a neighbour's device.
    Half also move a cluster of the target device, back to the first device or on to a third.
    """
    model, random = tables.model, walk.random
    group = tables.free[below(random, len(tables.free))]
    if below(random, 2):
        group = pick_on(tables, walk, int(walk.scalars[WORST]), group)
    origin = walk.placement[group]
    target = -1
    if below(random, 2):
        other = neighbour(tables, walk, group)
        if other >= 0:
            target = walk.placement[other]
    if target < 0 or target == origin:
        target = pick_choice(tables, walk, group)
    count = 0
    for turn in range(2):
        # Where a group may not be, its seconds are inf.
        if target == origin or not model.work_seconds[group, target] < np.inf:
            break
        # A cluster around the group goes along. Its size is in 3 of 4 cases 1, else 1 to 32, small
        # ones more often.
        size = 1
        if not below(random, 4):
            size += below(random, 1 << (1 + below(random, 5)))
        first = count
        walk.moved[count] = group
        walk.ends[count] = target
        walk.stamps[group] = move
        count += 1
        if size > 1:
            # Draws may meet groups that cannot join, hence twice as many draws as groups, at most.
            for _ in range(2 * size):
                if count - first >= size or count >= model.groups:
                    break
                # In 7 of 8 draws a neighbour of a member joins, which keeps tensors on one device.
                # In the others any group of the device may join, which only balances work or bytes.
                member = walk.moved[first + below(random, count - first)]
                other = tables.free[below(random, len(tables.free))]
                if below(random, 8):
                    other = neighbour(tables, walk, member)
                if other < 0 or walk.placement[other] != origin or walk.stamps[other] == move:
                    continue
                if model.work_seconds[other, target] < np.inf:
                    walk.moved[count] = other
                    walk.ends[count] = target
                    walk.stamps[other] = move
                    count += 1
        if turn or below(random, 2):
            break
        group = pick_on(tables, walk, target, tables.free[below(random, len(tables.free))])
        if walk.placement[group] != target or walk.stamps[group] == move:
            break
        back = origin
        origin = target
        target = back if below(random, 4) else pick_choice(tables, walk, group)
    return count


@inlined
def pick_on(tables: LoadTables, walk: AnnealingState, device: int, group: int) -> int:
    """Return `group` if it is on the device, else the first of up to eight random groups that is,
    else the last of these."""
    for _ in range(8):
        if walk.placement[group] == device:
            break
        group = tables.free[below(walk.random, len(tables.free))]
    return group


@inlined
def pick_choice(tables: LoadTables, walk: AnnealingState, group: int) -> int:
    """Draw a device where the group may be."""
    first, last = tables.choice_offsets[group], tables.choice_offsets[group + 1]
    return int(tables.choices[first + below(walk.random, last - first)])


@inlined
def neighbour(tables: LoadTables, walk: AnnealingState, group: int) -> int:
    """Draw a group that shares a net with `group`, which may be `group` itself.

    -1: the group has no net, or the net drawn has an input as its source, which no group makes.
    """
    model = tables.model
    first, reads = tables.read_offsets[group], tables.read_offsets[group + 1]
    first_made = tables.made_offsets[group]
    nets = reads - first + tables.made_offsets[group + 1] - first_made
    if not nets:
        return -1
    i = below(walk.random, nets)
    net = tables.reads[first + i] if i < reads - first else first_made + i - (reads - first)
    begin, end = model.net_offsets[net], model.net_offsets[net + 1]
    j = begin + below(walk.random, end - begin + 1)
    return int(model.net_sources[net] if j == end else model.net_targets[j])


@inlined
def shift(tables: LoadTables, walk: AnnealingState, group: int, origin: int, target: int) -> None:
    """Move one group, with loads, bytes, counts and relays."""
    model = tables.model
    walk.placement[group] = target
    walk.loads[origin] -= model.work_seconds[group, origin]
    walk.loads[target] += model.work_seconds[group, target]
    walk.used_bytes[origin] -= model.resident_bytes[group]
    walk.used_bytes[target] += model.resident_bytes[group]
    for i in range(tables.read_offsets[group], tables.read_offsets[group + 1]):
        net = tables.reads[i]
        home = home_of(model, walk, net)
        # The reader first leaves `origin` (-1), then arrives at `target` (+1). A hop is removed
        # when the last reader on a device leaves, and added when the first one arrives.
        for sign in range(-1, 2, 2):
            device = origin if sign < 0 else target
            count = walk.counts[net, device] + sign
            walk.counts[net, device] = count
            if count == (1 + sign) // 2 and device != home:
                add_hop(tables, walk, net, home, device, sign)
    for net in range(tables.made_offsets[group], tables.made_offsets[group + 1]):
        if not tables.star:
            for sign in range(-1, 2, 2):
                add_all_hops(tables, walk, net, origin if sign < 0 else target, sign)
            continue
        # In a star, readers on other devices than `origin` and `target` still get the tensor from
        # the host, so their loads do not change and need no visit.
        if walk.relays[net] > 0:
            walk.loads[origin] -= price(model, net, origin, model.host)
        if walk.counts[net, origin] > 0:
            walk.relays[net] += 1
            walk.loads[origin] += price(model, net, model.host, origin)
        if walk.counts[net, target] > 0:
            walk.relays[net] -= 1
            walk.loads[target] -= price(model, net, model.host, target)
        if walk.relays[net] > 0:
            walk.loads[target] += price(model, net, target, model.host)


@inlined
def home_of(model: LoadModel, walk: AnnealingState, net: int) -> int:
    """Return the device that a net is sent from; inputs, whose source is -1, are on the host."""
    source = model.net_sources[net]
    return int(model.host if source < 0 else walk.placement[source])


@inlined
def add_all_hops(tables: LoadTables, walk: AnnealingState, net: int, home: int, sign: int) -> None:
    """Add (sign 1) or remove (sign -1) a net's hops from `home` to the devices of all readers."""
    for device in range(tables.model.devices):
        if walk.counts[net, device] > 0 and device != home:
            add_hop(tables, walk, net, home, device, sign)


@inlined
def add_hop(
    tables: LoadTables, walk: AnnealingState, net: int, home: int, device: int, sign: int
) -> None:
    """Add (sign 1) or remove (sign -1) the hops of a net from `home` to one destination.

    A tensor goes to the host once for all destinations behind it. So only the first destination
    that is added, and the last that is removed, changes the loads by the hop to the host.
    """
    model, host = tables.model, tables.model.host
    if tables.direct[home, device]:
        seconds = sign * price(model, net, home, device)
        walk.loads[home] += seconds
        walk.loads[device] += seconds
        return
    relays_besides = walk.relays[net] + (sign - 1) // 2
    walk.relays[net] += sign
    if relays_besides == 0:
        seconds = sign * price(model, net, home, host)
        walk.loads[home] += seconds
        walk.loads[host] += seconds
    if device != host:
        seconds = sign * price(model, net, host, device)
        walk.loads[host] += seconds
        walk.loads[device] += seconds


@inlined
def energy(model: LoadModel, walk: AnnealingState, heat: Temperature) -> float:
    """Return the sum of the powers of loads, and write the worst device to `scalars`.

    Ties of the worst device: the first.
    """
    total, largest, worst = 0.0, -1.0, 0
    for device in range(model.devices):
        if model.counted[device]:
            load = walk.loads[device]
            if load > largest:
                largest, worst = load, device
            power = load / heat.scale_seconds
            for _ in range(heat.doublings):
                power *= power
            total += power
    walk.scalars[WORST] = worst
    return total


@inlined
def lacking_bytes(model: LoadModel, walk: AnnealingState) -> float:
    """Return the bytes above capacity, summed over devices."""
    total = 0.0
    for device in range(model.devices):
        total += max(0.0, walk.used_bytes[device] - model.capacities[device])
    return total


WALKS = 2
"""Number of walks under a budget of evaluations, on any number of cores."""
POOL = 6
"""The pool keeps this many plans as starts of walks."""
CYCLE = (1000, 40_000)
"""Length of the shortest and of the longest cycle, in evaluations of each walk. In between, a cycle
takes a third of what is left of the budget."""
HOT = (0.004, 0.1)
"""Range from which a walk's first temperature is drawn, log-uniformly: the relative rise of the
largest load that is accepted."""
COLD = 0.01
"""The last temperature of a walk, relative to its first."""
CHUNK_WORK = 2e7
"""Steps, of about a nanosecond each, in one call of the kernel. So a call takes at most 0.1 s."""
PATIENCE = 30
"""Without a limit, the search ends after this many cycles that bring no new best."""


def load_search(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best placement at the budget's end, never worse than what the budget held."""
    try_baselines(problem, budget)
    if len(problem.free) and problem.load.counted.any():
        try:
            _search(problem, budget)
        except KeyboardInterrupt:
            budget.interrupted = True
    assert budget.ledger.best is not None, "the baselines were evaluated"
    return budget.ledger.best[1]


def _search(problem: PlacementProblem, budget: Budget) -> None:
    """Run cycles until the budget is spent or nothing improves any more."""
    ledger, tables = budget.ledger, load_tables(problem)
    rng = np.random.default_rng([problem.seed, ledger.next_round()])
    pool: list[tuple[Score, GroupPlacement]] = []
    groups = problem.groups.count

    def join(score: Score, placement: GroupPlacement) -> None:
        """Add a plan to the pool, unless it is there, and keep the best `POOL`, best first."""
        if all(not np.array_equal(placement, other) for _, other in pool):
            pool.append((score, placement))
            pool.sort(key=lambda pair: pair[0])
            del pool[POOL:]

    assert ledger.best is not None, "the baselines were evaluated"
    for score, placement in [ledger.best[:2], *ledger.results.values()]:
        join(score, placement)
    # Under a clock, walks use all cores. Without one, their number is fixed, because the result
    # must not depend on the machine.
    count = budget.threads if budget.timed else WALKS
    walks = [new_walk(tables) for _ in range(max(1, count))]
    limited = budget.timed or np.isfinite(budget.left)
    # Moves per second of one walk, which a budget of seconds measures.
    pace = 5e5
    stalled = 0
    with ThreadPoolExecutor(max(1, min(count, budget.threads))) as executor:
        while not (budget.exhausted or budget.closed):
            # The moves of each walk. If less than two of the shortest cycles are left, they are all
            # that is left.
            left = budget.left / len(walks)
            if budget.timed:
                left = min(left, budget.left_seconds * pace / groups)
            shortest, longest = CYCLE
            evaluations = left if left < 2 * shortest else min(max(left / 3, shortest), longest)
            moves = max(1, int(evaluations * groups))

            # Each walk is annealed from a plan of the pool. The first walk mostly starts from the
            # best plan. Other draws prefer the better plans.
            before, began = pool[0][0], budget.clock()
            tasks = []
            for index, walk in enumerate(walks):
                pick = 0
                if index or rng.random() < 0.25:
                    pick = int(len(pool) * rng.random() ** 2)
                score, placement = pool[pick]
                walk.placement[:] = problem.settle(placement)
                walk.best[:] = walk.placement
                walk.scalars[BEST] = np.inf if score.lacking_bytes else score.value
                walk.random[0] = np.uint64(rng.integers(1, 2**63))
                hot = float(np.exp(rng.uniform(*np.log(HOT))))
                tasks.append(executor.submit(_cool, tables, walk, score.value, hot, moves, budget))
            moves_made = [task.result() for task in tasks]
            if budget.timed:
                pace = max(moves_made) / max(budget.clock() - began, 1e-9)
            budget.charge(sum(moves_made) / groups)

            # What the walks end with joins the pool.
            best_placements = {walk.best.tobytes(): walk.best.copy() for walk in walks}
            for placement in best_placements.values():
                score = budget.score(problem, placement[None], always=True)[0]
                join(score, placement)
                # If memory lacks, later walks get less room.
                if 0 < score.lacking_bytes < np.inf:
                    sizes = np.maximum(problem.load.resident_bytes, problem.group_bytes)
                    used = np.bincount(placement, weights=sizes, minlength=problem.devices)
                    share = problem.capacities / np.maximum(ledger.peaks(placement), 1)
                    room = np.where(share < 1, 0.95 * share * used, np.inf)
                    room = np.minimum(tables.model.capacities, room)
                    model = tables.model._replace(resident_bytes=sizes, capacities=room)
                    tables = tables._replace(model=model)
            stalled = 0 if pool[0][0] < before else stalled + 1
            if stalled >= PATIENCE and not limited:
                return


def _cool(
    tables: LoadTables,
    walk: AnnealingState,
    start_seconds: float,
    hot: float,
    moves: int,
    budget: Budget,
) -> int:
    """Anneal one walk, from its first temperature to its last; return the number of moves proposed,
    fewer if the budget ends earlier.

    start_seconds   value of the plan that the walk starts from
    hot             relative rise of the largest load that is accepted at first
    moves           to propose
    """
    moves_made = 0
    chunk = chunk_moves(tables)
    while moves_made < moves and not (moves_made and budget.exhausted):
        part = min(chunk, moves - moves_made)
        share = moves_made / moves
        doublings = (2 if hot > 0.02 else 3) + int(3 * share)
        # A small relative rise of one load raises its power by 2^doublings times as much.
        temperature = hot * COLD**share * 2.0**doublings
        best = float(walk.scalars[BEST])
        scale = best if np.isfinite(best) else start_seconds
        heat = Temperature(temperature, scale if 0 < scale < np.inf else 1.0, doublings)
        # Loads are computed afresh for each chunk: the exponent may have risen, which changes the
        # energy, and sums that are updated move by move drift.
        start(tables, walk, heat)
        if not moves_made and np.isinf(walk.scalars[BEST]):
            walk.best[:] = walk.placement
        anneal(tables, walk, heat, part)
        moves_made += part
    if np.isinf(walk.scalars[BEST]):
        walk.best[:] = walk.placement
    return moves_made


def chunk_moves(tables: LoadTables) -> int:
    """Return the moves of one call of the kernel: the more nets groups have, the fewer."""
    nets = len(tables.reads) + len(tables.model.net_sources) * tables.model.devices
    return max(1000, int(CHUNK_WORK / (100 + 10 * nets / max(tables.model.groups, 1))))


def load_tables(problem: PlacementProblem) -> LoadTables:
    """Return a problem as the kernel's tables.

    Groups without a choice may only be on their fastest device, where `settle` puts them.
    """
    model: LoadModel = problem.load
    work = model.work_seconds.copy()
    fixed = np.ones(model.groups, bool)
    fixed[problem.free] = False
    work[fixed[:, None] & (np.arange(model.devices) != problem.fastest[:, None])] = np.inf
    groups, choices = np.nonzero(np.isfinite(work))
    nets = np.repeat(np.arange(len(model.net_sources)), np.diff(model.net_offsets))
    made_offsets = np.searchsorted(model.net_sources, np.arange(model.groups + 1))
    direct = model.linked.copy()
    # A send to the host counts as one through the host that ends there: `add_hop` adds no second
    # hop for it. So all destinations share the one hop to the host.
    direct[:, model.host] = 0
    return LoadTables(
        model=model._replace(work_seconds=work),
        direct=direct,
        star=not np.delete(direct, model.host, 0).any() and not model.counted[model.host],
        free=problem.free,
        choice_offsets=csr_offsets(groups, model.groups),
        choices=choices.astype(np.int32),
        made_offsets=made_offsets.astype(np.int32),
        read_offsets=csr_offsets(model.net_targets, model.groups),
        reads=nets[np.argsort(model.net_targets, kind="stable")].astype(np.int32),
    )


def new_walk(tables: LoadTables) -> AnnealingState:
    """Return the arrays of a walk, not yet on any placement."""
    groups, devices = tables.model.groups, tables.model.devices
    nets = len(tables.model.net_sources)
    return AnnealingState(
        placement=np.zeros(groups, np.int32),
        best=np.zeros(groups, np.int32),
        counts=np.zeros((nets, devices), np.int32),
        relays=np.zeros(nets, np.int32),
        loads=np.zeros(devices),
        used_bytes=np.zeros(devices),
        saved_loads=np.zeros(devices),
        saved_bytes=np.zeros(devices),
        moved=np.zeros(groups, np.int32),
        ends=np.zeros(groups, np.int32),
        stamps=np.full(groups, -1, np.int64),
        scalars=np.array([0.0, 0.0, 0.0, np.inf]),
        random=np.ones(1, np.uint64),
    )
