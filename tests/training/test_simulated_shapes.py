"""What the thesis' rules do to a real network, in virtual time: scikit-learn's digits, one seed."""

import math

import pytest

from dovetail.training.analysis import staleness
from tests.support.benchmark_scripts import benchmark_scripts


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark's modules: its network and its runs."""
    with benchmark_scripts("data_parallel", "cells", "tasks") as modules:
        yield modules


@pytest.fixture(scope="module")
def accuracy(benchmark):
    """rule, n -> validation % and the commits of a run at window 10."""
    task = benchmark.tasks.digits()

    def ran(rule, workers):
        cell = benchmark.cells.Cell("t", "digits", rule, 10, workers)
        result, outcome = benchmark.cells.run_cell(cell, task)
        return 100 * result.accuracy, outcome.rows

    return ran


def test_20_workers_that_sum_their_updates_diverge_and_those_that_average_them_learn(accuracy):
    downpour, rows = accuracy("downpour", 20)
    agn, _ = accuracy("agn", 20)
    assert downpour < 50
    assert agn > 90
    assert staleness(rows, 20)[0].mean == pytest.approx(19, rel=0.02)
    assert math.isfinite(rows[-1].momentum)  # though the center grows without bound


def test_40_workers_need_the_distance_to_be_weighed(accuracy):
    agn, _ = accuracy("agn", 40)
    adag_agn, rows = accuracy("adag-agn", 40)
    assert adag_agn >= agn + 20
    assert staleness(rows, 40)[0].mean == pytest.approx(39, rel=0.02)
