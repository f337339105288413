"""Reading JSON of unknown origin."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dovetail.errors import FileFormatError
from dovetail.units import format_bytes

MOST_BYTES = 2**31
"""Largest JSON that is read. A gzip file of a few kilobytes can unpack to any size."""
_CHUNK_BYTES = 2**20


def read_json(path: str | Path) -> Any:
    """Parsed JSON of a file, unzipped where the name ends in `.gz`. Raises `FileFormatError`."""
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
            data = b"".join(_chunks(file.read, str(path)))
        return json.loads(data)
    except FileNotFoundError:
        raise FileFormatError(str(path), "no such file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise FileFormatError(str(path), str(error)) from None
    except ValueError as error:  # not JSON, or an integer of more digits than Python converts
        raise FileFormatError(str(path), f"not JSON: {error}") from None
    except RecursionError:
        raise FileFormatError(str(path), "nested too deeply") from None


def _chunks(read: Callable[[int], bytes], path: str) -> Iterator[bytes]:
    left = MOST_BYTES
    while chunk := read(_CHUNK_BYTES):
        left -= len(chunk)
        if left < 0:
            raise FileFormatError(path, f"holds more than {format_bytes(MOST_BYTES)} of JSON")
        yield chunk
