"""Runs streams of kernels on a GPU, as one CUDA graph that is captured once and replayed.

Before anything runs, the streams are checked for races. Then three things happen on the streams
that are captured. First each kernel runs once, one after another, so that cuDNN chooses its
algorithms (`cudnn.benchmark`) undisturbed. Then the whole schedule runs, so that cuBLAS has its
workspaces for each stream. Then the schedule is captured.

The outputs of kernels get memory in one of two ways:

* From the allocator, in the graph's private pool (default). Nothing is copied. A kernel's outputs
  are held until a kernel of the same stream is issued that all their readers happen before
  (`issuing`), because the allocator keeps free memory per stream. The price is that memory freed on
  one stream is of no use to another stream. The addresses that capture got are checked for races
  too, before the first replay.
* From an `arena` by `plan_memory`, which takes the least memory and is shared between streams. The
  price is a copy of every kernel's outputs, because most of torch's ops cannot write to memory that
  they are given.

A sequential schedule is a schedule of one stream.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dovetail.executors.gpus.streams import capture, mark, seconds_between
from dovetail.executors.stages.issuing import Group, as_one, issue, steps_of, together
from dovetail.executors.stages.memory import plan_memory
from dovetail.executors.stages.preparing import Function, PlacedKernels, require
from dovetail.frontends.interpret import Values
from dovetail.frontends.program import Ref
from dovetail.runtime.timers import Repeats, Timing, summarise, time_steps
from dovetail.runtime.torch_versions import pytree
from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.races import Buffer, check_races
from dovetail.schedulers.records import KernelBlock

Merged = Mapping[Group, Function]
"""Group of kernels -> the function that runs instead of them. It takes and returns what
`PreparedKernels.function` of the same kernels, in the same order, takes and returns."""

WARM_UPS = 2
"""How often the whole schedule runs before it is captured."""


class CudaNetwork:
    """A network on a GPU, run by one schedule. Call it with inputs, or `replay` the last inputs.

    memory_bytes   bytes of memory for the kernels' outputs: the size of the arena, or all addresses
                   that capture used. Parameters, inputs and workspaces do not count
    """

    def __init__(
        self,
        placed: PlacedKernels,
        streams: Streams,
        *,
        merged: Merged | None = None,
        arena: bool = False,
        cuda: Any = torch.cuda,
    ) -> None:
        """Check, warm up and capture the schedule. `cuda` is `torch.cuda` or a fake of it.

        Raises `RaceError` before anything runs, `UsageError` without a GPU, and ValueError for
        merged kernels that do not stand side by side in one stream, in ascending order.
        """
        self._placed, self._cuda, self._merged = placed, cuda, dict(merged or {})
        block, outputs, kernels = placed.block, placed.outputs, placed.prepared.kernels
        streams = together(streams, self._merged)
        check_races(block, streams)
        require(cuda)
        steps = steps_of(block, streams, self._merged, outputs)
        lanes = [cuda.Stream() for _ in streams.orders]
        self._functions: dict[Group, tuple[Function, Group, Group]] = {}
        self._slots: Values = {}
        self._values: Values = {}
        self._spans: list[list[Buffer]] = [[] for _ in kernels]
        sizes: list[list[Tensor]] = [[] for _ in kernels]

        def measure(group: Group) -> None:
            self._run(group)
            for kernel in group:
                made = [self._values[tensor] for tensor in kernels[kernel].writes]
                # On "meta" a tensor has a shape, a type and dense strides, but no memory.
                sizes[kernel] = [torch.empty_like(value, device="meta") for value in made]

        def free(group: Group) -> None:
            for kernel in group:
                for tensor in kernels[kernel].writes:
                    del self._values[tensor]

        def run_all() -> None:
            self._values = dict(self._inputs)
            issue(steps, lanes, cuda, self._run, free)

        with _benchmarking():
            # The graph reads its inputs from fixed addresses; `__call__` copies new inputs there.
            self._inputs = {t: torch.empty_like(v).copy_(v) for t, v in placed.inputs.items()}
            self._values = dict(self._inputs)
            cuda.synchronize()
            # cuDNN chooses algorithms, one kernel at a time.
            alone = Streams((tuple(range(len(block))),), ())
            issue(steps_of(block, alone, (), outputs), lanes[:1], cuda, measure, free)
            cuda.synchronize()
            if arena:
                # The arena is planned and allocated, with a view of it for each tensor.
                needed = [[t.nbytes for t in own] for own in sizes]
                plan = plan_memory(block, streams, needed, outputs)
                check_races(block, streams, plan.buffers, outputs)
                device = next(iter(self._inputs.values())).device
                memory = torch.empty(plan.total_bytes, dtype=torch.uint8, device=device)
                for kernel, own, places in zip(kernels, sizes, plan.buffers, strict=True):
                    for tensor, like, place in zip(kernel.writes, own, places, strict=True):
                        flat = memory[place.start : place.end].view(like.dtype)
                        self._slots[tensor] = flat.as_strided(like.shape, like.stride())
            for _ in range(WARM_UPS):
                run_all()
                cuda.synchronize()
            self._values = dict(self._inputs)
            self._graph = capture(cuda, lanes[0], run_all)
        # Now the addresses are known that capture got, so they are checked before the first replay.
        # Views of inputs and constants are left out, because no kernel writes there.
        constants = placed.prepared.constants
        kept = (*self._inputs.values(), *constants.values())
        fixed = [_span(tensor) for tensor in kept if tensor.numel()]
        buffers = [
            [span for span in own if not any(f.start <= span.start < f.end for f in fixed)]
            for own in self._spans
        ]
        whole, owned, outputs = as_one(block, buffers, outputs, self._merged)
        check_races(whole, streams, owned, outputs)
        if arena:
            self.memory_bytes = memory.numel()
        else:
            # Bytes that buffers share count once.
            self.memory_bytes = end = 0
            for buffer in sorted((b for own in buffers for b in own), key=lambda b: b.start):
                self.memory_bytes += max(0, buffer.end - max(buffer.start, end))
                end = max(end, buffer.end)
        self._values = {
            t: self._values[t] if t in self._values else constants[t]
            for t in placed.prepared.returned
        }

    def __call__(self, *inputs: Tensor) -> Any:
        """Run a step on the current stream; return copies of what the plain model returns."""
        with torch.no_grad():
            for static, value in zip(self._inputs.values(), inputs, strict=True):
                static.copy_(value, non_blocking=True)
            self.replay()
            return pytree.tree_map_only(
                Ref, lambda ref: self._values[ref.tensor].clone(), self._placed.prepared.outputs
            )

    def replay(self) -> None:
        """Run a step on the last inputs, on the current stream."""
        self._graph.replay()

    def time(self, samples: int = 30, warm_up: int = 5) -> tuple[float, ...]:
        """[samples] seconds of single replays."""
        return event_seconds(self.replay, samples, warm_up, self._cuda)

    def _run(self, group: Group) -> None:
        """Run a function and store its results and their addresses."""
        kernels = self._placed.prepared.kernels
        if group not in self._functions:
            function, takes, returns = self._placed.prepared.function(group)
            # Kernels are issued in ascending order; a merged function takes and returns its tensors
            # in the order of its own group.
            for own, merged in self._merged.items():
                if set(own) == set(group):
                    _, takes, returns = self._placed.prepared.function(own)
                    function = merged
            self._functions[group] = function, takes, returns
        function, takes, returns = self._functions[group]
        with _naming(group):
            results = function(*(self._values[t] for t in takes))
        for tensor, result in zip(returns, results, strict=True):
            if tensor in self._slots:
                result = self._slots[tensor].copy_(result)
            self._values[tensor] = result
        for kernel in group:
            self._spans[kernel] = [_span(self._values[t]) for t in kernels[kernel].writes]


class StageClock:
    """Times stages, each captured as a small CUDA graph of its own.

    It keeps the outputs of every kernel on the device, because stages read them. A stage is
    captured `repeats` times in a row, so that the launch of the graph is shared by that many
    stages. Each repetition forks and joins its streams, as a stage in a schedule does. If there are
    more groups than `streams`, they are dealt out round robin.
    """

    def __init__(
        self, placed: PlacedKernels, *, streams: int = 8, repeats: int = 8, cuda: Any = torch.cuda
    ) -> None:
        require(cuda)
        self.block = placed.block
        self._placed, self._cuda, self._repeats = placed, cuda, repeats
        self._lanes = [cuda.Stream() for _ in range(streams)]
        self._values = dict(placed.inputs)
        cuda.synchronize()
        with _benchmarking(), cuda.stream(self._lanes[0]):
            for number in range(len(placed.prepared.kernels)):
                function, takes, returns = placed.prepared.function((number,))
                with _naming((number,)):
                    results = function(*(self._values[t] for t in takes))
                self._values.update(zip(returns, results, strict=True))
        cuda.synchronize()

    def time(
        self, groups: Sequence[Group], merged: Function | None = None, samples: int = 7
    ) -> Timing:
        """Seconds of a stage, whose groups run at the same time, the kernels of each in order.

        `merged` is a function to run instead of the kernels of the only group. It takes and returns
        what `PreparedKernels.function` of that group does.
        """
        if merged is not None and len(groups) != 1:
            raise ValueError("merged kernels are one group")
        functions = [self._placed.prepared.function(group) for group in groups]
        lanes = self._lanes[: len(groups)]
        count = len(lanes)
        orders = tuple(tuple(range(lane, len(groups), count)) for lane in range(count))
        steps = steps_of(KernelBlock((0,) * len(groups)), Streams(orders, ()))

        def run(kernels: Group) -> None:
            (group,) = kernels
            function, takes, _ = functions[group]
            with _naming(groups[group]):
                (merged or function)(*(self._values[t] for t in takes))

        def work() -> None:
            for _ in range(self._repeats):
                issue(steps, lanes, self._cuda, run)

        # It is issued once outside capture, where cuDNN and cuBLAS prepare what a first run needs.
        with _benchmarking():
            issue(steps, lanes, self._cuda, run)
            graph = capture(self._cuda, lanes[0], work)
        seconds = event_seconds(graph.replay, samples, 1, self._cuda)
        return summarise([each / self._repeats for each in seconds], self._repeats)


def event_seconds(
    call: Callable[[], object], samples: int, warm_up: int, cuda: Any = torch.cuda
) -> tuple[float, ...]:
    """[samples] seconds on the device, between an event before and an event after each call.

    The calls are issued one after another without waiting for the device in between.
    """

    def between_events() -> tuple[Any, Any]:
        begin = mark(cuda, enable_timing=True)
        call()
        return begin, mark(cuda, enable_timing=True)

    pairs = time_steps(between_events, Repeats(samples), warm_up=call, warm_ups=warm_up)
    cuda.synchronize()
    return tuple(seconds_between(begin, end) for begin, end in pairs)


@contextmanager
def _benchmarking() -> Iterator[None]:
    """A context in which cuDNN chooses algorithms by measuring.

    It is needed in capture too. Otherwise cuDNN would choose again there, by a heuristic.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _naming(kernels: Group) -> Iterator[None]:
    """A context that adds the kernels' numbers to an error that is raised within."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while kernels {', '.join(map(str, kernels))} were issued")
        raise


def _span(value: Tensor) -> Buffer:
    """The range of addresses of a tensor's bytes, gaps included."""
    if not value.numel():
        return Buffer(0, 0)
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return Buffer(value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size())
