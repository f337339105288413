"""benchmarks/learned/experiments.py on networks of a few dozen ops."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from dovetail.placers.learned import placing
from dovetail.placers.learned.catalog import make_policy
from dovetail.placers.learned.features import look
from dovetail.placers.learned.files import load_policy
from dovetail.placers.learned.losses import Baseline
from reproductions.learned import Tally
from reproductions.records import BestSoFar, LearnedRun, MethodResult
from tests.support.benchmark_scripts import benchmark_scripts
from tests.support.learned_problems import random_task

TINY = "zoo:rnnlm?layers=1&hidden=16&batch=3&vocabulary=50&steps={}"
ROWS = ("tiny-a", "tiny-b")  # on 2 GPUs
WIDER = "tiny-c"  # on 4


@pytest.fixture(scope="module")
def scripts():
    """The benchmark's modules, with three small networks among the graphs."""
    with benchmark_scripts("learned", "runs", "experiments") as modules:
        like = modules.runs.CASES["rnnlm-2-2gpu"]
        for row, steps, gpus in (("tiny-a", 2, 2), ("tiny-b", 3, 2), (WIDER, 2, 4)):
            modules.runs.CASES[row] = replace(
                like, key=row, title=row, model=TINY.format(steps), machine=f"gdp/{gpus}",
                gpus=gpus, published=None,
            )  # fmt: skip
            modules.experiments.SIX[row] = modules.experiments.TABLE2[row] = 0.0
        yield modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture
def effort(scripts, folder):
    """Makes an effort of so many placements, 8 of HDP's. All share their folder."""

    def make(trials, seeds=1, **options):
        return scripts.runs.Effort(trials, 8, seeds, folder / "gdp", folder, **options)

    return make


def run_of(trials, *bests):
    found = MethodResult(bests[-1][1] if bests else None)
    curve = tuple(BestSoFar(trial, trial, seconds) for trial, seconds in bests)
    return LearnedRun("gdp", 0, found, 1, "", trials, trials, 1, 0.0, curve)


def test_the_reference_of_hdp_is_its_open_version(scripts):
    """tensorflow/python/grappler/hierarchical_controller.py, hierarchical_controller_hparams."""
    view = look(random_task(1, groups=3).problem())
    policy, settings = scripts.runs._fresh("hdp", view, 0, {"reference": True})
    assert (policy.placer.decoder.hidden_size, policy.placer.encoder.hidden_size) == (512, 256)
    assert policy.grouper[0].out_features == 64
    assert (settings.rate, settings.decay, settings.decay_from) == (0.1, 0.95, 400)
    assert (settings.gradient_norm, settings.valid_only_from) == (1.0, 1000)
    assert Baseline.of(settings).value == pytest.approx(100**0.5)


def test_fine_tuning_and_training_afresh_get_the_same_placements_with_proposals_counted(
    scripts, effort, monkeypatch
):
    monkeypatch.setattr(placing, "MOST_PROPOSED", 32)
    for trials in (16, 76):  # fewer, and more, than a policy proposes
        asked = effort(trials)
        alone = scripts.runs.one(asked, "tiny-a", 0)
        tuned = scripts.runs.tuned(asked, ["tiny-b"], "tiny-a", 0)
        assert alone.trials == tuned.run.trials == trials
        assert tuned.run.found.seconds <= tuned.zero_shot <= tuned.likeliest
    assert tuned.run.updates == 1  # of the 44 placements that 32 proposals leave


def test_a_tuning_that_never_gets_there_counts_with_all_placements(scripts):
    less = scripts.experiments._less_search
    alone = run_of(1000, (10, 3.0), (500, 2.0))
    assert str(less(alone, run_of(1000, (1, 2.5), (50, 2.0)), 1000)) == "0.10 x"
    assert str(less(alone, run_of(400, (1, 2.5)), 1000)) == "> 2.00 x"
    assert str(less(run_of(1000), run_of(1000, (5, 9.0)), 1000)) == "0.01 x"


def test_a_table_says_what_each_training_had(scripts, effort):
    text = "\n".join(scripts.experiments.figure2(effort(48), ROWS))
    assert "GDP-one has 48 placements a graph, and so has fine-tuning" in text
    assert text.count("| tiny-") == 2


def test_an_ablation_is_of_policies_without_a_table_of_one_graph(scripts, effort, folder):
    before = {path.name for path in folder.rglob("*.safetensors")}
    asked = effort(16, seeds=2)
    text = "\n".join(scripts.experiments.ablation(asked, ROWS))
    alone = "\n".join(scripts.experiments.ablation_one(asked, ROWS[:1]))
    files = [path for path in folder.rglob("*.safetensors") if path.name not in before]
    configs = [load_policy(path)[0].config for path in files]
    assert len(configs) == 2 * 2 * 4  # a batch and a graph, two seeds, whole and without three
    assert all(config["individual"] is None for config in configs)
    for option in ("attention", "superposition", "advice"):
        assert sum(not config[option] for config in configs) == 4
        assert f"{option} is worth" in text
    assert text.count("| tiny-") == 4  # best and likeliest
    assert alone.count("| tiny-") == 2
    assert list(scripts.experiments.ablation(asked, ROWS[:1]))[-1].startswith("No batch")


def test_what_does_not_fit_is_left_out_of_a_mean_and_counted(scripts):
    mean = scripts.experiments._means
    assert "+20.0 % in the geometric mean of 1 graphs (by seed: +10.0, +20.0, +40.0)" in mean(
        [[1.1, 1.2, 1.4]]
    )
    assert "+44.0 % in the geometric mean of 2 graphs (by seed: +44.0, without 1 pairs" in mean(
        [[1.44], [None]]
    )
    assert "no figure" in mean([[None]])
    assert scripts.experiments._cell([2.0, None, 1.0]) == "2.000 (1.000 to OOM)"


def test_a_policy_of_more_devices_places_on_those_of_the_machine_alone(scripts, effort):
    runs = scripts.runs
    task, _ = runs.task_for(effort(16).table, "tiny-a", "gdp-paper")
    (own, _), (wide, tally) = runs._seat(task, None), runs._seat(task, 9)
    assert (own.view.device_count, wide.view.device_count) == (3, 9)
    policy = make_policy("gdp-paper", wide.view, 0)
    drawn = policy.draw(wide.view, 64, torch.Generator().manual_seed(0))
    assert set(np.unique(drawn.placements)) == {0, 1, 8}  # two GPUs first, the CPU last
    assert torch.isfinite(drawn.log_probs).all()
    assert torch.isfinite(policy.judge(wide.view, drawn.actions).entropies).all()
    assert policy.likeliest(wide.view).max() <= 8
    judged = tally(drawn.placements)
    narrow = np.where(drawn.placements == 8, 2, drawn.placements).astype(np.int32)
    plain = Tally(task.problem(threads=1), lambda _trials, _seconds: None)(narrow)
    assert (judged.seconds == plain.seconds).all()
    with pytest.raises(ValueError, match="3 devices do not fit into 2"):
        runs.widened(own.view, np.arange(3), 2)


def test_batches_and_held_out_graphs_by_gdp_as_published_may_differ_in_devices(scripts, effort):
    asked = effort(32, method="gdp-paper")
    trained = scripts.runs.batch(asked, ("tiny-a", WIDER), 0)
    assert [each.run.method for each in trained.values()] == ["gdp-paper"] * 2
    assert [each.run.trials for each in trained.values()] == [32, 32]
    tuned = scripts.runs.tuned(asked, ["tiny-a", WIDER], "tiny-b", 0)
    assert tuned.run.trials == 32
    assert tuned.zero_shot == tuned.likeliest >= tuned.run.found.seconds
    text = "\n".join(scripts.experiments.ablation(asked, ROWS))
    assert "superposition is worth" in text
    assert "advice is worth" not in text


def test_hdp_trains_until_it_finds_nothing_better_and_says_how_long(scripts, effort):
    def ended(seed=0, **limits):
        asked = effort(16, **limits)
        return scripts.runs.converged(asked, "tiny-a", seed, "hdp", reference=True)

    short = ended(patience=12, limit=400)
    assert short.ended == "no better"
    since = short.run.trials - short.run.bests[-1].trial
    assert 12 <= since < 16  # an update draws 4
    assert all(b.trial - a.trial < 16 for a, b in pairwise(short.run.bests))
    cut = ended(patience=400, limit=8)
    assert (cut.ended, cut.run.trials) == ("limit", 8)


def test_the_table_of_hdp_has_the_placements_that_each_seed_used(scripts, effort, monkeypatch):
    monkeypatch.setitem(scripts.runs.GDP, "tiny-a", scripts.runs.CASES["tiny-a"])
    monkeypatch.setattr(scripts.experiments, "HDP_RATES", {"its rates": {"reference": True}})
    asked = effort(16, seeds=2, patience=8, limit=8)
    text = "\n".join(scripts.experiments.hdp(asked, ["tiny-a"]))
    used = [scripts.runs.converged(asked, "tiny-a", seed, "hdp", reference=True) for seed in (0, 1)]
    assert f"| {', '.join(str(each.run.trials) for each in used)} |" in text
    assert "Its rates: slower than human by" in text
