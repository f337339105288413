"""Stages chosen together with the placement: never worse than either alone, and they run."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail import machine
from dovetail.costs import CostCache, analytic_costs
from dovetail.errors import PromiseError, UsageError
from dovetail.executors import run
from dovetail.executors.stages import measuring
from dovetail.executors.stages.measuring import CpuStages
from dovetail.frontends.optimizers import parse_optimizer
from dovetail.machine import Device, Link, Machine, parse_machine
from dovetail.pipeline import (
    Notes,
    PlanRequest,
    open_plan,
    searching,
    silent,
    staging,
    timeline_of,
    verify,
)
from dovetail.pipeline.opening import with_schedules
from dovetail.pipeline.staging import ONE_DEVICE, WITHOUT, device_stages, stages_together
from dovetail.plans import Schedule, load_plan
from dovetail.schedulers.placed import DeviceStages
from dovetail.schedulers.records import StageTiming, groups_of, members
from dovetail.schedulers.timing import block_of, signatures_of
from dovetail.units import HERE_CPU

TINY = "zoo:squeezenet_1_1?size=32&batch=1"


class Towers(nn.Module):
    """Two towers of three branches of two layers; the branches of a tower are added."""

    def __init__(self, width):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(3)
            )
            for _ in range(2)
        )

    def forward(self, x):
        return sum(sum(branch(x) for branch in tower) for tower in self.towers)


def towers(width=8, batch=2):
    torch.manual_seed(0)
    return dt.capture(Towers(width).eval(), torch.randn(batch, width))


@pytest.fixture(scope="module")
def joint():
    """Towers on two GPUs of which each is filled by some three branches."""
    step = towers(1024, 64)
    options = {"placer": "auto", "budget": "20e", "seed": 1}
    return (
        step,
        dt.plan(step, "2 x v100", **options),
        dt.plan(step, "2 x v100", **options, stages=True),
    )


def test_ctrl_c_while_stages_are_chosen_keeps_the_plan_without_them(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    step, options = towers(64, 4), {"placer": "auto", "budget": "20e", "seed": 1}
    alone = dt.plan(step, "2 x v100", **options)
    monkeypatch.setattr(staging, "with_stages", interrupted)
    plan = dt.plan(step, "2 x v100", **options, stages=True)
    assert plan.interrupted
    assert (plan.value, plan.schedules) == (alone.value, alone.schedules)


def test_the_plan_is_no_worse_than_placement_alone_and_than_stages_on_one_device(joint):
    step, alone, plan = joint
    on_one = dt.plan(step, "v100", budget="20e", stages=True)
    assert plan.baselines[WITHOUT] == alone.value
    assert plan.baselines[ONE_DEVICE] <= on_one.value * (1 + 1e-9)
    assert plan.value <= min(alone.value, on_one.value)
    # Here both together are better than either: some stages on each of the two devices.
    assert plan.value < 0.98 * min(alone.value, on_one.value)
    assert plan.placer.endswith("+stages")
    assert plan.lower_bound == 0.0


def test_the_same_seed_gives_the_same_plan(joint):
    step, _, plan = joint
    again = dt.plan(step, "2 x v100", placer="auto", budget="20e", seed=1, stages=True)
    assert again.value == plan.value
    assert again.schedules == plan.schedules
    assert (again.placement == plan.placement).all()


def test_the_file_holds_both_and_keeps_its_promises(joint, tmp_path):
    step, _, plan = joint
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.schedules == plan.schedules
    verify(loaded, step.graph)
    assert timeline_of(loaded, step.graph).step_seconds == plan.value
    stages = [s for schedule in plan.schedules if schedule for s in schedule.stages]
    (*_, together) = (stage for stage in stages if len(stage.ops) > 1)
    slower = replace(together, seconds=together.seconds + 1)
    changed = [
        schedule and Schedule(tuple(slower if s is together else s for s in schedule.stages))
        for schedule in plan.schedules
    ]
    assert with_schedules(plan, step.graph, changed).value == pytest.approx(1, rel=1e-2)
    with pytest.raises(PromiseError):
        verify(replace(loaded, schedules=tuple(changed)), step.graph)


def test_pins_hold_and_the_memory_of_stages_is_counted(joint):
    step, _, plan = joint
    pins = (("towers.0.*", "v100:1"), ("towers.1.*", "v100:1"))
    pinned = dt.plan(step, "2 x v100", budget="20e", stages=True, pins=pins)
    inside = [op for op, module in enumerate(step.graph.modules) if module.startswith("towers.")]
    running = [op for op in inside if not step.graph.is_source[op]]
    assert (pinned.placement[running] == 1).all()
    assert sum(stages_together(pinned).values()) == stages_together(pinned)["v100:1"]
    peaks = dict(zip(plan.machine.device_names, plan.peak_memory_bytes, strict=True))
    caps = tuple((name, peaks[name]) for name in ("v100:0", "v100:1"))
    capped = dt.plan(step, "2 x v100", budget="20e", stages=True, caps=caps)
    assert all(
        peak <= peaks[name]
        for name, peak in zip(capped.machine.device_names, capped.peak_memory_bytes, strict=True)
        if name != "host"
    )


# --- On this machine ---


def two_devices(cores):
    """Two devices that both have these cores of this machine."""
    rates = {"float32": 1e10}
    devices = tuple(
        Device(f"cpu{i}", "cpu", "test", 1 << 33, rates, 1e10, 1e-6, cores, threads=1)
        for i in range(2)
    )
    links = tuple(Link(f"cpu{i}", f"cpu{1 - i}", 1e10, 1e-6, f"cpu{i}") for i in range(2))
    return Machine("two", devices, "cpu0", links)


@pytest.fixture
def two_cores_each(monkeypatch):
    """Two devices that have one core of this machine twice, so that they run stages in threads
    wherever the tests run."""
    monkeypatch.setattr(machine, "check_local", lambda _machine: None)
    core = min(os.sched_getaffinity(0))
    return two_devices((core, core))


def free_stages(step, kernels, _device, _cache, _progress):
    """Costs by which a stage takes what its longest group takes."""
    block = block_of(step.graph, kernels)

    def time(stages):
        groups = [[len(list(members(g))) for g in groups_of(block, stage)] for stage in stages]
        return [StageTiming(float(max(own))) for own in groups]

    return DeviceStages(block, signatures_of(step.graph, kernels), time, [1.0] * kernels.count)


def by_data_sheet(step, machine, *_):
    return analytic_costs(step.graph, machine)


@pytest.fixture
def measured(monkeypatch):
    """Ops cost what the data sheet says and stages what `free_stages` says."""
    monkeypatch.setattr(searching, "costs_of", by_data_sheet)
    monkeypatch.setattr(staging, "_measured_stages", free_stages)


class FakePlaced(nullcontext):
    """A placed network whose steps take as long as the test says."""

    def __init__(self, seconds):
        super().__init__(self)
        self.seconds = seconds

    def feed(self):
        pass

    def step_seconds(self, steps):
        return [self.seconds] * (steps - 1)


def test_a_plan_with_stages_on_devices_of_this_machine_computes_what_torch_computes(
    measured, two_cores_each, monkeypatch, tmp_path
):
    step = towers()
    # Two devices in any case: each has a tower, and the stages of its own.
    monkeypatch.setattr(
        staging, "quicker", lambda _alone, _what, rivals, *_: (rivals[0], "not measured")
    )
    pins = (("towers.0.*", "cpu0"), ("towers.1.*", "cpu1"))
    plan = dt.plan(step, two_cores_each, budget="20e", stages=True, pins=pins)
    assert all(stages_together(plan).values())
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    with run(loaded, step) as placed, torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 8)
            torch.testing.assert_close(placed.step(x), step.module(x))
        timeline = placed.timeline()
    # The ops of a stage have one span, that of the stage.
    stage = next(s for schedule in loaded.schedules for s in schedule.stages if len(s.ops) > 1)
    at = np.isin(timeline.ops, stage.ops)
    assert len(set(timeline.op_starts[at])) == 1


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_stages_stay_only_if_they_are_measured_to_be_faster(
    measured, two_cores_each, monkeypatch, factor
):
    def fake_run(plan, _step, **_):
        return FakePlaced(1e-3 * (factor if plan.schedules else 1.0))

    monkeypatch.setattr(staging, "run", fake_run)
    plan = dt.plan(towers(), two_cores_each, budget="20e", stages=True)
    if factor < 1:
        assert plan.schedules
        assert plan.value < plan.baselines[WITHOUT]
        assert any("500 us for the fastest other plan" in note for note in plan.notes)
    else:
        assert plan.schedules is None
        assert plan.value == plan.baselines[WITHOUT]
        assert plan.lower_bound > 0
    assert any("measured 1 ms without stages" in note for note in plan.notes)


@pytest.mark.parametrize("several_faster", [True, False])
def test_all_cores_as_one_device_are_measured_against_several_devices(
    measured, monkeypatch, several_faster
):
    """The text here/2 has a plan on two devices and one on all cores, each with its stages."""
    core = min(os.sched_getaffinity(0))
    two = two_devices((core, core))
    four = Machine("here", (replace(two.devices[0], cores=(core,) * 4),), "cpu0", ())

    def parse(text):
        return four if text == HERE_CPU else two

    monkeypatch.setattr(machine, "parse_machine", parse)
    monkeypatch.setattr(machine, "check_local", lambda _machine: None)
    monkeypatch.setattr(searching, "machine_of", lambda _step, text, *_: parse(text))

    def fake_run(plan, _step, **_):
        several = len(plan.machine.devices) == 2
        seconds = 1e-3 if several == several_faster else 3e-3
        return FakePlaced(seconds * (0.5 if plan.schedules else 1.0))

    monkeypatch.setattr(staging, "run", fake_run)
    plan = dt.plan(towers(), "here/2", budget="20e", min_gain=0, stages=True)
    assert len(plan.machine.devices) == 1 + several_faster
    assert plan.schedules
    assert plan.baselines["here"] is not None


def test_stage_costs_are_measured_on_this_machines_cores_and_kept(
    monkeypatch, two_cores_each, tmp_path
):
    monkeypatch.setattr(measuring, "_SECONDS", 0.05)
    monkeypatch.setattr(measuring, "_SAMPLE_SECONDS", 1e-5)
    monkeypatch.setattr(measuring, "_VISITS", 1)
    step = towers()
    found = []
    for _ in range(2):
        cache = CostCache(tmp_path / "costs.db")
        kernels, (costs, other) = device_stages(step, two_cores_each, cache, silent, Notes())
        assert costs is other, "devices that are alike are measured once"
        both = [k for k in range(kernels.count) if not costs.block.predecessors[k]][:2]
        stage = sum(1 << kernel for kernel in both)
        (share,) = costs.shares([stage])
        assert 0 < share < np.inf
        found.append((share, *costs.alone))
        # What would measure now fails: the second time everything comes from the cache.
        monkeypatch.setattr(CpuStages, "measure_stages", None)
    assert found[0] == found[1]


def test_a_data_sheet_that_lacks_what_stages_need_is_noted():
    notes = Notes()
    _, costs = device_stages(towers(), parse_machine("v100 + haswell"), None, silent, notes)
    assert [cost is None for cost in costs] == [False, True]
    assert "haswell" in notes.texts[0]


# --- What is refused, and the command ---


def test_requests_that_can_have_no_stages_are_refused_in_one_line():
    step = towers()
    trained = dt.capture(
        nn.Linear(4, 4),
        torch.randn(2, 4),
        loss=nn.functional.mse_loss,
        targets=(torch.randn(2, 4),),
        train=parse_optimizer("sgd"),
    )
    for options, says in (
        ({"step": step, "objective": "load"}, "--objective step"),
        ({"step": step, "format": "device-map"}, "device-map"),
        ({"step": step.graph}, "zoo:NAME"),
        ({"step": trained}, "--train out"),
        ({"step": step, "machine": "here/1"}, "one core"),
        ({"step": step, "machine": "haswell"}, "GPU presets such as v100"),
    ):
        machine = options.pop("machine", "2 x v100")
        with pytest.raises(UsageError, match=says) as raised:
            PlanRequest(machine=machine, stages=True, **options)
        assert "\n" not in str(raised.value)


def test_a_step_that_draws_is_refused_where_stages_are_measured(measured, two_cores_each):
    step = dt.capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(), torch.randn(2, 4))
    with pytest.raises(UsageError, match="draws random numbers"):
        dt.plan(step, two_cores_each, budget="5e", stages=True)


def test_the_command_has_stages_in_its_object_only_if_asked(dovetail, tmp_path):
    command = ("plan", TINY, "--machine", "2 x v100", "--budget", "5e", "--json")
    status, out, err = dovetail(*command)
    assert status == 0, err
    without = json.loads(out)
    assert without["stages"] is None
    status, out, err = dovetail(*command, "--stages", "--out", tmp_path / "plan.json")
    assert status == 0, err
    found = json.loads(out)
    assert set(found) == set(without)
    assert found["value"] <= without["value"]
    assert any(note.startswith("stages of several ops: ") for note in found["notes"])
    plan, _ = open_plan(tmp_path / "plan.json")
    assert found["stages"] == (stages_together(plan) if plan.schedules else None)


def test_the_command_refuses_stages_of_phases_and_of_training(dovetail):
    status, _, err = dovetail("plan", "zoo:gpt2", "--phases", "decode", "--stages")
    assert status == 2
    assert "--stages" in err
    status, _, err = dovetail(
        "plan", TINY, "--machine", "v100", "--train", "sgd", "--stages", "--budget", "5e"
    )
    assert status == 2
    assert "are of inference steps" in err
