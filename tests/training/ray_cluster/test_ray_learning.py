"""A policy's controllers as actors."""

import numpy as np
import pytest

pytest.importorskip("ray")
from dovetail.placers.learned.learning import learn
from tests.support.learned_problems import random_task
from tests.support.ray_runs import SMALL
from tests.support.tiny_policies import REINFORCE, Table


def test_a_controller_on_a_cluster_learns_what_it_does_in_virtual_time(cluster):
    task, found = random_task(1, 6), {}
    for backend, options in (("simulated", {}), ("ray", SMALL)):
        seen = []
        found[backend] = learn(
            [task], Table(6, 2), REINFORCE, trials=84, backend=backend, options=options,
            progress=seen.append,
        )  # fmt: skip
        assert sum(point.controller == 0 for point in seen) == found[backend].updates == 11
    one, other = found["ray"], found["simulated"]
    assert np.array_equal(one.theta, other.theta)
    assert (one.values, one.found, one.trials) == (other.values, other.found, 84)
