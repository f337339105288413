"""GraphSAGE with max pooling, against loops over neighbours."""

import pytest
import torch

from dovetail.placers.learned.gdp import SageLayer, max_pool


def some_edges(groups, count, seed):
    """Each pair once; nothing goes into the last group."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randperm(groups * (groups - 1), generator=generator)[:count]
    return pairs % groups, pairs // groups


def slowly_pooled(x, sources, owners):
    pooled = torch.zeros_like(x)
    for group in range(len(x)):
        neighbours = [
            s for s, o in zip(sources.tolist(), owners.tolist(), strict=True) if o == group
        ]
        if neighbours:
            pooled[group] = x[neighbours].max(dim=0).values
    return pooled


@pytest.mark.parametrize("seed", range(3))
def test_the_pooled_maximum_and_its_gradient_are_those_of_a_loop(seed):
    sources, owners = some_edges(9, 25, seed)
    x = torch.rand(9, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x.requires_grad_()
    weights = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    pooled = max_pool(x, sources, owners)
    expected = slowly_pooled(x, sources, owners)
    assert torch.equal(pooled, expected)
    assert not pooled[-1].any()
    (found,) = torch.autograd.grad((pooled * weights).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(found, wanted)


def test_of_a_neighbour_that_is_there_twice_the_gradient_counts_once():
    x = torch.tensor([[0.5], [0.25]], requires_grad=True)
    max_pool(x, torch.tensor([0, 0, 1]), torch.tensor([1, 1, 1])).sum().backward()
    assert x.grad.tolist() == [[1.0], [0.0]]


def test_a_layer_is_its_formula_with_producers_and_consumers_apart():
    torch.manual_seed(0)
    layer, h = SageLayer(4), torch.randn(6, 4)
    sources, destinations = some_edges(6, 10, 1)
    gates = torch.sigmoid(h @ layer.pool.weight.T + layer.pool.bias)
    before = slowly_pooled(gates[:, :4], sources, destinations)
    after = slowly_pooled(gates[:, 4:], destinations, sources)
    mixed = torch.relu(layer.mix(torch.cat([h, before, after], dim=1)))
    torch.testing.assert_close(layer(h, sources, destinations), layer.norm(h + mixed))


def test_the_order_of_edges_changes_nothing():
    torch.manual_seed(0)
    layer, h = SageLayer(4), torch.randn(6, 4)
    sources, destinations = some_edges(6, 10, 2)
    mixed = torch.randperm(10)
    straight = layer(h, sources, destinations)
    assert torch.equal(straight, layer(h, sources[mixed], destinations[mixed]))


def test_a_graph_without_edges_is_looked_at_group_by_group():
    torch.manual_seed(0)
    layer, h = SageLayer(4), torch.randn(3, 4)
    none = torch.zeros(0, dtype=torch.int64)
    together = layer(h, none, none)
    torch.testing.assert_close(together[1:2], layer(h[1:2], none, none))


def test_equal_maxima_share_the_gradient():
    x = torch.tensor([[2.0], [2.0], [1.0], [0.0]], requires_grad=True)
    pooled = max_pool(x, torch.tensor([0, 1, 2]), torch.tensor([3, 3, 3]))
    pooled.sum().backward()
    assert x.grad[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0]
