"""HDP's policy: what it draws, what it may not, and its parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.errors import PolicyMismatchError
from dovetail.placers.learned.features import look
from dovetail.placers.learned.hdp import Hdp
from dovetail.placers.learned.seq2seq import AttentionalLstm, _attend
from tests.support.learned_problems import random_problem, random_task

SMALL = {"hidden": 8, "grouper_hidden": 6}


def view_of(seed=1, groups=8, devices=3):
    return look(random_problem(seed, groups=groups, devices=devices))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def some_settled(view):
    """Groups 0 and 3 have no choice, group 1 may not be on device 2."""
    allowed, free, settled = view.allowed.copy(), view.free.copy(), view.settled.copy()
    for group, device in ((0, 1), (3, 2)):
        allowed[group] = np.arange(allowed.shape[1]) == device
        free[group], settled[group] = False, device
    allowed[1, 2] = False
    return replace(view, allowed=allowed, free=free, settled=settled)


@pytest.mark.parametrize("options", [{}, {"noise": 0.5}, {"greedy_from": 0}, {"bound": 0.0}])
def test_what_was_drawn_is_judged_as_likely_as_it_was(options):
    view = some_settled(view_of())
    policy = Hdp.for_view(view, seed=2, **SMALL, **options)
    draw = policy.draw(view, 9, generator())
    judged = policy.judge(view, draw.actions)
    assert torch.allclose(judged.log_probs, draw.log_probs, atol=1e-5)
    assert judged.entropies.shape == judged.log_probs.shape == (9, 6 + policy.groups)
    assert bool((judged.entropies >= 0).all())
    assert bool((draw.log_probs <= 0).all())


def test_the_same_generator_draws_the_same_and_another_one_does_not():
    view = view_of()
    policy = Hdp.for_view(view, **SMALL, noise=0.5)
    first, again, other = (policy.draw(view, 6, generator(seed)) for seed in (0, 0, 1))
    assert np.array_equal(first.placements, again.placements)
    assert torch.equal(first.log_probs, again.log_probs)
    assert not np.array_equal(first.placements, other.placements)


def test_placements_are_where_groups_may_be_and_settled_ones_stay():
    view = some_settled(view_of())
    policy = Hdp.for_view(view, **SMALL)
    placements = policy.draw(view, 200, generator()).placements
    assert placements.dtype == np.int32
    assert (placements[:, 0] == 1).all()
    assert (placements[:, 3] == 2).all()
    assert set(placements[:, 1]) == {0, 1}
    assert set(placements[:, 2]) == {0, 1, 2}
    assert view.allowed[np.arange(8), policy.likeliest(view)].all()


def test_ops_of_one_learned_group_share_its_device_where_they_may():
    view = some_settled(view_of())
    policy = Hdp.for_view(view, **SMALL)
    draw = policy.draw(view, 50, generator())
    ops = np.flatnonzero(view.free)
    for trial in range(50):
        there = draw.actions["devices"][trial][draw.actions["groups"][trial]].numpy()
        placed = draw.placements[trial, ops]
        fastest = np.where(view.allowed, view.seconds, np.inf)[ops].argmin(axis=1)
        assert (placed == np.where(view.allowed[ops, there], there, fastest)).all()


def test_a_group_without_ops_decides_nothing():
    view = view_of(groups=5)
    policy = Hdp.for_view(view, **SMALL, groups=12)
    draw = policy.draw(view, 30, generator())
    judged = policy.judge(view, draw.actions)
    for trial in range(30):
        empty = np.setdiff1d(np.arange(12), draw.actions["groups"][trial].numpy())
        assert len(empty) >= 7
        assert bool((draw.log_probs[trial, 5 + empty] == 0).all())
        assert bool((judged.entropies[trial, 5 + empty] == 0).all())
        assert bool((draw.actions["devices"][trial, empty] == 0).all())


def test_a_problem_without_any_choice_is_placed_as_it_must_be():
    view = view_of(groups=3)
    settled = np.array([1, 0, 2], dtype=np.int32)
    allowed = np.arange(3) == settled[:, None]
    view = replace(view, allowed=allowed, free=np.zeros(3, bool), settled=settled)
    policy = Hdp.for_view(view, **SMALL)
    draw = policy.draw(view, 2, generator())
    assert draw.placements.tolist() == [[1, 0, 2]] * 2
    assert bool((policy.judge(view, draw.actions).log_probs == 0).all())
    assert policy.likeliest(view).tolist() == [1, 0, 2]


def test_any_placement_has_actions_that_lead_to_it_if_there_are_groups_enough():
    view = some_settled(view_of())
    ops = np.flatnonzero(view.free)
    policy = Hdp.for_view(view, **SMALL, groups=5)
    for placement in policy.draw(view, 60, generator()).placements:
        actions = policy.actions_of(view, placement)
        there = actions["devices"][0][actions["groups"][0]].numpy()
        assert (there == placement[ops]).all()
        log_probs = policy.judge(view, actions).log_probs
        assert bool((log_probs > -20).all())
        empty = np.setdiff1d(np.arange(5), actions["groups"].numpy())
        assert bool((log_probs[0, 6 + empty] == 0).all())
    few = Hdp.for_view(view, **SMALL, groups=1)
    assert few.actions_of(view, placement) is None


def test_groups_follow_the_references_rule_but_are_no_more_than_the_ops():
    assert Hdp.for_view(view_of(groups=8), **SMALL).groups == 8
    assert Hdp.for_view(view_of(groups=70, devices=2), **SMALL).groups == 40
    view = view_of(groups=4, devices=2)
    assert Hdp.for_view(view, **SMALL).placer.devices == 2


def test_the_embedding_of_a_group_sums_up_its_ops_and_its_edges():
    view = view_of(groups=4, devices=2)
    policy = Hdp.for_view(view, **SMALL)
    seen = policy._see(view)
    grouped = torch.tensor([[0, 0, 2, 2], [3, 1, 1, 1]])
    embeddings, allowed = policy._embed(seen, grouped)
    nodes, kinds = 4 + 2, seen.kinds.shape[1]
    counts = torch.zeros(2, 4, 4)
    for trial in range(2):
        for a, b in zip(view.sources, view.destinations, strict=True):
            counts[trial, grouped[trial, a], grouped[trial, b]] += 1
    both = torch.zeros(2, 4, 2 * nodes)
    both[:, :, :4], both[:, :, nodes : nodes + 4] = counts, counts.transpose(1, 2)
    both /= 1 + both.amax(dim=2, keepdim=True)
    assert torch.allclose(embeddings[:, :, : 2 * nodes], both)
    assert embeddings[0, :, 2 * nodes].tolist() == [0.5, 0, 0.5, 0]
    of_kinds = embeddings[0, 2, 2 * nodes + 1 : 2 * nodes + 1 + kinds]
    total = seen.kinds[2] + seen.kinds[3]
    assert torch.allclose(of_kinds, total / (1 + total.max()))
    assert torch.allclose(embeddings[1, 3, 2 * nodes + 1 + kinds :], seen.features[0, :-12])
    assert allowed[0].tolist() == [[True, True], [True, False]] * 2


def test_noise_lasts_until_its_update_and_sampling_until_its_own():
    view = view_of(groups=3)
    policy = Hdp.for_view(view, **SMALL, noise=0.5, noise_until=3, greedy_from=5)
    phases = ((0, True, False), (3, True, False), (4, False, False), (5, False, True))
    for update, noisy, greedy in phases:
        policy.begin(update)
        actions = policy.draw(view, 100, generator()).actions
        assert bool((actions["noise"] >= 0).all()) == noisy
        pairs = torch.cat([actions["groups"], actions["devices"]], dim=1)
        one_way_a_grouping = len(pairs.unique(dim=0)) == len(actions["groups"].unique(dim=0))
        assert one_way_a_grouping == greedy


def test_noise_of_half_the_logits_size_is_added_to_both_networks():
    view = view_of()
    policy = Hdp.for_view(view, seed=3, **SMALL, noise=0.5)
    seen, seeds = policy._see(view), torch.arange(400)
    noise = policy._noise(seen, seeds)
    with torch.no_grad():
        plain = policy._grouping(seen, None)
        loud = policy._grouping(seen, noise)
    size = float(plain.square().mean().sqrt())
    assert float((loud - plain).std()) == pytest.approx(0.5 * size, rel=0.02)
    assert float(noise[1].std()) == pytest.approx(0.5, rel=0.05)


def test_a_bound_keeps_probabilities_from_becoming_certain():
    view = view_of(devices=2)
    policy = Hdp.for_view(view, **SMALL, bound=1.0, temperature=0.001)
    draw = policy.draw(view, 50, generator())
    least = np.log(1 / (1 + np.exp(2)))  # the lesser of logits 1 and -1
    assert float(draw.log_probs[:, 8:].min()) >= least - 1e-5
    assert float(draw.log_probs[:, 8:].min()) == pytest.approx(least, abs=1e-3)


def test_attention_in_pieces_is_attention_and_has_its_gradient(monkeypatch):
    monkeypatch.setattr("dovetail.placers.learned.seq2seq.PIECE", 2 * 4 * 5 * 2)
    tensors = [
        torch.randn(*shape, dtype=torch.float64, generator=generator(), requires_grad=True)
        for shape in ((2, 7, 5), (2, 4, 5), (5, 1))
    ]
    queries, memory, score = tensors
    plain = (queries[:, :, None] + memory[:, None]).tanh() @ score
    expected = torch.bmm(plain[..., 0].softmax(dim=2), memory)
    assert torch.allclose(_attend(queries, memory, score), expected)
    assert torch.autograd.gradcheck(_attend, tensors)


def test_forget_gates_begin_open():
    placer = AttentionalLstm(4, 2, hidden=6, bound=1.0, temperature=1.0)
    for lstm in (placer.encoder, placer.decoder):
        for name, bias in lstm.named_parameters():
            if "bias" in name:
                size = lstm.hidden_size
                wanted = torch.zeros(4 * size)
                wanted[size : 2 * size] = float("bias_ih" in name)
                assert torch.equal(bias, wanted)


def test_a_policy_for_other_devices_is_refused():
    policy = Hdp.for_view(view_of(devices=2), **SMALL)
    with pytest.raises(PolicyMismatchError, match="2 devices, not 3"):
        policy.draw(view_of(devices=3), 1, generator())


def test_kinds_that_a_policy_does_not_know_have_no_vector():
    view = look(random_task(2, 6, 2).problem())
    known = np.unique(view.kind_buckets)[1:].tolist()
    policy = Hdp(kinds=known, devices=2, groups=4, **SMALL)
    assert policy._see(view).kinds.shape == (6, len(known))
    assert policy.draw(view, 3, generator()).placements.shape == (3, 6)
