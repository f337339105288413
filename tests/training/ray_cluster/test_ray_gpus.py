"""Workers with GPUs of Ray, which need not be there: Ray assigns numbers, and a CPU computes."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

pytest.importorskip("ray")
from dovetail.errors import UsageError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Watcher
from dovetail.training.backends.ray import transport
from dovetail.training.modules import flatten
from dovetail.training.preparing import prepare
from dovetail.training.request import TrainRequest
from dovetail.training.trainer import Trainer
from tests.support.ray_runs import SMALL, Squares, assign, noting
from tests.support.training_models import SGD, cross_entropy, perceptron, relative, table
from tests.training.test_trainer import plainly


def noted(folder):
    """What the workers noted, in their order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_workers_share_equally_all_gpus_of_the_nodes_that_they_may_use(cluster, add_node, tmp_path):
    """If the others' were counted, each worker would ask for a whole GPU, and one would wait for
    ever. One worker has a whole GPU: see below."""
    add_node("other", gpus=2)
    add_node("ours", gpus=2)
    make = partial(noting, lambda worker: Squares(64, 8), tmp_path, of=3)
    run = load_backend("ray", worker_resources={"ours": 0.1}, **SMALL)
    outcome = run(assign(learner=make, workers=3, device="cuda"), Watcher())
    assert outcome.samples == 128
    notes = noted(tmp_path)
    assert len(notes) == 3
    assert all(note["visible"] == [str(number) for number in note["ids"]] for note in notes)
    assert all(len(note["ids"]) == 1 and note["device"] == "cuda:0" for note in notes)
    assert sorted(np.bincount([note["ids"][0] for note in notes])) == [1, 2]


def test_a_worker_on_a_gpu_of_ray_trains_as_torch_does(cluster, add_node, tmp_path):
    add_node("with-gpus", gpus=1)
    request = TrainRequest(
        perceptron(), cross_entropy, SGD, "downpour", 1, "ray",
        epochs=2, batch=8, window=1, device="cuda", backend_options=SMALL,
    )  # fmt: skip
    prepared = prepare(request, table(), table(seed=1))
    assignment = prepared.assignment
    # "cpu:0" is another device than "cpu" to a learner, as a GPU is.
    make = partial(noting, replace(assignment.learner, device="cpu:0"), tmp_path)
    outcome = prepared.run(replace(assignment, learner=make), Watcher())
    assert noted(tmp_path) == [{"ids": [0], "visible": ["0"], "device": "cuda:0"}]
    model = perceptron()
    start = flatten(model)
    assert relative(outcome.theta, plainly(model, SGD, table(), epochs=2)) < 1e-6
    assert relative(outcome.theta, start) > 0.01 and len(outcome.rows) == 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "device: 'cuda' is not there: no node of the Ray cluster has a GPU"),
        ({"worker_resources": {"large": 1}}, "no node with large of the Ray cluster has a GPU"),
    ],
)
def test_a_cluster_without_gpus_is_refused(options, says, cluster):
    options = {**SMALL, **options}
    trainer = Trainer(
        perceptron(), cross_entropy, SGD, backend="ray", device="cuda", backend_options=options
    )
    with pytest.raises(UsageError, match=says) as caught:
        trainer.fit(table())
    assert "\n" not in str(caught.value)


def test_the_shares_of_a_gpu_are_no_more_than_one_in_rays_count():
    for workers in range(1, 101):
        share = transport._share_of_gpu(workers)
        assert workers * round(share * 10_000) <= 10_000
        assert share > 0.9 / workers
