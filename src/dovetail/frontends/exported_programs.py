"""FILE.pt2, which `torch.export.save` wrote -> its module and example inputs.

`torch.export.load` by itself may run code that a file brings along: it unpickles example inputs and
some weights without limits where the safe reader fails, evaluates expressions of dynamic shapes and
guards, calls any function below `torch` that a node names, imports modules that a structure names,
and loads compiled libraries. So the archive is first read with torch's own reader, and refused by
name where it holds any of these. What passes are plain tensors and calls of torch's operators.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dovetail.errors import FileFormatError

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
"""Beginnings of names in the archive whose content is raw bytes or text."""
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
PROGRAM, EXAMPLES = "models/model.json", "data/sample_inputs/model.pt"
OPERATORS = re.compile(
    r"torch\.ops\.(aten|prims|torchvision)\.(?!__)\w+\.(?!__)\w+"
    r"|torch\.ops\.aten\.__i?(and|or|xor|lshift|rshift)__\.\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|mod|neg)"
)
"""What a node may call. Not all below `torch.ops` is one: `torch.ops.load_library` is not."""
STRUCTURES = ("in_spec", "out_spec")
IMPORTING = ("__enum__", "default_factory_module")
"""Keys of a structure by which a module is named that would be imported."""


def load_exported(path: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """(module, args, kwargs) of the exported program; the example inputs it was exported with.

    The module is in the mode, training or evaluation, that it was exported in. Raises
    `FileFormatError` for a file that is no such archive, for one without example inputs, and for
    what could run code.
    """
    from torch.export.pt2_archive._package import PT2ArchiveReader

    if not Path(path).is_file():
        raise FileFormatError(path, "there is no such file")
    try:
        with PT2ArchiveReader(path) as archive:
            _check(path, archive)
        exported = torch.export.load(path)
        module = exported.module()
    except FileFormatError:
        raise
    except Exception as error:  # torch raises all kinds for a damaged file or another version's
        line = " ".join(str(error).split())[:200]
        raise FileFormatError(
            path, f"torch.export cannot load it ({line}); export it again with this torch"
        ) from error
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
            _check_payloads(path, name, json.loads(archive.read_string(name)))
        elif name == EXAMPLES:
            _check_examples(path, archive.read_bytes(name))
        elif name == PROGRAM:
            for problem in _problems(json.loads(archive.read_string(name))):
                raise FileFormatError(path, problem)
        elif not name.startswith(PLAIN_FILES):
            raise FileFormatError(
                path, f"it holds {name!r}, which could run code and is not opened; {_BY_HAND}"
            )


_BY_HAND = "if you trust it, load it yourself in a function MODULE:FUNCTION"


def _check_payloads(path: str, name: str, config: Any) -> None:
    for tensor, payload in config["config"].items():
        if payload.get("use_pickle"):
            raise FileFormatError(
                path, f"{tensor!r} in {name!r} is pickled and is not opened; {_BY_HAND}"
            )


def _check_examples(path: str, content: bytes) -> None:
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise FileFormatError(
            path, f"its example inputs are more than plain tensors and are not opened; {_BY_HAND}"
        ) from error


def _problems(program: Any) -> Iterator[str]:
    """What in a serialised program is evaluated, called or imported beyond torch's operators."""
    for key, value in _entries(program):
        if key == "expr_str":
            yield f"it has dynamic shapes ({value}); export it without dynamic_shapes"
        elif key == "guards_code" and value:
            yield f"it has guards, which would be evaluated; {_BY_HAND}"
        # Under an argument that is called "target" stands an object, and under a node's a text.
        elif (
            key == "target"
            and not isinstance(value, dict)
            and not (isinstance(value, str) and OPERATORS.fullmatch(value))
        ):
            yield f"it calls {value!r}, which is no operator of torch; {_BY_HAND}"
        elif key in STRUCTURES and isinstance(value, str) and _imports(value):
            yield f"its {key} names a module that would be imported; {_BY_HAND}"


def _imports(structure: str) -> bool:
    """Has the serialised structure, or a context within it, a key that names a module? Contexts are
    JSON in strings, to any depth."""
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
    """(key, value) of every entry of all objects within; items of lists have the key ""."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting.extend(value.values())
        elif isinstance(value, list):
            yield from (("", item) for item in value)
            waiting.extend(value)
