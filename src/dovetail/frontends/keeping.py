"""Keeps captured steps in the cache as data, so that nothing is captured twice.

    CACHE/captures/KEY.json.gz    graph, calls, sources and signature of a step, and no weights

A step is kept if everything that its capture follows from is known. `key_of` makes the key of that,
with the text of all of our own code. Networks of the zoo are such steps, as their code is ours. A
step of a user's code has no such key, and is captured each time. A record holds names of calls and
JSON arguments, no pickles. A step with other arguments is not kept, and a record that is damaged,
or that another user can write, counts as missing.
"""

import gzip
import hashlib
import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import DovetailError
from dovetail.frontends.program import (
    Call,
    Captured,
    PlainStep,
    Program,
    Ref,
    Signature,
    SourceValue,
    dtype_of,
)
from dovetail.frontends.structures import TensorSlot
from dovetail.graph.files import graph_from, graph_to_dict
from dovetail.graph.source import Source
from dovetail.runtime.files import cache_folder, is_own, read_json, write_atomically
from dovetail.runtime.torch_versions import OpOverload

_OURS = "dovetail.frontends."
_OF_DAMAGE = (
    OSError, DovetailError, LookupError, TypeError, ValueError, AttributeError, ImportError,
    RuntimeError,
)  # fmt: skip
_OF_CALL = ("results", "random", "in_place", "draws_of")
_OF_SIGNATURE = ("positional", "names", "target_names", "parts")
_OF_PLAIN = ("training", "gradients", "differentiates")


def key_of(*parts: Any) -> str:
    """The key of a step that our code captures of these parts, in torch's modes of now; "" if our
    modules may be of another text than their files have."""
    code = _code()
    if not code:
        return ""
    cuda: Any = torch.backends.cuda
    key = json.dumps([
        code, torch.__version__, platform.python_version(),
        torch.backends.cpu.get_cpu_capability(), torch.backends.mkldnn.enabled,
        cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(), str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.is_autocast_enabled("cpu") and str(torch.get_autocast_dtype("cpu")), parts,
    ])  # fmt: skip
    return hashlib.sha256(key.encode()).hexdigest()[:32]


_BEFORE = time.time() - 60.0
"""A file that is older than this was the same when the first of our modules was imported. Importing
all of them takes a few seconds, and 60 leaves room for a slow disk."""


@cache
def _code() -> str:
    """The digest of the text of our own modules; "" if there is none, or one may have changed since
    this process imported it."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    paths = sorted(root.rglob("*.py"))
    for path in paths:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    is_certain = paths and max(path.stat().st_mtime for path in paths) < _BEFORE
    return digest.hexdigest() if is_certain else ""


def _path(key: str) -> Path:
    return cache_folder() / "captures" / f"{key}.json.gz"


def keep(step: Captured, key: str) -> Captured:
    """Keep the step, if it can be written as data. A disk that is full or cannot be written is no
    reason to lose it. Return it, `kept_under` the key if it was kept."""
    program, signature, plain = step.program, step.signature, step.plain
    example_devices = {value.device.type for value in (*signature.inputs, *signature.targets)}
    has_constants = any(source and source.value is not None for source in program.sources)
    if not key or plain is None or has_constants or not example_devices <= {"cpu", "meta"}:
        return step
    try:
        record = {
            "graph": graph_to_dict(step.graph),
            "calls": [call and _listed(call) for call in program.calls],
            "sources": [
                source and (source.role, source.name, source.fill) for source in program.sources
            ],
            "loss": program.loss,
            "outputs": _to_json(program.outputs),
            "aliases": program.aliases,
            "source": asdict(step.source),
            "signature": {
                "arguments": _to_json(signature.arguments),
                "target_structure": _to_json(signature.target_structure),
                "inputs": [laid(value) for value in signature.inputs],
                "targets": [laid(value) for value in signature.targets],
                **{name: getattr(signature, name) for name in _OF_SIGNATURE},
            },
            "plain": {name: getattr(plain, name) for name in _OF_PLAIN},
            "autocast": _to_json(plain.autocast),
            "notes": step.notes,
            "fused_steps": step.fused_steps,
        }
    except _UnsaidError:
        return step
    path = _path(key)
    with suppress(DovetailError, OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = json.dumps(record, separators=(",", ":")).encode()
        write_atomically(path, gzip.compress(data, 1, mtime=0))
        path.chmod(0o600)
        return replace(step, kept_under=key)
    return step


def reopened(
    key: str,
    module_of: Callable[[], nn.Module],
    plain: PlainStep,
    make: Callable[[], nn.Module] | None,
    examples: Callable[[], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] | None,
) -> Captured | None:
    """The step that is kept under the key; None if there is none that can be used.

    module_of         builds its module, of fakes
    plain             has its loss and its optimizer
    make, examples    as in `Captured`
    """
    path = _path(key)
    if not key or not is_own(path):
        return None
    # A file of another form is captured anew.
    with suppress(*_OF_DAMAGE):
        record: Any = read_json(path)
        signature, source = record["signature"], record["source"]
        calls = (call and _call(*call) for call in record["calls"])
        sources = (each and SourceValue(*each) for each in record["sources"])
        return Captured(
            graph_from(record["graph"], str(path)),
            Program(
                tuple(calls), tuple(sources), record["loss"], _from_json(record["outputs"]),
                record["aliases"],
            ),
            Source(**{name: _tuples(value) for name, value in source.items()}),
            module_of,
            Signature(
                arguments=_from_json(signature["arguments"]),
                target_structure=_from_json(signature["target_structure"]),
                inputs=tuple(_meta(*value) for value in signature["inputs"]),
                targets=tuple(_meta(*value) for value in signature["targets"]),
                **{name: _tuples(signature[name]) for name in _OF_SIGNATURE},
            ),
            make,
            examples,
            notes=tuple(record["notes"]),
            plain=replace(
                plain,
                autocast=_from_json(record["autocast"]),
                **{name: _tuples(value) for name, value in record["plain"].items()},
            ),
            fused_steps=record["fused_steps"],
            kept_under=key,
        )  # fmt: skip
    return None


class _UnsaidError(Exception):
    """A value that has no form as data."""


def _listed(call: Call) -> list[Any]:
    if isinstance(call.target, OpOverload):
        target = str(call.target)
    else:
        module, name = call.target.__module__, getattr(call.target, "__qualname__", "")
        target = f"{module}:{name}"
        if not module.startswith(_OURS) or _target(target) is not call.target:
            raise _UnsaidError
    rest = [getattr(call, name) for name in _OF_CALL]
    return [target, _to_json(call.args), _to_json(call.kwargs), *rest]


def _call(target: str, args: Any, kwargs: Any, results: list[int], *rest: Any) -> Call:
    return Call(_target(target), _from_json(args), _from_json(kwargs), tuple(results), *rest)


@cache
def _target(name: str) -> Any:
    """The operator of this name, or the function of ours."""
    module, is_ours, function = name.partition(":")
    if is_ours and module.startswith(_OURS):
        return getattr(import_module(module), function)
    return attrgetter(name)(torch.ops)


def laid(value: Tensor) -> list[Any]:
    """Shape, strides, dtype and need of gradients of a tensor, as JSON."""
    return [list(value.shape), list(value.stride()), dtype_of(value), value.requires_grad]


def _meta(shape: list[int], strides: list[int], dtype: str, needs_gradient: bool) -> Tensor:
    # A fake tensor would need imports that take longer than all of the rest.
    value = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
    return value.requires_grad_(needs_gradient)


_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = (torch.dtype, torch.memory_format, torch.layout)


def _to_json(value: Any) -> Any:
    """Arguments and structures as JSON, in which an object of one key stands for what JSON has no
    form for. Raises `_UnsaidError`."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_to_json(each) for each in value]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_to_json(each) for each in value]}
    if type(value) is dict and all(type(name) is str for name in value):
        return {"dict": {name: _to_json(each) for name, each in value.items()}}
    if isinstance(value, Ref):
        return {"tensor": value.tensor}
    if isinstance(value, TensorSlot):
        return {"slot": value.index}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise _UnsaidError


_MADE: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda held: tuple(map(_from_json, held)),
    "dict": lambda held: {name: _from_json(value) for name, value in held.items()},
    "tensor": Ref,
    "slot": TensorSlot,
    "torch": lambda name: getattr(torch, name),
    "device": torch.device,
}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if isinstance(value, dict):
        ((kind, held),) = value.items()
        return _MADE[kind](held)
    return value


def _tuples(value: Any) -> Any:
    """The value with its lists as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
