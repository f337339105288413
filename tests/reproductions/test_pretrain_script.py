"""benchmarks/learned/pretrain.py: imitation and the recipe of the shipped policy, in small."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.errors import RunMismatchError
from dovetail.placers.learned.features import cut_placements, look
from dovetail.placers.learned.files import load_policy, read_card, shipped
from dovetail.placers.learned.gdp import Gdp
from tests.support.benchmark_scripts import benchmark_scripts
from tests.support.learned_problems import random_problem, random_task

with benchmark_scripts("learned", "pretrain") as scripts:
    script = scripts.pretrain
HELD_OUT, Example, ExampleSpec = script.HELD_OUT, script.Example, script.ExampleSpec
clone, good_placement, likeness_of = script.clone, script.good_placement, script.likeness_of
imitation_loss, pretrain = script.imitation_loss, script.pretrain
SMALL = {"hidden": 16, "sage_layers": 1, "layers": 1, "heads": 2, "segment": 32}
RECIPE = script.Recipe(
    wanted=ExampleSpec(random=3, networks=(), size=0.2),
    options=SMALL,
    evaluations=60,
    passes=2,
    trials=64,
    validation=2,
)


def example_of(problem, target):
    return Example(look(problem), np.array(target, np.int32), likeness_of(problem))


def test_what_like_devices_are_called_does_not_matter_to_imitation():
    task = random_task(4, groups=6, devices=3)
    seconds = np.repeat(task.costs.compute_seconds[:, :1], 3, axis=1)
    like = replace(task, costs=replace(task.costs, compute_seconds=seconds))
    policy = Gdp.for_view(look(like.problem()), seed=1, **SMALL)
    losses = [
        imitation_loss(policy, example_of(like.problem(), target)).item()
        for target in ([0, 1, 2, 2, 1, 0], [2, 0, 1, 1, 0, 2], [0, 1, 2, 2, 1, 1])
    ]
    assert losses[0] == pytest.approx(losses[1]) and losses[0] != pytest.approx(losses[2])


def test_a_policy_learns_to_take_the_targets():
    problem = random_problem(1, devices=2)
    example = example_of(problem, [0, 1, 1, 0, 1, 0, 0, 1])
    example = replace(example, likeness=np.arange(2))
    policy = Gdp.for_view(example.view, seed=0, **SMALL)
    losses = clone(policy, [example], passes=60, rate=2e-2)
    assert losses[-1] < 0.05 < losses[0]
    assert np.array_equal(policy.likeliest(example.view), example.target)


def test_targets_are_no_worse_than_every_cut_and_stay_within_their_budget():
    for seed in range(3):
        problem = random_problem(seed, devices=3)
        view = look(problem)
        score, placement = good_placement(problem, view, 200)
        found = problem.evaluate(problem.spread(cut_placements(view)))
        fits = np.where(found.feasible, found.values, np.inf)
        assert score.value <= fits.min() and score.lacking_bytes == 0
        assert problem.evaluate(problem.spread(placement[None])).values[0] == score.value


def test_the_recipe_repeats_itself_resumes_and_says_what_it_did(tmp_path):
    stages = []
    out, folder = tmp_path / "a.safetensors", tmp_path / "run"
    card = pretrain(out, folder=folder, recipe=RECIPE, progress=lambda p: stages.append(p.stage))
    assert set(stages) == {"target", "imitation", "validation", "ppo"}
    assert card["trials"] == 64 and len(card["trained_on"]) == 3
    assert json.loads(card["recipe"])["passes"] == 2
    assert set(json.loads(card["validation"])) == {"imitation", "ppo"}
    policy, kept = load_policy(out, "gdp")
    assert kept["held_out"] == list(HELD_OUT) and isinstance(policy, Gdp)
    again = tmp_path / "b.safetensors"
    pretrain(again, folder=folder, recipe=RECIPE)  # all of it is there already
    afresh = tmp_path / "c.safetensors"
    pretrain(afresh, folder=tmp_path / "other", recipe=RECIPE)
    for path in (again, afresh):
        repeated = load_policy(path, "gdp")[0].state_dict()
        for name, tensor in policy.state_dict().items():
            assert torch.equal(tensor, repeated[name]), (path, name)
    with pytest.raises(RunMismatchError) as raised:
        pretrain(again, folder=folder, recipe=replace(RECIPE, passes=3))
    assert (raised.value.field, raised.value.expected, raised.value.found) == ("passes", 3, 2)


def test_the_command_writes_the_policy_and_goes_on_in_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "Recipe", lambda: RECIPE)
    out, folder = tmp_path / "p.safetensors", tmp_path / "run"
    command = ["pretrain.py", "--out", str(out), "--folder", str(folder), "--networks", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--graphs", "1", "--trials", "16"])
    script.main()
    first = capsys.readouterr().out
    assert "1 tasks, 16 trials of PPO" in first and "after ppo, on unseen graphs" in first
    before = load_policy(out, "gdp")[0].state_dict()
    script.main()
    assert capsys.readouterr().out == first
    after = load_policy(out, "gdp")[0].state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_nothing_of_the_held_out_families_is_in_the_training_set(tmp_path):
    models = [model for model, _ in script.NETWORKS]
    assert models and not [m for m in models for family in HELD_OUT if family in m.lower()]
    tasks = script.training_set(tmp_path, ExampleSpec(random=16, networks=()), 0, print)
    names = [task.name for task in tasks]
    assert len(set(names)) == 16 and all(name.startswith("random ") for name in names)
    modules = {module for task in tasks for module in task.graph.modules}
    assert not [m for m in modules for family in HELD_OUT if family in m.lower()]


def test_the_shipped_policy_says_what_it_was_trained_on_and_saw_no_held_out_family():
    card = read_card(shipped())
    assert card["method"] == "gdp" and card["trials"] > 0 and card["held_out"] == list(HELD_OUT)
    trained_on = card["trained_on"]
    assert len(trained_on) > 50
    assert not [name for name in trained_on for family in HELD_OUT if family in name.lower()]
    assert shipped().stat().st_size < 10 * 2**20
    view = look(random_problem(0))
    assert load_policy(shipped(), "gdp")[0].likeliest(view).shape == (8,)
