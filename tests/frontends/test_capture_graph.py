"""What a captured graph says is so."""

import dataclasses
import pickle
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dovetail.frontends import (
    SGD,
    Adam,
    capture,
    example_values,
    initial_values,
    parse_optimizer,
    resolve,
    run_call,
    run_step,
    seed_for,
)
from dovetail.graph import Phase

RNNLM = "zoo:rnnlm?hidden=8&steps=3&batch=4&vocabulary=20"
INCEPTION = "zoo:inception_v3?width=0.1&size=75&batch=2&classes=5"


@pytest.fixture(scope="module")
def rnnlm():
    return resolve(RNNLM, train=Adam())


@pytest.fixture(scope="module")
def inception():
    return resolve(INCEPTION, train=parse_optimizer("momentum"))


@pytest.fixture(params=["rnnlm", "inception"])
def captured(request):
    return request.getfixturevalue(request.param)


def start(captured):
    """Values of all source tensors."""
    values = initial_values(captured)
    inputs, targets = example_values(captured)
    given = {f"input.{i}": x for i, x in enumerate(inputs)}
    given |= {f"target.{i}": x for i, x in enumerate(targets)}
    for op, source in enumerate(captured.program.sources):
        if source is not None and source.role == "input":
            values[captured.graph.outputs_of(op)[0]] = given[source.name]
    return values


def run_in(captured, order):
    values = start(captured)
    for op in order:
        call = captured.program.calls[op]
        if call is not None:
            run_call(call, values, seed_for(0, 0, op))
    return values


def test_every_tensor_is_as_the_graph_says(captured):
    graph = captured.graph
    tensors = run_in(captured, range(len(graph)))
    assert sorted(tensors) == list(range(graph.tensors))
    for tensor, value in tensors.items():
        assert tuple(value.shape) == graph.shapes[tensor]
        assert value.numel() < 2 or value.stride() == graph.strides[tensor], graph.names[
            graph.producers[tensor]
        ]
        assert str(value.dtype) == f"torch.{graph.dtypes[tensor]}"
        assert value.numel() * value.element_size() == graph.tensor_bytes[tensor]


def test_tensors_share_memory_exactly_where_they_share_a_storage(captured):
    tensors = run_in(captured, range(len(captured.graph)))
    addresses, storages = {}, {}
    for tensor, storage in enumerate(captured.graph.storages.tolist()):
        address = tensors[tensor].untyped_storage().data_ptr()
        if tensors[tensor].numel():
            assert addresses.setdefault(storage, address) == address
            assert storages.setdefault(address, storage) == storage


def test_any_order_that_keeps_the_edges_gives_the_same_bits(captured):
    graph, rng = captured.graph, random.Random(0)
    expected = run_in(captured, range(len(graph)))
    for _ in range(2):
        found = run_in(captured, random_order(graph, rng))
        for tensor, producer in enumerate(graph.producers.tolist()):
            # The content of `empty` is whatever lay there.
            if graph.kinds[producer] != "aten.empty_like":
                assert torch.equal(found[tensor], expected[tensor]), graph.names[producer]


def random_order(graph, rng):
    before = [set() for _ in graph.names]
    for read, op in zip(graph.input_tensors.tolist(), graph.readers.tolist(), strict=True):
        before[op].add(int(graph.producers[read]))
    for first, second in graph.control.tolist():
        before[second].add(first)
    after = [[] for _ in graph.names]
    for op, ops in enumerate(before):
        for first in ops:
            after[first].append(op)
    missing = [len(ops) for ops in before]
    ready = [op for op, count in enumerate(missing) if not count]
    order = []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for op in after[order[-1]]:
            missing[op] -= 1
            if not missing[op]:
                ready.append(op)
    assert len(order) == len(graph)
    return order


def test_ops_write_only_what_they_say(captured):
    values = start(captured)
    graph = captured.graph
    for op, call in enumerate(captured.program.calls):
        if call is None:
            continue
        reads = graph.inputs_of(op).tolist()
        # As bytes: memory that nothing has written yet may hold what is not a number.
        before = {t: values[t].numpy().tobytes() for t in reads}
        run_call(call, values, 0)
        written = {graph.storages[t] for t in graph.outputs_of(op) if graph.overwrites[t]}
        assert bool(written) == call.in_place
        for tensor in reads:
            if graph.storages[tensor] not in written:
                assert before[tensor] == values[tensor].numpy().tobytes(), graph.names[op]


def test_control_edges_are_those_that_data_does_not_imply(captured):
    graph = captured.graph
    ancestors = [set() for _ in graph.names]
    for op in range(len(graph)):
        for read in graph.inputs_of(op).tolist():
            producer = int(graph.producers[read])
            ancestors[op] |= ancestors[producer] | {producer}
    expected = set()
    for tensor in np.flatnonzero(graph.overwrites).tolist():
        writer = int(graph.producers[tensor])
        for alias in np.flatnonzero(graph.storages == graph.storages[tensor]).tolist():
            readers = {int(op) for op in graph.consumers_of(alias)} - {writer}
            expected |= {(op, writer) for op in readers if op not in ancestors[writer]}
    assert {tuple(edge) for edge in graph.control.tolist()} == expected
    assert expected


def test_a_parameter_its_state_and_its_update_are_colocated(captured):
    graph = captured.graph
    for storage, writers in graph.writers.items():
        (writer,) = writers
        source = int(graph.producers[np.flatnonzero(graph.storages == storage)[0]])
        assert graph.is_source[source]
        assert graph.colocation[source] == graph.colocation[writer] >= 0
        assert int(graph.residences[source]) == writer
    ids = graph.colocation[graph.phases == Phase.UPDATE]
    assert len(set(ids.tolist())) == len(ids)


def test_every_parameter_has_one_update_and_its_state(rnnlm):
    graph = rnnlm.graph
    parameters = [
        n for n, kind in zip(graph.names, graph.kinds, strict=True) if kind == "parameter"
    ]
    assert len(parameters) == 9
    for name in parameters:
        update = graph.index[f"{name}/adam"]
        reads = [graph.names[graph.producers[t]] for t in graph.inputs_of(update).tolist()]
        assert reads[0] == name
        assert reads[2:] == [f"{name}/step", f"{name}/exp_avg", f"{name}/exp_avg_sq"]
        old = graph.outputs_of(graph.index[name])[0]
        gradient = int(graph.inputs_of(update)[1])
        assert graph.shapes[gradient] == graph.shapes[old]
        assert graph.phases[graph.producers[gradient]] == Phase.BACKWARD
        assert graph.storages[graph.outputs_of(update)[0]] == graph.storages[old]
        assert all(graph.overwrites[t] for t in graph.outputs_of(update))


def test_backward_ops_know_their_forward_op_and_its_module():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    captured = capture(module, torch.randn(5, 3), loss=lambda out: out.sum(), train=SGD())
    graph = captured.graph
    tanh = graph.index["1/tanh"]
    (gradient,) = np.flatnonzero(graph.gradient_of == tanh)
    assert graph.kinds[gradient] == "aten.tanh_backward"
    assert graph.modules[gradient] == "1"
    products = [op for op, kind in enumerate(graph.kinds) if kind == "aten.mm"]
    assert {graph.names[graph.gradient_of[op]] for op in products} == {"0/addmm", "2/addmm"}
    assert all(graph.modules[op] == graph.modules[graph.gradient_of[op]] for op in products)


def test_a_shared_layer_sums_its_gradients_in_its_own_module():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x).tanh())

    captured = capture(Twice(), torch.randn(2, 3), loss=lambda out: out.sum(), train=SGD())
    graph = captured.graph
    sums = [op for op, kind in enumerate(graph.kinds) if kind == "aten.add"]
    assert len(sums) == 2
    assert {graph.modules[op] for op in sums} == {"layer"}
    assert {int(graph.gradient_of[op]) for op in sums} == {-1}


def test_frozen_parameters_and_unused_ones_have_no_update():
    module = nn.ModuleDict({"frozen": nn.Linear(2, 2), "free": nn.Linear(2, 2)})
    module["unused"] = nn.Linear(2, 2)
    module["frozen"].requires_grad_(False)
    module.forward = lambda x: module["free"](module["frozen"](x))
    graph = capture(module, torch.randn(2, 2), loss=lambda out: out.sum(), train=SGD()).graph
    updates = {
        n for n, phase in zip(graph.names, graph.phases, strict=True) if phase == Phase.UPDATE
    }
    assert updates == {"free.weight/sgd", "free.bias/sgd"}
    assert "frozen.weight" in graph.index
    assert "unused.weight" in graph.index


def test_batch_norm_writes_its_buffers_back(inception):
    graph = inception.graph
    copy = graph.index["stem.0.bn.running_mean/copy_"]
    assert graph.kinds[copy] == "aten.copy_"
    assert graph.phases[copy] == Phase.UPDATE
    assert "stem.0.bn.num_batches_tracked/copy_" in graph.index


def test_capturing_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    generator = torch.get_rng_state()
    x = torch.randn(4, 3)
    torch.set_rng_state(generator)
    capture(module, x, loss=lambda out: out.sum(), train=Adam())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.backends.mkldnn.enabled
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


def test_an_lstm_module_becomes_many_ops():
    graph = capture(nn.LSTM(4, 4), torch.randn(3, 2, 4)).graph
    assert graph.kinds.count("aten.sigmoid") == 9
    assert not [kind for kind in graph.kinds if "rnn" in kind or "lstm" in kind]


def test_fake_and_real_weights_give_the_same_graph():
    torch.manual_seed(0)
    real = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(2, 3)
    graphs = [capture(m, x, loss=lambda o: o.sum(), train=SGD()).graph for m in (real, meta)]
    assert graphs[0].fingerprint == graphs[1].fingerprint


def test_capturing_twice_gives_the_same_graph(rnnlm):
    assert resolve(RNNLM, train=Adam()).graph.fingerprint == rnnlm.graph.fingerprint


def test_equal_calls_have_equal_signatures_and_others_do_not():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 4))
    graph = capture(module, torch.randn(2, 3)).graph
    products = [graph.signatures[op] for op, k in enumerate(graph.kinds) if k == "aten.addmm"]
    assert products[0] == products[1] != products[2]
    assert products[0] == (
        "aten.addmm.default(float32[3](1), float32[2x3](3x1), float32[3x3](1x3))"
    )


def test_graph_and_program_travel_to_another_process(captured):
    graph, program = pickle.loads(pickle.dumps((captured.graph, captured.program)))
    assert graph.fingerprint == captured.graph.fingerprint
    assert [call and call.target for call in program.calls] == [
        call and call.target for call in captured.program.calls
    ]
    moved = dataclasses.replace(captured, graph=graph, program=program)
    inputs, targets = example_values(captured)
    losses = [run_step(c, initial_values(captured), inputs, targets) for c in (captured, moved)]
    assert torch.equal(*losses)


def test_outputs_of_inference_may_be_inputs_or_constants():
    class Odd(nn.Module):
        def forward(self, x):
            return x, torch.tensor([1.0, 2.0]), x.t(), 3

    x = torch.randn(2, 3)
    captured = capture(Odd(), x)
    same, constant, turned, three = run_step(captured, initial_values(captured), (x,))
    assert torch.equal(same, x)
    assert torch.equal(constant, torch.tensor([1.0, 2.0]))
    assert torch.equal(turned, x.t())
    assert three == 3
    assert isinstance(turned, Tensor)
