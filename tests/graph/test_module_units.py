import numpy as np
import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.errors import UsageError
from dovetail.graph import colocate, group
from dovetail.graph.copies import shareable, spread_out
from dovetail.graph.units import matched_modules, units_of
from tests.support.transformer_models import Decoder, tokens


@pytest.fixture(scope="module")
def graph():
    return dt.capture(Decoder(), tokens()).graph


def groups_of_module(groups, graph, path):
    inside = [
        op
        for op, module in enumerate(graph.modules)
        if (module == path or module.startswith(path + ".")) and not graph.is_source[op]
    ]
    return set(groups.of_op[inside].tolist())


def test_the_outermost_module_that_a_pattern_matches_is_the_unit(graph):
    assert matched_modules(graph, ["layers.*"]) == tuple(f"layers.{i}" for i in range(4))
    assert matched_modules(graph, ["layers.1", "layers.1.up"]) == ("layers.1",)


def test_a_pattern_that_matches_no_module_is_refused(graph):
    with pytest.raises(UsageError, match=r"'blocks.*' matches no module"):
        matched_modules(graph, ["blocks.*"])


@pytest.mark.parametrize("step", [colocate, group])
def test_each_unit_is_one_group_and_two_units_are_two(graph, step):
    units = units_of(graph, matched_modules(graph, ["layers.*"]))
    groups = step(graph, units)
    found = [groups_of_module(groups, graph, f"layers.{i}") for i in range(4)]
    assert all(len(one) == 1 for one in found)
    assert len(set().union(*found)) == 4


def test_a_unit_holds_backward_and_update_too():
    captured = dt.capture(
        Decoder(2), tokens(), loss=lambda output: output.square().mean(), train=dt.Adam()
    )
    graph = captured.graph
    groups = colocate(graph, units_of(graph, matched_modules(graph, ["layers.*"])))
    (first,), (second,) = (groups_of_module(groups, graph, f"layers.{i}") for i in range(2))
    assert first != second
    phases = {int(graph.phases[op]) for op in np.flatnonzero(groups.of_op == first)}
    assert phases == {0, 1, 2, 3}


def test_what_all_layers_share_ties_no_two_of_them(graph):
    groups = colocate(graph)
    found = [groups_of_module(groups, graph, f"layers.{i}") for i in range(4)]
    assert not set.intersection(*found)


def test_positions_and_masks_may_be_shared_but_nothing_that_reads_a_parameter(graph):
    may = shareable(graph)
    names = {graph.names[op] for op in np.flatnonzero(may)}
    assert {"rotary/cos", "rotary/ge"} <= names
    assert not any("embedding/" in name or "/addmm" in name for name in names)
    assert spread_out(graph)[graph.index["rotary/cos"]]


def test_what_draws_random_numbers_is_not_shared():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand(3).cos()

    graph = dt.capture(nn.Sequential(nn.Linear(3, 3), Noisy()), torch.ones(2, 3)).graph
    assert not shareable(graph).any()
