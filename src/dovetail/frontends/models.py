"""Captures what MODEL texts name: `zoo:NAME?options`, `transformers:NAME?options`, `FILE.pt2` and
`package.module:function`."""

import io
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dovetail.errors import FileFormatError, ModelError, UnknownNetworkError, UsageError
from dovetail.frontends.capturing import capture, capture_call
from dovetail.frontends.keeping import keep, key_of, reopened
from dovetail.frontends.optimizers import Optimizer, format_optimizer
from dovetail.frontends.program import Captured, PlainStep, Ref
from dovetail.frontends.structures import substitute
from dovetail.frontends.transformers_configs import (
    PREFIX,
    TransformersModel,
    load_transformers,
    own_loss,
)
from dovetail.networks import NETWORKS, Network, Option
from dovetail.networks.records import Examples, load_sizes
from dovetail.runtime.files import check_archive
from dovetail.runtime.functions import call_function, names_function, refused
from dovetail.runtime.torch_versions import dynamo_later, new_fake_mode, open_archive, pytree
from dovetail.training import TrainRequest, is_keras

# Exported programs: FILE.pt2, which `torch.export.save` wrote -> its module and example inputs.
#
# `torch.export.load` by itself may run code that a file brings along: it unpickles example inputs
# and some weights without limits where the safe reader fails, evaluates expressions of dynamic
# shapes and guards, calls any function below `torch` that a node names, imports modules that a
# structure names, and loads compiled libraries. So the archive is first read with torch's own
# reader, and refused by name where it holds any of these. Plain tensors and calls of torch's
# operators pass.


PLAIN_FILES = (
    "archive_format",
    "archive_version",
    "byteorder",
    ".data/",
    "version",
    "extra/",
    "data/weights/weight_",
    "data/constants/tensor_",
)
"""Files of the archive whose names begin so hold raw bytes or text."""
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
PROGRAM, EXAMPLES = "models/model.json", "data/sample_inputs/model.pt"
OPERATORS = re.compile(
    r"torch\.ops\.(aten|prims|torchvision)\.(?!__|(?:from_file|save)\.)\w+\.(?!__)\w+"
    r"|torch\.ops\.aten\.__i?(and|or|xor|lshift|rshift)__\.\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|mod|neg)"
)
"""The operators that a node may call. `torch.ops.load_library`, for one, is none, and those of aten
that open files are left out."""
STRUCTURES = ("in_spec", "out_spec")
IMPORTING = ("__enum__", "default_factory_module")
"""Under these keys a structure names a module, which would be imported when it is loaded."""


def load_exported(path: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return (module, args, kwargs) of an exported program; the arguments are its example inputs.

    The module is in the mode, training or evaluation, that it was exported in. Raises
    `FileFormatError` for a file that is no such archive, for one without example inputs, and for
    what could run code.
    """

    if not os.path.isfile(path):
        raise FileFormatError(path, "there is no such file")
    check_archive(path)
    log, logged = logging.getLogger("torch.export"), []

    def take(record: logging.LogRecord) -> bool:
        """Keep what torch logs with its traceback, instead of showing it."""
        logged.extend([record.exc_info[1]] if record.exc_info else [])
        return False

    log.addFilter(take)
    try:
        with open_archive(path) as archive:
            _check(path, archive)
        exported = torch.export.load(path)
        module = exported.module()
    except FileFormatError:
        raise
    except Exception as error:  # torch raises all kinds for a damaged file or another version's
        # The error that torch raises in the end may only point to what it has logged.
        line = " ".join(str(next(iter(logged), error)).split())[:200]
        raise FileFormatError(
            path, f"torch.export cannot load it ({line}); export it again with this torch"
        ) from error
    finally:
        log.removeFilter(take)
    if exported.example_inputs is None:
        raise FileFormatError(path, "it has no example inputs; export it with them")
    args, kwargs = exported.example_inputs
    return module, tuple(args), dict(kwargs)


def _check(path: str, archive: Any) -> None:
    """Raise `FileFormatError` for anything in the archive that could run code when it is loaded or
    called."""
    names = archive.get_file_names()
    if PROGRAM not in names or EXAMPLES not in names:
        raise FileFormatError(path, "it is not what torch.export.save writes; export it again")
    for name in names:
        if name in CONFIGS:
            for tensor, payload in json.loads(archive.read_string(name))["config"].items():
                if payload.get("use_pickle"):
                    raise FileFormatError(
                        path, f"{tensor!r} in {name!r} is pickled and is not opened; {_BY_HAND}"
                    )
        elif name == EXAMPLES:
            content = archive.read_bytes(name)
            check_archive(path, content)
            try:
                torch.load(io.BytesIO(content), weights_only=True)
            except Exception as error:
                raise FileFormatError(
                    path,
                    "its example inputs are more than plain tensors and are not opened; "
                    f"{_BY_HAND}",
                ) from error
        elif name == PROGRAM:
            # All that loading would evaluate, call or import beyond torch's operators.
            for key, value in _entries(json.loads(archive.read_string(name))):
                if key == "expr_str":
                    problem = f"it has dynamic shapes ({value}); export it without dynamic_shapes"
                elif key == "guards_code" and value:
                    problem = f"it has guards, which would be evaluated; {_BY_HAND}"
                # Under an argument that is called "target" stands an object, and under a node's a
                # text.
                elif (
                    key == "target"
                    and not isinstance(value, dict)
                    and not (isinstance(value, str) and OPERATORS.fullmatch(value))
                ):
                    problem = (
                        f"it calls {value!r}, which is no operator that may be called; {_BY_HAND}"
                    )
                elif key in STRUCTURES and isinstance(value, str) and _imports(value):
                    problem = f"its {key} names a module that would be imported; {_BY_HAND}"
                else:
                    continue
                raise FileFormatError(path, problem)
        elif not name.startswith(PLAIN_FILES):
            raise FileFormatError(
                path, f"it holds {name!r}, which could run code and is not opened; {_BY_HAND}"
            )


_BY_HAND = "if you trust it, load it yourself in a function MODULE:FUNCTION"


def _imports(structure: str) -> bool:
    """Return True if the serialised structure, or a context inside it, has a key that names a
    module. Contexts are JSON in strings, to any depth."""
    waiting = [structure]
    while waiting:
        try:
            parsed = json.loads(waiting.pop())
        except ValueError:  # a plain text, such as the name of a type or a key
            continue
        for key, value in _entries([parsed]):
            if key in IMPORTING:
                return True
            if isinstance(value, str):
                waiting.append(value)
    return False


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every entry of all objects inside; items of lists have the key ""."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting.extend(value.values())
        elif isinstance(value, list):
            yield from (("", item) for item in value)
            waiting.extend(value)


FORMS = (
    "a MODEL is zoo:NAME or zoo:NAME?option=value&option=value, transformers:NAME (a local "
    "config.json, a published model or a type such as bert), package.module:function, FILE.onnx, "
    "FILE.pt2, or a file (.json, .json.gz): a graph that `dovetail capture` saved, or a placement "
    "instance"
)


def resolve(model: str, *, train: Optimizer | None = None) -> Captured:
    """Capture what the MODEL text names. A zoo network and a model of transformers allocate no
    weights.

    Of a function that returns phases, "package.module:function?phase=NAME" names one of them.

    For a function the current folder is put in front of `sys.path`, where it is not in it.
    Raises `ModelError`, which names the text, or `CaptureError`.
    """
    function, _, phase = model.partition("?phase=")
    if model.startswith("zoo:"):
        captured = _resolve_zoo(model, train)
    elif model.startswith(PREFIX):
        captured = _resolve_transformers(model, train)
    elif model.endswith(".pt2"):
        module, args, kwargs = load_exported(model)
        captured = capture_call(module, args, kwargs, train=train)
    elif names_function(function):
        returned = call_function(function)
        if phase or isinstance(returned, Mapping):
            phases = returned if isinstance(returned, Mapping) else {}
            if phase not in phases:
                choices = " or ".join(f"{function}?phase={name}" for name in phases)
                raise ModelError(
                    model,
                    f"returns phases; name one, {choices}, or plan all with --phases"
                    if choices
                    else f"has no phases; name {function} itself",
                )
            returned = phases[phase]
        captured = _capture_returned(model, returned, train)
    else:
        raise ModelError(model or "''", FORMS)
    return replace(captured, source=replace(captured.source, model=model))


def resolve_phases(model: str) -> dict[str, Captured]:
    """Name -> phase of what the MODEL text names, all of one module: what a function returns as
    {name: (module, inputs)}, or prefill and decode of a causal language model of transformers.

    `resolve` opens each by the text in its `source`. Raises as `resolve` does, and `ModelError` for
    a MODEL without phases.
    """
    if model.startswith(PREFIX):
        texts = {
            p: f"{model}{'&' if '?' in model else '?'}phase={p}" for p in ("prefill", "decode")
        }
        phases = _generation(texts["prefill"], load_transformers(texts["prefill"]))
    elif names_function(model) and not model.startswith("zoo:"):
        returned = call_function(model)
        if not isinstance(returned, Mapping) or not returned:
            must = "has no phases; it must return {phase: (module, inputs), ...}"
            raise refused(model, returned, must)
        texts = {name: f"{model}?phase={name}" for name in returned}
        phases = {name: _capture_returned(texts[name], r, None) for name, r in returned.items()}
    else:
        raise ModelError(
            model,
            "has no phases; transformers:NAME of a causal language model has prefill and decode, "
            "and a function package.module:function may return {phase: (module, inputs), ...}",
        )
    return {
        name: replace(phase, source=replace(phase.source, model=texts[name]))
        for name, phase in phases.items()
    }


REPEATS = ("layers", "steps", "cells", "stacks", "nodes", "neighbours", "experts", "active")
"""Options of the zoo that say how often a network repeats some of its ops."""
MOST_REPEATS, MOST_SIZE = 2**14, 2**31 - 1
"""The most repetitions in all, the product of these options, and the largest of any whole number.
The papers' networks have at most 512 repetitions. 2**14 are some 10**5 ops."""


def parse_zoo(model: str) -> tuple[Network, dict[str, Option]]:
    """The network of "zoo:NAME?option=value" and the options given. Raises `UnknownNetworkError`,
    and `ModelError` for options that it does not have and for those out of bounds."""
    name, _, query = model.removeprefix("zoo:").partition("?")
    if name not in NETWORKS:
        raise UnknownNetworkError(name, tuple(NETWORKS))
    network = NETWORKS[name]
    options: dict[str, Option] = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        if key not in network.defaults:
            raise ModelError(
                model, f"{name} has no option {key!r}; it has {', '.join(network.defaults)}"
            )
        default = network.defaults[key]
        if isinstance(default, bool):
            if value.lower() not in ("true", "1", "false", "0"):
                raise ModelError(model, f"{key} is true or false, not {value!r}")
            options[key] = value.lower() in ("true", "1")
            continue
        try:
            parsed = type(default)(value)
        except ValueError:
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise ModelError(model, f"{key} is {kind}, not {value!r}") from None
        if parsed < 0 or (isinstance(default, int) and parsed < 1):
            raise ModelError(model, f"{key} is {value}, but must be positive")
        if isinstance(default, int) and parsed > MOST_SIZE:
            raise ModelError(model, f"{key} is larger than {MOST_SIZE}")
        options[key] = parsed
    full = network.defaults | options
    repeats = {key: int(full[key]) for key in REPEATS if key in full}
    if math.prod(repeats.values()) > MOST_REPEATS:
        product = " x ".join(repeats)
        raise ModelError(model, f"{product} is more than {MOST_REPEATS}: too many ops")
    return network, options


def network_rows() -> list[dict[str, object]]:
    """One row a built-in network: its sizes at its defaults, from the committed table, and its
    paper; a size that is not in the table is ""."""
    sizes = load_sizes()
    rows: list[dict[str, object]] = []
    for name, network in NETWORKS.items():
        size = sizes.get(name)
        rows.append(
            {
                "network": f"zoo:{name}",
                "parameters": size.parameters if size else "",
                "batch": network.defaults["batch"],
                "flops": size.flops if size else "",
                "ops": size.ops if size else "",
                "training_ops": size.training_ops if size else "",
                "paper": network.paper.partition(", https://")[0],
            }
        )
    return rows


def describe_network(name: str) -> tuple[list[tuple[str, object]], dict[str, Option]]:
    """(label, value) pairs about the network "NAME" or "zoo:NAME", labelled as the columns of
    `network_rows`, and its options' defaults. Raises `UnknownNetworkError`, or `ModelError` for
    a name with options, whose sizes are not in the table."""
    network, options = parse_zoo(name)
    if options:
        raise ModelError(name, "sizes are known at the defaults; `dovetail capture` finds others")
    row = next(row for row in network_rows() if row["network"] == f"zoo:{network.name}")
    facts = row | {"description": network.description, "paper": network.paper}
    del facts["batch"]  # an option
    if sizes := load_sizes().get(network.name):
        facts["parameter_bytes"] = sizes.parameter_bytes
    return list(facts.items()), network.defaults


Made = TypeVar("Made")


def _resolve_zoo(model: str, train: Optimizer | None) -> Captured:
    """Capture a network of the zoo, of which nothing is built where it was captured before."""
    network, options = parse_zoo(model)
    full = network.defaults | options
    mode = cache(new_fake_mode)

    def in_fakes(function: Callable[[], Made]) -> Made:
        try:
            with dynamo_later(), mode():
                return function()
        except (RuntimeError, ValueError, ArithmeticError) as error:
            raise ModelError(model, f"cannot be built: {error}") from error

    def make() -> nn.Module:
        return network.modules(**full).train(train is not None)

    def examples() -> Examples:
        return network.examples(**full)

    fakes = cache(partial(in_fakes, make))
    key, plain = key_of(model, train and format_optimizer(train)), PlainStep(network.loss, train)
    captured = reopened(key, fakes, plain, make, examples)
    if captured is None:
        inputs, targets = in_fakes(examples)
        captured = capture(fakes(), *inputs, targets=targets, loss=network.loss, train=train)
        captured = replace(captured, module_of=fakes, make=make, examples=examples)
        captured = keep(captured, key)
    return captured


def _resolve_transformers(model: str, train: Optimizer | None) -> Captured:
    network = load_transformers(model)
    training = train is not None
    if network.phase:
        if training:
            raise ModelError(
                model, f"{network.phase} is a phase of inference; leave one of them out"
            )
        return _generation(model, network)[network.phase]

    def make() -> nn.Module:
        return network.make().train(training)

    def examples() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        inputs = pytree.tree_leaves(network.draw(training))
        return tuple(value for value in inputs if isinstance(value, Tensor)), ()

    module, inputs = _on_meta(model, make, lambda: network.draw(training))
    captured = capture_call(module, (), inputs, loss=own_loss if training else None, train=train)
    return replace(captured, make=make, examples=examples)


def _generation(model: str, network: TransformersModel) -> dict[str, Captured]:
    """Return the two phases of generation: prefill reads a prompt and returns its cache, decode
    reads one token and that cache."""

    def make() -> nn.Module:
        return network.make().eval()

    module, prompt = _on_meta(model, make, lambda: network.draw(False))
    prefill = capture_call(module, (), {**prompt, "use_cache": True})
    returned = prefill.program.outputs
    cache = returned.get("past_key_values") if isinstance(returned, Mapping) else None
    if cache is None:
        raise ModelError(model, "returns no past_key_values with use_cache: nothing to decode with")
    graph = prefill.graph

    def empty(ref: Ref) -> Tensor:
        dtype = getattr(torch, graph.dtypes[ref.tensor])
        shape, strides = graph.shapes[ref.tensor], graph.strides[ref.tensor]
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    token = {"input_ids": prompt["input_ids"][:, -1:], "use_cache": True}
    decode = capture_call(module, (), {**token, "past_key_values": substitute(cache, Ref, empty)})

    def of_prompt() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (network.draw(False)["input_ids"],), ()

    def of_token() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        drawn = [
            torch.randn(value.shape, dtype=value.dtype)
            if value.is_floating_point()
            else torch.zeros(value.shape, dtype=value.dtype)
            for value in decode.inputs
        ]
        return tuple(drawn), ()

    return {
        "prefill": replace(prefill, make=make, examples=of_prompt),
        "decode": replace(decode, make=make, examples=of_token),
    }


def _on_meta(
    model: str, make: Callable[[], nn.Module], draw: Callable[[], dict[str, Any]]
) -> tuple[nn.Module, dict[str, Any]]:
    """The module and its inputs on the meta device. Raises `ModelError`."""
    try:
        with torch.device("meta"):
            return make(), draw()
    except (RuntimeError, ValueError, ArithmeticError, KeyError, TypeError) as error:
        line = " ".join(str(error).split())
        raise ModelError(model, f"cannot be built: {line}") from error


def _capture_returned(model: str, returned: Any, train: Optimizer | None) -> Captured:
    """Capture the module that a function returned: with inputs, or as `dovetail train` takes it."""
    parts: tuple[Any, ...] = returned if isinstance(returned, tuple) else ()
    module: Any = None
    loss: Any = None
    if 2 <= len(parts) <= 5:
        # For `dovetail train` they are (model, loss, optimizer, dataset[, validation]) or (Trainer,
        # dataset[, validation]). The second entry tells these apart from what a plan takes: a loss
        # is callable, and inputs are not. Imported here, because most plans are of no such
        # function.
        from dovetail.training import Trainer

        collate: Any = None
        batch = TrainRequest.batch
        if isinstance(parts[0], Trainer):
            request, dataset = parts[0].request, parts[1]
            module, loss = request.model, request.loss
            collate, batch = request.collate, request.batch
        elif len(parts) >= 4 and callable(parts[1]):
            module, loss, _, dataset = parts[:4]
        if isinstance(module, nn.Module) or is_keras(module):
            from dovetail.training import batches_of, open_dataset, split_batch

            first = next(batches_of(open_dataset(dataset, collate), batch, 1), None)
            if first is None:
                raise UsageError("dataset", "is empty")
            args, kwargs, targets = split_batch(first[0])
            if train is None:  # targets count where there is a loss
                return capture_call(module, args, kwargs)
            return capture_call(module, args, kwargs, targets=targets, loss=loss, train=train)
    if not 2 <= len(parts) <= 4 or not (isinstance(parts[0], nn.Module) or is_keras(parts[0])):
        must = (
            "must return (module, inputs), (module, inputs, loss) or with targets after that, or "
            "what `dovetail train` takes"
        )
        raise refused(model, returned, must)
    module, inputs = parts[:2]
    loss = parts[2] if len(parts) > 2 else None
    targets = parts[3] if len(parts) > 3 else ()
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return capture_call(module, args, kwargs, targets=targets, loss=loss, train=train)
