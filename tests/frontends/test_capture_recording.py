"""Recording operators, and making the recording pure."""

import operator

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dovetail.errors import CaptureError
from dovetail.frontends import SGD, capture, initial_values, run_step
from dovetail.frontends.checks import TracingError
from dovetail.frontends.recording import record
from dovetail.frontends.tracing import purified

CONSTANT = torch.arange(4.0)


def with_gradients(x, y):
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    loss = F.log_softmax(F.layer_norm(x @ y.tanh(), (4,)), dim=1).square().sum()
    return list(torch.autograd.grad(loss, (x, y)))


def attention(x, y):
    x, y = (v.detach().requires_grad_().view(1, 1, 4, 4) for v in (x, y))
    loss = F.scaled_dot_product_attention(x, y, y).sum()
    return list(torch.autograd.grad(loss, (x, y)))


def views_and_lists(x, y):
    a, b = torch.cat([x, y.t()], dim=1).chunk(2, dim=1)
    values, places = torch.stack([a, b]).sort(dim=0)
    return [values, places.select(0, 1), a.unbind(0)[2]]


def constants(x, y):
    return [x * CONSTANT + torch.tensor([1.0, 2.0, 3.0, 4.0]) - CONSTANT * y]


def number_of_a_constant(x, y):
    return [x * torch.tensor(3.0).item() + y * (torch.tensor(1.0) + 1).item() + CONSTANT.sum()]


def without_autograd(x, y):
    with torch.inference_mode():
        return [torch.matmul(x, y), F.linear(x, y), x.reshape(2, 8)]


def in_place(x, y):
    z = x.clone()
    z[:, 1:3] = 0
    z.view(-1)[3:9].mul_(2)
    return [z.add_(y).relu_(), z.t()]


def layout_in_place(x, y):
    z = x[:2].clone()
    z.t_()
    return [z.unsqueeze_(0) + y[:, :2]]


def where_it_lies(x, y):
    z, turned = x.clone().t(), (y > 0).t()
    z.masked_fill_(turned, 0.25)
    z.masked_scatter_(turned, y)
    z.t()[1].add_(1)
    return [z.t().contiguous().view(-1), z]


PURE = [
    with_gradients, attention, views_and_lists, constants, number_of_a_constant, without_autograd,
]  # fmt: skip
IMPURE = [in_place, layout_in_place, where_it_lies]
NAMES = ("x", "y")


def fakes():
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return mode, [mode.from_tensor(torch.ones(4, 4)) for _ in range(2)]


def recorded(function):
    mode, values = fakes()
    with mode:
        return mode, record(function, values, lambda: None, {})


def lines(graph):
    """The calls of a graph, each node by its place among them; detach, which merely renames, and
    elements that nothing reads are left out."""
    for node in reversed(list(graph.nodes)):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        if node.target in (operator.getitem, torch.ops.aten.detach.default) and not node.users:
            graph.erase_node(node)
    place = {node: index for index, node in enumerate(graph.nodes)}

    def text(value):
        if isinstance(value, torch.fx.Node):
            return f"%{place[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, dict):
            return text(sorted(value.items()))
        return repr(value)

    found = []
    for node in graph.nodes:
        target = "" if node.op == "placeholder" else str(node.target)
        found.append(f"{node.op} {target} {text(node.args)} {text(node.kwargs)}")
    return found


@pytest.mark.parametrize("function", PURE + IMPURE)
def test_what_is_recorded_is_what_make_fx_records(function):
    _, recording = recorded(function)
    mode, values = fakes()
    with mode:
        expected = make_fx(function)(*values)
    found, expected = lines(recording.graph), lines(expected.graph)
    # torch drops an argument that is None by default only where it is called anew.
    assert found == [line.replace("[['attn_mask', None]]", "[]") for line in expected]
    assert len(found) > 4


@pytest.mark.parametrize("function", PURE)
def test_a_second_trace_of_a_pure_graph_would_be_a_copy(function):
    mode, recording = recorded(function)
    found = lines(purified(recording, mode, NAMES).graph)

    mode, values = fakes()
    with mode:
        first = make_fx(function)(*values)
        second = make_fx(functionalize(first, remove="mutations"))(*values)
    copy = record_of(second, mode)
    assert found == lines(purified(copy, mode, NAMES).graph)


def record_of(module, mode):
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with mode, torch.no_grad():
        return record(module, values, lambda: None, {})


@pytest.mark.parametrize("function", IMPURE)
def test_what_writes_in_place_becomes_pure(function):
    mode, recording = recorded(function)
    assert any(node.target._schema.is_mutable for node in recording.marks)
    pure = purified(recording, mode, NAMES)
    assert not any(
        node.target._schema.is_mutable
        for node in pure.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    found = torch.fx.GraphModule(pure.constants, pure.graph)(x.clone(), y.clone())
    assert all(torch.equal(a, b) for a, b in zip(found, function(x, y), strict=True))


def test_a_constant_has_one_name_and_a_node_per_use():
    _, recording = recorded(constants)
    targets = [node.target for node in recording.graph.nodes if node.op == "get_attr"]
    assert targets == ["_tensor_constant0", "_tensor_constant1", "_tensor_constant0"]
    assert recording.constants["_tensor_constant0"] is CONSTANT


def test_every_call_has_its_mark():
    mode, values = fakes()
    marks = iter(range(100))
    with mode:
        recording = record(lambda x, y: [x + y, x * y], values, lambda: next(marks), {})
    assert [(str(node.target), mark) for node, mark in recording.marks.items()] == [
        ("aten.add.Tensor", 0),
        ("aten.mul.Tensor", 1),
    ]


def test_a_rule_stands_for_an_operator():
    mode, values = fakes()
    rules = {torch.ops.aten.add.Tensor: lambda x, y: x - y.neg()}
    with mode:
        recording = record(lambda x, y: [x + y], values, lambda: None, rules)
    assert [str(node.target) for node in recording.marks] == ["aten.neg.default", "aten.sub.Tensor"]


def test_writing_over_what_was_given_is_an_error():
    mode, recording = recorded(lambda x, y: [x.add_(y)])
    with pytest.raises(
        TracingError, match="writes over x in a way that cannot be made part of the graph"
    ):
        purified(recording, mode, NAMES)


def test_control_flow_in_the_graph_is_an_error_that_names_the_line():
    class Branching(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(CaptureError, match=r"torch\.where") as raised:
        capture(Branching(3, 3), torch.randn(2, 3))
    assert "torch.cond" in raised.value.location


def test_an_encoder_in_evaluation_mode_is_many_ops():
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert torch.backends.mha.get_fastpath_enabled()
    graph = capture(module, torch.randn(2, 5, 8)).graph
    assert torch.backends.mha.get_fastpath_enabled()
    assert not [kind for kind in graph.kinds if "transformer_encoder" in kind]
    assert graph.kinds.count("aten.native_layer_norm") == 2


def test_an_own_autograd_function_knows_its_forward_op():
    class Cosine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.cos()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * -ctx.saved_tensors[0].sin()

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return Cosine.apply(self.layer(x))

    graph = capture(Module(), torch.randn(2, 3), loss=lambda out: out.sum(), train=SGD()).graph
    (sine,) = (op for op, kind in enumerate(graph.kinds) if kind == "aten.sin")
    product = graph.kinds.index("aten.addmm")
    assert graph.modules[product] == "layer"
    (weight,) = np.flatnonzero(np.array(graph.kinds) == "aten.mm")
    assert graph.gradient_of[weight] == product
    assert graph.phases[sine] == 2


# Torch's default dtype ---------------------------------------------------------------------------


class WholeNumbers(nn.Module):
    """Makes floats of whole numbers in each way that torch knows."""

    def forward(self, x):
        whole = torch.arange(1, 7)
        few = whole[:3].to(torch.int8)
        return (
            x * whole.cos()
            + whole / 7
            + whole * 0.1
            + whole.true_divide(3)
            + torch.where(whole > 2, whole, 0.3)
            + (whole > 2.0000000001)
            + torch.cat([few, few]).sigmoid()
            + (whole > 3).mean(dtype=x.dtype)
            + (whole > 3) * 0.7
            + torch.full((6,), 0.1)
            + torch.linspace(0, 1, 6)
        )


def test_whole_numbers_become_floats_of_the_default_dtype_of_the_capture():
    torch.set_default_dtype(torch.float64)
    try:
        x = torch.rand(2, 6)
        module = WholeNumbers()
        expected = module(x)
        captured = capture(module, x)
        here = run_step(captured, initial_values(captured), (x,))
    finally:
        torch.set_default_dtype(torch.float32)
    there = run_step(captured, initial_values(captured), (x,))
    assert torch.equal(here, expected)
    assert torch.equal(there, expected)


def test_a_step_runs_as_captured_under_another_default_dtype():
    x = torch.rand(2, 6)
    module = WholeNumbers()
    expected = module(x)
    captured = capture(module, x)
    torch.set_default_dtype(torch.float64)
    try:
        found = run_step(captured, initial_values(captured), (x,))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
