"""`transformers:NAME` texts: configurations from files, from the table and from types."""

import json
import socket

import pytest
import torch

from dovetail.errors import FileFormatError, MissingLibraryError, ModelError
from dovetail.frontends.transformers_configs import TASKS, load_transformers, published

transformers = pytest.importorskip("transformers")
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a configuration was looked for on the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def parameters_of(name):
    with torch.device("meta"):
        module = load_transformers(f"transformers:{name}").make()
    assert {value.device.type for value in module.parameters()} == {"meta"}
    return sum(value.numel() for value in module.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("google/gemma-2-9b", 9_241_705_984),
        ("openai/gpt-oss-20b", 20_914_757_184),
        ("openai-community/gpt2-xl", 1_557_611_200),
        ("google-bert/bert-base-uncased", 109_514_298),
        ("google-t5/t5-base", 222_903_552),
        ("google/vit-base-patch16-224", 86_567_656),
        ("microsoft/resnet-50", 25_557_032),
        ("openai/clip-vit-base-patch32", 151_277_313),
        ("openai/whisper-large-v3", 1_543_490_560),
    ],
)
def test_a_published_model_has_as_many_parameters_as_its_card_says(name, count):
    assert parameters_of(name) == count


def test_every_published_model_is_for_a_task_and_of_a_type_that_is_installed():
    kinds = transformers.CONFIG_MAPPING
    for name, values in published().items():
        assert values["model_type"] in kinds, name
        assert values["architectures"][0].endswith(
            tuple(ending for task in TASKS.values() for ending in task.endings)
        ), name


def test_a_type_alone_has_the_defaults_of_its_configuration():
    assert parameters_of("bert?task=masked-lm") == 109_514_298


def test_a_local_configuration_is_read_as_a_file_or_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert parameters_of(tmp_path) == parameters_of(tmp_path / "config.json")
    found = load_transformers(f"transformers:{tmp_path}?batch=3&tokens=7")
    assert {key: tuple(value.shape) for key, value in found.draw(True).items()} == {
        "input_ids": (3, 7),
        "labels": (3, 7),
    }
    assert found.draw(False)["input_ids"].max() < 50


def test_code_that_a_configuration_points_to_is_not_looked_at(tmp_path):
    values = SMALL | {"auto_map": {"AutoConfig": "there/is--none.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert parameters_of(tmp_path) > 0


def test_weights_and_inputs_are_of_the_dtype_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"torch_dtype": "bfloat16"}))
    text = f"transformers:{tmp_path}"
    assert load_transformers(text).make().dtype == torch.bfloat16
    assert load_transformers(f"{text}?dtype=float16").make().dtype == torch.float16
    images = load_transformers("transformers:vit?dtype=bfloat16").draw(False)
    assert images["pixel_values"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("t5?tokens=6", {"input_ids": (1, 6), "labels": (1, 6)}),
        ("whisper?tokens=6", {"input_features": (1, 80, 3000), "labels": (1, 6)}),
        ("vit?batch=2", {"pixel_values": (2, 3, 224, 224), "labels": (2,)}),
        ("wav2vec2?samples=800", {"input_values": (1, 800), "labels": (1,)}),
        ("wav2vec2?task=ctc&tokens=5", {"input_values": (1, 16000), "labels": (1, 5)}),
    ],
)
def test_a_type_is_fed_what_it_is_for(name, inputs):
    drawn = load_transformers(f"transformers:{name}").draw(True)
    assert {key: tuple(value.shape) for key, value in drawn.items()} == inputs


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("meta-llama/Llama-3.1-71B", "did you mean meta-llama/Llama-3.1-70B"),
        ("nobody/nothing", r"name it \(transformers:./config.json\)"),
        ("bert?tokens=513", "the model has 512 positions"),
        ("bert?tokens=0", "tokens is a whole number from 1"),
        ("bert?token=5", "there is no option 'token'; there are batch, tokens"),
        ("bert?task=chess", "task is one of"),
        ("bert?dtype=int8", "dtype is one of float32"),
        ("gpt2?task=image", "transformers has no gpt2 for that task; it has causal-lm"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(name, complaint):
    with pytest.raises(ModelError, match=complaint) as raised:
        load_transformers(f"transformers:{name}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[]", "has no model_type"),
        ("{", "cannot read"),
        ('{"model_type": "unheard_of"}', "'unheard_of' is not in the transformers"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, content, complaint):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(FileFormatError, match=complaint) as raised:
        load_transformers(f"transformers:{path}")
    assert "\n" not in str(raised.value)


def test_values_that_a_type_refuses_are_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"hidden_size": "many"}))
    with pytest.raises(ModelError, match="its values are not those of a llama") as raised:
        load_transformers(f"transformers:{tmp_path}")
    assert "\n" not in str(raised.value)


def test_without_transformers_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingLibraryError, match="pip install transformers"):
        load_transformers("transformers:bert")
