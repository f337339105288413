"""Graphs of micro-batches: what is copied, summed, recomputed, and refused."""

import numpy as np
import pytest

from dovetail.errors import ReplicationError, UsageError
from dovetail.graph import Phase
from dovetail.graph.copies import ACCUMULATE
from dovetail.transforms import micro_batched
from dovetail.transforms.micro_batches import changes_of
from tests.support.builders import Op, graph_of, source
from tests.support.training_graphs import layered_step, micro_batches_of

CHAIN = layered_step([(), (0,), (1,)])


def layers_of(graph):
    """[ops] the number in the op's module; -1 for sources."""
    return np.array(
        [
            -1 if graph.is_source[op] else int(graph.modules[op].rpartition(".")[2] or 0)
            for op in range(len(graph))
        ]
    )


def reads_of(graph, name):
    return [graph.names[op] for op in graph.producers[graph.inputs_of(graph.index[name])]]


def test_each_micro_batch_has_its_ops_and_all_have_one_update():
    graph = micro_batched(CHAIN, 3).graph
    for name in ("f.1", "b.1.0", "w.2", "x"):
        assert {f"micro.{k}/{name}" for k in range(3)} <= graph.index.keys()
    assert sum(name.startswith("u.") for name in graph.names) == 3
    assert sum(kind == "parameter" for kind in graph.kinds) == 3
    assert micro_batches_of(graph)[graph.index["micro.2/f.1"]] == 2
    assert micro_batches_of(graph)[graph.index["u.1"]] == -1


def test_gradients_are_added_in_order_into_one_tensor():
    graph = micro_batched(CHAIN, 4).graph
    assert reads_of(graph, "accumulate.1/p.1") == ["micro.0/w.1", "micro.1/w.1"]
    assert reads_of(graph, "accumulate.3/p.1") == ["accumulate.2/p.1", "micro.3/w.1"]
    assert reads_of(graph, "u.1") == ["p.1", "accumulate.3/p.1"]
    sums = [graph.index[f"accumulate.{k}/p.1"] for k in (1, 2, 3)]
    assert len({int(graph.storages[graph.outputs_of(op)[0]]) for op in sums}) == 1
    assert {graph.kinds[op] for op in sums} == {ACCUMULATE}
    # The first makes the tensor, and the last divides.
    assert len({graph.signatures[op] for op in sums}) == 3


def test_updates_wait_for_every_micro_batch_that_reads_the_old_value():
    graph = micro_batched(CHAIN, 3).graph
    update = graph.index["u.1"]
    before = {graph.names[a] for a, b in graph.control.tolist() if b == update}
    assert {f"micro.{k}/f.1" for k in range(3)} <= before


def test_a_buffer_is_written_by_each_micro_batch_from_what_the_one_before_wrote():
    graph = graph_of(
        source("x", "input"),
        source("p"),
        source("mean", "buffer"),
        Op("f", ("x", "p", "mean")),
        Op("new", ("f", "mean")),
        Op("loss", ("f",), output_bytes=4),
        Op("w", ("loss", "x"), phase=Phase.BACKWARD, gradient_of="f"),
        Op("write", ("mean", "new"), phase=Phase.UPDATE, overwrites="mean"),
        Op("u", ("p", "w"), phase=Phase.UPDATE, overwrites="p"),
        outputs=("loss",),
        control=[("f", "write"), ("f", "u")],
    )
    made = micro_batched(graph, 3).graph
    assert reads_of(made, "micro.0/f")[-1] == "mean"
    assert reads_of(made, "micro.2/f")[-1] == "micro.1/write"
    assert reads_of(made, "micro.2/write") == ["micro.1/write", "micro.2/new"]
    # It is written before the backward pass, right behind its readers.
    assert made.index["micro.1/write"] < made.index["micro.1/loss"]


def test_a_recomputing_stage_reads_in_its_backward_ops_what_it_made_again():
    stages = layers_of(CHAIN)
    graph = micro_batched(CHAIN, 2, stages, np.array([False, True, False])).graph
    again = [name for name in graph.names if name.endswith("/again")]
    assert again == ["micro.0/f.1/again", "micro.1/f.1/again"]
    assert reads_of(graph, "micro.1/f.1/again") == ["micro.1/f.0", "p.1"]
    assert "micro.1/f.1/again" in reads_of(graph, "micro.1/b.1.0")
    # Other stages read what was made first.
    assert "micro.1/f.1" in reads_of(graph, "micro.1/w.2")
    assert graph.index["micro.0/f.1/again"] < graph.index["micro.0/b.1.0"]
    update = graph.index["u.1"]
    assert (graph.index["micro.1/f.1/again"], update) in map(tuple, graph.control.tolist())


def test_gradients_of_a_parameter_of_two_stages_are_added_once():
    graph = layered_step([(), (0,), (1,)], tied={2: 0})
    names = micro_batched(graph, 3).graph.names
    assert "micro.0/tied.0.2" in names
    stages = np.where(layers_of(graph) == 2, 1, np.minimum(layers_of(graph), 0))
    made = micro_batched(graph, 3, stages, np.zeros(2, bool)).graph
    assert "tied.0.2" in made.names
    assert "micro.0/tied.0.2" not in made.names
    sums = reads_of(made, "tied.0.2")
    assert all(name.startswith("accumulate.2/") for name in sums)
    # Within one stage nothing is gained by two sums.
    one = micro_batched(graph, 3, np.minimum(layers_of(graph), 0), np.zeros(1, bool)).graph
    assert "micro.0/tied.0.2" in one.names


def test_a_key_tells_which_stages_make_other_graphs():
    stages, none = layers_of(CHAIN), np.zeros(3, bool)
    other = np.minimum(stages, 1)
    assert changes_of(CHAIN, 2, stages, none) == changes_of(CHAIN, 2, other, none[:2])
    some = np.array([False, True, False])
    assert changes_of(CHAIN, 2, stages, some) != changes_of(CHAIN, 2, stages, none)


@pytest.mark.parametrize(("count", "text"), [(1, "use 2 or more"), (10**6, "limit")])
def test_too_few_and_too_many_micro_batches_are_refused(count, text):
    with pytest.raises(UsageError, match=text) as raised:
        micro_batched(CHAIN, count)
    assert raised.value.option == "micro_batches"


def test_a_step_of_inference_is_refused():
    with pytest.raises(ReplicationError, match="micro-batches share the updates"):
        micro_batched(graph_of(source("x", "input"), Op("f", ("x",)), outputs=("f",)), 2)


def test_whole_numbers_cannot_be_accumulated():
    graph = graph_of(
        source("x", "input"),
        source("p"),
        Op("loss", ("x", "p"), output_bytes=4),
        Op("w", ("loss", "x"), phase=Phase.BACKWARD, dtype="int64"),
        Op("u", ("p", "w"), phase=Phase.UPDATE, overwrites="p"),
        outputs=("loss",),
        control=[("loss", "u")],
    )
    with pytest.raises(ReplicationError, match="int64") as raised:
        micro_batched(graph, 2)
    assert raised.value.op == "w"
