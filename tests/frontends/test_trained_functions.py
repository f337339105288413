"""Functions for `dovetail train` as MODEL texts: the same steps as by the form of plans."""

import pytest

from dovetail.errors import UsageError
from dovetail.frontends import Adam, resolve

HERE = "tests.support.trained_models"


@pytest.mark.parametrize("train", [None, Adam(1e-3)])
@pytest.mark.parametrize("form", ["quadrants", "without_validation"])
def test_both_forms_of_a_function_give_one_graph(form, train):
    found = resolve(f"{HERE}:{form}", train=train)
    text = "as_plan" if train else "as_inference"
    assert found.graph.fingerprint == resolve(f"{HERE}:{text}", train=train).graph.fingerprint
    assert found.source.model == f"{HERE}:{form}"


def test_a_trainers_own_batch_is_the_steps():
    found = resolve(f"{HERE}:as_trainer", train=Adam(1e-3))
    assert (24, 4) in found.graph.shapes


@pytest.mark.parametrize("form", ["with_nothing", "with_an_empty_stream"])
def test_an_empty_data_set_has_no_step(form):
    with pytest.raises(UsageError, match="dataset: is empty"):
        resolve(f"{HERE}:{form}")
