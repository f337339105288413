"""Towers in one process: what they compute is what the loop a person would write computes."""

import copy

import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.errors import ReplicationError
from dovetail.frontends import (
    SGD,
    Adam,
    RMSProp,
    capture,
    example_values,
    initial_values,
    resolve,
    run_call,
    run_step,
)
from dovetail.graph import Phase
from dovetail.networks import NETWORKS
from dovetail.transforms import Towers, towers
from dovetail.transforms.programs import average

STEPS = 3
OPTIMIZERS = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        SGD(lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "adam": (Adam(lr=1e-2), lambda p: torch.optim.Adam(p, lr=1e-2)),
    "rmsprop": (RMSProp(lr=1e-3), lambda p: torch.optim.RMSprop(p, lr=1e-3)),
}


class Net(nn.Module):
    """Convolution, batch norm, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x, scale):
        x = self.bn(self.conv(x)).relu().mean((2, 3)) * scale
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


def batches(replicas, batch=4):
    """Inputs and targets of all towers, in the order in which a step takes them."""
    torch.manual_seed(1)
    draw = {"dtype": torch.float64}
    sets = [
        (torch.randn(batch, 2, 6, 6, **draw), torch.rand(batch, 4, **draw)) for _ in range(replicas)
    ]
    return [x for one in sets for x in one], [torch.randint(3, (batch,)) for _ in range(replicas)]


def net_step(optimizer, frozen=False, batch=4):
    torch.manual_seed(0)
    module = Net().double()
    if frozen:
        module.bn.eval()
    inputs, targets = batches(1, batch)
    return module, capture(
        module,
        *inputs,
        targets=targets,
        loss=nn.functional.cross_entropy,
        train=OPTIMIZERS[optimizer][0],
    )


def run_program(step, inputs, targets):
    """(losses, name -> value of each source) after some steps in this process."""
    values = initial_values(step)
    losses = [run_step(step, values, inputs, targets, step=i) for i in range(STEPS)]
    names = {step.program.sources[step.graph.producers[t]].name: t for t in values}
    return losses, {name: values[t] for name, t in names.items()}


def gradients_of(module, loss, inputs, targets):
    module.zero_grad()
    value = loss(module(*inputs), *targets)
    value.backward()
    return value.detach(), [p.grad.clone() for p in module.parameters()]


def by_hand(module, loss, optimizer, sets, synchronous):
    """(losses, state_dict) of a plain loop over towers: tower 0's batch norm statistics stay."""
    module = copy.deepcopy(module)
    torch_optimizer = OPTIMIZERS[optimizer][1](module.parameters())
    losses = []
    for _ in range(STEPS):
        others = [copy.deepcopy(module) for _ in sets[1:]]
        found = [
            gradients_of(one, loss, *batch)
            for one, batch in zip([module, *others], sets, strict=True)
        ]
        losses.append(sum(value for value, _ in found) / len(found))
        gradients = [gradients for _, gradients in found]
        if synchronous:
            gradients = [[sum(of_all) / len(sets) for of_all in zip(*gradients, strict=True)]]
        for of_tower in gradients:
            for parameter, gradient in zip(module.parameters(), of_tower, strict=True):
                parameter.grad = gradient
            torch_optimizer.step()
    return losses, module.state_dict()


def assert_close(found, expected, tolerance=1e-12):
    assert found.dtype == expected.dtype
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_towers_equal_a_plain_loop_with_batch_norm_per_tower(optimizer, synchronous):
    replicas = 3
    module, one = net_step(optimizer)
    step = towers(one, replicas, synchronous=synchronous)
    inputs, targets = batches(replicas)
    losses, values = run_program(step, inputs, targets)
    sets = [(inputs[2 * r : 2 * r + 2], targets[r : r + 1]) for r in range(replicas)]
    expected, state = by_hand(module, nn.functional.cross_entropy, optimizer, sets, synchronous)
    for a, b in zip(losses, expected, strict=True):
        assert_close(a, b)
    assert state.keys() <= values.keys()
    for name, value in state.items():
        assert_close(values[name], value)
    assert int(values["bn.num_batches_tracked"]) == STEPS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_synchronous_towers_equal_one_large_batch_where_batch_norm_is_frozen(optimizer):
    replicas = 4
    _, one = net_step(optimizer, frozen=True)
    inputs, targets = batches(replicas)
    losses, values = run_program(towers(one, replicas), inputs, targets)
    large = [torch.cat(inputs[i::2]) for i in range(2)]
    _, whole = net_step(optimizer, frozen=True, batch=4 * replicas)
    expected, state = run_program(whole, large, [torch.cat(targets)])
    for a, b in zip(losses, expected, strict=True):
        assert_close(a, b)
    for name, value in state.items():
        assert_close(values[name], value)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_synchronous_towers_of_a_language_model_equal_one_large_batch(optimizer):
    replicas, network = 3, NETWORKS["rnnlm"]
    torch.manual_seed(0)
    module, inputs, loss, targets = network.build(**network.small)
    module.double()
    one = capture(module, *inputs, targets=targets, loss=loss, train=OPTIMIZERS[optimizer][0])
    large = torch.randint(50, (2, 4, 3 * replicas))
    tokens, labels = (list(x.chunk(replicas, dim=1)) for x in large)
    losses, values = run_program(towers(one, replicas), tokens, labels)
    whole = capture(module, large[0], targets=large[1], loss=loss, train=OPTIMIZERS[optimizer][0])
    expected, state = run_program(whole, large[:1].unbind(0), large[1:].unbind(0))
    for a, b in zip(losses, expected, strict=True):
        assert_close(a, b)
    for name, value in state.items():
        assert_close(values[name], value)


def test_asynchronous_towers_are_not_synchronous_ones():
    _, one = net_step("sgd")
    inputs, targets = batches(2)
    found = [run_program(towers(one, 2, synchronous=s), inputs, targets) for s in (True, False)]
    assert torch.equal(found[0][0][0], found[1][0][0])  # both read the first value
    assert not torch.equal(found[0][1]["head.weight"], found[1][1]["head.weight"])


def test_towers_draw_random_numbers_of_their_own():
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).double()
    x = torch.ones(8, 64, dtype=torch.float64)
    one = capture(module, x, loss=lambda y: y.square().mean(), train=SGD())
    step = towers(one, 2)
    masks = [op for op, call in enumerate(step.program.calls) if call is not None and call.random]
    assert len(masks) == 2
    values = initial_values(step)
    a, b = (float(run_step(step, values, [x, x], seed=seed)) for seed in (0, 1))
    assert a != b
    again = initial_values(step)
    assert float(run_step(step, again, [x, x], seed=0)) == a


def test_inputs_stand_tower_after_tower_then_targets():
    _, one = net_step("sgd")
    step = towers(one, 3)
    graph = step.graph
    named = {
        source.name: graph.names[op]
        for op, source in enumerate(step.program.sources)
        if source is not None and source.role == "input"
    }
    assert named == {
        "input.0": "tower.0/input.0", "input.1": "tower.0/input.1",
        "input.2": "tower.1/input.0", "input.3": "tower.1/input.1",
        "input.4": "tower.2/input.0", "input.5": "tower.2/input.1",
        "target.0": "tower.0/target.0", "target.1": "tower.1/target.0",
        "target.2": "tower.2/target.0",
    }  # fmt: skip
    assert len(step.inputs) == 6
    assert len(step.targets) == 3
    assert step.transforms == (Towers(3),)
    assert step.source.shapes == one.source.shapes
    inputs, targets = example_values(step)
    assert all(a is b for a, b in zip(inputs, one.inputs * 3, strict=True))
    assert all(a is b for a, b in zip(targets, one.targets * 3, strict=True))


def test_drawn_examples_are_drawn_for_each_tower():
    one = resolve("zoo:rnnlm?hidden=8&steps=2&batch=2&vocabulary=30", train=SGD())
    step = dt.towers(one, 2, synchronous=False)
    inputs, targets = example_values(step)
    assert [tuple(x.shape) for x in inputs] == [(2, 2)] * 2
    assert len(targets) == 2
    assert not torch.equal(inputs[0], inputs[1])
    assert step.transforms == (Towers(2, asynchronous=True),)
    loss = run_step(step, initial_values(step), inputs, targets)
    assert torch.isfinite(loss)


def test_an_average_keeps_its_gradients_layout_and_rounds_once_for_two():
    values = [torch.randn(3, 5).t() for _ in range(2)]
    found = average(*values, strides=(1, 5))
    assert found.stride() == (1, 5)
    assert torch.equal(found, (values[0] + values[1]) / 2)
    spread = [torch.tensor(float(i)).expand(2, 3) for i in (1, 2, 6)]
    assert torch.equal(average(*spread, strides=(3, 1)), torch.full((2, 3), 3.0))


def test_every_result_has_the_layout_that_the_graph_says():
    module = nn.Linear(6, 5).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    one = capture(module, x, loss=lambda y: y.sum(), train=SGD())
    step = towers(one, 2)
    graph = step.graph
    values = dict(initial_values(step))
    for op, source in enumerate(step.program.sources):
        if source is not None and source.role == "input":
            values[graph.outputs_of(op)[0]] = x
    with torch.no_grad():
        for call in filter(None, step.program.calls):
            run_call(call, values, 0)
    checked = 0
    for tensor, value in values.items():
        if graph.phases[graph.producers[tensor]] != Phase.SOURCE:
            assert tuple(value.shape) == graph.shapes[tensor]
            assert value.stride() == graph.strides[tensor], graph.names[graph.producers[tensor]]
            checked += 1
    assert checked > 10


def test_inference_cannot_be_replicated():
    one = capture(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(ReplicationError):
        towers(one, 2)
