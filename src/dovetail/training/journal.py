"""Keeps a server's state in a folder: the last snapshot, and a log of all inputs since.

    run.json         the job, the rule and its options, which identify the run
    lock             held by the one server that writes here
    snapshot-N       the state before record N
    log-N            records N, N + 1, ... until the next snapshot

A record is written in one piece, before the state changes:

    magic │ bytes of header, of vector │ number │ checksums │ header as JSON │ vector as received

A server that dies while it writes leaves a torn last record. No worker was answered for it, so it
is cut off. If the file differs in any other way from what was written, that is a `JournalError`. A
log survives the death of its process, and with `sync` also a failure of the machine.

A snapshot is a header as JSON, which lists each vector's checksum, then the vectors:

    magic │ bytes of header, its CRC-32 │ header │ vector │ vector │ ...

It is written under a temporary name and then renamed, so that a reader sees a whole file or none.
Nothing is pickled: the files hold numbers and text only.
"""

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dovetail.errors import JournalError, RunMismatchError, UnwritableError, UsageError
from dovetail.runtime.files import write_atomically
from dovetail.training.backends.contract import Storage
from dovetail.training.checks import checksum
from dovetail.training.records import CHANGING, Job, Vector
from dovetail.training.rules.contract import Rule

LOG_FACTOR = 16
"""The next snapshot is due once the log is so many times as large as the last snapshot."""
LEAST_LOG_BYTES = 2**26
"""While a log is smaller than this, its size is no reason for a snapshot."""

MOST_OF_A_RUN = 2**32
"""A run has at most so many epochs, and so many workers; a folder that says more is damaged."""
_SEGMENT = b"dovetL2\n"
"""Name and version of the log's format. Version 1 used another kind of checksum."""
_RECORD = b"rec\n"
_PREFIX = struct.Struct("<4sIQQQI")  # magic, header and vector bytes, number, checksum, CRC
_CRC = struct.Struct("<I")
_PREFIX_BYTES = _PREFIX.size + _CRC.size


@dataclass(frozen=True)
class JournalRecord:
    """One input of the server, as it was logged. `vector` is [size], or None if it had none."""

    header: dict[str, Any]
    vector: Vector | None


def identity(job: Job, rule: Rule) -> dict[str, Any]:
    """The fields that identify a run, by name, as values that JSON can hold."""
    fields = {"run": job.run} | job.facts() | {"rule": rule.name}
    fields |= {f"option {name}": value for name, value in rule.options.items()}
    # The fields go through JSON once, so that they compare equal to those that a file holds.
    json_fields: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return json_fields


def stored_identity(folder: Path) -> dict[str, Any] | None:
    """The `identity` of the run in the folder; None if it holds none. Raises `JournalError`."""
    path = folder / "run.json"
    if not path.exists():
        return None
    try:
        kept = _parse(path, path.read_bytes(), "it")
    except OSError as error:
        raise JournalError(os.fspath(path), error.strerror or str(error)) from error
    fields = kept.get("run")
    if not isinstance(fields, dict) or kept.get("crc") != zlib.crc32(_canonical(fields)):
        raise JournalError(os.fspath(path), "it was changed since it was written")
    return fields


def _parse(path: Path, text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in a file of a run's folder. Raises `JournalError`."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JournalError(os.fspath(path), f"{what} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise JournalError(os.fspath(path), f"{what} is no JSON object")
    return parsed


class Journal:
    """The folder of one run, which one server at a time writes to.

    began   the fields `CHANGING` of the job that the run began with

    Raises `UsageError` if another server writes to it, or if it holds a run and `resume` is false.
    Raises `RunMismatchError` if it holds another run.
    """

    def __init__(self, storage: Storage, job: Job, rule: Rule, *, resume: bool) -> None:
        self._storage = storage
        self._folder = storage.folder
        self._kind = np.dtype(job.dtype)
        # Each record's seal starts from this number, so that a record of another run is not taken.
        self._seed = zlib.crc32(job.run.encode())
        self._segment: BinaryIO | None = None
        self._end_bytes = 0  # of the last whole record
        self._snapshot_bytes = 0
        self.number = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._folder / "lock", "ab")  # noqa: SIM115  held until close
        except OSError as error:
            raise UnwritableError(os.fspath(self._folder), error.strerror or "") from error
        try:
            self._claim(identity(job, rule), resume)
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, fields: dict[str, Any], resume: bool) -> None:
        try:
            # The system frees the lock when the process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            detail = f"another server is writing to {self._folder}; give a folder of its own"
            raise UsageError("storage", detail) from error
        stored = stored_identity(self._folder)
        self.began: dict[str, Any] = {name: (stored or fields).get(name) for name in CHANGING}
        if any(not isinstance(n, int) or not 0 < n <= MOST_OF_A_RUN for n in self.began.values()):
            path = os.fspath(self._folder / "run.json")
            raise JournalError(path, f"its epochs and workers are {self.began}")
        if stored is not None:
            for name in (*fields, *stored):
                if fields.get(name) != stored.get(name) and name not in self.began:
                    folder, expected = os.fspath(self._folder), fields.get(name)
                    raise RunMismatchError(folder, name, expected, stored.get(name))
        if self._snapshots() and not resume:
            raise UsageError("storage", f"{self._folder} already holds this run; resume it")
        if stored is None:
            kept = {"run": fields, "crc": zlib.crc32(_canonical(fields))}
            write_atomically(self._folder / "run.json", json.dumps(kept, indent=1))

    # Reading

    def load(self) -> tuple[dict[str, Any], dict[str, Vector]] | None:
        """Reads the state and the vectors of the last snapshot; None if there is none. Removes
        older files. `records` continues from this snapshot."""
        snapshots = self._snapshots()
        if not snapshots:
            return None
        self.number = snapshots[-1]
        state = read_snapshot(self.snapshot_path)
        self._snapshot_bytes = self.snapshot_path.stat().st_size
        self._clear()
        return state

    @property
    def snapshot_path(self) -> Path:
        """The last snapshot, if there is one."""
        return self._folder / f"snapshot-{self._snapshots()[-1]:012d}"

    @property
    def log_path(self) -> Path:
        """The log that follows the last snapshot."""
        return self._log()

    def records(self) -> Iterator[JournalRecord]:
        """Yields the records since the snapshot, in order. When all have been read, the log is open
        for `append` after the last of them."""
        path = self._log()
        if path.exists():
            try:
                file = open(path, "rb")  # noqa: SIM115  closed below
            except OSError as error:
                raise JournalError(os.fspath(path), error.strerror or str(error)) from error
            with file:
                yield from self._read(file, path)
            if self._end_bytes:
                self._continue(path)
                return
        # There is no log if the last server died between its snapshot and the log that follows it.
        self._begin()

    def _read(self, file: BinaryIO, path: Path) -> Iterator[JournalRecord]:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(len(_SEGMENT))
        # A file shorter than the magic is a torn beginning, which is allowed if it agrees so far.
        if start != _SEGMENT[:size_bytes]:
            raise JournalError(os.fspath(path), explain_start(start, _SEGMENT, "log"))
        if size_bytes < len(_SEGMENT):
            return
        self._end_bytes = len(_SEGMENT)
        while self._end_bytes < size_bytes:
            record = self._record(file, path, size_bytes - self._end_bytes)
            if record is None:
                return
            self._end_bytes = file.tell()
            self.number += 1
            yield record

    def _record(self, file: BinaryIO, path: Path, left_bytes: int) -> JournalRecord | None:
        """The next record; None if it is torn, that is, cut short by the end of the file."""
        prefix = file.read(_PREFIX_BYTES)
        if len(prefix) < _PREFIX_BYTES:
            return None
        magic, header_bytes, vector_bytes, number, expected, crc = _PREFIX.unpack_from(prefix)
        sealed = _CRC.unpack_from(prefix, _PREFIX.size)[0]
        if magic != _RECORD or sealed != zlib.crc32(prefix[: _PREFIX.size], self._seed):
            raise self._damaged_record(path, "it is no record of this run")
        if number != self.number:
            raise self._damaged_record(
                path, f"it has number {number}, where {self.number} should follow"
            )
        # The lengths can be trusted here, since the seal over the prefix was right.
        if left_bytes < _PREFIX_BYTES + header_bytes + vector_bytes:
            return None
        header = file.read(header_bytes)
        if zlib.crc32(header) != crc:
            raise self._damaged_record(path, "its header was changed")
        vector = None
        if vector_bytes:
            if vector_bytes % self._kind.itemsize:
                raise self._damaged_record(path, f"its vector is of no {self._kind}")
            vector = np.empty(vector_bytes // self._kind.itemsize, self._kind)
            file.readinto(vector.data.cast("B"))  # type: ignore[attr-defined]
            if checksum(vector) != expected:
                raise self._damaged_record(path, "its vector was changed")
        what = f"the record at byte {self._end_bytes}: its header"
        return JournalRecord(_parse(path, header, what), vector)

    def _damaged_record(self, path: Path, detail: str) -> JournalError:
        return JournalError(os.fspath(path), f"the record at byte {self._end_bytes}: {detail}")

    # Writing

    def append(
        self, header: dict[str, Any], vector: Vector | None = None, checksum: int = 0
    ) -> None:
        """Logs an input before it is acted upon. `checksum` is the vector's.

        With `sync`, the record is on the disk when this returns. Raises `UnwritableError` and then
        leaves the log as it was.
        """
        # Without a log the inputs are still counted, because snapshots are named by their number.
        if not self._storage.log:
            self.number += 1
            return
        text = json.dumps(header, separators=(",", ":")).encode()
        octets = memoryview(b"") if vector is None else memoryview(vector.data).cast("B")
        prefix = _PREFIX.pack(
            _RECORD, len(text), len(octets), self.number, checksum, zlib.crc32(text)
        )
        seal = _CRC.pack(zlib.crc32(prefix, self._seed))
        assert self._segment is not None
        descriptor = self._segment.fileno()
        try:
            write_all(descriptor, [memoryview(prefix + seal + text), octets])
            if self._storage.sync:
                os.fdatasync(descriptor)
        except OSError as error:
            # Cut off the part that was written: the next record must follow the last whole one.
            with suppress(OSError):
                os.ftruncate(descriptor, self._end_bytes)
                os.lseek(descriptor, self._end_bytes, os.SEEK_SET)
            raise UnwritableError(os.fspath(self._log()), error.strerror or str(error)) from error
        self._end_bytes += _PREFIX_BYTES + len(text) + len(octets)
        self.number += 1

    @property
    def long(self) -> bool:
        """Whether the log is so much larger than the last snapshot that another one is due."""
        return self._end_bytes > max(LEAST_LOG_BYTES, LOG_FACTOR * self._snapshot_bytes)

    def snapshot(self, state: dict[str, Any], vectors: dict[str, Vector]) -> None:
        """Saves the state as it is after all records so far, and begins a new log."""
        path = self._folder / f"snapshot-{self.number:012d}"
        # Old files go last: at every moment the folder holds a snapshot and the log that follows.
        self._snapshot_bytes = write_snapshot(path, state, vectors)
        self._begin()
        self._clear()

    def close(self) -> None:
        """Closes the log and releases the lock, so that another server can use the folder."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._lock.close()

    # Files

    def _log(self) -> Path:
        return self._folder / f"log-{self._snapshots()[-1]:012d}"

    def _snapshots(self) -> list[int]:
        return sorted(_number(path) for path in self._files("snapshot-"))

    def _files(self, prefix: str) -> list[Path]:
        return sorted(self._folder.glob(prefix + 12 * "[0-9]"))

    def _begin(self) -> None:
        """Begins the log that follows the last snapshot."""
        if self._segment is not None:
            self._segment.close()
        path = self._log()
        try:
            self._segment = open(path, "wb", buffering=0)  # noqa: SIM115  held until close
            write_all(self._segment.fileno(), [memoryview(_SEGMENT)])
            if self._storage.sync:
                os.fsync(self._segment.fileno())
                sync_folder(self._folder)
        except OSError as error:
            raise UnwritableError(os.fspath(path), error.strerror or str(error)) from error
        self._end_bytes = len(_SEGMENT)

    def _continue(self, path: Path) -> None:
        """Opens the log to append after the last whole record, and cuts off what follows that."""
        try:
            self._segment = open(path, "r+b", buffering=0)  # noqa: SIM115  held until close
            os.ftruncate(self._segment.fileno(), self._end_bytes)
            self._segment.seek(self._end_bytes)
        except OSError as error:
            raise UnwritableError(os.fspath(path), error.strerror or str(error)) from error

    def _clear(self) -> None:
        """Removes logs and snapshots older than the last snapshot, and an unfinished snapshot."""
        last = self._snapshots()[-1]
        old = [p for p in self._files("log-") + self._files("snapshot-") if _number(p) < last]
        for path in (*old, self._folder / ".snapshot.tmp"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise UnwritableError(os.fspath(path), error.strerror or str(error)) from error


def _number(path: Path) -> int:
    """The N of `snapshot-N` or `log-N`: the first record after the snapshot, or of the log."""
    return int(path.name.rpartition("-")[2])


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


# Snapshots

MAGIC = b"dovetS2\n"
"""Name and version of the snapshot's format. Version 1 used another kind of checksum."""
_HEAD = struct.Struct("<QI")
_KINDS = ("float32", "float64")
"""The types of vectors in snapshots."""
_MOST_PIECES = 1024
"""One `writev` takes at most so many pieces (Linux's IOV_MAX)."""


def write_snapshot(path: Path, state: dict[str, Any], vectors: dict[str, Vector]) -> int:
    """Writes a snapshot to `path` and returns its bytes. It is on the disk when this returns.
    Raises `UnwritableError` and then leaves the old file whole."""
    entries = [[name, str(v.dtype), v.size, checksum(v)] for name, v in vectors.items()]
    header = json.dumps({"state": state, "vectors": entries}).encode()
    start = MAGIC + _HEAD.pack(len(header), zlib.crc32(header)) + header
    flat = [np.ascontiguousarray(vector).reshape(-1) for vector in vectors.values()]
    pieces = [memoryview(start), *(vector.view(np.uint8).data for vector in flat)]
    size_bytes = sum(len(piece) for piece in pieces)
    temporary = path.with_name(".snapshot.tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            write_all(file.fileno(), pieces)
            # The content must be on the disk before the name is, or a failure of the machine could
            # leave the name on a file without content.
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise UnwritableError(os.fspath(path), error.strerror or str(error)) from error
    return size_bytes


def read_snapshot(path: Path) -> tuple[dict[str, Any], dict[str, Vector]]:
    """Reads the state and the vectors of a snapshot. Raises a `JournalError` that names the changed
    part and its byte, if the file is not as it was written."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise JournalError(os.fspath(path), error.strerror or str(error)) from error
    start = len(MAGIC) + _HEAD.size
    magic = data[: len(MAGIC)].tobytes()
    if magic != MAGIC or data.size < start:
        raise JournalError(os.fspath(path), explain_start(magic, MAGIC, "snapshot"))
    length, crc = _HEAD.unpack(data[len(MAGIC) : start].tobytes())
    header = data[start : start + length].tobytes() if length <= data.size else b""
    if len(header) != length or zlib.crc32(header) != crc:
        raise JournalError(os.fspath(path), f"its header was changed, at byte {len(MAGIC)} or on")
    fields = _parse(path, header, "its header")
    entries, state = fields.get("vectors"), fields.get("state")
    if not isinstance(state, dict) or not isinstance(entries, list):
        raise JournalError(os.fspath(path), "its header lacks the state or the vectors")
    vectors, end = {}, start + length
    for entry in entries:
        kinds = [type(value) for value in entry] if isinstance(entry, list) else []
        if kinds != [str, str, int, int] or entry[1] not in _KINDS or entry[2] < 0:
            detail = f"its header lists {entry!r:.60}, which is no vector"
            raise JournalError(os.fspath(path), detail)
        name, kind, size, expected = entry
        begin, end = end, end + size * np.dtype(kind).itemsize
        octets = data[begin:end]
        if octets.size != end - begin or checksum(octets) != expected:
            raise JournalError(os.fspath(path), f"{name} was changed, at byte {begin} or on")
        vectors[name] = np.frombuffer(octets.tobytes(), kind)
    if end != data.size:
        raise JournalError(os.fspath(path), f"it goes on where it should end, at byte {end}")
    return state, vectors


def explain_start(start: bytes, expected: bytes, what: str) -> str:
    """Says why a file that begins with `start` cannot be read: it is of another version, or no file
    of this program's."""
    # The last but one byte of a magic is its version's digit.
    version, own_version = start[-2:-1], expected[-2:-1]
    if (
        version != own_version
        and version.isdigit()
        and start.replace(version, own_version) == expected
    ):
        return (
            f"it is a {what} of format {version.decode()}, written by another version of dovetail, "
            f"where this one reads format {own_version.decode()}; finish the run with the version "
            "that began it, or start a new one in another folder"
        )
    return f"it is no {what} of this program's, at byte 0"


def write_all(descriptor: int, pieces: list[memoryview]) -> None:
    """Writes all bytes of all pieces. It takes one system call, unless the system writes fewer
    bytes than asked for or there are more than `_MOST_PIECES` pieces."""
    pieces = [piece for piece in pieces if len(piece)]
    while pieces:
        written = os.writev(descriptor, pieces[:_MOST_PIECES])
        pieces = list(_skip_bytes(pieces, written))


def _skip_bytes(pieces: list[memoryview], count: int) -> Iterator[memoryview]:
    """The pieces without their first `count` bytes."""
    for piece in pieces:
        rest = piece[min(count, len(piece)) :]
        count -= len(piece) - len(rest)
        if len(rest):
            yield rest


def sync_folder(folder: Path) -> None:
    """Waits until the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
