"""The request is checked where it is built, and its defaults are the only ones."""

import inspect
import subprocess
import sys
from dataclasses import MISSING, fields, replace

import pytest

from dovetail.errors import UsageError
from dovetail.training.backends.contract import FailurePolicy
from dovetail.training.request import TrainRequest
from dovetail.training.trainer import Trainer
from tests.support.training_models import SGD, cross_entropy, perceptron


def test_a_setting_that_no_run_can_have_is_refused_where_the_request_is_built():
    with pytest.raises(UsageError) as caught:
        TrainRequest(perceptron(), cross_entropy, SGD, workers=0)
    assert caught.value.option == "workers"
    request = TrainRequest(perceptron(), cross_entropy, SGD)
    with pytest.raises(UsageError) as caught:
        replace(request, validate="often")
    assert caught.value.option == "validate"
    for option, value in (("device", "gpu"), ("device", "cuda:x"), ("autocast", "float16")):
        with pytest.raises(UsageError) as caught:
            replace(request, **{option: value})
        assert caught.value.option == option


def test_a_trainer_builds_the_request_of_its_arguments():
    model = perceptron()
    trainer = Trainer(model, cross_entropy, SGD, "agn", 3, "threads", epochs=2)
    assert trainer.request == TrainRequest(
        model, cross_entropy, SGD, rule="agn", workers=3, backend="threads", epochs=2
    )
    assert list(inspect.signature(Trainer).parameters) == [
        field.name for field in fields(TrainRequest)
    ]


@pytest.mark.parametrize(
    ("validate", "moments"),
    [("epoch", (40, None)), (16, (16, None)), ("30s", (None, 30.0)), (" .5 s", (None, 0.5))],
)
def test_evaluations_come_by_samples_or_by_seconds(validate, moments):
    request = TrainRequest(perceptron(), cross_entropy, SGD, validate=validate)
    assert request.evaluation_times(40) == moments


def test_the_command_line_shows_the_defaults_of_the_records():
    from typer.main import get_command

    from dovetail.cli import make_app

    shown = {
        p.name: p.show_default if isinstance(p.show_default, str) else str(p.default)
        for p in get_command(make_app("train")).commands["train"].params
    }
    defaults = {field.name: field.default for field in fields(TrainRequest)}
    for name in ("rule", "workers", "backend", "epochs", "batch", "validate", "monitor", "wire"):
        assert defaults[name] is not MISSING
        assert shown[name] == str(defaults[name])
    assert shown["restarts"] == str(FailurePolicy().worker_restarts)
    assert shown["losses"] == str(FailurePolicy().worker_losses)
    assert shown["lease"] == f"{FailurePolicy().lease_seconds:g}s"


def test_the_defaults_need_neither_torch_nor_numpy():
    code = (
        "import sys, dovetail.training.request; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
