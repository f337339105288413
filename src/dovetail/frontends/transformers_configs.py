"""Reads MODEL texts `transformers:NAME?options`: how to build the model and draw its inputs.

NAME is a local config.json or a folder that holds one, a published model of the table
`transformers_configs.json`, or a type of model with the defaults of its configuration class, such
as `bert`. Nothing is downloaded, and no code but transformers' own runs: what a configuration's
`auto_map` points to is never looked at.

The table holds what the published config.json of each model says about its architecture, at
https://huggingface.co/NAME/blob/main/config.json; what it leaves out is the class's default.
"""

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import FileFormatError, MissingLibraryError, ModelError
from dovetail.runtime.files import read_json

PREFIX = "transformers:"
Inputs = dict[str, Any]
"""Keyword arguments of the model's `forward`."""


@dataclass(frozen=True)
class TransformersModel:
    """A configuration, with how to build its model and draw its inputs.

    make      builds the model on the device that is the default where it is called
    draw      draws inputs there, in training with labels; the model's output then has a loss
    phase     of generation, "prefill" or "decode"; "": none
    """

    make: Callable[[], nn.Module]
    draw: Callable[[bool], Inputs]
    phase: str = ""


@dataclass(frozen=True)
class TransformersOptions:
    """batch     samples at once
    tokens    of a sentence; 0: 512, or as many as the model has positions for
    samples   of a sound wave
    task      what the model is for; "": as the configuration's architecture says
    dtype     of weights and inputs; "": the configuration's, else float32
    phase     of generating text: "prefill" reads the tokens, "decode" makes the next one with their
              keys and values; "": neither, a forward pass without a cache
    """

    batch: int = 1
    tokens: int = 0
    samples: int = 16000
    task: str = ""
    dtype: str = ""
    phase: str = ""


MOST_SIZE = 2**31 - 1
"""The largest number of samples, tokens or sentences of a step."""
DTYPES = ("float32", "float16", "bfloat16", "float64")
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class TransformersTask:
    """auto        the class of transformers that builds a model for it
    endings     of names of architectures that are for it
    draw        (config, options, training) -> inputs
    """

    auto: str
    endings: tuple[str, ...]
    draw: Callable[[Any, TransformersOptions, bool], Inputs]


def load_transformers(model: str) -> TransformersModel:
    """What the MODEL text "transformers:NAME?option=value&..." names.

    Raises `MissingLibraryError` without transformers, `FileFormatError` for a file that is no
    configuration, and else `ModelError`.
    """
    name, _, query = model.removeprefix(PREFIX).partition("?")
    options = _parse(model, query)
    try:
        import transformers
    except ImportError as error:
        raise MissingLibraryError("transformers", "pip install transformers") from error
    config = _config(model, name)
    # Otherwise the model would return its cache, which would be an output of the step to be kept.
    config.use_cache = False
    kind = options.task or _task_of(model, config)
    if options.phase and kind != "causal-lm":
        raise ModelError(
            model,
            "prefill and decode are phases of causal language models (task=causal-lm); of another "
            "model return them from a function MODULE:FUNCTION as {phase: (module, inputs)}",
        )
    task = TASKS[kind]
    auto = getattr(transformers, task.auto)
    dtype = getattr(torch, options.dtype) if options.dtype else dtype_of(config)
    options = _with_tokens(model, config, options)
    if type(config) not in auto._model_mapping:
        suited = ", ".join(tasks) if (tasks := _suited_tasks(config)) else "none that is known here"
        raise ModelError(
            model, f"transformers has no {config.model_type} for that task; it has {suited}"
        )

    def make() -> nn.Module:
        built: nn.Module = auto.from_config(config, dtype=dtype)
        return built

    def draw(training: bool) -> Inputs:
        inputs = task.draw(config, options, training)
        return {
            name: value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in inputs.items()
        }

    return TransformersModel(make, draw, options.phase)


def own_loss(output: Any) -> Tensor:
    """Return the loss that a model of transformers computes itself if it is given labels."""
    loss: Tensor = output.loss
    return loss


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return name on the hub -> the content of its config.json."""
    text = resources.files("dovetail.frontends").joinpath("transformers_configs.json")
    table: dict[str, dict[str, Any]] = json.loads(text.read_text("utf-8"))
    return table


def _parse(model: str, query: str) -> TransformersOptions:
    given: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        if key not in TransformersOptions.__dataclass_fields__:
            names = ", ".join(TransformersOptions.__dataclass_fields__)
            raise ModelError(model, f"there is no option {key!r}; there are {names}")
        choices = {"task": tuple(TASKS), "dtype": DTYPES, "phase": PHASES}.get(key)
        if choices is not None:
            if value not in choices:
                raise ModelError(model, f"{key} is one of {', '.join(choices)}, not {value!r}")
            given[key] = value
            continue
        # No more digits are converted than such a number has.
        if not value.isdecimal() or not 1 <= int(value[:11]) <= MOST_SIZE:
            raise ModelError(
                model, f"{key} is a whole number from 1 to {MOST_SIZE}, not {value[:40]!r}"
            )
        given[key] = int(value)
    return TransformersOptions(**given)


def _config(model: str, name: str) -> Any:
    """The configuration that NAME stands for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values: dict[str, Any]
    path = Path(name)
    # A name may be too long for a file, of which `Path` would raise.
    if os.path.isdir(path):
        path = path / "config.json"
    if os.path.isfile(path):
        values = _read(path, set(CONFIG_MAPPING.keys()))
    elif name in published():
        values = published()[name]
    elif name in CONFIG_MAPPING:
        values = {"model_type": name}
    else:
        raise ModelError(model, _explain_unknown(name, list(CONFIG_MAPPING.keys())))
    values = dict(values)
    kind = values.pop("model_type")
    try:
        return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # whatever a class's own checks raise
        line = " ".join(str(error).split())
        raise ModelError(model, f"its values are not those of a {kind}: {line}") from error


def _read(path: Path, kinds: set[str]) -> dict[str, Any]:
    values = read_json(str(path))
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise FileFormatError(
            str(path), "it has no model_type and is no configuration of transformers"
        )
    if values["model_type"] not in kinds:
        raise FileFormatError(
            str(path),
            f"its model_type {values['model_type']!r} is not in the transformers that is "
            "installed; install a newer one, or build the model in a function MODULE:FUNCTION",
        )
    return values


def _explain_unknown(name: str, kinds: list[str]) -> str:
    near = difflib.get_close_matches(name, [*published(), *kinds], 3, 0.5)
    guess = f"; did you mean {' or '.join(near)}?" if near else ""
    return (
        f"no such configuration here, and nothing is downloaded: save the model's config.json and "
        f"name it (transformers:./config.json), or name a type such as bert or llama, or one of "
        f"{', '.join(published())}{guess}"
    )


def dtype_of(config: Any) -> torch.dtype:
    """The dtype that a configuration names; float32 where it names none."""
    given = getattr(config, "dtype", None)
    return given if isinstance(given, torch.dtype) else torch.float32


def positions_of(config: Any) -> int | None:
    """Tokens that a model of this configuration has positions for; None where they have no end."""
    text = config.get_text_config(decoder=True)
    most = getattr(text, "max_target_positions", None) or getattr(
        text, "max_position_embeddings", None
    )
    return most if isinstance(most, int) and most > 0 else None


def _task_of(model: str, config: Any) -> str:
    """Return the task that the architecture's name says, else the first that has a model of this
    type. Raises `ModelError` if there is none."""
    suited = _suited_tasks(config)
    for architecture in getattr(config, "architectures", None) or ():
        for name in suited:
            if architecture.endswith(TASKS[name].endings):
                return name
    if not suited:
        raise ModelError(
            model,
            f"a {config.model_type} is for no task that is known here ({', '.join(TASKS)}); build "
            "it in a function MODULE:FUNCTION",
        )
    return suited[0]


def _suited_tasks(config: Any) -> list[str]:
    """Tasks that transformers has a model of this type for, the likeliest first."""
    import transformers

    both = hasattr(config, "text_config") and hasattr(config, "vision_config")
    return [
        name
        for name, task in TASKS.items()
        if type(config) in getattr(transformers, task.auto)._model_mapping
        and (name != "image-text" or both)
        and not (name == "image" and both)
    ]


def _with_tokens(model: str, config: Any, options: TransformersOptions) -> TransformersOptions:
    """The options with a number of tokens that the model has positions for."""
    most = positions_of(config)
    if most is None:
        most = options.tokens or 512
    elif options.phase:
        most -= 1  # for the token that is decoded
    if options.tokens > most:
        raise ModelError(
            model, f"tokens is {options.tokens}, but the model has {most} positions; use fewer"
        )
    return TransformersOptions(**{**vars(options), "tokens": options.tokens or min(512, most)})


def _ids(config: Any, options: TransformersOptions) -> Tensor:
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return torch.randint(0, vocabulary, (options.batch, options.tokens))


def _text(config: Any, options: TransformersOptions, training: bool) -> Inputs:
    ids = _ids(config, options)
    return {"input_ids": ids, "labels": ids.clone()} if training else {"input_ids": ids}


def _translation(config: Any, options: TransformersOptions, training: bool) -> Inputs:
    answer = "labels" if training else "decoder_input_ids"
    return {"input_ids": _ids(config, options), answer: _ids(config, options)}


def _transcription(config: Any, options: TransformersOptions, training: bool) -> Inputs:
    frames = 2 * config.max_source_positions  # the first convolution takes every other frame
    answer = "labels" if training else "decoder_input_ids"
    features = torch.randn(options.batch, config.num_mel_bins, frames)
    return {"input_features": features, answer: _ids(config, options)}


def _pixels(config: Any, options: TransformersOptions) -> Tensor:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(options.batch, getattr(config, "num_channels", 3), height, width)


def _image(config: Any, options: TransformersOptions, training: bool) -> Inputs:
    inputs: Inputs = {"pixel_values": _pixels(config, options)}
    return inputs | (_classes(config, options) if training else {})


def _sound(config: Any, options: TransformersOptions, training: bool) -> Inputs:
    inputs: Inputs = {"input_values": torch.randn(options.batch, options.samples)}
    return inputs | (_classes(config, options) if training else {})


def _spelled_sound(config: Any, options: TransformersOptions, training: bool) -> Inputs:
    inputs: Inputs = {"input_values": torch.randn(options.batch, options.samples)}
    return inputs | ({"labels": _ids(config, options)} if training else {})


def _classes(config: Any, options: TransformersOptions) -> Inputs:
    return {"labels": torch.randint(0, config.num_labels, (options.batch,))}


def _image_and_text(config: Any, options: TransformersOptions, training: bool) -> Inputs:
    pixels = _pixels(config.vision_config, options)
    inputs: Inputs = {"input_ids": _ids(config, options), "pixel_values": pixels}
    return inputs | ({"return_loss": True} if training else {})


TASKS: Mapping[str, TransformersTask] = {
    "image-text": TransformersTask("AutoModel", ("Model",), _image_and_text),
    "seq2seq": TransformersTask(
        "AutoModelForSeq2SeqLM", ("ForConditionalGeneration", "ForSeq2SeqLM"), _translation
    ),
    "speech": TransformersTask(
        "AutoModelForSpeechSeq2Seq", ("ForConditionalGeneration",), _transcription
    ),
    "audio": TransformersTask(
        "AutoModelForAudioClassification", ("ForSequenceClassification",), _sound
    ),
    "ctc": TransformersTask("AutoModelForCTC", ("ForCTC",), _spelled_sound),
    "image": TransformersTask(
        "AutoModelForImageClassification", ("ForImageClassification",), _image
    ),
    "masked-lm": TransformersTask("AutoModelForMaskedLM", ("ForMaskedLM", "ForPreTraining"), _text),
    "causal-lm": TransformersTask("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel"), _text),
}
"""Name -> task that a model can be for. If the architecture does not say which, the first task
counts that transformers has a class for."""
