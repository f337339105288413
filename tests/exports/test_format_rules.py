"""Every plan under a format's rules can be written in that format."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.utils.modeling import check_device_map
from torch import nn

import dovetail as dt
from dovetail.errors import UsageError
from dovetail.exports import device_map, split_points
from dovetail.exports.rules import rules_for
from dovetail.graph import LOSS_MODULE, colocate
from dovetail.graph.units import matched_modules
from dovetail.machine import parse_machine
from dovetail.plans import normalise
from tests.support.transformer_models import MODELS, Decoder, captured_model, tokens

MACHINE = parse_machine("3 x p100 + haswell")
TRIALS = 30


def plan_with(step, groups, devices):
    """The plan with these devices [groups]."""
    plan = dt.plan(step, MACHINE, placer="single", budget="1e")
    placement = normalise(devices[groups.of_op].astype(np.int32), step.graph, MACHINE)
    return replace(plan, placement=placement, orders=None)


@pytest.mark.parametrize("whole", [(), ("layers.*",)])
@pytest.mark.parametrize("name", MODELS)
def test_every_placement_of_the_groups_is_a_device_map(name, whole):
    if whole and name != "decoder":
        pytest.skip("it has no layers")
    step, rng = captured_model(name), np.random.default_rng(0)
    aliases = dict(step.source.aliases)
    modules = matched_modules(step.graph, whole)
    rules = rules_for("device-map", step.graph, MACHINE, modules, aliases)
    groups = colocate(step.graph, rules.units)
    devices = np.flatnonzero(rules.devices)
    for _ in range(TRIALS):
        drawn = devices[rng.integers(0, len(devices), groups.count)]
        drawn[groups.of_op[rules.main]] = 0
        found = device_map(plan_with(step, groups, drawn), step.graph)
        check_device_map(step.module, found)


class Scaled(nn.Module):
    """A layer that holds a tensor itself, beside its children."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x + self.scale * self.down(torch.relu(self.up(x)))


def test_a_small_module_that_holds_tensors_itself_is_not_split():
    step = dt.capture(nn.Sequential(*(Scaled() for _ in range(8))), torch.zeros(4, 16))
    rules = rules_for("device-map", step.graph, MACHINE, (), dict(step.source.aliases))
    groups, rng = colocate(step.graph, rules.units), np.random.default_rng(0)
    for _ in range(TRIALS):
        drawn = rng.integers(0, 3, groups.count)
        found = device_map(plan_with(step, groups, drawn), step.graph)
        assert set(found) <= {"", *(str(layer) for layer in range(8))}


class Supervised(nn.Module):
    """Layers whose heads are read in training only, and held by a list as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(16, 2) for _ in range(4))
        for layer, head in zip(self.layers, self.heads, strict=True):
            layer.head = head
        self.layers[1].other = self.layers[3].other = nn.Linear(2, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_tensors_that_nobody_reads_are_in_one_place_where_several_modules_hold_them():
    step = dt.capture(Supervised().eval(), torch.zeros(4, 16))
    rules = rules_for("device-map", step.graph, MACHINE, (), dict(step.source.aliases))
    groups, rng = colocate(step.graph, rules.units), np.random.default_rng(0)
    maps = []
    for _ in range(TRIALS):
        drawn = rng.integers(0, 3, groups.count)
        drawn[groups.of_op[rules.main]] = 0
        maps.append(device_map(plan_with(step, groups, drawn), step.graph))
        check_device_map(step.module, maps[-1])
    assert any(found.get("layers.0") != found.get("layers.1") for found in maps)


@pytest.mark.parametrize("name", MODELS)
def test_every_run_of_the_chain_is_a_list_of_split_points(name):
    step, rng = captured_model(name), np.random.default_rng(0)
    rules = rules_for("split-points", step.graph, MACHINE)
    groups = colocate(step.graph, rules.units)
    chain = np.full(groups.count, -1)
    np.maximum.at(chain, groups.of_op, rules.chain)
    units = rules.units.count
    for _ in range(TRIALS):
        cuts = np.sort(rng.integers(0, units + 1, 2))
        stage = np.searchsorted(cuts, chain, side="right")
        order = rng.permutation(4)
        found = split_points(plan_with(step, groups, order[stage]), step.graph)
        assert len(found) == len(set(stage[chain >= 0].tolist())) - 1


def test_the_chain_cuts_no_module_that_is_kept_whole():
    step = dt.capture(Decoder(), tokens())
    graph = step.graph
    rules = rules_for("split-points", graph, MACHINE, matched_modules(graph, ["layers.*"]))
    for layer in range(4):
        inside = [m.startswith(f"layers.{layer}") for m in graph.modules] & ~graph.is_source
        assert len(set(rules.chain[inside].tolist())) == 1


@pytest.mark.parametrize("format", ["megatron", "vllm"])
def test_a_format_to_come_is_refused_by_name(format):
    step = dt.capture(Decoder(), tokens())
    with pytest.raises(UsageError, match=f"{format} is not there yet"):
        dt.plan(step, "p100", format=format)
    with pytest.raises(UsageError, match="'deepspeed' is not one of device-map, split-points"):
        dt.plan(step, "p100", format="deepspeed")


def test_no_stage_begins_at_the_loss():
    step = dt.capture(
        Decoder(), tokens(), loss=lambda output: output.square().mean(), train=dt.SGD(lr=0.1)
    )
    graph = step.graph
    rules = rules_for("split-points", graph, MACHINE)
    loss = [op for op, module in enumerate(graph.modules) if module == LOSS_MODULE]
    assert loss
    assert set(rules.chain[loss].tolist()) == {int(rules.chain.max())}
