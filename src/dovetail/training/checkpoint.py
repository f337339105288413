"""Reads and writes the folder of a run: what the trainer keeps there beside the server's state.

trainer.json       the facts that identify the run; a run that resumes it must have the same
evaluations.json   every evaluation so far, and the index of the best
best.npy           the center at the best evaluation
center/            the server's snapshot and log
"""

import io
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from dovetail.errors import FileFormatError, RunMismatchError, UnwritableError, UsageError
from dovetail.runtime.files import read_json, refuse_links, write_atomically
from dovetail.runtime.formats import STRICT, Whole, file_type, first_complaint
from dovetail.training.records import CHANGING, Evaluation, Vector

FORMAT = "dovetail training run 1"
_HEADER_BYTES = 128
"""numpy writes so many bytes before a vector, whatever its length."""
_FACTS, _EVALUATIONS, _BEST, _CENTER = "trainer.json", "evaluations.json", "best.npy", "center"


class RunFolder:
    """The folder of one run. `run` is the random name that commits carry."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run

    @property
    def center(self) -> Path:
        """The folder of the server's snapshot and log."""
        return self.path / _CENTER

    def save(self, evaluations: list[Evaluation], best: int | None, theta: Vector | None) -> None:
        """Saves the evaluations and the index of the best. `theta` [size] is the center of the best
        one; None keeps the file as it is."""
        # The center is written first, so that the index never names a center that is not there.
        if theta is not None:
            content = io.BytesIO()
            np.save(content, theta, allow_pickle=False)
            write_atomically(self.path / _BEST, content.getvalue())
        record = {"best": best, "evaluations": [asdict(e) for e in evaluations]}
        write_atomically(self.path / _EVALUATIONS, json.dumps(record))

    def load(self) -> tuple[list[Evaluation], int | None, Vector | None]:
        """Returns what `save` was given last, or ([], None, None) if it was never called. Raises
        `FileFormatError`."""
        path = self.path / _EVALUATIONS
        if not path.exists():
            return [], None, None
        try:
            saved = _Evaluations.model_validate(_read_object(path))
        except ValidationError as error:
            raise FileFormatError(str(path), first_complaint(error)) from None
        best = saved.best
        if best is not None and best >= len(saved.evaluations):
            detail = f"the best is number {best} of {len(saved.evaluations)}"
            raise FileFormatError(str(path), detail)
        theta = None if best is None else _read_vector(self.path / _BEST)
        return saved.evaluations, best, theta


class _Evaluations(BaseModel):
    model_config = STRICT
    best: Annotated[Whole, Field(ge=0)] | None
    evaluations: list[file_type(Evaluation)]  # type: ignore[valid-type]


def open_folder(
    folder: str | os.PathLike[str], facts: Mapping[str, Any], resume: bool, more: Iterable[str] = ()
) -> RunFolder:
    """Starts a run in the folder, or opens the run that is there to resume it.

    facts   what identifies the run, as values that JSON can hold. Of a run to resume, the fields
            `CHANGING` may differ; the server checks by how much
    more    names of what else the run keeps there

    Raises `UsageError` if the folder holds a run, or other files of their names, and `resume` is
    false, or holds none and it is true. Raises `RunMismatchError` if the facts of the run to resume
    differ, and `FileFormatError` for a link among its files.
    """
    check_held(folder, resume)
    path = Path(folder)
    for name in (_FACTS, _EVALUATIONS, _BEST, _CENTER, *more):
        refuse_links(path / name)
        if not resume and (path / name).exists():
            says = f"{path / name} is there, and of no run; move it, or give another folder"
            raise UsageError("folder", says)
    held = path / _FACTS
    if not resume:
        started = RunFolder(path, uuid.uuid4().hex)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnwritableError(str(path), error.strerror or str(error)) from error
        text = json.dumps({"format": FORMAT, "run": started.run, **facts}, indent=2)
        write_atomically(held, text)
        return started
    stored = _read_object(held)
    run = stored.get("run")
    if stored.get("format") != FORMAT or not isinstance(run, str) or not run.isascii():
        raise FileFormatError(str(held), f"it is no {FORMAT}")
    # The facts go through JSON once, so that tuples compare equal to the lists in the file.
    for field, expected in json.loads(json.dumps(dict(facts))).items():
        if stored.get(field) != expected and field not in CHANGING:
            raise RunMismatchError(str(path), field, expected, stored.get(field))
    return RunFolder(path, run)


def check_held(folder: str | os.PathLike[str], resume: bool) -> None:
    """Raises `UsageError` if the folder holds a run and `resume` is false, or holds none and it is
    true."""
    path = Path(folder)
    held = (path / _FACTS).exists()
    if held and not resume:
        raise UsageError("folder", f"{path} holds a run; resume it, or give another folder")
    if resume and not held:
        raise UsageError("resume", f"{path} holds no run")


def _read_vector(path: Path) -> Vector:
    """The vector [size] of a file that `save` wrote. Raises `FileFormatError`.

    Only the bytes that numpy writes before such a vector are taken. numpy's own reader would parse
    any header, as Python, and make room for any shape that it names.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileFormatError(str(path), error.strerror or str(error)) from error
    for kind in (np.float32, np.float64):
        width = np.dtype(kind).itemsize
        size = max(len(data) - _HEADER_BYTES, 0) // width
        facts = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": (size,)}
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, facts)
        if data.startswith(head.getvalue()) and len(data) == _HEADER_BYTES + size * width:
            return np.frombuffer(data, kind, offset=_HEADER_BYTES).copy()  # type: ignore[return-value]
    raise FileFormatError(str(path), "it is no vector of a run: changed, or cut off")


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise FileFormatError(str(path), "it is not a JSON object")
    return content
