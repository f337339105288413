"""Modules as learners: flat vectors, the user's optimizer as U(g), schedules, what is refused."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import ModelError, UsageError
from dovetail.training.modules import ModuleLearner, device_of, flatten, unflatten
from dovetail.training.trainer import Trainer
from tests.support.training_models import (
    OPTIMIZERS,
    SGD,
    cross_entropy,
    perceptron,
    relative,
    table,
)

STEP_LR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
ONE_CYCLE = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10)


def learner_of(module, optimizer=SGD, data=None, schedule=None, **options):
    return ModuleLearner(module, cross_entropy, optimizer, data or table(), schedule, **options)


def trained(learner, theta, steps=10, batch=8, per_epoch=5):
    """theta after steps of `theta += U(g)`, in place."""
    for step in range(steps):
        start = step % per_epoch * batch
        epoch, fraction = step // per_epoch, step / per_epoch
        gradient = learner.gradient(theta, np.arange(start, start + batch), epoch)
        theta += learner.update(theta, gradient.vector, fraction)
    return theta


def plainly_trained(module, optimizer, features, labels, rates=None, batch=8):
    made = optimizer(module.parameters())
    for step in range(10):
        start = step % 5 * batch
        if rates is not None:
            made.param_groups[0]["lr"] = rates[step]
        made.zero_grad()
        cross_entropy(
            module(features[start : start + batch]), labels[start : start + batch]
        ).backward()
        made.step()
    return flatten(module)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_adding_the_update_is_the_optimizers_own_step(name):
    features, labels = table()
    found = trained(learner_of(perceptron(), OPTIMIZERS[name]), flatten(perceptron()))
    expected = plainly_trained(perceptron(), OPTIMIZERS[name], features, labels)
    assert relative(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (lambda epoch: 0.5**epoch, [0.1 * 0.5 ** (k / 5) for k in range(10)]),
        (STEP_LR, [0.1] * 5 + [0.05] * 5),
    ],
)
def test_a_schedule_sets_the_rate_of_each_step(schedule, rates):
    learner = learner_of(perceptron(), schedule=schedule)
    found = trained(learner, flatten(perceptron()))
    expected = plainly_trained(perceptron(), SGD, *table(), rates=rates)
    assert relative(found, expected) < 1e-6
    assert learner.rate(1.8) == pytest.approx(rates[9])


def test_a_scheduler_is_asked_about_any_epoch_in_any_order():
    learner = learner_of(perceptron(), schedule=STEP_LR)
    assert [learner.rate(e) for e in (3.0, 0.0, 1.5, 3.9)] == [0.0125, 0.1, 0.05, 0.0125]


def test_a_scheduler_may_move_other_settings_than_the_rate():
    adam = functools.partial(torch.optim.Adam, lr=0.1)
    learner = learner_of(perceptron(), adam, schedule=ONE_CYCLE)
    made = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = ONE_CYCLE(made)
    made.step()
    scheduler.step()
    learner.rate(1.0)
    settings = learner._rates._lookup(1.0)[0]
    assert settings["betas"] == made.param_groups[0]["betas"] != (0.9, 0.999)


class Shared(nn.Module):
    """An embedding tied to the output layer, a frozen part, a part without use."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=True)
        self.middle = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words):
        return self.out(self.frozen(self.middle(self.embedding(words))))


def test_tied_parameters_are_there_once_and_frozen_ones_not():
    module = Shared()
    assert flatten(module).size == 3 + 5 * 4 + (4 * 4 + 4)
    frozen = module.frozen.weight.clone()
    unflatten(module, np.zeros(43, np.float32))
    assert not module.out.weight.any() and not module.middle.bias.any()
    assert module.out.weight is module.embedding.weight
    assert torch.equal(module.frozen.weight, frozen)


def test_sparse_tied_and_missing_gradients_find_their_places():
    torch.manual_seed(0)
    words, following = torch.tensor([0, 1, 1, 4]), torch.tensor([1, 1, 4, 0])
    module = Shared()
    theta = flatten(module)
    found = learner_of(Shared(), data=(words, following)).gradient(theta, np.arange(4), 0)
    twin = Shared()
    unflatten(twin, theta)
    twin.load_state_dict(module.state_dict())
    cross_entropy(twin(words), following).backward()
    # The learner's own frozen part is another draw: compare with one that shares it.
    learner = learner_of(twin, data=(words, following))
    found = learner.gradient(theta, np.arange(4), 0).vector
    module.zero_grad()
    cross_entropy(module(words), following).backward()
    parts = [module.unused, module.embedding.weight, module.middle.weight, module.middle.bias]
    expected = [torch.zeros(3) if p.grad is None else p.grad.to_dense() for p in parts]
    assert relative(found, torch.cat([g.reshape(-1) for g in expected]).numpy()) < 1e-6


def test_double_precision_stays_double():
    module = perceptron().double()
    features, labels = table()
    learner = learner_of(module, data=(features.double(), labels))
    theta = flatten(module)
    assert theta.dtype == np.float64 == learner.gradient(theta, np.arange(3), 0).vector.dtype
    assert learner.update(theta, theta, 0.0).dtype == np.float64


def test_the_parameters_given_are_used_and_left_alone():
    learner, theta = learner_of(perceptron()), flatten(perceptron(seed=1))
    theta.flags.writeable = False
    before = theta.copy()
    first = learner.gradient(theta, np.arange(8), 0)
    kept = first.vector.copy()
    change = learner.update(theta, first.vector, 0.0)
    assert np.array_equal(theta, before)
    assert relative(change, -0.1 * kept) < 1e-5
    other = learner.gradient(flatten(perceptron(seed=2)), np.arange(8), 0)
    assert relative(other.vector, kept) > 0.1
    assert relative(learner.gradient(theta, np.arange(8), 0).vector, kept) == 0
    assert np.array_equal(change, learner.update(theta, kept, 0.0))


def test_an_update_is_the_optimizers_though_others_write_to_the_parameters_meanwhile():
    theta = flatten(perceptron())

    class Raced(torch.optim.SGD):
        def step(self, closure=None):
            np.add(theta, 1.0, out=theta)  # another worker's, without a lock
            super().step(closure)

    learner = learner_of(perceptron(), functools.partial(Raced, lr=0.1))
    gradient = learner.gradient(theta, np.arange(8), 0).vector.copy()
    assert relative(learner.update(theta, gradient, 0.0), -0.1 * gradient) < 1e-5


def test_what_dropout_draws_depends_on_seed_worker_epoch_and_samples_alone():
    def gradient(seed, worker, epoch, first, before=0):
        module = nn.Sequential(perceptron(), nn.Dropout(0.5))
        learner = learner_of(module, seed=seed, worker=worker)
        theta = flatten(module)
        for _ in range(before):
            learner.gradient(theta, np.arange(8), 0)
        return learner.gradient(theta, np.arange(first, first + 8), epoch).vector.copy()

    same = gradient(0, 0, 0, 0)
    assert np.array_equal(same, gradient(0, 0, 0, 0, before=3))
    for other in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)):
        assert not np.array_equal(same, gradient(*other))


def shared_memory():
    module = perceptron()
    module[2].bias = nn.Parameter(module[0].bias.detach()[:3])
    return module


def mixed():
    module = perceptron()
    module[2].double()
    return module


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (perceptron().half, "0.weight is torch.float16; only float32 and float64"),
        (mixed, "mixes float32 and float64"),
        (lambda: perceptron().requires_grad_(False), "no parameter that requires a gradient"),
        (nn.ReLU, "no parameter that requires a gradient"),
        (lambda: nn.LazyLinear(3), "weight has no shape yet; call the model once"),
        (shared_memory, "0.bias and 2.bias share memory"),
        (lambda: perceptron().to("meta"), "0.weight is on meta"),
    ],
)
def test_a_module_that_is_no_float_vector_is_an_error(module, says):
    with pytest.raises(ModelError, match=says):
        flatten(module())


def test_a_vector_of_another_size_is_an_error():
    with pytest.raises(ModelError, match=r"has 83 parameters, not the \(3,\)"):
        unflatten(perceptron(), np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda parameters: "adam", "made str"),
        (lambda parameters: torch.optim.SGD(perceptron().parameters(), lr=1), "other parameters"),
        (torch.optim.LBFGS, "evaluates the loss several times"),
    ],
)
def test_an_optimizer_that_cannot_step_on_a_gradient_is_an_error(optimizer, says):
    with pytest.raises(UsageError, match=says) as caught:
        learner_of(perceptron(), optimizer)
    assert caught.value.option == "optimizer"


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (0.5, "is not callable"),
        (lambda x: "what", "made str"),
        (lambda x: x.missing, "neither a function of the epoch nor of the optimizer"),
        (plateau, "ReduceLROnPlateau; it must make a scheduler that steps by epochs alone"),
        (lambda epoch: -1.0, "gives the factor -1.0"),
    ],
)
def test_a_schedule_that_sets_no_rate_is_an_error(schedule, says):
    with pytest.raises(UsageError, match=says):
        learner_of(perceptron(), schedule=schedule).rate(0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_device_trains_as_the_cpu_does(name):
    # "cpu:0" is another device than "cpu" to a learner: all goes through copies.
    found = trained(
        learner_of(perceptron(), OPTIMIZERS[name], device="cpu:0"), flatten(perceptron())
    )
    expected = trained(learner_of(perceptron(), OPTIMIZERS[name]), flatten(perceptron()))
    assert np.array_equal(found, expected)


def test_a_read_only_center_is_copied_to_another_device():
    theta = flatten(perceptron())
    theta.flags.writeable = False
    here, there = learner_of(perceptron()), learner_of(perceptron(), device="cpu:0")
    indices = np.arange(8)
    assert np.array_equal(
        here.gradient(theta, indices, 0).vector, there.gradient(theta, indices, 0).vector
    )


def test_a_gradient_that_others_have_added_to_is_the_one_that_counts():
    # Ranks of a group sum their gradients in place.
    here, there = learner_of(perceptron()), learner_of(perceptron(), device="cpu:0")
    theta, changes = flatten(perceptron()), []
    for learner in (here, there):
        gradient = learner.gradient(theta.copy(), np.arange(8), 0)
        gradient.vector[:] *= 2
        changes.append(learner.update(theta.copy(), gradient.vector, 0.0))
    assert np.array_equal(*changes)


def test_autocast_computes_in_bfloat16():
    seen = []

    class Watching(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            seen.append(output.dtype)
            return output.float()

    data = torch.randn(16, 4), torch.randint(0, 3, (16,))
    learner = learner_of(Watching(4, 3), data=data, autocast="bfloat16")
    gradient = learner.gradient(flatten(Watching(4, 3)), np.arange(8), 0)
    assert seen == [torch.bfloat16]
    assert gradient.vector.dtype == np.float32 and np.isfinite(gradient.vector).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gpu_trains_as_the_cpu_does(name):
    found = trained(
        learner_of(perceptron(), OPTIMIZERS[name], device="cuda:0"), flatten(perceptron())
    )
    expected = trained(learner_of(perceptron(), OPTIMIZERS[name]), flatten(perceptron()))
    assert relative(found, expected) < 1e-4


def test_devices_that_cannot_train_are_refused_before_anything_starts(monkeypatch):
    trainer = Trainer(perceptron(), cross_entropy, SGD, device="cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch sees no GPU"):
        trainer.fit(table())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="torch sees cuda:0 to cuda:0"):
        trainer.fit(table())
    with pytest.raises(UsageError, match="Ray chooses the GPU of each worker; give cuda, not"):
        Trainer(perceptron(), cross_entropy, SGD, backend="ray", device="cuda:1").fit(table())


def test_workers_have_the_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of("cuda", worker) for worker in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_of("cuda:1", 0) == "cuda:1"
    assert device_of("cpu", 1) == "cpu"
