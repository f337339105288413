"""Stages along an order, and plans with fewer devices."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.costs import analytic_costs
from dovetail.errors import UsageError
from dovetail.exports.rules import rules_for
from dovetail.graph import colocate
from dovetail.machine import parse_machine
from dovetail.placers import Budget, make_problem, place, placing
from dovetail.placers.chain import ordered_groups
from dovetail.simulator import Simulator
from tests.support.transformer_models import MODELS, Decoder, tokens

MACHINE = parse_machine("2 x p100 + haswell")


def problem_of(step, objective, machine=MACHINE, caps=()):
    rules = rules_for("split-points", step.graph, machine)
    costs = analytic_costs(step.graph, machine)
    simulator = Simulator(step.graph, machine, costs)
    return make_problem(
        step.graph,
        machine,
        costs,
        lambda placements: simulator.evaluate(placements, objective),
        groups=colocate(step.graph, rules.units),
        objective=objective,
        caps=caps,
        chain=rules.chain,
    )


@pytest.mark.parametrize("objective", ["step", "load"])
@pytest.mark.parametrize("name", ["mlp", "tied", "lstm"])
def test_the_search_along_a_chain_equals_exhaustive_search(name, objective):
    problem = problem_of(dt.capture(*MODELS[name]()), objective)
    order = ordered_groups(problem)
    rows = np.tile(problem.fastest, (3 ** len(order), 1))
    rows[:, order] = list(product(range(3), repeat=len(order)))
    found = problem.evaluate(problem.spread(rows))
    best = found.values[found.feasible].min()
    assert place(problem, "auto", Budget(evaluations=500)).value == pytest.approx(best, rel=1e-9)


def test_a_device_that_comes_back_along_the_chain_is_infeasible():
    problem = problem_of(dt.capture(*MODELS["mlp"]()), "step")
    order = ordered_groups(problem)
    rows = np.tile(problem.fastest, (2, 1))
    rows[:, order] = [[0] * 2 + [1] * (len(order) - 2), [0, 1, 0] + [1] * (len(order) - 3)]
    assert problem.evaluate(problem.spread(rows)).feasible.tolist() == [True, False]


def test_where_one_device_is_too_small_the_chain_goes_on_with_the_next():
    step = dt.capture(*MODELS["mlp"]())
    alone = place(problem_of(step, "step"), "single", Budget(evaluations=10))
    room = int(alone.peak_memory_bytes.max()) * 2 // 3
    caps = [(name, room) for name in MACHINE.device_names]
    outcome = place(problem_of(step, "step", caps=caps), "auto", Budget(evaluations=300))
    assert (outcome.peak_memory_bytes <= room).all()
    assert len(set(outcome.placement[~step.graph.is_source].tolist())) > 1


def test_ctrl_c_in_the_evaluator_keeps_what_other_stages_found():
    step = dt.capture(*MODELS["mlp"]())
    alone = place(problem_of(step, "step"), "single", Budget(evaluations=10))
    room = int(alone.peak_memory_bytes.max()) * 2 // 3
    problem = problem_of(step, "step", caps=[(name, room) for name in MACHINE.device_names])
    calls = []

    def evaluate(placements):
        calls.append(len(placements))
        if len(calls) == 2:  # the first call is of `single`, this one of the first stages
            raise KeyboardInterrupt
        return problem.evaluate(placements)

    outcome = place(replace(problem, evaluate=evaluate), "auto", Budget(evaluations=300))
    assert outcome.interrupted
    assert outcome.placer == "chain"
    assert (outcome.peak_memory_bytes <= room).all()


def test_other_methods_keep_no_order_of_stages():
    problem = problem_of(dt.capture(*MODELS["mlp"]()), "step")
    with pytest.raises(UsageError, match=r"keeps no order of stages; leave it out, or use single$"):
        place(problem, "metis", Budget(evaluations=10))


def test_a_method_that_runs_as_auto_may_place_a_chain(monkeypatch):
    monkeypatch.delitem(placing.CHAIN_METHODS, "chain")
    problem = problem_of(dt.capture(Decoder(8), tokens()), "load", parse_machine("2 x p100"))
    order = ordered_groups(problem)
    halves = problem.fastest.copy()
    halves[order] = np.arange(len(order)) >= len(order) // 2
    outcome = place(problem, "auto", Budget(evaluations=10), method=lambda *_: halves)
    assert outcome.placer == "auto"
    assert outcome.value < outcome.baselines["single"]


def used(plan):
    return sum(map(bool, plan.orders))


def test_more_devices_that_gain_too_little_are_not_used():
    step = dt.capture(Decoder(8), tokens())
    options = {"objective": "load", "budget": "300e"}
    free = dt.plan(step, "4 x p100", min_gain=0, **options)
    assert used(free) > 1
    simple = dt.plan(step, "4 x p100", min_gain=0.9, **options)
    assert used(simple) == 1
    assert "would gain" in simple.notes[0]
    assert "--min-gain 0" in simple.notes[0]
    assert simple.min_gain == 0.9
    between = dt.plan(step, "4 x p100", min_gain=0.02, **options)
    assert between.value <= free.value / 0.98 + 1e-12 or used(between) == 1


def test_a_plan_that_placement_cannot_help_says_what_can():
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    plan = dt.plan(dt.capture(layers, torch.ones(8192, 1024)), "4 x p100", budget="500e")
    assert used(plan) == 1
    assert any("--objective load" in note for note in plan.notes)
    assert not any("--replicas" in note for note in plan.notes)


def test_a_method_that_was_asked_for_returns_its_own_plan():
    step = dt.capture(Decoder(), tokens())
    plan = dt.plan(step, "4 x p100", placer="expert", budget="10e")
    assert plan.placer == "expert"
    assert used(plan) == 4
    assert plan.notes == ()
