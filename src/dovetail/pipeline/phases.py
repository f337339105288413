"""Finds one placement for several phases of a model: prefill and decode of a language model.

    prefill  layers.0 ─► layers.1 ─► head      1 x a prompt
    decode   layers.0 ─► layers.1 ─► head    128 x a token
                │           │          │
              cuda:0      cuda:1     cuda:1     one device for each module, and so its parameters

The objective is the weighted sum of the phases' predicted seconds. The search places *blocks*. A
block is a module with parameters, together with the modules that some phase's groups tie to it.
Each phase places its ops without parameters for itself.

A *map* says on which device each block is. The search has three steps:

1. Starts. Every phase is planned by itself, and where its plan has the blocks is one map. All
   blocks on one device is another map, for each device.
2. Climbing. From the best of these maps one block at a time moves, as long as that helps.
3. Searches under maps. Under each map every phase searches again for what the map leaves open. The
   plans under the map with the best sum are returned.

So the result is never worse than a phase's own placement imposed on all, or than one device. It is
a local optimum.

The memory of a phase counts its own activations and caches, and all parameters on a device, also
those that only another phase reads.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.costs import Costs
from dovetail.errors import InfeasibleError, UsageError
from dovetail.frontends import Captured
from dovetail.graph import Graph
from dovetail.graph.units import Units, matched_modules, module_paths, units_of
from dovetail.machine import Machine
from dovetail.methods import PLACERS
from dovetail.pipeline.opening import bound_of, with_copies
from dovetail.pipeline.planning import fixed_ops, problem_of, to_plan
from dovetail.pipeline.requests import (
    OF_PHASES,
    PLAN_FIELDS,
    PhasesRequest,
    PlanRequest,
    check_name,
    with_fields_of,
)
from dovetail.pipeline.sources import (
    Notes,
    TellProgress,
    costs_of,
    groups_of,
    machine_of,
    silent,
    unsplit_modules,
)
from dovetail.placers import (
    Budget,
    GroupPlacement,
    PlacementProblem,
    Placer,
    PlacerOutcome,
    keeping_interrupts,
    parse_budget,
)
from dovetail.placers import place as run_placer
from dovetail.plans import Plan
from dovetail.simulator import Simulator

STARTS, CLIMB, UNDER_MAPS = 0.4, 0.3, 0.3
"""Shares of the budget: planning the phases by themselves, moving blocks, searching under maps."""
TOGETHER = "moved together"
"""The name of the candidate that climbing leads to from the best start."""
FOLLOWING = "following"
"""The name of a method: a group without parameters runs where its first input was computed."""
BATCH = 64
"""This many maps of blocks are evaluated at once."""
Maps = NDArray[np.int32]  # [..., blocks] device of each


@dataclass(frozen=True, eq=False)
class PhasesPlan:
    """One plan for each phase, with the same modules on the same devices.

    plans       phase -> its plan, pinned to `devices`
    weights     phase -> how many times it runs
    devices     module path -> device name, of all modules with parameters; a module that is not
                kept whole, but has parameters beside those of its children, stands for these alone
    candidates  map -> weighted seconds under it, None where it does not fit: each phase's own
                placement and each device for all, imposed on all phases, and the map `TOGETHER`
    chosen      the candidate that `plans` are under
    """

    plans: dict[str, Plan]
    weights: dict[str, float]
    devices: dict[str, str]
    candidates: dict[str, float | None]
    chosen: str
    interrupted: bool = False

    @property
    def value(self) -> float:
        """The seconds of all phases together, each multiplied by its weight."""
        return sum(self.weights[name] * plan.value for name, plan in self.plans.items())

    def save(self, path: str | Path) -> dict[str, Path]:
        """Write one file for each phase and return phase -> its file. If `path` is "plan.json", the
        file is "plan.PHASE.json" beside it. Raises `UnwritableError`."""
        paths = phase_paths(path, self.plans)
        for name, plan in self.plans.items():
            plan.save(paths[name])
        return paths


def phase_paths(path: str | Path, phases: Sequence[str] | Mapping[str, object]) -> dict[str, Path]:
    """The file of each phase's plan, beside `path`."""
    path = Path(path)
    return {name: path.with_name(f"{path.stem}.{name}{path.suffix}") for name in phases}


@with_fields_of(PlanRequest, skip=set(PLAN_FIELDS) - set(OF_PHASES))
def plan_phases(
    steps: Mapping[str, Captured],
    machine: str | Machine = "",
    *,
    weights: Mapping[str, float] | None = None,
    progress: TellProgress = silent,
    **options: Any,
) -> PhasesPlan:
    """Find one placement of a model under which its phases together run fastest.

    steps     phase -> the same module, captured with that phase's inputs
    weights   how many times each phase runs; by default 128 for `decode`, and else 1
    options   the fields of `PlanRequest` in `requests.OF_PHASES`

    `whole` names modules that are placed as one; by default those that the model says not to split.
    A module with parameters is always whole, unless modules below it have some. `pins` must match
    ops of every phase.

    An input lives on the host, the cache that decode reads as well, as it does where plans run
    here. Raises what `plan` raises, and `UsageError` for phases of different modules, of training,
    or weights of phases that are not there.
    """
    for name in options:
        check_name("phases", name, OF_PHASES)
    request = PhasesRequest(steps, dict(weights or {}), PlanRequest(None, machine, **options))
    return find_phases_plan(request, progress)


def find_phases_plan(request: PhasesRequest, progress: TellProgress = silent) -> PhasesPlan:
    """Find one placement for the phases of a request. See `plan_phases`."""
    steps, weights, options = request.steps, request.weights, request.options
    began, limit, notes = time.perf_counter(), parse_budget(str(options.budget)), Notes()
    # The machine may be probed for one step alone. The phase that runs most often is that step.
    heaviest = max(steps, key=lambda name: weights[name])
    machine = machine_of(steps[heaviest], options.machine, progress, notes)
    costs = {name: costs_of(step, machine, progress, notes) for name, step in steps.items()}
    joint = _joint(request, machine, costs)
    found = _search(joint, limit, progress)
    spent = time.perf_counter() - began
    plans = {
        name: replace(
            plan,
            min_gain=options.resolved_gain,
            planning_seconds=spent,
            interrupted=limit.interrupted,
            notes=(*notes.texts, *steps[name].notes, *plan.notes),
        )
        for name, plan in found.plans.items()
    }
    return replace(found, plans=plans, interrupted=limit.interrupted)


@dataclass(frozen=True, eq=False)
class _Phase:
    """One phase in the joint search.

    own_block     [groups] the block that the group belongs to; -1: it holds no parameters
    block_of      [groups] the block that places the group: its own, or the block of what it reads
    reader_of     [blocks] an op that reads a parameter of the block; -1: this phase has none
    pins          (pattern, block): the pins that hold the phase's modules to their blocks
    unread_bytes  [blocks] bytes of the parameters that only other phases read
    """

    name: str
    step: Captured
    weight: float
    problem: PlacementProblem
    simulator: Simulator
    whole: tuple[str, ...]
    units: Units
    own_block: NDArray[np.int32]
    block_of: NDArray[np.int32]
    reader_of: NDArray[np.int32]
    pins: tuple[tuple[str, int], ...]
    unread_bytes: NDArray[np.int64]

    def placements(self, maps: Maps) -> NDArray[np.int32]:
        """[maps, groups] the device of each group if it follows its block. A group that may not run
        on the block's device runs where it is fastest."""
        followed = maps[:, self.block_of]
        allowed = self.problem.allowed[np.arange(followed.shape[1]), followed]
        return np.where(allowed, followed, self.problem.fastest).astype(np.int32)

    def beside(self, map_: Maps) -> NDArray[np.int64]:
        """[devices] bytes of the parameters on each device that only other phases read."""
        weights = self.unread_bytes.astype(np.float64)
        devices = self.problem.devices
        return np.bincount(map_, weights=weights, minlength=devices).astype(np.int64)

    def evaluate(self, maps: Maps) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[maps] the bytes by which peaks exceed capacities, and [maps] the predicted seconds."""
        found = self.problem.evaluate(self.problem.spread(self.placements(maps)))
        peaks = found.peak_memory_bytes + np.stack([self.beside(one) for one in maps])
        over = np.maximum(peaks - self.problem.capacities, 0).sum(axis=1)
        # An infeasible map lacks at least one byte, so that every feasible one comes before it.
        lacking = np.where(found.feasible, over, np.maximum(over, 1))
        return lacking.astype(np.float64), np.asarray(found.values, dtype=np.float64)

    def under(self, map_: Maps) -> PlacementProblem:
        """The phase's problem under the map: where to run the groups without parameters."""
        allowed = self.problem.allowed.copy()
        held = np.flatnonzero(self.own_block >= 0)
        allowed[held] &= map_[self.own_block[held], None] == np.arange(allowed.shape[1])
        capacities = self.problem.capacities - self.beside(map_)
        return replace(self.problem, allowed=allowed, capacities=capacities)


@dataclass(frozen=True, eq=False)
class _Joint:
    """The joint search's problem.

    blocks   [blocks] paths of the modules with parameters that the block holds
    allowed  [blocks, devices] True if every phase permits the block on the device
    """

    machine: Machine
    phases: tuple[_Phase, ...]
    blocks: tuple[tuple[str, ...], ...]
    allowed: NDArray[np.bool_]
    options: PlanRequest

    def evaluate(self, maps: Maps) -> list[tuple[float, float]]:
        """The score of each map: the bytes by which peaks exceed capacities, and the weighted
        seconds. Scores compare as tuples, so a map that fits beats every map that does not."""
        scores = [phase.evaluate(maps) for phase in self.phases]
        lacking = np.sum([lacks for lacks, _ in scores], axis=0)
        seconds = sum(p.weight * s for p, (_, s) in zip(self.phases, scores, strict=True))
        return list(zip(lacking.tolist(), np.asarray(seconds).tolist(), strict=True))

    @property
    def running(self) -> list[int]:
        """The devices that compute."""
        return [d for d, device in enumerate(self.machine.devices) if device.kind != "host"]

    def settled(self, map_: NDArray[np.integer]) -> Maps:
        """The map, in which each block that is on a forbidden device moves to its first allowed
        one."""
        ok = self.allowed[np.arange(len(map_)), map_]
        return np.where(ok, map_, self.allowed.argmax(axis=1)).astype(np.int32)


def _joint(request: PhasesRequest, machine: Machine, costs: Mapping[str, Costs]) -> _Joint:
    """The joint search's problem. Raises `UsageError` for phases without parameters, and what
    `make_problem` raises."""
    steps, options = request.steps, request.options
    patterns = _patterns(steps, options.whole)
    modules = {name: matched_modules(step.graph, patterns[name]) for name, step in steps.items()}
    units = {name: units_of(step.graph, modules[name]) for name, step in steps.items()}
    built = {
        name: problem_of(
            replace(options, step=step, whole=()),
            machine,
            costs[name],
            groups_of(step, units[name]),
        )
        for name, step in steps.items()
    }
    keys = {name: _keys(step.graph, modules[name]) for name, step in steps.items()}
    every = sorted({key for of_op in keys.values() for key in of_op.values()})
    if not every:
        raise UsageError("phases", "no phase reads a parameter, so they share no placement")
    block_of_key = _blocks(every, [(keys[name], built[name][0]) for name in steps])
    count = max(block_of_key.values()) + 1
    parameters = {name: _parameter_bytes(steps[name].graph, keys[name]) for name in steps}
    # (key, parameter) -> bytes, over all phases. What a phase does not read of it is on its device
    # all the same, since the phases share one model.
    union = {pair: size for of_phase in parameters.values() for pair, size in of_phase.items()}
    allowed = np.ones((count, len(machine.devices)), dtype=bool)
    phases = []
    for name, step in steps.items():
        problem, simulator = built[name]
        own = np.full(problem.groups.count, -1, dtype=np.int32)
        readers = np.full(count, -1, dtype=np.int32)
        pins: dict[str, int] = {}
        for op, key in keys[name].items():
            block = block_of_key[key]
            own[problem.groups.of_op[op]] = block
            readers[block] = op
            # A module that is not whole has other modules inside, which its path would pin as well.
            # So there each op is pinned by its own name.
            pins[key if key in modules[name] else step.graph.names[op]] = block
        held = own >= 0
        np.logical_and.at(allowed, own[held], problem.allowed[held])
        unread = np.zeros(count, dtype=np.int64)
        for pair in union.keys() - parameters[name].keys():
            unread[block_of_key[pair[0]]] += union[pair]
        phase = _Phase(
            name, step, request.weights[name], problem, simulator, patterns[name], units[name], own,
            _followed(problem, own), readers, tuple(pins.items()), unread,
        )  # fmt: skip
        phases.append(phase)
    blocks = tuple(tuple(k for k in every if block_of_key[k] == block) for block in range(count))
    for block in np.flatnonzero(~allowed.any(axis=1)).tolist():
        raise UsageError(
            "pin", f"no device is left for {blocks[block][0] or 'the model'} in every phase"
        )
    return _Joint(machine, tuple(phases), blocks, allowed, options)


def _patterns(steps: Mapping[str, Captured], whole: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The patterns of modules that each phase keeps whole: those that the user or the model asks
    for, and the innermost modules with parameters. Raises `UsageError` for a pattern that matches
    in no phase."""
    matching: dict[str, list[str]] = {name: [] for name in steps}
    for pattern in whole or unsplit_modules(next(iter(steps.values()))):
        failed: UsageError | None = None
        for name, step in steps.items():
            try:
                matched_modules(step.graph, [pattern])
            except UsageError as error:
                failed = error
            else:
                matching[name].append(pattern)
        if failed is not None and not any(pattern in found for found in matching.values()):
            raise failed
    readers = {step.graph.modules[r] for step in steps.values() for r, _ in _reads(step.graph)}
    # Every module around one that reads parameters is not innermost.
    around = {".".join(m.split(".")[:i]) for m in readers for i in range(1, m.count(".") + 1)}
    innermost = readers - around - {""}
    for name, step in steps.items():
        covered = matched_modules(step.graph, matching[name]) if matching[name] else ()
        matching[name] += [
            path
            for path in module_paths(step.graph)
            if path in innermost and not any(path == c or path.startswith(f"{c}.") for c in covered)
        ]
    return {name: tuple(found) for name, found in matching.items()}


def _reads(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield (op, source op of the parameter) for every read of a parameter."""
    for source in (op for op, kind in enumerate(graph.kinds) if kind == "parameter"):
        for tensor in graph.outputs_of(source):
            for reader in graph.consumers_of(tensor).tolist():
                yield reader, source


def _keys(graph: Graph, modules: Sequence[str]) -> dict[int, str]:
    """Each op that reads a parameter -> its key: the path of the outermost whole module around it,
    or of its own module if no whole one is around it."""
    whole = set(modules)
    keys = {}
    for op, _ in _reads(graph):
        parts = graph.modules[op].split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        keys[op] = next((path for path in paths if path in whole), graph.modules[op])
    return keys


def _blocks(
    every: Sequence[str], phases: Sequence[tuple[dict[int, str], PlacementProblem]]
) -> dict[str, int]:
    """Key -> block. Keys whose ops are in one group of some phase are one block, because a group is
    on one device. Blocks are the connected components of this relation over all phases."""
    index = {key: i for i, key in enumerate(every)}
    # A loop at every key, so that a key that is tied to no other is a component, too.
    pairs = [(i, i) for i in range(len(every))]
    for keys, problem in phases:
        first: dict[int, str] = {}
        for op, key in keys.items():
            there = first.setdefault(int(problem.groups.of_op[op]), key)
            pairs.append((index[key], index[there]))
    ends = np.array(pairs, dtype=np.int64).T
    edges = coo_array((np.ones(len(pairs), np.int8), (ends[0], ends[1])), shape=(len(every),) * 2)
    _, labels = connected_components(edges, directed=False)
    return dict(zip(every, labels.tolist(), strict=True))


def _parameter_bytes(graph: Graph, keys: Mapping[int, str]) -> dict[tuple[str, str], int]:
    """(key, parameter) -> bytes, of each parameter that the phase reads."""
    sizes = {}
    for op, source in _reads(graph):
        sizes[keys[op], graph.names[source]] = int(graph.tensor_bytes[graph.outputs_of(source)[0]])
    return sizes


def _followed(problem: PlacementProblem, own: NDArray[np.int32]) -> NDArray[np.int32]:
    """[groups] the block that each group follows: its own block, else the block of the group whose
    output it reads first, else block 0."""
    graph, of_op = problem.graph, problem.groups.of_op
    found = own.copy()
    # Ops are in topological order, so producers have their block before their readers ask for it.
    for op in np.flatnonzero(~graph.is_source).tolist():
        group = of_op[op]
        makers = graph.producers[graph.inputs_of(op)]
        made = found[of_op[makers[~graph.is_source[makers]]]]
        if found[group] < 0 and (made >= 0).any():
            found[group] = made[made >= 0][0]
    return np.maximum(found, 0)


def _search(joint: _Joint, limit: Budget, progress: TellProgress) -> PhasesPlan:
    """A plan for each phase under the best map. Raises `InfeasibleError` if every map fails."""
    maps = _by_themselves(joint, limit, progress)
    names = joint.machine.device_names
    for device in joint.running:
        maps[f"all on {names[device]}"] = joint.settled(np.full(len(joint.blocks), device))
    scores = joint.evaluate(np.stack(list(maps.values())))
    score, best = min(zip(scores, maps, strict=True))
    together = _climbed(joint, maps[best], score, limit, progress)
    tried = {**maps, TOGETHER: together}
    share = UNDER_MAPS / (len(tried) * len(joint.phases))
    outcomes: dict[str, dict[str, PlacerOutcome]] = {}
    lacking: InfeasibleError | None = None
    for i, (name, map_) in enumerate(tried.items()):
        progress(f"planning all phases under one map: {name}", i / len(tried), None)
        try:
            outcomes[name] = {
                phase.name: _under(phase, map_, joint.options, limit, share)
                for phase in joint.phases
            }
        except InfeasibleError as error:
            lacking = error
    values = {
        name: sum(phase.weight * found[phase.name].value for phase in joint.phases)
        for name, found in outcomes.items()
    }
    if not values:
        assert lacking is not None
        raise lacking
    chosen = min(values, key=lambda name: values[name])
    # All blocks on one device is preferred unless the best map wins by more than the least gain
    # that the user asks of several devices.
    alone = [name for name in values if len(set(tried[name].tolist())) == 1]
    simplest = min(alone, key=lambda name: values[name], default=chosen)
    if values[chosen] > values[simplest] * (1 - joint.options.resolved_gain):
        chosen = simplest
    map_ = tried[chosen]
    return PhasesPlan(
        plans={p.name: _plan(joint, p, map_, outcomes[chosen][p.name]) for p in joint.phases},
        weights={phase.name: phase.weight for phase in joint.phases},
        devices={
            key: names[map_[block]] for block, keys in enumerate(joint.blocks) for key in keys
        },
        candidates={name: values.get(name) for name in tried},
        chosen=chosen,
    )


def _by_themselves(joint: _Joint, limit: Budget, progress: TellProgress) -> dict[str, Maps]:
    """The map of each phase planned without the others. A block that the phase does not have is
    where the first phase that has it puts it."""
    found: dict[str, Maps] = {}
    for i, phase in enumerate(joint.phases):
        progress(f"planning {phase.name} by itself", i / len(joint.phases), None)
        share = STARTS / len(joint.phases)
        outcome = _interruptible(phase.problem, joint.options.placer, limit, share)
        placed = outcome.placement[phase.reader_of]
        found[f"{phase.name} by itself"] = np.where(phase.reader_of < 0, -1, placed)
    for name, own in found.items():
        filled = own
        for other in found.values():
            filled = np.where(filled < 0, other, filled)
        found[name] = joint.settled(filled)
    return found


def _climbed(
    joint: _Joint, start: Maps, score: tuple[float, float], limit: Budget, progress: TellProgress
) -> Maps:
    """The map that moves of one block lead to from `start`, whose score is `score`.

    The moves are tried in batches of `BATCH`. The best move of each batch is made if it improves
    the score, and the climb ends after a round of all moves without an improvement, or when its
    share of the budget is spent.
    """
    budget = Budget(limit.seconds * CLIMB, limit.evaluations * CLIMB, limit.clock)
    best, improved = start, not limit.interrupted
    with keeping_interrupts(budget):
        while improved and not budget.exhausted:
            improved = False
            moves = [(b, d) for b in range(len(best)) for d in joint.running if joint.allowed[b, d]]
            for at in range(0, len(moves), BATCH):
                if budget.exhausted:
                    break
                batch = np.array(moves[at : at + BATCH])
                maps = np.repeat(best[None], len(batch), axis=0)
                maps[np.arange(len(batch)), batch[:, 0]] = batch[:, 1]
                scores = joint.evaluate(maps)
                budget.charge(len(batch) * len(joint.phases))
                first = min(range(len(batch)), key=lambda i: scores[i])
                if scores[first] < score:
                    best, score, improved = maps[first], scores[first], True
                progress("moving modules of all phases", budget.fraction, score[1])
    limit.interrupted = limit.interrupted or budget.interrupted
    return best


def _under(
    phase: _Phase, map_: Maps, options: PlanRequest, limit: Budget, share: float
) -> PlacerOutcome:
    """The best placement of the phase under the map. Raises `InfeasibleError`."""
    start = phase.placements(map_[None])

    def method(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
        # The placement that follows the blocks is scored even with no budget left, so that there
        # is always a placement to return.
        (score,) = budget.score(problem, start, always=True)
        budget.note(FOLLOWING, score, start[0])
        PLACERS[options.placer](problem, budget)
        assert budget.best is not None  # it has scored one
        return budget.best[1]

    return _interruptible(phase.under(map_), options.placer, limit, share, method)


def _interruptible(
    problem: PlacementProblem,
    placer: str,
    limit: Budget,
    share: float,
    method: Placer | None = None,
) -> PlacerOutcome:
    """The outcome of one search with a share of the budget. A Ctrl-C ends the search; after one,
    every later search has one evaluation and so runs the cheapest methods alone."""
    evaluations = 1.0 if limit.interrupted else max(1.0, float(np.floor(limit.evaluations * share)))
    budget = Budget(limit.seconds * share, evaluations, limit.clock)
    with keeping_interrupts(budget):
        outcome = run_placer(problem, placer, budget, method=method)
    limit.interrupted = limit.interrupted or budget.interrupted
    return outcome


def _plan(joint: _Joint, phase: _Phase, map_: Maps, outcome: PlacerOutcome) -> Plan:
    """The phase's plan, its modules pinned to the map."""
    graph, machine, costs = phase.problem.graph, joint.machine, phase.problem.costs
    names = machine.device_names
    pins = (*joint.options.pins, *((pattern, names[map_[block]]) for pattern, block in phase.pins))
    # The plan is of this phase's graph, which lacks parameters that only other phases read. Caps
    # leave their bytes free.
    beside = phase.beside(map_)
    caps = dict(joint.options.caps)
    for device in np.flatnonzero(beside).tolist():
        caps[names[device]] = int(phase.problem.capacities[device] - beside[device])
    bound = bound_of(graph, machine, costs, "step", pins, tuple(caps.items()))
    found = replace(
        to_plan(phase.problem, outcome, phase.simulator, bound),
        source=phase.step.source,
        pins=pins,
        caps=tuple(caps.items()),
        whole=phase.whole,
        notes=outcome.notes,
    )
    return with_copies(found, phase.step, fixed_ops(graph, machine, pins, phase.units))
