"""Loaders with a fault each, which the fuzzer must find, in a process of its own."""

import os
import time
from pathlib import Path
from random import Random

from targets import Target

from dovetail.errors import FileFormatError, InvalidError

SEEDS = [b"plain text", b"other plain text"]
_kept: list[bytes] = []


def change(rng: Random, index: int, seeds: list[bytes]) -> bytes:
    """The seed with up to three capital letters in it."""
    letters = bytearray(seeds[index])
    for _ in range(rng.randrange(4)):
        letters.insert(rng.randrange(len(letters)), rng.choice(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    return bytes(letters)


def raising(path: Path) -> None:
    data = path.read_bytes()
    if b"R" in data:
        raise FileFormatError(str(path), "refused")
    if b"K" in data:
        {}["missing"]


def hanging(path: Path) -> None:
    while b"H" in path.read_bytes():
        time.sleep(0.01)


def dying(path: Path) -> None:
    if b"D" in path.read_bytes():
        os._exit(3)


def both(path: Path) -> None:
    dying(path)
    raising(path)


def growing(path: Path) -> None:
    if b"G" in path.read_bytes():
        bytes(2**27).replace(b"\0", b"a")


def leaking(path: Path) -> None:
    _kept.append(os.urandom(2**17))


def silent(path: Path) -> None:
    if b"Q" in path.read_bytes():
        raise InvalidError


TARGETS = {
    load.__name__: Target(load.__name__, ".txt", SEEDS.copy, change, load)
    for load in (raising, hanging, dying, both, growing, leaking, silent)
}
