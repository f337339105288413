"""A CUDA without a GPU: streams, events and graphs that compute on the CPU.

What is issued runs at once. A captured graph knows of each op only what CUDA would know, that it
starts after those before it in its stream and after the events awaited there; a replay runs the ops
in any such order, drawn at random, on the memory that capture used. So a wait that is missing, or
memory that is reused too early, gives wrong numbers sooner or later.
"""

import random
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FakeCuda:
    """Has the methods of `torch.cuda` that schedules use; `log`: all that was issued."""

    def __init__(self, available=True, seed=0):
        self.available, self.rng = available, random.Random(seed)
        self.log, self.made, self.clock = [], 0, 0.0
        self.current, self.recording = None, None
        self.default = self.current = self.Stream()

    def is_available(self):
        return self.available

    def synchronize(self):
        assert self.recording is None, "CUDA refuses to synchronise while it captures"

    def Stream(self):
        self.made += 1
        return FakeStream(self, self.made - 1)

    def Event(self, enable_timing=False):
        return FakeEvent(self, enable_timing)

    def CUDAGraph(self):
        return FakeGraph(self)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def set_stream(self, stream):
        self.current = stream

    @contextmanager
    def graph(self, graph, stream, pool, capture_error_mode):
        self.recording = graph
        stream.after, stream.captured = set(), True
        with self.stream(stream), _Recorder(self):
            yield
        graph.check_joined(stream)
        self.recording = None
        for each in graph.streams | {stream}:
            each.captured = False


class FakeStream:
    def __init__(self, cuda, number):
        self.cuda, self.number = cuda, number
        self.after, self.captured = set(), False

    def wait_event(self, event):
        self.cuda.log.append(("wait", self.number, event))
        assert event.recorded, "an event that was not recorded is waited for in vain"
        if self.cuda.recording:
            assert event.captured, "an event from before capture is no dependency of the graph"
            self.after = self.after | event.after if self.captured else set(event.after)
            self.captured = True
            self.cuda.recording.streams.add(self)


class FakeEvent:
    def __init__(self, cuda, enable_timing):
        self.cuda, self.timing = cuda, enable_timing
        self.recorded = self.captured = False

    def record(self, stream=None):
        stream = stream or self.cuda.current
        self.cuda.log.append(("record", stream.number, self))
        self.recorded, self.captured = True, stream.captured
        self.after, self.at = set(stream.after), self.cuda.clock

    def elapsed_time(self, end):
        assert self.timing and end.timing
        return 1e3 * (end.at - self.at)


class FakeGraph:
    """nodes: (ops that must run before, the op, its arguments, its result)."""

    def __init__(self, cuda):
        self.cuda, self.nodes, self.streams = cuda, [], set()

    def add(self, stream, func, args, kwargs, result):
        assert stream.captured, "an op on a stream that was not forked from the capture"
        self.nodes.append((frozenset(stream.after), func, args, kwargs, result))
        stream.after = {len(self.nodes) - 1}

    def check_joined(self, stream):
        joined, left = set(), set(stream.after)
        while left:
            joined |= left
            left = {before for node in left for before in self.nodes[node][0]} - joined
        assert len(joined) == len(self.nodes), "a stream was not joined when capture ended"

    def replay(self):
        self.cuda.clock += 1.0
        left = dict(enumerate(self.nodes))
        while left:
            ready = [n for n, (after, *_) in left.items() if not any(a in left for a in after)]
            _, func, args, kwargs, result = left.pop(self.cuda.rng.choice(ready))
            again = func(*args, **kwargs)
            if not func.is_view and not func._schema.is_mutable:
                _write(result, again)


class _Recorder(TorchDispatchMode):
    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.cuda.recording.add(self.cuda.current, func, args, kwargs, result)
        return result


def _write(result, again):
    """A kernel writes its results to where they were when it was captured."""
    old, new = ([r] if isinstance(r, torch.Tensor) else list(r or ()) for r in (result, again))
    for to, value in zip(old, new, strict=True):
        to.copy_(value)
