import itertools
from dataclasses import fields, replace

import numpy as np
import pytest

from dovetail.errors import (
    CycleError,
    DuplicateOpError,
    GraphError,
    InvalidSizeError,
    UnknownProducerError,
)
from dovetail.graph import EVERYWHERE, HOST, Graph, Phase
from tests.support.builders import Op, graph_of, source


def training_graph():
    # x ──► mm ──► loss ──► grad ──► update ──► (w)
    # w ──► t ─────┘                  ▲
    # w ──────────────────────────────┘
    return graph_of(
        source("x", "input"),
        source("w"),
        source("c", "constant"),
        Op("t", ("w",), view_of="w"),
        Op("mm", ("x", "t")),
        Op("loss", ("mm", "c")),
        Op("grad", ("loss", "x"), phase=Phase.BACKWARD, gradient_of="mm"),
        Op("update", ("w", "grad"), phase=Phase.UPDATE, overwrites="w"),
        outputs=("loss",),
        control=(("mm", "update"),),
    )


def test_a_column_that_is_left_out_is_neutral():
    graph = graph_of(source("w"), Op("a", ("w",)))
    optional = ("colocation", "gradient_of", "device_kinds", "overwrites", "control")
    columns = {
        field.name: getattr(graph, field.name)
        for field in fields(graph)
        if field.name not in optional
    }
    assert Graph(**columns).fingerprint == graph.fingerprint


def test_a_view_has_the_base_its_op_reads_and_fresh_memory_has_none():
    graph = training_graph()
    w, t, update = (graph.index[name] for name in ("w", "t", "update"))
    assert graph.bases[t] == w
    assert graph.bases[update] == w
    assert (np.delete(graph.bases, [t, update]) == -1).all()


def test_sources_live_on_the_host_with_their_writer_or_everywhere():
    graph = training_graph()
    assert graph.residences[graph.index["x"]] == HOST
    assert graph.residences[graph.index["w"]] == graph.index["update"]
    assert graph.residences[graph.index["c"]] == EVERYWHERE


def test_consumers_and_outputs_are_the_inverse_of_inputs_and_producers():
    graph = training_graph()
    for op in range(len(graph)):
        for tensor in graph.inputs_of(op):
            assert op in graph.consumers_of(tensor)
        for tensor in graph.outputs_of(op):
            assert graph.producers[tensor] == op


def test_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        training_graph().flops[0] = 1


def test_equal_graphs_share_a_fingerprint_and_any_field_changes_it():
    graph = training_graph()
    assert graph.fingerprint == training_graph().fingerprint
    changed = replace(graph, flops=graph.flops + 1)
    assert changed.fingerprint != graph.fingerprint
    assert len(fields(graph)) == 21


def test_a_cycle_is_named_as_data_flows():
    good = graph_of(Op("a"), Op("b", ("a",)), Op("c", ("b",)))
    with pytest.raises(CycleError) as raised:
        replace(good, input_offsets=np.array([0, 1, 2, 3]), input_tensors=np.array([2, 0, 1]))
    cycle = raised.value.cycle
    assert cycle[0] == cycle[-1]
    assert set(itertools.pairwise(cycle)) == {("a", "b"), ("b", "c"), ("c", "a")}


def test_an_order_that_is_not_topological_is_refused_with_both_names():
    good = graph_of(Op("a"), Op("b", ("a",)))
    with pytest.raises(GraphError, match="'a' needs 'b'"):
        replace(good, input_offsets=np.array([0, 1, 1]), input_tensors=np.array([1]))


def test_two_ops_of_one_name_are_refused():
    with pytest.raises(DuplicateOpError) as raised:
        graph_of(Op("a"), Op("a"))
    assert raised.value.op == "a"


def test_a_read_of_no_tensor_is_refused():
    with pytest.raises(UnknownProducerError) as raised:
        replace(graph_of(Op("a"), Op("b", ("a",))), input_tensors=np.array([7]))
    assert (raised.value.op, raised.value.tensor) == ("b", 7)


@pytest.mark.parametrize("field", ["flops", "accessed_bytes", "tensor_bytes"])
def test_a_negative_size_names_its_op_and_field(field):
    graph = graph_of(Op("a"), Op("b", ("a",)))
    with pytest.raises(InvalidSizeError) as raised:
        replace(graph, **{field: np.array([1, -1])})
    assert (raised.value.op, raised.value.field, raised.value.value) == ("b", field, -1)


def test_an_alias_of_what_its_op_does_not_read_is_refused():
    with pytest.raises(GraphError, match="'b' returns an alias"):
        graph_of(Op("a"), Op("b", (), view_of="a"))


def test_a_source_that_reads_is_refused():
    with pytest.raises(GraphError, match="'b' reads a tensor"):
        graph_of(Op("a"), Op("b", ("a",), kind="input", phase=Phase.SOURCE))


def test_a_control_edge_of_a_source_is_refused():
    with pytest.raises(GraphError, match="control edge"):
        graph_of(source("w"), Op("a"), control=(("w", "a"),))


@pytest.mark.parametrize("storage", [-1, 2])
def test_a_storage_that_is_no_tensors_is_refused(storage):
    with pytest.raises(GraphError, match=f"tensor 1 has storage {storage}"):
        replace(graph_of(Op("a"), Op("b")), storages=np.array([0, storage]))


def test_a_kind_of_device_runs_the_ops_that_allow_it_and_a_host_runs_none():
    graph = graph_of(Op("a"), Op("b", device_kinds=("cpu",)), Op("c", device_kinds=("cpu", "gpu")))
    assert graph.runs_on("cpu").tolist() == [True, True, True]
    assert graph.runs_on("gpu").tolist() == [True, False, True]
    assert graph.runs_on("host").tolist() == [False, False, False]


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(GraphError, match="kinds has 1 entries, not 2"):
        replace(graph_of(Op("a"), Op("b")), kinds=("k",))
