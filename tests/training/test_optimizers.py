"""Optimizers on flat vectors do what torch.optim does."""

import numpy as np
import pytest
import torch

from dovetail.errors import UsageError
from dovetail.training.optimizers import OPTIMIZERS, make_optimizer

SIZE, STEPS = 1003, 12
CASES = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("sgd", torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    ("adam", torch.optim.Adam, {}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, {}),
    ("adamw", torch.optim.AdamW, {"lr": 4e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("adagrad", torch.optim.Adagrad, {}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
    ("rmsprop", torch.optim.RMSprop, {}),
    ("rmsprop", torch.optim.RMSprop, {"momentum": 0.9, "alpha": 0.9, "weight_decay": 0.01}),
]


def new_state(optimizer, dtype, size=SIZE):
    return {name: np.zeros(size, dtype) for name in optimizer.slots}, {}


def gradients(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=SIZE).astype(dtype), rng.normal(size=(STEPS, SIZE)).astype(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-12), (np.float32, 1e-6)])
@pytest.mark.parametrize(("name", "reference", "settings"), CASES)
def test_an_optimizer_goes_where_torchs_goes(name, reference, settings, dtype, bound):
    theta, steps = gradients(dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    theirs = reference([parameter], foreach=False, **settings)
    ours = make_optimizer(name, **settings)
    slots, counts = new_state(ours, dtype)
    for gradient in steps:
        parameter.grad = torch.from_numpy(gradient.copy())
        theirs.step()
        theta += ours.update(theta, gradient, slots, counts)
    expected = parameter.detach().numpy()
    assert theta.dtype == dtype
    assert np.linalg.norm(theta - expected) <= bound * np.linalg.norm(expected)
    assert counts == {"updates": STEPS}


@pytest.mark.parametrize(("name", "_reference", "settings"), CASES)
def test_an_update_leaves_its_inputs_and_reuses_no_vector(name, _reference, settings):
    theta, steps = gradients(np.float32)
    ours = make_optimizer(name, **settings)
    slots, counts = new_state(ours, np.float32)
    before = theta.copy(), steps[0].copy()
    first = ours.update(theta, steps[0], slots, counts)
    kept = first.copy()
    ours.update(theta, steps[1], slots, counts)
    assert np.array_equal(first, kept)
    assert np.array_equal(theta, before[0])
    assert np.array_equal(steps[0], before[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_given_with_the_gradient_replaces_the_settings_rate(name):
    theta, steps = gradients(np.float64)
    fixed, given = make_optimizer(name, lr=0.3), make_optimizer(name, lr=0.1)
    expected = fixed.update(theta, steps[0], *new_state(fixed, np.float64))
    found = given.update(theta, steps[0], *new_state(given, np.float64), 0.3)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "settings", "option"),
    [
        ("sgd", {"lr": -1}, "lr"),
        ("sgd", {"lr": float("nan")}, "lr"),
        ("sgd", {"lr": "fast"}, "lr"),
        ("sgd", {"momentum": 1.0}, "momentum"),
        ("sgd", {"nesterov": True}, "nesterov"),
        ("sgd", {"weight_decay": -0.1}, "weight_decay"),
        ("sgd", {"betas": (0.9, 0.99)}, "betas"),
        ("adam", {"betas": (0.9, 1.0)}, "betas"),
        ("adam", {"betas": 0.9}, "betas"),
        ("adam", {"eps": -1e-8}, "eps"),
        ("adamw", {"weight_decay": True}, "weight_decay"),
        ("adagrad", {"lr_decay": -1}, "lr_decay"),
        ("rmsprop", {"alpha": 1.5}, "alpha"),
        ("lamb", {}, "optimizer"),
    ],
)
def test_a_bad_setting_is_named(name, settings, option):
    with pytest.raises(UsageError) as caught:
        make_optimizer(name, **settings)
    assert caught.value.option == option
