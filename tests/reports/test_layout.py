import numpy as np

from dovetail.graph.records import Phase
from dovetail.reports import pictures
from dovetail.reports.pictures import draw
from tests.support.report_samples import make_graph, make_machine, make_plan, training_chain

F, B, U, S = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.SOURCE


def test_backward_and_update_stand_in_the_column_of_their_forward_op():
    #            column 0     1
    # forward      a ───────► b
    # backward     a' ◄────── b'
    # update       u
    graph = make_graph(
        [
            ("w", S, []),
            ("a", F, [0], "one"),
            ("b", F, [1], "two"),
            ("b'", B, [2], "two", 2),
            ("a'", B, [3, 1], "one", 1),
            ("u", U, [4, 0], "one"),
        ]
    )
    plan = make_plan(graph, make_machine(2), [0, 0, 1, 1, 0, 0])
    (ops,) = draw(graph, plan)
    assert ops.labels == ("a", "b", "b'", "a'", "u")
    assert ops.columns.tolist() == [0, 1, 1, 0, 0]
    assert [lane[0] for lane in ops.lanes] == [
        "cpu0 forward", "cpu0 backward", "cpu0 update", "cpu1 forward", "cpu1 backward",
    ]  # fmt: skip
    assert ops.rows.tolist() == [0, 3, 4, 1, 2]
    assert ops.edges.tolist() == [[0, 1], [0, 3], [1, 2], [2, 3], [3, 4]]
    assert ops.edge_bytes.tolist() == [64] * len(ops.edges)


def test_no_two_nodes_stand_on_one_spot_and_every_op_is_counted_once():
    graph = training_chain(10, repeats=4)
    rng = np.random.default_rng(1)
    plan = make_plan(graph, make_machine(3), rng.integers(0, 3, len(graph)))
    (view,) = draw(graph, plan)
    places = set(zip(view.columns.tolist(), view.rows.tolist(), strict=True))
    assert len(places) == len(view.labels)
    assert view.ops.sum() == (~graph.is_source).sum()
    assert np.isclose(view.seconds.sum(), plan.compute_seconds[~graph.is_source, 0].sum())


def test_a_graph_too_large_is_not_drawn_op_by_op(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_OPS", 20)
    graph = training_chain(12)
    assert draw(graph, make_plan(graph, make_machine(2), np.zeros(len(graph), dtype=int))) == []


def test_an_update_stands_with_the_first_reader_of_its_parameter():
    # forward a ──► b ──► c (reads w); the gradient of w comes from c' alone, by way of `scale`
    graph = make_graph(
        [
            ("w", S, []),
            ("a", F, [], "one"),
            ("b", F, [1, 0], "two"),
            ("c", F, [2], "three"),
            ("scale", B, [3], "three", 3),
            ("u", U, [4, 0], "two"),
            ("counter", F, [], "two"),
        ]
    )
    (ops,) = draw(graph, make_plan(graph, make_machine(1), np.zeros(7, dtype=int)))
    columns = dict(zip(ops.labels, ops.columns.tolist(), strict=True))
    assert columns == {"a": 0, "b": 1, "c": 2, "scale": 2, "u": 1, "counter": 1}


def test_an_update_of_what_only_counts_stands_with_its_module():
    # A counter reads no activation: no edge says where it belongs, its module does.
    #   forward      a ───► b ───► c          count (two)
    #   update                                count' (two)
    graph = make_graph(
        [
            ("w", S, []),
            ("n", S, []),
            ("a", F, [0], "one"),
            ("b", F, [2], "two"),
            ("count", F, [1], "two"),
            ("c", F, [3], "three"),
            ("count'", U, [4, 1], "two"),
        ]
    )
    ops = draw(graph, make_plan(graph, make_machine(1), [0] * 7))[0]
    assert dict(zip(ops.labels, ops.columns.tolist(), strict=True)) == {
        "a": 0, "b": 1, "count": 1, "c": 2, "count'": 1,
    }  # fmt: skip


def test_what_waits_for_nothing_stands_just_before_its_reader():
    graph = make_graph(
        [("a", F, []), ("b", F, [0]), ("mask", F, []), ("c", F, [1, 2]), ("d", F, [3])]
    )
    (ops,) = draw(graph, make_plan(graph, make_machine(1), np.zeros(5, dtype=int)))
    assert ops.columns.tolist() == [0, 1, 1, 2, 3]
