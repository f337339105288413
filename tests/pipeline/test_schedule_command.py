"""`dovetail schedule`, in process: what it prints and writes, and what it says of wrong input."""

import json
from dataclasses import replace

import pytest

from dovetail.frontends import resolve
from dovetail.graph.kernels import fuse
from dovetail.methods import SCHEDULERS
from dovetail.pipeline import schedules
from dovetail.pipeline.opening import verify
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.scheduling import with_batch
from dovetail.pipeline.searching import search_plan
from dovetail.pipeline.staging import plan_of_stages

TINY = "zoo:squeezenet_1_1?size=64&batch=1"


def test_the_help_and_the_error_for_an_unknown_name_list_every_scheduler(dovetail):
    status, out, _ = dovetail("schedule", "--help")
    assert status == 0
    assert all(f"{name}:" in out for name in SCHEDULERS)
    status, _, err = dovetail("schedule", TINY, "--scheduler", "magic")
    assert status == 2
    assert all(name in err for name in SCHEDULERS)


def test_json_has_its_stable_keys_and_the_page_is_written(dovetail, tmp_path):
    page = tmp_path / "page.html"
    status, out, err = dovetail(
        "schedule", TINY, "--scheduler", "greedy", "--rounds", "2", "--json", "--report", page
    )
    assert status == 0, err
    printed = json.loads(out)
    assert {"model", "device", "results"} <= set(printed)
    (result,) = printed["results"]
    assert {"batch", "chosen", "seconds", "stages", "measured_stages", "search_seconds"} <= set(
        result
    )
    assert {"sequential", "greedy"} <= set(result["seconds"])
    kernels = [k for stage in result["stages"] for group in stage for k in group]
    if result["chosen"] in ("sequential", "greedy"):
        assert sorted(kernels) == list(range(len(result["kernels"])))
    assert "<svg" in page.read_text()


def test_a_second_search_measures_nothing(dovetail, tmp_path):
    command = ("schedule", TINY, "--rounds", "1", "--json", "--report", tmp_path / "page.html")
    dovetail(*command)
    status, out, err = dovetail(*command)
    assert status == 0, err
    assert json.loads(out)["results"][0]["measured_stages"] == 0


def test_presets_are_predicted_and_compared(dovetail, tmp_path):
    status, out, err = dovetail(
        "schedule", TINY, "--device", "v100,k80", "--batch", "1,2", "--json",
        "--report", tmp_path / "page.html",
    )  # fmt: skip
    assert status == 0, err
    devices = json.loads(out)["devices"]
    assert [one["costs"] for one in devices] == ["analytic", "analytic"]
    for one in devices:
        assert [result["batch"] for result in one["results"]] == [1, 2]
        for result in one["results"]:
            assert set(result["seconds"].values()) == {None}
            predicted = result["predicted_seconds"]
            assert predicted["dos"] <= predicted["sequential"] * (1 + 1e-9)
            assert predicted["dos"] <= predicted["greedy"] * (1 + 1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page-k80.html", "page-v100.html"]


def test_the_batch_of_a_network_is_its_option():
    assert with_batch("zoo:rnnlm", 0) == "zoo:rnnlm"
    assert with_batch("zoo:rnnlm", 8) == "zoo:rnnlm?batch=8"
    assert with_batch("zoo:rnnlm?batch=4&layers=2", 8) == "zoo:rnnlm?layers=2&batch=8"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--scheduler", "fast"), "'fast'"),
        (("--batch", "one"), "'one'"),
        (("--batch", "0"), "batch"),
        (("--device", "abacus"), "abacus"),
        (("--device", "cuda:0"), "CUDA"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(dovetail, tmp_path, arguments, named):
    status, out, err = dovetail("schedule", TINY, *arguments, "--report", tmp_path / "page.html")
    assert status == 2
    assert named in err
    assert not out
    assert not list(tmp_path.iterdir())


def test_a_batch_of_what_is_not_of_the_zoo_is_refused(dovetail, tmp_path):
    status, _, err = dovetail(
        "schedule",
        "tests.support.small_models:branches",
        "--batch",
        "2",
        "--report",
        tmp_path / "page.html",
    )
    assert status == 2
    assert "tests.support.small_models:branches" in err


def test_a_page_that_cannot_be_written_is_said_before_anything_runs(dovetail, tmp_path):
    status, _, err = dovetail("schedule", TINY, "--report", tmp_path / "none" / "page.html")
    assert status == 2
    assert "none" in err


def test_out_writes_a_plan_with_the_stages_which_runs(dovetail, tmp_path):
    out = tmp_path / "plan.json"
    command = ("schedule", TINY, "--rounds", "2", "--scheduler", "dos", "--out", out)
    status, printed, err = dovetail(*command)
    assert status == 0, err
    assert f"wrote {out}" in err + printed
    status, printed, err = dovetail("run", out, "--steps", "2", "--json")
    assert status == 0, err
    assert json.loads(printed)["median_seconds"] > 0


def test_a_chosen_schedule_becomes_the_stages_of_a_plan():
    step = resolve(TINY)
    ((found,),) = (one.results for one in schedules(step, schedulers=("dos",), rounds=2))
    staged = replace(found, chosen="dos")
    together = [stage for stage in staged.best.stages if len(stage.groups) > 1]
    plan = plan_of_stages(staged, step, search_plan(PlanRequest(step, "here"), lambda *_: None))
    verify(plan, step.graph)
    if not together:
        assert plan.schedules is None
        return
    (schedule,) = plan.schedules
    of_several = [stage for stage in schedule.stages if len(stage.ops) > 1]
    kernels = fuse(step.graph).of_op
    assert [sorted({int(kernels[op]) for op in stage.ops}) for stage in of_several] == [
        list(stage.kernels) for stage in together
    ]
    assert plan.placer == "dos+stages"


@pytest.mark.parametrize("more", [("--device", "v100"), ("--batch", "1,2")])
def test_a_plan_is_of_one_batch_size_on_the_cpu(dovetail, tmp_path, more):
    status, _, err = dovetail("schedule", TINY, "--out", tmp_path / "plan.json", *more)
    assert status == 2
    assert "--device cpu" in err
