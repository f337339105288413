import threading
from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import InfeasibleError, NoPlanFitsError, TooManyIntervalsError
from dovetail.graph.convexity import find_return
from dovetail.placers import exact as exact_module
from dovetail.placers.budget import Budget
from dovetail.placers.exact import (
    NEVER,
    alike_devices,
    exact,
    necessary_bytes,
    new_master,
    share_bound,
)
from dovetail.placers.exhaustive import every_placement
from dovetail.simulator import Simulator
from tests.support.exact_instances import best_by_far, small_problem
from tests.support.placer_instances import build_graph, build_machine, build_problem, random_problem

INSTANCES = 60
"""Of each objective; the first 200 were tried too."""
RESOLUTION = 2e-6


def simulated(problem, objective):
    simulator = Simulator(
        problem.graph, problem.machine, problem.costs, capacities=problem.capacities
    )
    return replace(
        problem,
        objective=objective,
        evaluate=lambda placements: simulator.evaluate(placements, objective),
    )


def proven_share(problem):
    """The bound, with the first plan as the only one known."""
    budget = Budget(evaluations=10**5)
    budget.score(problem, problem.fastest[None])
    share_bound(problem, budget)
    return budget.ledger.bound.seconds


def check_against_every_placement(problem, enumerate_after):
    """Exact finds the best and proves it, or proves that nothing fits."""
    best, budget = best_by_far(problem), Budget(evaluations=10**9)
    if best is None:
        with pytest.raises(NoPlanFitsError):
            exact(problem, budget, enumerate_after=enumerate_after)
        return
    placement = exact(problem, budget, enumerate_after=enumerate_after)
    score = budget.score(problem, placement[None])[0]
    assert score.lacking_bytes == 0
    assert score.value == pytest.approx(best, rel=RESOLUTION)
    assert best * (1 - RESOLUTION) <= budget.ledger.bound.seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_cp_sat_alone_proves_the_least_load_of_every_placement(seed):
    check_against_every_placement(small_problem(seed, "load"), NEVER)


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_cp_sat_and_then_every_placement_prove_the_shortest_step(seed):
    check_against_every_placement(small_problem(seed, "step"), 2)


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 6])
def test_cp_sat_alone_proves_the_shortest_step_by_ruling_out_one_placement_at_a_time(seed):
    check_against_every_placement(small_problem(seed, "step"), NEVER)


@pytest.mark.parametrize("objective", ["load", "step"])
def test_few_placements_are_all_evaluated_at_once(objective):
    problem, budget = small_problem(1, objective), Budget(evaluations=10**6)
    exact(problem, budget)
    assert budget.ledger.bound.proof == "every placement"
    assert budget.closed and len(budget.ledger) == problem.placements


def test_relaxed_step_of_a_drawn_example_is_the_step_itself():
    #  gpu0   a----            a: 1 s on gpu0, 3 s on gpu1;  b the other way round
    #  gpu1   .....b----       a's 10 bytes take .05 + .1 s
    graph = build_graph([[], [0]], sizes=[10, 1])
    problem = build_problem(graph, build_machine(2), seconds=[[1.0, 3.0], [3.0, 1.0]])
    problem, budget = simulated(problem, "step"), Budget(evaluations=10**6)
    assert exact(problem, budget, enumerate_after=NEVER).tolist() == [0, 1]
    assert budget.ledger.bound.proof == "CP-SAT"
    assert budget.ledger.bound.seconds == pytest.approx(2.15, rel=RESOLUTION)
    # The first solve finds it, and the second proves it: b on gpu1 alone was never tried.
    assert len(budget.ledger) < problem.placements


def test_what_no_device_can_hold_is_proven_without_evaluating_it():
    graph = build_graph([[], [0], [1]], sizes=[60, 60, 60])
    problem = simulated(build_problem(graph, build_machine(2, memory_bytes=50)), "load")
    budget = Budget(evaluations=10**6)
    with pytest.raises(NoPlanFitsError) as raised:
        exact(problem, budget, enumerate_after=NEVER)
    assert raised.value.proof == "CP-SAT" and isinstance(raised.value, InfeasibleError)
    assert len(budget.ledger) == 1  # what every search starts from


def test_nothing_found_is_not_called_infeasible():
    graph = build_graph([[], [0], [1]], sizes=[60, 60, 60])
    problem = simulated(build_problem(graph, build_machine(2, memory_bytes=50)), "load")
    budget = Budget(evaluations=10**6)
    budget.interrupted = True
    placement = exact(problem, budget)
    assert budget.score(problem, placement[None])[0].lacking_bytes > 0


@pytest.mark.parametrize(("objective", "limit"), [("step", "INTERVALS"), ("load", "HOPS")])
def test_a_model_that_is_too_large_is_refused_with_its_size(monkeypatch, objective, limit):
    monkeypatch.setattr(exact_module, f"MOST_{limit}", 10)
    problem = small_problem(0, objective)
    with pytest.raises(TooManyIntervalsError, match="10 are the limit") as raised:
        exact(problem, Budget(evaluations=10**6), enumerate_after=NEVER)
    assert raised.value.count > raised.value.limit == 10


@pytest.mark.parametrize("objective", ["load", "step"])
def test_a_budget_in_evaluations_buys_the_same_plan_and_bound_each_time(objective):
    results = []
    for _ in range(2):
        rng = np.random.default_rng(4)
        problem = simulated(random_problem(rng, groups=10, devices=3), objective)
        budget = Budget(evaluations=100)
        placement = exact(problem, budget)
        results.append((placement.tolist(), budget.ledger.bound, budget.spent))
    assert results[0] == results[1]
    assert (
        budget.ledger.bound is not None
        and budget.ledger.bound.seconds <= budget.ledger.best[0].value
    )


def test_an_interrupt_ends_cp_sat_with_the_best_so_far():
    problem = simulated(random_problem(np.random.default_rng(5), groups=60, devices=3), "step")
    budget = Budget(evaluations=10**12)
    timer = threading.Timer(0.5, lambda: setattr(budget, "interrupted", True))
    timer.start()
    placement = exact(problem, budget)
    timer.join()
    assert placement in budget.ledger


def test_a_later_call_goes_on_from_what_is_known():
    problem = small_problem(8, "load")
    budget = Budget(evaluations=10**9)
    exact(problem, budget, enumerate_after=NEVER)
    evaluated, bound = len(budget.ledger), budget.ledger.bound
    exact(problem, budget.slice(evaluations=10**6), enumerate_after=NEVER)
    assert budget.ledger.bound.seconds >= bound.seconds
    assert len(budget.ledger) <= evaluated + 1


@pytest.mark.parametrize("objective", ["load", "step"])
def test_pins_hold(objective):
    problem = small_problem(10, objective, pins=[("op3", "gpu1")])
    placement = exact(problem, Budget(evaluations=10**9), enumerate_after=NEVER)
    assert problem.machine.device_names[placement[problem.groups.of_op[3]]] == "gpu1"
    check_against_every_placement(problem, NEVER)


@pytest.mark.parametrize("seed", [3, 9, 12, 15, 18, 21])
def test_contiguous_plans_are_the_best_of_those(seed):
    problem = small_problem(seed, "load", contiguous=True)
    convex = problem.evaluate

    def evaluate(placements):
        found = convex(placements)
        fits = [find_return(problem.graph, placement) is None for placement in placements]
        return replace(found, feasible=found.feasible & np.array(fits))

    check_against_every_placement(replace(problem, evaluate=evaluate), NEVER)


@pytest.mark.parametrize("seed", [28, 46, 64, 70])
def test_devices_whose_messages_take_time_of_one_thread_are_not_swapped(seed):
    problem = small_problem(seed, "step", send_seconds=0.5)
    assert alike_devices(small_problem(seed, "step"))
    assert alike_devices(problem) == []
    check_against_every_placement(problem, NEVER)


@pytest.mark.parametrize("seed", range(12))
def test_placements_that_swap_alike_devices_are_worth_the_same(seed):
    problem = small_problem(2 * seed, "step")
    master = new_master(problem, 1.0)
    rng = np.random.default_rng(seed)
    placements = every_placement(problem)
    some = placements[rng.integers(0, len(placements), size=40)]
    kept = np.array([master.canonical(placement) for placement in some])
    before, after = (problem.evaluate(problem.spread(rows)) for rows in (some, kept))
    assert after.values == pytest.approx(before.values, rel=1e-12)
    assert (after.feasible == before.feasible).all()
    assert [master.canonical(placement).tolist() for placement in kept] == kept.tolist()


def test_devices_are_alike_only_where_no_channel_serves_one_of_them_first():
    assert alike_devices(small_problem(0, "step")) == [[1, 2]]  # gpu0 is the host
    assert alike_devices(small_problem(4, "step")) == [[0, 1, 2]]  # behind a host
    assert alike_devices(small_problem(1, "step")) == []  # GPUs of unlike speed
    assert alike_devices(small_problem(14, "step")) == []  # CPUs: one channel to the two others


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_no_placement_needs_less_memory_than_the_model_says(seed):
    problem = small_problem(seed, "step")
    stay, end, passing = necessary_bytes(problem)
    placements = every_placement(problem)
    peaks = problem.evaluate(problem.spread(placements)).peak_memory_bytes
    for device in range(problem.devices):
        here = placements == device
        passes = np.where(here, passing, 0).max(axis=1)
        assert (peaks[:, device] >= here @ end).all()
        assert (peaks[:, device] >= here @ stay + passes).all()


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_the_bound_from_one_share_is_below_every_load(seed):
    problem = small_problem(seed, "load")
    bound_seconds = proven_share(problem)
    loads = problem.evaluate(problem.spread(every_placement(problem))).values
    assert 0 < bound_seconds <= loads.min()


def test_the_bound_from_one_share_sees_what_an_average_does_not():
    # Four groups of 3 s on three devices: some device has two of them.
    graph = build_graph([[], [], [], []])
    problem = build_problem(graph, build_machine(3), seconds=np.full((4, 3), 3.0))
    bound_seconds = proven_share(problem)
    assert bound_seconds == pytest.approx(6.0, rel=1e-5)


def test_the_bound_from_one_share_knows_memory():
    # Two of the three fit on no device, whatever the balance: one of them idles.
    graph = build_graph(
        [[], [0], [], [2]], sizes=[40, 1, 40, 1], sources={0: "parameter", 2: "parameter"}
    )
    problem = build_problem(
        graph,
        build_machine(3, memory_bytes=45),
        seconds=[[0, 0, 0], [5, 5, 5], [0, 0, 0], [4, 4, 4]],
    )
    bound_seconds = proven_share(problem)
    assert bound_seconds <= 5.0
