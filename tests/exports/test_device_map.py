import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils.modeling import check_device_map
from torch import nn

from dovetail.errors import ExportError
from dovetail.exports import device_map
from dovetail.frontends import SGD, capture
from tests.support.planned import blocks_step, captured, plan_of


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


def test_a_submodule_called_loss_is_a_module_and_a_captured_loss_is_none():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.loss = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.loss(self.a(x))

    step = capture(Named(), torch.randn(2, 4), loss=lambda out: out.square().mean(), train=SGD())
    assert {module for module in step.graph.modules} >= {"a", "loss", "(loss)"}
    found = device_map(plan_of(step, lambda module, _: int(module != "a")), step.graph)
    assert found == {"a": 0, "loss": 1}


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


def test_a_module_on_the_cpu_is_computed_there_as_the_main_device_says():
    module, _, step = blocks_step()
    both = plan_of(step, lambda path, _: 2 if path == "head" else 0)
    found = device_map(both)
    assert (found["blocks"], found["head"], found.main_device) == (0, "cpu", "cpu")
    assert found.to_json() == {"device_map": dict(found), "main_device": "cpu"}
    # Of the two devices one is a CPU, and "meta" stands for the accelerator.
    mapped = {path: "cpu" if where == "cpu" else "meta" for path, where in found.items()}
    dispatched = dispatch_model(module, mapped, main_device=found.main_device)
    assert dispatched.head._hf_hook.execution_device == "cpu"
    assert not dispatched.head._hf_hook.offload
    assert dispatched.head.weight.device.type == "cpu"
    # Without it the weights of the CPU's module are on no device until they are streamed.
    module, _, _ = blocks_step()
    streamed = dispatch_model(module, mapped)
    assert streamed.head._hf_hook.execution_device == "meta"
    assert streamed.head._hf_hook.offload


def test_the_main_device_of_a_map_without_a_cpu_is_that_of_the_first_op():
    _, _, step = blocks_step()
    found = device_map(
        plan_of(step, lambda path, _: int(not path.startswith(("blocks.3", "head"))))
    )
    assert (found["embedding"], found["head"], found.main_device) == (1, 0, 1)


def test_tensors_of_the_outermost_module_are_on_the_main_device_or_refused():
    step = captured(Scaled(), torch.randn(3, 2))
    # The scaling follows what it reads, on the GPU, and accelerate puts its factor on the CPU.
    with pytest.raises(ExportError, match="haswell and p100:0"):
        device_map(plan_of(step, lambda path, _: 2 if path == "b" else 0))


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
