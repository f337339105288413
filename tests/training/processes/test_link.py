"""The worker's end of a link, against a server that is a list of answers."""

import os
import socket
import threading
from types import SimpleNamespace

import numpy as np

from dovetail.training.backends.messages import Connect
from dovetail.training.backends.processes import frames
from dovetail.training.backends.processes.worker import WorkerLink
from dovetail.training.records import Job, Lease, Refusal, Reply, Turn, Verdict
from dovetail.training.worker import Ask


def asked(answers):
    """What a worker was told in the end, and the packets that it sent for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = SimpleNamespace(
        receive=lambda: Connect(0, 0.0), receive_descriptor=lambda: os.dup(theirs.fileno())
    )
    plan = SimpleNamespace(life=0, wire="none", job=Job("r", 4, 8, 1, 1))
    memory = SimpleNamespace(inbox=np.zeros(4, np.float32), outbox=np.ones(4, np.float32))
    heard = []

    def serve():
        for answer in [frames.pack(frames.Kind.JOINED, {"sequence": 0}), *answers]:
            heard.append(ours.recv(frames.PACKET_BYTES))
            ours.send(answer)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    with ours, theirs:
        link = WorkerLink(channel, plan, memory, None)
        assert link.join() == 0
        told = link.ask(Ask(Turn(0, lease=True, pull=True)))
        server.join(10)
    link._socket.close()
    return told, heard[1:]


def test_a_turn_that_the_server_could_not_read_is_said_again():
    unread = frames.pack_reply(Reply(Verdict.REFUSED, Refusal.CHECKSUM))
    lease = Lease(0, 0, 1)
    told, packets = asked([unread, unread, frames.pack_reply(Reply(lease=lease))])
    assert told.reply.lease == lease
    assert told.center.tolist() == [1.0] * 4
    assert len(packets) == 3
    assert len(set(packets)) == 1


def test_a_commit_whose_vector_was_changed_is_not_said_again():
    lease = Lease(3, 0, 1)
    for reply in (
        Reply(Verdict.REFUSED, Refusal.CHECKSUM, lease=lease),
        Reply(Verdict.REFUSED, Refusal.CHECKSUM, done=True),
    ):
        told, packets = asked([frames.pack_reply(reply)])
        assert told.reply == reply
        assert len(packets) == 1
