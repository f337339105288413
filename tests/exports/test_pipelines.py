"""Stages for the tools that train and serve pipelines of layers."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.errors import ExportError, UsageError
from dovetail.exports.pipelines import megatron, torchtitan, vllm
from dovetail.pipeline import open_to_show
from tests.support.planned import captured, plan_of
from tests.support.torch_pipelines import Decoder, PipelineCase, part_of, run_rank

MACHINE = "3 x p100 + haswell"


def planned(cuts=(2, 3), **options):
    """A plan whose second and third stage begin with these layers."""
    torch.manual_seed(0)
    module, inputs = Decoder(**options), torch.randn(4, 8)
    step = captured(module, inputs)

    def device_of(path, _name):
        if not path.startswith("layers."):
            return 0 if path.startswith("embedding") else 2
        return sum(int(path.split(".")[1]) >= cut for cut in cuts)

    return module, inputs, step, plan_of(step, device_of, MACHINE)


def test_stages_of_torchtitan_compute_the_model_one_after_the_other():
    module, inputs, step, plan = planned()
    stages = torchtitan(plan, step.graph)["module_fqns_per_model_part"]
    assert stages == [
        ["embedding", "layers.0", "layers.1"],
        ["layers.2"],
        ["layers.3", "layers.4", "norm", "head"],
    ]
    x = inputs
    for names in stages:
        x = part_of(module, names)(x)
    assert torch.equal(x, module(inputs))


def layers_of(layout):
    """[stages] the letters of each stage of Megatron-LM's layout: `t*3` stands for `ttt`."""
    text = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    return text.split("|")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("cuts", "stages", "partition"),
    [((2, 3), ["Ett", "t", "ttL"], "2,1,2"), ((1, 5), ["Et", "tttt", "L"], "1,4,0")],
)
def test_layers_of_each_stage_are_counted(cuts, stages, partition, tied):
    _, _, step, plan = planned(cuts, tied=tied)
    layout = megatron(plan, step.graph)
    assert layers_of(layout["pipeline-model-parallel-layout"]) == stages
    assert layout["pipeline-model-parallel-size"] == 3
    assert vllm(plan, step.graph)["VLLM_PP_LAYER_PARTITION"] == partition


def test_a_list_on_one_stage_is_named_too_as_it_may_be_a_sequential():
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    step = captured(module, torch.randn(2, 4))
    plan = plan_of(step, lambda path, _: int(path.startswith("1")))
    stages = torchtitan(plan, step.graph)["module_fqns_per_model_part"]
    assert stages == [["0", "0.0", "0.1"], ["1"]]


def test_a_tensor_of_two_stages_is_refused_where_each_would_have_its_own():
    _, _, step, plan = planned(tied=True)
    with pytest.raises(ExportError, match=r"'embedding.weight' is read on p100:0 and p100:2"):
        torchtitan(plan, step.graph)


@pytest.mark.parametrize(
    ("device_of", "error"),
    [
        (lambda path, _: int(path == "layers.1.0"), "module 'layers.1' is split over"),
        (lambda path, _: int(path.startswith("layers.1")), "p100:0 comes back at module"),
        (
            lambda path, _: 0 if path.startswith(("embed", "layers", "norm")) else 1,
            "module 'norm' is on p100:0; there it is in the last stage, on p100:1",
        ),
    ],
)
def test_what_no_stage_holds_is_refused_by_name(device_of, error):
    step = captured(Decoder(), torch.randn(4, 8))
    plan = plan_of(step, device_of, MACHINE)
    with pytest.raises(ExportError, match=re.escape(error)):
        vllm(plan, step.graph)


def test_a_model_without_one_list_of_layers_has_no_layers_to_count():
    step = captured(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    plan = plan_of(step, lambda path, _: int(path == "1"))
    with pytest.raises(ExportError, match="has not one list of layers, but none"):
        megatron(plan, step.graph)


@pytest.mark.parametrize("to", ["torchtitan", "megatron", "vllm"])
def test_a_plan_is_exported_to_each(to, tmp_path):
    _, _, step, plan = planned()
    assert dt.export(plan, step, to, tmp_path / "stages.json")
    assert (tmp_path / "stages.json").exists()


def training(layers=5, **options):
    torch.manual_seed(0)
    module, inputs, targets = Decoder(layers, **options), torch.randn(4, 8), torch.randn(4, 8)
    step = dt.capture(
        module, inputs, loss=nn.functional.mse_loss, targets=(targets,), train=dt.SGD(lr=0.1)
    )
    return module, step


def test_torch_runs_the_pipelines_that_are_planned_for_it_as_plain_pytorch_does(tmp_path):
    module, step = training()
    cases = []
    for schedule, format in (
        ("1f1b", "split-points"),
        ("gpipe", "torchtitan"),
        ("interleaved", "torchtitan"),
        ("zero-bubble", "torchtitan"),
    ):
        plan = dt.plan(
            step, "2 x p100", micro_batches=4, schedule=schedule, format=format, budget="20e"
        )
        plan.save(tmp_path / "plan.json")
        opened, graph = open_to_show(tmp_path / "plan.json")
        options = dt.export(opened, graph, "torchtitan")
        assert options == dt.export(plan, step, "torchtitan")
        assert options["training.local_batch_size"] == 16
        points = dt.export(opened, graph, format) if format == "split-points" else {}
        cases.append(PipelineCase(options, points))
    batch = torch.randn(16, 8), torch.randn(16, 8)
    context = torch.multiprocessing.get_context("spawn")
    results, meet = context.Queue(), f"file://{tmp_path}/meet"
    workers = [
        context.Process(target=run_rank, args=(rank, meet, module, batch, cases, results))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    stages = [len(case.options["module_fqns_per_model_part"]) for case in cases]
    found = [results.get(timeout=120) for _ in range(sum(stages))]
    for worker in workers:
        worker.join()
    for inputs, targets in zip(*(tensor.split(4) for tensor in batch), strict=True):
        (nn.functional.mse_loss(module(inputs), targets) / 4).backward()
    expected = copy.deepcopy(module)
    for gradient, parameter in zip(expected.parameters(), module.parameters(), strict=True):
        gradient.data = parameter.grad
    for case, stage, gradients in found:
        names = cases[case].options["module_fqns_per_model_part"][stage]
        for one, other in zip(gradients, part_of(expected, names).parameters(), strict=True):
            np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-5, atol=1e-7)


def test_a_pipeline_that_cuts_a_layer_is_exported_where_it_was_planned_for_the_format():
    with torch.device("meta"):
        module, inputs = Decoder(2), torch.empty(256, 8)
        module.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 4096), *(nn.Linear(4096, 4096) for _ in range(3)),
                          nn.Linear(4096, 8))
            for _ in range(2)
        )  # fmt: skip
        step = dt.capture(
            module, inputs, loss=nn.functional.mse_loss, targets=(inputs,), train=dt.SGD(lr=0.1)
        )
    options = {"micro_batches": 4, "schedule": "1f1b", "budget": "50e"}
    free = dt.plan(step, "4 x p100", **options)
    with pytest.raises(ExportError, match="plan with --for torchtitan"):
        dt.export(free, step, "torchtitan")
    plan = dt.plan(step, "4 x p100", format="torchtitan", **options)
    assert plan.made_for == "torchtitan"
    stages = dt.export(plan, step, "torchtitan")["module_fqns_per_model_part"]
    assert len(stages) == len(plan.micro_batches.devices)
    assert plan.value >= free.value
    whole = dt.plan(step, "4 x p100", whole=["layers.*"], **options)
    for layer in range(2):
        inside = [m.startswith(f"layers.{layer}") for m in step.graph.modules]
        inside &= ~step.graph.is_source
        assert len(set(np.array(whole.micro_batches.stages)[inside].tolist())) == 1


def test_what_torch_has_no_pipeline_for_is_no_plan_for_it():
    _, step = training()
    # Of 5 micro-batches on 2 ranks torch's interleaved schedule makes 2 rounds.
    options = {"micro_batches": 5, "schedule": "interleaved", "budget": "20e"}
    plan = dt.plan(step, "2 x p100", format="torchtitan", **options)
    assert len(set(plan.micro_batches.devices)) == 1
    with pytest.raises(ExportError, match="takes a multiple of 2 micro-batches, which 5 is not"):
        dt.export(dt.plan(step, "2 x p100", whole=["layers.*"], **options), step, "torchtitan")
    with pytest.raises(UsageError, match="a device-map has no stages; use split-points or"):
        dt.plan(step, "2 x p100", micro_batches=4, format="device-map")


def test_tied_ends_leave_torchtitan_no_stages():
    _, step = training(tied=True)
    with pytest.raises(ExportError, match=r"'embedding.weight' is read by 'embedding' and by 'hea"):
        dt.plan(step, "2 x p100", micro_batches=4, format="torchtitan", budget="20e")


def test_a_plan_of_one_batch_is_made_for_torchtitan_too():
    _, step = training()
    plan = dt.plan(
        step, "2 x p100", format="torchtitan", objective="load", min_gain=0, budget="50e"
    )
    assert set(dt.export(plan, step, "torchtitan")) == {"module_fqns_per_model_part"}
