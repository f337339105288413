"""How the ranks of a training find each other: by torch's store, which the launcher keeps.

rank 0 ── address, token ──► torch's store ──► rank 1, 2, ...
"""

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from dovetail.errors import DovetailError, RankLostError, UsageError
from dovetail.runtime.ranks import JOIN_SECONDS, RankPlace, connect_store, place_of_ranks
from dovetail.runtime.user_code import line_of
from dovetail.training.backends.contract import Assignment, check_options
from dovetail.training.backends.processes.transport import ProcessesOptions

_NAP_SECONDS = 0.05
_FACT_CHARACTERS = 1000
_numbers = itertools.count()
"""Numbers the runs of this process. All ranks make theirs in the same order."""


@dataclass(frozen=True)
class RanksOptions(ProcessesOptions):
    """How a run uses its ranks. Each rank pins and counts threads as `ProcessesOptions` has it.

    listen   the address on which rank 0 listens; "": that of the interface which leads to
             MASTER_ADDR
    """

    listen: str = ""

    def __post_init__(self) -> None:
        """Raise `UsageError` for a `listen` that is no address of this machine alone."""
        if not isinstance(self.listen, str) or self.listen in ("0.0.0.0", "::", "*"):
            says = f"is {self.listen!r}; give one address of this machine, as text"
            raise UsageError("listen", says)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "RanksOptions":
        """Raises `UsageError` for one that is not there."""
        check_options("ranks", options, cls.__dataclass_fields__)
        return cls(**options)


def launched_place() -> RankPlace:
    """Which rank a launcher made of this process. Raises `UsageError` if none did."""
    # A rank's host is told when it greets rank 0.
    place = place_of_ranks("")
    if place is None:
        says = "ranks needs several ranks, which torchrun or another launcher starts"
        raise UsageError("backend", says)
    return place


@cache
def _store(place: RankPlace) -> Any:
    """It lives as long as this process, since it may be the one that rank 0 keeps."""
    return connect_store(place, keeps=True, timeout_seconds=JOIN_SECONDS)


@contextmanager
def announced() -> Iterator[None]:
    """A run of all ranks within this block. What is raised before the ranks have met is told to
    those that wait for this one."""
    place, name = launched_place(), f"train/{next(_numbers)}"
    _names.append(name)
    try:
        yield
    except BaseException as error:
        said = "it was interrupted" if isinstance(error, KeyboardInterrupt) else line_of(error)
        with suppress(DovetailError, RuntimeError):  # the store may be gone
            if place.rank:
                _store(place).set(f"{name}/failed", json.dumps([place.rank, said]))
            else:
                tell_failure(place, name, said)
        raise
    finally:
        _names.remove(name)


_names: list[str] = []


def run_name() -> str:
    """The name of the process's run in torch's store: that which is announced, or else the next."""
    return _names[-1] if _names else f"train/{next(_numbers)}"


def check_others(place: RankPlace, name: str) -> None:
    """Raises `RankLostError` if another rank said that it failed before it had met this one."""
    failed = f"{name}/failed"
    try:
        told = json.loads(_store(place).get(failed)) if _store(place).check([failed]) else None
    except RuntimeError as error:
        raise _store_lost(place, error) from error
    if told is not None:
        raise RankLostError("unknown", int(told[0]), "", str(told[1]))


def _store_lost(place: RankPlace, error: RuntimeError) -> RankLostError:
    said = f"torch's store cannot be reached: {line_of(error)}"
    return RankLostError(place.address[0], 0, "", said)


def tell_address(place: RankPlace, name: str, address: tuple[str, int], token: bytes) -> None:
    """Tells the other ranks where rank 0 listens. Raises `RankLostError` if torch's store is
    gone."""
    try:
        _store(place).set(name, json.dumps([*address, token.hex()]))
    except RuntimeError as error:
        raise _store_lost(place, error) from error


def tell_failure(place: RankPlace, name: str, said: str) -> None:
    """Tells the other ranks that rank 0 does not listen, or no more."""
    with suppress(RuntimeError):  # the store may be gone
        _store(place).set(name, json.dumps([said]))


def ask_address(place: RankPlace, name: str) -> tuple[tuple[str, int], bytes]:
    """Where rank 0 listens, and the run's token. Waits until rank 0 tells. Raises `UsageError`, and
    `RankLostError` if rank 0 does not, or cannot listen."""
    deadline = time.monotonic() + JOIN_SECONDS
    host = place.address[0]
    try:
        store = _store(place)
        while not store.check([name]):
            if time.monotonic() > deadline:
                said = f"it did not begin within {JOIN_SECONDS:g} s"
                raise RankLostError(host, 0, "", said)
            time.sleep(_NAP_SECONDS)
        told = json.loads(store.get(name))
    # torch's store raises these when it is gone.
    except RuntimeError as error:
        raise _store_lost(place, error) from error
    if len(told) == 1:
        raise RankLostError(host, 0, "", str(told[0]))
    listening, port, token = told
    return (str(listening), int(port)), bytes.fromhex(token)


def forget_address(place: RankPlace, name: str) -> None:
    """Takes the token out of the store, once all ranks have it."""
    with suppress(RuntimeError):  # the store may be gone
        _store(place).delete_key(name)


def check_rule(assignment: Assignment) -> None:
    """Raises `UsageError` for a rule whose workers share the center's memory."""
    if assignment.rule.lock_free:
        says = f"{assignment.rule.name} needs memory that all workers share"
        raise UsageError("rule", says)


def facts_of(assignment: Assignment) -> dict[str, Any]:
    """What all ranks must agree on: name -> JSON, or its digest where that is long."""
    facts = {
        "rule": assignment.rule.name,
        "option": dict(assignment.rule.options),
        "wire": assignment.wire,
        **assignment.job.facts(),
        **assignment.facts,
        # Vectors go as they lie in memory, and samples are drawn by NumPy's generators.
        "versions": [version("dovetail"), version("torch"), version("numpy"), sys.byteorder],
    }
    texts = {name: json.dumps(fact, default=str) for name, fact in facts.items()}
    return {
        name: json.loads(text)
        if len(text) <= _FACT_CHARACTERS
        else hashlib.sha256(text.encode()).hexdigest()
        for name, text in texts.items()
    }
