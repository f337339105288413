from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.costs import CostCache, measured_costs
from dovetail.errors import CostError
from dovetail.frontends import capture
from dovetail.machine import local_machine


@pytest.fixture(scope="module")
def step():
    layers = torch.nn.Sequential(
        torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)
    )
    return capture(layers, (torch.randint(0, 50, (4, 3)),))


@pytest.fixture(scope="module")
def machine():
    return local_machine(min(2, len(local_machine().devices[0].cores)))


def test_equal_signatures_cost_the_same_and_are_measured_once(step, machine, tmp_path):
    cache = CostCache(tmp_path / "costs.sqlite")
    fractions = []
    costs = measured_costs(step.graph, step.program, machine, cache, progress=fractions.append)
    seconds = costs.compute_seconds
    assert costs.source == "measured"
    assert fractions[-1] == 1.0
    real = ~step.graph.is_source
    assert (seconds[~real] == 0).all()
    assert (seconds[real] > 0).all()
    by_signature = {}
    for op in np.flatnonzero(real).tolist():
        row = by_signature.setdefault(step.graph.signatures[op], seconds[op])
        np.testing.assert_array_equal(row, seconds[op])
    assert len(by_signature) < real.sum()  # the two linear layers share theirs

    again = measured_costs(step.graph, None, machine, cache)  # all of it from the cache
    np.testing.assert_array_equal(again.compute_seconds, seconds)


def test_a_saved_graph_that_was_never_measured_names_its_first_op(step, machine, tmp_path):
    with pytest.raises(CostError) as raised:
        measured_costs(step.graph, None, machine, CostCache(tmp_path / "costs.sqlite"))
    assert raised.value.op == step.graph.names[int(np.flatnonzero(~step.graph.is_source)[0])]


def test_a_call_that_fails_while_it_is_measured_names_its_op(step, machine, tmp_path):
    op = int(np.flatnonzero(~step.graph.is_source)[0])
    calls = list(step.program.calls)
    calls[op] = replace(calls[op], args=())
    broken = replace(step.program, calls=tuple(calls))
    with pytest.raises(CostError, match="its call failed") as raised:
        measured_costs(step.graph, broken, machine, CostCache(tmp_path / "costs.sqlite"))
    assert raised.value.op == step.graph.names[op]
