"""Checkpoints of a run on several hosts: each rank writes what lives on its devices, by name.

    FOLDER/step-40/model-00001-of-00002.safetensors      of rank 0
                   model-00002-of-00002.safetensors      of rank 1
                   model.safetensors.index.json          which file has which tensor; written last
           latest                                        the name of the step's folder

The files are those of a sharded model on Hugging Face, so other tools read them, also
`torch.distributed.checkpoint` by its `HuggingFaceStorageReader`. Tensors are whole and are found by
name. So a plan with other devices, or on other ranks, goes on from them. They are not written by
`torch.distributed.checkpoint`, whose ranks send each other pickles, and whose own format has one.

All ranks need to see the folder, as on a shared disk. Each index has the mark of its run, and each
file of a rank its step. A run begins in no folder where a `step-N` is not its own (see
`check_own`), and removes only what has its mark.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dovetail.errors import FileFormatError, UnwritableError, UsageError
from dovetail.runtime.files import read_json, refuse_links, write_atomically
from dovetail.runtime.ranks import Ranks

INDEX, LATEST = "model.safetensors.index.json", "latest"
_STEP = re.compile("step-(0|[1-9][0-9]{0,17})")
_STEP_KEY, _RUN_KEY = "dovetail_step", "dovetail_run"
_PART = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
_TEMPORARY = re.compile(rf"\.({_PART.pattern}|{re.escape(INDEX)})\.[a-z0-9_]{{8}}")
"""The names of files that `write_atomically` leaves behind when it is killed."""
KEPT = 2
"""The number of last checkpoints that stay in the folder."""


def file_of(rank: int, ranks: int) -> str:
    """The name of a rank's file."""
    return f"model-{rank + 1:05}-of-{ranks:05}.safetensors"


@dataclass(frozen=True)
class Index:
    """What the index of a checkpoint says.

    run      the mark of the run that wrote it; "" of one that had none
    weights  name of a tensor -> its file
    """

    step: int
    run: str
    weights: Mapping[str, Any]


def read_index(where: Path) -> Index:
    """The index of a checkpoint in the folder `where`. Raises `FileFormatError`."""
    index: Any = read_json(where / INDEX)
    try:
        facts, weights = index["metadata"], dict(index["weight_map"])
        step, run = facts[_STEP_KEY], facts.get(_RUN_KEY, "")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(str(where / INDEX), f"not an index: {error!r}") from None
    if type(step) is not int or not 0 <= step < 10**18:
        raise FileFormatError(str(where / INDEX), f"its {_STEP_KEY} is no number of a step")
    return Index(step, str(run), weights)


def check_own(folder: Path, run: str | None, option: str = "--checkpoint") -> None:
    """Refuse a folder in which another than this run has checkpoints, or somebody something else
    that has the name of one. Raises `UsageError`, and `FileFormatError` for a link among them.

    run      the mark of the run; None of a run that has no checkpoint yet
    option   what the user gave the folder by
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileFormatError(str(folder), error.strerror or str(error)) from None
    steps = [name for name in names if _STEP.fullmatch(name)]
    for name in (*steps, *({LATEST} & {*names})):
        path = folder / name
        refuse_links(path)
        where = latest_in(folder) if name == LATEST else path
        if name != LATEST and (strange := _strange_in(path)) is not None:
            detail = f"{strange} is no part of a checkpoint of ours; move it, or name a new folder"
            raise UsageError(option, detail)
        if run is None or ((where / INDEX).exists() and read_index(where).run != run):
            detail = f"{path} is another run's; go on from it with --resume, or name a new folder"
            raise UsageError(option, detail)


def _strange_in(where: Path) -> Path | None:
    """Return the first entry of a checkpoint's folder that is no part of the checkpoint, if any."""
    if not where.is_dir():
        return where
    step = int(where.name.removeprefix("step-"))
    try:
        paths = sorted(where.iterdir())
    except OSError:
        return where
    for path in paths:
        if not path.is_file():
            return path
        try:
            if path.name == INDEX:
                own = read_index(where).step == step
            elif _PART.fullmatch(path.name) and not (where / INDEX).exists():
                with safe_open(path, framework="pt") as part:
                    own = (part.metadata() or {}).get(_STEP_KEY) == str(step)
            else:
                own = bool(_PART.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name))
        except (FileFormatError, SafetensorError, OSError):
            own = False
        if not own:
            return path
    return None


def save_part(folder: Path, step: int, file: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a rank's tensors. Raises `UnwritableError`, and `FileFormatError` for a link."""
    where = folder / f"step-{step}"
    refuse_links(where)
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableError(str(where), error.strerror or str(error)) from error
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    write_atomically(where / file, save(whole, {"format": "pt", _STEP_KEY: str(step)}))


def save_index(folder: Path, step: int, files: Mapping[str, Iterable[str]], run: str = "") -> None:
    """Finish a checkpoint of which all parts are written, and remove older ones of this run.

    files   file -> the names in it
    run     the mark of the run
    """
    where = folder / f"step-{step}"
    weights = {name: file for file, names in files.items() for name in names}
    facts = {_STEP_KEY: step, _RUN_KEY: run}
    index = {"metadata": facts, "weight_map": dict(sorted(weights.items()))}
    for path in (where / INDEX, folder / LATEST):
        refuse_links(path)
    write_atomically(where / INDEX, json.dumps(index, indent=1))
    write_atomically(folder / LATEST, where.name)
    steps = sorted(
        int(found[1]) for path in folder.iterdir() if (found := _STEP.fullmatch(path.name))
    )
    own = [path for n in steps if n < step and _is_of(path := folder / f"step-{n}", run)]
    for old in own[: -(KEPT - 1) or None]:
        with suppress(OSError):
            # The mark goes last.
            for path in sorted(old.iterdir(), key=lambda path: path.name == INDEX):
                path.unlink()
            old.rmdir()


def _is_of(where: Path, run: str) -> bool:
    """Whether a folder holds a whole checkpoint of this run and nothing else."""
    try:
        refuse_links(where)
        return _strange_in(where) is None and read_index(where).run == run
    except FileFormatError:
        return False


def latest_in(folder: Path) -> Path:
    """The folder of the last whole checkpoint. Raises `FileFormatError` where there is none, and
    for a link in its place."""
    refuse_links(folder / LATEST)
    try:
        name = (folder / LATEST).read_text()[:100]
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise FileFormatError(str(folder / LATEST), f"no checkpoint there: {said}") from None
    if not _STEP.fullmatch(name):
        raise FileFormatError(str(folder / LATEST), f"{name!r} names no checkpoint")
    refuse_links(folder / name)
    return folder / name


def load_tensors(where: Path, into: Mapping[str, Tensor]) -> int:
    """Copy the tensors of these names out of a checkpoint; return its step.

    Raises `FileFormatError` for a checkpoint without one of them, or where one does not fit. What
    was copied until then stays.
    """
    index = read_index(where)
    by_file: dict[str, list[str]] = {}
    for name in into:
        file = index.weights.get(name)
        if not isinstance(file, str) or not re.fullmatch(r"[\w-]+\.safetensors", file):
            raise FileFormatError(str(where / INDEX), f"it has no file for {name!r}")
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(where / file, framework="pt") as part:
                for name in names:
                    value, target = part.get_tensor(name), into[name]
                    if value.shape != target.shape or value.dtype != target.dtype:
                        has = f"{value.dtype} of shape {tuple(value.shape)}"
                        wants = f"{target.dtype} of shape {tuple(target.shape)}"
                        says = f"{name!r} is {has}, but the plan's is {wants}"
                        raise FileFormatError(str(where / file), says)
                    target.copy_(value)
        except (SafetensorError, OSError) as error:
            raise FileFormatError(str(where / file), str(error)) from None
    return index.step


class RankCheckpoints:
    """The checkpoints of a run, which all its ranks write and read together."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._folder, self._every, self._run = Path(), 0, uuid4().hex

    def keep(self, folder: Path, every: int) -> None:
        """Keep those of each `every` steps in this folder from now on. Raises as `check_own`."""
        self._check(folder)
        self._folder, self._every = folder, every

    def due_after(self, step: int) -> Path | None:
        """The folder in which this step's state is to be kept, if it is."""
        return self._folder if self._every and step % self._every == 0 else None

    def save(self, folder: Path, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state after this step, of which this rank has these tensors. Raises
        `UnwritableError` on all ranks if one could not write, and as `check_own`."""
        if folder != self._folder:
            self._check(folder)
        file = file_of(self._ranks.rank, self._ranks.ranks)
        save_part(folder, step, file, tensors)
        told = self._ranks.gather("saved", {file: sorted(tensors)})
        if self._ranks.rank == 0:
            files = {file: names for part in told for file, names in part.items()}
            save_index(folder, step, files, self._run)
        # Nobody goes on, and perhaps dies, before the checkpoint is whole.
        self._ranks.gather("whole", step)

    def load(self, folder: Path, into: Mapping[str, Tensor]) -> int:
        """Copy the last state in this folder into these tensors, and go on with its run; return its
        step. Raises `FileFormatError`."""
        where = latest_in(folder)
        step = load_tensors(where, into)
        for rank, other in enumerate(self._ranks.gather("resumed", step)):
            if other != step:
                says = (
                    f"rank {rank} sees step {other} there, and rank {self._ranks.rank} step {step}"
                )
                raise FileFormatError(str(folder), f"{says}; all ranks must see one folder")
        self._run = read_index(where).run
        return step

    def _check(self, folder: Path) -> None:
        self._run = self._ranks.gather("run", self._run)[0]
        check_own(folder, self._run, "folder")
