"""Predictions and figures on a cluster."""

import os

import pytest
import torch

pytest.importorskip("ray")
from tests.support.ray_runs import SMALL
from tests.support.training_models import table
from tests.training.test_predicting import ROWS, Dying, Failing, network, plainly, trainer


def test_actors_predict_and_evaluate_as_threads_do(cluster):
    model, data = network(), table(ROWS)
    options = {"backend": "ray", "backend_options": SMALL}
    found = trainer(model, workers=2, **options).predict(data)
    assert torch.equal(found, plainly(model, data[0]))
    figures = trainer(model, workers=1, **options).evaluate(data)
    assert figures == trainer(model, "threads").evaluate(data)


def test_a_batch_of_a_dead_actor_is_given_to_another(cluster, tmp_path):
    rows = torch.arange(40, dtype=torch.float32)[:, None]
    used = trainer(Dying(tmp_path, 1), "ray", workers=2, backend_options=SMALL)
    assert torch.equal(used.predict(rows), rows)
    assert len(os.listdir(tmp_path)) == 1


def test_an_exception_in_an_actor_comes_with_its_traceback(cluster):
    from dovetail.errors import ProcessError

    with pytest.raises(ProcessError, match="at this very batch"):
        trainer(Failing(), "ray", workers=1, backend_options=SMALL).predict(table(ROWS)[0])
