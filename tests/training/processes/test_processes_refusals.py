"""Over a real link to a real server process, with this process as its worker and supervisor."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.runtime.processes import launch
from dovetail.training.backends.contract import Guard, ServerPlan, Storage
from dovetail.training.backends.messages import (
    AskCopy,
    AskReport,
    Connect,
    Ready,
    ServerStart,
)
from dovetail.training.backends.processes import frames
from dovetail.training.backends.processes.memory import CenterMemory, WorkerMemory
from dovetail.training.checks import copy_and_checksum
from dovetail.training.records import Commit, Job, Refusal, Turn, Verdict
from dovetail.training.rules import make_rule
from dovetail.training.supervisor import CenterCopy, ServerReport

SIZE = 1000
JOB = Job("run", SIZE, 8000, 1, 2, 1, 1)


class Bench:
    """A server process, and worker 0's end of a link to it."""

    def __init__(self, process, center):
        self.process, self.center = process, center
        self.ready = self.hear(Ready)
        self.memory = WorkerMemory.create(JOB)
        self.sequence = self.events = 0
        self.connect()

    def hear(self, kind):
        word = self.process.receive()
        assert isinstance(word, kind)
        return word

    def connect(self):
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process.send(Connect(0, self.ready.origin))
            self.process.send_descriptor(theirs.fileno())
            self.process.send_descriptor(self.memory.block.descriptor)
        self.say(frames.pack(frames.Kind.JOIN, {"replaces": False}))
        self.reply = self.turn(Turn(0, lease=True, pull=True))

    def say(self, packet):
        self.end.send(packet)
        return frames.unpack(self.end.recv(frames.PACKET_BYTES))

    def turn(self, turn, payload=None):
        return frames.reply_of(self.say(frames.pack_turn(turn, payload))[1])

    def commit(self, vector, *, spoil=lambda memory: None, payload=None, **changes):
        """The answer to a commit of `vector`, of which `changes` and `spoil` make another."""
        found = copy_and_checksum(self.memory.inbox, vector)
        spoil(self.memory)
        clock, lease = self.reply.clock, self.reply.lease.number
        head = Commit("run", 0, self.sequence + 1, clock, lease, 2, 1, 0.1, 0.5)
        head = replace(head, **changes)
        payload = payload or frames.VectorHeader(SIZE, "float32", found)
        reply = self.turn(Turn(0, head, lease=True, pull=True), payload)
        if reply.verdict is Verdict.APPLIED:
            self.sequence += 1
        self.reply = reply
        return reply

    def theta(self):
        self.process.send(AskCopy(0))
        self.hear(CenterCopy)
        return np.array(self.center.copy)

    def report(self):
        """With all that happened since the last one."""
        self.process.send(AskReport(0, self.events))
        report = self.hear(ServerReport)
        self.events += len(report.events)
        return report


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A server that has taken twelve good commits."""
    center = CenterMemory.create(JOB, np.linspace(-1, 1, SIZE, dtype=np.float32))
    storage = Storage(tmp_path_factory.mktemp("run"))
    plan = ServerPlan(
        JOB,
        make_rule("downpour"),
        guard=Guard(norm_factor=50.0, norm_limit=1e4),
        storage=storage,
    )
    with launch("dovetail.training.backends.processes.server:serve") as process:
        process.send(ServerStart(plan))
        process.send_descriptor(center.block.descriptor)
        bench = Bench(process, center)
        rng = np.random.default_rng(0)
        for _ in range(12):
            reply = bench.commit(rng.standard_normal(SIZE).astype(np.float32))
            assert reply.verdict is Verdict.APPLIED
        yield bench


def nan_at(index, value=np.nan):
    vector = np.full(SIZE, 0.01, np.float32)
    vector[index] = value
    return vector


def flip(memory):
    memory.inbox.view(np.uint32)[500] ^= 1 << 20


GOOD = np.full(SIZE, 0.01, np.float32)
CASES = {
    "a flipped bit": (GOOD, {"spoil": flip}, Refusal.CHECKSUM),
    "a wrong size": (GOOD, {"payload": frames.VectorHeader(SIZE - 1, "float32", 0)}, Refusal.SHAPE),
    "a wrong type": (GOOD, {"payload": frames.VectorHeader(SIZE, "float64", 0)}, Refusal.SHAPE),
    "another run": (GOOD, {"run": "another"}, Refusal.RUN),
    "nan": (nan_at(SIZE - 1), {}, Refusal.NOT_FINITE),
    "inf": (nan_at(0, -np.inf), {}, Refusal.NOT_FINITE),
    "an exploding norm": (GOOD * 1e5, {}, Refusal.NORM),
    "a norm over the limit": (GOOD * 1e8, {}, Refusal.NORM),
    "a lease it does not hold": (GOOD, {"lease": 77}, Refusal.LEASE),
    "a skipped number": (GOOD, {"sequence": 99}, Refusal.SEQUENCE),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_commit_is_refused_and_counted_and_changes_nothing(bench, name):
    vector, how, refusal = CASES[name]
    before, known = bench.theta(), bench.report()
    reply = bench.commit(vector, **how)
    assert (reply.verdict, reply.refusal) == (Verdict.REFUSED, refusal)
    after = bench.report()
    assert [event.detail for event in after.events] == [refusal.value]
    assert (after.total[0], after.samples) == (known.total[0], known.samples)
    assert bench.theta().tobytes() == before.tobytes()
    bench.reply = bench.turn(Turn(0, lease=True, pull=True))
    assert bench.commit(GOOD).verdict is Verdict.APPLIED  # and the link is as good as before
    assert (bench.theta() == before + GOOD).all()


def test_a_commit_that_is_sent_twice_is_applied_once(bench):
    head = Commit("run", 0, bench.sequence, 0, 0, 2, 1, 0.1, 0.5)
    before = bench.theta()
    found = copy_and_checksum(bench.memory.inbox, GOOD)
    payload = frames.VectorHeader(SIZE, "float32", found)
    reply = bench.turn(Turn(0, head, lease=True, pull=True), payload)
    assert reply.verdict is Verdict.DUPLICATE
    assert reply.lease == bench.reply.lease
    assert bench.theta().tobytes() == before.tobytes()


def test_a_packet_that_cannot_be_read_is_refused_and_counted(bench):
    before = bench.theta()
    bench.report()
    for packet in (b"nonsense", frames.pack(frames.Kind.TURN, {"turn": 3})):
        kind, content = bench.say(packet)
        assert kind is frames.Kind.REPLY
        assert frames.reply_of(content).refusal is Refusal.CHECKSUM
    stranger = Turn(5, lease=True, pull=True)  # who it is, its link says
    assert bench.turn(stranger).refusal is Refusal.CHECKSUM
    assert len(bench.report().events) == 3
    assert bench.theta().tobytes() == before.tobytes()


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_server_sleeps_after_its_worker_has_gone(bench):
    bench.end.close()
    while not any(event.kind == "lost" for event in bench.report().events):
        pass
    before = cpu_seconds(bench.process.pid)
    time.sleep(1.0)
    assert cpu_seconds(bench.process.pid) - before < 0.1
    lost = bench.reply.lease
    bench.connect()
    assert (bench.reply.lease.start, bench.reply.lease.stop) == (lost.start, lost.stop)
    assert bench.reply.lease.number > lost.number  # its samples are handed out again
