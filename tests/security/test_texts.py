"""MODEL texts ask for no more than can be captured."""

import pytest

from dovetail.errors import ModelError
from dovetail.frontends.models import MOST_REPEATS, parse_zoo
from dovetail.frontends.transformers_configs import load_transformers
from dovetail.networks import NETWORKS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("zoo:rnnlm?steps=1000000", "layers x steps is more than 16384"),
        ("zoo:gnmt?layers=1000&steps=1000", "layers x steps"),
        ("zoo:wavenet?stacks=200&layers=200", "layers x stacks"),
        ("zoo:randwire?nodes=100000", "nodes x neighbours"),
        ("zoo:rnnlm?batch=9999999999", "batch is larger than"),
    ],
)
def test_a_network_of_too_many_ops_is_not_begun(text, complaint):
    with pytest.raises(ModelError, match=complaint):
        parse_zoo(text)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_may_be_larger_than_the_papers(name):
    largest = next((key for key in ("layers", "cells", "nodes", "steps")
                    if key in NETWORKS[name].defaults), "batch")  # fmt: skip
    parse_zoo(f"zoo:{name}?{largest}={16 * int(NETWORKS[name].defaults[largest])}")
    assert MOST_REPEATS == 2**14


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 30, "2147483648", "0"])
def test_an_option_of_a_transformer_is_a_size(number):
    with pytest.raises(ModelError, match="is a whole number from 1 to 2147483647") as caught:
        load_transformers(f"transformers:bert?batch={number}")
    assert caught.value.model.startswith("transformers:bert")
