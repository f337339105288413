"""Callbacks of a training run: what they are told, how they end it, and what happens to faults."""

import itertools

import numpy as np
import pytest
import torch

import dovetail as dt
from dovetail.errors import CallbackError, ProcessError, UsageError
from dovetail.training.modules import flatten
from dovetail.training.request import TrainRequest
from dovetail.training.trainer import train
from tests.support.training_models import SGD, Numbers, cross_entropy, perceptron, table

pytestmark = pytest.mark.usefixtures("forks")


class Kept(dt.Callback):
    """Keeps all that it is told. Returns `answer` from the epoch, or the commit, of that number."""

    def __init__(self, stop_epoch=None, stop_commit=None, answer=True):
        self.epochs, self.commits = [], []
        self.stop_epoch, self.stop_commit, self.answer = stop_epoch, stop_commit, answer

    def on_epoch(self, state):
        self.epochs.append(state)
        return self.answer if len(self.epochs) == self.stop_epoch else None

    def on_commit(self, state):
        self.commits.append(state)
        return self.answer if len(self.commits) == self.stop_commit else None


def request(*callbacks, model=None, **options):
    defaults = {"rule": "adag-agn", "workers": 2, "backend": "simulated", "batch": 8, "epochs": 3}
    options = {"loss": cross_entropy, "optimizer": SGD, **defaults, **options}
    return TrainRequest(model=model or perceptron(), callbacks=callbacks, **options)


@pytest.mark.parametrize("backend", ["simulated", "threads", "processes"])
def test_each_epoch_and_each_commit_is_told_once_and_in_order(backend):
    kept = Kept()
    history = train(request(kept, backend=backend, metrics=["accuracy"]), table(), table(8, seed=3))
    rows = history.outcome.rows
    assert [state.commits for state in kept.commits] == [(row,) for row in rows]
    assert [s.samples for s in kept.commits] == list(itertools.accumulate(r.samples for r in rows))
    assert [state.epoch for state in kept.epochs] == [1, 2, 3]
    assert [state.samples for state in kept.epochs] == [40, 80, 120]
    assert sum((state.commits for state in kept.epochs), ()) == rows
    assert all(state.commits[-1].clock == state.clock for state in kept.epochs)
    # The last epoch's figures are those of the trained model, whenever they were computed.
    assert kept.epochs[-1].figures == history.outcome.evaluations[-1].figures
    assert set(kept.epochs[0].figures) == {"loss", "accuracy"}


def test_an_epoch_is_told_after_the_validation_at_its_end():
    kept = Kept()
    history = train(request(kept), table(), table(8, seed=3))
    assert [s.figures for s in kept.epochs] == [e.figures for e in history.outcome.evaluations]
    first = kept.epochs[0].commits
    expected = np.average([r.loss for r in first], weights=[r.samples for r in first])
    assert kept.epochs[0].loss == pytest.approx(expected)
    assert kept.commits[0].loss == history.outcome.rows[0].loss


def test_without_a_validation_set_epochs_are_told_all_the_same():
    kept = Kept()
    train(request(kept, workers=1, window=5), table())
    assert [(s.epoch, s.figures, len(s.commits)) for s in kept.epochs] == [
        (epoch, {}, 1) for epoch in (1, 2, 3)
    ]


@pytest.mark.parametrize("backend", ["simulated", "threads", "processes"])
def test_a_callback_that_returns_true_ends_the_run(backend):
    kept, model = Kept(stop_epoch=2), perceptron()
    history = train(request(kept, model=model, backend=backend, epochs=500), table(), table(8))
    assert history.outcome.stopped and not history.interrupted
    assert history.outcome.samples < 500 * 40
    assert np.array_equal(flatten(model), history.outcome.theta)
    # The same commits count in the history and in what was told.
    assert [state.commits[0] for state in kept.commits] == list(history.outcome.rows)


def test_a_commit_can_end_the_run_too():
    kept = Kept(stop_commit=7)
    history = train(request(kept, epochs=500), table())
    # In virtual time commits are told at the end of each epoch, which is five of them.
    assert history.outcome.stopped and len(history.outcome.rows) == 10


@pytest.mark.parametrize(("answer", "stops"), [(np.float32(1) < 2, True), (7, False), ("", False)])
def test_only_true_ends_the_run(answer, stops):
    kept = Kept(stop_epoch=1, answer=answer)
    assert train(request(kept), table(), table(8)).outcome.stopped == stops


class Breaks(dt.Callback):
    def __init__(self, error):
        self.error, self.calls = error, 0

    def on_epoch(self, state):
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("backend", ["simulated", "threads", "processes"])
def test_what_a_callback_raises_ends_the_run_and_the_model_keeps_its_result(backend, tmp_path):
    before, model = flatten(perceptron()), perceptron()
    breaks = Breaks(ValueError("no space for figures"))
    options = {"backend": backend, "folder": tmp_path, "epochs": 500}
    with pytest.raises(CallbackError) as caught:
        train(request(breaks, model=model, **options), table())
    said = caught.value.line
    assert said.startswith("on_epoch of Breaks failed: ValueError: no space for figures (at test_")
    assert breaks.calls == 1
    trained = flatten(model)
    assert not np.array_equal(trained, before)
    # And the folder goes on from there.
    kept = Kept(stop_commit=1)
    resumed = train(request(kept, resume=True, **options), table())
    assert kept.commits[0].samples > 40
    assert resumed.outcome.samples < 500 * 40


def test_a_trainer_raises_the_callbacks_own_exception():
    error = KeyError("mine")
    trainer = dt.Trainer(
        perceptron(), cross_entropy, SGD, workers=1, backend="simulated", callbacks=[Breaks(error)]
    )
    with pytest.raises(KeyError) as caught:
        trainer.fit(table())
    assert caught.value is error


def test_an_error_of_this_package_within_a_callback_is_told_as_the_callbacks():
    breaks = Breaks(UsageError("workers", "are too many"))
    with pytest.raises(CallbackError, match="on_epoch of Breaks failed: workers: are too many"):
        train(request(breaks), table())


class Killed(Exception):
    """Ends a run as if its process had been killed."""


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_a_resumed_run_tells_only_what_is_new(backend, tmp_path):
    numbers = itertools.count(1)

    def killed(output, labels):
        if torch.is_grad_enabled() and output.requires_grad and next(numbers) == 9:
            raise Killed
        return cross_entropy(output, labels)

    options = {"rule": "sync", "workers": 1, "backend": backend, "folder": tmp_path}
    with pytest.raises(ProcessError, match="Killed"):
        train(request(loss=killed, **options), table())
    kept = Kept()
    history = train(request(kept, resume=True, **options), table())
    old = len(history.outcome.rows) - len(kept.commits)
    assert 0 < old < 10
    assert [state.commits[0] for state in kept.commits] == list(history.outcome.rows[old:])
    assert kept.commits[0].samples == 8 * (old + 1)
    assert [state.epoch for state in kept.epochs] == [2, 3]
    assert [len(state.commits) for state in kept.epochs] == [5, 5]


def test_commits_that_a_server_without_a_log_has_lost_are_counted_once(tmp_path):
    """Their samples are committed again, and no epoch is told twice."""
    from dovetail.training.callbacks import CallbackCaller
    from dovetail.training.records import Row
    from dovetail.training.trainer import RunMonitor

    def row(clock):
        return Row(clock, 0, clock, 0, 1, 10, 1.0, 1.0, 0.0, 0.0, 0.0)

    kept = Kept()
    monitor = RunMonitor(lambda _: {}, "loss", callbacks=CallbackCaller([kept], 20))
    monitor.on_rows([row(1), row(2), row(3)])
    monitor.on_forgotten(1)
    assert monitor.rows == [row(1)]
    monitor.on_rows([row(2), row(3), row(4)])
    assert [state.epoch for state in kept.epochs] == [1, 2]
    assert [state.samples for state in kept.commits] == [10, 20, 30, 20, 30, 40]


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        ([print], "is no dovetail.Callback"),
        ([Kept], "is a class; give an instance"),
        (Kept(), "must be a list"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks, says):
    asked = TrainRequest(perceptron(), cross_entropy, SGD, callbacks=callbacks)
    with pytest.raises(UsageError, match=says) as caught:
        train(asked, table())
    assert caught.value.option == "callbacks"


def test_a_stream_of_unknown_length_has_commits_and_no_epochs():
    class OfCommits(dt.Callback):
        seen = 0

        def on_commit(self, state):
            self.seen = state.samples

    features, labels = table(rows=22)
    counting = OfCommits()
    train(request(counting, epochs=1), Numbers(features, labels))
    assert counting.seen == 22
    with pytest.raises(UsageError, match="on_epoch needs a data set of known length"):
        train(request(Kept(), epochs=1), Numbers(features, labels))
