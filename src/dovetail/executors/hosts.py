"""Runs a plan on several hosts: each rank runs the shares of its own devices, as on one host, and a
bridge carries tensors between ranks.

    rank 0                                                      rank 1
    worker of cpu0 ─ copy, flag ─► block ═ isend ═══ irecv ═► block ─ flag ─► worker of cpu1
                                            bridge                            reads the slot itself

Every rank cuts the whole plan into the same shares, so that a slot has one place in the blocks of
all. Each directed pair of devices on two ranks has a group of two ranks of its own and a thread on
both. Messages of a pair are sent in the order of the sender's share, which is that of the
simulator. All receives of a step are posted before it begins. So no send waits for a receive, and
no pair of devices for another pair.

Between GPUs of two ranks tensors go straight, over NCCL (`executors.gpus.peers`). Tensors from or
to a CPU go through the block, and so do control edges.

A step begins on all ranks at one moment, by clocks that are compared when the plan is loaded. The
bridge has a seat in the block's barrier: it lets a rank's devices begin, and ends the step once
what they sent has left.

Rank 0 gives the inputs and the weights. The others' are not read.
"""

import hashlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.errors import PeerLostError, UsageError
from dovetail.executors.gpus.peers import PeerPair
from dovetail.executors.rank_checkpoints import RankCheckpoints
from dovetail.executors.shares import Share, Shares, share_out, strides_at
from dovetail.executors.timelines import progress_of
from dovetail.executors.workers import Workers
from dovetail.frontends.instructions import (
    NEXT,
    SKEW,
    AwaitFlag,
    BlockSlot,
    SendTensor,
    ops_of,
    strides_offset,
)
from dovetail.frontends.program import Captured
from dovetail.machine import Machine
from dovetail.machine.files import machine_to_dict
from dovetail.machine.gpus import card_of
from dovetail.plans import Plan
from dovetail.runtime.compiling import kernel
from dovetail.runtime.cuda import cuda_here
from dovetail.runtime.formats import to_file
from dovetail.runtime.ranks import BEAT_SECONDS, RankPlace, Ranks
from dovetail.runtime.shared import Block, Layout
from dovetail.runtime.stopped import state_of
from dovetail.runtime.timers import Repeats, time_steps
from dovetail.runtime.torch_versions import broadcast
from dovetail.runtime.waiting import ABORTED, SPIN_NS, address_of, barrier, publish, wait
from dovetail.runtime.watch import Watch
from dovetail.units import format_seconds

_PINGS = 10
"""Clocks are compared by so many messages to and fro, of which the fastest counts."""
_MARGIN_NS = 1_000_000
"""A step begins this long after the slowest message between all ranks has arrived."""
HUNG_SECONDS, _HUNG_FACTOR = 6.0, 20.0
"""An op that runs for `HUNG_SECONDS` and `_HUNG_FACTOR` times its predicted seconds hangs. So does
a device whose process somebody has stopped for `HUNG_SECONDS`."""
_SLOWEST_COPY = 1e8
"""A copy into the block has more bytes per second than this, also into memory that is new."""
_SPUN_NS = 200_000
"""Before a step begins, the bridge spins for this long instead of sleeping."""


def deal(machine: Machine, hosts: Sequence[str]) -> tuple[int, ...]:
    """[devices] the rank that runs each device of the machine.

    hosts   [ranks] name of the host that each rank is on

    If the machine's devices name hosts, a rank runs all devices of its host, or, where the host has
    as many ranks as devices, one of them each. Otherwise each rank runs one device, in order.
    Raises `UsageError` where that does not come out even.
    """
    devices = machine.devices
    nothing = [device.name for device in devices if device.kind == "host"]
    if nothing:
        says = (
            f"device {nothing[0]!r} of {machine.name} runs nothing; inputs need a rank to start on"
        )
        raise UsageError("machine", f"{says}, so make a CPU the machine's host")
    named = list(dict.fromkeys(device.host for device in devices))
    if named == [""]:
        if len(hosts) != len(devices):
            says = f"there are {len(hosts)} ranks, but {machine.name} has {len(devices)} devices"
            raise UsageError("WORLD_SIZE", f"{says}; start one rank a device, or name their hosts")
        return tuple(range(len(devices)))
    if "" in named:
        lacking = next(device.name for device in devices if not device.host)
        raise UsageError("machine", f"device {lacking!r} of {machine.name} names no host")
    for rank, host in enumerate(hosts):
        if host not in named:
            says = f"rank {rank} is on host {host!r}, but {machine.name} has {', '.join(named)}"
            raise UsageError("host", f"{says}; DOVETAIL_HOST names a rank's host where it is other")
    found = [-1] * len(devices)
    for host in named:
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        of_host = [index for index, device in enumerate(devices) if device.host == host]
        if len(ranks) not in (1, len(of_host)):
            says = f"host {host!r} has {len(of_host)} devices and {len(ranks)} ranks"
            raise UsageError("WORLD_SIZE", f"{says}; start one rank there, or one a device")
        for place, index in enumerate(of_host):
            found[index] = ranks[place if len(ranks) > 1 else 0]
    return tuple(found)


@dataclass(frozen=True)
class RankMessage:
    """A tensor, or the end of an op, that goes from a device of one rank to a device of another.

    flag           offset of its flag in the blocks of both ranks
    slot           None: only the flag
    share, index   place of its `SendTensor`: which share, and which instruction there
    """

    flag: int
    slot: BlockSlot | None
    share: int
    index: int


def messages_of(shares: Shares, ranks: Sequence[int]) -> dict[tuple[int, int], list[RankMessage]]:
    """(source, destination) -> the messages between two devices on two ranks, in the order in which
    they are sent. The pairs are in order of their devices."""
    found: dict[tuple[int, int], list[RankMessage]] = defaultdict(list)
    for number, share in enumerate(shares.shares):
        for index, sent in enumerate(share.instructions):
            if isinstance(sent, SendTensor) and ranks[share.device] != ranks[sent.destination]:
                message = RankMessage(sent.flag, sent.slot, number, index)
                found[share.device, sent.destination].append(message)
    return dict(sorted(found.items()))


_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Bytes of an element -> what it is moved as."""


class _SlotBuffer:
    """The memory that a message is sent from, or received into: a tensor, its mark and its strides.
    The strides count if the mark says so.

    It is the slot itself, so that nothing is copied. A tensor with gaps, as a part of a split one,
    is packed: the gaps would take as long to send as what is between them.
    """

    def __init__(self, block: Block, slot: BlockSlot | None) -> None:
        self._block, self._slot = block, slot
        self._packed: NDArray[Any] | None = None
        if slot is None:
            memory = np.zeros(1, dtype=np.uint8)
            self._mark, self.bytes = memory, torch.from_numpy(memory)
            return
        memory = block.view(slot.offset, (slot.sent_bytes,), np.uint8)
        strides_place = strides_offset(slot.bytes)
        self._slot_strides = memory[strides_place:]
        view = self._in_slot(0)
        if view.nbytes < slot.bytes:
            strides_place = view.nbytes + 1
            memory = np.zeros(strides_place + len(self._slot_strides), dtype=np.uint8)
            self._packed = memory[: view.nbytes].view(view.dtype).reshape(view.shape)
        self._strides = memory[strides_place:]
        # The byte before the strides is free, whatever the address of the copy in a slot.
        self._mark = memory[strides_place - 1 : strides_place]
        self.bytes = torch.from_numpy(memory)

    def pack(self, mark: int) -> None:
        """Make ready what is sent, of which the copy in the slot has this mark."""
        if self._packed is not None:
            np.copyto(self._packed, self._in_slot(mark))
            self._strides[:] = self._slot_strides
        self._mark[0] = mark

    def unpack(self) -> int:
        """Put what has arrived into its slot; return its mark."""
        mark = int(self._mark[0])
        if self._packed is not None:
            self._slot_strides[:] = self._strides
            np.copyto(self._in_slot(mark), self._packed)
        return mark

    def _in_slot(self, mark: int) -> NDArray[Any]:
        """The tensor in its slot, without what repeats itself."""
        slot = self._slot
        assert slot is not None
        word = np.dtype(_WORDS[getattr(torch, slot.dtype).itemsize])
        ends = zip(slot.shape, slot.strides, strict=True)
        shape = [size if stride else min(size, 1) for size, stride in ends]
        offset = slot.offset + (mark & SKEW)
        flat = self._block.view(offset, (slot.bytes // word.itemsize,), word)
        strides = [stride * word.itemsize for stride in strides_at(self._block, slot, mark)]
        return np.lib.stride_tricks.as_strided(flat, shape, strides)


class _Pair:
    """This rank's end of the messages between two devices: a group, and a thread.

    other      the rank of the other end
    buffers    of each message
    arrivals   [messages] when each arrived in the last step, by this rank's clock in ns
    """

    def __init__(self, block: Block, messages: list[RankMessage], group: Any, other: int) -> None:
        self.group, self.other, self.messages = group, other, messages
        self.base = int(block.bytes.ctypes.data)
        self.buffers = [_SlotBuffer(block, message.slot) for message in messages]
        self.arrivals = np.zeros(len(messages), dtype=np.int64)


class _Sender(_Pair):
    """Sends each message as soon as its flag is set."""

    def run(self, number: int, abort: int) -> None:
        """All messages of a step; returns when they have left, or when the step was aborted."""
        works = []
        for tag, (message, buffer) in enumerate(zip(self.messages, self.buffers, strict=True)):
            reached = wait(self.base + message.flag, number * NEXT, abort, SPIN_NS)
            if reached == ABORTED:
                return
            buffer.pack(reached % NEXT)
            works.append(self.group.send([buffer.bytes], 1, tag))
        for work in works:
            work.wait()


class _Receiver(_Pair):
    """Receives into slots, and sets each message's flag when it has arrived."""

    def post(self) -> None:
        """Post the receives of a step."""
        self.works = [
            self.group.recv([buffer.bytes], 0, tag) for tag, buffer in enumerate(self.buffers)
        ]

    def run(self, number: int, abort: int) -> None:
        for place, (message, work) in enumerate(zip(self.messages, self.works, strict=True)):
            work.wait()
            self.arrivals[place] = time.perf_counter_ns()
            mark = self.buffers[place].unpack()
            publish(self.base + message.flag, number * NEXT + mark)


@dataclass(frozen=True)
class HostPart:
    """The part of a run that one host of several has.

    shares    of all devices of the plan
    sources   tensors of the sources that this host keeps; None: all
    direct    (source, destination) GPUs of two ranks between which tensors go straight, once these
              are connected
    """

    shares: Shares
    sources: Collection[int] | None = None
    direct: Collection[tuple[int, int]] = ()


class Bridge:
    """What a rank does together with the others for a plan on several hosts.

    All ranks call the same methods in the same order. Where a rank was lost they raise
    `RankLostError`.

    rank_of       [devices] the rank that runs each
    devices       those of this rank
    part          what this rank has of the plan
    owned         tensors of the sources that this rank is the first to read; rank 0 has those that
                  nobody reads
    checkpoints   those that all ranks write together
    """

    def __init__(self, plan: Plan, captured: Captured, ranks: Ranks, seed: int) -> None:
        """Raises `UsageError` if the devices do not deal out to the ranks, or the ranks have
        different plans."""
        self.plan, self.captured, self.ranks = plan, captured, ranks
        self.rank_of = deal(plan.machine, ranks.hosts)
        self.devices = tuple(d for d, rank in enumerate(self.rank_of) if rank == ranks.rank)
        # All ranks must run the same plan of the same step, with one seed.
        written = [to_file(plan), machine_to_dict(plan.machine)]
        facts = {
            "plan": hashlib.sha256(json.dumps(written).encode()).hexdigest()[:16],
            "graph": captured.graph.fingerprint,
            "seed": str(seed),
            "torch": torch.__version__,
        }
        for rank, others in enumerate(ranks.gather("facts", facts)):
            for name, value in facts.items():
                if others.get(name) != value:
                    says = f"rank {rank} has {others.get(name)}, and rank {ranks.rank} has {value}"
                    raise UsageError(name, f"{says}; all ranks must have the same")
        self.shares = share_out(plan, captured.graph, captured.program, self.rank_of)
        # [ranks] tensors of the sources that each reads; rank 0 keeps all, to hand them out.
        self._sources: list[list[int]] = [[] for _ in range(ranks.ranks)]
        for share in self.shares.shares:
            self._sources[self.rank_of[share.device]] += [tensor for tensor, _ in share.sources]
        before = {tensor for part in self._sources[: ranks.rank] for tensor in part}
        self.owned = set(self._sources[ranks.rank]) - before
        if ranks.rank == 0:
            self.owned |= self.shares.sources.keys() - {t for part in self._sources for t in part}
        self._pairs = messages_of(self.shares, self.rank_of)
        self._direct = self._take_direct()
        kept = None if ranks.rank == 0 else set(self._sources[ranks.rank])
        self.part = HostPart(self.shares, kept, [*self._direct])
        self.checkpoints = RankCheckpoints(ranks)
        self.number = 0
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = []
        self._ended: SimpleQueue[None] = SimpleQueue()

    def connect(
        self,
        block: Block,
        workers: Workers,
        connect_peers: Callable[[RankPlace, Sequence[PeerPair]], None],
    ) -> None:
        """Connect with the other ranks, once the plan is loaded.

        connect_peers   connects the GPUs of this rank with those of others
        """
        ranks, self.block = self.ranks, block
        own = tuple(s for s in self.shares.shares if s.device in workers.devices)
        self.own_shares = own
        # With a view of it the block stays mapped after a step has failed, when a rank may yet be
        # lost and have this one abort.
        self._abort_flag = block.view(self.shares.abort, (1,), np.int64)
        self._abort_address = address_of(self._abort_flag)
        self._abort = partial(publish, self._abort_address, 1)
        self._workers, self._watch = workers, Watch(BEAT_SECONDS)
        ranks.on_lost(self._abort)
        ranks.doing = self._doing
        ranks.watch(self._look)
        self._all = ranks.group("all", tuple(range(ranks.ranks)))
        # This rank's end of each pair. All ranks go through the pairs in one order, so that no two
        # wait for each other.
        self._ends: list[_Sender | _Receiver] = []
        names = self.plan.machine.device_names
        for (source, destination), messages in self._pairs.items():
            ends = self.rank_of[source], self.rank_of[destination]
            if ranks.rank in ends:
                group = ranks.group(f"{names[source]}->{names[destination]}", ends)
                sends = ranks.rank == ends[0]
                kind, other = (_Sender, ends[1]) if sends else (_Receiver, ends[0])
                self._ends.append(kind(block, messages, group, other))
        self._flags = int(block.bytes.ctypes.data) + self.shares.barrier
        # A rank whose devices run nothing has the barrier to itself.
        self._seats = own[0].seats if own else 1
        for _ in range(len(self._ends) + 1):
            queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            self._queues.append(queue)
            threading.Thread(target=_serve, args=(queue,), name="bridge", daemon=True).start()
        peers = []
        for (source, destination), name in self._direct.items():
            ends = self.rank_of[source], self.rank_of[destination]
            if ranks.rank in ends:
                sends = ranks.rank == ends[0]
                peers.append(PeerPair(name, source, destination, sends, ends[int(sends)]))
        try:
            ranks.wait_for(lambda: connect_peers(ranks.place, peers))
        except PeerLostError as error:
            raise ranks.lost_behind(error.said, error.rank) from error
        # [ranks] a rank's clock less that of rank 0, and the slowest message, in ns
        self._offsets, self._slowest = ranks.wait_for(self._compare_clocks)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Within the block this rank's devices run the step of this number, and the bridge carries
        what crosses ranks. It begins on all ranks at one moment, and ends once all have ended."""
        ranks, self.number = self.ranks, number
        offset = self._offsets[ranks.rank]
        ranks.check()
        # All receives are posted before any rank begins.
        for end in self._ends:
            if isinstance(end, _Receiver):
                end.post()
        ready = self._gather([time.perf_counter_ns() - offset])
        begin = max(row[0] for row in ready) + self._slowest * ranks.ranks + _MARGIN_NS
        own, *queues = self._queues
        for end, queue in zip(self._ends, queues, strict=True):
            queue.put(partial(self._run_end, end, number))
        own.put(partial(self._meet, number, begin + offset))
        try:
            with ranks.waiting():
                yield
        except PeerLostError as error:
            raise ranks.lost_behind(error.said, error.rank) from error
        # A lost rank aborts the step, which its devices do not count as a failure.
        ranks.check()
        self._gather([number])

    def share_outputs(self) -> None:
        """Bring the step's outputs to all ranks."""

        def task() -> None:
            for share in self.shares.shares:
                for _, slot in share.outputs:
                    broadcast(self._all, self._bytes_at(slot), self.rank_of[share.device])

        self.ranks.wait_for(task)

    def spread(self, tensors: Iterable[int]) -> None:
        """Bring rank 0's values of these sources to the blocks of the ranks that read them."""
        self.ranks.wait_for(lambda: self._carry(tensors, outward=True))

    def fetch(self) -> None:
        """Bring the values of all sources from the blocks where they live to that of rank 0."""
        self.ranks.wait_for(lambda: self._carry(self.shares.sources, outward=False))

    def stamped(self) -> tuple[Share, ...]:
        """Bring the stamps of a step to rank 0. The shares of which this rank has stamps then."""
        self.ranks.wait_for(self._fetch_stamps)
        return self.shares.shares if self.ranks.rank == 0 else self.own_shares

    def close(self) -> None:
        """Carry nothing more, and look at this rank's devices no more."""
        self.ranks.doing = str
        self.ranks.unwatch(self._look)
        # A rank that is lost later must not write to the block, which is gone then.
        self.ranks.off_lost(self._abort)
        # The threads end once they have done what they were given.
        for queue in self._queues:
            queue.put(None)

    # ── A step ──

    def _run_end(self, end: "_Sender | _Receiver", number: int) -> None:
        try:
            end.run(number, self._abort_address)
        # Any error is told: the step would wait for ever for a pair that ends silently.
        except Exception as error:
            self.ranks.suspect(str(error), end.other)
            # The others of this rank are freed when the lost rank is known.
        else:
            self._ended.put(None)

    def _meet(self, number: int, begin_ns: int) -> None:
        time.sleep(max(begin_ns - _SPUN_NS - time.perf_counter_ns(), 0) / 1e9)
        while time.perf_counter_ns() < begin_ns:
            pass
        if self._barrier(2 * number - 1) == ABORTED:
            return
        for _ in self._ends:
            self._ended.get()
        self._barrier(2 * number)

    def _barrier(self, value: int) -> int:
        seats, abort = self._seats, self._abort_address
        return int(barrier(self._flags, seats, seats - 1, value, abort, SPIN_NS))

    def _doing(self) -> str:
        """The op that a device of this rank is at; "" between steps."""
        for share in self.own_shares:
            index = progress_of(share, self.block)[0]
            if index >= 0:
                return self.captured.graph.names[share.instructions[index].op]
        return ""

    def _look(self) -> tuple[str, str] | None:
        """Look whether a CPU device of this rank hangs: in an op, or because its process was
        stopped. (Op, what hangs), or None; see `runtime.ranks.Look`.

        The workers of GPUs do not say at which op they are.
        """
        self._watch.tick()
        states = {pid: state_of(pid) for pid in self._workers.pids}
        # A user who debugs one of them holds up the ops of others as well.
        if "t" in states.values():
            self._watch = Watch(BEAT_SECONDS)
            return None
        watch = self._watch
        for pid, state in states.items():
            if watch.still_seconds(("process", pid), state) >= HUNG_SECONDS and state == "T":
                return "", f"process {pid} of its devices was stopped for {HUNG_SECONDS:g} s"
        for share in self.own_shares:
            index = progress_of(share, self.block)[0]
            ran = watch.still_seconds(("device", share.device), (self.number, index))
            if index < 0 or isinstance(instruction := share.instructions[index], AwaitFlag):
                continue
            # Predicted seconds of what the instruction runs or sends.
            if isinstance(instruction, SendTensor):
                predicted = instruction.slot.bytes / _SLOWEST_COPY if instruction.slot else 0.0
            else:
                ops = list(ops_of(instruction)) or [instruction.op]
                of_ops = self.plan.compute_seconds[ops, share.device]
                predicted = float(np.where(np.isfinite(of_ops), of_ops, 0.0).sum())
            if ran >= HUNG_SECONDS + _HUNG_FACTOR * predicted:
                name = self.captured.graph.names[instruction.op]
                expected = format_seconds(predicted)
                return name, f"it has run for {ran:.0f} s, where {expected} are predicted"
        return None

    # ── Between ranks ──

    def _take_direct(self) -> dict[tuple[int, int], str]:
        """(source, destination) -> name of the group, for the GPUs of two ranks between which
        tensors go straight. These are taken out of what the bridge carries."""
        devices, me = self.plan.machine.devices, self.ranks.rank
        pairs = [
            (source, destination)
            for (source, destination), messages in self._pairs.items()
            if devices[source].torch_device and devices[destination].torch_device
            if any(message.slot is not None for message in messages)
        ]
        if not pairs:
            return {}
        # `DOVETAIL_NCCL=0`, as where NCCL does not work, has tensors of GPUs go through memory.
        own = {
            str(device): card_of(devices[device])
            for device in {end for pair in pairs for end in pair}
            if self.rank_of[device] == me and os.environ.get("DOVETAIL_NCCL") != "0"
            if cuda_here().can_reach_ranks()
        }
        told = self.ranks.gather("cards", own)
        cards = {int(device): str(card) for part in told for device, card in part.items()}
        found = {}
        for pair in pairs:
            # NCCL does not connect a GPU with itself.
            if len({cards[end] for end in pair if end in cards}) < 2:
                continue
            source, destination = (devices[end].name for end in pair)
            found[pair] = self.ranks.numbered(f"nccl/{source}->{destination}")
            self._pairs[pair] = [m for m in self._pairs[pair] if m.slot is None]
        self._pairs = {pair: messages for pair, messages in self._pairs.items() if messages}
        return found

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """[ranks] the int64s that each rank gave, as many on all."""

        def task() -> list[list[int]]:
            given = torch.tensor(numbers, dtype=torch.int64)
            rows = [torch.empty_like(given) for _ in range(self.ranks.ranks)]
            self._all.allgather([rows], [given]).wait()
            return [row.tolist() for row in rows]

        rows: list[list[int]] = self.ranks.wait_for(task)
        return rows

    def _compare_clocks(self) -> tuple[list[int], int]:
        """([ranks] each rank's clock less that of rank 0, slowest message between two) in ns.

        A rank answers with its own time, which is taken for the middle of the way to and fro.
        """
        me, group = self.ranks.rank, self._all
        found = torch.zeros(self.ranks.ranks + 1, dtype=torch.int64)
        told = torch.zeros(1, dtype=torch.int64)
        for rank in range(1, self.ranks.ranks):
            ways = []
            for _ in range(_PINGS):
                if me == rank:
                    group.recv([told], 0, 0).wait()
                    told[0] = time.perf_counter_ns()
                    group.send([told], 0, 0).wait()
                elif me == 0:
                    begin = time.perf_counter_ns()
                    group.send([told], rank, 0).wait()
                    group.recv([told], rank, 0).wait()
                    end = time.perf_counter_ns()
                    ways.append((end - begin, int(told[0]) - (begin + end) // 2))
            if me == 0:
                way, offset = min(ways)
                found[rank], found[-1] = offset, max(int(found[-1]), way // 2)
        broadcast(group, found, 0)
        *offsets, slowest = found.tolist()
        return offsets, slowest

    def _carry(self, tensors: Iterable[int], *, outward: bool) -> None:
        """Copy sources between rank 0 and the ranks that read them. Where several read a source,
        all have the same value, and the first one's counts."""
        me, wanted = self.ranks.rank, set(tensors)
        fetched = set(self._sources[0])
        for rank in range(1, self.ranks.ranks):
            of_rank = [tensor for tensor in sorted(set(self._sources[rank])) if tensor in wanted]
            for tensor in of_rank:
                if not outward and tensor in fetched:
                    continue
                fetched.add(tensor)
                source, destination = (0, rank) if outward else (rank, 0)
                content = self._bytes_at(self.shares.sources[tensor])
                if me == source:
                    self._all.send([content], destination, 1).wait()
                elif me == destination:
                    self._all.recv([content], source, 1).wait()

    def _bytes_at(self, slot: BlockSlot) -> Tensor:
        # Gloo takes no message of no bytes.
        return torch.from_numpy(self.block.view(slot.offset, (max(slot.bytes, 1),), np.uint8))

    def _fetch_stamps(self) -> None:
        """Bring all stamps of a step into the block of rank 0, by its clock.

        A transfer between two ranks ends when the receiver has it: the sender knows only when its
        copy left the device. A transfer by NCCL ends when the sender's GPU has sent it.
        """
        me, shares = self.ranks.rank, self.shares.shares
        own = [end.arrivals for end in self._ends if isinstance(end, _Receiver)]
        arrived = [(self._incoming(0), own, 0)]
        for rank in range(1, self.ranks.ranks):
            places = [
                place
                for share in shares
                if self.rank_of[share.device] == rank
                for place in ((share.progress, 3), (share.stamps, 2 * len(share.instructions)))
            ]
            views = [self.block.view(offset, (count,), np.int64) for offset, count in places]
            if me == rank:
                numbers = np.concatenate([*views, *own, np.zeros(1, dtype=np.int64)])
                self._all.send([torch.from_numpy(numbers)], 0, 2).wait()
            elif me == 0:
                incoming = self._incoming(rank)
                counts = [*(count for _, count in places), *(len(m) for m in incoming), 1]
                numbers = np.zeros(sum(counts), dtype=np.int64)
                self._all.recv([torch.from_numpy(numbers)], rank, 2).wait()
                parts = np.split(numbers, np.cumsum(counts)[:-1])
                for view, part in zip(views, parts, strict=False):
                    view[:] = part - self._offsets[rank]
                arrived.append((incoming, parts[len(views) : -1], self._offsets[rank]))
        # Only now are all stamps here, of which these replace some.
        if me == 0:
            for pairs, arrivals, offset in arrived:
                for messages, times in zip(pairs, arrivals, strict=True):
                    for message, ended in zip(messages, times.tolist(), strict=True):
                        share = shares[message.share]
                        shape = (len(share.instructions), 2)
                        stamps = self.block.view(share.stamps, shape, np.int64)
                        stamps[message.index, 1] = ended - offset

    def _incoming(self, rank: int) -> list[list[RankMessage]]:
        """The messages of each pair that ends at this rank."""
        return [messages for (_, to), messages in self._pairs.items() if self.rank_of[to] == rank]


def _serve(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := queue.get()) is not None:
        task()


LINK_BYTES = (4096, 65536, 1048576)
"""Latency and bandwidth of a link are fitted to messages of these sizes."""
_LINK_SECONDS, _LEAST_HOPS, _MOST_HOPS = 1.0, 5, 60
"""Messages of each size are sent for so long, with the pauses between them, but at least and at
most so many."""
_BEFORE_HOP_SECONDS = 0.003
"""A message is sent this long after both ends were told to begin."""
_BUSY_MESSAGES, _BUSY_BYTES = 16, 16384
"""Messages of a round that measures what they take of both ends, and the bytes of each. The RNNLM
of benchmarks/hosts sends about as many of that size in a step."""
_BUSY_SECONDS = 0.01
"""Both ends compute for so long in a round, several times what its messages take."""
_BUSY_ROUNDS = 41
"""Single rounds differ by more than what messages take, so the median of so many counts."""
_BUSY_ELEMENTS = 16384
"""Numbers that both ends compute with: 128 KiB, which most cores' second cache holds."""


@dataclass(frozen=True)
class LinkTimes:
    """What a link between two ranks was measured to take.

    hop_seconds       size of a message in bytes -> seconds on ranks that do nothing else
    send_seconds, receive_seconds   how much longer a thread that computes on the source, or on the
                      destination, takes for each message that it sends, or that arrives
    """

    hop_seconds: dict[int, float]
    send_seconds: float
    receive_seconds: float


def measure_links(ranks: Ranks) -> dict[tuple[int, int], LinkTimes]:
    """(source, destination) -> what the link takes, for each two ranks.

    A message goes as a plan's do: from a flag that a thread waits for to a flag that is seen on the
    other rank. It is answered by one without a tensor, and half of what two of these take is taken
    off. One pair is measured at a time. All ranks call this together and get the same.
    """
    found: dict[tuple[int, int], LinkTimes] = {}
    for source in range(ranks.ranks):
        for destination in range(ranks.ranks):
            if source == destination:
                continue
            hops: dict[str, float] = {}
            busy_seconds = 0.0
            if ranks.rank in (source, destination):
                hops = _measure_link(ranks, source, destination)
                busy_seconds = _measure_busy(ranks, source, destination)
            # JSON has texts for keys. This keeps all others waiting, too.
            told = ranks.gather("link", {"hops": hops, "busy": busy_seconds})
            found[source, destination] = LinkTimes(
                {int(size): float(s) for size, s in told[source]["hops"].items()},
                float(told[source]["busy"]),
                float(told[destination]["busy"]),
            )
    return found


def _measure_link(ranks: Ranks, source: int, destination: int) -> dict[str, float]:
    """Size of a message -> seconds; of the source alone."""
    layout = Layout()
    abort, flags = layout.reserve(8), [layout.reserve(8) for _ in range(2)]
    largest = BlockSlot(0, max(LINK_BYTES), (max(LINK_BYTES),), (1,), "uint8")
    place = layout.reserve(largest.sent_bytes)
    block = Block.create(layout.size_bytes)
    base = int(block.bytes.ctypes.data)
    groups = [ranks.group("link", ends) for ends in ((source, destination), (destination, source))]
    is_source = ranks.rank == source

    def hop(size: int, number: int) -> float:
        """Seconds of one message there, of so many bytes, and an empty one back."""
        slot = BlockSlot(place, size, (size,), (1,), "uint8") if size else None
        there, back = RankMessage(flags[0], slot, 0, 0), RankMessage(flags[1], None, 0, 0)
        value, other = number * NEXT, destination if is_source else source
        sent, heard = (there, back) if is_source else (back, there)
        sender = _Sender(block, [sent], groups[0 if is_source else 1], other)
        receiver = _Receiver(block, [heard], groups[1 if is_source else 0], other)
        receiver.post()
        threads = [
            threading.Thread(target=end.run, args=(number, base + abort), daemon=True)
            for end in (sender, receiver)
        ]
        for thread in threads:
            thread.start()
        if is_source:
            # All threads wait, and the receive is posted, as in a step.
            time.sleep(_BEFORE_HOP_SECONDS)
        began = time.perf_counter()
        if is_source:
            publish(base + sent.flag, value)
        wait(base + heard.flag, value, base + abort, SPIN_NS)
        seconds = time.perf_counter() - began
        if not is_source:
            publish(base + sent.flag, value)
        for thread in threads:
            thread.join()
        return seconds

    def agreed(goes_on: bool) -> bool:
        """The source says whether there is one more, by a message of its own."""
        told = torch.tensor([goes_on], dtype=torch.uint8)
        ranks.wait_for(partial(broadcast, groups[0], told, 0))
        return bool(told)

    numbers = count(1)

    def timed_hop(size: int) -> float:
        seconds: float = ranks.wait_for(partial(hop, size, next(numbers)))
        return seconds

    repeats = Repeats(_MOST_HOPS, _LEAST_HOPS, _LINK_SECONDS)
    medians: dict[int, float] = {}
    for size in (0, *LINK_BYTES):
        hops = time_steps(partial(timed_hop, size), repeats, agreed=agreed)
        medians[size] = float(np.median(hops))
    return {str(size): medians[size] - medians[0] / 2 for size in LINK_BYTES} if is_source else {}


@kernel
def _compute(memory: NDArray[np.float64], passes: int, flags: int, count: int, value: int) -> None:
    """Pass over the memory again and again, and set one of `count` flags, 64 bytes apart, after
    each; without a value only compute."""
    for message in range(count):
        for _ in range(passes):
            for i in range(len(memory)):
                memory[i] = 0.5 * memory[i] + 1.0
        if value > 0:
            publish(flags + 64 * message, value)


def _measure_busy(ranks: Ranks, source: int, destination: int) -> float:
    """Measure how many seconds of its core each message takes of this end.

    Both ends compute the same in each round: first alone, and then while the source sends a message
    after each part of its work. Where the threads that send and receive have cores of their own,
    the difference is next to nothing. A receiver that computes faster than the sender has ended
    before the last messages come, so that its time comes out too low.
    """
    layout = Layout()
    abort, flags = layout.reserve(8), layout.reserve(64 * _BUSY_MESSAGES)
    slot = BlockSlot(0, _BUSY_BYTES, (_BUSY_BYTES,), (1,), "uint8")
    slots = [replace(slot, offset=layout.reserve(slot.sent_bytes)) for _ in range(_BUSY_MESSAGES)]
    block = Block.create(layout.size_bytes)
    base = int(block.bytes.ctypes.data)
    messages = [RankMessage(flags + 64 * i, slot, 0, 0) for i, slot in enumerate(slots)]
    group, is_source = ranks.group("busy", (source, destination)), ranks.rank == source
    end: _Sender | _Receiver
    if is_source:
        end = _Sender(block, messages, group, destination)
    else:
        end = _Receiver(block, messages, group, source)
    memory = np.ones(_BUSY_ELEMENTS)

    def seconds_of(passes: int, value: int = 0) -> float:
        began = time.perf_counter()
        _compute(memory, passes, base + flags, _BUSY_MESSAGES, value)
        return time.perf_counter() - began

    seconds_of(1)
    passes = max(1, round(_BUSY_SECONDS / max(seconds_of(1), 1e-9)))

    def round_of(number: int) -> float:
        alone = seconds_of(passes)
        if isinstance(end, _Receiver):
            end.post()
        thread = threading.Thread(target=end.run, args=(number, base + abort), daemon=True)
        thread.start()
        time.sleep(_BEFORE_HOP_SECONDS)
        # Nothing is sent before both are there.
        broadcast(group, torch.zeros(1), 0)
        sending = seconds_of(passes, number * NEXT if is_source else 0)
        thread.join()
        broadcast(group, torch.zeros(1), 1)
        return (sending - alone) / _BUSY_MESSAGES

    rounds = [ranks.wait_for(partial(round_of, number)) for number in range(1, _BUSY_ROUNDS + 1)]
    return max(0.0, float(np.median(rounds)))
