"""GDP's policy: one for all graphs and machines, exact about what it draws."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.placers.learned.features import (
    ADVICE_NUMBERS,
    NUMBER_NAMES,
    POSITIONS,
    cut_placements,
    look,
)
from dovetail.placers.learned.gdp import ADVISED, MODES, Gdp, chances, draw_clusters
from tests.support.learned_problems import random_problem

SMALL = {"hidden": 16, "heads": 2, "segment": 4}


def view_of(seed=1, groups=6, devices=2):
    return look(random_problem(seed, groups, devices))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def every_action(view, clusters):
    """All that can be decided: [decisions of clusters, groups], devices at each cluster's first."""
    first = np.unique(clusters)
    rows = []
    for choice in itertools.product(range(view.device_count), repeat=len(first)):
        row = np.zeros(view.groups, np.int64)
        row[first] = choice
        rows.append(row)
    return torch.from_numpy(np.stack(rows))


def given(view, clusters):
    """What `judge` wants: every action, by every mode, [modes x actions, groups]."""
    devices = every_action(view, clusters)
    count = len(devices)
    return {
        "modes": torch.arange(MODES).repeat_interleave(count),
        "devices": devices.repeat(MODES, 1),
        "clusters": torch.from_numpy(clusters).repeat(MODES * count, 1),
    }


def uneven(policy):
    """The policy, its modes not equally likely."""
    with torch.no_grad():
        policy.modes.bias.copy_(torch.linspace(-0.1, 0.1, MODES))
    return policy


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 4], [0, 0, 2, 0, 2]])
def test_the_probabilities_of_all_placements_sum_to_one_given_the_clusters(labels):
    view = view_of(groups=5, devices=3)
    with torch.no_grad():
        judged = uneven(Gdp.for_view(view, **SMALL)).judge(view, given(view, np.array(labels)))
    assert float(judged.log_probs.sum(dim=1).exp().sum()) == pytest.approx(1, abs=1e-5)


def test_placements_are_drawn_as_often_as_their_probability_says():
    view = view_of(groups=3)
    policy = uneven(Gdp.for_view(view, **SMALL, share=0.0))
    draw = policy.draw(view, 20000, generator())
    index = draw.placements @ np.array([4, 2, 1])
    found = np.bincount(index, minlength=8) / len(index)
    with torch.no_grad():
        judged = policy.judge(view, given(view, np.arange(3)))
    chance = judged.log_probs.sum(dim=1).exp().view(MODES, 8).sum(dim=0).numpy()
    np.testing.assert_allclose(found, chance, atol=0.015)


def test_what_is_judged_at_once_is_what_was_drawn():
    view = view_of(groups=9, devices=3)
    policy = Gdp.for_view(view, **SMALL)
    draw = policy.draw(view, 12, generator())
    judged = policy.judge(view, draw.actions)
    torch.testing.assert_close(judged.log_probs.detach(), draw.log_probs)
    assert judged.entropies.shape == (12, 1 + 9)
    assert (judged.entropies > 0).all()


def test_groups_of_a_cluster_have_its_device_and_one_decision():
    view = view_of(groups=12, devices=3)
    policy = Gdp.for_view(view, **SMALL, share=1.0)
    draw = policy.draw(view, 16, generator())
    clusters = draw.actions["clusters"].numpy()
    assert (clusters != np.arange(12)).any()
    taken = np.take_along_axis(draw.placements, clusters, axis=1)
    assert (draw.placements == taken).all()
    assert not draw.log_probs[:, 1:].numpy()[clusters != np.arange(12)].any()


def test_a_cluster_decides_by_the_mean_of_its_logits_and_the_floor():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 5.0]])
    clusters = torch.tensor([[0, 0, 2]])
    made = clusters == torch.arange(3)
    found = chances(logits[None], clusters, made, floor=0.5)
    mean = torch.softmax(torch.tensor([1.0, 0.5]), dim=0)
    torch.testing.assert_close(found[0, 0], 0.75 * mean + 0.125)
    torch.testing.assert_close(found[0, 2], 0.75 * torch.softmax(logits[2], dim=0) + 0.125)


def test_clusters_are_neighbours_of_one_mind_and_the_rest_of_the_batch_has_none():
    view = view_of(groups=30, devices=2)
    likeliest = np.stack([np.arange(30) // (10 + trial % 3) for trial in range(40)])
    clusters = draw_clusters(view, likeliest, share=0.5, seed=3)
    assert (clusters[20:] == np.arange(30)).all()
    assert (np.take_along_axis(likeliest, clusters, axis=1) == likeliest).all()
    sizes = {int(np.bincount(row).max()) for row in clusters[:20]}
    assert len(sizes) > 3
    assert max(sizes) > 1


def test_what_is_not_allowed_is_never_drawn_and_never_likeliest():
    view = view_of(groups=8, devices=3)
    allowed = view.allowed.copy()
    allowed[2], allowed[5, 1] = [False, True, False], False
    free = allowed.sum(axis=1) > 1
    settled = np.where(free, view.settled, 1).astype(np.int32)
    view = replace(view, allowed=allowed, free=free, settled=settled)
    policy = Gdp.for_view(view, **SMALL, floor=4.0)
    draw = policy.draw(view, 200, generator())
    assert (draw.placements[:, 2] == 1).all()
    assert (draw.placements[:, 5] != 1).all()
    assert policy.likeliest(view)[2] == 1
    assert not draw.log_probs[:, 1 + 2].any()
    judged = policy.judge(view, draw.actions)
    assert torch.isfinite(judged.log_probs).all()
    assert not judged.entropies[:, 1 + 2].any()
    judged.log_probs.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


def test_groups_without_a_choice_stay_settled():
    view = view_of(groups=6, devices=2)
    free = view.free.copy()
    free[3] = False
    view = replace(view, free=free)
    policy = Gdp.for_view(view, **SMALL)
    draw = policy.draw(view, 50, generator())
    assert (draw.placements[:, 3] == view.settled[3]).all()
    assert not draw.log_probs[:, 1 + 3].any()
    assert (policy.candidates(view)[:, 3] == view.settled[3]).all()
    assert policy.likeliest(view)[3] == view.settled[3]


def test_one_policy_serves_two_and_eight_devices_and_graphs_of_unlike_sizes():
    policy = Gdp.for_view(view_of(), **SMALL)
    for groups, devices in ((3, 2), (11, 8), (40, 3)):
        view = view_of(groups=groups, devices=devices)
        draw = policy.draw(view, 4, generator())
        assert draw.placements.shape == (4, groups)
        assert draw.placements.max() < devices
        assert policy.likeliest(view).shape == (groups,)


def test_the_same_seeds_give_the_same_policy_and_the_same_draw():
    view = view_of()
    one, other = (Gdp.for_view(view, seed=5, **SMALL) for _ in range(2))
    first, second = one.draw(view, 8, generator(2)), other.draw(view, 8, generator(2))
    assert (first.placements == second.placements).all()
    assert torch.equal(first.log_probs, second.log_probs)
    third = one.draw(view, 8, generator(3))
    assert (first.placements != third.placements).any()
    unlike = Gdp.for_view(view, seed=6, **SMALL)
    assert not torch.equal(unlike.logits(view)[1], one.logits(view)[1])


def test_a_policy_is_rebuilt_from_its_config_and_state():
    view = view_of()
    policy = Gdp.for_view(view, **SMALL).alone(view)
    with torch.no_grad():
        policy.own.normal_()
    again = Gdp(**policy.config)
    again.load_state_dict(policy.state_dict())
    for found, expected in zip(again.logits(view), policy.logits(view), strict=True):
        assert torch.equal(found, expected)


def test_what_a_policy_learns_of_one_graph_alone_is_for_that_graph():
    view, other = view_of(), view_of(groups=7)
    policy = Gdp.for_view(view, **SMALL)
    alone = policy.alone(view)
    assert torch.equal(alone.logits(view)[1], policy.logits(view)[1])
    with torch.no_grad():
        alone.own[2, 1] += 1.0
    changed = (alone.logits(view)[1] - policy.logits(view)[1]).abs().amax(dim=0) > 1e-6
    assert changed.nonzero().tolist() == [[2, 1]]
    assert torch.equal(alone.alone(view).own, alone.own)
    for serves in (alone, alone.alone(other)):
        assert torch.equal(serves.logits(other)[1], policy.logits(other)[1])


def test_devices_that_are_alike_are_told_apart():
    problem = random_problem(1, 6, 3)
    view = look(problem)
    like = replace(view, seconds=np.zeros_like(view.seconds))
    _, logits = Gdp.for_view(view, **SMALL).logits(like)
    assert not torch.allclose(logits[:, :, 0], logits[:, :, 1])


def test_the_modes_of_an_untrained_policy_cut_the_graph_by_one_position_each():
    view = view_of(groups=60, devices=3)
    policy = Gdp.for_view(view, **SMALL)
    candidates = policy.candidates(view)
    assert candidates.shape == (MODES, 60) == (1 + len(POSITIONS), 60)
    cut = cut_placements(view)
    shares = [(placement == by).mean() for placement, by in zip(candidates[1:], cut, strict=True)]
    assert min(shares) > 0.7
    assert len(np.unique(candidates, axis=0)) > MODES // 2


def test_candidates_come_by_the_chance_of_their_mode():
    view = view_of(groups=30, devices=3)
    policy = Gdp.for_view(view, **SMALL)
    before = policy.candidates(view)
    candidates = uneven(policy).candidates(view)
    assert (candidates == before[::-1]).all()
    assert (policy.likeliest(view) == candidates[0]).all()


def test_an_untrained_policy_prefers_quick_devices_and_keeps_neighbours_together():
    view = view_of(groups=60, devices=2)
    slow = view.seconds.copy()
    slow[:, 1] += 1.5
    placement = Gdp.for_view(view, **SMALL).likeliest(replace(view, seconds=slow))
    assert (placement == 0).mean() > 0.9
    placement = Gdp.for_view(view, **SMALL).likeliest(view)
    same = placement[view.sources] == placement[view.destinations]
    assert same.mean() > 0.6


@pytest.mark.parametrize("off", ["attention", "superposition"])
def test_attention_and_superposition_can_be_switched_off(off):
    view = view_of()
    whole = Gdp.for_view(view, **SMALL)
    without = Gdp.for_view(view, **SMALL, **{off: False})
    sizes = [sum(p.numel() for p in policy.parameters()) for policy in (whole, without)]
    assert sizes[1] < sizes[0]
    assert without.draw(view, 2, generator()).placements.shape == (2, 6)
    assert (without.placer.conditioning is None) == (off == "superposition")


def test_without_advice_nothing_that_classical_planners_say_counts():
    view = view_of(groups=12, devices=3)
    numbers = view.numbers.copy()
    numbers[:, ADVICE_NUMBERS] = np.random.default_rng(0).random((12, len(ADVICE_NUMBERS)))
    other = replace(view, numbers=numbers)
    assert {NUMBER_NAMES[i] for i in ADVICE_NUMBERS} >= {"schedule", "expert"}
    for advice, same in ((True, False), (False, True)):
        policy = Gdp.for_view(view, **SMALL, advice=advice)
        assert torch.equal(policy.logits(view)[1], policy.logits(other)[1]) is same
        assert len(policy.candidates(view)) == (MODES if advice else MODES - 2)
    draw = policy.draw(view, 64, generator())
    assert not set(draw.actions["modes"].tolist()) & set(ADVISED)
    judged = policy.judge(view, draw.actions)
    assert torch.isfinite(judged.log_probs).all()
    assert torch.isfinite(judged.entropies).all()
    (judged.log_probs.sum() + judged.entropies.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


def test_the_actions_of_a_placement_lead_to_it():
    view = view_of()
    policy = Gdp.for_view(view, **SMALL)
    placement = policy.draw(view, 1, generator()).placements[0]
    actions = policy.actions_of(view, placement)
    assert (actions["devices"].numpy() == placement).all()
    with torch.no_grad():
        taken = float(policy.judge(view, actions).log_probs.sum())
        others = [
            float(policy.judge(view, actions | {"modes": torch.tensor([mode])}).log_probs.sum())
            for mode in range(MODES)
        ]
    assert np.isfinite(taken)
    assert taken == pytest.approx(max(others), abs=1e-4)  # its mode is the likeliest to draw it


def test_ten_mebibytes_hold_the_default_policy():
    policy = Gdp.for_view(view_of())
    assert sum(p.numel() * p.element_size() for p in policy.parameters()) < 2**20
