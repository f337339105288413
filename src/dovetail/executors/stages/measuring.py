"""Measures stage costs on a device: each distinct stage once, and keeps them in the cost cache.

On a CPU a stage is repeated inside its threads. Starting the threads, which takes several times as
long as a small stage, does not count, because a stage in a step begins in threads that run already.
Kernels by themselves are timed within passes over the whole step, on one thread and on all threads:
there their weights and inputs are not in the caches, as they are for what is repeated. On one
thread kernels are timed repeated as well. A stage is then assumed to be slower in a step by the
same factor as its kernels. Costs are kept under the processor, its threads and the version of
torch, so that a later search measures nothing.

A stage cannot be faster than its longest group on one thread, nor than all of its work shared by
all threads. If this bound shows that a stage cannot beat its kernels one by one, `bounded` does not
measure it.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from dovetail.costs import CostCache
from dovetail.costs.cache import MeasuredCost
from dovetail.executors.stages.cpu import Functions, SegmentStreams
from dovetail.executors.stages.cuda import StageClock
from dovetail.executors.stages.issuing import segments_of
from dovetail.executors.stages.merging import merged_function
from dovetail.executors.stages.phases import AloneSeconds, barriers, spread
from dovetail.executors.stages.preparing import PreparedKernels
from dovetail.frontends.runners import make_runner, runner_kind
from dovetail.runtime.timers import Repeats, clock, seconds_of, summarise, time_steps, times_within
from dovetail.schedulers.merge import can_merge
from dovetail.schedulers.records import KernelBlock, OpSet, StageTiming, groups_of, members
from dovetail.schedulers.timing import key_of

_WARM_UP_PASSES, _LEAST_PASSES, _MOST_TIMED_PASSES = 2, 5, 100
_SECONDS = 3.0
"""Passes go on for this long, but there are never fewer than `_LEAST_PASSES` that count."""
LEAST_SECONDS = 1e-7
"""The least seconds that any kernel is assumed to take."""


def seconds_in_passes(
    functions: Functions,
    kernels: int,
    threads: int,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> list[list[float]]:
    """[kernels][passes] seconds of each kernel within a step: passes of one kernel after another on
    the values of the example step, as many as three seconds allow.

    A kernel that is repeated finds its weights and inputs in the caches. In a step other kernels
    have used the caches since, and large weights, concatenations and poolings take several times as
    long. The runner itself stamps when each call begins and ends, so that a kernel's time is that
    of its calls.
    """
    runs = [functions.of([kernel]) for kernel in range(kernels)]
    runner = make_runner(functions.entries)
    functions.fill_constants(runner, runs)
    for tensor, value in functions.example.items():
        runner.set(tensor, value)
    of_kernels = [function.instructions(runner) for function in runs]
    stream = runner.stream(chain.from_iterable(of_kernels))
    ends = np.cumsum([len(own) for own in of_kernels])  # [kernels]
    stamps = np.zeros((int(ends[-1]) if kernels else 0, 2), dtype=np.int64)

    def pass_over() -> list[float]:
        runner.run(stream, stamps=int(stamps.ctypes.data))
        first, seconds = 0, []
        for end in ends.tolist():
            taken = (stamps[end - 1, 1] - stamps[first, 0]) / 1e9 if end > first else 0.0
            seconds.append(max(LEAST_SECONDS, float(taken)))
            first = end
        return seconds

    repeats = Repeats(_MOST_TIMED_PASSES, _LEAST_PASSES, _SECONDS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        passes = time_steps(
            pass_over, repeats, warm_ups=_WARM_UP_PASSES, progress=progress, clock=clock
        )
    finally:
        torch.set_num_threads(before)
    return list(map(list, zip(*passes, strict=True)))


PROTOCOL = 9
"""A part of every cache key. Raise it when what is measured changes: old costs then go unused."""
_VISITS, _MOST_VISITS = 5, 15
_DOUBTFUL = 1.1
"""A stage that takes more than this times what its kernels promise is visited again."""
_SAMPLE_SECONDS, _MOST_PASSES = 2e-3, 200
"""A sample of a stage repeats it for about this long, but at most this many times."""
_FIRST_SWITCHES, _SWITCHES, _PHASE_SECONDS = 20, 100, 3e-4
_TOGETHER = 16
"""Stages that are measured in turns, and then stored in the cache together."""
_LEAST_GAIN = 0.01
_NO_TIE = 1 + 1e-6
"""A stage that cannot win costs this times its kernels one by one, so that it never ties with
them."""

Progress = Callable[[str, float], None]
Stage = tuple[Sequence[Sequence[int]], bool]
"""(groups of kernels, True if the one group is merged to one kernel)."""


class MeasuredStages:
    """Stage costs of one step on one device: each is measured once, kept, and then looked up.

    asked     number of distinct stages and kernels that were asked for
    timed     how many of them were measured now, and not found in the cache
    seconds   seconds that measuring took
    """

    def __init__(
        self,
        block: KernelBlock,
        signatures: Sequence[str],
        keys: Sequence[Hashable | None],
        cache: CostCache,
        device: str,
        progress: Progress = lambda _doing, _fraction: None,
    ) -> None:
        self._block, self._signatures, self._keys = block, signatures, keys
        self._cache, self._progress = cache, progress
        self._device = f"{device} | torch {torch.__version__} | {runner_kind()} | stages {PROTOCOL}"
        self._known: dict[str, MeasuredCost] = {}
        self.asked = self.timed = 0
        self.seconds = 0.0

    def measure_stages(self, stages: Sequence[Stage]) -> list[MeasuredCost]:
        """The cost of each stage: its groups run at the same time, or its one group merged."""
        raise NotImplementedError

    def one_by_one(self, kernels: Sequence[int]) -> float:
        """Seconds of kernels one after another, each run in the fastest way."""
        raise NotImplementedError

    def in_step(self, kernels: Sequence[int]) -> float:
        """The factor from a stage's seconds when it is repeated to its seconds within a step."""
        return 1.0

    def cannot_win(self, groups: Sequence[Sequence[int]]) -> bool:
        """True if a stage of these groups surely gains no more than `_LEAST_GAIN` over its kernels
        one by one."""
        return False

    def bounded(self, stages: Sequence[OpSet]) -> list[StageTiming]:
        """As `timer`, but a stage that cannot beat its kernels one by one costs what those take."""
        return self.timer(stages, bounded=True)

    def timer(self, stages: Sequence[OpSet], *, bounded: bool = False) -> list[StageTiming]:
        """Seconds of every stage, run at the same time or merged, whichever is faster."""
        ask: dict[str, OpSet] = {}
        # [stages] name of the stage, kernels, True if they may be merged.
        described: list[tuple[str, list[int], bool]] = []
        for stage in stages:
            kernels = list(members(stage))
            name, merges = "", False
            if len(kernels) > 1:
                name = repr(key_of(self._block, stage, self._signatures))
                merges = can_merge(self._keys, kernels)
                # The bound does not cover merged kernels.
                if merges or not (bounded and self.cannot_win(self._groups(stage))):
                    ask.setdefault(name, stage)
                if merges:
                    ask.setdefault(f"merged {name}", stage)
            described.append((name, kernels, merges))

        def measure(asked: Sequence[tuple[str, OpSet]]) -> list[MeasuredCost]:
            return self.measure_stages(
                [
                    ([list(members(stage))], True)
                    if name.startswith("merged ")
                    else (self._groups(stage), False)
                    for name, stage in asked
                ]
            )

        found = self._measured(ask, measure)
        timings = []
        for name, kernels, merges in described:
            if name not in found:
                tie = _NO_TIE if len(kernels) > 1 else 1.0
                timings.append(StageTiming(self.one_by_one(kernels) * tie))
                continue
            share = self.in_step(kernels)
            timing = StageTiming(found[name].seconds * share)
            # Another stage of the same name may not be mergeable: its kernels may have several
            # inputs.
            if merges and found[f"merged {name}"].seconds * share < timing.seconds:
                timing = StageTiming(found[f"merged {name}"].seconds * share, merged=True)
            timings.append(timing)
        return timings

    def _groups(self, stage: OpSet) -> list[list[int]]:
        return [list(members(group)) for group in groups_of(self._block, stage)]

    def _measured(
        self,
        ask: dict[str, int],
        measure: Callable[[Sequence[tuple[str, int]]], list[MeasuredCost]],
    ) -> dict[str, MeasuredCost]:
        """Name -> its cost; those that the cache does not have are measured and added to it."""
        self.asked += sum(name not in self._known for name in ask)
        unknown = [name for name in ask if name not in self._known]
        self._known |= self._cache.costs(self._device, unknown)
        missing = [name for name in unknown if name not in self._known]
        began, threads = clock(), torch.get_num_threads()
        try:
            # Each batch is stored at once, so that little is lost if the search is interrupted.
            for place in range(0, len(missing), _TOGETHER):
                names = missing[place : place + _TOGETHER]
                found = measure([(name, ask[name]) for name in names])
                fresh = dict(zip(names, found, strict=True))
                self._cache.add_costs(self._device, fresh)
                self._known |= fresh
                self.timed += len(fresh)
                self._progress("measuring stages", (place + len(fresh)) / len(missing))
        finally:
            torch.set_num_threads(threads)
            self.seconds += clock() - began
        return {name: self._known[name] for name in ask}

    def _of_kernels(
        self,
        how: str,
        measure: Callable[[Sequence[tuple[str, int]]], list[MeasuredCost]] | None = None,
    ) -> list[float]:
        """[kernels] seconds, measured once for each distinct signature; without `measure` each is
        measured as a stage of its own."""
        names = [f"{how} {text}" for text in self._signatures]
        # In reverse, so that the first kernel of each name stands for it.
        ask = {name: kernel for kernel, name in reversed(list(enumerate(names)))}
        found = self._measured(
            ask,
            measure
            or (lambda asked: self.measure_stages([([[kernel]], False) for _, kernel in asked])),
        )
        return [found[name].seconds for name in names]


class CpuStages(MeasuredStages):
    """Stage costs on this process's cores."""

    def __init__(
        self,
        functions: Functions,
        block: KernelBlock,
        signatures: Sequence[str],
        keys: Sequence[Hashable | None],
        cache: CostCache,
        *,
        device: str,
        threads: int,
        progress: Progress = lambda _doing, _fraction: None,
    ) -> None:
        device = f"{device} | {threads} threads"
        super().__init__(block, signatures, keys, cache, device, progress)
        self._functions, self._threads = functions, threads
        self.alone = AloneSeconds(self._by_themselves(1), self._by_themselves(threads), 0.0)
        # [kernels] seconds on one thread when repeated, as stages are measured. Measuring them
        # needs an expectation: their seconds within a step.
        self._repeated: Sequence[float] = self.alone.one_thread
        self._repeated = self._of_kernels("over and over:")
        name = f"switching, GOMP_SPINCOUNT={os.environ.get('GOMP_SPINCOUNT')}"
        switching = self._measured({name: 0}, lambda _asked: [self._switching()])
        self.alone = replace(self.alone, switching=switching[name].seconds)

    def measure_stages(self, stages: Sequence[Stage]) -> list[MeasuredCost]:
        """The cost of each stage, from several visits to each.

        Stages are visited in turns, so that a disturbance of the machine affects few visits of any
        one stage. A stage that takes longer than its kernels promise is visited more often.
        """
        loops = []
        for groups, merged in stages:
            functions, orders = self._functions, groups
            if merged:
                functions = functions.merging([tuple(groups[0])])
            else:
                orders = spread(groups, self.alone.one_thread, self._threads)
            segments = segments_of(self._block, barriers([orders]), {})
            expected = max(sum(self._repeated[k] for k in order) for order in orders)
            loops.append(_StageLoop(SegmentStreams(segments, functions), expected))
        doubtful = loops
        for visit in range(_MOST_VISITS):
            for loop in doubtful:
                loop.visit()
            if visit + 1 >= _VISITS:
                doubtful = [loop for loop in doubtful if loop.is_doubtful]
        return [loop.measured for loop in loops]

    def one_by_one(self, kernels: Sequence[int]) -> float:
        return sum(self.alone.best(kernel) for kernel in kernels)

    def cannot_win(self, groups: Sequence[Sequence[int]]) -> bool:
        seconds = [sum(self.alone.one_thread[kernel] for kernel in group) for group in groups]
        least = max(max(seconds), sum(seconds) / self._threads)
        return least > (1 - _LEAST_GAIN) * sum(map(self.one_by_one, groups))

    def in_step(self, kernels: Sequence[int]) -> float:
        once, repeated = (
            sum(seconds[k] for k in kernels) for seconds in (self.alone.one_thread, self._repeated)
        )
        return once / repeated

    def _by_themselves(self, threads: int) -> list[float]:
        """[kernels] seconds within passes over the step, on this many threads."""
        found: dict[str, MeasuredCost] = {}

        def measure(asked: Sequence[tuple[str, int]]) -> list[MeasuredCost]:
            # Passes time all kernels at once; later batches only look them up.
            if not found:
                found.update(self._in_passes(threads))
            return [found[self._signatures[kernel]] for _, kernel in asked]

        return self._of_kernels(f"{threads} threads:", measure)

    def _in_passes(self, threads: int) -> dict[str, MeasuredCost]:
        """Signature -> the cost of its kernels, from the samples of all kernels that have it."""
        progress = partial(self._progress, f"measuring kernels, threads: {threads}")
        of_kernels = seconds_in_passes(self._functions, len(self._block), threads, progress)
        samples: dict[str, list[float]] = defaultdict(list)
        for signature, seconds in zip(self._signatures, of_kernels, strict=True):
            samples[signature] += seconds
        return {signature: _undisturbed(seconds) for signature, seconds in samples.items()}

    def _switching(self) -> MeasuredCost:
        """The cost of a switch from kernels on all threads to streams and back.

        It is the time of both alternating, minus the time of each alone. Both last long enough for
        threads that wait for the other's work to have gone to sleep. The caller's stream is empty,
        so that the whole wait for another thread counts.
        """
        if self._threads == 1:
            return MeasuredCost(0.0, 0.0)
        by_seconds = sorted(range(len(self._block)), key=lambda k: self.one_by_one([k]))
        kernel = by_seconds[len(by_seconds) // 2]
        segments = segments_of(self._block, barriers([[[kernel]]]), {})
        others = [*segments, *([] for _ in range(self._threads - 2))]
        streams = SegmentStreams([[], *others], self._functions)
        calls = times_within(_PHASE_SECONDS, self.alone.all_threads[kernel])
        passes = times_within(_PHASE_SECONDS, self.alone.one_thread[kernel])
        function = self._functions.of([kernel])
        runner = make_runner(self._functions.entries)
        self._functions.fill_constants(runner, [function])
        for tensor in function.takes:
            runner.set(tensor, self._functions.example[tensor])
        whole = partial(runner.run, runner.stream(calls * function.instructions(runner)))

        def streamed(times: int = 1) -> None:
            streams.run(times * passes)

        def switch() -> float:
            whole()
            alone = seconds_of(whole)
            # Two rounds of streams less one round is a round without the start of the threads.
            twice = seconds_of(partial(streamed, 2))
            once = seconds_of(streamed)
            in_turns = seconds_of(whole) + seconds_of(streamed)
            return max(0.0, in_turns - alone - (twice - once))

        torch.set_num_threads(self._threads)
        timing = summarise(time_steps(switch, Repeats(_SWITCHES), warm_ups=_FIRST_SWITCHES))
        return MeasuredCost(timing.median_seconds, timing.spread)


class CudaStages(MeasuredStages):
    """Stage costs on a GPU, each stage timed as a small CUDA graph of its own.

    A stage is assumed to take as long within a step as by itself, since the effect of a GPU's
    caches there was never measured. No bound on what it takes is known, because a GPU runs kernels
    side by side as it can.
    """

    def __init__(
        self,
        stage_clock: StageClock,
        prepared: PreparedKernels,
        signatures: Sequence[str],
        keys: Sequence[Hashable | None],
        cache: CostCache,
        *,
        device: str,
        progress: Progress = lambda _doing, _fraction: None,
    ) -> None:
        block = stage_clock.block
        super().__init__(block, signatures, keys, cache, device, progress)
        self._clock, self._prepared = stage_clock, prepared
        self.alone = self._of_kernels("kernel")

    def measure_stages(self, stages: Sequence[Stage]) -> list[MeasuredCost]:
        costs = []
        for groups, merged in stages:
            own = merged_function(self._prepared, groups[0])[0] if merged else None
            timing = self._clock.time([tuple(group) for group in groups], own)
            costs.append(MeasuredCost(timing.median_seconds, timing.spread))
        return costs

    def one_by_one(self, kernels: Sequence[int]) -> float:
        return sum(self.alone[kernel] for kernel in kernels)


class _StageLoop:
    """Repeats a stage in its threads and collects samples; `expected` seconds guide how often."""

    def __init__(
        self, threads: SegmentStreams, expected: float, clock: Callable[[], float] = clock
    ) -> None:
        self._threads, self._expected, self._clock = threads, expected, clock
        self._passes = times_within(_SAMPLE_SECONDS, expected, most=_MOST_PASSES)
        self._once: list[float] = []
        self._more: list[float] = []

    def visit(self) -> None:
        """Take a sample of one pass, and one of `_passes` more."""
        run = self._threads.run
        run()
        self._once.append(seconds_of(run, clock=self._clock))
        more = partial(run, 1 + self._passes)
        self._more.append(seconds_of(more, clock=self._clock))

    @property
    def measured(self) -> MeasuredCost:
        """The cost of one pass among others; the start of the threads cancels."""
        more = _undisturbed(self._more)
        seconds = (more.seconds - _undisturbed(self._once).seconds) / self._passes
        return MeasuredCost(max(LEAST_SECONDS, seconds), more.spread)

    @property
    def is_doubtful(self) -> bool:
        return self.measured.seconds > _DOUBTFUL * self._expected


def _undisturbed(seconds: list[float]) -> MeasuredCost:
    """The first quartile of samples, because other programs on the cores only ever add time."""
    return MeasuredCost(float(np.quantile(seconds, 0.25)), summarise(seconds).spread)
