"""Towers: every op once a tower, what is shared once, and updates that wait for every reader."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import GraphError, InvalidError, ReplicationError, UsageError
from dovetail.graph import Phase, colocate, group, layered, load_graph, save_graph
from dovetail.graph.copies import AVERAGE, tower_count, towers_of
from dovetail.transforms import replicate
from tests.support.builders import Op, graph_of, source
from tests.support.towers import update_towers_of


def step(*more, optimizer_reads=(), control=(), **fields):
    """One replica: y = w x, a loss, the gradient of w, and an update with one state tensor."""
    ops = (
        source("w", output_bytes=80, module="layer"),
        source("m", kind="state", output_bytes=80),
        source("x", kind="input", output_bytes=40),
        Op("y", ("w", "x"), flops=100, module="layer"),
        Op("loss", ("y",), output_bytes=4),
        Op("g", ("loss", "x"), phase=Phase.BACKWARD, output_bytes=80, flops=200, gradient_of="y"),
        *more,
        Op("w/sgd", ("w", "g", "m"), phase=Phase.UPDATE, flops=9, output_bytes=80,
           overwrites="w", module="layer"),
    )  # fmt: skip
    return graph_of(*ops, outputs=("loss",), control=control)


def edges(graph):
    """(name, name) of every edge, data and control."""
    befores = np.concatenate([graph.producers[graph.input_tensors], graph.control[:, 0]])
    afters = np.concatenate([graph.readers, graph.control[:, 1]])
    return {
        (graph.names[a], graph.names[b])
        for a, b in zip(befores.tolist(), afters.tolist(), strict=True)
    }


def test_synchronous_towers_meet_in_one_average_and_one_update():
    #  x ─► y ─► loss ─► g ─┐                ┌─► average/loss
    #  w ──►┤               ├─► average/w ─► w/sgd
    #  x ─► y ─► loss ─► g ─┘
    found = replicate(step(), 2).graph
    own = {
        (f"tower.{r}/{a}", f"tower.{r}/{b}")
        for r in range(2)
        for a, b in (("x", "y"), ("y", "loss"), ("loss", "g"), ("x", "g"))
    }
    meeting = {
        pair
        for r in range(2)
        for pair in (
            ("w", f"tower.{r}/y"),
            (f"tower.{r}/g", "average/w"),
            (f"tower.{r}/loss", "average/loss"),
        )
    }
    shared = {("average/w", "w/sgd"), ("w", "w/sgd"), ("m", "w/sgd")}
    assert edges(found) == own | meeting | shared
    assert found.names == (
        "w", "m", "tower.0/x", "tower.1/x",
        "tower.0/y", "tower.0/loss", "tower.0/g", "tower.1/y", "tower.1/loss", "tower.1/g",
        "average/loss", "average/w", "w/sgd",
    )  # fmt: skip
    at = found.index
    assert [found.names[found.producers[t]] for t in found.outputs] == ["average/loss"]
    assert found.modules[at["tower.1/y"]] == "tower.1.layer"
    assert found.modules[at["tower.1/loss"]] == "tower.1"
    assert found.modules[at["average/w"]] == "layer"
    assert found.kinds[at["average/w"]] == AVERAGE
    assert found.flops[at["average/w"]] == 2 * 20
    assert found.accessed_bytes[at["average/w"]] == 3 * 80
    assert found.phases[at["average/w"]] == Phase.UPDATE
    assert found.phases[at["average/loss"]] == Phase.FORWARD
    assert found.names[found.gradient_of[at["tower.1/g"]]] == "tower.1/y"


def test_asynchronous_towers_update_one_after_another_once_all_have_read():
    found = replicate(step(), 3, synchronous=False).graph
    at = found.index
    updates = [f"w/sgd/tower.{r}" for r in range(3)]
    assert AVERAGE in found.kinds  # of the losses, and of nothing else
    assert sum(kind == AVERAGE for kind in found.kinds) == 1
    reads = [[found.names[found.producers[t]] for t in found.inputs_of(at[u])] for u in updates]
    assert reads == [
        ["w", "tower.0/g", "m"],
        ["w/sgd/tower.0", "tower.1/g", "m"],
        ["w/sgd/tower.1", "tower.2/g", "m"],
    ]
    waits = {(f"tower.{r}/y", updates[0]) for r in (1, 2)}
    assert {(found.names[a], found.names[b]) for a, b in found.control} == waits
    assert len({int(found.colocation[at[u]]) for u in updates}) == 1
    assert found.colocation[at[updates[0]]] >= 0
    assert found.modules[at[updates[1]]] == "layer"
    assert found.names[found.residences[at["w"]]] == updates[0]


def test_state_that_an_update_writes_is_handed_on_too():
    one = graph_of(
        source("w"), source("m", kind="state"), source("x", kind="input"),
        Op("loss", ("w", "x"), output_bytes=4),
        Op("g", ("loss",), phase=Phase.BACKWARD),
        Op("momentum", ("m", "g"), phase=Phase.UPDATE, overwrites="m"),
        Op("sgd", ("w", "momentum"), phase=Phase.UPDATE, overwrites="w"),
        outputs=("loss",),
    )  # fmt: skip
    found = replicate(one, 2, synchronous=False).graph
    read = [found.names[found.producers[t]] for t in found.inputs_of(found.index["sgd/tower.1"])]
    assert read == ["sgd/tower.0", "momentum/tower.1"]
    read = [
        found.names[found.producers[t]] for t in found.inputs_of(found.index["momentum/tower.1"])
    ]
    assert read == ["momentum/tower.0", "tower.1/g"]
    synchronous = replicate(one, 2).graph
    assert synchronous.names[-3:] == ("average/momentum", "momentum", "sgd")


def buffered(**fields):
    """A step that keeps a running mean: `norm` reads it, `blend` mixes it with the batch's."""
    return step(
        source("mean", kind="buffer", module="layer"),
        Op("norm", ("y", "mean")),
        Op("blend", ("mean", "y")),
        Op("mean/copy_", ("mean", "blend"), phase=Phase.UPDATE, overwrites="mean", module="layer"),
        **fields,
    )


@pytest.mark.parametrize("synchronous", [True, False])
def test_buffers_get_the_values_of_tower_0_after_all_towers_have_read_them(synchronous):
    one = buffered(control=[("norm", "mean/copy_")])
    found = replicate(one, 3, synchronous=synchronous).graph
    copies = [name for name in found.names if name.endswith("copy_")]
    assert copies == ["tower.0/mean/copy_"]
    assert [name for name in found.names if "blend" in name] == ["tower.0/blend"]
    copy = found.index[copies[0]]
    assert found.names[found.residences[found.index["mean"]]] == copies[0]
    before = {found.names[a] for a, b in found.control if b == copy}
    assert before == {f"tower.{r}/norm" for r in range(3)}
    assert AVERAGE not in {found.kinds[found.producers[t]] for t in found.inputs_of(copy)}


def test_a_buffer_that_only_its_update_orders_waits_for_the_readers_of_every_tower():
    one = step(
        source("mean", kind="buffer"),
        Op("norm", ("y", "mean")),
        Op("mean/copy_", ("mean", "norm"), phase=Phase.UPDATE, overwrites="mean"),
        Op("more", ("norm",)),
    )
    found = replicate(one, 2).graph
    assert ("tower.1/norm", "tower.0/mean/copy_") in edges(found)
    assert "tower.1/norm" in found.names  # it serves `more` too


def test_a_dead_end_of_the_replica_is_a_dead_end_of_each_tower():
    found = replicate(buffered(), 2).graph  # nobody reads `norm`
    assert {"tower.0/norm", "tower.1/norm"} <= set(found.names)


def test_a_parameter_read_often_is_waited_for_by_one_edge_a_tower():
    cells = [Op(f"h{i}", ("w", f"h{i - 1}" if i else "x")) for i in range(40)]
    one = graph_of(
        source("w"), source("x", kind="input"), *cells,
        Op("loss", ("h39",), output_bytes=4),
        Op("g", ("loss",), phase=Phase.BACKWARD),
        Op("w/sgd", ("w", "g"), phase=Phase.UPDATE, overwrites="w"),
        outputs=("loss",),
    )  # fmt: skip
    found = replicate(one, 3, synchronous=False).graph
    waits = [(found.names[a], found.names[b]) for a, b in found.control]
    assert waits == [("tower.1/g", "w/sgd/tower.0"), ("tower.2/g", "w/sgd/tower.0")]


def test_outputs_that_are_no_floating_point_numbers_are_returned_by_every_tower():
    one = graph_of(
        source("w"), source("x", kind="input"),
        Op("loss", ("w", "x"), output_bytes=4), Op("right", ("w", "x"), dtype="int64"),
        Op("g", ("loss",), phase=Phase.BACKWARD),
        Op("w/sgd", ("w", "g"), phase=Phase.UPDATE, overwrites="w"),
        outputs=("right", "loss", "w/sgd"),
    )  # fmt: skip
    found = replicate(one, 2, synchronous=False).graph
    outputs = [found.names[found.producers[t]] for t in found.outputs]
    assert outputs == ["tower.0/right", "tower.1/right", "average/loss", "w/sgd/tower.1"]


def test_a_mean_fills_memory_where_its_gradient_does_not():
    one = step()
    fields = {name: getattr(one, name) for name in one.__dataclass_fields__}
    g = one.index["g"]
    fields["strides"] = tuple((0,) if t == g else s for t, s in enumerate(one.strides))
    one = type(one)(**fields)
    found = replicate(one, 2).graph
    at = found.index
    assert found.strides[found.outputs_of(at["tower.1/g"])[0]] == (0,)
    assert found.strides[found.outputs_of(at["average/w"])[0]] == (1,)
    assert found.signatures[at["w/sgd"]] != one.signatures[one.index["w/sgd"]]
    same = replicate(step(), 2).graph
    assert same.signatures[same.index["w/sgd"]] == step().signatures[step().index["w/sgd"]]


def test_ids_of_colocation_are_a_towers_own_unless_something_shared_has_them():
    one = graph_of(
        source("w", colocation=1), source("x", kind="input"),
        Op("a", ("w", "x"), colocation=0), Op("b", ("a",), colocation=0),
        Op("loss", ("b",), output_bytes=4),
        Op("g", ("loss",), phase=Phase.BACKWARD),
        Op("w/sgd", ("w", "g"), phase=Phase.UPDATE, overwrites="w", colocation=1),
        outputs=("loss",),
    )  # fmt: skip
    found = replicate(one, 2).graph
    ids = {name: int(found.colocation[op]) for name, op in found.index.items()}
    assert ids["tower.0/a"] == ids["tower.0/b"] != ids["tower.1/a"] == ids["tower.1/b"]
    assert ids["w"] == ids["w/sgd"] not in (-1, ids["tower.0/a"], ids["tower.1/a"])
    assert ids["tower.0/loss"] == ids["average/w"] == -1


networks = st.builds(
    lambda ops, width, seed: layered(ops, width=width, depth=4, seed=seed, training=True),
    ops=st.integers(60, 400),
    width=st.integers(1, 4),
    seed=st.integers(0, 9),
)


def ancestors(graph):
    """[ops] a set of bits each: the ops before it, by data and control."""
    before = [0] * len(graph)
    control = {}
    for a, b in graph.control.tolist():
        control.setdefault(b, []).append(a)
    for op in range(len(graph)):
        for a in [*graph.producers[graph.inputs_of(op)].tolist(), *control.get(op, ())]:
            before[op] |= before[a] | 1 << a
    return before


@settings(max_examples=25, deadline=None)
@given(networks, st.integers(2, 5), st.booleans())
def test_every_op_is_there_once_a_tower_and_what_is_shared_once(one, replicas, synchronous):
    found = replicate(one, replicas, synchronous=synchronous)
    graph, (_, origins, towers, reduced) = found.graph, found.rows
    copies = np.zeros((replicas + 1, len(one)), int)
    real = origins >= 0
    np.add.at(copies, (towers[real] + 1, origins[real]), 1)
    inputs = np.array([kind == "input" for kind in one.kinds])
    updates = one.phases == Phase.UPDATE
    own = inputs | np.isin(one.phases, (Phase.FORWARD, Phase.BACKWARD))
    assert (copies[1:, own] == 1).all()
    assert not copies[0, own].any()
    assert (copies[0, one.is_source & ~inputs] == 1).all()
    assert (copies[1:, updates] == (not synchronous)).all()
    assert (copies[0, updates] == synchronous).all()
    assert tower_count(graph) == replicas
    assert (towers_of(graph) == np.where(graph.phases == Phase.UPDATE, -1, towers)).all()
    assert (update_towers_of(graph) == np.where(graph.phases == Phase.UPDATE, towers, -1)).all()
    means = sum(replicas * math.prod(one.shapes[t]) for t in reduced[~real].tolist())
    times = 1 if synchronous else replicas
    assert graph.flops.sum() == (
        replicas * one.flops[own].sum() + times * one.flops[updates].sum() + means
    )
    for column in ("kinds", "signatures", "device_kinds"):
        values = getattr(graph, column)
        assert all(values[op] == getattr(one, column)[origins[op]] for op in np.flatnonzero(real))


@settings(max_examples=25, deadline=None)
@given(networks, st.integers(2, 4), st.booleans())
def test_towers_meet_in_nothing_but_what_is_shared(one, replicas, synchronous):
    graph = replicate(one, replicas, synchronous=synchronous).graph
    own = towers_of(graph)
    befores = np.concatenate([graph.producers[graph.input_tensors], graph.control[:, 0]])
    afters = np.concatenate([graph.readers, graph.control[:, 1]])
    apart = (own[befores] >= 0) & (own[afters] >= 0)
    assert (own[befores] == own[afters])[apart].all()
    into = (own[befores] < 0) & (own[afters] >= 0)
    assert graph.is_source[befores[into]].all()
    storages = own[graph.producers]
    for tower in range(replicas):
        others = graph.storages[(storages >= 0) & (storages != tower)]
        assert not np.isin(graph.storages[storages == tower], others).any()


@settings(max_examples=25, deadline=None)
@given(networks, st.integers(2, 4), st.booleans())
def test_no_value_is_written_over_before_every_tower_has_read_it(one, replicas, synchronous):
    graph = replicate(one, replicas, synchronous=synchronous).graph
    before = ancestors(graph)
    read = 0
    for storage, writers in graph.writers.items():
        assert len(writers) == (1 if synchronous else replicas)
        for tensor in np.flatnonzero((graph.storages == storage) & ~graph.overwrites).tolist():
            for reader in graph.consumers_of(tensor).tolist():
                if reader not in writers:
                    assert before[writers[0]] >> reader & 1
                    read += 1
        for earlier, later in pairwise(writers):
            assert before[later] >> earlier & 1
    assert read > 0
    groups = colocate(graph).of_op
    assert all(len(set(groups[list(w)].tolist())) == 1 for w in graph.writers.values())


@pytest.mark.parametrize("synchronous", [True, False])
def test_groups_are_a_towers_own_and_alike_in_every_tower(synchronous):
    graph = replicate(layered(1500, width=4, training=True), 3, synchronous=synchronous).graph
    groups, towers = group(graph), towers_of(graph)
    of_group = [set() for _ in range(groups.count)]
    for op in np.flatnonzero(~graph.is_source | (towers >= 0)).tolist():
        of_group[groups.of_op[op]].add(int(towers[op]))
    assert all(len(found) <= 1 for found in of_group)
    counts = [sum(found == {tower} for found in of_group) for tower in range(3)]
    assert counts[0] == counts[1] == counts[2] > 8


def test_a_graph_from_a_file_has_the_same_towers(tmp_path):
    one = layered(500, width=2, training=True)
    save_graph(one, tmp_path / "one.json")
    graph = replicate(load_graph(tmp_path / "one.json"), 2).graph
    assert graph.fingerprint == replicate(one, 2).graph.fingerprint
    save_graph(graph, tmp_path / "two.json.gz")
    loaded = load_graph(tmp_path / "two.json.gz")
    assert loaded.fingerprint == graph.fingerprint
    assert (towers_of(loaded) == towers_of(graph)).all()


def test_a_graph_that_was_not_replicated_has_no_towers():
    one = step(Op("tower.0/a", ("y",), module="tower.0"))
    assert tower_count(one) == 1
    assert (towers_of(one) == -1).all()
    assert (update_towers_of(one) == -1).all()


@pytest.mark.parametrize("replicas", [1, 0, -3])
def test_fewer_than_two_replicas_are_an_error(replicas):
    with pytest.raises(UsageError) as caught:
        replicate(step(), replicas)
    assert caught.value.option == "replicas"


def test_more_towers_than_memory_holds_are_refused_before_any_is_made():
    with pytest.raises(UsageError, match="which is the limit; use at most 1"):
        replicate(step(), 10**12)


def test_a_number_of_very_many_digits_is_no_towers():
    graph = graph_of(source("w"), Op(f"tower.{'9' * 5000}/y", ("w",)))
    assert (towers_of(graph) == -1).all()


def test_inference_has_no_towers():
    one = graph_of(source("w"), Op("y", ("w",)), outputs=("y",))
    with pytest.raises(ReplicationError, match="inference") as caught:
        replicate(one, 2)
    assert caught.value.op == ""
    assert isinstance(caught.value, GraphError)
    assert isinstance(caught.value, InvalidError)


def test_a_step_without_a_loss_has_no_towers():
    one = graph_of(
        source("w"), Op("g", ("w",), phase=Phase.BACKWARD),
        Op("sgd", ("w", "g"), phase=Phase.UPDATE, overwrites="w"), outputs=("sgd",),
    )  # fmt: skip
    with pytest.raises(ReplicationError, match="no loss"):
        replicate(one, 2)


def test_towers_of_towers_and_a_module_named_tower_are_errors():
    with pytest.raises(ReplicationError, match="already"):
        replicate(replicate(step(), 2).graph, 2)
    with pytest.raises(ReplicationError, match="named 'tower'"):
        replicate(step(Op("a", ("y",), module="tower.left")), 2)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (Op("late", ("w/first",)), "reads what an update made"),
        (Op("late", ("y",)), "waits for an update"),
        (Op("late", ("m",), overwrites="m"), "is no update"),
    ],
)
def test_an_op_that_belongs_to_neither_side_is_named(more, match):
    first = Op("w/first", ("w",), phase=Phase.UPDATE, output_bytes=80, overwrites="w")
    control = [("w/first", "late")] if "waits" in match else []
    with pytest.raises(ReplicationError, match=match) as caught:
        replicate(step(first, more, control=control), 2)
    assert caught.value.op == "late"
