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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dovetail.costs import Costs
from dovetail.errors import UsageError
from dovetail.frontends import Captured
from dovetail.graph import Graph, GroupLevels
from dovetail.graph.units import Units, matched_modules, module_paths, units_of
from dovetail.machine import Machine
from dovetail.methods import PLACERS
from dovetail.pipeline.candidates import Candidate, TriedCandidates
from dovetail.pipeline.opening import bound_of, with_copies
from dovetail.pipeline.requests import (
    OF_PHASES,
    PLAN_FIELDS,
    PhasesRequest,
    PlanRequest,
    check_name,
    with_fields_of,
)
from dovetail.pipeline.searching import fixed_ops, plan_of, problem_of
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
)
from dovetail.placers import place as run_placer
from dovetail.plans import Plan

STARTS_SHARE, CLIMB_SHARE, UNDER_MAPS_SHARE = 0.4, 0.3, 0.3
"""Shares of the budget: planning the phases by themselves, moving blocks, searching under maps."""
TOGETHER = "moved together"
"""The name of the candidate that climbing leads to from the best start."""
FOLLOWING = "following"
"""The name of a method: a group without parameters runs where its first input was computed."""
MAPS_AT_ONCE = 64
"""Climbing evaluates this many maps of blocks at once."""
BlockMap = NDArray[np.int32]  # [blocks] device of each
BlockMaps = NDArray[np.int32]  # [maps, blocks] device of each


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


def phase_paths(path: str | Path, phases: Iterable[str]) -> dict[str, Path]:
    """The file of each phase's plan, beside `path`."""
    path = Path(path)
    return {name: path.with_name(f"{path.stem}.{name}{path.suffix}") for name in phases}


@with_fields_of(PlanRequest, skip=PLAN_FIELDS - set(OF_PHASES))
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
    weights   phase -> how many times it runs; by default 128 for `decode`, and else 1
    options   the fields of `PlanRequest` in `requests.OF_PHASES`

    `whole` names modules that are placed as one; by default those that the model says not to split.
    A module with parameters is always whole, unless modules below it have some. `pins` must match
    ops of every phase.

    All inputs live on the host, also the cache that decode reads: plans that run here keep it
    there. Raises what `plan` raises, and `UsageError` for phases of different modules, of training,
    or weights of phases that are not there.
    """
    for name in options:
        check_name("phases", name, OF_PHASES)
    request = PhasesRequest(steps, dict(weights or {}), PlanRequest(None, machine, **options))
    asked, began = request.options, time.perf_counter()
    budget, notes = Budget(*asked.limits), Notes()
    # The machine may be probed for one step alone. The phase that runs most often is that step.
    most_run = max(steps, key=lambda name: request.weights[name])
    where = machine_of(steps[most_run], asked.machine, progress, notes)
    costs = {name: costs_of(step, where, progress, notes) for name, step in steps.items()}
    joint = _joint_problem(request, where, costs)
    phases, device_names = joint.phases, where.device_names

    # Starts. [phases] of [blocks]: where each phase's own plan has the block; -1: the phase does
    # not have it.
    own_maps = []
    for i, phase in enumerate(phases):
        progress(f"planning {phase.name} by itself", i / len(phases), None)
        share = STARTS_SHARE / len(phases)
        outcome = _place(phase.problem, asked.placer, budget, share)
        has_block = phase.reader_of >= 0
        own_maps.append(np.where(has_block, outcome.placement[phase.reader_of], -1))
    maps = {}
    for phase, block_map in zip(phases, own_maps, strict=True):
        # A block that the phase does not have is where the first phase that has it puts it.
        for others_map in own_maps:
            block_map = np.where(block_map < 0, others_map, block_map)
        maps[f"{phase.name} by itself"] = joint.permitted(block_map)
    for device in joint.computing_devices:
        on_one = np.full(len(joint.blocks), device)
        maps[f"all on {device_names[device]}"] = joint.permitted(on_one)
    scores = joint.evaluate(np.stack(list(maps.values())))
    # Of maps with equal scores, the first name in the alphabet is taken.
    score, start = min(zip(scores, maps, strict=True))

    # Climbing. The moves are tried in batches of `MAPS_AT_ONCE`. The best move of each batch is
    # made if it improves the score, and the climb ends after a round of all moves without an
    # improvement, or when its share of the budget is spent.
    part = Budget(budget.seconds * CLIMB_SHARE, budget.evaluations * CLIMB_SHARE, budget.clock)
    best, improved = maps[start], not budget.interrupted
    with keeping_interrupts(part):
        while improved and not part.exhausted:
            improved = False
            moves = [
                (block, device)
                for block in range(len(best))
                for device in joint.computing_devices
                if joint.allowed[block, device]
            ]
            for first in range(0, len(moves), MAPS_AT_ONCE):
                if part.exhausted:
                    break
                batch = np.array(moves[first : first + MAPS_AT_ONCE])  # [moves, 2] block, device
                moved = np.repeat(best[None], len(batch), axis=0)
                moved[np.arange(len(batch)), batch[:, 0]] = batch[:, 1]
                scores = joint.evaluate(moved)
                part.charge(len(batch) * len(phases))
                best_move = min(range(len(batch)), key=lambda i: scores[i])
                if scores[best_move] < score:
                    best, score, improved = moved[best_move], scores[best_move], True
                progress("moving modules of all phases", part.fraction, score[1])
    budget.interrupted = budget.interrupted or part.interrupted
    maps[TOGETHER] = best

    # Searches under maps. Under each every phase searches again for what the map leaves open. A map
    # of one device is preferred unless the best one wins by more than the least gain that the user
    # asks of several devices.
    share = UNDER_MAPS_SHARE / (len(maps) * len(phases))
    tried: TriedCandidates[_UnderMap] = TriedCandidates()

    def search_under(name: str, *_: Any) -> _UnderMap:
        progress(f"planning all phases under one map: {name}", len(tried.plans) / len(maps), None)
        outcomes = {
            phase.name: phase.placed_under(maps[name], asked.placer, budget, share)
            for phase in phases
        }
        value = sum(phase.weight * outcomes[phase.name].value for phase in phases)
        return _UnderMap(outcomes, value, budget.interrupted)

    for name, block_map in maps.items():
        # Of nearly equal candidates that of fewest parts is taken: here of one device.
        parts = 1 if len(set(block_map.tolist())) == 1 else 2
        tried.add(Candidate(name, lambda: asked, partial(search_under, name), parts), progress)
        budget.interrupted = budget.interrupted or tried.interrupted
        # A second Ctrl-C ends a search without a result. What was found before stays.
        if tried.interrupted and name not in tried.plans:
            break
    chosen = tried.best(asked.resolved_gain)
    under_chosen = tried.plan(chosen)
    assert under_chosen is not None, "it is the best"
    plans = {
        phase.name: joint.plan(phase, maps[chosen], under_chosen.outcomes[phase.name])
        for phase in phases
    }
    failures = [f"under one map, {name}: {why}" for name, why in tried.failures.items()]
    planning_seconds = time.perf_counter() - began
    return PhasesPlan(
        plans={
            name: replace(
                plan,
                planning_seconds=planning_seconds,
                interrupted=budget.interrupted,
                notes=(*notes.texts, *steps[name].notes, *failures, *plan.notes),
            )
            for name, plan in plans.items()
        },
        weights={phase.name: phase.weight for phase in phases},
        devices={
            path: device_names[maps[chosen][block]]
            for block, paths in enumerate(joint.blocks)
            for path in paths
        },
        candidates={name: under.value if under else None for name, under in tried.plans.items()},
        chosen=chosen,
        interrupted=budget.interrupted,
    )


@dataclass(frozen=True, eq=False)
class _UnderMap:
    """What the searches of all phases under one map found.

    outcomes   phase -> the outcome of its search
    value      the weighted sum of their seconds
    """

    outcomes: dict[str, PlacerOutcome]
    value: float
    interrupted: bool


@dataclass(frozen=True, eq=False)
class _Phase:
    """One phase in the joint search.

    request       for the phase by itself
    held_block    [groups] the block whose parameters the group reads; -1: it reads none
    block_of      [groups] the block that places the group: its `held_block`, or the block of what
                  it reads
    reader_of     [blocks] an op that reads a parameter of the block; -1: this phase has none
    pins          (pattern, block): the pins that hold the phase's modules to their blocks
    read          [pairs, 2] (block, parameter), where this phase reads the parameter from the block
    unread        [pairs, 2] the same, where only other phases do
    parameter_bytes   [parameters] of the whole model
    """

    name: str
    request: PlanRequest
    weight: float
    problem: PlacementProblem
    whole: tuple[str, ...]
    units: Units
    held_block: NDArray[np.int32]
    block_of: NDArray[np.int32]
    reader_of: NDArray[np.int32]
    pins: tuple[tuple[str, int], ...]
    read: NDArray[np.int64]
    unread: NDArray[np.int64]
    parameter_bytes: NDArray[np.int64]

    def placements(self, maps: BlockMaps) -> NDArray[np.int32]:
        """[maps, groups] the device of each group if it follows its block. A group that may not run
        on the block's device runs where it is fastest."""
        followed = maps[:, self.block_of]
        allowed = self.problem.allowed[np.arange(followed.shape[1]), followed]
        return np.where(allowed, followed, self.problem.fastest).astype(np.int32)

    def unread_on_devices(self, block_map: BlockMap) -> NDArray[np.int64]:
        """[devices] bytes of the parameters on each device that only other phases read there."""
        # Blocks may be tied: a parameter that several blocks of a device hold counts once, and not
        # at all if this phase reads it there.
        count = len(self.parameter_bytes)
        unread = block_map[self.unread[:, 0]] * count + self.unread[:, 1]
        read = block_map[self.read[:, 0]] * count + self.read[:, 1]
        devices, parameters = np.divmod(np.setdiff1d(unread, read), count)
        sizes = self.parameter_bytes[parameters].astype(np.float64)
        sums = np.bincount(devices, weights=sizes, minlength=self.problem.devices)
        return sums.astype(np.int64)

    def evaluate(self, maps: BlockMaps) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[maps] the bytes by which peaks exceed capacities, and [maps] the predicted seconds."""
        evaluation = self.problem.evaluate(self.problem.spread(self.placements(maps)))
        unread = np.stack([self.unread_on_devices(block_map) for block_map in maps])
        peaks = evaluation.peak_memory_bytes + unread
        over = np.maximum(peaks - self.problem.capacities, 0).sum(axis=1)
        # An infeasible map lacks at least one byte, so that every feasible one comes before it.
        lacking = np.where(evaluation.feasible, over, np.maximum(over, 1))
        return lacking.astype(np.float64), np.asarray(evaluation.values, dtype=np.float64)

    def placed_under(
        self, block_map: BlockMap, placer: str, budget: Budget, share: float
    ) -> PlacerOutcome:
        """The best placement under the map, which leaves open where to run the groups without
        parameters. Raises `InfeasibleError`."""
        allowed = self.problem.allowed.copy()
        holding = np.flatnonzero(self.held_block >= 0)
        devices = block_map[self.held_block[holding]]
        allowed[holding] &= devices[:, None] == np.arange(allowed.shape[1])
        capacities = self.problem.capacities - self.unread_on_devices(block_map)
        following = self.placements(block_map[None])

        def method(problem: PlacementProblem, part: Budget) -> GroupPlacement:
            # The placement that follows the blocks is scored even with no budget left, so that
            # there is always a placement to return.
            (score,) = part.score(problem, following, always=True)
            part.note(FOLLOWING, score, following[0])
            PLACERS[placer](problem, part)
            assert part.ledger.best is not None, "it has scored one placement"
            return part.ledger.best[1]

        problem = replace(self.problem, allowed=allowed, capacities=capacities)
        return _place(problem, placer, budget, share, method)


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

    def evaluate(self, maps: BlockMaps) -> list[tuple[float, float]]:
        """The score of each map: the bytes by which peaks exceed capacities, and the weighted
        seconds. Scores compare as tuples, so a map that fits beats every map that does not."""
        of_phases = [phase.evaluate(maps) for phase in self.phases]
        lacking = np.sum([bytes_lacking for bytes_lacking, _ in of_phases], axis=0)
        seconds = sum(p.weight * s for p, (_, s) in zip(self.phases, of_phases, strict=True))
        return list(zip(lacking.tolist(), np.asarray(seconds).tolist(), strict=True))

    @property
    def computing_devices(self) -> list[int]:
        return [d for d, device in enumerate(self.machine.devices) if device.kind != "host"]

    def permitted(self, block_map: NDArray[np.integer]) -> BlockMap:
        """The map, in which each block that is on a forbidden device moves to its first allowed
        one."""
        allowed = self.allowed[np.arange(len(block_map)), block_map]
        return np.where(allowed, block_map, self.allowed.argmax(axis=1)).astype(np.int32)

    def plan(self, phase: _Phase, block_map: BlockMap, outcome: PlacerOutcome) -> Plan:
        """The phase's plan, its modules pinned to the map."""
        problem, names = phase.problem, self.machine.device_names
        graph, costs, request = problem.graph, problem.costs, phase.request
        block_pins = ((pattern, names[block_map[block]]) for pattern, block in phase.pins)
        pins = (*request.pins, *block_pins)
        # The plan is of this phase's graph, which lacks parameters that only other phases read.
        # Caps leave their bytes free.
        unread_bytes = phase.unread_on_devices(block_map)
        caps = dict(request.caps)
        for device in np.flatnonzero(unread_bytes).tolist():
            caps[names[device]] = int(problem.capacities[device] - unread_bytes[device])
        bound = bound_of(graph, self.machine, costs, "step", pins, tuple(caps.items()))
        plan = plan_of(
            request,
            problem,
            outcome,
            bound,
            planning_seconds=outcome.seconds,
            whole=phase.whole,
            notes=outcome.notes,
        )
        plan = replace(plan, pins=pins, caps=tuple(caps.items()))
        fixed = fixed_ops(graph, self.machine, pins, phase.units)
        return with_copies(plan, request.planned_step, fixed)


def _joint_problem(request: PhasesRequest, machine: Machine, costs: Mapping[str, Costs]) -> _Joint:
    """The joint search's problem. Raises `UsageError` for phases without parameters, and what
    `make_problem` raises."""
    steps, options = request.steps, request.options
    patterns = _patterns(steps, options.whole)
    modules = {name: matched_modules(step.graph, patterns[name]) for name, step in steps.items()}
    units = {name: units_of(step.graph, modules[name]) for name, step in steps.items()}
    requests = {name: replace(options, step=step, whole=()) for name, step in steps.items()}
    problems = {
        name: problem_of(
            requests[name], machine, costs[name], GroupLevels(groups_of(step, units[name]), ())
        )
        for name, step in steps.items()
    }
    # Phase -> each op that reads a parameter -> the path of the module that holds it: the outermost
    # whole module around the op, or the op's own module if no whole one is around it.
    holders: dict[str, dict[int, str]] = {name: {} for name in steps}
    # Phase -> (holder, parameter) -> bytes, of each parameter that the phase reads.
    read_bytes: dict[str, dict[tuple[str, str], int]] = {name: {} for name in steps}
    for name, step in steps.items():
        graph, whole = step.graph, set(modules[name])
        for op, source in _reads(graph):
            parts = graph.modules[op].split(".")
            paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
            holder = next((path for path in paths if path in whole), graph.modules[op])
            holders[name][op] = holder
            size = int(graph.tensor_bytes[graph.outputs_of(source)[0]])
            read_bytes[name][holder, graph.names[source]] = size
    every_holder = sorted({path for of_op in holders.values() for path in of_op.values()})
    if not every_holder:
        raise UsageError("phases", "no phase reads a parameter, so they share no placement")
    # Holders whose ops are in one group of some phase are one block, because a group is on one
    # device. Blocks are the connected components of this relation over all phases. A loop at every
    # holder, so that one that is tied to no other is a component, too.
    index = {path: i for i, path in enumerate(every_holder)}
    pairs = [(i, i) for i in range(len(every_holder))]
    for name in steps:
        first_of_group: dict[int, str] = {}
        for op, path in holders[name].items():
            first = first_of_group.setdefault(int(problems[name].groups.of_op[op]), path)
            pairs.append((index[path], index[first]))
    ends = np.array(pairs, dtype=np.int64).T
    edges = coo_array(
        (np.ones(len(pairs), np.int8), (ends[0], ends[1])), shape=(len(every_holder),) * 2
    )
    _, labels = connected_components(edges, directed=False)
    block_of_holder: dict[str, int] = dict(zip(every_holder, labels.tolist(), strict=True))
    count = max(block_of_holder.values()) + 1
    # The phases share one model, so a parameter is on its block's device in every phase, also in
    # those that do not read it.
    model_bytes: dict[tuple[str, str], int] = {}
    for of_phase in read_bytes.values():
        model_bytes |= of_phase
    parameter_bytes = {parameter: size for (_, parameter), size in model_bytes.items()}
    parameter_index = {parameter: i for i, parameter in enumerate(parameter_bytes)}

    def indices(pairs: Iterable[tuple[str, str]]) -> NDArray[np.int64]:
        rows = [(block_of_holder[path], parameter_index[parameter]) for path, parameter in pairs]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    allowed = np.ones((count, len(machine.devices)), dtype=bool)
    phases = []
    for name, step in steps.items():
        problem = problems[name]
        graph, of_op = step.graph, problem.groups.of_op
        held_block = np.full(problem.groups.count, -1, dtype=np.int32)
        reader_of = np.full(count, -1, dtype=np.int32)
        pins: dict[str, int] = {}
        for op, path in holders[name].items():
            block = block_of_holder[path]
            held_block[of_op[op]] = block
            reader_of[block] = op
            # A module that is not whole has other modules inside, which its path would pin as well.
            # So there each op is pinned by its own name.
            pins[path if path in modules[name] else graph.names[op]] = block
        # A block may be only where all groups that hold it may be, in every phase.
        holding = held_block >= 0
        np.logical_and.at(allowed, held_block[holding], problem.allowed[holding])
        # A group follows the block that it holds, else the block of the group whose output it reads
        # first, else block 0. Ops are in topological order, so producers have their block before
        # their readers ask for it.
        block_of = held_block.copy()
        for op in np.flatnonzero(~graph.is_source).tolist():
            producers = graph.producers[graph.inputs_of(op)]
            read_blocks = block_of[of_op[producers[~graph.is_source[producers]]]]
            if block_of[of_op[op]] < 0 and (read_blocks >= 0).any():
                block_of[of_op[op]] = read_blocks[read_blocks >= 0][0]
        phase = _Phase(
            name=name,
            request=requests[name],
            weight=request.weights[name],
            problem=problem,
            whole=patterns[name],
            units=units[name],
            held_block=held_block,
            block_of=np.maximum(block_of, 0),
            reader_of=reader_of,
            pins=tuple(pins.items()),
            read=indices(read_bytes[name]),
            unread=indices(model_bytes.keys() - read_bytes[name].keys()),
            parameter_bytes=np.array(list(parameter_bytes.values()), dtype=np.int64),
        )
        phases.append(phase)
    blocks = tuple(
        tuple(path for path in every_holder if block_of_holder[path] == block)
        for block in range(count)
    )
    for block in np.flatnonzero(~allowed.any(axis=1)).tolist():
        raise UsageError(
            "pin", f"no device is left for {blocks[block][0] or 'the model'} in every phase"
        )
    return _Joint(machine, tuple(phases), blocks, allowed)


def _patterns(steps: Mapping[str, Captured], whole: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The patterns of modules that each phase keeps whole: those that the user or the model asks
    for, and the innermost modules with parameters. Raises `UsageError` for a pattern that matches
    in no phase."""
    matching: dict[str, list[str]] = {name: [] for name in steps}
    # All phases are of one module, so the first one says what the model asks for.
    for pattern in whole or unsplit_modules(next(iter(steps.values()))):
        unmatched: UsageError | None = None
        for name, step in steps.items():
            try:
                matched_modules(step.graph, [pattern])
            except UsageError as error:
                unmatched = error
            else:
                matching[name].append(pattern)
        if unmatched is not None and not any(pattern in of_phase for of_phase in matching.values()):
            raise unmatched
    readers = {step.graph.modules[op] for step in steps.values() for op, _ in _reads(step.graph)}
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
    return {name: tuple(patterns) for name, patterns in matching.items()}


def _reads(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield (op, source op of the parameter) for every read of a parameter."""
    for source in (op for op, kind in enumerate(graph.kinds) if kind == "parameter"):
        for tensor in graph.outputs_of(source):
            for reader in graph.consumers_of(tensor).tolist():
                yield reader, source


def _place(
    problem: PlacementProblem,
    placer: str,
    budget: Budget,
    share: float,
    method: Placer | None = None,
) -> PlacerOutcome:
    """The outcome of one search with a share of the budget. A Ctrl-C ends the search; after one,
    every later search has one evaluation and so runs the cheapest methods alone."""
    evaluations = max(1.0, float(np.floor(budget.evaluations * share)))
    if budget.interrupted:
        evaluations = 1.0
    part = Budget(budget.seconds * share, evaluations, budget.clock)
    with keeping_interrupts(part):
        outcome = run_placer(problem, placer, part, method=method)
    budget.interrupted = budget.interrupted or part.interrupted
    return outcome
