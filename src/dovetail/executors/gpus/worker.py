"""Serves all GPUs of this machine from one process, whose only thread of work issues to all.

    compute stream of each GPU     launch ─────────── launch ── await ── launch
    copy stream of each pair            └─ send ─► ─────────────┘
    peer stream of each GPU     send, receive ═══ NCCL ═══ GPUs of other ranks (`gpus.peers`)
    block (pinned) ◄── send ── GPU      GPU ◄── read, await ── block

A launch is all that an `Issue` has to compute (`gpus.steps`).

The thread runs ahead of the GPUs. It waits for flags of CPUs, and at the end of a step for other
ranks' GPUs and for all streams; also for copies between a GPU and the block of tensors with gaps,
which torch makes through memory of its own. Flags for CPUs are published by a thread for each pair
of a GPU and a CPU, which waits for the events of copies in the order in which they were issued.

Graphs: in the third step each launch is captured as a CUDA graph, and replayed from then on, which
takes the host a few microseconds for all of its works together. Its memory stays where it was in
capture. Copies between devices stay outside of graphs, and so do works that draw random numbers and
those that cannot be captured: what they make is copied to where it was in the third step. What a
copy or such a work reads is held for good, as its place must not be given to another tensor.

Lanes of a stage run on streams of their own, which start after the compute stream and which it then
waits for. Between two stages nothing runs there, so the memory of what lanes made may be given up
like that of the compute stream.
"""

import gc
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.executors.compiling import CompileTarget, load_code
from dovetail.executors.gpus.peers import Peer, PeerError, PeerPair, connect_peers
from dovetail.executors.gpus.streams import capture, fork, join, mark
from dovetail.executors.shares import Share, tensor_at
from dovetail.executors.worker import Aborted, Failed
from dovetail.frontends.fused_updates import fused_updates
from dovetail.frontends.gpu_calls import on_gpu
from dovetail.frontends.instructions import (
    LAID,
    NEXT,
    NO_FLAG,
    AwaitFlag,
    BlockSlot,
    BoundInstruction,
    FreeTensors,
    Issue,
    ReadSource,
    ReceiveTensor,
    RunCompiled,
    RunFunction,
    RunLanes,
    RunOp,
    RunUpdates,
    SendTensor,
    Work,
    ops_of,
)
from dovetail.frontends.interpret import seed_for
from dovetail.frontends.program import Call, distinct_refs
from dovetail.frontends.runners import Stream, distinct, make_runner, seeded_call
from dovetail.runtime.cuda import MakeCuda, cuda_here, reach_gpus_by
from dovetail.runtime.neighbours import SPIN_SECONDS
from dovetail.runtime.ranks import RankPlace
from dovetail.runtime.setup import set_up
from dovetail.runtime.shared import Block
from dovetail.runtime.user_code import line_of
from dovetail.runtime.waiting import ABORTED, barrier, look, publish, wait
from dovetail.units import GIB, KIB, MIB

_SPIN_NS = round(SPIN_SECONDS * 1e9)
_POLL_SECONDS = 5e-5
"""Time between two looks at what other ranks' GPUs have sent."""
_CAPTURED_STEP = 3
"""The step in which launches are captured. Libraries choose algorithms and allocate workspaces in
the first ones."""


@dataclass(frozen=True)
class LoadGpus:
    """The shares of all GPUs, which their process binds under a key.

    shares     of the GPUs
    steps      what is issued in each step of the plan, in order
    names      device in the machine -> what torch calls it
    limits     what torch calls a GPU -> the bytes that its devices in the machine have together
    captures   launches are captured as graphs
    """

    key: int
    shares: tuple[Share, ...]
    steps: tuple[Issue, ...]
    names: dict[int, str]
    limits: dict[str, int]
    program: int
    calls: dict[int, Call]
    tensors: int
    seed: int
    captures: bool = True


class ServedGpus:
    """What lives in the process of all GPUs: loaded shares by their keys, and calls of one program.

    make_cuda   makes the CUDA by which GPUs are reached
    """

    def __init__(self, make_cuda: MakeCuda) -> None:
        # Compiled kernels are read from files. Inductor would start processes to compile others.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        set_up(1)
        reach_gpus_by(make_cuda)
        self._cuda = cuda_here()
        self._loaded: dict[int, LoadedGpus] = {}
        self._program, self._calls = 0, dict[int, Call]()
        # The process is in this mode as long as it lives.
        self._mode = torch.inference_mode()
        self._mode.__enter__()

    def load(self, load: LoadGpus, descriptor: int) -> Failed | None:
        """Bind the shares to the values in the block of this descriptor, which is taken over."""
        block = Block(descriptor)
        if load.program != self._program:
            self._program, self._calls = load.program, {}
        self._calls.update(load.calls)
        try:
            self._loaded[load.key] = LoadedGpus(load, self._calls, block, self._cuda)
        except torch.OutOfMemoryError as error:
            return _failed(-1, error)
        return None

    def step(self, key: int, number: int, timed: bool) -> str | Failed:
        return self._loaded[key].run(number, timed)

    def save_sources(self, key: int) -> None:
        self._loaded[key].save_sources()

    def read_sources(self, key: int, tensors: frozenset[int] | None) -> None:
        self._loaded[key].read_sources(tensors)

    def connect_peers(
        self, key: int, place: RankPlace, pairs: tuple[PeerPair, ...]
    ) -> Failed | None:
        return self._loaded[key].connect(place, pairs)

    def unload(self, key: int) -> None:
        self._loaded.pop(key).close()
        gc.collect()


class _LoadedGpu:
    """One device of the plan: its stream, its table of values, and its memory that lasts.

    sources    tensor -> its value here, of those that live here
    arriving   tensor -> where it lies here, of those that come from elsewhere
    """

    def __init__(self, share: Share, name: str, cuda: Any, tensors: int) -> None:
        self.share = share
        self.torch_device = cuda.device(name)
        self.compute = cuda.Stream(device=self.torch_device)
        self.runner = make_runner(tensors)
        self.pool = cuda.graph_pool_handle()
        self.lanes: list[Any] = []
        self.codes: dict[str, Callable[..., Any] | None] = {}
        self.target = CompileTarget(gpu=name)
        self.sources = {tensor: self.empty(slot) for tensor, slot in share.sources}
        self.arriving = {
            instruction.tensor: self.empty(instruction.slot)
            for instruction in share.instructions
            if isinstance(instruction, AwaitFlag | ReadSource) and instruction.slot is not None
        }
        for tensor, value in {**self.sources, **self.arriving}.items():
            self.runner.set(tensor, value)

    def empty(self, slot: BlockSlot) -> Tensor:
        dtype = getattr(torch, slot.dtype)
        shape, strides = slot.shape, slot.strides
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.torch_device)


@dataclass
class _Launch:
    """Works that are issued together.

    whole    all of them; `works`: each by itself; `held`: all of them, and what is read from the
             table later is not freed
    reads, makes   the tensors that they read and make
    graph    None: not captured yet, or not to be captured
    places   of works that are not captured, where what they make lies
    """

    whole: Stream
    held: Stream
    works: list[Stream]
    reads: list[int]
    makes: list[int]
    may_be_captured: bool
    graph: Any = None
    places: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _Running:
    """What belongs to the step that is on.

    number     of the step, from 1
    now        the value that flags have in this step
    events     flag -> event after the copy, or after the op of a control edge
    pulled     (device, tensor) -> event after the copy
    awaited    flags of CPUs whose tensors were not copied yet: flag -> (device, wait)
    spans      (device, index of the instruction, event before, event after) in timed steps
    """

    number: int
    now: int
    events: dict[int, Any] = field(default_factory=dict)
    pulled: dict[tuple[int, int], Any] = field(default_factory=dict)
    awaited: dict[int, tuple[int, AwaitFlag]] = field(default_factory=dict)
    spans: list[tuple[int, int, Any, Any]] | None = None


class LoadedGpus:
    """The shares of all GPUs, ready to run steps.

    cuda   as `runtime.cuda.cuda_here` returns it
    """

    def __init__(self, load: LoadGpus, calls: dict[int, Call], block: Block, cuda: Any) -> None:
        self.load, self.block, self.cuda = load, block, cuda
        self.base = int(block.bytes.ctypes.data)
        self.in_block: dict[tuple[BlockSlot, int], Tensor] = {}
        first = load.shares[0]
        self.abort = self.base + first.abort
        self.unpin = cuda.pin(self.base, block.size_bytes)
        cuda.limit_memory(load.limits)
        self.gpus = {
            share.device: _LoadedGpu(share, load.names[share.device], cuda, load.tensors)
            for share in load.shares
        }
        self.progress = {
            share.device: block.view(share.progress, (3,), np.int64) for share in load.shares
        }
        for progress in self.progress.values():
            progress[0] = -1
        self.copying: dict[tuple[int, int], Any] = {}  # (from, to) -> stream
        self.publishers: dict[tuple[int, int], _Publisher] = {}
        # Op of each call that draws numbers, and the seeds of the step that is on.
        self.drawing: list[int] = []
        self.seeds: list[int] = []
        self.launches: dict[tuple[int, int], _Launch] = {}
        self.updates = {
            op: calls[op]
            for share in load.shares
            for instruction in share.instructions
            if isinstance(instruction, RunUpdates)
            for op in instruction.ops
        }
        self.calls = {
            op: on_gpu(calls[op], gpu.torch_device)
            for gpu in self.gpus.values()
            for op in gpu.share.ops
        }
        # Launches that failed to be captured, and the step from which on the others are.
        self.uncaptured: set[tuple[int, int]] = set()
        self.capture_from = _CAPTURED_STEP
        self._bind_launches()
        # Pairs of GPUs of two ranks, and the flags of what comes straight from them.
        self.peers: dict[tuple[int, int], Peer] = {}
        self.peer_streams: dict[str, Any] = {}
        issued = [(step.lane, each) for step in load.steps for each in step.instructions]
        self.received = {each.flag for _, each in issued if isinstance(each, ReceiveTensor)}
        self.waits = {
            each.flag: (device, each)
            for device, each in issued
            if isinstance(each, AwaitFlag)
            and each.flag != NO_FLAG
            and not self._comes_on_gpus(each)
        }
        self.failed = -1
        self.read_sources()

    # ---- Between steps ----

    def read_sources(self, tensors: frozenset[int] | None = None) -> None:
        """Copy sources that live on GPUs from the block: these, or all of them."""
        for gpu in self.gpus.values():
            with self.cuda.stream(gpu.compute):
                for tensor, slot in gpu.share.sources:
                    if tensors is not None and tensor not in tensors:
                        continue
                    _copy(gpu.sources[tensor], self._tensor_at(slot), slot)
        self._synchronize()

    def save_sources(self) -> None:
        """Copy the sources that live on GPUs into the block: from the first of those that have it,
        since what several have is the same."""
        saved: set[int] = set()
        for gpu in self.gpus.values():
            with self.cuda.stream(gpu.compute):
                for tensor, slot in gpu.share.sources:
                    if tensor in saved:
                        continue
                    saved.add(tensor)
                    _copy(self._tensor_at(slot), gpu.sources[tensor], slot)
        self._synchronize()

    def connect(self, place: RankPlace, pairs: Sequence[PeerPair]) -> Failed | None:
        """Connect with GPUs of other ranks."""
        try:
            self.peers = connect_peers(place, pairs, self.cuda, self._is_aborted)
            for (source, destination), peer in self.peers.items():
                own = source if source in self.gpus else destination
                with self.cuda.stream(self._peer_stream(own)):
                    peer.greet(self.gpus[own].torch_device)
            self._synchronize()
        except Exception as error:
            return _failed(-1, error)
        return None

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        for publisher in self.publishers.values():
            publisher.close()
        self.unpin()
        self.in_block.clear()
        self.block.close()

    # ---- A step ----

    def run(self, number: int, timed: bool) -> str | Failed:
        """Run one step. Returns "done", "aborted" if another device failed, or `Failed`."""
        self.failed = -1
        running = _Running(number, number * NEXT, awaited=dict(self.waits))
        running.spans = [] if timed else None
        self.seeds[:] = [seed_for(self.load.seed, number - 1, op) for op in self.drawing]
        try:
            self._meet(2 * number - 1)
            began = time.perf_counter_ns()
            # Device -> (an event that has happened, the host's clock in ns just after it).
            starts: dict[int, tuple[Any, int]] = {}
            if timed:
                self._synchronize()
                for device, gpu in self.gpus.items():
                    start = self._timing(gpu.compute)
                    # Other processes may hold up this stream, and not those of copies.
                    start.synchronize()
                    starts[device] = start, time.perf_counter_ns()
            for step in self.load.steps:
                self._issue(step, running)
            # What other ranks' GPUs wait for may never be sent if a device of this rank fails.
            for stream in self.peer_streams.values():
                event = mark(self.cuda, stream)
                while not event.query():
                    if self._is_aborted():
                        raise Aborted
                    time.sleep(_POLL_SECONDS)
            self._synchronize()
            for publisher in self.publishers.values():
                publisher.wait()
            ended = time.perf_counter_ns()
            for progress in self.progress.values():
                progress[1], progress[2] = began, ended
            # Each instruction is stamped with its begin and end, in ns of the host's clock.
            for device, index, *events in running.spans or ():
                share, (start, start_ns) = self.gpus[device].share, starts[device]
                stamps = self.block.view(share.stamps, (len(share.instructions), 2), np.int64)
                # CUDA gives milliseconds.
                stamps[index] = [start_ns + round(1e6 * start.elapsed_time(e)) for e in events]
            self._meet(2 * number)
            for gpu in self.gpus.values():
                with self.cuda.stream(gpu.compute):
                    for tensor, slot in gpu.share.outputs:
                        value = gpu.runner.get(tensor)
                        assert value is not None, "the step has made it"
                        _copy(self._tensor_at(slot), value, slot)
            self._synchronize()
            if not self._captures(running):
                for device, gpu in self.gpus.items():
                    gpu.runner.clear(self.made[device])
                if self._has_failed(running):
                    self._bind_launches()
        except Aborted:
            self._give_up()
            return "aborted"
        except Exception as error:
            is_first = not self._is_aborted()
            publish(self.abort, 1)
            failed = _failed(self.failed, error)
            self._give_up()
            # A send that this rank broke off itself is no failure of another rank.
            return failed if is_first or failed.peer is None else "aborted"
        return "done"

    def _give_up(self) -> None:
        """End what was issued, as it may still read and write memory that is given up next."""
        for peer in self.peers.values():
            # This rank would wait without end for a tensor of a rank that has failed too.
            with suppress(Exception):
                peer.close()
        with suppress(Exception):
            self._synchronize()

    def _is_aborted(self) -> bool:
        return bool(look(self.abort))

    def _meet(self, value: int) -> None:
        share = self.load.shares[0]
        flags = self.base + share.barrier
        reached = barrier(flags, share.seats, share.seat, value, self.abort, _SPIN_NS)
        if reached == ABORTED:
            raise Aborted

    def _issue(self, step: Issue, running: _Running) -> None:
        device = step.lane
        gpu = self.gpus[device]
        for instruction in step.instructions:
            match instruction:
                case SendTensor():
                    self._send(step, instruction, running)
                case ReceiveTensor(tensor=tensor, flag=flag, slot=slot, source=source):
                    stream = self._peer_stream(device)
                    with self.cuda.stream(stream):
                        self.peers[source, device].receive(gpu.arriving[tensor], slot)
                    running.events[flag] = mark(self.cuda, stream)
                case ReadSource(tensor=tensor, slot=slot, source=source):
                    value, into = self._tensor_at(slot), gpu.arriving[tensor]
                    with self._noted(running, self._copy_stream(source, device), step):
                        event = self._copy_across(source, device, into, value, slot)
                    running.pulled[device, tensor] = event
                case AwaitFlag(tensor=tensor, flag=flag, slot=slot):
                    # What is launched from now on starts after a tensor has arrived, or after the
                    # op of a control edge, or a send, has ended.
                    if flag == NO_FLAG:
                        gpu.compute.wait_event(running.pulled[device, tensor])
                        continue
                    if not self._comes_on_gpus(instruction):
                        reached = wait(self.base + flag, running.now, self.abort, _SPIN_NS)
                        if reached == ABORTED:
                            raise Aborted
                        self._look_for_arrived(running)
                        if slot is None:
                            continue
                    gpu.compute.wait_event(running.events[flag])
                case FreeTensors(tensors=tensors):
                    if not self._captures(running):
                        gpu.runner.clear(tensors)
                case _:
                    # All that computes is one launch.
                    self._look_for_arrived(running)
                    self._launch(step, running)
                    return

    def _captures(self, running: _Running) -> bool:
        """True if launches run as graphs in this step: what they made stays where it is."""
        return self.load.captures and running.number >= self.capture_from

    def _launch(self, step: Issue, running: _Running) -> None:
        key = step.lane, step.index
        gpu, launch = self.gpus[step.lane], self.launches[key]
        try:
            with self.cuda.stream(gpu.compute):
                if self._captures(running) and running.spans is None:
                    self._replay(key, running)
                elif self._captures(running):
                    # Works of a graph have the span of all of it.
                    with self._noted(running, gpu.compute, step, range(len(launch.works))):
                        self._replay(key, running)
                elif running.spans is not None:
                    for place, work in enumerate(launch.works):
                        with self._noted(running, gpu.compute, step, (place,)):
                            gpu.runner.run(work)
                else:
                    if self._has_failed(running) and launch.may_be_captured:
                        # It is noted whether it can be captured, and the table stays as it is.
                        reads = {tensor: gpu.runner.get(tensor) for tensor in launch.reads}
                        self._captured(key)
                        for tensor, value in reads.items():
                            gpu.runner.set(tensor, value)
                    gpu.runner.run(launch.whole)
        except Exception:
            self.failed = gpu.runner.failed
            raise

    def _replay(self, key: tuple[int, int], running: _Running) -> None:
        """Run a launch as a graph, which is captured first if it was not yet. If that fails, this
        step goes on without graphs, and the next one captures all launches anew that can be."""
        gpu, launch = self.gpus[key[0]], self.launches[key]
        if launch.graph is None and launch.may_be_captured:
            launch.graph = self._captured(key)
            if launch.graph is None:
                self.capture_from = running.number + 1
                gpu.runner.run(launch.whole)
                return
        if launch.graph is not None:
            launch.graph.replay()
            return
        gpu.runner.run(launch.held)
        for tensor in launch.makes:
            value = gpu.runner.get(tensor)
            if value is None:
                continue
            place = launch.places.setdefault(tensor, value)
            if place.data_ptr() != value.data_ptr():
                strides = value.stride()
                distinct(place, strides).copy_(distinct(value, strides))
                gpu.runner.set(tensor, place)

    def _captured(self, key: tuple[int, int]) -> Any:
        """The graph of a launch, and in the table what it makes; None if it cannot be captured."""
        gpu, launch = self.gpus[key[0]], self.launches[key]
        reads = {tensor: gpu.runner.get(tensor) for tensor in launch.reads}
        work = partial(gpu.runner.run, launch.held)
        try:
            return capture(self.cuda, gpu.compute, work, gpu.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # A capture that failed may leave its pool unusable.
            gpu.pool = self.cuda.graph_pool_handle()
            self.uncaptured.add(key)
            for tensor, value in reads.items():
                gpu.runner.set(tensor, value)
            return None

    def _has_failed(self, running: _Running) -> bool:
        """True if a launch could not be captured in this step."""
        return self.capture_from == running.number + 1 > _CAPTURED_STEP

    def _send(self, step: Issue, send: SendTensor, running: _Running) -> None:
        """Copy a tensor to another device as soon as all that was launched on the step's device has
        ended; for a control edge, tell it of that end."""
        device, compute = step.lane, self.gpus[step.lane].compute
        there = self.gpus.get(send.destination)
        if send.slot is None:
            event = mark(self.cuda, compute, blocking=there is None)
            if running.spans is not None:
                now = self._timing(compute)
                running.spans.append((device, step.index, now, now))
        else:
            value = self.gpus[device].runner.get(send.tensor)
            assert value is not None, "the step has made it"
            peer = self.peers.get((device, send.destination))
            if peer is not None:
                # It goes straight to a GPU of another rank.
                stream = self._peer_stream(device)
                fork(self.cuda, compute, (stream,))
                with self._noted(running, stream, step), self.cuda.stream(stream):
                    peer.send(value, send.slot)
                running.events[send.flag] = mark(self.cuda, stream)
                return
            into = self._tensor_at(send.slot) if there is None else there.arriving[send.tensor]
            stream = self._copy_stream(device, send.destination)
            fork(self.cuda, compute, (stream,))
            with self._noted(running, stream, step):
                event = self._copy_across(device, send.destination, into, value, send.slot)
        running.events[send.flag] = event
        if there is None:
            pair = device, send.destination
            if pair not in self.publishers:
                self.publishers[pair] = _Publisher(self.abort)
            self.publishers[pair].publish(event, self.base + send.flag, running.now)

    def _comes_on_gpus(self, waiting: AwaitFlag) -> bool:
        """True if events say when it is there, and no flag in the block does."""
        return waiting.source in self.gpus or waiting.flag in self.received

    def _look_for_arrived(self, running: _Running) -> None:
        """Copy to GPUs what CPUs have sent since the last look."""
        for flag, (device, waiting) in list(running.awaited.items()):
            reached = look(self.base + flag)
            if reached < running.now:
                continue
            del running.awaited[flag]
            if waiting.slot is None:
                continue
            sent = self._tensor_at(waiting.slot, reached % NEXT)
            into = self.gpus[device].arriving[waiting.tensor]
            event = self._copy_across(waiting.source, device, into, sent, waiting.slot)
            running.events[flag] = event

    def _tensor_at(self, slot: BlockSlot, mark: int = 0) -> Tensor:
        """A tensor over a slot of the block. It is the same one in each step, as the thread that
        issues has no time to make it anew. Only one with other strides than captured is made anew,
        as these may have changed."""
        key = slot, mark
        if mark & LAID or key not in self.in_block:
            self.in_block[key] = tensor_at(self.block, slot, mark)
        return self.in_block[key]

    # ---- Streams and events ----

    def _copy_stream(self, source: int, destination: int) -> Any:
        """The stream of the copies from one device to another, one of which is a GPU."""
        pair = source, destination
        if pair not in self.copying:
            gpu = self.gpus[source if source in self.gpus else destination]
            self.copying[pair] = self.cuda.Stream(device=gpu.torch_device)
        return self.copying[pair]

    def _peer_stream(self, device: int) -> Any:
        """The stream of all that a GPU exchanges with GPUs of other ranks. Devices of the machine
        that are parts of one GPU share it."""
        name = self.load.names[device]
        if name not in self.peer_streams:
            own = self.gpus[device].torch_device
            self.peer_streams[name] = self.cuda.Stream(device=own)
        return self.peer_streams[name]

    def _copy_across(
        self, source: int, destination: int, into: Tensor, value: Tensor, slot: BlockSlot
    ) -> Any:
        """Issue a copy from one device to another; return the event of its end."""
        stream = self._copy_stream(source, destination)
        # A publisher waits for events of copies to the block: it sleeps meanwhile.
        blocking = destination not in self.gpus
        ends = [self.gpus[end].torch_device for end in (source, destination) if end in self.gpus]
        if len(set(ends)) < 2:
            with self.cuda.stream(stream):
                _copy(into, value, slot)
            return mark(self.cuda, stream, blocking=blocking)
        # Between two GPUs without access to each other, the last part of a copy of a tensor with
        # gaps runs on the destination's current stream. Copies from other GPUs end in one of its
        # own.
        arriving = self._copy_stream(destination, destination)
        with self.cuda.stream(arriving), self.cuda.stream(stream):
            _copy(into, value, slot)
        join(self.cuda, arriving, (stream,))
        return mark(self.cuda, arriving, blocking=blocking)

    @contextmanager
    def _noted(
        self, running: _Running, stream: Any, step: Issue, places: Iterable[int] = (0,)
    ) -> Iterator[None]:
        """A context in which work is issued to a stream. In a timed step its span is noted for
        instructions of a device, by their places in the step."""
        if running.spans is None:
            yield
            return
        begin = self._timing(stream)
        yield
        end = self._timing(stream)
        running.spans += [(step.lane, step.index + place, begin, end) for place in places]

    def _timing(self, stream: Any) -> Any:
        return mark(self.cuda, stream, enable_timing=True)

    def _synchronize(self) -> None:
        for device in dict.fromkeys(gpu.torch_device for gpu in self.gpus.values()):
            self.cuda.synchronize(device)

    # ---- Binding ----

    def _bind_launches(self) -> None:
        """Make the streams of all launches, and forget the graphs of earlier ones."""
        self.drawing.clear()
        # Device -> tensors that are read from the table of a captured step: by copies, by works
        # that are not captured, and at its end.
        held: dict[int, set[int]] = {
            device: {tensor for tensor, _ in gpu.share.outputs} for device, gpu in self.gpus.items()
        }
        for step in self.load.steps:
            held[step.lane].update(
                each.tensor for each in step.instructions if isinstance(each, SendTensor)
            )
            if not self._may_be_captured(step):
                held[step.lane].update(self._reads(step))
        self.launches = {}
        # The step's tensors are dropped after it, but for those that last.
        made: dict[int, set[int]] = {device: set() for device in self.gpus}
        for step in self.load.steps:
            if not isinstance(step.instructions[0], Work):
                continue
            gpu, stream = self.gpus[step.lane], self.gpus[step.lane].runner.stream
            whole: list[BoundInstruction] = []
            holding: list[BoundInstruction] = []  # the same, but what is held is not freed
            works: list[Stream] = []
            makes: list[int] = []  # the tensors that are written into the table
            for work in step.instructions:
                assert isinstance(work, Work)
                *before, last = self._bound(gpu, work)
                works.append(stream([*before, last]))
                whole += [*before, last]
                frees = tuple(t for t in work.frees if t not in held[step.lane])
                holding += [*before, replace(last, frees=frees)]
                if isinstance(work, RunCompiled) and self._code(step.lane, work.key) is not None:
                    makes += work.outputs
                else:
                    makes += [t for op in ops_of(work) for t in self.calls[op].results if t >= 0]
            may_be_captured = self._may_be_captured(step)
            self.launches[step.lane, step.index] = _Launch(
                stream(whole), stream(holding), works, self._reads(step), makes, may_be_captured
            )
            made[step.lane].update(makes)
        self.made = {
            device: [tensor for tensor in made[device] if tensor not in gpu.sources]
            for device, gpu in self.gpus.items()
        }

    def _may_be_captured(self, step: Issue) -> bool:
        return not step.draws and (step.lane, step.index) not in self.uncaptured

    def _reads(self, step: Issue) -> list[int]:
        """The tensors that the works read from the table."""
        read: list[int] = []
        for work in step.instructions:
            if isinstance(work, RunCompiled) and self._code(step.lane, work.key) is not None:
                read += work.inputs
            else:
                calls = [self.calls[op] for op in ops_of(work)]
                read += distinct_refs([(call.args, call.kwargs) for call in calls])
        return list(dict.fromkeys(read))

    def _bound(self, gpu: _LoadedGpu, work: Work) -> list[RunOp | RunFunction]:
        """A work with its calls and its code, as the runner takes it. The last instruction frees
        what the work frees: only behind it is nothing of the others needed any more."""
        match work:
            case RunOp(op=op, frees=frees):
                call = self.calls[op]
                if not call.random:
                    return [RunOp(op, frees, call)]
                self.drawing.append(call.seed_index(op))
                seed = partial(self.seeds.__getitem__, len(self.drawing) - 1)
                return [seeded_call(call, seed, gpu.torch_device, op, frees)]
            case RunUpdates(ops=ops, frees=frees):
                return [RunOp(ops[0], frees, fused_updates([self.updates[op] for op in ops]))]
            case RunCompiled(ops=ops, key=key, inputs=inputs, outputs=outputs, frees=frees):
                code = self._code(gpu.share.device, key)
                if code is not None:
                    return [RunFunction(ops[0], code, inputs, outputs, frees)]
                return [
                    each
                    for op in ops
                    for each in self._bound(gpu, RunOp(op, frees if op == ops[-1] else ()))
                ]
            case RunLanes(lanes=lanes, frees=frees):
                # Each lane has a CUDA stream of its own, but the first one the compute stream.
                while len(gpu.lanes) < len(lanes) - 1:
                    gpu.lanes.append(self.cuda.Stream(device=gpu.torch_device))
                used = gpu.lanes[: len(lanes) - 1]
                bound: list[RunOp | RunFunction] = [
                    RunFunction(work.op, partial(fork, self.cuda, gpu.compute, used))
                ]
                for stream, lane in zip((*used, gpu.compute), (*lanes[1:], lanes[0]), strict=True):
                    bound.append(RunFunction(lane[0].op, partial(self.cuda.set_stream, stream)))
                    for each in lane:
                        assert isinstance(each, RunOp), "lanes of a share run ops"
                        bound += self._bound(gpu, each)
                joins = partial(join, self.cuda, gpu.compute, used)
                return [*bound, RunFunction(work.op, joins, frees=frees)]

    def _code(self, device: int, key: str) -> Callable[..., Any] | None:
        """Compiled code, which stages with one key share."""
        gpu = self.gpus[device]
        if key not in gpu.codes:
            code = load_code(key, gpu.target)
            gpu.codes[key] = None if code is None else self.cuda.at_work(code)
        return gpu.codes[key]


_SIZE = re.compile(r"allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_SIZE_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_OF_GPU = re.compile(r"GPU ([0-9]+) has")


def _failed(op: int, error: Exception) -> Failed:
    """The reply for an error that is being handled."""
    lacking = peer = None
    said = line_of(error)
    if isinstance(error, torch.OutOfMemoryError):
        # Torch says only in its message what was asked for ("Tried to allocate 2.50 GiB"), and of
        # which GPU.
        size, of_gpu = _SIZE.search(str(error)), _OF_GPU.search(str(error))
        asked = round(float(size[1]) * _SIZE_UNITS[size[2]]) if size else 0
        left = 0
        if torch.cuda.is_available():
            # What the GPU has left, within this process's limit.
            number = int(of_gpu[1]) if of_gpu else torch.cuda.current_device()
            free, total = torch.cuda.mem_get_info(number)
            allowed = int(total * torch.cuda.get_per_process_memory_fraction(number))
            left = max(0, min(free, allowed - torch.cuda.memory_reserved(number)))
        lacking = asked, left
    elif isinstance(error, PeerError):
        peer, said = error.rank, str(error)
    return Failed(op, traceback.format_exc(), said, lacking, peer)


def _copy(into: Tensor, value: Tensor, slot: BlockSlot) -> None:
    distinct(into, slot.strides).copy_(distinct(value, slot.strides), non_blocking=True)


class _Publisher:
    """Publishes flags once their events have happened, in order, from a thread."""

    def __init__(self, abort: int) -> None:
        self._abort = abort
        self._queue: SimpleQueue[tuple[Any, int, int] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._left = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, event: Any, flag: int, value: int) -> None:
        with self._lock:
            self._left += 1
            self._idle.clear()
        self._queue.put((event, flag, value))

    def wait(self) -> None:
        """Wait until all flags were published, and raise what went wrong."""
        self._idle.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            event, flag, value = item
            try:
                event.synchronize()
                publish(flag, value)
            except Exception as error:
                self._error = error
                publish(self._abort, 1)
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._idle.set()
