"""benchmarks/learned/experiments.py on networks of a few dozen ops."""

from dataclasses import replace

import pytest

from dovetail.bench.records import BestSoFar, LearnedRun, MethodResult
from tests.support.benchmark_scripts import benchmark_scripts

TINY = "zoo:rnnlm?layers=1&hidden=16&batch=3&vocabulary=50&steps={}"
ROWS = ("tiny-a", "tiny-b")


@pytest.fixture(scope="module")
def scripts():
    """The benchmark's modules, with two small networks on 2 GPUs among the graphs."""
    with benchmark_scripts("learned", "runs", "experiments") as modules:
        like = modules.runs.CASES["rnnlm-2-2gpu"]
        for row, steps in zip(ROWS, (2, 3), strict=True):
            modules.runs.CASES[row] = replace(
                like, key=row, title=row, model=TINY.format(steps), published=None
            )
            modules.experiments.SIX[row] = 0.0
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


def test_fine_tuning_and_training_afresh_get_the_same_placements_with_proposals_counted(
    scripts, effort
):
    for trials in (48, 300):  # fewer, and more, than a policy proposes
        asked = effort(trials)
        alone = scripts.runs.one(asked, "tiny-a", 0)
        tuned = scripts.runs.tuned(asked, ["tiny-b"], "tiny-a", 0)
        assert alone.trials == tuned.run.trials == trials
        assert tuned.run.found.seconds <= tuned.zero_shot <= tuned.likeliest
    assert tuned.run.updates == 1  # of the 44 placements that 256 proposals leave


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
