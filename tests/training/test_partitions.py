"""Shares of the data set: whose samples are whose, on every backend, over deaths and resumptions.

Each sample's input is a unit vector of its own, and the model is one weight a sample. With plain
SGD and DOWNPOUR each weight falls by 1 whenever its sample is trained, so that the weights count.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from dovetail.errors import UsageError
from dovetail.training.backends.contract import FailurePolicy, Watcher
from dovetail.training.datasets import labels_of, open_dataset
from dovetail.training.positions import Positions, arrangement
from dovetail.training.records import Job
from dovetail.training.trainer import Trainer
from tests.support.training_models import Numbers

pytestmark = pytest.mark.usefixtures("forks")
SAMPLES, BATCH = 24, 4
LABELS = torch.arange(SAMPLES) % 3  # mixed, eight of each
STEP = functools.partial(torch.optim.SGD, lr=BATCH)


class Items(Dataset):
    """The same samples one by one."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, row):
        return torch.eye(SAMPLES)[row], LABELS[row]


def counted(output, labels):
    """A loss whose gradient counts, and whose value is the mean label."""
    return output.mean() - output.mean().detach() + labels.float().mean()


def trained(partition, data=None, kill_at=None, **options):
    """(how often each sample was trained [samples], the run's history)."""
    seen = []

    def evaluate(theta, clock, samples, seconds):
        seen.append(samples)
        if len(seen) == kill_at:
            raise KilledError
        return {}

    torch.manual_seed(0)
    model = nn.Linear(SAMPLES, 1, bias=False)
    nn.init.zeros_(model.weight)
    options = {"workers": 3, "batch": BATCH, "backend": "simulated", "epochs": 2, **options}
    trainer = Trainer(model, counted, STEP, "downpour", partition=partition, **options)
    data = (torch.eye(SAMPLES), LABELS) if data is None else data
    history = trainer.fit(data, watcher=Watcher(evaluate=evaluate))
    return -model.weight.detach().numpy().ravel(), history


class KilledError(Exception):
    """Ends a run as if its process had been killed."""


def labels_by_worker(history):
    found = {}
    for row in history.outcome.rows:
        found.setdefault(row.worker, set()).add(row.loss)
    return found


@pytest.mark.parametrize(
    ("partition", "backend"),
    [
        ("fixed", "simulated"), ("fixed", "threads"), ("by-label", "simulated"),
        ("by-label", "threads"), ("by-label", "processes"),
    ],
)  # fmt: skip
def test_every_sample_of_every_epoch_is_trained_once_by_its_own_worker(partition, backend):
    times, history = trained(partition, backend=backend)
    assert times.tolist() == [2] * SAMPLES
    assert [sum(r.samples for r in history.outcome.rows if r.worker == w) for w in range(3)] == [
        16, 16, 16,
    ]  # fmt: skip
    if partition == "by-label":
        assert labels_by_worker(history) == {0: {0.0}, 1: {1.0}, 2: {2.0}}
        assert "epochs 2, partition by-label" in history.summary()
    else:
        assert any(len(labels) > 1 for labels in labels_by_worker(history).values())


def test_a_map_style_data_set_is_sorted_as_arrays_are():
    one, other = trained("by-label"), trained("by-label", Items())
    assert labels_by_worker(one[1]) == labels_by_worker(other[1])
    assert other[0].tolist() == [2] * SAMPLES


def test_a_slow_worker_still_trains_its_whole_share():
    slow = {"slow": {0: 50.0}}
    for partition, expected in (("fixed", [16, 16, 16]), ("leased", None)):
        history = trained(partition, backend_options=slow)[1]
        found = [sum(r.samples for r in history.outcome.rows if r.worker == w) for w in range(3)]
        assert found == expected if expected else found[0] < 16


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_lost_workers_share_is_trained_once_all_the_same(restarts):
    """Its replacement goes on with it; if there is none, the others train it after their own."""
    options = {
        "backend_options": {"deaths": {1: 1.5}, "restart_seconds": 0.5},
        "policy": FailurePolicy(worker_restarts=restarts, worker_losses=1),
    }
    times, history = trained("by-label", **options)
    assert times.tolist() == [2] * SAMPLES
    found = labels_by_worker(history)
    if restarts:
        assert found == {0: {0.0}, 1: {1.0}, 2: {2.0}}
    else:
        assert found[1] == {1.0} and {1.0} < found[0] | found[2]
        rows = [row for row in history.outcome.rows if row.worker == 0]
        assert [row.loss for row in rows] == sorted(row.loss for row in rows)


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_a_killed_run_resumes_with_the_same_shares(backend, tmp_path):
    options = {"folder": tmp_path / "run", "epochs": 3, "backend": backend}
    with pytest.raises(KilledError):
        trained("by-label", kill_at=1, **options)
    times, history = trained("by-label", resume=True, **options)
    assert times.tolist() == [3] * SAMPLES
    assert labels_by_worker(history) == {0: {0.0}, 1: {1.0}, 2: {2.0}}
    with pytest.raises(Exception, match="partition"):
        trained("fixed", resume=True, **options)


def test_shares_are_drawn_by_the_seed_and_each_epoch_has_an_order_of_its_own():
    labels = np.zeros(SAMPLES)
    one, same, other = (arrangement("fixed", labels, seed) for seed in (0, 0, 1))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    assert sorted(one) == list(range(SAMPLES))
    job = Job("", 1, SAMPLES, 2, BATCH, workers=3, partition="fixed")
    positions = Positions(job)
    for start, stop in positions.pools:
        first, second = positions.stretch(start), positions.stretch(stop - 1)
        assert (first.epoch, second.epoch) == (0, 1)
        assert (positions.passes(start), positions.passes(first.stop)) == (0.0, 1.0)
        orders = [positions.order(stretch).tolist() for stretch in (first, second)]
        assert orders[0] != orders[1]
        assert set(orders[0]) == set(orders[1]) == set(range(start // 2, stop // 2))


def test_labels_may_be_numbers_columns_or_rows_of_probabilities():
    plain = np.array([2, 0, 1, 2])
    for targets in (plain, plain[:, None], np.eye(3)[plain], plain.astype(np.float32)):
        source = open_dataset((np.zeros((4, 5)), targets))
        assert labels_of(source).tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("options", "data", "words"),
    [
        ({"partition": "random"}, None, "must be one of leased, fixed, by-label"),
        ({"partition": "fixed"}, Numbers(torch.eye(SAMPLES), LABELS), "known length"),
        ({"partition": "by-label"}, Numbers(torch.eye(SAMPLES), LABELS), "known length"),
        ({"partition": "by-label"}, (torch.eye(SAMPLES),), "has no target"),
        (
            {"partition": "by-label"}, (torch.eye(SAMPLES), torch.zeros(SAMPLES, 5)),
            "one number a sample; it is of shape",
        ),
        ({"partition": "fixed", "workers": 25}, None, "24 samples are too few"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_refused_by_name(options, data, words):
    with pytest.raises(UsageError, match=words) as caught:
        trained(data=data, **options)
    assert caught.value.option == "partition"
