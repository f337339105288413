"""MODEL texts that name a configuration of transformers or an exported program."""

import json

import pytest
import torch
from torch import nn

from dovetail.errors import CaptureError, ModelError
from dovetail.frontends import SGD, example_values, initial_values, run_step
from dovetail.frontends.models import resolve

transformers = pytest.importorskip("transformers")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}


@pytest.fixture
def text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"transformers:{tmp_path}?batch=2&tokens=6"


def test_a_configuration_is_captured_without_weights_and_runs_as_its_model_does(text):
    captured = resolve(text)
    assert captured.source.model == text
    assert all(value.is_meta for value in captured.module.parameters())
    inputs, _ = example_values(captured, seed=3)
    found = run_step(captured, initial_values(captured, seed=5), inputs)
    torch.manual_seed(5)
    plain = captured.make()
    with torch.no_grad():
        expected = plain(input_ids=inputs[0])
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)


def test_a_configuration_is_trained_on_the_loss_of_its_labels(text):
    captured = resolve(text, train=SGD(lr=0.1))
    inputs, targets = example_values(captured, seed=3)
    values = initial_values(captured, seed=5)
    torch.manual_seed(5)
    plain = captured.make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        expected = plain(**dict(zip(captured.signature.names, inputs, strict=True))).loss
        expected.backward()
        optimizer.step()
        found = run_step(captured, values, inputs, targets, step=step)
        torch.testing.assert_close(found, expected.detach())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, *, scale):
        y = self.layer(x)
        return {"y": y * scale, "norm": y.norm()}


class Loss(Pair):
    def forward(self, x, *, scale):
        return super().forward(x, scale=scale)["norm"]


def saved(module, path):
    torch.manual_seed(0)
    args, kwargs = (torch.randn(5, 4),), {"scale": torch.ones(3)}
    torch.export.save(torch.export.export(module, args, kwargs), path)
    return args, kwargs


def test_an_exported_program_is_captured_with_its_example_inputs(tmp_path):
    module, path = Pair().eval(), str(tmp_path / "pair.pt2")
    args, kwargs = saved(module, path)
    captured = resolve(path)
    assert captured.source.model == path
    found = run_step(captured, initial_values(captured), captured.inputs)
    with torch.no_grad():
        expected = module(*args, **kwargs)
    assert list(found) == ["y", "norm"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_exported_program_that_returns_its_loss_is_trained(tmp_path):
    module, path = Loss(), str(tmp_path / "loss.pt2")
    args, kwargs = saved(module, path)
    captured = resolve(path, train=SGD(lr=0.1))
    values = initial_values(captured)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        expected = module(*args, **kwargs)
        expected.backward()
        optimizer.step()
        found = run_step(captured, values, captured.inputs, step=step)
        torch.testing.assert_close(found, expected.detach())


def test_an_exported_program_without_a_loss_says_so(tmp_path):
    path = str(tmp_path / "pair.pt2")
    saved(Pair(), path)
    with pytest.raises(CaptureError, match="loss"):
        resolve(path, train=SGD())


def test_a_text_of_no_form_names_the_forms():
    with pytest.raises(ModelError, match=r"transformers:NAME .* FILE\.pt2"):
        resolve("what:is this")
