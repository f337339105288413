"""The trainer with worker processes, and with workers that are groups of processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import ProcessError
from dovetail.training.backends.contract import Watcher
from dovetail.training.group import GroupLearner, GroupLearners
from dovetail.training.modules import ModuleLearners, flatten
from dovetail.training.preparing import prepare
from dovetail.training.request import TrainRequest
from dovetail.training.trainer import Trainer
from tests.support.training_models import SGD, cross_entropy, perceptron, relative, table

pytestmark = pytest.mark.usefixtures("forks")


def children():
    """Process ids below this one."""
    text = subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True)
    pairs = [tuple(map(int, line.split())) for line in text.splitlines()]
    found = {os.getpid()}
    while more := {pid for pid, parent in pairs if parent in found} - found:
        found |= more
    return found - {os.getpid()}


PREPARES = """
import sys
import torch
from dovetail.training.preparing import prepare
from dovetail.training.request import TrainRequest
from tests.support.training_models import cross_entropy, perceptron, table

class Own(torch.optim.SGD):
    def step(self, closure=None):
        print("own step")

for optimizer in ("momentum", Own):
    request = TrainRequest(perceptron(), cross_entropy, optimizer, lr=0.1, workers=2, batch=8)
    prepare(request, table(64), None)
    print("torch._dynamo" in sys.modules)
"""


def test_an_optimizer_of_torch_is_not_tried_as_that_takes_long():
    done = subprocess.run(
        [sys.executable, "-c", PREPARES], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["False", "own step"]


def test_worker_processes_train_as_one_large_batch_and_are_gone_afterwards():
    """The model's class is of this test, and travels by value; its loss is a closure."""

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = perceptron()

        def forward(self, features):
            return self.inner(features)

    scale = torch.tensor(1.0)
    before = children()
    model, rows = Mine(), []
    trainer = Trainer(
        model,
        lambda output, labels: scale * cross_entropy(output, labels),
        SGD,
        "sync",
        workers=2,
        epochs=2,
        batch=8,
        metrics=["accuracy"],
    )
    history = trainer.fit(table(64), table(), watcher=Watcher(rows=rows.extend))
    expected = perceptron()
    Trainer(expected, cross_entropy, SGD, workers=1, backend="simulated", epochs=2, batch=16).fit(
        table(64)
    )
    assert relative(flatten(model), flatten(expected)) < 1e-6
    assert history.outcome.samples == 128 == sum(row.samples for row in rows)
    assert history.backend == "processes"
    assert "accuracy" in history.outcome.evaluations[-1].figures
    assert not [pid for pid in children() - before if _is_worker(pid)]


def _is_worker(pid):
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"child.py" in command or b"fork_server.py" in command


class FailsAtSeven(nn.Module):
    """Raises on the rank whose part of the batch has a seven in it."""

    def __init__(self):
        super().__init__()
        self.inner = perceptron()

    def forward(self, features):
        if bool((features == 7).any()):
            raise ValueError("a seven")
        return self.inner(features)


def group_of(size, model=None, data=None):
    learners = ModuleLearners(model or perceptron(), cross_entropy, SGD, data or table())
    return GroupLearner(learners, size, 0), learners(0)


def test_a_group_computes_the_gradient_of_the_whole_batch():
    """Of batches that it cannot halve too; and it ends with its worker's error."""
    features, labels = table()
    features[21] = 7
    group, alone = group_of(2, FailsAtSeven(), (features, labels))
    theta = flatten(perceptron(seed=5))
    try:
        for count in (8, 7, 1):
            indices = np.arange(count)
            found, expected = (each.gradient(theta, indices, 0) for each in (group, alone))
            assert relative(found.vector, expected.vector) < 1e-6
            assert found.loss == pytest.approx(expected.loss)
            assert found.samples == count
        change = group.update(theta, found.vector, 0.0)
        assert relative(change, -0.1 * found.vector) < 1e-5
        with pytest.raises(ProcessError, match="a seven") as caught:
            group.gradient(theta, np.arange(18, 22), 0)
        assert caught.value.process == "0, rank 1"
    finally:
        group.close()


def test_a_trainers_workers_are_groups_if_so_wished():
    request = TrainRequest(perceptron(), cross_entropy, SGD, group=2)
    make = prepare(request, table(), None).assignment.learner
    assert isinstance(make, GroupLearners) and make.size == 2
