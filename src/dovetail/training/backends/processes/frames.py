"""Packs and unpacks the packets of the link between a worker and the server.

    magic 4 │ kind 1 │ checksum 4 of kind and JSON │ JSON

Vectors travel beside the packets, in the worker's block. The link is a pair of Unix sockets that
keep packets whole. Nothing on it is unpickled; the server checks what arrives field by field.
"""

import json
import struct
import zlib
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, TypeVar

from dovetail.training.records import Commit, Lease, Refusal, Reply, Turn, Verdict

PACKET_BYTES = 1 << 16
_HEAD = struct.Struct("<4sBI")
_MAGIC = b"DVT1"
_ACCEPTED: dict[object, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
}
Record = TypeVar("Record")


class Kind(IntEnum):
    JOIN = 1  # worker: here I am, or again; answered by JOINED
    JOINED = 2
    TURN = 3  # answered by REPLY
    REPLY = 4
    LEAVE = 5  # worker: I am done; not answered
    COPY = 6  # worker: write the center to my inbox; answered by COPIED
    COPIED = 7


@dataclass(frozen=True)
class VectorHeader:
    """The size, type and checksum that the vector in the worker's inbox should have."""

    elements: int
    dtype: str
    checksum: int


def pack(kind: Kind, content: dict[str, Any]) -> bytes:
    """The packet of this kind and content."""
    # numpy's numbers become Python's; nan and infinity keep their JavaScript names.
    body = json.dumps(content, separators=(",", ":"), default=lambda value: value.item()).encode()
    return _HEAD.pack(_MAGIC, kind, zlib.crc32(body, kind)) + body


def unpack(packet: bytes) -> tuple[Kind, dict[str, Any]] | None:
    """The packet's kind and content; None if it has another format, or was changed on its way."""
    if len(packet) < _HEAD.size:
        return None
    magic, kind, checksum = _HEAD.unpack_from(packet)
    body = packet[_HEAD.size :]
    if magic != _MAGIC or kind not in set(Kind) or zlib.crc32(body, kind) != checksum:
        return None
    try:
        content = json.loads(body)
    except ValueError:
        return None
    return (Kind(kind), content) if isinstance(content, dict) else None


def pack_turn(turn: Turn, payload: VectorHeader | None) -> bytes:
    carried = None if payload is None else asdict(payload)
    return pack(Kind.TURN, {"turn": asdict(turn), "payload": carried})


def turn_of(content: dict[str, Any]) -> tuple[Turn, VectorHeader | None] | None:
    """The turn and its vector's header; None if a field is missing or wrong."""
    turn_fields, header_fields = content.get("turn"), content.get("payload")
    if not isinstance(turn_fields, dict):
        return None
    commit = _record(Commit, turn_fields.get("commit"))
    payload = _record(VectorHeader, header_fields)
    if (commit is None) != (turn_fields.get("commit") is None):
        return None
    if (payload is None) != (header_fields is None):
        return None
    flags = _record(_Flags, {name: turn_fields.get(name) for name in ("worker", "lease", "pull")})
    if flags is None:
        return None
    return Turn(flags.worker, commit, flags.lease, flags.pull), payload


@dataclass(frozen=True)
class _Flags:
    worker: int
    lease: bool
    pull: bool


def pack_reply(reply: Reply) -> bytes:
    return pack(Kind.REPLY, asdict(reply))


def reply_of(content: dict[str, Any]) -> Reply:
    """The server's reply. It is not checked, since server and worker are of one program."""
    lease, verdict, refusal = content["lease"], content["verdict"], content["refusal"]
    return Reply(
        verdict=None if verdict is None else Verdict(verdict),
        refusal=None if refusal is None else Refusal(refusal),
        lease=None if lease is None else Lease(**lease),
        done=content["done"],
        clock=content["clock"],
        samples=content["samples"],
        stop=content["stop"],
    )


def _record(kind: type[Record], content: object) -> Record | None:
    """The record with the fields in `content`; None if a field is missing, unknown or of another
    type."""
    if not isinstance(content, dict):
        return None
    expected = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]
    if content.keys() != expected.keys():
        return None
    if any(type(content[name]) not in _ACCEPTED[kind] for name, kind in expected.items()):
        return None
    return kind(**content)
