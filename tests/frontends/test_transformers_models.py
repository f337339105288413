"""Models of transformers as they are by default."""

import pytest
import torch
from torch import nn

from dovetail.frontends.capturing import batched_experts, unwrap

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def mixture():
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES)).eval()


def test_experts_are_batched_while_a_model_is_captured_and_as_before_after_it(mixture):
    ids = torch.arange(10).reshape(2, 5)
    before = mixture.config._experts_implementation
    with torch.no_grad():
        expected = mixture(input_ids=ids).logits
        with batched_experts(mixture) as notes:
            assert mixture.config._experts_implementation == "batched_mm"
            found = mixture(input_ids=ids).logits
    assert len(notes) == 1 and repr(before) in notes[0]
    assert mixture.config._experts_implementation == before != "batched_mm"
    torch.testing.assert_close(found, expected)


def test_experts_are_as_before_after_an_error(mixture):
    before = mixture.config._experts_implementation
    with pytest.raises(ValueError, match="ours"), batched_experts(mixture):
        raise ValueError("ours")
    assert mixture.config._experts_implementation == before


def test_experts_inside_of_another_module_are_found(mixture):
    with batched_experts(nn.ModuleDict({"inner": mixture})) as notes:
        assert notes


def test_experts_that_are_batched_already_need_no_note(mixture):
    mixture.set_experts_implementation("batched_mm")
    with batched_experts(mixture) as notes:
        assert notes == ()


def test_a_model_without_experts_needs_no_note():
    with batched_experts(nn.Linear(2, 2)) as notes:
        assert notes == ()


def test_the_module_inside_of_data_parallel_is_what_counts():
    inner = nn.Linear(2, 2)
    assert unwrap(nn.DataParallel(nn.DataParallel(inner))) is inner
    assert unwrap(inner) is inner
