import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import spearmanr

from dovetail.costs import analytic_costs
from dovetail.graph import group, layered
from dovetail.machine import parse_machine
from dovetail.placers import Budget, make_problem
from dovetail.placers.baselines import try_baselines
from dovetail.placers.multilevel import by_modules, coarsen, merged_problem, multilevel
from dovetail.simulator import Simulator
from tests.support.placer_instances import build_graph, build_machine, build_problem, random_problem


def network(
    ops=4000,
    *,
    machine="4 x k80 + haswell",
    training=False,
    objective="step",
    ranked=False,
    **options,
):
    graph, where = layered(ops, width=4, training=training), parse_machine(machine)
    costs = analytic_costs(graph, where)
    simulator = Simulator(graph, where, costs, ranked=ranked)
    return make_problem(
        graph,
        where,
        costs,
        lambda placements: simulator.evaluate(placements, objective),
        groups=group(graph, largest_share=1 / 128),
        objective=objective,
        trace=simulator.timeline,
        ranked=ranked,
        **options,
    )


def random_placements(problem, rng, count):
    """Runs of groups on random devices."""
    found = []
    for _ in range(count):
        cuts = np.sort(rng.integers(problem.groups.count, size=rng.integers(1, 12)))
        run = np.searchsorted(cuts, np.arange(problem.groups.count))
        found.append(problem.settle(rng.integers(problem.devices, size=len(cuts) + 1)[run]))
    return np.array(found, dtype=np.int32)


def levels_of_paths(edges, count):
    """Is the graph of units acyclic?"""
    waits = np.bincount(edges[:, 1], minlength=count)
    ready = np.flatnonzero(waits == 0).tolist()
    done = 0
    while ready:
        done += 1
        unit = ready.pop()
        for after in edges[edges[:, 0] == unit, 1].tolist():
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    return done == count


def test_levels_are_nested_numbered_by_first_group_and_end_below_the_number_asked_for():
    problem = network()
    levels = coarsen(problem, 20)
    counts = [int(units.max()) + 1 for units in levels]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == problem.groups.count > 60
    assert counts[-1] <= 20
    for fine, coarse in itertools.pairwise(levels):
        assert len(np.unique(np.stack([fine, coarse], axis=1), axis=0)) == fine.max() + 1
    for units in levels:
        _, first = np.unique(units, return_index=True)
        assert (np.diff(first) > 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_joining_by_levels_makes_no_circle_of_units(seed):
    rng = np.random.default_rng(seed)
    reads = [
        sorted(set(rng.integers(max(0, i - 6), i, size=2).tolist())) if i else [] for i in range(60)
    ]
    problem = build_problem(build_graph(reads), build_machine(2))
    first = coarsen(problem, 40)[1]
    ends = first[problem.load.edges]
    ends = np.unique(ends[ends[:, 0] != ends[:, 1]], axis=0)
    assert first.max() + 1 < 60
    assert levels_of_paths(ends, int(first.max()) + 1)


def test_heavy_edges_are_joined_first():
    graph = build_graph([[], [0], [1], [2]], sizes=[900, 1, 900, 1])  # a ═► b ─► c ═► d
    problem = build_problem(graph, build_machine(2))
    assert coarsen(problem, 2)[-1].tolist() == [0, 0, 1, 1]


def test_groups_with_different_labels_or_choices_are_never_joined():
    problem = network()
    labels = np.random.default_rng(0).integers(3, size=problem.groups.count)
    units = coarsen(problem, 5, labels)[-1]
    assert all(len(set(labels[units == unit])) == 1 for unit in range(int(units.max()) + 1))

    pinned = network(pins=[("blocks.1", "k80:2")])
    units = coarsen(pinned, 5)[-1]
    choices = [set(map(bytes, pinned.allowed[units == u])) for u in range(int(units.max()) + 1)]
    assert max(map(len, choices)) == 1


def test_repeated_modules_are_units_from_the_start():
    modules = ["stem", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head"]
    reads = [[i - 1] if i else [] for i in range(6)]
    problem = build_problem(build_graph(reads, modules=modules), build_machine(2))
    assert by_modules(problem).tolist() == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("machine", ["4 x k80 + haswell", "8 x p100"])
def test_a_merged_graph_is_smaller_and_close_in_value_and_memory(training, machine):
    problem = network(training=training, machine=machine)
    every = np.arange(problem.groups.count, dtype=np.int32)
    small = merged_problem(problem, every, 1000)
    assert len(small.graph) < len(problem.graph) / 3
    rows = random_placements(problem, np.random.default_rng(1), 20)
    true = problem.evaluate(problem.spread(rows))
    found = small.evaluate(small.spread(rows))
    assert np.abs(found.values / true.values - 1).max() < 0.1
    used = true.peak_memory_bytes > 0.1 * true.peak_memory_bytes.sum(axis=1, keepdims=True)
    ratio = found.peak_memory_bytes[used] / true.peak_memory_bytes[used]
    assert 0.8 < ratio.min() <= ratio.max() < 1.2


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("machine", ["4 x k80 + haswell", "8 x p100"])
def test_a_merged_graph_is_ranked_where_the_problem_is(training, machine):
    problem = network(training=training, machine=machine, ranked=True)
    every = np.arange(problem.groups.count, dtype=np.int32)
    rows = random_placements(problem, np.random.default_rng(1), 20)
    true = problem.evaluate(problem.spread(rows)).values
    ranked, by_index = (
        merged_problem(replace(problem, ranked=which), every, 1000) for which in (True, False)
    )
    errors = [
        np.abs(one.evaluate(one.spread(rows)).values / true - 1) for one in (ranked, by_index)
    ]
    assert errors[0].mean() < errors[1].mean()
    assert spearmanr(ranked.evaluate(ranked.spread(rows)).values, true).statistic > 0.8


def test_merging_keeps_all_work_and_all_bytes_between_devices():
    problem = network(training=True, objective="load")
    units = coarsen(problem, 30)[-1]
    small = merged_problem(problem, units, 500)
    assert np.allclose(
        small.costs.compute_seconds.sum(axis=0), problem.costs.compute_seconds.sum(axis=0)
    )
    rng = np.random.default_rng(2)
    rows = random_placements(small, rng, 10)
    true = problem.evaluate(problem.spread(rows[:, units]))
    assert np.allclose(small.evaluate(small.spread(rows)).values, true.values, rtol=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_any_graph_can_be_merged_whatever_the_units(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, groups=12, devices=3)
    units = np.unique(rng.integers(4, size=12), return_inverse=True)[1].reshape(-1)
    _, first = np.unique(units, return_index=True)
    rank = np.argsort(np.argsort(first))
    small = merged_problem(problem, rank[units].astype(np.int32), 100)  # checked as it is built
    together = small.evaluate(small.spread(np.zeros((1, small.groups.count), np.int32)))
    seconds = problem.costs.compute_seconds[:, 0].sum()
    assert together.values[0] == pytest.approx(seconds)


def test_multilevel_is_no_worse_than_the_baselines_of_the_true_graph_that_it_starts_from():
    problem = network(training=True)
    budget = Budget(evaluations=400)
    try_baselines(problem, budget)
    start = min(score for score, _ in budget.ledger.results.values())
    found = multilevel(problem, budget)
    assert budget.score(problem, found[None])[0] < start


def test_a_budget_of_evaluations_gives_one_placement_whatever_the_clock_says():
    slow = iter(range(10**9))
    budgets = Budget(evaluations=40), Budget(evaluations=40, clock=lambda: float(next(slow)))
    one, two = (multilevel(network(2000), budget) for budget in budgets)
    assert one.tolist() == two.tolist()
    assert budgets[0].spent == budgets[1].spent < 60


def test_memory_is_respected_where_one_device_is_not_enough():
    whole = network()
    peak = int(whole.evaluate(whole.spread(whole.fastest[None])).peak_memory_bytes.max())
    caps = [(name, int(peak * 0.35)) for name in whole.machine.device_names]
    problem = network(caps=caps)
    budget = Budget(evaluations=300)
    found = multilevel(problem, budget)
    assert budget.score(problem, found[None])[0].lacking_bytes == 0


def test_pins_hold():
    problem = network(pins=[("blocks.1", "k80:2"), ("blocks.6.branch.0", "haswell")])
    found = multilevel(problem, Budget(evaluations=100))
    assert problem.allowed[np.arange(len(found)), found].all()


def test_an_interrupt_ends_it_with_the_best_so_far():
    problem, budget = network(), Budget(evaluations=10**6)
    calls = iter(range(10**6))

    def clock():
        budget.interrupted |= next(calls) > 300
        return 0.0

    budget.clock = clock
    found = multilevel(problem, budget)
    assert budget.interrupted
    assert budget.score(problem, found[None])[0].value > 0


def test_convex_placements_are_left_to_local_search():
    problem = network(contiguous=True)
    budget = Budget(evaluations=60)
    found = multilevel(problem, budget)
    assert budget.score(problem, found[None])[0].lacking_bytes == 0
