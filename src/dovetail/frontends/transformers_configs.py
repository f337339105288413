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
from dataclasses import dataclass, replace
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
    """

    auto: str
    endings: tuple[str, ...]


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
    # The tasks that transformers has a model of this type for, the likeliest first.
    both = hasattr(config, "text_config") and hasattr(config, "vision_config")
    suited = [
        name
        for name, task in TASKS.items()
        if type(config) in getattr(transformers, task.auto)._model_mapping
        and (name != "image-text" or both)
        and not (name == "image" and both)
    ]
    kind = options.task
    if not kind:
        if not suited:
            raise ModelError(
                model,
                f"a {config.model_type} is for no task that is known here ({', '.join(TASKS)}); "
                "build it in a function MODULE:FUNCTION",
            )
        # The task that the architecture's name says, else the first that has a model of this type.
        named = (
            name
            for architecture in getattr(config, "architectures", None) or ()
            for name in suited
            if architecture.endswith(TASKS[name].endings)
        )
        kind = next(named, suited[0])
    if options.phase and kind != "causal-lm":
        raise ModelError(
            model,
            "prefill and decode are phases of causal language models (task=causal-lm); of another "
            "model return them from a function MODULE:FUNCTION as {phase: (module, inputs)}",
        )
    auto = getattr(transformers, TASKS[kind].auto)
    dtype = getattr(torch, options.dtype) if options.dtype else dtype_of(config)
    most = positions_of(config)
    if most is None:
        most = options.tokens or 512
    elif options.phase:
        most -= 1  # for the token that is decoded
    if options.tokens > most:
        raise ModelError(
            model, f"tokens is {options.tokens}, but the model has {most} positions; use fewer"
        )
    if type(config) not in auto._model_mapping:
        others = ", ".join(suited) or "none that is known here"
        raise ModelError(
            model, f"transformers has no {config.model_type} for that task; it has {others}"
        )
    options = replace(options, tokens=options.tokens or min(512, most))

    def make() -> nn.Module:
        built: nn.Module = auto.from_config(config, dtype=dtype)
        return built

    def draw(training: bool) -> Inputs:
        inputs = _draw(kind, config, options, training)
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
        values = read_json(str(path))
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise FileFormatError(
                str(path), "it has no model_type and is no configuration of transformers"
            )
        if values["model_type"] not in set(CONFIG_MAPPING.keys()):
            raise FileFormatError(
                str(path),
                f"its model_type {values['model_type']!r} is not in the transformers that is "
                "installed; install a newer one, or build the model in a function MODULE:FUNCTION",
            )
    elif name in published():
        values = published()[name]
    elif name in CONFIG_MAPPING:
        values = {"model_type": name}
    else:
        near = difflib.get_close_matches(name, [*published(), *CONFIG_MAPPING.keys()], 3, 0.5)
        guess = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ModelError(
            model,
            "no such configuration here, and nothing is downloaded: save the model's config.json "
            "and name it (transformers:./config.json), or name a type such as bert or llama, or "
            f"one of {', '.join(published())}{guess}",
        )
    values = dict(values)
    kind = values.pop("model_type")
    try:
        return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # whatever a class's own checks raise
        line = " ".join(str(error).split())
        raise ModelError(model, f"its values are not those of a {kind}: {line}") from error


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


def _draw(kind: str, config: Any, options: TransformersOptions, training: bool) -> Inputs:
    """Return inputs of a model for this task, in training with labels."""

    def ids() -> Tensor:
        vocabulary = config.get_text_config(decoder=True).vocab_size
        return torch.randint(0, vocabulary, (options.batch, options.tokens))

    def pixels(of: Any) -> Tensor:
        size = getattr(of, "image_size", None) or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return torch.randn(options.batch, getattr(of, "num_channels", 3), height, width)

    inputs: Inputs = {}
    match kind:
        case "causal-lm" | "masked-lm":
            words = ids()
            return {"input_ids": words} | ({"labels": words.clone()} if training else {})
        case "seq2seq":
            inputs = {"input_ids": ids()}
        case "speech":
            frames = 2 * config.max_source_positions  # the first convolution takes every other one
            inputs = {"input_features": torch.randn(options.batch, config.num_mel_bins, frames)}
        case "image-text":
            image = pixels(config.vision_config)
            inputs = {"input_ids": ids(), "pixel_values": image}
            return inputs | ({"return_loss": True} if training else {})
        case "image":
            inputs = {"pixel_values": pixels(config)}
        case "audio" | "ctc":
            inputs = {"input_values": torch.randn(options.batch, options.samples)}
    if kind in ("seq2seq", "speech"):
        return inputs | {"labels" if training else "decoder_input_ids": ids()}
    if not training:
        return inputs
    if kind == "ctc":
        return inputs | {"labels": ids()}
    return inputs | {"labels": torch.randint(0, config.num_labels, (options.batch,))}


TASKS: Mapping[str, TransformersTask] = {
    "image-text": TransformersTask("AutoModel", ("Model",)),
    "seq2seq": TransformersTask(
        "AutoModelForSeq2SeqLM", ("ForConditionalGeneration", "ForSeq2SeqLM")
    ),
    "speech": TransformersTask("AutoModelForSpeechSeq2Seq", ("ForConditionalGeneration",)),
    "audio": TransformersTask("AutoModelForAudioClassification", ("ForSequenceClassification",)),
    "ctc": TransformersTask("AutoModelForCTC", ("ForCTC",)),
    "image": TransformersTask("AutoModelForImageClassification", ("ForImageClassification",)),
    "masked-lm": TransformersTask("AutoModelForMaskedLM", ("ForMaskedLM", "ForPreTraining")),
    "causal-lm": TransformersTask("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
}
"""Name -> task that a model can be for; `_draw` makes its inputs. If the architecture does not say
which, the first task counts that transformers has a class for."""
