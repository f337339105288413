"""Device maps in one call: from a module, a configuration of transformers, or a plan."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.errors import InfeasibleError, UsageError
from dovetail.machine import parse_machine


def small(machine, memory_bytes):
    """The machine with so little memory on each GPU."""
    where = parse_machine(machine)
    devices = tuple(
        replace(device, memory_bytes=memory_bytes) if device.kind == "gpu" else device
        for device in where.devices
    )
    return replace(where, devices=devices)


def config(**changes):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    return transformers.LlamaConfig(**(sizes | changes))


def test_a_configuration_that_fits_one_accelerator_is_one_entry():
    # Large enough that its products, and not the launches of views, are what its layers take.
    large = config(hidden_size=4096, intermediate_size=11008)
    found = dt.device_map(large, "2 x a100", batch=16, context=128, budget="200e")
    assert found == {"": 0}
    assert found.main_device == 0


def test_one_that_does_not_fit_is_split_between_its_layers():
    large = config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6)
    # 6 layers of some 60 MiB.
    found = dt.device_map(large, small("2 x p100", 300 * 2**20), context=128, budget="200e")
    assert set(found.values()) == {0, 1}
    assert all(path.count(".") <= 2 for path in found), "no layer is split"


def test_the_cpu_computes_nothing_where_there_are_accelerators():
    found = dt.device_map(config(), "2 x p100 + haswell", context=8)
    assert "cpu" not in found.values()
    # On a machine of CPUs there is nothing that it could be streamed to.
    assert dt.device_map(config(), "haswell", context=8) == {"": "cpu"}


def test_memory_counts_the_cache_of_keys_and_values():
    model = config(num_key_value_heads=4, num_hidden_layers=4, max_position_embeddings=4096)
    # 4 layers of 2 x 64 samples x 512 tokens x 32 numbers: 32 MiB, beside .2 MiB of weights.
    with pytest.raises(InfeasibleError):
        dt.device_map(model, small("a100", 30 * 2**20), batch=64, context=512, budget="1e")
    found = dt.device_map(model, small("a100", 512 * 2**20), batch=64, context=512, budget="1e")
    assert found == {"": 0}


def test_a_module_of_ones_own_gives_its_inputs_and_may_be_on_the_meta_device():
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        inputs = {"input": torch.zeros(4, 256)}
    found = dt.device_map(module, small("2 x p100", 1_400_000), inputs=inputs, budget="200e")
    assert sorted(set(found.values())) == [0, 1]
    assert set(found) <= {str(i) for i in range(8)}
    with pytest.raises(UsageError, match="Sequential takes no input_ids; give"):
        dt.device_map(module, "2 x p100")


def test_a_plan_is_mapped_as_before():
    step = dt.capture(nn.Linear(4, 4), torch.zeros(2, 4))
    plan = dt.plan(step, "2 x p100", placer="single", budget="1e")
    assert dt.device_map(plan, step.graph) == dt.device_map(plan, step) == dt.device_map(plan)
    assert dt.device_map(plan, names={"p100:0": "cuda:5", "p100:1": "x"}) == {"": "cuda:5"}
    with pytest.raises(UsageError, match="a plan brings its own"):
        dt.device_map(plan, "2 x p100")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch: is 0"),
        ({"context": 129}, "context: is 129; use a number of tokens from 1 to 128"),
        ({"names": {"p100:0": 0}}, "names: is for a plan"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        dt.device_map(config(), "2 x p100", **options)


def test_what_is_no_model_is_refused():
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="is a int; give a module, a configuration"):
        dt.device_map(7, "2 x p100")
