"""Measures GPUs: answers for a GPU, from a process of its own, what `costs.measured` asks.

Everything is timed by events on the GPU, warm, on a stream of its own (`machine/gpu_rates.py`). An
op is timed within the step that it belongs to, from the end of the op before it to its own end. The
GPU sleeps first while the host issues some hundred ops, so that it never waits for the host in
between: plans replay their launches as graphs, in which it does not either.
"""

import gc
import traceback
from typing import Any

import numpy as np
import torch

from dovetail.costs.messages import (
    FailedCall,
    OpTimes,
    TimedCalls,
    TimedEntry,
    TimedStep,
    random_tensor,
    timed_passes,
)
from dovetail.frontends.gpu_calls import on_gpu
from dovetail.frontends.instructions import RunFunction, RunOp
from dovetail.frontends.program import Call
from dovetail.frontends.runners import make_runner, seeded_call
from dovetail.machine.gpu_rates import GpuTimer, matrix_rates
from dovetail.runtime.cuda import MakeCuda
from dovetail.runtime.setup import set_up
from dovetail.runtime.timers import Repeats, clock, summarise, time_rounds

COPIED_BYTES = (4096, 2**20, 2**26)
"""A link's latency and bandwidth are fitted to copies of these sizes."""
_WARM_UPS, _SAMPLES = 3, 20
_DTYPES = ("float32", "float64", "bfloat16", "float16")


class MeasuredGpu:
    """A GPU by the name that torch gives it, and the stream on which it is measured.

    make_cuda   makes the CUDA by which it is reached
    """

    def __init__(self, name: str, make_cuda: MakeCuda) -> None:
        set_up(1)
        # Plans run calls in this mode too, without autograd's bookkeeping. The process is in it as
        # long as it lives.
        self._mode = torch.inference_mode()
        self._mode.__enter__()
        self.cuda = make_cuda()
        self.device = self.cuda.device(name)
        self.timer = GpuTimer(self.cuda, self.device)

    def time_step(self, step: TimedStep, _beside: tuple[int, ...] = ()) -> OpTimes | FailedCall:
        """Run a step repeatedly, and time its ops. Returns a `FailedCall` for an op that raises."""
        runner = make_runner(step.tensors)
        with self.cuda.stream(self.timer.stream):
            for tensor, value in step.values.items():
                runner.set(tensor, value.to(self.device))
        self.cuda.synchronize(self.device)
        alone = []
        for op, call in step.calls.items():
            alone.append(runner.stream([self._instruction(call, op, step.frees.get(op, ()))]))

        def run_step() -> list[float]:
            return self.timer.seconds_between(runner.run, alone)

        try:
            samples = timed_passes(run_step, run_step, step.seconds)
        except Exception:
            return FailedCall(runner.failed, traceback.format_exc())
        gc.collect()
        return OpTimes(np.array(samples), 0.0)

    def time_calls(
        self, entries: list[TimedEntry], best_seconds: float, _patience_seconds: float
    ) -> TimedCalls | FailedCall:
        """Time calls in turn, round after round, on random inputs."""
        began = clock()
        count = 1 + max((max((*e.layouts, *e.call.results), default=0) for e in entries), default=0)
        runners, streams = [], []
        for entry in entries:
            runner = make_runner(count)
            for tensor, layout in entry.layouts.items():
                runner.set(tensor, random_tensor(layout, entry.layouts).to(self.device))
            frees = tuple(tensor for tensor in entry.call.results if tensor >= 0)
            runners.append(runner)
            streams.append(runner.stream([self._instruction(entry.call, 0, frees)]))
        self.cuda.synchronize(self.device)
        for index, (runner, stream) in enumerate(zip(runners, streams, strict=True)):
            try:
                for _ in range(_WARM_UPS):
                    self.timer.seconds_of(lambda r=runner, s=stream: r.run(s))  # type: ignore[misc]
            except Exception:
                return FailedCall(index, traceback.format_exc())

        def run_round(_turn: int) -> list[float]:
            places = range(len(streams))
            return self.timer.seconds_between(lambda i: runners[i].run(streams[i]), places)

        rounds = time_rounds(run_round, Repeats(_SAMPLES))
        gc.collect()
        timings = list(map(summarise, rounds.seconds))
        return TimedCalls(timings, best_seconds, 0.0, clock() - began, 0.0)

    def rates(self) -> dict[str, Any]:
        """This GPU's measured rates, under the names of `Device`'s fields: FLOP/s of a matrix
        product of 4096 by dtype, bytes/s of a copy of 256 MB that is read and written, and the
        seconds of an op that does next to nothing."""
        flops = matrix_rates(self.timer, _DTYPES)
        # Numbers, of four bytes each.
        source = torch.rand(self.cuda.copied_bytes, device=self.device)
        target, tiny = torch.empty_like(source), torch.ones(8, device=self.device)
        self.cuda.synchronize(self.device)
        return {
            "flops_per_second": flops,
            "bandwidth_bytes_per_second": 2
            * source.nbytes
            / self.timer.median_seconds(lambda: target.copy_(source)),
            "op_overhead_seconds": self.timer.median_seconds(
                lambda: torch.ops.aten.add.Tensor(tiny, tiny)
            ),
        }

    def links(self, peers: list[str]) -> dict[str, dict[int, float]]:
        """Median seconds of copies by size: "to" and "from" the GPU's memory and pinned memory of
        the host, and to each of these GPUs by name."""
        found: dict[str, dict[int, float]] = {}
        for size in COPIED_BYTES:
            here = torch.zeros(size, dtype=torch.uint8, device=self.device)
            host = self.cuda.pinned(size).zero_()
            ends = {"to": (here, host), "from": (host, here)}
            for peer in peers:
                there = torch.zeros(size, dtype=torch.uint8, device=self.cuda.device(peer))
                ends[peer] = (there, here)
            self.cuda.synchronize(self.device)
            for name, (target, source) in ends.items():
                seconds = self.timer.median_seconds(
                    lambda t=target, s=source: t.copy_(s, non_blocking=True)  # type: ignore[misc]
                )
                found.setdefault(name, {})[size] = seconds
        return found

    def _instruction(self, call: Call, op: int, frees: tuple[int, ...]) -> RunOp | RunFunction:
        moved = on_gpu(call, self.device)
        if moved.random:
            return seeded_call(moved, lambda: 0, self.device, op, frees)
        return RunOp(op, frees, moved)
