"""Annealing of the largest load: its incremental loads, its limits and its results."""

import dataclasses
import itertools

import numpy as np
import pytest

from dovetail.graph import Groups
from dovetail.machine import Device, Link, Machine
from dovetail.placers import Budget, parse_budget
from dovetail.placers.load_search import (
    BEST,
    LACKING,
    Temperature,
    anneal,
    load_search,
    load_tables,
    new_walk,
    start,
)
from dovetail.simulator import group_loads
from tests.support.placer_instances import build_graph, build_machine, build_problem, random_problem


@dataclasses.dataclass(frozen=True, eq=False)
class LoadEvaluation:
    values: np.ndarray
    peak_memory_bytes: np.ndarray
    feasible: np.ndarray


def as_load(problem, *, passing_bytes=0):
    """The problem with its largest load as value, and as peak the bytes that stay, plus
    `passing_bytes` for every group on the device that only an evaluation knows of."""
    model = problem.load
    first = np.array([np.flatnonzero(problem.groups.of_op == g)[0] for g in range(model.groups)])

    def evaluate(placements):
        of_groups = np.ascontiguousarray(placements[:, first], np.int32)
        values = group_loads(model, of_groups).max(axis=1)
        on = of_groups[:, :, None] == np.arange(model.devices)
        peaks = (on * (model.resident_bytes + passing_bytes)[None, :, None]).sum(axis=1)
        return LoadEvaluation(
            values, peaks.astype(np.int64), (peaks <= model.capacities).all(axis=1)
        )

    return dataclasses.replace(problem, objective="load", evaluate=evaluate)


def unlike_machine(rng, count, *, host_counts, share):
    """`count` devices that all reach the host, and each other with probability `share`."""
    devices = [
        Device(f"gpu{i}", "gpu", "gpu", 10**9, {"float32": 1.0}, 1.0, 0.0) for i in range(count)
    ]
    kind = "cpu" if host_counts else "host"
    devices.append(Device("host", kind, kind, 10**12, {"float32": 1.0}, 1.0, 0.0))
    names = [device.name for device in devices]
    links = [
        Link(a, b, float(rng.uniform(50, 500)), float(rng.uniform(0.01, 0.2)), f"{a}->{b}")
        for a, b in itertools.permutations(names, 2)
        if "host" in (a, b) or rng.random() < share
    ]
    return Machine("unlike", tuple(devices), "host", tuple(links))


def random_load_problem(rng, *, host_counts=False, share=0.5, groups=14, work=1.0):
    """Parameters, an input that starts on the host, and links of which some are missing; an op
    takes `work` seconds and a tensor about one."""
    ops = groups * 3
    sources = {0: "input"} | {op: "parameter" for op in range(1, groups // 2)}
    reads = [
        sorted({int(j) for j in rng.integers(0, i, size=rng.integers(1, 5))})
        if i and i not in sources
        else []
        for i in range(ops)
    ]
    graph = build_graph(reads, sizes=rng.integers(1, 200, size=ops), sources=sources)
    of_op = np.concatenate([np.arange(groups), rng.integers(0, groups, size=ops - groups)])
    machine = unlike_machine(rng, 3, host_counts=host_counts, share=share)
    seconds = work * rng.uniform(0.2, 2.0, size=(ops, len(machine.devices)))
    return as_load(
        build_problem(
            graph, machine, groups=Groups(of_op.astype(np.int32), groups), seconds=seconds
        )
    )


def walk_on(problem, placement, *, seed=1):
    terrain = load_tables(problem)
    walk = new_walk(terrain)
    walk.placement[:] = placement
    walk.random[0] = seed
    return terrain, walk


def random_placement(problem, rng):
    devices = [rng.choice(np.flatnonzero(row)) for row in problem.allowed]
    return problem.settle(np.array(devices, np.int32))


@pytest.mark.parametrize("host_counts", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_loads_after_thousands_of_moves_are_those_from_scratch(host_counts, share):
    for seed in range(15):
        rng = np.random.default_rng(seed)
        problem = random_load_problem(rng, host_counts=host_counts, share=share)
        before = random_placement(problem, rng)
        terrain, walk = walk_on(problem, before, seed=seed + 1)
        assert terrain.star == (share == 0.0 and not host_counts)
        heat = Temperature(temperature=5.0, scale_seconds=10.0, doublings=3)
        start(terrain, walk, heat)
        made = anneal(terrain, walk, heat, 3000)
        assert made > 1500
        assert (walk.placement != before).any()
        counted = problem.load.counted > 0
        fresh = group_loads(problem.load, walk.placement[None])[0]
        assert walk.loads[counted] == pytest.approx(fresh[counted], rel=1e-9)
        counts, relays = walk.counts.copy(), walk.relays.copy()
        used_bytes = walk.used_bytes.copy()
        start(terrain, walk, heat)
        assert np.array_equal(counts, walk.counts)
        assert np.array_equal(relays, walk.relays)
        assert used_bytes == pytest.approx(walk.used_bytes)


def test_a_rejected_change_leaves_no_trace():
    rng = np.random.default_rng(3)
    problem = random_load_problem(rng, host_counts=False, share=0.5)
    terrain, walk = walk_on(problem, random_placement(problem, rng))
    heat = Temperature(temperature=0.0, scale_seconds=10.0, doublings=3)
    start(terrain, walk, heat)
    anneal(terrain, walk, heat, 20_000)  # a local optimum: nearly all is rejected from here on
    state = [walk.placement.copy(), walk.loads.copy(), walk.counts.copy(), walk.relays.copy()]
    anneal(terrain, walk, heat, 2000)
    after = [walk.placement, walk.loads, walk.counts, walk.relays]
    assert all(np.array_equal(a, b) for a, b in zip(state, after, strict=True))


def test_the_best_of_a_walk_is_the_least_largest_load_it_saw():
    rng = np.random.default_rng(4)
    problem = random_load_problem(rng, host_counts=True, share=0.5)
    terrain, walk = walk_on(problem, random_placement(problem, rng))
    heat = Temperature(temperature=1.0, scale_seconds=10.0, doublings=3)
    start(terrain, walk, heat)
    least = np.inf
    for _ in range(200):
        anneal(terrain, walk, heat, 5)
        least = min(least, group_loads(problem.load, walk.placement[None])[0].max())
        assert walk.scalars[BEST] <= least * (1 + 1e-9)
    best = group_loads(problem.load, walk.best[None])[0].max()
    assert walk.scalars[BEST] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(12))
def test_search_equals_all_placements_of_small_problems(seed):
    rng = np.random.default_rng(seed)
    problem = random_load_problem(rng, host_counts=seed % 2 == 0, share=seed % 3 / 2, groups=7)
    devices = np.arange(problem.devices)
    choices = [[there] for there in problem.fastest]
    for group in problem.free:
        choices[group] = devices[problem.allowed[group]]
    every = np.array(list(itertools.product(*choices)), np.int32)
    least = group_loads(problem.load, every).max(axis=1).min()
    budget = parse_budget("4000e")
    found = load_search(problem, budget)
    assert budget.score(problem, found[None])[0].value == pytest.approx(least)


def test_one_seed_and_a_budget_of_evaluations_give_one_plan_on_any_number_of_cores():
    plans = []
    for threads in (1, 2, 3, 1):
        problem = random_load_problem(np.random.default_rng(5), groups=40, work=20.0)
        budget = parse_budget("3000e")
        budget.threads = threads
        plans.append(load_search(problem, budget).tolist())
    assert all(plan == plans[0] for plan in plans)


def test_a_second_call_goes_on_with_other_moves():
    problem = random_load_problem(np.random.default_rng(6), groups=60, work=20.0)
    budget = Budget()
    values = []
    for _ in range(6):
        load_search(problem, budget.slice(evaluations=10))
        values.append(budget.ledger.best[0].value)
    assert sorted(values, reverse=True) == values
    assert len(set(values)) >= 3


def test_pins_hold_and_groups_without_a_choice_stay():
    options = {"pins": [("op3", "gpu2"), ("op30", "gpu0")]}
    problem = as_load(random_problem(np.random.default_rng(7), groups=20, devices=3, **options))
    found = load_search(problem, parse_budget("2000e"))
    assert problem.allowed[np.arange(20), found].all()
    assert found[problem.groups.of_op[3]] == 2
    assert found[problem.groups.of_op[30]] == 0


def packed(capacity_bytes):
    """Eight groups with a parameter each, 10 to 80 bytes, for two devices."""
    reads = [[]] * 8 + [[i] for i in range(8)]
    sizes = [10 * (i + 1) for i in range(8)] + [1] * 8
    graph = build_graph(reads, sizes=sizes, sources=dict.fromkeys(range(8), "parameter"))
    groups = Groups(np.tile(np.arange(8), 2).astype(np.int32), 8)
    seconds = np.array([[1.0, 9.0]] * 16)
    machine = build_machine(2, memory_bytes=capacity_bytes)
    return build_problem(graph, machine, groups=groups, seconds=seconds)


def test_memory_is_packed_tight():
    # 360 bytes in two rooms of 180, though the second device is nine times slower.
    problem = as_load(packed(180))
    budget = parse_budget("4000e")
    found = load_search(problem, budget)
    score = budget.score(problem, found[None])[0]
    assert score.lacking_bytes == 0
    resident = np.bincount(found, weights=problem.load.resident_bytes, minlength=2)
    assert resident.tolist() == [180, 180]
    assert score.value == 9.0 * 3  # of all halves, the one with the fewest groups: 80 + 70 + 30


def test_a_walk_that_lacks_memory_never_lacks_more():
    problem = as_load(packed(170))
    terrain, walk = walk_on(problem, np.zeros(8, np.int32))
    heat = Temperature(temperature=1.0, scale_seconds=10.0, doublings=3)
    start(terrain, walk, heat)
    lacking = [walk.scalars[LACKING]]
    for _ in range(300):
        anneal(terrain, walk, heat, 3)
        lacking.append(walk.scalars[LACKING])
    assert lacking == sorted(lacking, reverse=True)
    assert lacking[-1] == 20
    assert walk.scalars[BEST] == np.inf


def test_memory_that_only_an_evaluation_sees_is_respected():
    # 30 more bytes a group: 600 in all, for rooms of 310.
    problem = as_load(packed(310), passing_bytes=30)
    budget = parse_budget("20000e")
    found = load_search(problem, budget)
    assert budget.score(problem, found[None])[0].lacking_bytes == 0


def test_search_is_never_worse_than_what_was_known():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        problem = as_load(random_problem(rng, groups=30, devices=3, memory_share=0.5))
        budget = parse_budget("3e")
        placements = np.stack([random_placement(problem, rng) for _ in range(20)])
        known = min(budget.score(problem, placements, always=True))
        found = load_search(problem, budget.slice(evaluations=100))
        assert budget.score(problem, found[None])[0] <= known


def test_a_spent_budget_and_an_interrupt_still_give_a_plan():
    problem = random_load_problem(np.random.default_rng(8), groups=20, work=20.0)
    for budget in (Budget(evaluations=0), Budget()):
        budget.interrupted = budget.left > 0
        found = load_search(problem, budget)
        assert problem.allowed[np.arange(20), found].all()
        assert budget.score(problem, found[None], always=True)[0].value < np.inf


def test_what_was_charged_is_the_budget():
    problem = random_load_problem(np.random.default_rng(9), groups=50, work=20.0)
    budget = parse_budget("5000e")
    load_search(problem, budget)
    assert 5000 <= budget.spent <= 5100
