import numpy as np
import pytest

from dovetail.graph import colocate
from dovetail.instances import load_instance
from dovetail.placers import Budget, make_problem
from dovetail.placers.exact import exact
from dovetail.placers.latency_search import greedy_placements, latency_search
from dovetail.simulator import Simulator
from tests.support.instance_files import INSTANCES, edge, instance_of, node


def problem_of(instance, seed=0):
    simulator = Simulator(instance.graph, instance.machine, instance.costs)
    return make_problem(
        instance.graph,
        instance.machine,
        instance.costs,
        lambda placements: simulator.evaluate(placements, "latency"),
        groups=colocate(instance.graph),
        objective="latency",
        seed=seed,
    )


def value_ms(problem, placement):
    found = problem.evaluate(problem.spread(placement[None]))
    assert found.feasible[0]
    return found.values[0] * 1e3


@pytest.mark.parametrize(
    ("name", "greedy"), [("bert24_inference", 100.2185), ("gnmt_inference", 268.5005)]
)
def test_the_greedy_placement_has_its_published_value(name, greedy):
    problem = problem_of(load_instance(INSTANCES / "latency" / f"{name}.json"))
    assert value_ms(problem, greedy_placements(problem)[0]) == pytest.approx(greedy)


@pytest.mark.parametrize(
    ("name", "known"), [("bert24_inference", 100.2185), ("gnmt_inference", 232.2)]
)
def test_annealing_is_never_worse_than_greedy_and_finds_what_is_known(name, known):
    problem = problem_of(load_instance(INSTANCES / "latency" / f"{name}.json"))
    found = latency_search(problem, Budget(evaluations=100_000))
    assert value_ms(problem, found) <= known * (1 + 1e-9)


def test_the_same_seed_and_evaluations_give_the_same_placement():
    instance = load_instance(INSTANCES / "latency" / "gnmt_inference.json")
    a, b = (latency_search(problem_of(instance), Budget(evaluations=5000)) for _ in range(2))
    assert (a == b).all()


def all_placements(problem):
    choices = [np.flatnonzero(row) for row in problem.allowed]
    grid = np.meshgrid(*choices, indexing="ij")
    return np.stack([axis.ravel() for axis in grid], axis=1).astype(np.int32)


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_exhaustive_search_on_small_instances_with_memory_and_colours(seed):
    rng = np.random.default_rng(seed)
    nodes = [
        node(
            i,
            cpu=float(rng.integers(1, 12)),
            acc=float(rng.integers(1, 4)),
            size=float(rng.integers(0, 50)),
            colorClass=int(rng.integers(0, 7)),
            supportedOnFpga=int(rng.random() < 0.9),
        )
        for i in range(8)
    ]
    edges = [
        edge(a, b, float(a % 3)) for a in range(8) for b in range(a + 1, 8) if rng.random() < 0.3
    ]
    problem = problem_of(instance_of(nodes, edges, size=80.0), seed)
    every = all_placements(problem)
    evaluated = problem.evaluate(problem.spread(every))
    best = evaluated.values[evaluated.feasible].min() * 1e3
    found = latency_search(problem, Budget(evaluations=20_000))
    assert value_ms(problem, found) == pytest.approx(best)


def training_instance(seed):
    """A chain with skips and its backward ops, each on its forward op's device."""
    rng = np.random.default_rng(seed)
    forward = [
        node(
            i,
            cpu=float(rng.integers(1, 12)),
            acc=float(rng.integers(1, 4)),
            size=float(rng.integers(0, 50)),
            colorClass=i,
        )
        for i in range(5)
    ]
    backward = [
        node(
            i + 5,
            cpu=float(rng.integers(1, 12)),
            acc=float(rng.integers(1, 4)),
            isBackwardNode=1,
            colorClass=4 - i,
        )
        for i in range(5)
    ]
    costs = rng.integers(0, 3, size=9).astype(float)
    edges = [edge(a, a + 1, costs[a]) for a in range(9)]
    edges += [edge(a, 9 - a, costs[a]) for a in range(4) if rng.random() < 0.7]
    return instance_of(forward + backward, edges, size=80.0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("training", [False, True])
def test_the_model_of_exact_proves_the_value_of_exhaustive_search(seed, training):
    if training:
        problem = problem_of(training_instance(seed), seed)
    else:
        rng = np.random.default_rng(seed)
        nodes = [
            node(i, cpu=float(rng.integers(1, 12)), acc=float(rng.integers(1, 4)), size=30.0)
            for i in range(7)
        ]
        pairs = [(a, b) for a in range(7) for b in range(a + 1, 7) if rng.random() < 0.4]
        edges = [edge(a, b, float(a % 3)) for a, b in pairs]
        problem = problem_of(instance_of(nodes, edges, size=80.0), seed)
    every = all_placements(problem)
    evaluated = problem.evaluate(problem.spread(every))
    best = evaluated.values[evaluated.feasible].min()
    budget = Budget(evaluations=10**6)
    found = exact(problem, budget, enumerate_after=2**31)
    assert value_ms(problem, found) == pytest.approx(best * 1e3, rel=1e-9)
    assert budget.ledger.bound.proof == "CP-SAT"
    assert best * (1 - 1e-4) <= budget.ledger.bound.seconds <= best * (1 + 1e-9)


def test_a_plan_many_times_slower_than_the_fastest_devices_is_not_called_infeasible():
    """Any two halves exchange 18 tensors, each of which takes 4000 times as long as an op."""
    nodes = [node(i, cpu=1e6, acc=0.01, size=40.0) for i in range(18)]
    edges = [edge(a, b, 40.0) for a in range(18) for b in range(a + 1, 18)]
    problem = problem_of(instance_of(nodes, edges, size=9 * 40.0))
    budget = Budget(evaluations=10_000)
    found = exact(problem, budget, enumerate_after=2**31)
    assert value_ms(problem, found) >= 40.0 * 18
    assert budget.ledger.bound.seconds <= value_ms(problem, found) / 1e3
