"""Fused calls: the same numbers as their ops, and one key for equal work."""

import pytest
import torch
from torch import nn

from dovetail.frontends import SGD, capture, initial_values, resolve, run_step
from dovetail.frontends.fused import FusedCall, may_be_fused
from dovetail.graph import Phase


class Small(nn.Module):
    """Several outputs of one op, an unused one, a keyword, a list of tensors, dropout."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        first, second = self.norm(self.layer(x)).split([3, 5], dim=1)
        joined = torch.cat([first.tanh(), second.sum(1, keepdim=True)], dim=1)
        return self.dropout(joined).softmax(-1), joined.mean()


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    return capture(Small(), torch.randn(4, 6))


def running(step):
    return [op for op, call in enumerate(step.program.calls) if call is not None]


def values_of(step, inputs):
    """The values of all tensors that the step makes, by a fused call that returns all of them."""
    values = initial_values(step)
    for op, source in enumerate(step.program.sources):
        if source is not None and source.role == "input":
            values[step.graph.outputs_of(op)[0]] = inputs
    return values


def fusable(step):
    return [op for op in running(step) if may_be_fused(step.graph, step.program, op)]


def test_random_ops_updates_and_functions_of_python_are_not_fused():
    module, inputs = Small(), torch.randn(4, 6)
    step = capture(module, inputs, targets=(), loss=lambda out: out[0].sum(), train=SGD(lr=0.1))
    kinds = {step.graph.kinds[op] for op in set(running(step)) - set(fusable(step))}
    updates = {
        step.graph.kinds[op] for op in running(step) if step.graph.phases[op] == Phase.UPDATE
    }
    assert updates <= kinds
    assert any("bernoulli" in kind or "dropout" in kind for kind in kinds - updates)
    assert "aten.addmm" not in kinds


def test_a_fused_call_has_the_bits_of_its_ops():
    """In evaluation mode all is one call, which then is the whole step."""
    torch.manual_seed(0)
    step = capture(Small().eval(), torch.randn(4, 6))
    fused, places = FusedCall.of(step.graph, step.program, running(step))
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    values = values_of(step, inputs)
    given = [values[tensor] for tensor in places.inputs]
    with torch.no_grad():
        made = fused(*given)
        by_graph = torch.fx.Interpreter(fused.module()).run(*given)
        wanted = run_step(step, initial_values(step), [inputs])
    assert set(places.outputs) == set(step.graph.outputs.tolist())
    assert all(map(torch.equal, made, by_graph))
    refs = [ref.tensor for ref in step.program.outputs]
    for tensor, value in zip(refs, wanted, strict=True):
        assert torch.equal(made[places.outputs.index(tensor)], value)


def test_equal_cells_have_one_key_and_others_have_another():
    step = resolve("zoo:rnnlm?hidden=8&steps=4&batch=2&vocabulary=20")
    wider = resolve("zoo:rnnlm?hidden=16&steps=4&batch=2&vocabulary=20")

    def keys(of):
        cells = {}
        for op in fusable(of):
            if of.graph.modules[op] == "lstm.1":
                cells.setdefault("lstm.1", []).append(op)
        ops = cells["lstm.1"]
        size = len(ops) // 4
        parts = [ops[i : i + size] for i in range(0, len(ops), size)]
        return [FusedCall.of(of.graph, of.program, part)[0].key for part in parts]

    assert keys(step)[1] == keys(step)[2]
    assert keys(step)[1] != keys(wider)[1]
    assert keys(step) == keys(resolve("zoo:rnnlm?hidden=8&steps=4&batch=2&vocabulary=20"))


def test_examples_fit_the_call(step):
    ops = fusable(step)[:3]
    fused, places = FusedCall.of(step.graph, step.program, ops)
    examples = fused.examples()
    assert [tuple(e.shape) for e in examples] == [step.graph.shapes[t] for t in places.inputs]
    assert [e.stride() for e in examples] == [step.graph.strides[t] for t in places.inputs]
    assert len(fused(*examples)) == len(fused.outputs)
