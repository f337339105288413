"""What cannot be trained is said before anything starts, each with the error of its kind."""

import functools
import threading

import pytest
import torch
from torch import nn

from dovetail.errors import ModelError, UnknownRuleError, UsageError
from dovetail.training.pickling import check_travels
from dovetail.training.rules import make_rule
from dovetail.training.trainer import Trainer
from tests.support.training_models import OPTIMIZERS, SGD, cross_entropy, perceptron, table


def fit(model=None, loss=cross_entropy, optimizer=SGD, rule="adag-agn", **options):
    """Never starts: the backend fails the test."""
    data = options.pop("data", table()), options.pop("validation", None)
    options = {"backend": never, **options}
    trainer = Trainer(model or perceptron(), loss, optimizer, rule, **options)
    return trainer.fit(*data)


def by_hand(parameters):
    return torch.optim.SGD(parameters, lr=1)


def never(assignment, watcher):
    raise AssertionError("it has started")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("workers", 0, "at least 1, not 0"),
        ("workers", 2.0, "whole number of at least 1, not 2.0"),
        ("epochs", 0, "at least 1"),
        ("batch", -1, "at least 1"),
        ("group", 0, "at least 1"),
        ("window", 0, "at least 1"),
        ("window", "long", "a whole number, None or \"auto\", not 'long'"),
        ("shards", 0, "at least 1"),
        ("seed", -1, "at least 0"),
        ("patience", 3, "needs a validation set"),
        ("metrics", ["accuracy"], "needs a validation set"),
        ("validate", "often", 'must be "epoch", samples, or "30s"'),
        ("validate", 0, "at least 1"),
        ("backend", "cloud", "there is no 'cloud'; there are simulated"),
        ("backend", 3, "is no name, and not callable"),
        ("backend_options", {"a": 1}, "go with a backend's name"),
        ("resume", True, "needs the folder of the run"),
        ("storage", {"log": False}, "needs a folder"),
        ("schedule", 0.1, "is not callable"),
        ("lr", 0.1, "neither a name nor a class"),
    ],
)
def test_an_option_that_cannot_be_is_named(option, value, says):
    optimizer = by_hand if option == "lr" else SGD
    with pytest.raises(UsageError, match=says) as caught:
        fit(optimizer=optimizer, **{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ("lion", "no 'lion'; there are sgd"),
        (torch.optim.SGD(perceptron().parameters(), lr=0.1), "parameters that the model does not"),
        (7, "no name, no record, and no callable"),
        (lambda parameters: None, "made NoneType"),
        (len, "made int"),
    ],
)
def test_an_optimizer_that_is_none_is_an_error(optimizer, says):
    with pytest.raises(UsageError, match=says) as caught:
        fit(optimizer=optimizer)
    assert caught.value.option == "optimizer"


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_sgd_by_name_needs_a_rate(name):
    with pytest.raises(UsageError, match=f"'{name}' needs a learning rate") as caught:
        fit(optimizer=name)
    assert caught.value.option == "lr"


def test_an_unknown_rule_is_named():
    with pytest.raises(UnknownRuleError, match="'fedavg'") as caught:
        fit(rule="fedavg")
    assert caught.value.rule == "fedavg"


@pytest.mark.parametrize(
    ("rule", "optimizer", "says"),
    [
        ("dc-asgd", OPTIMIZERS["adam"], "the server of dc-asgd steps by -lr g"),
        ("dc-asgd-adaptive", OPTIMIZERS["sgd"], "as torch.optim.SGD without momentum"),
        ("sync", torch.optim.NAdam, "NAdam is not one of sgd"),
        ("sync", functools.partial(torch.optim.Adam, amsgrad=True), "there has no amsgrad"),
        ("sync", functools.partial(torch.optim.RMSprop, centered=True), "there has no centered"),
        (
            "sync",
            functools.partial(torch.optim.Adam, weight_decay=0.1, decoupled_weight_decay=True),
            "there has no decoupled_weight_decay",
        ),
        (make_rule("sync", optimizer="adam"), SGD, 'give the rule as "sync"'),
    ],
)
def test_an_optimizer_that_the_server_cannot_apply_is_an_error(rule, optimizer, says):
    with pytest.raises(UsageError, match=says) as caught:
        fit(optimizer=optimizer, rule=rule)
    assert caught.value.option == "optimizer"


@pytest.mark.parametrize(
    ("rule", "wire", "says"),
    [
        ("agn", "zip", "there is no 'zip'"),
        ("agn", "topk:2", "topk:2 is no share"),
        ("averaging", "topk:0.5", "averaging sends parameters, and what topk:0.5 leaves out"),
        ("one-shot", "topk:0.5", "give float16 or bfloat16"),
    ],
)
def test_a_wire_that_is_none_or_would_spoil_the_rule_is_an_error(rule, wire, says):
    with pytest.raises(UsageError, match=says) as caught:
        fit(rule=rule, wire=wire)
    assert caught.value.option == "wire"


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("mse", "is not callable"),
        (lambda output, labels: 1.0, "returns float, not a tensor"),
        (functools.partial(cross_entropy, reduction="none"), r"shape \(32,\); it must be one"),
        (lambda output, labels: labels.float().mean(), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_is_no_mean_is_an_error(loss, says):
    with pytest.raises(UsageError, match=says) as caught:
        fit(loss=loss)
    assert caught.value.option == "loss"


@pytest.mark.parametrize(
    ("validation", "metrics", "monitor", "says"),
    [
        ((torch.zeros(0, 6),), (), "loss", "is empty"),
        (table(), ["f1"], "loss", "no 'f1'; there are accuracy"),
        (table(), [3], "loss", "3 is not callable"),
        (table(), [lambda output, labels: output], "loss", "is not one number"),
        (table(), {"loss": abs}, "loss", "'loss' is no name of its own"),
        (table(), ["accuracy"], "f1", "no figure 'f1'; there are loss, accuracy"),
    ],
)
def test_a_figure_that_cannot_be_computed_is_an_error(validation, metrics, monitor, says):
    with pytest.raises(UsageError, match=says):
        fit(validation=validation, metrics=metrics, monitor=monitor)


def test_a_stream_has_no_shares():
    with pytest.raises(UsageError, match="a stream has no shares") as caught:
        fit(data=Endless(), rule="one-shot")
    assert caught.value.option == "window"


def test_a_stream_without_items_is_an_error():
    with pytest.raises(UsageError, match="dataset: is empty"):
        fit(data=Endless(0))


class Endless:
    def __init__(self, items=40):
        self.items = items

    def __iter__(self):
        return iter(zip(*(part[: self.items] for part in table()), strict=True))


def test_a_model_that_is_none_is_an_error():
    with pytest.raises(ModelError, match=r"function: is no torch\.nn\.Module"):
        fit(model=lambda x: x)
    with pytest.raises(ModelError, match="no parameter that requires a gradient"):
        fit(model=nn.ReLU())


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(perceptron())
        self.inner[0].guard = threading.Lock()


def test_a_model_that_cannot_travel_says_what_holds_it_back():
    with pytest.raises(UsageError, match=r"model\.inner\.0\.guard is a lock") as caught:
        fit(model=Locked())
    assert caught.value.option == "model"


def test_a_loss_that_cannot_travel_says_what_holds_it_back():
    lock = threading.Lock()

    def loss(output, labels):
        with lock:
            return cross_entropy(output, labels)

    with pytest.raises(UsageError, match=r"loss \(its lock\) is a lock"):
        fit(loss=loss)


def test_partials_dictionaries_and_methods_are_looked_into():
    lock = threading.Lock()
    for part, way in (
        (functools.partial(max, lock), r"part\.args\[0\]"),
        ({"a": [1, lock]}, r"part\['a'\]\[1\]"),
        (Locked().forward, r"part\.__self__\.inner\.0\.guard"),
    ):
        with pytest.raises(UsageError, match=f"{way} is a lock"):
            check_travels({"part": part})


def test_an_error_of_the_models_own_goes_through():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fit(model=perceptron(inputs=5))
