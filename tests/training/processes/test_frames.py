import json
import math
import zlib
from dataclasses import replace

import pytest

from dovetail.training.backends.processes import frames
from dovetail.training.records import Commit, Lease, Refusal, Reply, Turn, Verdict

COMMIT = Commit("run", 1, 2, 3, 4, 5, 6, 0.1, math.inf, 1.5, 2.5)
PAYLOAD = frames.VectorHeader(10, "float32", 2**63 + 1)


def told(turn, payload=None):
    kind, content = frames.unpack(frames.pack_turn(turn, payload))
    assert kind is frames.Kind.TURN
    return frames.turn_of(content)


@pytest.mark.parametrize(
    ("turn", "payload"),
    [
        (Turn(1, COMMIT, True, True), PAYLOAD),
        (Turn(1, COMMIT, True, True), None),
        (Turn(7, None, False, True), None),
    ],
)
def test_a_turn_arrives_as_it_was_sent(turn, payload):
    assert told(turn, payload) == (turn, payload)


def test_a_loss_that_is_no_number_travels():
    turn = Turn(1, replace(COMMIT, loss=math.nan))
    assert math.isnan(told(turn)[0].commit.loss)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(Verdict.REFUSED, Refusal.NORM, None, False, 3, 4, True),
        Reply(None, None, Lease(1, 2, 3), True, 3, 4, False),
    ],
)
def test_a_reply_arrives_as_it_was_sent(reply):
    kind, content = frames.unpack(frames.pack_reply(reply))
    assert (kind, frames.reply_of(content)) == (frames.Kind.REPLY, reply)


def test_a_change_of_any_bit_is_noticed():
    packet = frames.pack_turn(Turn(1, COMMIT, True, True), PAYLOAD)
    for bit in range(8 * len(packet)):
        changed = bytearray(packet)
        changed[bit // 8] ^= 1 << bit % 8
        assert frames.unpack(bytes(changed)) is None
    assert frames.unpack(packet[:5]) is None
    assert frames.unpack(packet[:-1]) is None


def broken(change):
    """What is understood of a turn whose JSON was changed by its sender."""
    _, content = frames.unpack(frames.pack_turn(Turn(1, COMMIT, True, True), PAYLOAD))
    change(content)
    return frames.turn_of(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("turn"),
        lambda c: c["turn"].pop("lease"),
        lambda c: c["turn"].update(worker="1"),
        lambda c: c["turn"].update(worker=True),
        lambda c: c["turn"].update(pull=1),
        lambda c: c["turn"].update(commit=[]),
        lambda c: c["turn"]["commit"].update(sequence=1.0),
        lambda c: c["turn"]["commit"].update(extra=1),
        lambda c: c["turn"]["commit"].pop("run"),
        lambda c: c["payload"].update(elements=None),
        lambda c: c.update(payload=3),
    ],
)
def test_a_turn_with_a_missing_or_wrong_field_is_not_understood(change):
    assert broken(change) is None


def test_what_is_no_packet_of_ours_is_not_understood():
    body = b"[1, 2]"
    head = frames._HEAD.pack(b"DVT1", 3, zlib.crc32(body, 3))
    assert frames.unpack(head + body) is None  # JSON, but no object
    body = b"\x80\x05K\x01."  # a pickle
    assert frames.unpack(frames._HEAD.pack(b"DVT1", 3, zlib.crc32(body, 3)) + body) is None
    assert frames.unpack(json.dumps({"turn": None}).encode()) is None
