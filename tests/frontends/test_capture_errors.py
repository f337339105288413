import copy
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import CaptureError, ModelError, UnknownNetworkError, UsageError
from dovetail.frontends import (
    SGD,
    Adam,
    AdamW,
    GradScaler,
    RMSProp,
    capture,
    example_values,
    format_optimizer,
    initial_values,
    parse_optimizer,
    resolve,
    run_step,
)
from dovetail.networks import NETWORKS


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


def branch(x):
    if x.sum() > 0:
        return x
    return -x


@pytest.mark.parametrize(
    ("function", "line", "advice", "train"),
    [
        (branch, "if x.sum() > 0:", "torch.where", SGD()),
        (lambda x: x * x.sum().item(), ".item()", "torch.where", None),
        (lambda x: x[x > 0], "x[x > 0]", "fixed size", SGD()),
        (lambda x: x @ torch.zeros(4, 4), "x @ torch.zeros(4, 4)", "inputs' shapes", None),
        (lambda x: x.detach().numpy(), ".numpy()", "torch.where", None),
    ],
)
def test_what_cannot_be_captured_names_the_line_and_says_what_to_do(function, line, advice, train):
    with pytest.raises(CaptureError) as raised:
        capture(Wrapped(function), torch.randn(2, 3), loss=lambda out: out.sum(), train=train)
    assert raised.value.model == "Wrapped"
    assert raised.value.location.startswith("test_capture_errors.py:")
    assert line in raised.value.location
    assert advice in str(raised.value)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("train", [None, SGD()])
def test_what_no_running_line_does_names_the_models_class(train):
    with pytest.raises(CaptureError, match="call the model once before") as raised:
        capture(Counting(3, 3), torch.randn(2, 3), loss=lambda out: out.sum(), train=train)
    assert raised.value.location.endswith("class Counting(nn.Linear):")


def test_a_loss_that_is_no_number_names_the_loss():
    def own(output):
        return output

    with pytest.raises(CaptureError, match="one number") as raised:
        capture(Wrapped(torch.relu), torch.randn(2, 3), loss=own, train=SGD())
    assert raised.value.location.endswith("def own(output):")


class Moved(nn.Module):
    """Moves a layer to the dtype that it has, as routers of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        self.layer = self.layer.to(x.dtype)
        return self.layer(x)


@pytest.mark.parametrize("train", [None, SGD(lr=0.1)])
def test_a_layer_may_be_moved_to_where_it_is(train):
    module, x = Moved(), torch.randn(2, 3)
    own = {} if train is None else {"loss": lambda out: out.square().mean()}
    step = capture(copy.deepcopy(module), x, train=train, **own)
    found = run_step(step, initial_values(step), step.inputs)
    expected = module(x) if train is None else module(x).square().mean()
    torch.testing.assert_close(found, expected.detach())


def test_bytes_may_choose_as_truths_do():
    def function(x):
        return torch.where((x > 0).to(torch.uint8), x, -x)

    step = capture(Wrapped(function), x := torch.randn(4, 3))
    found = run_step(step, initial_values(step), (x,))
    torch.testing.assert_close(found, step.module(x).detach())


def test_the_line_may_be_in_a_library_whose_name_begins_with_torch():
    path, names = str(Path(torch.__file__).parent) + "vision/models.py", {"nn": torch.nn}
    code = "class Masked(nn.Module):\n    def forward(self, x):\n        return x[x > 0]\n"
    exec(compile(code, path, "exec"), names)
    with pytest.raises(CaptureError) as raised:
        capture(names["Masked"](), torch.randn(2, 3))
    assert raised.value.location.startswith("models.py:3")
    # A line of the user's own comes first.
    with pytest.raises(CaptureError) as raised:
        capture(Wrapped(names["Masked"]()), torch.randn(2, 3))
    assert raised.value.location.startswith("test_capture_errors.py:")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "the loss must be one number, but is of shape (2, 3)"),
        (lambda out: out, "the loss must be one number"),
        (lambda out: 3.0, "the loss must be one number, but is of float"),
        (lambda out: out.detach().sum(), "does not depend on any trainable parameter"),
        (lambda out, target: out.sum(), "missing 1 required positional argument"),
    ],
)
def test_a_loss_that_cannot_train_is_an_error(loss, message):
    with pytest.raises(CaptureError) as raised:
        capture(Wrapped(torch.tanh), torch.randn(2, 3), loss=loss, train=SGD())
    assert message in str(raised.value)


def test_a_scalar_output_is_its_own_loss():
    captured = capture(Wrapped(torch.sum), torch.randn(2, 3), train=SGD())
    loss = run_step(captured, initial_values(captured), captured.inputs)
    assert loss.shape == ()
    assert captured.program.loss == captured.graph.outputs[0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "has no inputs"),
        ((3,), "has no inputs"),
        (("text",), "has no inputs"),
    ],
)
def test_wrong_inputs_are_an_error(inputs, message):
    with pytest.raises(ModelError) as raised:
        capture(nn.Linear(3, 3), *inputs)
    assert message in str(raised.value)


@dataclass
class Labels:
    labels: torch.Tensor


@pytest.mark.parametrize("targets", [torch.randn(2, 3), Labels(torch.randn(2, 3))])
@pytest.mark.parametrize("train", [None, SGD()])
def test_targets_without_a_loss_are_an_error(train, targets):
    with pytest.raises(ModelError, match="targets are given, but no loss"):
        capture(Wrapped(torch.sum), torch.randn(2, 3), targets=targets, train=train)


def test_a_module_without_trainable_parameters_cannot_be_trained():
    with pytest.raises(ModelError, match="nothing can be trained"):
        capture(nn.Linear(3, 3).requires_grad_(False), torch.randn(2, 3), train=SGD())


def test_a_buffer_that_grows_is_an_error():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(1, 3))

        def forward(self, x):
            self.cache = torch.cat([self.cache, x])
            return self.cache.sum(0)

    with pytest.raises(CaptureError, match=r"cache changes from .*\(1, 3\) to .*\(3, 3\)"):
        capture(Grows(), torch.randn(2, 3))


def test_sparse_gradients_are_an_error():
    module = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(CaptureError, match="sparse"):
        capture(module, torch.tensor([1, 2]), loss=lambda out: out.sum(), train=SGD())


def test_fake_weights_without_a_maker_have_no_values():
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    captured = capture(module, torch.empty(2, 3, device="meta"))
    with pytest.raises(ModelError, match="weights are fake"):
        initial_values(captured)
    with pytest.raises(ModelError, match="inputs are fake"):
        example_values(captured)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zoo:rnnlm?layer=3", "rnnlm has no option 'layer'; it has layers, hidden"),
        ("zoo:rnnlm?layers=x", "layers is a whole number, not 'x'"),
        ("zoo:rnnlm?layers=0", "layers is 0, but must be positive"),
        ("zoo:inception_v3?width=wide", "width is a number, not 'wide'"),
        ("zoo:inception_v3?aux=maybe", "aux is true or false, not 'maybe'"),
        ("zoo:inception_v3?dropout=2", "dropout"),
        ("model.onnx", "a MODEL is zoo:NAME"),
        ("", "a MODEL is zoo:NAME"),
        ("no_such_package:build", "cannot import no_such_package"),
        ("os:no_such_function", "os has no function no_such_function"),
        ("os:getcwd", "must return (module, inputs)"),
    ],
)
def test_a_wrong_model_text_says_what_is_wrong(text, message):
    with pytest.raises(ModelError) as raised:
        resolve(text)
    assert message in str(raised.value)


def test_an_unknown_network_lists_those_there_are():
    with pytest.raises(UnknownNetworkError) as raised:
        resolve("zoo:rnn")
    assert raised.value.network == "rnn"
    assert raised.value.known == tuple(NETWORKS)
    assert "inception_v3, " in str(raised.value)


def test_zoo_networks_are_made_anew_from_the_seed():
    captured = resolve("zoo:rnnlm?hidden=4&steps=2&batch=2&vocabulary=5&layers=1")
    assert captured.source.model == "zoo:rnnlm?hidden=4&steps=2&batch=2&vocabulary=5&layers=1"
    assert captured.source.shapes == ((2, 2),)
    a, b, c = (initial_values(captured, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert example_values(captured, 1)[0][0].shape == (2, 2)


def test_zoo_networks_train_in_training_mode_only():
    text = "zoo:inception_v3?width=0.05&size=75&batch=2&classes=3"
    assert not resolve(text).module.training


@pytest.mark.parametrize("returned", [2, 3, 4])
def test_a_function_names_a_model(returned, monkeypatch):
    def build():
        module = Wrapped(torch.tanh)
        return (module, (torch.randn(2, 3),), lambda out, *_: out.sum(), (torch.zeros(2),))[
            :returned
        ]

    package = types.ModuleType("some_models")
    package.build = build
    monkeypatch.setitem(sys.modules, "some_models", package)
    captured = resolve("some_models:build", train=Adam() if returned > 2 else None)
    assert captured.source.model == "some_models:build"
    assert captured.source.training == ("adam" if returned > 2 else "")
    assert captured.graph.training == (returned > 2)


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("sgd", SGD()),
        ("momentum", SGD(momentum=0.9)),
        ("momentum:nesterov=true,lr=0.5", SGD(0.5, momentum=0.9, nesterov=True)),
        ("rmsprop:alpha=0.9", RMSProp(alpha=0.9)),
        ("adam:lr=1e-4", Adam(1e-4)),
        ("adamw", AdamW()),
    ],
)
def test_optimizers_are_read_from_text_and_written_back(text, optimizer):
    assert parse_optimizer(text) == optimizer
    assert parse_optimizer(format_optimizer(optimizer)) == optimizer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adagrad", "no optimizer named 'adagrad'; there are sgd, momentum"),
        ("adam:rate=1", "adam has no option 'rate'; it has lr"),
        ("adam:lr=fast", "lr is a number, not 'fast'"),
        ("sgd:nesterov=maybe", "nesterov is true or false"),
        ("sgd:nesterov=true", "needs momentum"),
        ("sgd:lr=-1", "must be >= 0"),
        ("adam:beta1=1", "must be < 1"),
        ("rmsprop:alpha=1.5", "must be <= 1"),
        ("sgd:lr=nan", "must be >= 0"),
    ],
)
def test_a_wrong_optimizer_says_what_is_wrong(text, message):
    with pytest.raises(UsageError) as raised:
        parse_optimizer(text)
    assert message in str(raised.value)


@pytest.mark.parametrize("value", [lambda epoch: 0.1, "fast", None, torch.tensor(0.1), 1j, True])
@pytest.mark.parametrize(
    ("kind", "option"),
    [(SGD, "lr"), (SGD, "momentum"), (RMSProp, "alpha"), (Adam, "beta2"), (AdamW, "weight_decay"),
     (Adam, "eps"), (GradScaler, "init_scale"), (GradScaler, "growth_interval")],
)  # fmt: skip
def test_a_setting_that_is_no_number_is_named(kind, option, value):
    with pytest.raises(UsageError, match=f"{option}: of .* is no number") as raised:
        kind(**{option: value})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1])
def test_a_setting_below_0_or_without_an_end_is_named(value):
    for kind in (SGD, RMSProp, Adam, AdamW):
        with pytest.raises(UsageError, match=r"lr: of .* must be >= 0"):
            kind(value)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_a_flag_that_is_no_flag_is_named(value):
    with pytest.raises(UsageError, match=r"centered: .* True or False"):
        RMSProp(centered=value)


def test_a_number_of_numpy_becomes_one_that_texts_hold():
    optimizer = Adam(np.float32(0.5))
    assert parse_optimizer(format_optimizer(optimizer)) == optimizer == Adam(0.5)


def trained_by(train, model=None):
    model = model or Wrapped(torch.tanh)
    if callable(train) and getattr(train, "__name__", "") == "of_model":
        train = train(model)
    return capture(model, torch.randn(2, 3), loss=torch.sum, train=train).plain.optimizer


def of_model(make):
    def of_model(model):
        return make(model.parameters())

    return of_model


@pytest.mark.parametrize(
    ("train", "optimizer"),
    [
        ("adam", Adam()),
        ("momentum:lr=0.5", SGD(0.5, momentum=0.9)),
        (torch.optim.Adam, Adam()),
        (partial(torch.optim.RMSprop, lr=0.1, centered=True), RMSProp(0.1, centered=True)),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
         SGD(0.1, momentum=0.9, nesterov=True)),
        (of_model(lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), foreach=True)),
         AdamW(0.1, beta1=0.8, beta2=0.9)),
        (of_model(lambda p: torch.optim.SGD([{"params": [v]} for v in p], lr=0.1)), SGD(0.1)),
    ],
)  # fmt: skip
def test_a_step_trains_by_a_text_or_by_an_optimizer_of_torch(train, optimizer):
    assert trained_by(train) == optimizer


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (of_model(lambda p: torch.optim.Adam(p, amsgrad=True)), "Adam has no amsgrad here"),
        (of_model(lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.5)), "SGD has no dampening"),
        (of_model(lambda p: torch.optim.SGD([{"params": [v], "lr": 0.1 + v.dim()} for v in p])),
         "groups with different lr"),
        (of_model(lambda p: torch.optim.Adam(list(p)[:1])), "holds 1 of the 2 parameters"),
        (of_model(lambda p: torch.optim.Adam([nn.Parameter(torch.ones(2))])), "does not have"),
        (of_model(lambda p: torch.optim.Adagrad(p)), "Adagrad is not one of sgd, adam, adamw"),
        (of_model(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1))), "lr: of adam is no number"),
        ("adagrad", "train: no optimizer named 'adagrad'"),
        (3, "3 is no name, no record"),
    ],
)  # fmt: skip
def test_what_no_optimizer_of_a_step_takes_over_is_named(train, message):
    with pytest.raises(UsageError, match=message):
        trained_by(train)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 4), (2, 3)),
        (nn.Linear(300, 400, bias=False), (200, 300)),
        (nn.Conv1d(3, 4, 3), (2, 3, 5)),
        (nn.Conv2d(3, 4, 3), (2, 3, 5, 5)),
        (nn.Conv2d(3, 4, 3, bias=False), (2, 3, 5, 5)),
        (nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
        (nn.BatchNorm1d(3), (2, 3, 5)),
        (nn.LayerNorm(5), (2, 3, 5)),
        (nn.MultiheadAttention(4, 2), (2, 4)),
        (nn.LSTM(3, 4), (2, 2, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("train", [None, "adam"])
def test_dtypes_that_torch_does_not_mix_are_refused_in_its_words(layer, shape, train):
    model, inputs = copy.deepcopy(layer).half(), torch.randn(shape)
    given = (inputs,) * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
    with pytest.raises((RuntimeError, ValueError)):
        model(*given)
    with pytest.raises(CaptureError, match="type"):
        capture(model, *given, loss=lambda out: out.sum(), train=train)


def test_dtypes_that_torch_mixes_are_captured():
    step = capture(nn.LayerNorm(5), torch.randn(2, 3, 5).bfloat16())
    assert "bfloat16" in step.graph.dtypes and "float32" in step.graph.dtypes


def test_a_loss_with_parameters_of_its_own_is_refused():
    class Weighted(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, output, target):
            return (self.weight.sum() * (output - target)).square().mean()

    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    own = Weighted(nn.Parameter(torch.ones(3)))
    with pytest.raises(ModelError, match=r"has a parameter weight .* within the model's forward"):
        capture(model, x, loss=own, targets=x, train="adam")
    capture(model, x, loss=own.requires_grad_(False), targets=x, train="adam")
    capture(model, x, loss=Weighted(model.bias), targets=x, train="adam")
