"""Machines with GPUs that the CPU plays, from their file to a run."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import dovetail as dt
from dovetail.errors import UsageError
from dovetail.frontends import capture
from dovetail.machine import Machine, check_local, local_machine, parse_machine, save_machine
from dovetail.pipeline import resolve_model
from dovetail.plans import EAGER, PLACED
from dovetail.runtime.cuda import TorchCuda, reach_gpus_by
from dovetail.runtime.native import SWITCH
from tests.executors.test_gpus import close
from tests.executors.test_stage_runs import Branches
from tests.support import forked
from tests.support.played_gpus import HOST, cpu, gpu, linked

pytestmark = pytest.mark.usefixtures("forked_workers", "played_gpus")

MODEL = "zoo:rnnlm?layers=2&hidden=16&steps=3&batch=4&vocabulary=50"


def machine(*devices):
    """A machine whose CPUs are of this machine."""
    model = local_machine().devices[0].model
    return linked("box", *(replace(d, model=model) if d.cores else d for d in devices))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A cache of these tests alone: what other modules play is measured otherwise."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture
def cache(monkeypatch, tmp_path, measured):
    monkeypatch.setenv("DOVETAIL_CACHE", str(measured))
    monkeypatch.setenv(SWITCH, "python")  # a C++ runner would have to be built there first
    return tmp_path


def test_a_step_is_measured_planned_and_run_on_a_cpu_and_a_gpu(cache):
    box = machine(cpu(0), gpu(0))
    check_local(box)
    step = resolve_model(MODEL, "adam")
    pins = [("lstm.0", "gpu0"), ("lstm.1", "cpu0")]
    plan = dt.plan(step, box, budget="200e", pins=pins)
    assert plan.costs_source == "measured"
    assert np.isfinite(plan.compute_seconds).all()
    used = {plan.machine.device_names[d] for d in plan.placement[~step.graph.is_source]}
    assert used == {"cpu0", "gpu0"}
    alone = dt.plan(step, machine(cpu(0)), budget="10e")
    with dt.run(plan, step) as placed, dt.run(alone, step) as plain:
        placed.feed()
        plain.feed()
        for _ in range(4):
            placed.step_seconds(2)
            plain.step_seconds(2)
        assert close(placed.state_dict(), plain.state_dict())
        measurement = placed.measure(steps=3)
    assert len(measurement.timeline.transfer_starts)


def test_a_machine_file_with_gpus_is_planned_for_and_run_by_commands(dovetail, tmp_path):
    file, out = tmp_path / "box.toml", tmp_path / "plan.json"
    save_machine(machine(HOST, gpu(0), gpu(1)), file)
    status, _, err = dovetail("plan", MODEL, "--machine", file, "--budget", "50e", "--out", out)
    assert status == 0, err
    devices = json.loads(out.read_text())["machine"]["devices"]
    assert {device["torch_device"] for device in devices[1:]} == {"cuda:0"}
    # As a program of its own, too.
    command = ["-m", "tests.support.on_played_gpus", "run", out, "--steps", "4"]
    process = forked.start(command, cwd=os.getcwd(), env=dict(os.environ), forks=True)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def test_stages_on_a_gpu_are_predicted_and_then_measured(cache):
    from dataclasses import replace

    step = capture(Branches().eval(), torch.randn(8, 8))
    card = replace(gpu(0), model="NVIDIA V100-SXM2-16GB")
    plan = dt.plan(step, machine(HOST, card), stages=True, budget="20e")
    told = " ".join(plan.notes)
    assert "stages of several ops" in told and "not known" not in told
    with dt.run(plan, step) as placed:
        placed.feed()
        placed.step_seconds(4)
    with pytest.raises(UsageError, match="not known"):
        dt.plan(step, machine(HOST, gpu(0)), stages=True, budget="20e")


def test_a_recurrent_kernel_of_cpus_stays_on_a_cpu(cache):
    from dovetail.transforms import Form

    torch.manual_seed(0)
    step = capture(torch.nn.LSTM(8, 8), torch.randn(4, 2, 8))
    fused = Form(1).apply(step)
    kernels = [op for op, kind in enumerate(fused.graph.kinds) if "mkldnn" in kind]
    assert kernels and not fused.graph.runs_on("gpu")[kernels].any()
    plan = dt.plan(fused, machine(cpu(0), gpu(0)), budget="50e")
    assert set(plan.placement[kernels]) == {0}


def test_a_plan_with_gpus_is_measured_beside_the_module_on_the_first_gpu(cache):
    from dovetail.pipeline.ways import fastest_way

    box = machine(HOST, gpu(0), gpu(1))
    step = resolve_model(MODEL, "adam")
    plan = dt.plan(step, box, budget="20e")
    alone = Machine(box.name, (gpu(0),), "gpu0")
    told = []
    found = fastest_way(
        (plan, plan), step, alone, replaces=True, compile_seconds=0,
        progress=lambda doing, _done, _best: told.append(doing),
    )  # fmt: skip
    assert set(found.measured) == {PLACED, EAGER}
    assert any("eager (on a GPU)" in note for note in found.notes)
    # What the CPU plays is slow, so the module itself is the plan, and runs as one.
    assert found.way == EAGER and found.machine.device_names == ("gpu0",)
    found.save(cache / "plan.json")
    with dt.run(dt.load_plan(cache / "plan.json"), step) as network:
        network.feed()
        network.step_seconds(3)
        state = network.optimizer_state_dict()
        network.load_optimizer_state_dict(state)
        network.load_state_dict(network.state_dict())


@pytest.mark.compares_ways
def test_beside_gpus_a_plan_for_sets_of_cores_is_compared_with_all_cores(cache, monkeypatch):
    monkeypatch.setattr("dovetail.machine.gpus._DRIVERS", (__file__,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (1 << 34, 1 << 34))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _number: "NVIDIA Test")
    assert parse_machine("here").device_names == ("cpu0", "gpu0")
    plan = dt.plan(resolve_model(MODEL), "here/2", budget="20e", compile_budget="0s")
    assert {PLACED, EAGER} <= set(plan.measured)
    assert all(device.kind == "cpu" for device in plan.machine.devices)


def test_the_command_shows_what_is_measured_of_each_gpu(dovetail, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    file = tmp_path / "box.toml"
    save_machine(machine(HOST, gpu(0), replace(gpu(1), torch_device="cuda:1")), file)
    status, out, err = dovetail("machine", file)
    assert status == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["GPU", "name", "all", "memory", "float32", "bfloat16", "float64", "reaches"] in rows
    assert ["copy", "pinned", "pageable"] in rows
    first, second = ([row for row in rows if row[:2] == [f"gpu{i}", "test"]] for i in (0, 1))
    assert [row[2:4] for row in (first[-1], second[-1])] == [["8", "GiB"]] * 2
    assert (first[-1][-1], second[-1][-1]) == ("gpu1", "gpu0")
    copies = out[out.index("Copies, measured now") :]
    for i in (0, 1):
        assert f"host -> gpu{i} " in copies and f"gpu{i} -> host " in copies


def test_gpus_of_another_machine_are_shown_and_not_measured(dovetail, tmp_path, monkeypatch):
    reach_gpus_by(TorchCuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "box.toml"
    save_machine(machine(HOST, gpu(0)), file)
    status, out, err = dovetail("machine", file)
    assert status == 0, err
    assert "gpu0" in out and "measured now" not in out
    assert "the GPUs were not measured: device 'gpu0' is cuda:0; torch sees no GPU here" in err


def test_the_command_measures_no_gpus_where_none_are_here(dovetail):
    status, out, err = dovetail("machine", "2 x k80")
    assert status == 0, err
    assert "measured now" not in out


def test_a_plan_is_searched_until_what_arrives_on_a_gpu_fits(cache, monkeypatch):
    from dataclasses import replace

    from dovetail.executors.shares import most_bytes, share_out
    from dovetail.pipeline import searching

    step = resolve_model("zoo:gpt2?layers=4&batch=1&context=8&hidden=64&heads=2&vocabulary=50")
    weights = sum(p.numel() * 4 for p in step.module.parameters())
    quick = replace(gpu(0), memory_bytes=weights // 2, flops_per_second={"float32": 1e15})
    box = machine(cpu(0), quick)
    costs = dt.costs.analytic_costs(step.graph, box)
    monkeypatch.setattr(searching, "costs_of", lambda *_args: costs)
    plan = dt.plan(step, box, budget="500e")
    for share in share_out(plan, step.graph).shares:
        device = plan.machine.devices[share.device]
        assert most_bytes(share, step.graph, step.program) <= device.memory_bytes
    assert len(plan.orders[1]) > 0
    assert not plan.caps and "less memory on GPUs" in plan.notes[-1]
    monkeypatch.setattr(searching, "MOST_SEARCHES", 0)
    plan = dt.plan(step, box, budget="500e")
    share = share_out(plan, step.graph).shares[1]
    assert most_bytes(share, step.graph, step.program) > quick.memory_bytes
