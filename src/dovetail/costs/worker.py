"""The process that measures: pinned to a device's cores, set up as an executor's worker is.

Messages are tuples whose first element is a key of `_ANSWERS`; each is answered by one reply.
"""

import gc
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dovetail.frontends.binding import Values, bind
from dovetail.frontends.program import Call
from dovetail.runtime.channels import Channel
from dovetail.runtime.neighbours import Neighbours, Spinning
from dovetail.runtime.setup import set_up
from dovetail.runtime.shared import Block
from dovetail.runtime.timers import Timing, clock, summarise, time_call
from dovetail.runtime.waiting import SPIN_NS, address_of, publish, wait

Layout = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides in elements, dtype

HOP_BYTES = (4096, 262144, 4194304)
"""Sizes of the messages that a link's latency and bandwidth are fitted to."""
_HOPS = 60
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 400
_BUDGET_SECONDS = 1.0
_MOST_COPIES, _COLD_BYTES = 8, 2**23
_PACE_LOOPS, _DISTURBED = 2000, 1.15
_FLAG_BYTES = 256  # two flags and an abort flag, a cache line each, before the payload


@dataclass(frozen=True)
class Entry:
    """A call to time. layouts: of each tensor it reads; cold: those held from step to step."""

    call: Call
    layouts: dict[int, Layout]
    cold: frozenset[int]


@dataclass(frozen=True)
class TimedCalls:
    """A timing per entry; the best pace seen or known before; what disturbed rounds took; what all
    took; cores of this process that other programs used meanwhile."""

    timings: list[Timing]
    pace_seconds: float
    waited_seconds: float
    seconds: float
    others_cores: float


@dataclass(frozen=True)
class FailedCall:
    """The reply where entry `index` raised."""

    index: int
    traceback: str


def serve(channel: Channel) -> None:
    """Answer messages until the other end closes."""
    with torch.inference_mode():  # as executors run calls: no autograd bookkeeping
        while True:
            name, *arguments = channel.receive()
            if name == "block":
                arguments = [channel.receive_descriptor()]
            channel.send(_ANSWERS[name](*arguments))


_spinning: Spinning | None = None


def set_up_device(threads: int) -> None:
    """Set this process up as an executor's worker is: it spins where that one would."""
    global _spinning
    set_up(threads)
    _spinning = Spinning(os.sched_getaffinity(0), threads)


def time_calls(
    entries: list[Entry], best_seconds: float, patience_seconds: float
) -> TimedCalls | FailedCall:
    """Time calls in turn, round after round, on random inputs, bound as an executor binds them.

    In turn, since a call that follows itself finds its code in the nearest cache, which in a
    network it does not. What a network holds from step to step is cold there, so it comes in
    several copies that take turns. Rounds on a disturbed core do not count, unless those have
    taken `patience_seconds`. `best_seconds`: the best `pace_seconds` known of this kind of core.
    """
    runs = [_prepared(entry) for entry in entries]
    for index, copies in enumerate(runs):
        try:
            for run in copies:
                run()
        except Exception:
            return FailedCall(index, traceback.format_exc())
    rounds: list[tuple[float, list[float]]] = []  # (pace, seconds of each call)
    undisturbed, turn, waited = 0, 0, 0.0
    neighbours = Neighbours(os.sched_getaffinity(0))
    began = clock()
    while not _enough(len(rounds), clock() - began, undisturbed, patience_seconds - waited):
        if _spinning is not None:
            _spinning.look()
        start = clock()
        now = pace_seconds()
        if now < best_seconds:
            best_seconds = now
            undisturbed = sum(earlier <= _DISTURBED * now for earlier, _ in rounds)
        seconds = _one_round(runs, turn)
        turn += 1
        calm = now <= _DISTURBED * best_seconds
        undisturbed += calm
        waited += 0.0 if calm else clock() - start
        if calm or len(rounds) < _MOST_ROUNDS:
            rounds.append((now, seconds))
    others_cores = neighbours.settled() or 0.0
    limit = _DISTURBED * best_seconds if undisturbed >= _LEAST_ROUNDS else float("inf")
    columns = zip(*(seconds for now, seconds in rounds if now <= limit), strict=True)
    gc.collect()
    timings = [summarise(list(column)) for column in columns]
    return TimedCalls(timings, best_seconds, waited, clock() - began, others_cores)


def _enough(rounds: int, spent_seconds: float, undisturbed: int, patience_seconds: float) -> bool:
    full = rounds >= _MOST_ROUNDS or spent_seconds > _BUDGET_SECONDS
    return (
        full and rounds >= _LEAST_ROUNDS and (undisturbed >= _LEAST_ROUNDS or patience_seconds <= 0)
    )


def _one_round(runs: list[list[Callable[[], None]]], turn: int) -> list[float]:
    """Seconds of each call, with the copy whose turn it is."""
    seconds = []
    for copies in runs:
        run = copies[turn % len(copies)]
        start = clock()
        run()
        seconds.append(clock() - start)
    return seconds


def pace_seconds() -> float:
    """Seconds of a fixed piece of Python: how fast the core runs just now.

    A core of a shared machine runs at two thirds for many seconds at a time when a neighbour
    works; kernels slow down unequally then, so it cannot be divided out.
    """
    start = clock()
    for _ in range(_PACE_LOOPS):
        pass
    return clock() - start


def copies_for(cold_bytes: int) -> int:
    """How many copies of its cold tensors a call gets: as many as overflow the nearest caches."""
    return max(1, min(_MOST_COPIES, _COLD_BYTES // cold_bytes)) if cold_bytes else 1


def _prepared(entry: Entry) -> list[Callable[[], None]]:
    """The entry's call bound to its inputs, once for each copy of what is cold. As in an executor
    results are freed, which belongs to what is timed."""
    hot = {t: _random_tensor(x, entry.layouts) for t, x in entry.layouts.items()}
    cold_bytes = sum(hot[tensor].untyped_storage().nbytes() for tensor in entry.cold)
    count = 1 + max((*entry.layouts, *entry.call.results), default=0)
    frees = tuple(tensor for tensor in entry.call.results if tensor >= 0)
    runs = []
    for _ in range(copies_for(cold_bytes)):
        values: Values = [None] * count
        for tensor, value in hot.items():
            values[tensor] = value.clone() if tensor in entry.cold else value
        runs.append(bind(entry.call, values, frees, lambda: 0))
    return runs


def measure_rates() -> dict[str, Any]:
    """Peak FLOP/s by dtype (a matrix product of 1024), bytes/s (a copy of 64 MB, read and written)
    and the seconds of an op that does next to nothing."""
    flops_per_second = {}
    for name in ("float32", "float64", "bfloat16"):
        a = torch.rand(1024, 1024).to(getattr(torch, name))
        seconds = time_call(lambda a=a: a @ a).median_seconds  # type: ignore[misc]
        flops_per_second[name] = 2 * 1024**3 / seconds
    source = torch.rand(2**24)
    target = torch.empty_like(source)
    tiny = torch.ones(8)
    return {
        "flops_per_second": flops_per_second,
        "bandwidth_bytes_per_second": 2
        * source.nbytes
        / time_call(lambda: target.copy_(source)).median_seconds,
        "op_overhead_seconds": time_call(
            lambda: torch.ops.aten.add.Tensor(tiny, tiny)
        ).median_seconds,
    }


class _Hops:
    """One end of a link under test: messages to and fro over shared memory, as an executor sends
    them: a copy into a slot, then a flag. The consumer's op reads the slot in place, from the other
    core's cache, which its measured cost leaves out: so the hop counts one such read."""

    block: Block | None = None

    def map(self, descriptor: int) -> None:
        self.block = Block(descriptor)

    def play(self, first: bool, round_base: int) -> dict[int, float]:
        """Median one-way seconds by message size; only of the first player."""
        assert self.block is not None
        flags = self.block.view(0, (_FLAG_BYTES // 8,), np.int64)
        ours, theirs, abort = (
            address_of(flags, 8 * i) for i in ((0, 1, 2) if first else (1, 0, 2))
        )
        seconds = {}
        half = max(HOP_BYTES)
        for size in HOP_BYTES:
            there, back = (
                torch.from_numpy(self.block.view(_FLAG_BYTES + offset, (size,), np.uint8))
                for offset in ((0, half) if first else (half, 0))
            )
            data = torch.ones(size, dtype=torch.uint8)
            samples = []
            for _ in range(_HOPS):
                round_base += 1
                began = clock()
                if not first:
                    wait(theirs, round_base, abort, SPIN_NS)
                    data.copy_(back)
                there.copy_(data)
                publish(ours, round_base)
                if first:
                    wait(theirs, round_base, abort, SPIN_NS)
                    data.copy_(back)
                    samples.append((clock() - began) / 2)
            if first:
                seconds[size] = summarise(samples).median_seconds
        return seconds


def _random_tensor(layout: Layout, layouts: dict[int, Layout]) -> torch.Tensor:
    """Floats lie in [0.1, 1), so that no root or logarithm fails; integers may be indices, so they
    stay below every length of the call's floating-point tensors, or of all where it has none."""
    shape, strides, dtype_name = layout
    dtype: torch.dtype = getattr(torch, dtype_name)
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    extent = 0 if 0 in shape else 1 + reach
    if dtype.is_floating_point or dtype.is_complex:
        flat = torch.empty(extent).uniform_(0.1, 1.0).to(dtype)
    else:
        indexed = [s for s, _, name in layouts.values() if "float" in name]
        shapes = indexed or [s for s, _, _ in layouts.values()]
        lengths = [n for sizes in shapes for n in sizes if n > 0]
        high = 2 if dtype == torch.bool else min(lengths, default=2)
        flat = torch.randint(0, high, (extent,)).to(dtype)
    return flat.as_strided(shape, strides)


_hops = _Hops()
_ANSWERS: dict[str, Callable[..., Any]] = {
    "set up": set_up_device,
    "time": time_calls,
    "rates": measure_rates,
    "block": _hops.map,
    "hops": _hops.play,
}
