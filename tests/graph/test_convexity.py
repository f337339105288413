"""Which placements are contiguous, and the way out and back of one that is not."""

import itertools

import numpy as np
import pytest

from dovetail.graph import Phase
from dovetail.graph.convexity import find_return
from tests.support.builders import Op, graph_of


def way(graph, *placement):
    return find_return(graph, np.array(placement, np.int32))


def test_a_path_that_leaves_a_device_and_comes_back():
    graph = graph_of(Op("a"), Op("b", ("a",)), Op("c", ("b",)), Op("d", ("c",)))
    assert way(graph, 0, 1, 1, 0) == (0, 1, 3)
    assert way(graph, 0, 0, 1, 1) is None
    assert way(graph, 1, 1, 0, 2) is None


def test_two_devices_that_wait_for_each_other():
    graph = graph_of(Op("a1"), Op("a2", ("a1",)), Op("b1"), Op("b2", ("b1",)))
    assert way(graph, 0, 1, 1, 0) == (0, 1, 3)
    assert way(graph, 0, 1, 0, 1) is None


def test_backward_ops_may_come_back():
    graph = graph_of(Op("a"), Op("b", ("a",)), Op("c", ("b",), phase=Phase.BACKWARD))
    assert way(graph, 0, 1, 0) is None


@pytest.mark.parametrize("seed", range(20))
def test_there_is_no_way_back_just_where_devices_have_an_order(seed):
    rng = np.random.default_rng(seed)
    reads = [sorted({f"op{j}" for j in rng.integers(0, i, size=2)}) if i else [] for i in range(7)]
    graph = graph_of(*(Op(f"op{i}", tuple(of_op)) for i, of_op in enumerate(reads)))
    edges = graph.forward_edges
    for _ in range(20):
        placement = rng.integers(0, 3, size=7).astype(np.int32)
        ends = placement[edges]
        ordered = any(
            (np.array(places)[ends[:, 0]] <= np.array(places)[ends[:, 1]]).all()
            for places in itertools.permutations(range(3))
        )
        found = find_return(graph, placement)
        assert (found is None) == ordered
        if found is not None:
            leaves, elsewhere, returns = found
            assert placement[leaves] == placement[returns] != placement[elsewhere]
            assert [leaves, elsewhere] in edges.tolist()
