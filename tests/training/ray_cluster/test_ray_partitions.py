"""Shares of the data set on a cluster."""

import pytest

pytest.importorskip("ray")
from tests.support.ray_runs import SMALL
from tests.training.test_partitions import SAMPLES, labels_by_worker, trained


def test_each_worker_trains_its_own_labels_once_an_epoch(cluster):
    times, history = trained("by-label", backend="ray", backend_options=SMALL)
    assert times.tolist() == [2] * SAMPLES
    assert labels_by_worker(history) == {0: {0.0}, 1: {1.0}, 2: {2.0}}
