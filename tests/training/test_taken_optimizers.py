"""Optimizers by name and as torch's own instances, and hooks that copies of a model lack."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import ModelError, UsageError
from dovetail.training.modules import flatten
from dovetail.training.trainer import Trainer
from tests.support.training_models import cross_entropy, perceptron, table

DEFAULTS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def fit(model, optimizer, **options):
    options = {"rule": "downpour", "workers": 1, "backend": "simulated", "batch": 8, **options}
    Trainer(model, cross_entropy, optimizer, **options).fit(table())
    return flatten(model)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_name_without_a_rate_has_torchs_own_default(name):
    kind = DEFAULTS[name]
    rate = kind(perceptron().parameters()).defaults["lr"]
    expected = fit(perceptron(), functools.partial(kind, lr=rate))
    assert np.array_equal(fit(perceptron(), name), expected)
    assert not np.array_equal(fit(perceptron(), name, lr=rate * 2), expected)


INSTANCES = [
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    functools.partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3),
    functools.partial(torch.optim.NAdam, lr=0.01),
    functools.partial(torch.optim.Adadelta, lr=0.5),
]


@pytest.mark.parametrize("make", INSTANCES, ids=lambda make: make.func.__name__)
def test_an_instance_is_taken_over_with_its_settings(make):
    model = perceptron()
    assert np.array_equal(fit(model, make(model.parameters())), fit(perceptron(), make))
    model = perceptron()
    faster = fit(model, make(model.parameters()), lr=0.05)
    assert np.array_equal(faster, fit(perceptron(), make, lr=0.05))


def test_an_instance_serves_a_rule_whose_server_steps():
    make = functools.partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9))
    model = perceptron()
    found = fit(model, make(model.named_parameters()), rule="sync", workers=2)
    assert np.array_equal(found, fit(perceptron(), make, rule="sync", workers=2))


def grouped(model):
    """The last layer first and faster, the first layer's bias with decay, its weights not at
    all."""
    first, _, last = model
    groups = [
        {"params": [last.bias, last.weight], "lr": 0.2, "momentum": 0.5},
        {"params": [first.bias], "weight_decay": 0.1},
    ]
    return torch.optim.SGD(groups, lr=0.05)


@pytest.mark.parametrize("backend", ["simulated", "processes"])
def test_groups_keep_their_parameters_and_settings(backend):
    model, expected = perceptron(), perceptron()
    fit(model, grouped(model), backend=backend, epochs=2)
    optimizer, (features, labels) = grouped(expected), table()
    for epoch in range(2):
        for rows in np.random.default_rng((0, epoch)).permutation(40).reshape(5, 8):
            optimizer.zero_grad()
            cross_entropy(expected(features[rows]), labels[rows]).backward()
            optimizer.step()
    assert np.allclose(flatten(model), flatten(expected), rtol=1e-5, atol=1e-7)
    assert torch.equal(model[0].weight, perceptron()[0].weight)


def frozen():
    model = perceptron()
    model[0].weight.requires_grad_(False)
    return model


def test_frozen_parameters_of_an_instance_stay_as_they_are():
    model, make = frozen(), functools.partial(torch.optim.SGD, lr=0.1)
    assert np.array_equal(fit(model, make(model.parameters())), fit(frozen(), make))


def stepped(model):
    optimizer = torch.optim.Adam(model.parameters())
    cross_entropy(model(table()[0]), table()[1]).backward()
    optimizer.step()
    return optimizer


def hooked(model):
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def scheduled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return optimizer


class Secretive(torch.optim.SGD):
    def __init__(self, parameters, secret, lr):
        super().__init__(parameters, lr=lr * secret)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (stepped, {}, "this Adam has stepped, and its state would be lost"),
        (hooked, {}, "this Adam has hooks"),
        (scheduled, {}, "this SGD has a scheduler; give that as schedule"),
        (lambda m: Secretive(m.parameters(), 2.0, 0.1), {}, "it does not tell its secret"),
        (grouped, {"lr": 0.1}, "has groups with rates of their own"),
        (grouped, {"rule": "sync"}, "knows no groups of parameters"),
    ],
)
def test_what_an_instance_would_lose_is_refused(make, options, says):
    model = perceptron()
    with pytest.raises(UsageError, match=says):
        fit(model, make(model), **options)


def by_gradient(parameter):
    parameter.register_hook(lambda gradient: 0 * gradient)


def after_gradient(parameter):
    parameter.register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize("hook", [by_gradient, after_gradient])
def test_hooks_of_parameters_are_refused_because_copies_lack_them(hook):
    model = perceptron()
    hook(model[2].weight)
    twin = copy.deepcopy(model)[2].weight
    assert not twin._backward_hooks and not twin._post_accumulate_grad_hooks
    with pytest.raises(ModelError, match=r"2\.weight has a hook, which workers' copies would lack"):
        fit(model, "adam")


def test_hooks_of_modules_travel_and_count():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = perceptron()

        def forward(self, features):
            return self.inner(features)

    model, plain = Halved(), Halved()
    plain.inner.load_state_dict(model.inner.state_dict())
    model.inner.register_full_backward_pre_hook(lambda _, gradients: (0.5 * gradients[0],))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    slow = functools.partial(torch.optim.SGD, lr=0.05)
    assert np.allclose(fit(model, sgd, epochs=3), fit(plain, slow, epochs=3))
