"""The order of nodes that wait for each other."""

import numpy as np
import pytest

from dovetail.graph.topological import topological_order

NONE = np.empty((0, 2), np.int64)


def test_nodes_come_by_priority_but_behind_what_they_need():
    edges = np.array([(3, 0), (0, 1)])
    assert topological_order(4, edges, [0.0, 1.0, 2.0, 3.0]) == [2, 3, 0, 1]


def test_of_equal_priorities_the_lowest_number_comes_first():
    assert topological_order(3, NONE, [1.0, 1.0, 0.0]) == [2, 0, 1]


def test_a_circle_has_no_order():
    with pytest.raises(AssertionError, match="circles"):
        topological_order(2, np.array([(0, 1), (1, 0)]), [0.0, 0.0])
