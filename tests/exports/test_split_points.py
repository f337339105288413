from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from dovetail.errors import ExportError
from dovetail.exports import split_points
from tests.support.planned import Blocks, blocks_step, captured, plan_of


def test_torch_takes_the_split_points_and_makes_the_stages_of_the_plan():
    module, inputs, step = blocks_step()
    plan = plan_of(step, lambda m, _: int(not m.startswith(("embedding", "blocks.0", "blocks.1"))))
    # The addition around blocks.2 stands in the top module, on the second device.
    found = split_points(plan, step.graph)
    assert found == {"blocks.2.0": SplitPoint.BEGINNING}
    expected = module(inputs)
    pipe = pipeline(module, (inputs,), split_spec=found)
    assert pipe.num_stages == 2
    held = [
        {name for name, _ in pipe.get_stage_module(stage).named_parameters()} for stage in (0, 1)
    ]
    assert {name.split(".")[0] + name.split(".")[1] for name in held[0]} == {
        "embeddingweight", "embeddingbias", "blocks0", "blocks1"
    }  # fmt: skip
    assert any(name.startswith("head") for name in held[1])
    assert torch.equal(
        pipe(inputs)[0] if isinstance(pipe(inputs), tuple) else pipe(inputs), expected
    )


class Halves(nn.Module):
    """Two lists of layers, which the top module runs through."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x):
        for layer in (*self.first, *self.second):
            x = layer(x)
        return x


def test_a_stage_never_begins_at_a_list_of_layers_which_nothing_calls():
    module, inputs = Halves(), torch.randn(2, 4)
    step = captured(module, inputs)
    found = split_points(plan_of(step, lambda path, _: int(path.startswith("second"))), step.graph)
    assert list(found) == ["second.0"]
    assert pipeline(module, (inputs,), split_spec=found).num_stages == 2


def test_three_stages_begin_at_the_outermost_module_that_has_ops_of_its_own():
    step = captured(
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))),
        torch.randn(2, 4),
    )
    plan = plan_of(step, lambda path, _: int(path.split(".")[0] or 0) // 2)
    assert list(split_points(plan, step.graph)) == ["2.0", "4.0"]


def test_one_device_has_no_split_points():
    _, _, step = blocks_step()
    assert split_points(plan_of(step, lambda *_: 0), step.graph) == {}


def test_a_device_that_comes_back_is_named_with_the_op():
    _, _, step = blocks_step()
    plan = plan_of(step, lambda m, _: int(m.startswith("blocks.1")))
    with pytest.raises(ExportError, match=r"p100:0 comes back at op 'blocks\.2") as raised:
        split_points(plan, step.graph)
    assert raised.value.where == "device p100:0"


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.a(x) + self.b(x) + self.c(x)


def test_branches_of_a_contiguous_plan_are_to_be_pinned_by_the_module_that_holds_them():
    step = captured(nn.Sequential(nn.Linear(4, 4), Branches()), torch.randn(2, 4))
    plan = replace(plan_of(step, lambda path, _: int(path in ("1.a", "1.c"))), contiguous=True)
    with pytest.raises(ExportError, match="pin module '1' to one device"):
        split_points(plan, step.graph)
    plan = replace(plan, contiguous=False)
    with pytest.raises(ExportError, match="plan with objective load and contiguous"):
        split_points(plan, step.graph)


def test_a_stage_that_begins_within_a_module_is_named():
    _, _, step = blocks_step()
    first_relu = next(
        i for i, n in enumerate(step.graph.names) if n.startswith("blocks.2") and "relu" in n
    )
    order = {name: i for i, name in enumerate(step.graph.names)}
    plan = plan_of(step, lambda _, name: int(order[name] > first_relu))
    with pytest.raises(ExportError, match="begins within it"):
        split_points(plan, step.graph)


class Twice(Blocks):
    def forward(self, x):
        return self.embedding(self.head(self.embedding(x)))


def test_a_module_that_is_called_twice_begins_no_stage():
    module = Twice()
    module.head = nn.Linear(8, 8)
    step = captured(module, torch.randn(2, 8))
    last = max(i for i, m in enumerate(step.graph.modules) if m == "embedding")
    name = step.graph.names[last]
    plan = plan_of(step, lambda _, n: int(n == name))
    with pytest.raises(ExportError, match="called once"):
        split_points(plan, step.graph)
