"""A planned run equals the same Program in one process bit for bit, and the plain model."""

import copy
import functools

import pytest
import torch

from dovetail.executors import run
from dovetail.frontends import (
    SGD,
    Adam,
    capture,
    example_values,
    initial_values,
    resolve,
    run_step,
)
from dovetail.networks import NETWORKS
from tests.support.placing import plan_for, random_order, random_placement

STEPS = 3
PLACEMENTS = {"rnnlm": 8, "inception": 2}
"""Random ones of each model: a run of the large one takes seconds, and has more edges to cut."""
MODELS = {
    "rnnlm": "zoo:rnnlm?layers=2&hidden=16&steps=3&batch=4&vocabulary=50",
    "inception": "zoo:inception_v3?width=0.0625&size=75&batch=2&dropout=0",
}
LOSSES = {"rnnlm": NETWORKS["rnnlm"].loss, "inception": NETWORKS["inception_v3"].loss}
OPTIMIZERS = {"sgd": SGD(lr=0.1), "adam": Adam(lr=1e-3)}


@functools.cache
def captured_step(model, optimizer):
    return resolve(MODELS[model], train=OPTIMIZERS[optimizer])


@functools.cache
def interpreted(model, optimizer):
    """(loss per step, source name -> value after the steps) in this process."""
    captured = captured_step(model, optimizer)
    values = initial_values(captured)
    inputs, targets = example_values(captured)
    losses = [run_step(captured, values, inputs, targets, step=i) for i in range(STEPS)]
    names = {captured.program.sources[int(captured.graph.producers[t])].name: t for t in values}
    return losses, {name: values[t] for name, t in names.items()}


def placed_run(plan, captured, workers):
    """The same of a planned run."""
    inputs, targets = example_values(captured)
    with run(plan, captured, workers=workers) as placed:
        losses = [placed.step(*inputs, *targets) for _ in range(STEPS)]
        return losses, placed.state_dict() | placed.optimizer_state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_random_placements_change_no_bit(model, optimizer, workers, one_thread):
    captured = captured_step(model, optimizer)
    losses, values = interpreted(model, optimizer)
    graph = captured.graph
    plans = [plan_for(captured, 0), plan_for(captured, 1)]
    for seed in range(PLACEMENTS[model]):
        placement = random_placement(graph, seed)
        orders = random_order(graph, placement, seed) if seed % 2 else "by index"
        plans.append(plan_for(captured, placement, orders))
    for plan in plans:
        found_losses, found = placed_run(plan, captured, workers)
        assert all(map(torch.equal, found_losses, losses))
        assert values.keys() <= found.keys()
        for name, value in values.items():
            assert torch.equal(found[name], value), name


def plain_steps(module, inputs, targets, model, optimizer):
    """(losses, state_dict) of PyTorch's own loop."""
    settings = OPTIMIZERS[optimizer]
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    torch_optimizer = kind(module.parameters(), lr=settings.lr)
    losses = []
    for _ in range(STEPS):
        torch_optimizer.zero_grad()
        value = LOSSES[model](module(*inputs), *targets)
        value.backward()
        torch_optimizer.step()
        losses.append(value.detach())
    return losses, module.state_dict()


def assert_close(found, expected, tolerance):
    found, expected = found.double(), expected.double()
    assert torch.linalg.vector_norm(found - expected) <= tolerance * max(
        float(torch.linalg.vector_norm(expected)), 1e-30
    )


def real_step(model, optimizer, dtype):
    """(captured, its real module, inputs, targets), of floating-point type `dtype`."""
    captured = captured_step(model, optimizer)
    torch.manual_seed(0)  # what the executor's seed 0 does before it makes the module
    module = captured.make()
    inputs, targets = example_values(captured)
    if dtype == torch.float32:
        return captured, module, inputs, targets
    module = module.double()
    inputs = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    settings = OPTIMIZERS[optimizer]
    double = capture(module, *inputs, targets=targets, loss=LOSSES[model], train=settings)
    return double, copy.deepcopy(module), inputs, targets


@pytest.mark.parametrize(
    ("model", "optimizer", "dtype", "tolerance"),
    [
        ("rnnlm", "sgd", torch.float32, 1e-4),
        ("rnnlm", "adam", torch.float64, 1e-10),
        ("inception", "sgd", torch.float64, 1e-10),
        ("inception", "adam", torch.float32, 1e-4),
    ],
)
def test_a_planned_run_equals_plain_pytorch(
    model, optimizer, dtype, tolerance, workers, one_thread
):
    captured, module, inputs, targets = real_step(model, optimizer, dtype)
    plan = plan_for(captured, random_placement(captured.graph, 0))
    with run(plan, captured, workers=workers) as placed:
        found_losses = [placed.step(*inputs, *targets) for _ in range(STEPS)]
        found = placed.state_dict()
    losses, state = plain_steps(module, inputs, targets, model, optimizer)
    for a, b in zip(found_losses, losses, strict=True):
        assert_close(a, b, tolerance)
    assert state.keys() == found.keys()
    for name, value in state.items():
        assert found[name].dtype == value.dtype
        assert_close(found[name], value, tolerance)
