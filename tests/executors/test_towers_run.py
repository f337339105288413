"""Towers executed on two CPU devices equal one large batch, and the loop a person would write.

Batch norm is what sets the two apart: a tower normalises by the statistics of its own share of the
batch. So towers equal one large batch where the statistics are frozen, and with batch norm in
training they equal a plain loop over towers that each have their own.
"""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.executors import run
from dovetail.frontends import SGD, Adam, capture, initial_values, run_step
from dovetail.networks import NETWORKS
from dovetail.transforms import towers
from reproductions.towers import tower_placement
from tests.support.placing import plan_for, random_placement, two_devices

STEPS, TOWERS, BATCH = 2, 4, 3
INCEPTION = {"batch": BATCH, "size": 75, "classes": 7, "width": 0.0625, "dropout": 0.0}
OPTIMIZERS = {
    "sgd": (SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    "adam": (Adam(lr=1e-3), lambda p: torch.optim.Adam(p, lr=1e-3)),
}


@functools.cache
def module_and_batches(network, frozen, optimizer):
    """(module, inputs of all towers, targets, one replica captured), in float64."""
    options = INCEPTION if network == "inception_v3" else NETWORKS[network].small
    torch.manual_seed(0)
    module, _, loss, _ = NETWORKS[network].build(**options)
    module = module.double().train()
    if frozen:
        for inner in module.modules():
            if isinstance(inner, nn.BatchNorm2d):
                inner.eval()
    sets = [NETWORKS[network].examples(**NETWORKS[network].defaults | options) for _ in range(4)]
    inputs = [x.double() if x.is_floating_point() else x for one, _ in sets for x in one]
    targets = [t for _, one in sets for t in one]
    optimizer = OPTIMIZERS[optimizer][0]
    one = capture(module, inputs[0], targets=targets[0], loss=loss, train=optimizer)
    return module, inputs, targets, one


def placed_steps(step, inputs, targets, placement, workers):
    """(losses, state_dict) of some steps on two devices."""
    with run(plan_for(step, placement), step, workers=workers) as placed:
        losses = [placed.step(*inputs, *targets) for _ in range(STEPS)]
        return losses, placed.state_dict()


def gradients_of(module, loss, x, target):
    module.zero_grad()
    value = loss(module(x), target)
    value.backward()
    return value.detach(), [p.grad.clone() for p in module.parameters()]


def by_hand(network, module, optimizer, inputs, targets, synchronous):
    """(losses, state_dict) of a plain loop: the mean gradient of all towers, or each tower's own,
    taken at the value before the step, one after another. Tower 0's statistics are kept."""
    module, loss = copy.deepcopy(module), NETWORKS[network].loss
    torch_optimizer = OPTIMIZERS[optimizer][1](module.parameters())
    losses = []
    for _ in range(STEPS):
        replicas = [module, *(copy.deepcopy(module) for _ in inputs[1:])]
        found = [
            gradients_of(*one, x, target)
            for *one, x, target in zip(replicas, [loss] * len(inputs), inputs, targets, strict=True)
        ]
        losses.append(sum(value for value, _ in found) / len(found))
        gradients = [gradients for _, gradients in found]
        if synchronous:
            gradients = [[sum(all_of) / len(found) for all_of in zip(*gradients, strict=True)]]
        for of_tower in gradients:
            for parameter, gradient in zip(module.parameters(), of_tower, strict=True):
                parameter.grad = gradient
            torch_optimizer.step()
    return losses, module.state_dict()


def assert_equal(found, expected, tolerance):
    (losses, state), (expected_losses, expected_state) = found, expected
    pairs = list(zip(losses, expected_losses, strict=True))
    assert state.keys() == expected_state.keys()
    pairs += [(state[name], value) for name, value in expected_state.items()]
    for a, b in pairs:
        assert a.dtype == b.dtype
        error = torch.linalg.vector_norm(a.double() - b.double())
        assert error <= tolerance * max(1e-30, float(torch.linalg.vector_norm(b.double())))


def a_tower_a_device(step):
    return tower_placement(step.graph, two_devices())


def test_towers_of_inception_equal_one_large_batch_with_frozen_batch_norm(workers, one_thread):
    module, inputs, targets, one = module_and_batches("inception_v3", True, "sgd")
    step = towers(one, TOWERS)
    placement = a_tower_a_device(step)
    assert set(placement.tolist()) == {0, 1}
    found = placed_steps(step, inputs, targets, placement, workers)
    large = [torch.cat(inputs)], [torch.cat(targets)]
    assert_equal(found, by_hand("inception_v3", module, "sgd", *large, True), 1e-10)


@pytest.mark.parametrize("synchronous", [True, False])
def test_towers_of_inception_equal_a_loop_with_batch_norm_per_tower(
    synchronous, workers, one_thread
):
    module, inputs, targets, one = module_and_batches("inception_v3", False, "sgd")
    step = towers(one, TOWERS, synchronous=synchronous)
    found = placed_steps(step, inputs, targets, a_tower_a_device(step), workers)
    expected = by_hand("inception_v3", module, "sgd", inputs, targets, synchronous)
    assert_equal(found, expected, 1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_asynchronous_towers_of_a_language_model_equal_a_plain_loop(optimizer, workers, one_thread):
    module, inputs, targets, one = module_and_batches("rnnlm", False, optimizer)
    step = towers(one, TOWERS, synchronous=False)
    found = placed_steps(step, inputs, targets, a_tower_a_device(step), workers)
    expected = by_hand("rnnlm", module, optimizer, inputs, targets, False)
    assert_equal(found, expected, 1e-12)


def test_synchronous_towers_of_a_language_model_equal_one_large_batch(workers, one_thread):
    module, inputs, targets, one = module_and_batches("rnnlm", False, "sgd")
    step = towers(one, TOWERS)
    found = placed_steps(step, inputs, targets, a_tower_a_device(step), workers)
    large = [torch.cat(inputs, dim=1)], [torch.cat(targets, dim=1)]
    assert_equal(found, by_hand("rnnlm", module, "sgd", *large, True), 1e-12)


@pytest.mark.parametrize("synchronous", [True, False])
def test_towers_are_placed_like_any_op_and_no_placement_changes_a_bit(
    synchronous, workers, one_thread
):
    _, inputs, targets, one = module_and_batches("rnnlm", False, "adam")
    step = towers(one, TOWERS, synchronous=synchronous)
    values = initial_values(step)
    losses = [run_step(step, values, inputs, targets, step=i) for i in range(STEPS)]
    names = {step.program.sources[step.graph.producers[t]].name: t for t in values}
    for seed in range(4):
        placement = random_placement(step.graph, seed)
        found, state = placed_steps(step, inputs, targets, placement, workers)
        assert all(map(torch.equal, found, losses))
        for name, value in state.items():
            assert torch.equal(value, values[names[name]]), name
    assert np.unique(placement).tolist() == [0, 1]
