import numpy as np
import pytest

from dovetail.errors import GraphError
from dovetail.graph import Phase, group, layered


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("ops", [4, 5, 100, 1234, 5000])
def test_a_network_has_exactly_the_ops_asked_for(ops, training):
    graph = layered(ops, width=3, depth=6, training=training)
    assert len(graph) == graph.tensors == ops


def test_the_same_arguments_give_the_same_network_and_a_seed_another():
    one, same, other = (layered(2000, seed=seed).fingerprint for seed in (1, 1, 2))
    assert one == same != other


def test_blocks_repeat_one_shape():
    graph = layered(3000, width=4)
    kinds = [[], []]
    for kind, module in zip(graph.kinds, graph.modules, strict=True):
        for block in range(2):
            if module.startswith(f"blocks.{block}."):
                kinds[block].append((kind, module.removeprefix(f"blocks.{block}.")))
    assert kinds[0] == kinds[1]
    assert {inside for _, inside in kinds[0]} == {f"branch.{i}" for i in range(4)}


def test_branches_cross_between_blocks_and_small_ops_mix_with_large_ones():
    graph = layered(5000)
    branch = np.array([module.rpartition(".")[2] for module in graph.modules])
    inside = np.array([".branch." in module for module in graph.modules])
    ends = np.stack([graph.producers[graph.input_tensors], graph.readers])
    ends = ends[:, inside[ends].all(axis=0)]
    crossing = branch[ends[0]] != branch[ends[1]]
    assert 0 < crossing.mean() < 0.1
    products = graph.flops[[kind == "mm" for kind in graph.kinds]]
    assert products.max() >= 16 * products.min()


def test_in_training_every_product_has_a_gradient_and_every_parameter_an_update():
    graph = layered(3000, training=True)
    of_kind = np.array(graph.kinds)
    forward = (graph.phases == Phase.FORWARD) & (of_kind == "mm")
    parameters = np.flatnonzero(of_kind == "parameter")
    assert forward.sum() == len(parameters) == (graph.phases == Phase.UPDATE).sum()
    graded = np.bincount(graph.gradient_of[graph.gradient_of >= 0], minlength=len(graph))
    assert (graded[forward] == 2).all()
    assert (graph.phases[graph.residences[parameters]] == Phase.UPDATE).all()
    # Nothing overtakes: an update waits for the gradient that reads its parameter.
    update = graph.residences[parameters[0]]
    readers = graph.consumers_of(int(graph.outputs_of(parameters[0])[0]))
    backward = readers[graph.phases[readers] == Phase.BACKWARD]
    assert {(int(b), int(update)) for b in backward} <= {tuple(e) for e in graph.control.tolist()}


def test_a_gradient_reads_the_gradients_of_all_its_consumers():
    graph = layered(2000, training=True)
    gradient = np.full(len(graph), -1)
    backward = np.flatnonzero([kind.endswith("_backward") for kind in graph.kinds])
    gradient[graph.gradient_of[backward]] = backward
    for op in np.flatnonzero(gradient >= 0).tolist():
        after = {
            int(gradient[c]) for c in graph.consumers_of(op) if graph.phases[c] == Phase.FORWARD
        }
        read = {int(graph.producers[t]) for t in graph.inputs_of(int(gradient[op]))}
        assert after - {-1} <= read


def test_too_few_ops_are_an_error():
    with pytest.raises(GraphError):
        layered(3)
    with pytest.raises(GraphError):
        layered(100, width=0)


def test_groups_follow_branches():
    graph = layered(5000)
    groups = group(graph)
    assert 30 < groups.count < 1000
