"""Units: the only conversions between numbers and text. Inside the package: seconds and bytes."""

import re
from collections.abc import Mapping

HERE = "here"
"""The MACHINE text of the machine we stand on."""
HERE_CPU = "here/cpu"
"""The same without its GPUs."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
MOST_BYTES = 2**62
"""The largest size. Sizes are kept as int64; half of its range leaves room to add two."""
UNLIMITED_BYTES = MOST_BYTES // 2
"""Size of a memory without a limit."""
BEYOND_ANY_BYTES = 2**50
"""A memory of this many bytes or more stands for one without a limit."""
UNLIMITED_RATE = 1e30
"""At this bandwidth, in bytes per second, or a higher one, a transfer costs nothing."""

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_BYTES = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def format_seconds(seconds: float) -> str:
    """`0.0123` -> "12.3 ms"; three digits."""
    for scale, unit in _SECONDS:
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def format_bytes(size_bytes: float) -> str:
    """`1536` -> "1.5 KiB"."""
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= scale:
            return (
                f"{size_bytes / scale:.3g} {unit}"
                if size_bytes < 1000 * scale
                else (f"{size_bytes / scale:.0f} {unit}")
            )
    return f"{size_bytes:.0f} B"


def format_count(count: float, unit: str = "") -> str:
    """`1.34e12, "FLOP"` -> "1.34 TFLOP"."""
    for scale, prefix in _COUNTS:
        if abs(count) >= scale:
            return f"{count / scale:.3g} {prefix}{unit}"
    return f"{count:.3g} {unit}".rstrip()


def format_shares(shares: Mapping[str, float]) -> str:
    """`{"": 0.31, "aten.mm": 0.5}` -> "31 %, aten.mm 50 %"."""
    return ", ".join(f"{of} {100 * share:.3g} %".strip() for of, share in shares.items())


def format_capacity(memory_bytes: int) -> str:
    """`format_bytes` of what a memory holds; `BEYOND_ANY_BYTES` -> "unlimited"."""
    return "unlimited" if memory_bytes >= BEYOND_ANY_BYTES else format_bytes(memory_bytes)


def format_bandwidth(bytes_per_second: float) -> str:
    """`1.34e10` -> "13.4 GB/s"; `UNLIMITED_RATE` -> "unlimited"."""
    if bytes_per_second >= UNLIMITED_RATE:
        return "unlimited"
    return format_count(bytes_per_second, "B/s")


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates written out, as "\\x1b": a foreign name
    must not drive the terminal. Tabs and line ends stay."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def parse_bytes(text: str) -> int:
    """ "12 GiB", "500MB" or "4096" -> bytes. Raises `ValueError` naming the text."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*?)b?\s*", text.lower())
    scales = _BYTES | _BINARY_BYTES
    if match is None or match[2] not in scales:
        raise ValueError(f"{text!r} is not a size; write 12GiB, 500MB or 4096")
    size_bytes = float(match[1]) * scales[match[2]]
    if size_bytes > MOST_BYTES:
        raise ValueError(f"{text!r} is more than any memory: {MOST_BYTES} bytes at most")
    return int(size_bytes)
