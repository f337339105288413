"""Recurrent layers captured by fused kernels compute what the layers themselves do."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from dovetail.errors import ModelError
from dovetail.frontends import Adam, capture
from dovetail.frontends.capturing import recaptured
from dovetail.frontends.instructions import RunOp
from dovetail.frontends.interpret import initial_values, run_step
from dovetail.frontends.runners import make_runner
from dovetail.transforms import Form
from tests.support.plain_steps import plain_steps

STEPS, BATCH, FEATURES, HIDDEN = 11, 3, 6, 8
KINDS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no biases": {"bias": False},
    "both ways": {"bidirectional": True},
    "both ways, batch first": {"bidirectional": True, "batch_first": True},
    "three layers": {"num_layers": 3},
}
KERNEL, GRADIENT = "aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"


class Tagger(nn.Module):
    """Returns outputs and last states of a recurrent layer, each through something of its own."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.LSTM(FEATURES, HIDDEN, **{"num_layers": 2, **options})
        self.head = nn.Linear(HIDDEN * (1 + self.layers.bidirectional), 5)

    def forward(self, x):
        outputs, (hidden, cell) = self.layers(x)
        return self.head(outputs), hidden.sum(0), cell.tanh().mean(0)


def squares(results, target):
    outputs, hidden, cell = results
    return mse_loss(outputs, target) + hidden.square().mean() + cell.square().mean()


def example(model):
    torch.manual_seed(2)
    shape = (BATCH, STEPS) if model.layers.batch_first else (STEPS, BATCH)
    return torch.randn(*shape, FEATURES), torch.randn(*shape, 5)


def kinds_of(step):
    return [kind for kind in step.graph.kinds if kind.startswith(KERNEL)]


@functools.cache
def unrolled(kind, training):
    """(model, inputs, targets, captured step) of a kind of layers. All numbers of chunks begin with
    the same step."""
    model = Tagger(**KINDS[kind])
    x, y = example(model)
    if training:
        return model, x, y, capture(model, x, loss=squares, targets=y, train=Adam(lr=0.01))
    return model, x, y, capture(model.eval(), x)


@pytest.mark.parametrize("chunks", [1, 3, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_inference_equals_the_module(kind, chunks):
    model, x, _, step = unrolled(kind, training=False)
    step = recaptured(step, chunks=chunks)
    of_one_layer = min(chunks, STEPS) * (1 + model.layers.bidirectional)
    assert kinds_of(step) == [KERNEL] * of_one_layer * model.layers.num_layers
    with torch.no_grad():
        wanted = model(x)
    for own, other in zip(run_step(step, initial_values(step), [x]), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_several_training_steps_equal_plain_ones(kind, chunks):
    model, x, y, step = unrolled(kind, training=True)
    step = recaptured(step, chunks=chunks)
    assert GRADIENT in kinds_of(step)
    values, plain = initial_values(step), copy.deepcopy(model)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for number, loss in enumerate(plain_steps(optimizer, lambda: squares(plain(x), y), 4)):
        own = run_step(step, values, [x], [y], step=number)
        torch.testing.assert_close(own, loss, rtol=1e-5, atol=1e-6)


def test_the_workspace_has_the_bytes_that_the_kernel_writes():
    model = Tagger()
    x, y = example(model)
    step = recaptured(capture(model, x, loss=squares, targets=y, train=Adam(lr=0.01)), chunks=2)
    graph = step.graph
    for op, call in enumerate(step.program.calls):
        if graph.kinds[op] != KERNEL:
            continue
        assert call.in_grad_mode
        shapes = [graph.shapes[ref.tensor] for ref in call.args[:7]]
        with torch.enable_grad():
            made = call.target(*map(torch.zeros, shapes), *call.args[7:])
        workspace = call.results[3]
        assert graph.shapes[workspace] == tuple(made[3].shape)


def test_a_runner_keeps_the_workspace_and_repeats_its_bits():
    model = Tagger()
    x, y = example(model)
    step = recaptured(capture(model, x, loss=squares, targets=y, train=Adam(lr=0.01)), chunks=2)
    graph, program = step.graph, step.program
    found = []
    for _ in range(2):
        values = initial_values(step)
        wanted = run_step(step, dict(values), [x], [y])
        values = initial_values(step)
        runner = make_runner(graph.tensors)
        for tensor, value in values.items():
            runner.set(tensor, value)
        for op, source in enumerate(program.sources):
            if source is not None and source.role == "input":
                runner.set(graph.outputs_of(op)[0], {"input.0": x, "target.0": y}[source.name])
        stream = runner.stream()
        for op, call in enumerate(program.calls):
            if call is not None:
                stream.add(RunOp(op, (), call))
        assert runner.run(stream)
        found.append(runner.get(program.loss).clone())
        torch.testing.assert_close(found[-1], wanted, rtol=0, atol=0)
    assert torch.equal(*found)


def test_dropout_between_layers_draws_for_all_time_steps_at_once():
    model = Tagger(dropout=0.4).train()
    x, _ = example(model)
    step = capture(model, x)
    draws = [kind for kind in step.graph.kinds if "dropout" in kind or "bernoulli" in kind]
    fused = recaptured(step, chunks=3)
    assert [k for k in fused.graph.kinds if "dropout" in k or "bernoulli" in k] == draws


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(FEATURES, HIDDEN, proj_size=4),
        nn.LSTM(FEATURES, HIDDEN).double(),
        nn.GRU(FEATURES, HIDDEN),
        nn.RNN(FEATURES, HIDDEN),
    ],
    ids=["projections", "float64", "GRU", "RNN"],
)
def test_layers_without_a_fused_kernel_stay_unrolled(model):
    x = torch.randn(STEPS, BATCH, FEATURES, dtype=next(model.parameters()).dtype)
    step = capture(model, x)
    assert step.fused_steps == 0
    assert kinds_of(recaptured(step, chunks=1)) == []


def test_packed_sequences_stay_unrolled():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.LSTM(FEATURES, HIDDEN)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2])
            return nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0])[0]

    model, x = Packed(), torch.randn(5, 3, FEATURES)
    step = recaptured(capture(model, x), chunks=1)
    assert step.fused_steps == 0
    torch.testing.assert_close(
        run_step(step, initial_values(step), [x]), model(x).detach(), rtol=1e-5, atol=1e-6
    )


def test_autocast_leaves_them_unrolled():
    model = Tagger().eval()
    x, _ = example(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert capture(model, x).fused_steps == 0


def test_a_step_says_how_many_time_steps_could_be_fused():
    model = Tagger()
    x, _ = example(model)
    step = capture(model, x)
    assert step.fused_steps == STEPS
    assert step.transforms == ()
    assert Form(2).apply(step).transforms == (Form(2),)
    assert Form().apply(Form(2).apply(step)).transforms == ()


def test_towers_cannot_be_captured_again():
    from dovetail.transforms import towers

    model = Tagger()
    x, y = example(model)
    step = towers(capture(model, x, loss=squares, targets=y, train=Adam(lr=0.01)), 2)
    with pytest.raises(ModelError, match="several towers"):
        recaptured(step, chunks=2)


def test_chunks_of_two_layers_form_a_wavefront():
    """A kernel of the second layer needs the first layer's chunks only up to its own."""
    model = Tagger().eval()
    x, _ = example(model)
    graph = recaptured(capture(model, x), chunks=4).graph
    kernels = [op for op, kind in enumerate(graph.kinds) if kind == KERNEL]
    before = {op: set() for op in range(len(graph))}
    for op in range(len(graph)):
        for maker in graph.producers[graph.inputs_of(op)].tolist():
            before[op] |= {maker} | before[maker]
    depth = {op: len(before[op] & set(kernels)) for op in kernels}
    # Of two layers of four chunks the kernel of chunk c has c before it in the first layer, and
    # in the second those of both layers.
    wanted = [chunk for chunk in range(4)] + [2 * chunk + 1 for chunk in range(4)]
    assert sorted(depth.values()) == sorted(wanted)


class Begun(nn.Module):
    """Begins with a learned state, which all samples share, or with one that lies transposed."""

    def __init__(self, expanded):
        super().__init__()
        torch.manual_seed(3)
        self.expanded = expanded
        self.layers = nn.LSTM(FEATURES, HIDDEN)
        self.state = nn.Parameter(torch.randn(1, 1, HIDDEN))
        self.turned = nn.Parameter(torch.randn(BATCH, 1, HIDDEN))

    def forward(self, x):
        state = self.state.expand(-1, BATCH, -1) if self.expanded else self.turned.transpose(0, 1)
        return self.layers(x, (state, state * 0.5))[0]


@pytest.mark.parametrize("expanded", [True, False])
def test_initial_states_may_lie_anyhow(expanded):
    model = Begun(expanded)
    x = torch.randn(STEPS, BATCH, FEATURES)
    step = recaptured(capture(model, x), chunks=3)
    assert KERNEL in step.graph.kinds
    own = run_step(step, initial_values(step), [x])
    torch.testing.assert_close(own, model(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_step_is_captured_again_in_the_modes_that_it_was_captured_in():
    model = Tagger(dropout=0.4).eval()
    x, _ = example(model)
    step = capture(model, x)
    model.train()
    model.head.weight.requires_grad_(False)
    again = recaptured(step)
    assert again.graph.signatures == step.graph.signatures
    assert model.training and model.layers.training
    assert not model.head.weight.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert recaptured(step).graph.signatures == step.graph.signatures
    model.head = nn.Sequential(model.head)
    with pytest.raises(ModelError, match="other modules"):
        recaptured(step)
