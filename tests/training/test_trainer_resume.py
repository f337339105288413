"""A run's folder: a killed run goes on where it was, another one is refused."""

import itertools
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.errors import (
    FileFormatError,
    JournalError,
    ProcessError,
    RunMismatchError,
    UsageError,
)
from dovetail.training.backends.contract import Watcher
from dovetail.training.center import Center
from dovetail.training.ledger import Ledger
from dovetail.training.modules import flatten
from dovetail.training.records import Job
from dovetail.training.restoring import check_record
from dovetail.training.rules import make_rule
from dovetail.training.trainer import Trainer
from tests.support.training_models import OPTIMIZERS, SGD, cross_entropy, perceptron, table

pytestmark = pytest.mark.usefixtures("forks")


class Killed(Exception):
    """Ends a run as if its process had been killed."""


def fit(model, folder, kill_at=None, loss=cross_entropy, **options):
    """A run of three epochs of five steps; killed at an evaluation, if so wished, which is certain
    where evaluations are: a live run skips those that it is too late for."""
    seen = []

    def evaluate(theta, clock, samples, seconds):
        seen.append(samples)
        if len(seen) == kill_at:
            raise Killed
        return {}

    defaults = {"rule": "sync", "workers": 1, "epochs": 3, "backend": "simulated", "batch": 8}
    options = {"optimizer": SGD, **defaults, **options}
    trainer = Trainer(model, loss, folder=folder, **options)
    return trainer.fit(table(), table(8), watcher=Watcher(evaluate=evaluate))


def killed_at_step(number):
    """A loss that ends the run at the step of that number, counted over all workers."""
    numbers = itertools.count(1)

    def loss(output, labels):
        if torch.is_grad_enabled() and output.requires_grad and next(numbers) == number:
            raise Killed
        return cross_entropy(output, labels)

    return loss


@pytest.mark.parametrize("backend", ["simulated", "threads"])
@pytest.mark.parametrize(
    ("rule", "optimizer", "workers"),
    [("sync", "adam", 2), ("sync", "sgd", 1), ("downpour", None, 1)],
)
def test_a_resumed_run_ends_as_one_that_was_never_killed(
    tmp_path, backend, rule, optimizer, workers
):
    """Bit for bit where the server has the optimizer's state, or there is none."""
    options = {
        "rule": rule, "workers": workers, "backend": backend,
        "optimizer": OPTIMIZERS[optimizer] if optimizer else SGD,
    }  # fmt: skip
    whole = perceptron()
    expected = fit(whole, tmp_path / "whole", **options)
    with pytest.raises((Killed, ProcessError), match=r"Killed|^$"):
        fit(perceptron(), tmp_path / "killed", loss=killed_at_step(12), **options)
    resumed = perceptron(seed=7)  # its parameters are the folder's, not these
    found = fit(resumed, tmp_path / "killed", resume=True, **options)
    assert np.array_equal(flatten(resumed), flatten(whole))
    assert found.outcome.samples == expected.outcome.samples == 120
    assert [r.samples for r in found.outcome.rows] == [r.samples for r in expected.outcome.rows]


def test_the_best_so_far_is_kept_over_a_kill(tmp_path):
    """The second evaluation is the best, the run is killed at the third; then none is better."""
    tried, values = 9.0, [3.0, 1.0, 2.0]
    figures = iter([tried, *values, tried] + [4.0] * 9)
    options = {
        "epochs": 9, "metrics": {"error": lambda *_: next(figures)}, "monitor": "error",
        "patience": 3,
    }  # fmt: skip
    with pytest.raises(Killed):
        fit(perceptron(), tmp_path, kill_at=3, **options)
    best = np.load(tmp_path / "best.npy")
    model = perceptron()
    history = fit(model, tmp_path, resume=True, **options)
    assert history.outcome.stopped
    assert [e.figures["error"] for e in history.outcome.evaluations] == [3.0, 1.0, 4.0, 4.0, 4.0]
    assert np.array_equal(flatten(model), best)


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    fit(perceptron(), tmp_path)
    with pytest.raises(UsageError, match="holds a run; resume it, or give another") as caught:
        fit(perceptron(), tmp_path)
    assert caught.value.option == "folder"


def test_a_run_that_has_ended_is_resumed_to_the_same_end(tmp_path):
    model, again = perceptron(), perceptron(seed=3)
    fit(model, tmp_path)
    history = fit(again, tmp_path, resume=True)
    assert np.array_equal(flatten(again), flatten(model))
    assert history.outcome.samples == 120


def test_there_must_be_a_run_to_resume(tmp_path):
    with pytest.raises(UsageError, match="holds no run") as caught:
        fit(perceptron(), tmp_path, resume=True)
    assert caught.value.option == "resume"


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("rule", {"rule": "downpour"}),
        ("options", {"optimizer": OPTIMIZERS["sgd"]}),
        ("epochs", {"epochs": 2}),
        ("window", {"window": 2}),
        ("seed", {"seed": 1}),
    ],
)
def test_another_run_is_refused_with_the_difference(tmp_path, field, options):
    fit(perceptron(), tmp_path)
    with pytest.raises(RunMismatchError) as caught:
        fit(perceptron(), tmp_path, resume=True, **options)
    assert caught.value.field == field
    assert caught.value.expected != caught.value.found


@pytest.mark.parametrize("kill_at_step", [None, 12])
@pytest.mark.parametrize(
    ("rule", "optimizer", "workers", "options"),
    [
        ("sync", "adam", 2, {}),
        ("downpour", None, 1, {}),
        ("downpour", None, 1, {"partition": "fixed", "window": 2}),
    ],
)
def test_a_run_with_more_epochs_ends_as_one_that_had_them_from_the_start(
    tmp_path, rule, optimizer, workers, options, kill_at_step
):
    options = {
        "rule": rule, "workers": workers, **options,
        "optimizer": OPTIMIZERS[optimizer] if optimizer else SGD,
    }  # fmt: skip
    whole = perceptron()
    expected = fit(whole, tmp_path / "whole", epochs=6, **options)
    if kill_at_step is None:
        # Ten batches are whole rounds and windows, so that the end of the run cuts none.
        fit(perceptron(), tmp_path / "more", epochs=2, **options)
    else:
        with pytest.raises(ProcessError, match="Killed"):
            loss = killed_at_step(kill_at_step)
            fit(perceptron(), tmp_path / "more", loss=loss, epochs=4, **options)
    resumed = perceptron(seed=7)
    found = fit(resumed, tmp_path / "more", resume=True, epochs=6, **options)
    assert np.array_equal(flatten(resumed), flatten(whole))
    assert found.outcome.samples == expected.outcome.samples == 240
    # And once more, from what is left of the change.
    more = fit(perceptron(), tmp_path / "more", resume=True, epochs=7, **options)
    assert more.outcome.samples == 280


@pytest.mark.parametrize("backend", ["simulated", "threads", "processes"])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (3, 1)])
def test_a_run_goes_on_with_another_number_of_workers(tmp_path, backend, before, after):
    options = {"rule": "sync", "backend": backend, "optimizer": OPTIMIZERS["adam"]}
    fit(perceptron(), tmp_path, workers=before, **options)
    history = fit(perceptron(), tmp_path, resume=True, workers=after, epochs=5, **options)
    rows = history.outcome.rows
    assert history.outcome.samples == sum(row.samples for row in rows) == 200
    new = rows[15:]
    assert {row.worker for row in new} == set(range(after))
    # The first round waits for all of the new workers.
    assert [row.clock for row in new[:after]] == [new[0].clock] * after


@pytest.mark.parametrize("backend", ["simulated", "processes"])
def test_shares_are_of_the_workers_that_they_were_cut_for(tmp_path, backend):
    options = {"partition": "fixed", "backend": backend, "rule": "downpour"}
    fit(perceptron(), tmp_path, workers=2, **options)
    with pytest.raises(RunMismatchError, match="whose workers is 2, but here it is 3"):
        fit(perceptron(), tmp_path, workers=3, resume=True, **options)


@pytest.mark.parametrize("workers", [2**60, 0, "2", None])
def test_a_forged_number_of_workers_is_refused(tmp_path, workers):
    fit(perceptron(), tmp_path)
    path = tmp_path / "center" / "run.json"
    fields = json.loads(path.read_text())["run"] | {"workers": workers}
    crc = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    path.write_text(json.dumps({"run": fields, "crc": crc}))
    with pytest.raises(JournalError, match="its epochs and workers are"):
        fit(perceptron(), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"epochs": 2, "workers": 2}, "its run of 3 epochs goes on with 2"),
        ({"epochs": 4, "workers": 3}, "its shares for 2 workers go on with 3"),
        ({"epochs": 4, "workers": 2**60}, "less than or equal to"),
    ],
)
def test_a_forged_change_in_the_log_is_refused(header, says):
    job, rule = Job("r", 1, 40, 3, 8, workers=2, partition="fixed"), make_rule("downpour")
    center = Center(np.zeros(1, np.float32), rule, 1)
    record = {"kind": "change", "seconds": 1.0, **header}
    with pytest.raises(JournalError, match=says):
        check_record(Path("log"), 0, record, None, Ledger(job, rule), center)


def test_another_model_is_refused(tmp_path):
    fit(perceptron(), tmp_path)
    other = perceptron()
    other[0].bias.requires_grad_(False)
    with pytest.raises(RunMismatchError) as caught:
        fit(other, tmp_path, resume=True)
    assert caught.value.field == "model"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other", "run": "a"}'])
def test_a_foreign_file_is_not_taken_for_a_run(tmp_path, text):
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(FileFormatError, match=r"trainer\.json"):
        fit(perceptron(), tmp_path, resume=True)


def test_what_was_evaluated_is_checked_when_read(tmp_path):
    fit(perceptron(), tmp_path)
    path = tmp_path / "evaluations.json"
    path.write_text(json.dumps({"best": 0, "evaluations": [{"clock": 1}]}))
    with pytest.raises(FileFormatError, match=r"evaluations\.json"):
        fit(perceptron(), tmp_path, resume=True)


def test_settings_of_the_storage_are_checked(tmp_path):
    with pytest.raises(UsageError, match="has no 'compress'; it has log"):
        fit(perceptron(), tmp_path, storage={"compress": True})
