"""Stores results on disk: one file each, written whole or not at all.

    OUT/rows/rnnlm-2gpu.plain.scotch.json    {"format": "dovetail.bench", "version": 1,
                                              "fingerprint": ..., "value": ...}

A file holds one value under one name. Whoever reads it says by `fingerprint` from which settings
the value must come. A value of other settings counts as absent and is written over.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dovetail
from dovetail.errors import FileFormatError, UnwritableError
from dovetail.runtime.files import read_json, refuse_links, write_atomically

FORMAT, VERSION = "dovetail.bench", 1
GRAPHS, PLANNED, LEARNED, SEARCHED, DRAWN, TOWERS, TRAINED, SCHEDULED = (
    "graphs", "planned", "learned", "searched", "drawn", "towers", "trained", "scheduled",
)  # fmt: skip
_SHARED = (
    "runtime",
    "graph",
    "transforms",
    "machine",
    "timeline.py",
    "plans",
    "costs",
    "simulator",
)
_NETWORKS = ("networks", "frontends", "reproductions/graphs.py")
_RESTS_ON: dict[str, tuple[str, ...]] = {
    GRAPHS: ("runtime", "graph", *_NETWORKS),
    PLANNED: (*_SHARED, *_NETWORKS, "methods.py", "placers", "reproductions"),
    TOWERS: (*_SHARED, *_NETWORKS, "training", "reproductions/towers.py"),
    LEARNED: (
        *_SHARED, "training", "placers/problem.py", "placers/budget.py", "placers/multilevel.py",
        "placers/etf.py", "placers/expert.py", "placers/list_scheduling.py", "placers/learned",
        "reproductions/learned.py", "reproductions/hypothesis.py",
    ),
    SEARCHED: (
        *_SHARED, "methods.py", "placers", "reproductions/methods.py", "reproductions/learned.py",
        "reproductions/hypothesis.py",
    ),
    DRAWN: (
        *_SHARED, "reports/pictures.py", "reports/charts.py", "reproductions/figures.py",
        "reproductions/hypothesis.py",
    ),
    TRAINED: ("runtime", "training", "reproductions/thesis.py"),
    SCHEDULED: (
        "runtime", "graph", "machine", "costs", "networks", "frontends", "schedulers",
        "executors/stages", "pipeline/scheduling.py", "reports/schedules.py",
        "reproductions/dos.py", "reproductions/elsewhere.py", "reproductions/additivity.py",
    ),
}  # fmt: skip
"""Maps each kind of result to the code that computes it. If that code changes, the result is
computed anew. What a result names by content, such as the graph of a row, is not."""
_NOT = {
    SEARCHED: ("placers/learned",),
    PLANNED: (
        "placers/learned", "reproductions/learned.py", "reproductions/page.py",
        "reproductions/tables.py", "reproductions/results.py", "reproductions/orderings.py",
        "reproductions/thesis.py", "reproductions/thesis_page.py", "reproductions/dos.py",
        "reproductions/dos_page.py", "reproductions/elsewhere.py",
        "reproductions/elsewhere_page.py", "reproductions/additivity.py",
    ),
}  # fmt: skip
"""Maps kinds of result to code that is left out of `_RESTS_ON`, because it only shows results or
computes other kinds."""


class Store:
    """The values in one folder.

    complain   is told of each file that exists and cannot be used
    """

    def __init__(self, folder: Path, complain: Callable[[str], None]) -> None:
        self.folder = folder
        self._complain = complain
        self._told: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnwritableError(str(folder), error.strerror or str(error)) from error
        refuse_links(folder)

    def complain(self, text: str) -> None:
        """Tell of a file that cannot be used, once."""
        if text not in self._told:
            self._told.add(text)
            self._complain(text)

    def path(self, name: str) -> Path:
        """The file of the value of that name."""
        return self.folder / f"{name}.json"

    def get(self, name: str, fingerprint: str) -> Any:
        """The value with this name and fingerprint; None if there is none or its file is broken."""
        path = self.path(name)
        if not path.exists():
            return None
        try:
            raw = read_json(path)
        except FileFormatError as error:
            self.complain(f"{error}; it is computed anew")
            return None
        whole = isinstance(raw, dict) and {"fingerprint", "value"} <= raw.keys()
        if not whole or raw.get("format") != FORMAT:
            self.complain(f"{path} holds no result of this command; it is computed anew")
            return None
        same = (raw.get("version"), raw["fingerprint"]) == (VERSION, fingerprint)
        return raw["value"] if same else None

    def put(self, name: str, fingerprint: str, value: Any) -> None:
        """Keep a value, which must be plain JSON. Raises `UnwritableError`."""
        file = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint, "value": value}
        write_atomically(self.path(name), json.dumps(file, separators=(",", ":"), allow_nan=False))

    def drop(self, name: str) -> None:
        """Forget a value, if it is there. What is no file of ours stays."""
        path = self.path(name)
        try:
            raw = read_json(path)
        except FileFormatError:
            return  # missing, or broken, so that it is written anew
        if isinstance(raw, dict) and raw.get("format") == FORMAT:
            path.unlink()


@dataclass(frozen=True)
class Kept:
    """The place of one value in a store: its name, and the fingerprint that it must have."""

    store: Store
    name: str
    fingerprint: str

    def get(self) -> Any:
        return self.store.get(self.name, self.fingerprint)

    def put(self, value: Any) -> None:
        self.store.put(self.name, self.fingerprint, value)

    def drop(self) -> None:
        self.store.drop(self.name)


def fingerprint(kind: str, /, **parts: Any) -> str:
    """16 hex digits over `parts`, which are all that a value depends on, and over the code that
    computes this kind of value."""
    text = json.dumps({"code": code_fingerprint(kind), **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def all_code() -> dict[str, str]:
    """Kind of result -> fingerprint of the code that computes it."""
    return {kind: code_fingerprint(kind) for kind in _RESTS_ON}


@cache
def code_fingerprint(kind: str) -> str:
    """16 hex digits over the versions of this package and torch, and over the code on which results
    of this kind rest."""
    digest = hashlib.sha256(f"{version('dovetail')} {version('torch')}".encode())
    for name, file in _files(_RESTS_ON[kind], _NOT.get(kind, ())):
        digest.update(name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _files(names: Iterable[str], without: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of `names`, of a folder all of its modules, except those in `without`.
    Names are of the package `dovetail`, but for those that begin with this one's."""
    package, own = Path(dovetail.__file__).parent, Path(__file__).parent
    for name in names:
        root = own.parent if name.startswith(own.name) else package
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found = file.relative_to(root).as_posix()
            if not any(found == other or found.startswith(f"{other}/") for other in without):
                yield found, file
