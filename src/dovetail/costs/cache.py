"""The cache of measured costs, an SQLite file in the user's cache folder.

It has one row per (device key, signature). A device key names all that changes a measurement:
processor, cores and threads, how many such devices work at once, torch's version, and the version
of the measurement. Processes may share the file: SQLite locks it, and each change is one
transaction.
"""

import hashlib
import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.errors import FileFormatError, UnwritableError
from dovetail.runtime.files import cache_folder

_SCHEMA = """
CREATE TABLE IF NOT EXISTS costs (
    device TEXT NOT NULL, signature TEXT NOT NULL, seconds REAL NOT NULL,
    spread REAL NOT NULL, measured_at REAL NOT NULL, PRIMARY KEY (device, signature)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS probes (
    device TEXT NOT NULL PRIMARY KEY, rates TEXT NOT NULL, measured_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS paces (
    core TEXT NOT NULL PRIMARY KEY, seconds REAL NOT NULL, measured_at REAL NOT NULL
) WITHOUT ROWID;
"""
_TABLES = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
"""Asks for the statements that made all that a database holds, as SQLite keeps them."""
_BUSY_SECONDS = 30.0
"""A process waits this long for another one's lock on the file."""
PACE_LASTS_SECONDS = 7 * 24 * 3600.0
"""A best pace is forgotten after this time, because a machine can become slower for good."""


@dataclass(frozen=True)
class MeasuredCost:
    """The seconds of one call, and their spread: (third - first quartile) / median of samples."""

    seconds: float
    spread: float


class CostCache:
    """The cache file at `path`, which is created if it does not exist: by default `costs.sqlite` in
    $DOVETAIL_CACHE, or else in the user's cache folder.

    Its methods raise `UnwritableError` if the file or folder cannot be used, and `FileFormatError`
    if the file is no cache.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "costs.sqlite"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnwritableError(str(self.path), error.strerror or str(error)) from None
        with self._connect() as db:
            # A view or a trigger of a foreign file would run with each of our statements.
            strange = set(db.execute(_TABLES)) - _own_tables()
            if strange:
                raise self._damaged("it holds other tables, views or triggers")
            db.executescript(_SCHEMA)

    def costs(self, device: str, signatures: Iterable[str]) -> dict[str, MeasuredCost]:
        """Return signature -> measured cost, for the signatures that the cache holds."""
        costs = {}
        with self._connect() as db:
            for signature in dict.fromkeys(signatures):
                row = db.execute(
                    "SELECT seconds, spread FROM costs WHERE device = ? AND signature = ?",
                    (device, _digest(signature)),
                ).fetchone()
                if row is not None:
                    costs[signature] = MeasuredCost(*(self._number(value) for value in row))
        return costs

    def add_costs(self, device: str, measured: dict[str, MeasuredCost]) -> None:
        """Store these costs; they replace older ones of the same signatures."""
        now = time.time()
        rows = [(device, _digest(s), m.seconds, m.spread, now) for s, m in measured.items()]
        with self._connect() as db:
            db.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?, ?)", rows)

    def probe(self, device: str) -> dict[str, Any] | None:
        """Return the rates that a probe measured for this key, or None."""
        with self._connect() as db:
            row = db.execute("SELECT rates FROM probes WHERE device = ?", (device,)).fetchone()
        if row is None:
            return None
        try:
            rates = json.loads(row[0])
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"the rates of {device} are not JSON: {error}") from None
        if not isinstance(rates, dict):
            raise self._damaged(f"the rates of {device} are no JSON object")
        return rates

    def add_probe(self, device: str, rates: dict[str, Any]) -> None:
        """Store these rates; they replace older ones of the same key."""
        with self._connect() as db:
            db.execute(
                "INSERT OR REPLACE INTO probes VALUES (?, ?, ?)",
                (device, json.dumps(rates), time.time()),
            )

    def pace(self, core: str) -> float:
        """Return the best pace, in seconds, that a core of this kind had in the last
        `PACE_LASTS_SECONDS`; inf if there is none."""
        with self._connect() as db:
            row = db.execute(
                "SELECT seconds FROM paces WHERE core = ? AND measured_at > ?",
                (core, time.time() - PACE_LASTS_SECONDS),
            ).fetchone()
        return math.inf if row is None else self._number(row[0])

    def add_pace(self, core: str, seconds: float) -> None:
        """Store this pace, unless the cache has a better one that has not been forgotten."""
        now = time.time()
        with self._connect() as db:
            db.execute(
                "INSERT INTO paces VALUES (?, ?, ?) ON CONFLICT (core) DO UPDATE "
                "SET seconds = excluded.seconds, measured_at = excluded.measured_at "
                "WHERE excluded.seconds < seconds OR measured_at <= ?",
                (core, seconds, now, now - PACE_LASTS_SECONDS),
            )

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS)
            try:
                with db:
                    yield db
            finally:
                db.close()
        except sqlite3.OperationalError as error:
            raise UnwritableError(str(self.path), str(error)) from None
        # SQLite repeats a damaged schema in its message, which Python decodes, and asks for as much
        # memory as a damaged page says.
        except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:
            raise self._damaged(str(error) or type(error).__name__) from None

    def _number(self, value: Any) -> float:
        """A time or a spread from the file. SQLite keeps a value of another type as it is."""
        if not isinstance(value, float) or not value >= 0:
            raise self._damaged(f"{value!r:.40} is no time")
        return value

    def _damaged(self, detail: str) -> FileFormatError:
        detail = f"not a cost cache ({detail}); remove the file to measure anew"
        return FileFormatError(str(self.path), detail)


@cache
def _own_tables() -> frozenset[tuple[str]]:
    db = sqlite3.connect(":memory:")
    try:
        db.executescript(_SCHEMA)
        return frozenset(db.execute(_TABLES))
    finally:
        db.close()


def _digest(signature: str) -> str:
    """Return a short key of a signature, which may be long itself."""
    return hashlib.sha256(signature.encode()).hexdigest()[:32]
