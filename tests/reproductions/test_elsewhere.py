"""Schedules run where they were not made for, and random ones beside the sums of their stages; the
page that draws both."""

import random
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from dovetail.errors import UsageError
from dovetail.executors.stages.targets import AnalyticTarget
from dovetail.frontends import capture, resolve
from dovetail.methods import SCHEDULERS
from dovetail.pipeline.scheduling import search, target_of
from reproductions import elsewhere
from reproductions.elsewhere import (
    Comparison,
    ComparisonRequest,
    Specialisation,
    as_candidate,
    compare,
    reseen,
    sample,
)
from reproductions.elsewhere_page import render_comparison
from tests.pipeline.test_pipeline_scheduling import cell, cores
from tests.support.page_checks import check_self_contained
from tests.support.schedule_samples import make_scheduled, make_schedules

__all__ = ["cores"]
TINY = "zoo:squeezenet_1_1?size=64&batch=1"


def test_random_schedules_are_not_measured_where_no_device_is():
    with pytest.raises(UsageError, match="measured, and v100, p100 cannot be"):
        ComparisonRequest(TINY, ["v100", "p100"], sampled=3)


def test_random_schedules_that_are_measured_are_distinct(cores):
    module, inputs = cell()
    step = capture(module, *inputs)
    (found,) = compare(ComparisonRequest(step, schedulers=["greedy"], rounds=2, sampled=12))
    (sampled,) = found.sampled
    assert 1 < len(sampled) <= 12
    # Two runs of one schedule, or a network of fewer schedules than are asked for, are not padded.
    target = target_of(chain())
    assert len(sample(target, 5, random.Random(0), 1)) < 5


def chain():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)).eval()
    return capture(layers, torch.randn(2, 4))


def test_schedules_made_elsewhere_are_measured_on_the_devices_that_are_here(cores, monkeypatch):
    def counted(timers, repeats, *_):
        return {name: (float(place + 1),) * repeats.most for place, name in enumerate(timers)}

    monkeypatch.setattr(elsewhere, "in_turns", counted)
    module, inputs = cell()
    step = capture(module, *inputs)
    asked = {"schedulers": ["greedy"], "specialised": "greedy", "rounds": 2}
    here, v100 = compare(ComparisonRequest(step, ["cpu", "v100"], **asked))
    (matrix,) = here.specialisations
    assert (matrix,) == v100.specialisations
    cores_name = here.schedules.device
    assert (
        matrix.title == f"devices at batch 2, measured on {cores_name} and predicted on the others"
    )
    # The second schedule has a time of its own if the device runs it in another way.
    alike = len({target_of(step).program(c) for c in _seen_on_cpu(step, here, v100)}) == 1
    assert matrix.seconds[0] == ((1.0, 1.0) if alike else (1.0, 2.0))
    greedy = v100.schedules.results[0].candidate("greedy")
    assert matrix.seconds[1][1] == pytest.approx(greedy.predicted_seconds)
    presets, *_ = compare(ComparisonRequest(step, ["v100", "k80"], schedulers=["dos"]))
    (other,) = presets.specialisations
    assert other.title == "devices at batch 2, predicted"


def _seen_on_cpu(step, *found):
    target = target_of(step)
    return [reseen(target, one.schedules.results[0].candidate("greedy")) for one in found]


def test_the_schedules_of_one_scheduler_run_elsewhere_if_it_is_named():
    model, both = "zoo:squeezenet_1_1?size=64", ["sequential", "dos"]
    for scheduler, specialised in (("dos", ""), ("sequential", "sequential")):
        asked = {"schedulers": both, "batches": [1, 8], "specialised": specialised}
        (found,) = compare(ComparisonRequest(model, ["v100"], **asked))
        (matrix,) = found.specialisations
        for place, result in enumerate(found.schedules.results):
            assert result.chosen == "dos"
            seconds = result.candidate(scheduler).predicted_seconds
            assert matrix.seconds[place][place] == pytest.approx(seconds)
    with pytest.raises(UsageError, match=r"specialised: 'ios' is not one of sequential, dos"):
        ComparisonRequest(model, ["v100"], schedulers=both, specialised="ios")


def test_schedules_made_elsewhere_are_no_better_than_a_devices_own():
    found = compare(ComparisonRequest(TINY, ("v100", "k80"), ("dos",), (1, 8)))
    for place, one in enumerate(found):
        batches, *devices = one.specialisations
        assert batches.title == "batch sizes"
        assert len(devices) == 2
        for row in range(2):
            own = one.schedules.results[row].best.predicted_seconds
            assert batches.seconds[row][row] == pytest.approx(own)
            assert min(batches.seconds[row]) >= own * (1 - 1e-9)
        for at_batch, result in zip(devices, one.schedules.results, strict=True):
            assert at_batch.seconds[place][place] == pytest.approx(result.best.predicted_seconds)


def test_a_schedule_seen_again_on_its_own_target_costs_what_it_did():
    target = target_of(resolve(TINY), "v100")
    assert isinstance(target, AnalyticTarget)
    for name in SCHEDULERS:
        found = search(target, name)
        assert reseen(target, found).predicted_seconds == pytest.approx(found.predicted_seconds)
        if found.stages and not any(stage.merged for stage in found.stages):
            stages = [sum(1 << k for k in stage.kernels) for stage in found.stages]
            again = as_candidate(target, stages)
            assert again.predicted_seconds == pytest.approx(found.predicted_seconds)


# ---- The page ----


def make_matrix(rows=("batch 1", "batch 8"), title="Batch sizes"):
    return Specialisation(title, rows, rows, ((0.01, 0.0105), (0.04, 0.03)))


def make_points():
    rng = random.Random(0)
    return tuple((p, p * rng.uniform(0.9, 1.1)) for p in (rng.uniform(1, 2) for _ in range(50)))


def named_comparison(name):
    """A comparison that has the name wherever a foreign one may stand."""
    result = make_scheduled(name=name, depth=1)
    renamed = [replace(c, scheduler=f"{name}{i}") for i, c in enumerate(result.candidates[1:])]
    result = replace(result, candidates=(result.candidates[0], *renamed), chosen=f"{name}0")
    schedules = make_schedules(result, replace(result, batch=8), model=name, costs=name)
    return Comparison(schedules, (make_matrix((name, "other"), name),), (make_points(), ()))


def test_a_page_has_the_schedules_the_matrices_and_whether_sums_are_right():
    found = Comparison(make_schedules(), (make_matrix(),), (make_points(),))
    page = render_comparison(found, made="a program")
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == ["Are sums of stages right?", "Specialisation", "How this was made"]
    assert "The answer" in page and "50 random schedules" in page and "Batch sizes" in page
    assert re.search(r"the noise of the measurements, 0\.4 %: [\d,]+ of [\d,]+ \(", page)
    tags = [(tag, dict(re.findall(r'([\w-]+)="([^"]*)"', rest)))
            for tag, rest in re.findall(r"<(\w+)([^<>]*)>", page)]  # fmt: skip
    check_self_contained(page, tags)


def test_a_matrix_marks_its_diagonal_and_the_loss_beside_it():
    page = render_comparison(Comparison(make_schedules(), (make_matrix(),), ((),)))
    cells = re.findall(r'<td class="(own|heat\d)">(.*?)</td>', page)
    assert cells == [
        ("own", "10 ms"), ("heat3", "10.5 ms <small>+5.0 %</small>"),
        ("heat4", "40 ms <small>+33.3 %</small>"), ("own", "30 ms"),
    ]  # fmt: skip
    assert "Are sums of stages right?" not in page
    assert "Specialisation" not in render_comparison(Comparison(make_schedules(), (), ((),)))
