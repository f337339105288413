"""Stages for the tools that train and serve pipelines of layers."""

import copy
import re

import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.errors import ExportError
from dovetail.exports.pipelines import megatron, torchtitan, vllm
from tests.support.planned import captured, plan_of

MACHINE = "3 x p100 + haswell"


class Decoder(nn.Module):
    """As models of torchtitan are written: what another stage holds is None, or not in its list."""

    def __init__(self, layers=5, tied=False):
        super().__init__()
        self.embedding = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


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


def part_of(model, names):
    """The stage as torchtitan makes it: lists keep what is named below them, all else is kept by
    its own name."""
    part, kept = copy.deepcopy(model), set(names)
    for name, child in list(part.named_children()):
        if isinstance(child, nn.ModuleList):
            numbers = [int(k.split(".")[1]) for k in kept if k.startswith(f"{name}.")]
            setattr(part, name, nn.ModuleList(child[n] for n in sorted(numbers)))
        elif name not in kept:
            setattr(part, name, None)
    return part


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
