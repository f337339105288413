"""Keras 3 models on torch, in a process of their own: Keras takes its backend when imported."""

import json
import os
from pathlib import Path

import pytest

from tests.support import forked

SCRIPT = Path(__file__).parents[1] / "support" / "keras_training.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    home = str(tmp_path_factory.mktemp("keras"))
    environment = os.environ | {"KERAS_BACKEND": "torch", "KERAS_HOME": home}
    process = forked.start([SCRIPT], cwd=home, env=environment)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(out)


def test_one_worker_trains_a_keras_model_as_torch_optim_does(found):
    assert found["error"] < 1e-6
    assert list(found["figures"]) == ["loss"]


def test_optimizers_of_keras_step_as_keras_does(found):
    for name, (error, moved) in found["optimizers"]["errors"].items():
        assert error < 1e-6 < 1e-2 < moved, name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("schedule", "Keras' Adam has a schedule, which counts its own steps"),
        ("ema", "use_ema of Keras' Adam is not done here"),
        ("scaled", "of Keras' LossScaleOptimizer is not done here"),
        ("used", "this SGD has stepped, and its state would be lost"),
        ("excludes", "variables that Keras' Adam excludes from weight decay"),
        ("own", "Own is no optimizer of Keras' own"),
    ],
)
def test_an_optimizer_of_keras_that_cannot_be_followed_is_refused(found, name, says):
    refusal = found["optimizers"]["refused"][name]
    assert refusal.startswith("UsageError: optimizer") and says in refusal


def test_a_compiled_models_optimizer_trains_it_in_processes(found):
    before, after = found["compiled"]
    assert after < 0.9 * before


def test_losses_of_regularizers_and_layers_are_added(found):
    assert found["regularized_error"] < 1e-6


def test_losses_of_a_keras_model_inside_a_torch_module_are_added(found):
    alone, inside = found["wrapped_losses"]
    assert inside == pytest.approx(alone)


def test_a_model_of_several_inputs_gets_them(found):
    assert found["inputs"] == 40


def test_the_vectors_order_is_the_layers_and_not_that_of_their_names(found):
    assert found["sizes_in_order"] == [[6 * 8, 8, 8 * 3, 3]] * 2


def test_predictions_and_figures_are_the_models_own_in_inference(found):
    assert found["predicted"] < 1e-6


def test_dropout_draws_from_the_runs_seed(found):
    first, again, other = found["drawn"]
    assert first == again != other


def test_statistics_are_of_the_trained_weights_and_no_parameters(found):
    error, momentum = found["statistics"]
    assert error < 1e-5
    assert momentum == 0.9
    assert found["parameters"] == (6 * 8 + 8) + 2 * 8 + (8 * 3 + 3)


def test_a_model_without_shapes_or_on_another_backend_is_an_error(found):
    assert found["unbuilt"].startswith("ModelError") and "is not built" in found["unbuilt"]
    assert "Keras runs on jax; set KERAS_BACKEND=torch" in found["elsewhere"]
