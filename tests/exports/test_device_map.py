import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils.modeling import check_device_map
from planned import blocks_step, captured, plan_of
from torch import nn

from dovetail.errors import ExportError
from dovetail.exports import device_map


def last_two_on_the_second(module, _name):
    return int(module.startswith(("blocks.3", "head")))


def test_whole_modules_stand_for_what_is_within_and_split_ones_for_their_children():
    module, _, step = blocks_step()
    found = device_map(plan_of(step, last_two_on_the_second), step.graph)
    assert found == {
        "embedding": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 0, "blocks.3": 1, "head": 1
    }  # fmt: skip
    assert list(found) == ["embedding", *(f"blocks.{i}" for i in range(4)), "head"]
    check_device_map(module, found)


def test_a_plan_on_one_device_is_one_entry():
    module, _, step = blocks_step()
    assert device_map(plan_of(step, lambda *_: 1), step.graph) == {"": 1}
    assert device_map(plan_of(step, lambda *_: 2), step.graph) == {"": "cpu"}
    check_device_map(module, {"": 1})


def test_accelerate_runs_every_listed_module_where_the_map_says():
    module, inputs, step = blocks_step()
    plan = plan_of(step, last_two_on_the_second)
    # There is no GPU here: of the two devices one is a CPU, and "meta" computes shapes alone.
    found = device_map(plan, step.graph, {"p100:0": "cpu", "p100:1": "meta"})
    dispatched = dispatch_model(module, found, main_device="cpu", force_hooks=True)
    for name, device in found.items():
        hook = dispatched.get_submodule(name)._hf_hook
        assert torch.device(hook.execution_device) == torch.device(device)
    assert dispatched.blocks[3](inputs).device.type == "meta"


def test_what_was_dispatched_computes_the_same_numbers():
    module, inputs, step = blocks_step()
    expected = module(inputs)
    found = device_map(
        plan_of(step, last_two_on_the_second), step.graph, {"p100:0": "cpu", "p100:1": "cpu"}
    )
    dispatched = dispatch_model(module, found, main_device="cpu", force_hooks=True)
    assert hasattr(dispatched.blocks[3], "_hf_hook")
    assert torch.equal(dispatched(inputs), expected)


def test_a_leaf_on_two_devices_is_named_with_its_ops():
    class Leaf(nn.Module):
        def forward(self, x):
            return torch.relu(x + 1).sum()

    step = captured(nn.Sequential(nn.Linear(2, 2), Leaf()), torch.randn(3, 2))
    plan = plan_of(step, lambda module, name: int("relu" in name))
    with pytest.raises(ExportError, match=r"module '1' is split.*pin the module") as raised:
        device_map(plan, step.graph)
    assert raised.value.where == "module '1'"


def test_an_op_between_modules_that_reads_from_two_devices_is_named():
    _, _, step = blocks_step()
    plan = plan_of(step, lambda module, _: int(module.startswith("blocks.2")))
    with pytest.raises(ExportError, match=r"p100:0 and p100:1") as raised:
        device_map(plan, step.graph)
    assert "add" in raised.value.where


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.unused = nn.Linear(2, 2)
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.b(self.scale * self.a(x))


def test_tensors_of_a_split_module_are_listed_by_name_and_none_is_left_out():
    module = Scaled()
    step = captured(module, torch.randn(3, 2))
    plan = plan_of(step, lambda path, _: int(path == "b"))
    found = device_map(plan, step.graph)
    assert found["scale"] == 0
    assert (found["a"], found["b"]) == (0, 1)
    check_device_map(module, found)


def test_a_second_cpu_is_refused():
    step = captured(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(3, 2))
    plan = plan_of(step, lambda path, _: int(path == "1"), "2 x haswell")
    with pytest.raises(ExportError, match="second CPU"):
        device_map(plan, step.graph)
