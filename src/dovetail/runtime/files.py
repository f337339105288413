"""Writes a file whole or not at all, and reads JSON and archives of unknown origin."""

import errno
import gzip
import io
import json
import os
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from dovetail.errors import FileFormatError, UnwritableError
from dovetail.units import format_bytes

UNUSABLE_NAME = (OSError, ValueError, RuntimeError)
"""The errors that using a file's name raises. A name with a NUL or a lone surrogate raises
ValueError, and up to Python 3.12 resolving a link that leads back to itself RuntimeError."""


def cache_folder() -> Path:
    """Return the folder of what can be computed again: $DOVETAIL_CACHE, or else the user's own."""
    folder = os.environ.get("DOVETAIL_CACHE")
    return Path(folder) if folder else user_cache_path("dovetail")


def compiled_folder() -> Path:
    """Return the folder of compiled code."""
    return cache_folder() / "compiled"


def use_own_cache() -> None:
    """Have Inductor keep its files beside ours, unless the user has named a folder for them. Its
    own default is a folder of /tmp whose name anybody can guess, and make first. torch makes that
    one and names it to all later processes as soon as dynamo is imported."""
    named = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    default = Path(tempfile.gettempdir()).resolve()
    if named == Path() or (
        named.name.startswith("torchinductor_") and named.parent.resolve() == default
    ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled_folder() / "inductor")


@contextmanager
def own_cache() -> Iterator[None]:
    """`use_own_cache` within: afterwards the process has the folder of before."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    use_own_cache()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def is_own(path: Path) -> bool:
    """True for a file that exists and that nobody but this user can write or replace."""
    try:
        # A user who can write to the folder can replace the file, and lay a compiled one beside it.
        facts = path.stat(), path.parent.stat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return all(each.st_uid == os.getuid() and not each.st_mode & 0o022 for each in facts)


def refuse_links(path: Path) -> None:
    """Raise `FileFormatError` if `path`, or anything below it, is neither a file nor a folder.

    A folder of unknown origin may hold links, through which its user would write over other files.
    """
    waiting = [path]
    while waiting:
        path = waiting.pop()
        try:
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                waiting += path.iterdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise FileFormatError(str(path), error.strerror or str(error)) from None
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise FileFormatError(str(path), "it is a link, or another thing that is no file")


def files_only(name: str, flags: int) -> int:
    """The `opener` of `open` for each file that a user names: it opens no pipe, socket or device,
    for which a reader could wait without end. Raises `OSError`."""
    mode = os.stat(name).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device; name a file", name)
    # A pipe that somebody has put there since then is opened without waiting for its writer.
    return os.open(name, flags | os.O_NONBLOCK)


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path`, so that a reader sees the old file or the new one.

    The bytes go to a temporary file in the same folder, which then takes the name. A target that is
    no plain file (`/dev/stdout`, a pipe) is written directly. Raises `UnwritableError`, and then
    leaves nothing behind.
    """
    content = data.encode() if isinstance(data, str) else data
    target = Path(path)
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(content)
            return
        # A link keeps pointing where it did: its target is replaced, not the link.
        target = target.resolve()
        if target.is_dir():
            raise IsADirectoryError(None, "is a folder")
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:80]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            mode = target.stat().st_mode & 0o777 if target.exists() else new_mode(0o666)
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        # No half file is left behind, not even by Ctrl-C.
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except UNUSABLE_NAME as error:
        raise UnwritableError(os.fspath(path), explain_os(error)) from error


def explain_os(error: BaseException) -> str:
    """The reason of one of `UNUSABLE_NAME`, without the file's name."""
    if isinstance(error, RuntimeError):
        return "it is a link that leads back to itself"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def new_mode(mode: int) -> int:
    """The mode of a new file (0o666) or folder (0o777) that anybody makes; temporary ones are
    private."""
    umask = os.umask(0)
    os.umask(umask)
    return mode & ~umask


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `UnwritableError` now if `write_atomically` would raise it later, after long work."""
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "is a folder")
        if not target.exists() or target.is_file():
            handle, temporary = tempfile.mkstemp(dir=target.resolve().parent, prefix=".dovetail.")
            os.close(handle)
            os.unlink(temporary)
    except UNUSABLE_NAME as error:
        raise UnwritableError(os.fspath(path), explain_os(error)) from error


# ── Reading JSON of unknown origin ──────────────────────────────────────────────────────────────

MOST_BYTES = 2**28
"""No more bytes of JSON than this are read. A small gzip file can unpack to any size. A history of
a million commits has half as many."""
MOST_VALUES, MOST_CONTAINERS = 2**24, 2**22
"""JSON with more commas, or more lists and objects, is not parsed: as Python's objects it would
take gigabytes. A history of a million commits has three quarters of these values."""
_CHUNK_BYTES = 2**20
"""This many bytes are unpacked at a time."""


def read_json(path: str | Path) -> Any:
    """The parsed JSON of a file, unzipped if its name ends in `.gz`. Raises `FileFormatError`."""
    try:
        with (
            open(path, "rb", opener=files_only) as raw,
            gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw as file,
        ):
            parts: list[bytes] = []
            left = MOST_BYTES
            while chunk := file.read(_CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:
                    detail = f"holds more than {format_bytes(MOST_BYTES)} of JSON"
                    raise FileFormatError(str(path), detail)
                parts.append(chunk)
        data = b"".join(parts)
        if data.count(b",") > MOST_VALUES or data.count(b"{") + data.count(b"[") > MOST_CONTAINERS:
            detail = f"holds more than {MOST_VALUES} values, or {MOST_CONTAINERS} lists and objects"
            raise FileFormatError(str(path), detail)
        return json.loads(data)
    except FileNotFoundError:
        raise FileFormatError(str(path), "no such file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise FileFormatError(str(path), explain_os(error)) from None
    except ValueError as error:  # not JSON, or an integer of more digits than Python converts
        raise FileFormatError(str(path), f"not JSON: {error}") from None
    except RecursionError:
        raise FileFormatError(str(path), "nested too deeply") from None


# ── Zip archives of unknown origin ──────────────────────────────────────────────────────────────

MOST_UNPACKED_BYTES, MOST_UNPACKED_SHARE = 2**30, 16
"""An archive may unpack to so many bytes, or to so many times its own size if that is more. What
`numpy.savez_compressed` writes of trained weights or of images stays far below."""


def check_archive(path: str | Path, content: bytes | None = None) -> None:
    """Raise `FileFormatError` for what is no zip archive, and for one that unpacks to too much.

    content   the archive's bytes, of an archive within the file `path`; None: the file itself
    """
    try:
        with (
            open(path, "rb", opener=files_only) if content is None else io.BytesIO(content) as file
        ):
            # Readers that unpickle other files tell an archive by its first bytes, zipfile by its
            # last.
            if file.read(4) != b"PK\x03\x04":
                raise FileFormatError(str(path), "it is no zip archive")
            size_bytes = file.seek(0, os.SEEK_END)
            with zipfile.ZipFile(file) as archive:
                unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
    except OSError as error:
        raise FileFormatError(str(path), error.strerror or str(error)) from None
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise FileFormatError(str(path), f"it is no zip archive: {error}") from None
    if unpacked_bytes > max(MOST_UNPACKED_BYTES, MOST_UNPACKED_SHARE * size_bytes):
        much = format_bytes(unpacked_bytes)
        raise FileFormatError(str(path), f"its {format_bytes(size_bytes)} unpack to {much}")
