import itertools

import numpy as np

from dovetail.graph import Phase, group, group_levels
from dovetail.graph.grouping import colocate, merge_single_consumers
from tests.support.builders import Op, graph_of, source


def sets(graph, groups):
    """The groups as sets of op names."""
    return {
        frozenset(graph.names[op] for op in np.flatnonzero(groups.of_op == g))
        for g in range(groups.count)
    }


def test_colocation_joins_updates_views_and_gradients():
    graph = graph_of(
        source("w"),
        Op("a", ("w",)),
        Op("view", ("a",), view_of="a"),
        Op("b", ("view",)),
        Op("grad_b", ("b",), phase=Phase.BACKWARD, gradient_of="b"),
        Op("update", ("w", "grad_b"), phase=Phase.UPDATE, overwrites="w"),
    )
    assert sets(graph, colocate(graph)) == {
        frozenset({"w", "update"}),
        frozenset({"a", "view"}),
        frozenset({"b", "grad_b"}),
    }


def test_ops_of_one_colocation_id_share_a_group():
    graph = graph_of(Op("a", colocation=3), Op("b", colocation=-1), Op("c", colocation=3))
    assert sets(graph, colocate(graph)) == {frozenset({"a", "c"}), frozenset({"b"})}


def test_a_chain_melts_into_one_group_and_a_fork_does_not():
    #  a ─► b ─┬─► c ─► d ─┬─► f          b has two consumers, so it stays; c and d join f
    #          └─► e ──────┘
    graph = graph_of(
        Op("a"),
        Op("b", ("a",)),
        Op("c", ("b",)),
        Op("d", ("c",)),
        Op("e", ("b",)),
        Op("f", ("d", "e")),
    )
    # Once c, d and e have joined f, the consumers of b are one group, and b joins as well.
    merged = merge_single_consumers(graph, colocate(graph))
    assert merged.count == 1

    two_ends = graph_of(Op("a"), Op("b", ("a",)), Op("c", ("b",)), Op("e", ("b",)))
    assert sets(two_ends, merge_single_consumers(two_ends, colocate(two_ends))) == {
        frozenset({"a", "b"}),
        frozenset({"c"}),
        frozenset({"e"}),
    }


def test_a_merge_stops_at_the_largest_share():
    ops = [Op("op0")] + [Op(f"op{i}", (f"op{i - 1}",)) for i in range(1, 64)]
    graph = graph_of(*ops)
    groups = merge_single_consumers(graph, colocate(graph), largest_share=1 / 4)
    assert groups.count >= 4
    assert np.bincount(groups.of_op).max() <= 16


def test_levels_only_split_what_the_one_before_joined():
    chains = [
        Op(f"{chain}{i}", (f"{chain}{i - 1}",) if i else ("x",))
        for chain in "abc"
        for i in range(400)
    ]
    graph = graph_of(source("x", "input"), *chains, Op("end", ("a399", "b399", "c399")))
    levels = group_levels(graph)
    units = [unit_of[levels.finest.of_op] for unit_of in levels.coarser]
    assert np.array_equal(units[0], group(graph).of_op)
    assert np.array_equal(levels.finest.of_op, colocate(graph).of_op)
    counts = [int(unit_of.max()) + 1 for unit_of in units] + [levels.finest.count]
    assert len(counts) == 4 and all(a < b for a, b in itertools.pairwise(counts))
    for coarse, fine in itertools.pairwise([*units, levels.finest.of_op]):
        pairs = np.unique(np.stack([fine, coarse]), axis=1)
        assert len(pairs[0]) == fine.max() + 1


def test_groups_that_the_rule_does_not_join_have_no_levels():
    graph = graph_of(*[Op(f"op{i}") for i in range(5)])
    assert group_levels(graph).coarser == ()


def test_groups_are_numbered_by_their_first_op_and_cover_all():
    graph = graph_of(*[Op(f"op{i}") for i in range(5)], Op("end", ("op3", "op1")))
    groups = group(graph)
    first = [int(np.flatnonzero(groups.of_op == g)[0]) for g in range(groups.count)]
    assert first == sorted(first)
    assert groups.of_op.min() >= 0


def test_an_unwritten_source_goes_with_its_first_reader():
    graph = graph_of(source("x", "input"), Op("a"), Op("b", ("x",)), Op("c", ("x",)))
    groups = colocate(graph)
    assert groups.of_op[0] == groups.of_op[2] != groups.of_op[3]


def test_a_gradients_view_of_an_arriving_gradient_does_not_chain_layers():
    graph = graph_of(
        Op("a"),
        Op("b", ("a",)),
        Op("grad_b", ("b",), phase=Phase.BACKWARD, gradient_of="b"),
        Op("t", ("grad_b",), phase=Phase.BACKWARD, gradient_of="a", view_of="grad_b"),
        Op("grad_a", ("t",), phase=Phase.BACKWARD, gradient_of="a"),
    )
    assert sets(graph, colocate(graph)) == {
        frozenset({"a", "t", "grad_a"}),
        frozenset({"b", "grad_b"}),
    }


def test_a_parameter_joins_its_one_reader_and_stays_apart_from_several():
    def network(readers):
        cells = [Op(f"cell{i}", ("w", f"x{i}")) for i in range(readers)]
        sums = [Op(f"x{i}") for i in range(readers)]
        ends = [Op(f"end{i}{j}", (f"cell{i}",)) for i in range(readers) for j in "ab"]
        update = Op("update", ("w",), phase=Phase.UPDATE, overwrites="w")
        return graph_of(source("w"), *sums, *cells, *ends, update)

    one, two = network(1), network(2)
    assert {"w", "update", "cell0", "x0"} in sets(one, merge_single_consumers(one, colocate(one)))
    assert {"w", "update"} in sets(two, merge_single_consumers(two, colocate(two)))


def test_the_last_cells_of_two_layers_stay_apart():
    #   a0 ─► a1        layer a reads wa in both cells, layer b reads wb;
    #    │     │        a1 has one consumer, b1, and would join it
    #   b0 ─► b1 ─► end
    graph = graph_of(
        source("wa"),
        source("wb"),
        Op("a0", ("wa",)),
        Op("a1", ("wa", "a0")),
        Op("b0", ("wb", "a0")),
        Op("b1", ("wb", "b0", "a1")),
        Op("end", ("b1",)),
    )
    found = sets(graph, merge_single_consumers(graph, colocate(graph)))
    assert {"a1"} in [names - {"wa", "wb"} for names in found]
    assert any({"b1", "end"} <= names for names in found)
