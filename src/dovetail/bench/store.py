"""Results on disk: one file each, written whole or not at all, found again by what made them.

    OUT/rows/rnnlm-2gpu.plain.scotch.json    {"format": "dovetail.bench", "version": 1,
                                              "fingerprint": ..., "value": ...}

A file holds one value under one name. Whoever reads it says by `fingerprint` which settings the
value must come from; of other settings, it is as good as absent and is written over.
"""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dovetail.errors import FileFormatError, UnwritableError
from dovetail.runtime.atomic import write_atomically
from dovetail.runtime.reading import read_json

FORMAT, VERSION = "dovetail.bench", 1
_RESTS_ON = (
    "runtime", "graph", "machine", "timeline.py", "networks", "frontends", "plans", "costs",
    "simulator", "placers", "bench",
)  # fmt: skip
"""What computes a result: other code, other results. What only shows them is not among them."""
_SHOWS = ("page", "page_results", "page_notes", "markup", "tables", "charts", "orderings")


class Store:
    """The values in one folder.

    complain   told of each file that is there and cannot be used
    """

    def __init__(self, folder: Path, complain: Callable[[str], None]) -> None:
        self.folder = folder
        self._complain = complain
        self._told: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnwritableError(str(folder), error.strerror or str(error)) from error

    def complain(self, text: str) -> None:
        """Tell of a file that cannot be used, once."""
        if text not in self._told:
            self._told.add(text)
            self._complain(text)

    def path(self, name: str) -> Path:
        """Where the value of that name is, or will be."""
        return self.folder / f"{name}.json"

    def get(self, name: str, fingerprint: str) -> Any:
        """The value that these settings made; None where there is none, or a broken file."""
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
        """Keep a value (of plain JSON). Raises `UnwritableError`."""
        file = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint, "value": value}
        write_atomically(self.path(name), json.dumps(file, separators=(",", ":"), allow_nan=False))

    def drop(self, name: str) -> None:
        """Forget a value, if it is there."""
        self.path(name).unlink(missing_ok=True)


def fingerprint(**parts: Any) -> str:
    """16 hex digits of everything that a value depends on, and of the code that computes it."""
    text = json.dumps({"code": code_fingerprint(), **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def code_fingerprint() -> str:
    """16 hex digits of the versions of this package and of torch, and of the code on which results
    rest."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256(f"{version('dovetail')} {version('torch')}".encode())
    for name in _RESTS_ON:
        path = root / name
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        for file in files:
            if not (name == "bench" and file.stem in _SHOWS):
                digest.update(file.relative_to(root).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
