"""RL17's own groups: cells of recurrent layers, steps of other repeated modules, and branches."""

import numpy as np

from dovetail.graph import Phase
from dovetail.graph.cells import cells_of, group_cells
from dovetail.pipeline import graph_of as captured_graph
from dovetail.pipeline import resolve_model
from tests.support.builders import Op, graph_of, source


def named_sets(graph, of_op):
    """The sets of forward ops' names of each entry from 0 up."""
    real = graph.phases == Phase.FORWARD
    return [
        {graph.names[op] for op in np.flatnonzero(real & (of_op == entry))}
        for entry in range(int(of_op.max()) + 1)
    ]


def step(t, reads):
    """A cell of two ops and an op of the softmax that reads it."""
    return (
        Op(f"mm{t}", reads, kind="mm", module="lstm"),
        Op(f"tanh{t}", (f"mm{t}",), kind="tanh", module="lstm"),
        Op(f"soft{t}", (f"tanh{t}",), kind="soft", module="softmax"),
    )


def test_each_call_of_a_repeated_module_is_a_cell():
    graph = graph_of(source("x"), *step(0, ("x",)), *step(1, ("tanh0",)), *step(2, ("tanh1",)))
    cells = [{"mm0", "tanh0"}, {"soft0"}, {"mm1", "tanh1"}, {"soft1"}, {"mm2", "tanh2"}, {"soft2"}]
    assert named_sets(graph, cells_of(graph)) == cells
    assert named_sets(graph, group_cells(graph).of_op) == cells


def test_each_period_of_a_module_that_loops_by_itself_is_a_cell():
    ops = [Op("mm0", ("x",), kind="mm", module="lstm")]
    for t in range(4):
        reads = (f"tanh{t - 1}",) if t else ("x",)
        ops[2 * t :] = [
            Op(f"mm{t}", reads, kind="mm", module="lstm"),
            Op(f"tanh{t}", (f"mm{t}",), kind="tanh", module="lstm"),
        ]
    graph = graph_of(source("x"), *ops)
    cells = [{f"mm{t}", f"tanh{t}"} for t in range(4)]
    assert named_sets(graph, group_cells(graph).of_op) == cells


def test_layers_of_the_same_kinds_in_a_row_are_no_cells():
    names = ("conv0", "relu0", "conv1", "relu1")
    ops = [
        Op(name, (before,), kind=name[:4], module=f"blocks.0.{i}")
        for i, (name, before) in enumerate(zip(names, ("x", *names[:-1]), strict=True))
    ]
    graph = graph_of(source("x"), *ops)
    assert named_sets(graph, cells_of(graph)) == [set(names)]


def test_a_branch_is_one_group_and_joins_no_other():
    graph = graph_of(
        source("x"),
        Op("stem", ("x",), kind="conv", module="blocks.0.conv"),
        Op("a", ("stem",), kind="conv", module="blocks.1.left.conv"),
        Op("b", ("a",), kind="norm", module="blocks.1.left.norm"),
        Op("c", ("stem",), kind="conv", module="blocks.1.right.0.conv"),
        Op("d", ("c",), kind="conv", module="blocks.1.right.1.conv"),
        Op("cat", ("b", "d"), kind="cat", module="blocks.1"),
        Op("grad", ("b",), kind="back", phase=Phase.BACKWARD, gradient_of="a"),
    )
    groups = group_cells(graph)
    assert named_sets(graph, groups.of_op) == [{"stem"}, {"a", "b"}, {"c", "d"}, {"cat"}]
    assert groups.of_op[graph.names.index("grad")] == groups.of_op[graph.names.index("a")]


def test_ops_in_no_cell_join_their_only_consumer():
    graph = graph_of(
        source("x"),
        Op("scale", ("x",), kind="mul"),
        *step(0, ("scale",)),
        *step(1, ("tanh0",)),
        Op("sum", ("soft0", "soft1"), kind="sum"),
        Op("loss", ("sum",), kind="loss"),
    )
    sets = named_sets(graph, group_cells(graph).of_op)
    assert {"scale", "mm0", "tanh0"} in sets
    assert {"sum", "loss"} in sets


def test_an_unrolled_network_has_a_cell_for_each_layer_and_step():
    graph = captured_graph(
        resolve_model("zoo:rnnlm?layers=2&hidden=16&steps=5&batch=2&vocabulary=50", "adam")
    )
    of_op, forward = cells_of(graph), graph.phases == Phase.FORWARD
    modules = np.array(graph.modules)
    for module in ("lstm.0", "lstm.1", "softmax"):
        cells, sizes = np.unique(of_op[forward & (modules == module)], return_counts=True)
        assert len(cells) == 5 and len(set(sizes.tolist())) == 1 and cells.min() >= 0
    assert group_cells(graph).count < 30
