"""Segment recurrence against attention segment by segment; superposition."""

import pytest
import torch

from dovetail.placers.learned.gdp import GdpLayer, GdpTransformerXL, segments_of

CPU = torch.device("cpu")


def placer(seed=0, **options):
    torch.manual_seed(seed)
    options = {"layers": 2, "heads": 2, "segment": 4, **options}
    return GdpTransformerXL(8, **options)


def states(groups, seed=1):
    return torch.randn(groups, 8, generator=torch.Generator().manual_seed(seed))


def attended(layer, own, previous):
    """Plain attention of `own` [length, hidden] to [previous, own], head by head."""
    x, seen = layer.norm(own), layer.norm(torch.cat([previous, own]))
    keys, values = layer.key_value(seen).chunk(2, dim=1)
    queries, width, heads = layer.query(x), own.shape[1] // layer.heads, []
    for head in range(layer.heads):
        part = slice(head * width, (head + 1) * width)
        weights = torch.softmax(queries[:, part] @ keys[:, part].T * width**-0.5, dim=1)
        heads.append(weights @ values[:, part])
    h = own + layer.out(torch.cat(heads, dim=1))
    return h + layer.outer(torch.relu(layer.inner(layer.norm_inner(h))))


@pytest.mark.parametrize("groups", [3, 4, 5, 8, 11])
def test_segments_see_the_states_cached_of_the_one_before_at_every_layer(groups):
    model, x = placer(superposition=False), states(groups)
    parts = list(x.split(4))
    for layer in model.layers:
        befores = [x[:0], *parts[:-1]]
        parts = [attended(layer, own, old) for own, old in zip(parts, befores, strict=True)]
    found, condition = model(x)
    assert condition is None
    torch.testing.assert_close(found, model.norm(torch.cat(parts)))


def test_no_gradient_goes_into_the_cache_but_into_one_s_own_segment():
    model, x = placer(layers=1, superposition=False), states(8).requires_grad_()
    found, _ = model(x)
    found[4:].sum().backward()
    assert not x.grad[:4].any()
    assert x.grad[4:].any(dim=1).all()


def test_what_the_cache_holds_is_seen_all_the_same():
    model, x = placer(layers=1), states(8)
    other = x.clone()
    other[0, 0] += 1.0
    assert not torch.allclose(model(x)[0][4:], model(other)[0][4:])


def test_two_layers_see_two_segments_back_and_no_further():
    model, x = placer(layers=2, superposition=False), states(16)
    other = x.clone()
    other[:4, 0] += 1.0
    same = torch.isclose(model(x)[0], model(other)[0]).all(dim=1)
    assert not same[:12].any()
    assert same[12:].all()


def test_padding_of_the_last_segment_changes_nothing():
    model, x = placer(segment=64), states(5)
    alone = model(x)[0]
    model.segment = 5
    torch.testing.assert_close(model(x)[0], alone)
    segments = segments_of(9, 4, CPU)
    assert (segments.count, segments.cut(states(9)).shape[1]) == (3, 4)
    assert torch.equal(segments.join(segments.cut(states(9))), states(9))
    assert segments.keys[2, 0, 0].tolist() == [True] * 5 + [False] * 3


def test_without_positions_a_segment_s_groups_may_change_places():
    model, x = placer(), states(4)
    mixed = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(x[mixed])[0], model(x)[0][mixed])


def test_superposition_multiplies_what_every_dense_layer_sees():
    torch.manual_seed(0)
    layer, h, condition = GdpLayer(8, 2), states(4)[None], states(4, 2)[None]
    seen = []
    for dense in (layer.query, layer.key_value, layer.out, layer.inner, layer.outer):
        dense.register_forward_hook(lambda _m, given, _out: seen.append(given[0].clone()))
    layer(h, segments_of(4, 4, CPU), condition)
    normed = layer.norm(h) * condition
    assert torch.equal(seen[1], normed) or torch.equal(seen[0], normed)
    assert len(seen) == 5
    inner = torch.relu(layer.inner(seen[3])) * condition.repeat(1, 1, 2)
    torch.testing.assert_close(seen[4], inner)


def test_a_condition_of_one_is_no_superposition():
    torch.manual_seed(0)
    layer, h, segments = GdpLayer(8, 2), states(9), segments_of(9, 4, CPU)
    cut = segments.cut(h)
    torch.testing.assert_close(layer(cut, segments), layer(cut, segments, torch.ones(3, 4, 8)))


def test_an_untrained_condition_is_about_one_and_depends_on_the_graph():
    _, condition = placer()(states(6))
    _, other = placer()(states(6, 3))
    assert (condition - 1).abs().max() < 0.75
    assert not torch.allclose(condition, other)


def test_without_attention_each_group_is_alone():
    model, x = placer(attention=False), states(8)
    torch.testing.assert_close(model(x)[0][3:4], model(x[3:4])[0])
    assert not any("query" in name for name, _ in model.named_parameters())
