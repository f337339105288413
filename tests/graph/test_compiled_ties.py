"""Ties of compiled kernels join what only one op reads, within a cell, and leave products apart."""

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.frontends import SGD, capture
from dovetail.graph import Phase, colocate
from dovetail.graph.kernels import compiled_ties
from dovetail.graph.units import Units


class Norms(nn.Module):
    """A normalised branch, a branch that two ops read, and products between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        a = self.norm(self.first(x)).relu()
        b = self.second(a).tanh()
        return (b * b.exp() + a).softmax(dim=1)


def squared(output, target):
    return ((output - target) ** 2).mean()


def step(train):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    if not train:
        return capture(Norms().eval(), x)
    return capture(Norms(), x, targets=torch.zeros(4, 8), loss=squared, train=SGD(lr=0.1))


def kinds_of_ties(graph, cell_of=None):
    cell_of = np.full(len(graph), -1) if cell_of is None else cell_of
    short = [kind.removeprefix("aten.") for kind in graph.kinds]
    return [(short[a], short[b]) for a, b in compiled_ties(graph, cell_of).tolist()]


def test_an_inference_step_has_its_chains():
    kinds = kinds_of_ties(step("").graph)
    # What `relu` and `tanh` make has two readers each, so they are the ends of their kernels.
    assert kinds == [
        ("_native_batch_norm_legit_no_training", "relu"),
        ("exp", "mul"),
        ("mul", "add"),
        ("add", "_softmax"),
    ]


def test_gradients_and_statistics_are_no_readers_of_a_training_step():
    graph = step(SGD()).graph
    kinds = kinds_of_ties(graph)
    assert ("_native_batch_norm_legit_functional", "relu") in kinds
    assert {("exp", "mul"), ("mul", "add"), ("add", "_softmax"), ("sub", "pow")} <= set(kinds)
    assert not {"addmm", "mm", "t", "copy_"} & {kind for pair in kinds for kind in pair}


def test_both_ends_of_a_tie_are_forward_ops_of_one_cell():
    graph = step(SGD()).graph
    everywhere = compiled_ties(graph, np.zeros(len(graph)))
    cell_of = np.arange(len(graph)) >= everywhere[0, 1]  # the first tie goes from one to the other
    ties = compiled_ties(graph, cell_of)
    assert ties.tolist() == everywhere[1:].tolist()
    assert (graph.phases[ties] == Phase.FORWARD).all()


def test_what_the_step_returns_ends_a_kernel():
    graph = step("").graph
    last = int(graph.producers[graph.outputs[0]])
    assert last not in compiled_ties(graph, np.full(len(graph), -1))[:, 0]


@pytest.mark.parametrize("train", ["", SGD()])
def test_ties_are_kept_by_grouping_with_their_gradients(train):
    graph = step(train).graph
    ties = compiled_ties(graph, np.full(len(graph), -1))
    groups = colocate(graph, Units(np.full(len(graph), -1, np.int32), ties))
    assert (groups.of_op[ties[:, 0]] == groups.of_op[ties[:, 1]]).all()
    assert groups.count < colocate(graph).count
    backward = np.flatnonzero(graph.gradient_of >= 0)
    assert (groups.of_op[backward] == groups.of_op[graph.gradient_of[backward]]).all()


def test_a_graph_without_chains_has_no_ties():
    graph = capture(nn.Linear(4, 4).eval(), torch.randn(2, 4)).graph
    assert compiled_ties(graph, np.full(len(graph), -1)).shape == (0, 2)
