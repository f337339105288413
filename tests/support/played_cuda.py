"""A CUDA that the CPU plays: what `torch.cuda` has of streams, events and graphs, without a GPU.

What is issued to a stream runs at once, so its numbers are those of any order that events allow, as
long as the events are right. Whether they are is watched by clocks: each stream has a clock, and
knows of every other stream up to which of its works it surely starts after.

    stream 0   work 1 ── work 2 ── record E            knows {0: 2}
    stream 1                 wait E ── work 1          knows {0: 2, 1: 1}

A work that reads memory must know of the work that wrote it, and one that writes must know of all
that read or wrote it (Lamport 1978; FastTrack, Flanagan and Freund, PLDI 2009, has the same rule
for threads). Memory that is freed may be given to the next work of the stream that it was allocated
on, as by torch's allocator, so that work must know of all that touched it. The host
knows what it has waited for. A race is found whatever the times of the works are, and raised as
`StreamRaceError`.

`played` hands it in, so that the GPUs of machines, cuda:0 and so on, are played by the CPU.
`python -m tests.support.on_played_gpus COMMAND ...` runs a command so.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dovetail.errors import RunError
from dovetail.runtime.cuda import cuda_maker, reach_gpus_by
from dovetail.runtime.ranks import RankPlace, interface_of
from dovetail.runtime.torch_versions import TorchDispatchMode, gloo_group, pytree

MODEL, MEMORY_BYTES = "test", 1 << 33
"""What the hardware of each GPU that the CPU plays is called, and how much memory it says it has.
"""

Clock = dict[int, int]
"""Number of a stream -> how many of its works have surely ended."""
_WAITS_FOR_RESULT = (
    torch.ops.aten.item.default,  # as it is called in inference mode
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
)
"""Ops for which the host waits, as what they return depends on numbers."""
_NEVER = (0, 0)
"""(stream, its clock) of a work that every other one starts after."""


class StreamRaceError(RunError):
    """Two works in streams of a GPU touch the same memory, and no event is between them."""


def _storage_reference(storage: torch.UntypedStorage) -> Callable[[], bool]:
    """A function that says whether the storage is still there, and does not keep it."""
    reference = StorageWeakRef(storage)
    return lambda: not reference.expired()


@dataclass(eq=False)
class _Memory:
    """What is known of one storage.

    owner     the stream that it was allocated on; None: the host has allocated it
    name      what the work was that wrote it last
    written   (stream, its clock) of the last write
    read      stream -> its clock at the last read since then
    """

    alive: Callable[[], bool]
    owner: "PlayedStream | None"
    name: str
    written: tuple[int, int]
    read: Clock = field(default_factory=dict)


class PlayedCuda:
    """Has the functions of `runtime.cuda.TorchCuda` that the package uses.

    unwatched   True while ops run that are parts of one work, which is watched as a whole
    """

    # The CPU needs smaller ones than a GPU.
    matrix_size, copied_bytes = 512, 2**22

    def __init__(self) -> None:
        self.unwatched = False
        self._streams: list[PlayedStream] = []
        self._memory: dict[int, _Memory] = {}
        self._host: Clock = {}
        self._capturing: PlayedGraph | None = None
        self._current: PlayedStream = self.Stream()

    # ---- The hardware ----

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        """More GPUs than a machine can have."""
        return 10**4

    def device(self, name: str) -> torch.device:
        return torch.device("cpu")

    def get_device_name(self, device: object) -> str:
        return MODEL

    def mem_get_info(self, device: object) -> tuple[int, int]:
        """(free bytes, all of them)"""
        return MEMORY_BYTES // 2, MEMORY_BYTES

    def get_device_properties(self, device: object) -> Any:
        """Each process has hardware of its own, which holds no known number of threads."""
        return SimpleNamespace(
            uuid=f"{device} {os.getpid()} {socket.gethostname()}",
            multi_processor_count=0,
            max_threads_per_multi_processor=0,
        )

    def can_device_access_peer(self, device: object, peer_device: object) -> bool:
        """True, as all of them have the memory of the CPU."""
        return True

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        return lambda: None

    def limit_memory(self, limits: dict[str, int]) -> None:
        pass

    def sleep(self, cycles: int) -> None:
        pass

    # ---- Other ranks ----

    def can_reach_ranks(self) -> bool:
        return True

    def peer_errors(self) -> tuple[type[BaseException], ...]:
        return (RuntimeError,)

    def peer_group(
        self,
        store: Any,
        end: int,
        place: RankPlace,
        timeout: timedelta,
        is_aborted: Callable[[], bool],
    ) -> "PlayedNccl":
        gloo = gloo_group(store, end, 2, interface_of(place), timeout)
        return PlayedNccl(self, gloo, is_aborted)

    # ---- Streams, events and graphs ----

    def synchronize(self, device: object = None) -> None:
        """The host waits for all streams."""
        self._refuse_in_capture("synchronize")
        for stream in self._streams:
            _join(self._host, stream.clock)
        self._look_for_freed()

    def Stream(self, device: object = None) -> "PlayedStream":
        stream = PlayedStream(self, len(self._streams))
        self._streams.append(stream)
        return stream

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> "PlayedEvent":
        return PlayedEvent(self)

    def CUDAGraph(self) -> "PlayedGraph":
        return PlayedGraph(self)

    def graph_pool_handle(self) -> object:
        return object()

    @contextmanager
    def stream(self, stream: "PlayedStream") -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            with _Watch(self):
                yield
        finally:
            self._current = before
            self._look_for_freed()

    def set_stream(self, stream: "PlayedStream") -> None:
        """Issue to this stream until the `stream` that is entered is left."""
        if self._capturing is not None and stream not in self._capturing.streams:
            raise StreamRaceError(
                f"stream {stream.number} is used in a capture that it was not forked from"
            )
        self._current = stream

    def at_work(self, code: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tensors, which returns new ones, as a work whose parts are not watched."""
        name = "compiled code"

        def run(*tensors: Tensor) -> Any:
            if self._capturing is None:
                return self.issue(name, lambda: self._unwatched(code, tensors), tensors, ())
            made = _tensors(self._unwatched(code, tensors))
            self._capturing.add_again(
                name, self._current, lambda: code(*tensors), list(tensors), made
            )
            return made

        return run

    def _unwatched(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        before, self.unwatched = self.unwatched, True
        try:
            return function(*tensors)
        finally:
            self.unwatched = before

    @contextmanager
    def graph(
        self,
        graph: "PlayedGraph",
        *,
        stream: "PlayedStream",
        pool: object = None,
        capture_error_mode: str = "",
    ) -> Iterator[None]:
        self._refuse_in_capture("begin another capture")
        self._capturing = graph
        graph.streams = [stream]
        with self.stream(stream):
            try:
                yield
            finally:
                if self._current is not stream:
                    # As CUDA, which goes on with the capture then.
                    raise RuntimeError("a capture ends on another stream than it began on")
                self._capturing = None
        graph.check_joined()

    def issue(self, name: str, work: Callable[[], Any], reads: Any, writes: Any) -> Any:
        """Run a work on the current stream. `writes` are the tensors that it writes over; those
        that it returns are new."""
        stream = self._current
        self._look_for_freed()
        _join(stream.clock, self._host)
        self._take_freed(stream, name)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensor in _tensors(reads):
            self._read(stream, tensor, name)
        for tensor in _tensors(writes):
            self._write(stream, tensor, name)
        result = work()
        for tensor in _tensors(result):
            self._made(stream, tensor, name)
        return result

    def _read(self, stream: "PlayedStream", tensor: Tensor, name: str) -> None:
        memory = self._memory_of(tensor)
        if memory is None:
            return
        writer, at = memory.written
        if stream.clock.get(writer, 0) < at:
            raise StreamRaceError(
                f"{name} in stream {stream.number} reads what {memory.name} in stream {writer} "
                "may still write: no event is between them"
            )
        memory.read[stream.number] = stream.clock[stream.number]

    def _write(self, stream: "PlayedStream", tensor: Tensor, name: str) -> None:
        memory = self._memory_of(tensor)
        if memory is None:
            return
        for other, at in [memory.written, *memory.read.items()]:
            if stream.clock.get(other, 0) < at:
                raise StreamRaceError(
                    f"{name} in stream {stream.number} writes over what stream {other} may still "
                    "use: no event is between them"
                )
        memory.written, memory.read, memory.name = _now(stream), {}, name

    def _made(self, stream: "PlayedStream", tensor: Tensor, name: str) -> None:
        """A work has returned this tensor: of new memory it is the first write."""
        memory = self._memory_of(tensor, stream)
        if memory is not None and memory.owner is stream and memory.written == _NEVER:
            memory.written, memory.name = _now(stream), name

    def _memory_of(self, tensor: Tensor, owner: "PlayedStream | None" = None) -> _Memory | None:
        """What is known of the tensor's storage. One that was never seen before is the owner's."""
        if not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        memory = self._memory.get(key)
        if memory is None or not memory.alive():
            if memory is not None:
                self._note_freed(memory)
            memory = _Memory(_storage_reference(storage), owner, "the host", _NEVER)
            self._memory[key] = memory
        return memory

    def _look_for_freed(self) -> None:
        """Note what was freed since the last look."""
        freed = [key for key, memory in self._memory.items() if not memory.alive()]
        for key in freed:
            self._note_freed(self._memory.pop(key))

    def _note_freed(self, memory: _Memory) -> None:
        """What was freed may be written over by the next work of its owner."""
        if memory.owner is not None:
            memory.owner.freed.append(memory)

    def _take_freed(self, stream: "PlayedStream", name: str) -> None:
        """Check what the next work of a stream may write over."""
        for memory in stream.freed:
            for other, at in [memory.written, *memory.read.items()]:
                if stream.clock.get(other, 0) < at:
                    raise StreamRaceError(
                        f"{name} in stream {stream.number} may write over what {memory.name} made "
                        f"there, which was freed while stream {other} may still use it"
                    )
        stream.freed.clear()

    def _refuse_in_capture(self, what: str) -> None:
        if self._capturing is not None:
            raise RuntimeError(f"CUDA does not {what} while it captures a graph")


@contextmanager
def played() -> Iterator[None]:
    """GPUs are reached by the CUDA that the CPU plays, also from processes that are started."""
    before = cuda_maker()
    reach_gpus_by(PlayedCuda)
    try:
        yield
    finally:
        reach_gpus_by(before)


class PlayedStream:
    """Works that run one after another.

    clock   what its next work surely starts after
    freed   memory that its next work may write over
    """

    def __init__(self, cuda: PlayedCuda, number: int) -> None:
        self.cuda, self.number = cuda, number
        self.clock: Clock = {}
        self.freed: list[_Memory] = []

    def wait_event(self, event: "PlayedEvent") -> None:
        capturing = self.cuda._capturing
        if capturing is None:
            _join(self.clock, event.reached())
        elif event in capturing.recorded:
            capturing.log.append((self, event))
            if self not in capturing.streams:
                capturing.streams.append(self)
        else:
            self.cuda._refuse_in_capture("wait for an event that was recorded before")


class PlayedEvent:
    """Happens when all has ended that its stream was given before it was recorded."""

    def __init__(self, cuda: PlayedCuda) -> None:
        self.cuda = cuda
        self._clock: Clock | None = None
        self._seconds = 0.0

    def record(self, stream: PlayedStream) -> None:
        capturing = self.cuda._capturing
        if capturing is not None and stream in capturing.streams:
            capturing.recorded.add(self)
            capturing.log.append((stream, _Record(self)))
            return
        self._clock, self._seconds = dict(stream.clock), time.perf_counter()

    def reached(self) -> Clock:
        """What has surely ended after this event. Raises `StreamRaceError` for one that was not
        recorded yet: in CUDA a wait for it waits for nothing."""
        if self._clock is None:
            raise StreamRaceError(
                "an event is awaited before it is recorded, so the wait has no effect"
            )
        return self._clock

    def synchronize(self) -> None:
        _join(self.cuda._host, self.reached())

    def query(self) -> bool:
        """True, as all that was issued has run."""
        return True

    def elapsed_time(self, end: "PlayedEvent") -> float:
        """Milliseconds from this event to another one."""
        return 1e3 * (end._seconds - self._seconds)


class PlayedNccl:
    """What `ProcessGroupNCCL` has of sends and receives, over a group of gloo.

    A message is a work of a stream of the group's own, which starts after the current one. The host
    waits until it has arrived. So ranks that do not have their messages in one order wait for ever,
    as they may with NCCL.

    is_aborted   once it returns True, waits raise RuntimeError
    """

    def __init__(self, cuda: PlayedCuda, group: Any, is_aborted: Callable[[], bool]) -> None:
        self._cuda, self._group, self._is_aborted = cuda, group, is_aborted
        self._stream = cuda.Stream()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> "PlayedMessage":
        return self._issue(
            "send", lambda: self._wait(self._group.send(tensors, rank, tag)), tensors, ()
        )

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> "PlayedMessage":
        return self._issue(
            "receive", lambda: self._wait(self._group.recv(tensors, rank, tag)), (), tensors
        )

    def _issue(
        self, name: str, work: Callable[[], object], reads: object, writes: object
    ) -> "PlayedMessage":
        before, after = self._cuda.Event(), self._cuda.Event()
        before.record(self._cuda._current)
        self._stream.wait_event(before)
        with self._cuda.stream(self._stream):
            self._cuda.issue(name, work, reads, writes)
        after.record(self._stream)
        return PlayedMessage(self._cuda, after)

    def _wait(self, message: Any) -> None:
        """Wait for a message of gloo, which cannot be broken off, in a thread of its own."""
        ended: SimpleQueue[BaseException | None] = SimpleQueue()

        def wait() -> None:
            try:
                message.wait()
            except BaseException as error:
                ended.put(error)
            else:
                ended.put(None)

        threading.Thread(target=wait, name="message", daemon=True).start()
        while not self._is_aborted():
            with suppress(Empty):
                if (error := ended.get(timeout=0.02)) is not None:
                    raise error
                return
        raise RuntimeError("the step was aborted")

    def abort(self) -> None:
        """Gloo closes its connections with the group."""


@dataclass(frozen=True, eq=False)
class PlayedMessage:
    """A message that was issued, and the event of its end."""

    cuda: PlayedCuda
    ended: PlayedEvent

    def wait(self) -> None:
        """Have the current stream go on after the message."""
        self.cuda._current.wait_event(self.ended)


@dataclass(frozen=True, eq=False)
class _Captured:
    """A work of a graph: what it is called, how it runs again, and what it reads and writes."""

    name: str
    again: Callable[[], None]
    reads: list[Tensor]
    writes: list[Tensor]


@dataclass(frozen=True, eq=False)
class _Record:
    """The recording of an event in a capture."""

    event: PlayedEvent


class PlayedGraph:
    """Works that were captured, to be replayed on the same memory.

    log        (stream, a work, the recording of an event, or an event that is waited for)
    streams    that in which the capture began, and those that were forked from it
    recorded   events that were recorded in the capture
    """

    def __init__(self, cuda: PlayedCuda) -> None:
        self.cuda = cuda
        self.log: list[tuple[PlayedStream, _Captured | _Record | PlayedEvent]] = []
        self.streams: list[PlayedStream] = []
        self.recorded: set[PlayedEvent] = set()

    def add_again(
        self,
        name: str,
        stream: PlayedStream,
        run: Callable[[], Any],
        reads: list[Tensor],
        made: list[Tensor],
        written: Sequence[Tensor] = (),
    ) -> None:
        """Add a work that has made tensors: a kernel writes its results to where they were when it
        was captured. `written` are those that it writes over, and may return."""

        def again() -> None:
            results = [t for t in _tensors(run()) if all(t is not w for w in written)]
            for old, new in zip(made, results, strict=True):
                _once(old).copy_(_once(new))

        self.log.append((stream, _Captured(name, again, reads, [*written, *made])))

    def replay(self) -> None:
        """Run the works: those of the first stream on the current one."""
        cuda, origin = self.cuda, self.cuda._current
        played = {self.streams[0]: origin}
        happened: dict[PlayedEvent, Clock] = {}
        cuda.unwatched = True
        try:
            for stream, entry in self.log:
                own = played.setdefault(stream, stream)
                match entry:
                    case _Record(event):
                        happened[event] = dict(own.clock)
                    case PlayedEvent():
                        _join(own.clock, happened[entry])
                    case _Captured(name, again, reads, writes):
                        cuda._current = own
                        cuda.issue(f"{name} of a graph", again, reads, writes)
        finally:
            cuda.unwatched, cuda._current = False, origin

    def check_joined(self) -> None:
        """Raise RuntimeError, as CUDA does, if the first stream does not wait for all works."""
        clocks: dict[PlayedStream, Clock] = {stream: {} for stream in self.streams}
        happened: dict[PlayedEvent, Clock] = {}
        for stream, entry in self.log:
            clock = clocks[stream]
            match entry:
                case _Record(event):
                    happened[event] = dict(clock)
                case PlayedEvent():
                    _join(clock, happened[entry])
                case _:
                    clock[stream.number] = clock.get(stream.number, 0) + 1
        first = clocks[self.streams[0]]
        for stream, clock in clocks.items():
            if clock.get(stream.number, 0) > first.get(stream.number, 0):
                raise RuntimeError("a stream was not joined when the capture ended")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as in frontends/recording.py
    """Issues every op of torch to the current stream, or captures it."""

    def __init__(self, cuda: PlayedCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or self.cuda.unwatched:
            return func(*args, **kwargs)
        if self.cuda._capturing is None:
            written = _written(func, args, kwargs)
            return self.cuda.issue(
                str(func), lambda: func(*args, **kwargs), (args, kwargs), written
            )
        if func in _WAITS_FOR_RESULT:
            raise RuntimeError(f"CUDA does not run {func} while it captures a graph")
        # What is captured does not run before its replay: what it writes over stays as it is.
        written = _tensors(_written(func, args, kwargs))
        before = [tensor.clone() for tensor in written]
        result = func(*args, **kwargs)
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)
        made = [t for t in _tensors(result) if all(t is not own for own in written)]

        self.cuda._capturing.add_again(
            str(func),
            self.cuda._current,
            lambda: func(*args, **kwargs),
            _tensors((args, kwargs)),
            made,
            written,
        )
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an op writes over, by its schema."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if place < len(args):
                written.append(args[place])
            elif argument.name in kwargs:
                written.append(kwargs[argument.name])
    return written


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _once(tensor: Tensor) -> Tensor:
    """The tensor without the dimensions along which it repeats itself."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, min(1, tensor.shape[dimension]))
    return tensor


def _now(stream: PlayedStream) -> tuple[int, int]:
    return stream.number, stream.clock.get(stream.number, 0)


def _join(clock: Clock, other: Clock) -> None:
    for stream, at in other.items():
        if clock.get(stream, 0) < at:
            clock[stream] = at
