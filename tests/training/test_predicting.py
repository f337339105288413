"""Predictions and figures by many workers: those of the plain model, in the data set's order."""

import os
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from dovetail.errors import (
    ModelError,
    NoWorkersError,
    ProcessDiedError,
    ProcessError,
    UsageError,
)
from dovetail.training.backends.contract import FailurePolicy
from dovetail.training.predicting import _FarPool, _in_order
from dovetail.training.trainer import Trainer
from tests.support.training_models import SGD, Numbers, cross_entropy, table

pytestmark = pytest.mark.usefixtures("forks")
ROWS, BATCH = 43, 8


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    model(torch.randn(20, 6))  # statistics of its own
    return model


def trainer(model, backend="simulated", workers=3, **options):
    options = {"batch": BATCH, **options}
    return Trainer(model, cross_entropy, SGD, workers=workers, backend=backend, **options)


def plainly(model, features):
    """The model's outputs in evaluation mode, batch by batch, on one thread as workers have it."""
    mode, threads = model.training, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return torch.cat([model.eval()(part) for part in features.split(BATCH)])
    finally:
        model.train(mode)
        torch.set_num_threads(threads)


class Items(Dataset):
    def __init__(self, features, labels):
        self.features, self.labels = features, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.features[row], self.labels[row]


@pytest.mark.parametrize("backend", ["simulated", "threads", "processes"])
def test_outputs_are_the_plain_models_in_the_order_of_the_data_set(backend):
    model, (features, labels) = network(), table(ROWS)
    expected = plainly(model, features)
    used = trainer(model, backend, workers=2)
    found = used.predict((features, labels))
    assert torch.equal(found, expected) and not found.requires_grad
    if backend != "processes":
        assert torch.equal(used.predict(features), expected)
        assert torch.equal(used.predict(features.numpy()), expected)
        assert torch.equal(used.predict(Items(features, labels)), expected)
        assert torch.equal(used.predict(Numbers(features, labels)), expected)
    assert model.training


def test_figures_are_means_over_the_samples():
    model, (features, labels) = network(), table(ROWS)
    expected = plainly(model, features)
    figures = [
        trainer(model, "threads", workers, metrics=["accuracy"]).evaluate((features, labels))
        for workers in (1, 2, 4)
    ]
    assert figures[0] == figures[1] == figures[2]
    assert figures[0]["loss"] == pytest.approx(float(cross_entropy(expected, labels)), rel=1e-6)
    right = (expected.argmax(1) == labels).double().mean()
    assert figures[0]["accuracy"] == pytest.approx(float(right))


def test_figures_after_a_run_are_those_of_its_last_evaluation():
    model, data = network(), table(ROWS)
    used = trainer(model, metrics=["accuracy"], rule="downpour", epochs=2)
    history = used.fit(data, table(24, seed=1))
    last = history.outcome.evaluations[-1].figures
    assert used.evaluate(table(24, seed=1)) == pytest.approx(last)


SECOND_IS_DONE = threading.Event()


class SlowAtFirst(nn.Module):
    """The first batch waits until another worker has done the second one."""

    def forward(self, inputs):
        if float(inputs[0, 0]) == 0:
            assert SECOND_IS_DONE.wait(30)
        else:
            SECOND_IS_DONE.set()
        return inputs


def test_a_batch_that_comes_late_stands_where_it_belongs():
    rows = torch.arange(5 * BATCH, dtype=torch.float32)[:, None]
    assert torch.equal(trainer(SlowAtFirst(), "threads").predict(rows), rows)


class Branches(nn.Module):
    def forward(self, inputs):
        return {"double": 2 * inputs, "pair": (inputs[:, 0], [inputs + 1])}


def test_outputs_of_several_tensors_keep_their_structure():
    features = table(ROWS)[0]
    found = trainer(Branches()).predict(features)
    assert torch.equal(found["double"], 2 * features)
    assert torch.equal(found["pair"][0], features[:, 0])
    assert torch.equal(found["pair"][1][0], features + 1)


class Dying(nn.Module):
    """Ends its process at rows of 13, as often as the folder has no more files than `deaths`."""

    def __init__(self, folder, deaths):
        super().__init__()
        self.folder, self.deaths = str(folder), deaths

    def forward(self, inputs):
        if (inputs == 13).any() and len(os.listdir(self.folder)) < self.deaths:
            (Path(self.folder) / f"{os.getpid()}").touch()
            os._exit(3)
        return inputs


def test_a_batch_of_a_dead_process_is_given_to_another(tmp_path):
    rows = torch.arange(40, dtype=torch.float32)[:, None]
    used = trainer(Dying(tmp_path, 1), "processes", workers=2)
    assert torch.equal(used.predict(rows), rows)
    assert len(os.listdir(tmp_path)) == 1


class MadeUp:
    """Workers that double numbers; those of these numbers die at their first portion."""

    def __init__(self, dying):
        self.dying, self.given, self.ended = set(dying), {}, []

    def launch(self, number):
        return number

    def send(self, worker, portion):
        self.given[worker] = portion

    def ready(self, workers):
        return workers[-1:]

    def receive(self, worker):
        if worker in self.dying:
            raise ProcessDiedError(f"worker {worker}", "killed by SIGKILL")
        return 2 * self.given.pop(worker)

    def end(self, worker):
        self.ended.append(worker)


@pytest.mark.parametrize(
    ("dying", "restarts", "losses", "completes"),
    [
        ((), 0, 0, True), ((0,), 0, 0, False), ((1,), 0, 1, True), ((0, 1), 0, 2, False),
        ((0, 1), 2, 0, True), ((0, 1, 2, 3), 2, 0, False), ((0, 2), 1, 1, True),
    ],
)  # fmt: skip
def test_the_policy_says_how_many_workers_may_die(dying, restarts, losses, completes):
    made_up = MadeUp(dying)
    policy = FailurePolicy(worker_restarts=restarts, worker_losses=losses)
    with closing(_FarPool(made_up, 2, policy)) as pool:
        if completes:
            assert list(_in_order(range(9), pool)) == list(range(0, 18, 2))
        else:
            with pytest.raises(NoWorkersError, match="SIGKILL"):
                list(_in_order(range(9), pool))
    assert made_up.ended[: len(dying)] == list(dying) or not completes
    assert sorted(made_up.ended) == list(range(2 + min(restarts, len(dying))))


class Failing(nn.Module):
    def forward(self, inputs):
        raise ArithmeticError("at this very batch")


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_an_exception_in_a_worker_comes_with_its_traceback(backend):
    with pytest.raises(ProcessError, match="at this very batch") as caught:
        trainer(Failing(), backend, workers=1).predict(table(ROWS)[0])
    assert "in forward" in caught.value.traceback


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, inputs):
        return self.what


@pytest.mark.parametrize(
    ("model", "data", "options", "error", "words"),
    [
        (Returns(torch.ones(())), table(8)[0], {}, ModelError, "shape () for 8 samples"),
        (Returns((torch.ones(8), 3.0)), table(8)[0], {}, ModelError, "returns a float"),
        (Returns(torch.ones(8, 1)), table(ROWS)[0], {}, ModelError, "for 3 samples"),
        (len, table(8)[0], {}, ModelError, "no torch.nn.Module"),
        (network(), [], {}, UsageError, "is empty"),
        (network(), Numbers(*table(0)), {}, UsageError, "is empty"),
        (network(), iter([1]), {}, UsageError, "only once"),
        (network(), table(8)[0], {"backend": "clouds"}, UsageError, "there is no 'clouds'"),
        (network(), table(8)[0], {"backend": print}, UsageError, "name a backend"),
        *(
            (
                network(), table(8)[0], {"backend": backend, "backend_options": {"speed": 1}},
                UsageError, f"speed: the {backend} backend has no such option",
            )
            for backend in ("simulated", "threads", "processes")
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_an_error_of_its_kind(model, data, options, error, words):
    with pytest.raises(error) as caught:
        trainer(model, **options).predict(data)
    assert words in str(caught.value)


def test_random_numbers_of_the_caller_are_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trainer(network_of_noise()).predict(np.zeros((ROWS, 6), np.float32))
    assert torch.equal(torch.get_rng_state(), before)


def network_of_noise():
    state = torch.get_rng_state()
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    torch.set_rng_state(state)
    return model
