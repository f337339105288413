"""Keras 3 models on torch, in a process of their own: Keras takes its backend when imported."""

import json
import os
from pathlib import Path

import pytest
from torch import nn

from dovetail.training.keras_models import is_keras
from tests.support import forked

SCRIPT = Path(__file__).parents[1] / "support" / "keras_networks.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    home = str(tmp_path_factory.mktemp("keras"))
    environment = os.environ | {"KERAS_BACKEND": "torch", "KERAS_HOME": home}
    process = forked.start([SCRIPT], cwd=SCRIPT.parents[2], env=environment)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(out)


@pytest.mark.parametrize("name", ["convolutional", "perceptron", "two_inputs"])
def test_a_captured_model_predicts_as_keras_does(found, name):
    assert found[name]["error"] < 1e-6


def test_layers_are_modules(found):
    assert found["convolutional"]["modules"] == [
        "add", "branch", "conv", "flat", "head", "norm", "pool", "relu"
    ]  # fmt: skip
    assert found["perceptron"]["modules"][0] == "first"
    assert all(m.startswith("inner.") for m in found["perceptron"]["modules"][1:])
    assert {"first.kernel", "first.bias"} <= set(found["perceptron"]["names"])
    assert "norm.moving_mean" in found["convolutional"]["names"]


def test_flops_are_those_of_the_layers(found):
    pixels = 3 * 144 * 4
    convolutions = 2 * pixels * 27 + 2 * pixels * 36
    head = 2 * 3 * 144 * 5
    assert convolutions + head < found["convolutional"]["flops"] < 1.2 * (convolutions + head)


@pytest.mark.parametrize("name", ["trained", "trained_perceptron", "trained_regularized"])
def test_training_steps_equal_keras_under_torch(found, name):
    """Losses, weights, and statistics of batch norms, three steps on."""
    trained = found[name]
    assert trained["again"], "captured again it has its loss once"
    assert trained["losses"] == pytest.approx(trained["expected"], rel=1e-5)
    assert len(set(trained["losses"])) == 3
    assert max(trained["errors"]) < 1e-5


def test_trainable_variables_are_updated_and_statistics_copied(found):
    assert found["trained"]["updated"] == [
        "conv.kernel/sgd", "norm.gamma/sgd", "norm.beta/sgd", "branch.kernel/sgd",
        "branch.bias/sgd", "head.kernel/sgd", "head.bias/sgd", "norm.moving_mean/copy_",
        "norm.moving_variance/copy_",
    ]  # fmt: skip


def test_dropout_draws_from_the_runs_seed(found):
    first, again, other = found["draws"]
    assert first == again != other
    assert [name.partition("/")[0] for name in found["random"]] == ["drop"]


def test_a_function_that_returns_a_keras_model_names_one(found):
    assert found["named"] > 20


def test_a_seed_in_a_layer_is_an_error_in_training_alone(found):
    assert found["seeded"].startswith("ModelError")
    assert "layer 'drop' draws from a seed of its own" in found["seeded"]
    assert found["seeded_inference"] == ""


def test_a_capture_leaves_a_layers_own_call_in_place(found):
    assert found["own_call"]


def test_a_model_without_shapes_is_an_error(found):
    assert "is not built; call it once" in found["unbuilt"]


def test_another_backend_is_an_error(found):
    for complaint in found["elsewhere"]:
        assert complaint.startswith("ModelError")
        assert "Keras runs on jax; set KERAS_BACKEND=torch" in complaint


def test_a_plain_module_is_no_keras_model():
    assert not is_keras(nn.Linear(2, 2))
