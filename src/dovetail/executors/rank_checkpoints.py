"""Checkpoints of a run on several hosts: each rank writes what lives on its devices, by name.

    FOLDER/step-40/model-00001-of-00002.safetensors      of rank 0
                   model-00002-of-00002.safetensors      of rank 1
                   model.safetensors.index.json          which file has which tensor; written last
           latest                                        the name of the step's folder

The files are those of a sharded model on Hugging Face, so other tools read them, also
`torch.distributed.checkpoint` by its `HuggingFaceStorageReader`. Tensors are whole and are found by
name. So a plan with other devices, or on other ranks, goes on from them. They are not written by
`torch.distributed.checkpoint`, whose ranks send each other pickles, and whose own format has one.

All ranks need to see the folder, as on a shared disk.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dovetail.errors import FileFormatError, UnwritableError
from dovetail.runtime.files import read_json, write_atomically

INDEX, LATEST = "model.safetensors.index.json", "latest"
_STEP = re.compile("step-([0-9]{1,18})")
KEPT = 2
"""So many of the last checkpoints stay in the folder."""


def file_of(rank: int, ranks: int) -> str:
    """The name of a rank's file."""
    return f"model-{rank + 1:05}-of-{ranks:05}.safetensors"


def save_part(folder: Path, step: int, file: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a rank's tensors. Raises `UnwritableError`."""
    where = folder / f"step-{step}"
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableError(str(where), error.strerror or str(error)) from error
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    write_atomically(where / file, save(whole, {"format": "pt"}))


def save_index(folder: Path, step: int, files: Mapping[str, Iterable[str]]) -> None:
    """Finish a checkpoint of which all parts are written, and remove older ones.

    files   file -> the names in it
    """
    where = folder / f"step-{step}"
    weights = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"dovetail_step": step}, "weight_map": dict(sorted(weights.items()))}
    write_atomically(where / INDEX, json.dumps(index, indent=1))
    write_atomically(folder / LATEST, where.name)
    steps = sorted(
        int(found[1]) for path in folder.iterdir() if (found := _STEP.fullmatch(path.name))
    )
    for old in [number for number in steps if number < step][: -(KEPT - 1) or None]:
        with suppress(OSError):
            shutil.rmtree(folder / f"step-{old}")


def latest_in(folder: Path) -> Path:
    """The folder of the last whole checkpoint. Raises `FileFormatError` where there is none."""
    try:
        name = (folder / LATEST).read_text()[:100]
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise FileFormatError(str(folder / LATEST), f"no checkpoint there: {said}") from None
    if not _STEP.fullmatch(name):
        raise FileFormatError(str(folder / LATEST), f"{name!r} names no checkpoint")
    return folder / name


def load_tensors(where: Path, into: Mapping[str, Tensor]) -> int:
    """Copy the tensors of these names out of a checkpoint; return its step.

    Raises `FileFormatError` for a checkpoint without one of them, or where one does not fit. What
    was copied until then stays.
    """
    index: Any = read_json(where / INDEX)
    try:
        step, weights = int(index["metadata"]["dovetail_step"]), dict(index["weight_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(str(where / INDEX), f"not an index: {error!r}") from None
    by_file: dict[str, list[str]] = {}
    for name in into:
        file = weights.get(name)
        if not isinstance(file, str) or not re.fullmatch(r"[\w-]+\.safetensors", file):
            raise FileFormatError(str(where / INDEX), f"it has no file for {name!r}")
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(where / file, framework="pt") as part:
                for name in names:
                    _copy(where / file, name, part.get_tensor(name), into[name])
        except (SafetensorError, OSError) as error:
            raise FileFormatError(str(where / file), str(error)) from None
    return step


def _copy(path: Path, name: str, value: Tensor, target: Tensor) -> None:
    if value.shape != target.shape or value.dtype != target.dtype:
        has = f"{value.dtype} of shape {tuple(value.shape)}"
        wants = f"{target.dtype} of shape {tuple(target.shape)}"
        raise FileFormatError(str(path), f"{name!r} is {has}, but the plan's is {wants}")
    target.copy_(value)
