"""The trainer on backends in one process: exact results, early stop, resume, what it leaves."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import DivergedError
from dovetail.frontends import Adam
from dovetail.training.backends.contract import Watcher
from dovetail.training.modules import ModuleLearner, flatten
from dovetail.training.records import Job
from dovetail.training.trainer import DivergenceWarning, Trainer
from tests.support.run_order import order
from tests.support.training_models import (
    OPTIMIZERS,
    SGD,
    Numbers,
    cross_entropy,
    perceptron,
    relative,
    table,
)

PUSHING = ["downpour", "dynsgd", "agn", "adag", "adag-agn", "ssp", "hogwild", "dc-asgd"]


def fit(model, optimizer=SGD, rule="adag-agn", workers=1, data=None, validation=None, **options):
    data = table() if data is None else data
    options = {"backend": "simulated", "batch": 8, **options}
    trainer = Trainer(model, cross_entropy, optimizer, rule, workers, **options)
    return trainer.fit(data, validation)


def plainly(model, optimizer, data, epochs=1, batch=8, seed=0):
    """torch's own loop over the run's samples, in their order, batches across epochs' ends."""
    features, labels = data
    job = Job("", 1, len(labels), epochs, batch, seed=seed)
    positions = np.concatenate([order(job, epoch) for epoch in range(epochs)])
    made = optimizer(model.parameters())
    for start in range(0, len(positions), batch):
        rows = positions[start : start + batch]
        made.zero_grad()
        cross_entropy(model(features[rows]), labels[rows]).backward()
        made.step()
    return flatten(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_torch_optim(name):
    model = perceptron()
    history = fit(model, OPTIMIZERS[name], epochs=3)
    expected = plainly(perceptron(), OPTIMIZERS[name], table(), epochs=3)
    assert relative(flatten(model), expected) < 1e-6
    assert relative(history.outcome.theta, expected) < 1e-6


@pytest.mark.parametrize("rule", PUSHING)
def test_one_worker_is_torch_optim_by_every_rule_that_pushes(rule):
    model = perceptron()
    fit(model, rule=rule, epochs=2)
    assert relative(flatten(model), plainly(perceptron(), SGD, table(), epochs=2)) < 1e-6


@pytest.mark.parametrize("rule", [rule for rule in PUSHING if rule != "dc-asgd"])
def test_one_worker_adds_its_updates_bit_for_bit(rule):
    """The server of DC-ASGD makes the update itself, of the gradient."""
    model, theta = perceptron(), flatten(perceptron())
    fit(model, OPTIMIZERS["adam"], rule, epochs=2)
    learner = ModuleLearner(perceptron(), cross_entropy, OPTIMIZERS["adam"], table())
    for epoch in range(2):
        for rows in order(Job("", 1, 40, 2, 8), epoch).reshape(5, 8):
            theta += learner.update(theta, learner.gradient(theta, rows, epoch).vector, epoch)
    assert np.array_equal(flatten(model), theta)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("workers", [2, 4])
def test_synchronous_workers_are_one_large_batch(name, workers):
    model = perceptron()
    history = fit(model, OPTIMIZERS[name], "sync", workers, data=table(rows=64), epochs=2)
    large = plainly(perceptron(), OPTIMIZERS[name], table(rows=64), epochs=2, batch=8 * workers)
    assert relative(flatten(model), large) < 1e-6
    assert history.outcome.clock == 2 * 64 // (8 * workers)


def test_the_last_batch_of_an_epoch_is_short_and_counts():
    model = perceptron()
    history = fit(model, data=table(rows=21), epochs=2)
    assert history.columns["samples"].tolist() == [8, 8, 5, 8, 8, 5]
    features, labels = table(rows=21)
    made = perceptron()
    optimizer = SGD(made.parameters())
    for epoch in range(2):
        rows = order(Job("", 1, 21, 2, 8), epoch)
        for start in (0, 8, 16):
            part = rows[start : start + 8]
            optimizer.zero_grad()
            cross_entropy(made(features[part]), labels[part]).backward()
            optimizer.step()
    assert relative(flatten(model), flatten(made)) < 1e-6


def test_a_schedule_falls_over_the_epochs_of_a_run():
    model = perceptron()
    fit(model, schedule=lambda epoch: float(epoch < 1), epochs=3)
    assert relative(flatten(model), plainly(perceptron(), SGD, table())) < 1e-6


@pytest.mark.parametrize("workers", [1, 3])
def test_a_stream_of_unknown_length_trains_each_item_of_each_epoch_once(workers):
    features, labels = table(rows=22)
    stream = Numbers(features, labels)
    model = perceptron()
    history = fit(model, workers=workers, data=stream, epochs=2)
    assert history.outcome.samples == 44 == history.columns["samples"].sum()
    if workers == 1:
        made = perceptron()
        optimizer = SGD(made.parameters())
        for rows in torch.arange(44).remainder(22).split(8):
            optimizer.zero_grad()
            cross_entropy(made(features[rows]), labels[rows]).backward()
            optimizer.step()
        assert relative(flatten(model), flatten(made)) < 1e-6


def test_a_record_and_a_name_stand_for_torchs_optimizer():
    found = []
    for optimizer, lr in ((OPTIMIZERS["adam"], None), ("adam", 1e-2), (Adam(1e-2), None)):
        model = perceptron()
        fit(model, optimizer, lr=lr)
        found.append(flatten(model))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_figures_are_means_over_the_validation_set_each_epoch():
    model, (features, labels) = perceptron(), table(rows=30, seed=3)
    history = fit(
        model, data=table(), validation=(features, labels), metrics=["accuracy"], epochs=2
    )
    assert [e.samples for e in history.outcome.evaluations] == [40, 80]
    output = model(features).detach()
    figures = history.outcome.evaluations[-1].figures
    assert figures["accuracy"] == pytest.approx(float((output.argmax(1) == labels).float().mean()))
    assert figures["loss"] == pytest.approx(float(cross_entropy(output, labels)), rel=1e-5)


def test_metrics_may_be_callables_and_evaluations_come_after_so_many_samples():
    history = fit(
        perceptron(), validation=table(seed=3), epochs=2, validate=16,
        metrics={"half": lambda output, labels: 0.5, "rows": lambda output, labels: len(output)},
    )  # fmt: skip
    assert [e.samples for e in history.outcome.evaluations] == [16, 32, 48, 64, 80]
    assert history.outcome.evaluations[0].figures["half"] == 0.5


def test_early_stop_ends_the_run_and_keeps_the_best():
    """The loss is best after the second evaluation of a figure that is made up."""
    values, seen = [3.0, 1.0, 2.0, 2.0, 2.0, 2.0], []

    def figure(output, labels):
        return values[len(seen)]

    def keep(theta, clock, samples, seconds):
        seen.append(theta.copy())
        return {}

    model = perceptron()
    trainer = Trainer(
        model, cross_entropy, SGD, workers=1, backend="simulated", batch=8, epochs=6,
        metrics={"error": figure}, monitor="error", patience=2,
    )  # fmt: skip
    history = trainer.fit(table(), table(), watcher=Watcher(evaluate=keep))
    assert history.outcome.stopped
    assert [e.figures["error"] for e in history.outcome.evaluations] == [3.0, 1.0, 2.0, 2.0]
    assert np.array_equal(flatten(model), seen[1])
    assert history.outcome.samples == 4 * 40


def test_without_patience_the_last_center_is_the_result():
    model = perceptron()
    fit(model, validation=table(), metrics={"rise": lambda output, labels: 0.0}, monitor="rise")
    assert relative(flatten(model), plainly(perceptron(), SGD, table())) < 1e-6


def test_ctrl_c_keeps_the_best_center_so_far():
    kept = []

    def interrupt(theta, clock, samples, seconds):
        kept.append(theta)
        if len(kept) == 3:
            raise KeyboardInterrupt
        return {}

    model = perceptron()
    trainer = Trainer(model, cross_entropy, SGD, workers=1, backend="simulated", batch=8, epochs=9)
    history = trainer.fit(table(), table(), watcher=Watcher(evaluate=interrupt))
    assert history.interrupted and history.outcome.stopped
    assert np.array_equal(flatten(model), kept[1])
    assert history.outcome.samples == 80


def test_ctrl_c_before_there_is_anything_goes_through():
    def interrupt(rows):
        raise KeyboardInterrupt

    trainer = Trainer(
        perceptron(), cross_entropy, SGD, workers=1, backend="simulated", validate=999
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(table(), watcher=Watcher(rows=interrupt))


def test_the_users_random_numbers_and_mode_are_left_alone():
    model = perceptron().eval()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit(model, validation=table())
    assert torch.equal(torch.rand(3), expected)
    assert not model.training


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.inner = perceptron()
        self.drop = nn.Dropout(0.5)

    def forward(self, features):
        return self.drop(self.inner(self.norm(features)))


def test_statistics_of_batch_norms_are_those_of_the_training_data():
    model, (features, labels) = Normed(), table()
    fit(model, data=(3 * features + 2, labels), validation=table(), workers=2)
    batches = (3 * features + 2).split(8)
    mean = torch.stack([b.mean(0) for b in batches]).mean(0)
    var = torch.stack([b.var(0) for b in batches]).mean(0)
    assert torch.allclose(model.norm.running_mean, mean, atol=1e-5)
    assert torch.allclose(model.norm.running_var, var, atol=1e-4)
    assert model.norm.momentum == 0.1 and model.training


def test_a_run_says_what_it_was():
    history = fit(perceptron(), workers=2, epochs=2, window=3, name="mine")
    assert history.name == "mine" and history.backend == "simulated"
    assert history.rule == "adag-agn" and history.workers == 2
    assert [history.of_job(f) for f in ("samples", "epochs", "batch", "window")] == [40, 2, 8, 3]


def test_rules_made_for_long_windows_get_one():
    windows = {
        rule: fit(perceptron(), rule=rule, workers=2, data=table(200)).of_job("window")
        for rule in ("averaging", "one-shot", "downpour")
    }
    assert windows == {"averaging": 10, "one-shot": None, "downpour": 1}


def too_steep(epochs, rule="downpour"):
    """A linear model whose squared error grows with every step."""
    features, labels = table()
    trainer = Trainer(
        nn.Linear(6, 1), nn.functional.mse_loss, "sgd", rule, 4, "simulated", lr=0.55,
        epochs=epochs, batch=4,
    )  # fmt: skip
    return trainer.fit((features, labels[:, None].float()))


def test_a_loss_that_grows_is_warned_of_with_what_to_do():
    with pytest.warns(DivergenceWarning, match=r"the loss went from .* to .*; use adag-agn: .*"):
        too_steep(epochs=8)


def test_a_run_whose_commits_are_not_finite_any_more_has_diverged():
    with pytest.warns(DivergenceWarning), pytest.raises(DivergedError) as caught:
        too_steep(epochs=200)
    assert caught.value.rule == "downpour"
    assert "not finite" in caught.value.detail
    assert caught.value.advice.startswith("use adag-agn")
    assert "NaN or infinities in the data" in caught.value.advice


def test_a_run_that_converges_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(perceptron(), workers=2, epochs=20)
