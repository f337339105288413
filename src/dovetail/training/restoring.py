"""Checks what the folder of a run holds, before a server takes it over.

    snapshot ──► fields of the right types ──► that agree with the job, the rule and each other
    record   ──► fields of the right types ──► an input that the server would have logged now

Checksums find what was changed by accident. A folder that fits its checksums can still hold
anything, if another program wrote it. Whatever passes here can be restored and replayed.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dovetail.errors import JournalError
from dovetail.runtime.formats import file_type, first_complaint
from dovetail.training.center import Center
from dovetail.training.journal import MOST_OF_A_RUN
from dovetail.training.ledger import Ledger, changed
from dovetail.training.momentum import VERSIONS, Momentum
from dovetail.training.positions import Positions
from dovetail.training.records import (
    COLUMNS,
    COUNTS,
    LEASED,
    Commit,
    Job,
    Lease,
    Refusal,
    Vector,
    Verdict,
)

_STRICT = ConfigDict(extra="forbid", strict=True)
_LARGEST = 2**53
"""Whole numbers are not larger, so that they are exact as float64, which rows are kept in."""
_Whole = Annotated[int, Field(ge=0, le=_LARGEST)]
_Count = Annotated[int, Field(ge=1, le=MOST_OF_A_RUN)]
_Number = Annotated[int, Field(ge=-1, le=_LARGEST)]
_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# A machine's clock may have been set back.
_Seconds = Annotated[float, Field(allow_inf_nan=False)]


class _Turn(BaseModel):
    """A turn as `turn_fields` writes it, which leaves no field out."""

    model_config = _STRICT
    worker: _Whole
    commit: file_type(Commit, _STRICT) | None  # type: ignore[valid-type]
    lease: bool
    pull: bool


class _Member(BaseModel):
    model_config = _STRICT
    sequence: _Whole
    lease: file_type(Lease, _STRICT) | None  # type: ignore[valid-type]
    windows: _Whole
    speed: _Finite
    present: bool


class _Leases(BaseModel):
    model_config = _STRICT
    stop: _Whole | None
    committed: _Whole
    next: list[_Whole] | _Whole
    number: _Whole
    returned: list[tuple[_Whole, _Whole]]
    held: list[tuple[_Whole, _Whole, _Whole]]


class _Waiting(BaseModel):
    model_config = _STRICT
    turn: _Turn
    verdict: Verdict | None
    refusal: Refusal | None
    staged: bool


class _LedgerFields(BaseModel):
    model_config = _STRICT
    # States of earlier versions do not tell them.
    epochs: _Count | None = None
    workers: _Count | None = None
    clock: _Whole
    stopped: bool
    started: bool
    leases: _Leases
    members: list[tuple[_Whole, _Member]]
    waiting: list[tuple[_Whole, _Waiting]]


class _MomentumFields(BaseModel):
    model_config = _STRICT
    clocks: Annotated[list[_Number], Field(min_length=VERSIONS, max_length=VERSIONS)]
    sums: tuple[float, float]
    commits: _Whole


class _Snapshot(BaseModel):
    """The fields of a snapshot, as `Server.snapshot` writes them."""

    model_config = _STRICT
    ledger: _LedgerFields
    counts: dict[str, _Whole]
    norms: list[float]
    heads: list[tuple[_Whole, file_type(Commit, _STRICT), float]]  # type: ignore[valid-type]
    present: list[tuple[_Number, bool]]
    refusals: list[tuple[Refusal, _Whole]]
    events: list[tuple[str, _Number, float, str]]
    momentum: _MomentumFields | None
    position: _Whole | None
    passed: list[_Turn]
    seconds: _Seconds


class _Header(BaseModel):
    """The fields of a record that every kind of input has, and those of some."""

    model_config = ConfigDict(extra="ignore", strict=True)
    kind: str
    seconds: _Seconds
    position: _Whole | None = None


class _TurnHeader(_Header):
    kind: Literal["turn"]
    turn: _Turn
    refusal: Refusal | None
    squares: _Finite | None = None


class _WorkerHeader(_Header):
    kind: Literal["join", "evict", "leave"]
    worker: _Number


class _EndHeader(_Header):
    kind: Literal["end_stream"]
    samples: _Whole


class _ChangeHeader(_Header):
    kind: Literal["change"]
    epochs: _Count
    workers: _Count


class _OtherHeader(_Header):
    kind: Literal["stop", "continue", "restarted"]
    leases: _Whole = 0


_HEADER: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        _TurnHeader | _WorkerHeader | _EndHeader | _ChangeHeader | _OtherHeader,
        Field(discriminator="kind"),
    ]
)
_BASE = re.compile(r"(base|staged) ([0-9]{1,16})")


def check_snapshot(
    path: Path,
    fields: dict[str, Any],
    vectors: dict[str, Vector],
    ledger: Ledger,
    center: Center,
    momentum: Momentum | None,
) -> None:
    """Raises `JournalError` for a snapshot that does not fit this job, rule and center."""
    try:
        read = _Snapshot.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise JournalError(str(path), f"its state: {first_complaint(error)}") from None
    faults = (
        *_bounds(fields, "state"),
        *_ledger_faults(ledger, read.ledger),
        *_vector_faults(vectors, center, momentum),
        *_agreement_faults(ledger, read, vectors, center),
    )
    if (read.momentum is None) != (momentum is None):
        faults += ("it has a momentum that the rule has none of, or lacks it",)
    if read.counts.keys() != center.counts().keys():
        faults += ("its counts are not those of the rule",)
    if faults:
        raise JournalError(str(path), faults[0])


def check_record(
    path: Path, number: int, header: Any, vector: Vector | None, ledger: Ledger, center: Center
) -> None:
    """Raises `JournalError` for a record whose input no server of this run would have logged
    now."""
    try:
        read = _HEADER.validate_json(json.dumps(header))
    except ValidationError as error:
        detail = f"record {number}: {first_complaint(error)}"
        raise JournalError(str(path), detail) from None
    fault = next(_bounds(header, "it"), "")
    if not fault and isinstance(read, _TurnHeader):
        fault = _turn_fault(read, vector, ledger, center)
    if not fault and isinstance(read, _ChangeHeader):
        fault = next(_change_faults(ledger.job, read.epochs, read.workers), "")
    if fault:
        raise JournalError(str(path), f"record {number}: {fault}")


def _turn_fault(read: _TurnHeader, vector: Vector | None, ledger: Ledger, center: Center) -> str:
    """Why a turn cannot be taken as it was logged; "" if it can."""
    if vector is not None and not center.fits(vector):
        return f"its vector is [{vector.size}], which the center is not"
    commit: Commit | None = read.turn.commit
    if commit is None or read.refusal is not None or ledger.stopped:
        return ""
    if min(commit.steps, commit.samples) < 0:
        return "its commit is of less than no samples"
    verdict = ledger.check(commit)
    if isinstance(verdict, Refusal):
        return f"its commit would be refused: {verdict}"
    if verdict is None and commit.steps and not ledger.rule.lock_free:
        if vector is None:
            return "its commit has no vector"
        if ledger.rule.needs_base and not center.has_base(commit.worker):
            return "its commit's worker has pulled nothing"
    return ""


def _bounds(value: Any, where: str) -> Iterator[str]:
    """A complaint for each whole number that is too large or too small."""
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, dict):
            waiting += held.values()
        elif isinstance(held, list):
            waiting += held
        elif isinstance(held, int) and abs(held) > _LARGEST:
            yield f"{where} holds a whole number of more than 53 bits"


def _ledger_faults(ledger: Ledger, read: _LedgerFields) -> Iterator[str]:
    told = {"epochs": read.epochs, "workers": read.workers}
    job, leases = changed(ledger.job, told), read.leases
    fault = next(_change_faults(ledger.job, job.epochs, job.workers), "")
    if fault:
        yield fault
        return
    pools = Positions(job).pools
    following = leases.next if isinstance(leases.next, list) else [leases.next]
    whole = None if job.samples is None else job.samples * job.epochs
    if whole is not None and leases.stop != whole:
        yield f"its run is of {leases.stop} samples in all, not {whole}"
    if len(following) != len(pools) or any(
        not start <= at <= (end if end is not None else _LARGEST)
        for at, (start, end) in zip(following, pools, strict=False)
    ):
        yield "its pools of samples are not those of the job"
    spans = [*leases.returned, *((start, stop) for _, start, stop in leases.held)]
    if any(start >= stop or (whole is not None and stop > whole) for start, stop in spans):
        yield "a lease is of no samples of the job"
    held = {number: (number, start, stop) for number, start, stop in leases.held}
    of_members = [
        (m.lease.number, m.lease.start, m.lease.stop)
        for _, m in read.members
        if m.lease is not None
    ]
    if len(held) < len(leases.held) or sorted(held.values()) != sorted(of_members):
        yield "its leases are not those that its workers hold"
    for name, listed in (("members", read.members), ("waiting", read.waiting)):
        if len({worker for worker, _ in listed}) < len(listed):
            yield f"its {name} name a worker twice"


def _change_faults(job: Job, epochs: int, workers: int) -> Iterator[str]:
    """Faults of epochs and workers that a run of this job goes on with."""
    if epochs < job.epochs or (job.samples is None and epochs != job.epochs):
        yield f"its run of {job.epochs} epochs goes on with {epochs}"
    if job.partition != LEASED and workers != job.workers:
        yield f"its shares for {job.workers} workers go on with {workers}"


def _vector_faults(
    vectors: dict[str, Vector], center: Center, momentum: Momentum | None
) -> Iterator[str]:
    expected = {name: v for name, v in center.vectors().items() if not _BASE.fullmatch(name)}
    if momentum is not None:
        expected |= {f"momentum {name}": v for name, v in momentum.save()[1].items()}
    for name in expected:
        if name not in vectors:
            yield f"it has no vector {name!r}"
    for name, vector in vectors.items():
        if name == "rows":
            if vector.dtype != np.float64 or vector.size % len(COLUMNS):
                yield "its rows are not of a row's fields"
                continue
            counts = [i for i, name in enumerate(COLUMNS) if name in COUNTS]
            if not (np.abs(vector.reshape(-1, len(COLUMNS))[:, counts]) <= _LARGEST).all():
                yield "a count in its rows is no whole number"
        elif name not in expected and not _BASE.fullmatch(name):
            yield f"its vector {name!r} is none of the rule's"
        else:
            like = expected.get(name, expected["theta"])
            if (vector.dtype, vector.shape) != (like.dtype, like.shape):
                yield (
                    f"its vector {name!r} is {vector.dtype} [{vector.size}], not {like.dtype} "
                    f"[{like.size}]"
                )
    if "rows" not in vectors:
        yield "it has no vector 'rows'"


def _agreement_faults(
    ledger: Ledger, read: _Snapshot, vectors: dict[str, Vector], center: Center
) -> Iterator[str]:
    """Faults of what the ledger, the heads and the vectors must say of the same workers."""
    members = dict(read.ledger.members)
    heads = {worker for worker, _, _ in read.heads}
    needs_base = ledger.rule.needs_base
    for worker, member in members.items():
        if needs_base and member.lease is not None and f"base {worker}" not in vectors:
            yield f"worker {worker} holds a lease, but nothing that it has pulled"
    for worker, waiting in read.ledger.waiting:
        turn = waiting.turn
        if worker not in members or turn.worker != worker:
            yield f"worker {worker} waits, but is no member"
        elif waiting.staged:
            commit, lease = turn.commit, members[worker].lease
            if commit is None or commit.worker != worker or lease is None:
                yield f"worker {worker} waits with a commit of no lease"
            elif commit.steps < 0 or commit.samples < 0:
                yield f"worker {worker} waits with a commit of less than no samples"
            elif commit.steps and (worker not in heads or f"staged {worker}" not in vectors):
                yield f"worker {worker} waits with a commit that has no vector"
