"""Evaluations where the workers compute. A CPU under another name plays the GPU, and torch's "meta"
device shows that everything has moved."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.cli.training import Setup
from dovetail.cli.training_run import suggest_and_show
from dovetail.errors import UsageError
from dovetail.training import modules, preparing, validation
from dovetail.training.datasets import open_dataset
from dovetail.training.modules import flatten
from dovetail.training.records import Job
from dovetail.training.request import TrainRequest
from dovetail.training.trainer import Trainer
from dovetail.training.validation import Evaluator, accuracy
from tests.support.run_order import order
from tests.support.training_models import OPTIMIZERS, SGD, cross_entropy, perceptron, table

EPOCHS, BATCH = 3, 8


@pytest.fixture
def played_gpu(monkeypatch):
    """Has device="cuda" mean "cpu:0", which is another device than "cpu" to learners and to the
    evaluator. Returns the devices that the evaluator has moved batches to."""
    seen, to_device = set(), validation.to_device

    def moved(batch, device):
        seen.add(str(device))
        return to_device(batch, device)

    monkeypatch.setattr(validation, "to_device", moved)
    monkeypatch.setattr(preparing, "_check_device", lambda request: None)
    for module in (modules, preparing):
        monkeypatch.setattr(module, "device_of", lambda text, worker: text.replace("cuda", "cpu:0"))
    return seen


class Called(nn.Sequential):
    """Counts its calls. A copy counts its own."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def normed(seed=0):
    """A network with a batch norm."""
    torch.manual_seed(seed)
    return Called(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def fitted(model, optimizer=SGD, **settings):
    """The history of one worker, which is evaluated after each epoch."""
    trainer = Trainer(
        model, cross_entropy, optimizer, "adag-agn", 1, "simulated",
        epochs=EPOCHS, batch=BATCH, window=1, metrics=("accuracy",), **settings,
    )  # fmt: skip
    return trainer.fit(table(), table(seed=1))


def cast(dtype):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(dtype))


def plainly(model, optimizer, train_dtype="", evaluate_dtype=""):
    """torch's own loop over the run's samples, in their order. Returns the figures after each
    epoch."""
    (features, labels), (held, expected) = table(), table(seed=1)
    job = Job("", 1, len(labels), EPOCHS, BATCH, seed=0)
    made, figures = optimizer(model.parameters()), []
    for epoch in range(EPOCHS):
        for rows in order(job, epoch).reshape(-1, BATCH):
            made.zero_grad()
            with cast(train_dtype):
                loss = cross_entropy(model(features[rows]), labels[rows])
            loss.backward()
            made.step()
        figures.append({"loss": 0.0, "accuracy": 0.0})
        for start in range(0, len(held), BATCH):
            part = slice(start, start + BATCH)
            with torch.no_grad(), cast(evaluate_dtype):
                output = model(held[part])
                loss = cross_entropy(output, expected[part])
            figures[-1]["loss"] += float(loss) * BATCH / len(held)
            figures[-1]["accuracy"] += accuracy(output, expected[part]) * BATCH / len(held)
    return figures


def figures_of(history):
    return [evaluation.figures for evaluation in history.outcome.evaluations]


def are_close(some, others):
    return all(
        one == pytest.approx(other, rel=1e-5) for one, other in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_evaluations_on_a_device_are_torchs_own_under_autocast_as_training_is(name, played_gpu):
    model, plain = perceptron(), perceptron()
    history = fitted(model, OPTIMIZERS[name], device="cuda", autocast="bfloat16")
    expected = plainly(plain, OPTIMIZERS[name], "bfloat16", "bfloat16")
    assert len(expected) == EPOCHS and are_close(figures_of(history), expected)
    assert played_gpu == {"cpu:0"}
    assert not are_close(figures_of(history), plainly(perceptron(), OPTIMIZERS[name], "bfloat16"))
    assert np.allclose(flatten(model), flatten(plain), rtol=1e-4, atol=1e-6)


def test_evaluations_on_the_cpu_have_the_models_own_type(played_gpu):
    history = fitted(perceptron(), device="cpu", autocast="bfloat16")
    assert are_close(figures_of(history), plainly(perceptron(), SGD, "bfloat16"))
    assert played_gpu == set()


def test_batch_norms_are_computed_on_a_device_and_the_model_stays_on_the_cpu(played_gpu):
    models = {device: normed() for device in ("cpu", "cuda")}
    buffers = {device: list(model.buffers()) for device, model in models.items()}
    figures = {device: figures_of(fitted(m, device=device)) for device, m in models.items()}
    assert figures["cuda"] == figures["cpu"] and played_gpu == {"cpu:0"}
    assert models["cpu"].calls > models["cuda"].calls == 0
    assert not torch.equal(models["cuda"][1].running_mean, torch.zeros(8))
    for here, there in zip(models["cpu"].buffers(), models["cuda"].buffers(), strict=True):
        assert torch.equal(here, there)
    # The caller may hold the buffers, which are written to and not replaced.
    assert all(a is b for a, b in zip(models["cuda"].buffers(), buffers["cuda"], strict=True))


def test_statistics_of_batch_norms_are_computed_under_autocast():
    model, (features, labels) = normed(), table()
    data = open_dataset((features, labels))
    evaluator = Evaluator(
        copy.deepcopy(model), cross_entropy, {}, data, data, BATCH,
        device="cpu:0", autocast="bfloat16",
    )  # fmt: skip
    evaluator.refresh(model)
    with torch.no_grad():
        exact = model[0](features).mean(0)
        with cast("bfloat16"):
            expected = model[0](features).float().mean(0)
    assert torch.allclose(model[1].running_mean, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model[1].running_mean, exact, rtol=1e-5, atol=1e-6)


class Moved(nn.Module):
    """Notes where its input, its parameter and its buffer are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))
        self.seen = set()

    def forward(self, x):
        tensors = x, self.weight, self.shift
        self.seen.add(tuple(tensor.device.type for tensor in tensors))
        return x * self.weight + self.shift


def test_model_and_batches_are_on_the_device():
    data, model, seen = open_dataset(torch.randn(10, 3)), Moved(), []

    def loss(output):
        seen.append(output.device.type)
        return torch.tensor(2.0)  # a number, which meta tensors do not have

    evaluator = Evaluator(model, loss, {}, data, data, 4, device="meta")
    evaluator.try_out()
    assert evaluator(np.ones(3, np.float32)) == {"loss": 2.0}
    assert model.seen == {("meta",) * 3} and seen == ["meta"] * 4


@pytest.mark.parametrize(("norm", "place"), [(nn.Identity, "cpu"), (nn.BatchNorm1d, "meta")])
def test_a_model_that_nothing_is_computed_of_takes_no_memory_of_the_device(norm, place):
    model = nn.Sequential(nn.Linear(3, 3), norm(3))
    Evaluator(model, cross_entropy, {}, open_dataset(torch.randn(10, 3)), None, 4, device="meta")
    assert model[0].weight.device.type == place


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_the_callers_process_evaluates_on_the_first_of_the_gpus_or_on_the_named_one(
    device, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    request = TrainRequest(perceptron(), cross_entropy, SGD, device=device)
    assert preparing._device_here(request) == device.replace("cuda", "cuda:0").replace(":0:", ":")


@pytest.mark.parametrize(("gpus", "here"), [(0, "cpu"), (2, "cuda:0")])
def test_rays_caller_evaluates_on_its_cpu_if_it_has_no_gpu(gpus, here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    request = TrainRequest(perceptron(), cross_entropy, SGD, backend="ray", device="cuda")
    assert preparing._device_here(request) == here


def test_a_machine_without_a_gpu_suggests_nothing_for_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = TrainRequest(perceptron(), cross_entropy, SGD, backend="ray", device="cuda")
    with pytest.raises(UsageError, match="--suggest: simulates on this machine, where torch sees"):
        suggest_and_show("models:digits", Setup(request, table()), 1.0, False, None)


def test_random_states_of_gpus_are_kept(played_gpu, monkeypatch):
    kept, fork = [], torch.random.fork_rng

    def forked(devices):
        kept.append(list(devices))
        return fork(devices=[])

    monkeypatch.setattr(torch.random, "fork_rng", forked)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda", "cpu"):
        fitted(perceptron(), device=device)
    assert kept == [[0, 1], []]


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", ["", "bfloat16"])
def test_a_gpu_evaluates_as_the_cpu_does(autocast):
    model, data, theta = normed(), open_dataset(table()), flatten(normed(seed=1))
    found = [
        Evaluator(copy.deepcopy(model), cross_entropy, {"accuracy": accuracy}, data, data, BATCH,
                  device=device, autocast=autocast)(theta)
        for device in ("cpu", "cuda:0")
    ]  # fmt: skip
    assert found[1] == pytest.approx(found[0], rel=1e-2 if autocast else 1e-5)


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_the_run_on_the_cpu_and_leaves_the_random_state():
    models = {device: normed() for device in ("cpu", "cuda")}
    before = torch.cuda.get_rng_state(0)
    figures = {device: figures_of(fitted(m, device=device)) for device, m in models.items()}
    assert torch.equal(torch.cuda.get_rng_state(0), before)
    for here, there in zip(figures["cpu"], figures["cuda"], strict=True):
        assert there == pytest.approx(here, rel=1e-3)
    assert torch.allclose(models["cuda"][1].running_mean, models["cpu"][1].running_mean, atol=1e-4)
