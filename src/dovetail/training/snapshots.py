"""A snapshot: a header as JSON, then vectors, each with its checksum.

    magic │ bytes of header, its CRC-32 │ header │ vector │ vector │ ...

Written to a temporary name that then takes the real one, so that a reader sees a whole file or
none. No pickle: what is read is numbers and text.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import JournalError, UnwritableError
from dovetail.training.checks import checksum
from dovetail.training.records import Vector

MAGIC = b"dovetS2\n"
"""Name and version of the format. Version 1 had checksums of another kind."""
_HEAD = struct.Struct("<QI")
_MOST_PIECES = 1024
"""Of one call to the system (IOV_MAX)."""


def write_snapshot(
    path: Path, state: dict[str, Any], vectors: dict[str, Vector], crash: Callable[[str], None]
) -> int:
    """Write a snapshot to `path`, on the disk when this returns; its bytes. Raises
    `UnwritableError`, the old file whole. `crash`: called in the middle, and once it is renamed."""
    entries = [[name, str(v.dtype), v.size, checksum(v)] for name, v in vectors.items()]
    header = json.dumps({"state": state, "vectors": entries}).encode()
    start = MAGIC + _HEAD.pack(len(header), zlib.crc32(header)) + header
    pieces = [memoryview(start), *(_octets(vector) for vector in vectors.values())]
    size_bytes = sum(len(piece) for piece in pieces)
    half = size_bytes // 2
    temporary = path.with_name(".snapshot.tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            write_all(file.fileno(), list(_before(pieces, half)))
            crash("snapshot-half")
            write_all(file.fileno(), list(_after(pieces, half)))
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise UnwritableError(os.fspath(path), error.strerror or str(error)) from error
    crash("snapshot-renamed")
    return size_bytes


def read_snapshot(path: Path) -> tuple[dict[str, Any], dict[str, Vector]]:
    """State and vectors of a snapshot; `JournalError` names what was changed in it, and where."""
    data = np.fromfile(path, np.uint8)
    start = len(MAGIC) + _HEAD.size
    magic = data[: len(MAGIC)].tobytes()
    if magic != MAGIC or data.size < start:
        raise JournalError(os.fspath(path), explain_start(magic, MAGIC, "snapshot"))
    length, crc = _HEAD.unpack(data[len(MAGIC) : start].tobytes())
    header = data[start : start + length].tobytes() if length <= data.size else b""
    if len(header) != length or zlib.crc32(header) != crc:
        raise JournalError(os.fspath(path), f"its header was changed, at byte {len(MAGIC)} or on")
    fields = json.loads(header)
    vectors, end = {}, start + length
    for name, kind, size, expected in fields["vectors"]:
        begin, end = end, end + size * np.dtype(kind).itemsize
        octets = data[begin:end]
        if octets.size != end - begin or checksum(octets) != expected:
            raise JournalError(os.fspath(path), f"{name} was changed, at byte {begin} or on")
        vectors[name] = np.frombuffer(octets.tobytes(), kind)
    if end != data.size:
        raise JournalError(os.fspath(path), f"it goes on where it should end, at byte {end}")
    return fields["state"], vectors


def explain_start(start: bytes, expected: bytes, what: str) -> str:
    """Why a file that begins with `start` cannot be read: another version, or no file of ours."""
    version, ours = start[-2:-1], expected[-2:-1]
    if version != ours and version.isdigit() and start.replace(version, ours) == expected:
        return (
            f"it is a {what} of format {version.decode()}, written by another version of dovetail, "
            f"where this one reads format {ours.decode()}; finish the run with the version that "
            "began it, or start a new one in another folder"
        )
    return f"it is no {what} of this program's, at byte 0"


def write_all(descriptor: int, pieces: list[memoryview]) -> None:
    """Write all bytes of all pieces: one call to the system, but for a short write."""
    pieces = [piece for piece in pieces if len(piece)]
    while pieces:
        written = os.writev(descriptor, pieces[:_MOST_PIECES])
        pieces = list(_after(pieces, written))


def _before(pieces: list[memoryview], count: int) -> Iterator[memoryview]:
    """The first `count` bytes."""
    for piece in pieces:
        yield piece[: max(count, 0)]
        count -= len(piece)


def _after(pieces: list[memoryview], count: int) -> Iterator[memoryview]:
    """All but the first `count` bytes."""
    for piece in pieces:
        rest = piece[min(count, len(piece)) :]
        count -= len(piece) - len(rest)
        if len(rest):
            yield rest


def sync_folder(folder: Path) -> None:
    """Wait until the folder's names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _octets(vector: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(vector).reshape(-1).view(np.uint8).data)
