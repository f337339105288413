"""The process that measures: pinned to a device's cores, set up as an executor's worker is.

Messages are tuples whose first element is a key of `_ANSWERS`; each is answered by one reply.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from dovetail.frontends import Call, call_arguments
from dovetail.runtime.channels import Channel
from dovetail.runtime.shared import Block
from dovetail.runtime.timers import Timing, clock, summarise, time_call
from dovetail.runtime.waiting import address_of, publish, wait

Layout = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides in elements, dtype

HOP_BYTES = (4096, 262144, 4194304)
"""Sizes of the messages that a link's latency and bandwidth are fitted to."""
_HOPS = 60
_FLAG_BYTES = 256  # two flags and an abort flag, a cache line each, before the payload


def serve(channel: Channel) -> None:
    """Answer messages until the other end closes."""
    with torch.inference_mode():  # as executors run calls: no autograd bookkeeping
        while True:
            name, *arguments = channel.receive()
            if name == "block":
                arguments = [channel.receive_descriptor()]
            channel.send(_ANSWERS[name](*arguments))


def set_up(threads: int) -> None:
    """What every process that runs ops sets: its threads, and that denormals count as zero
    (an elementwise product of denormals took 20 times as long)."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def time_op(call: Call, layouts: dict[int, Layout]) -> Timing:
    """Time a call on random inputs of these layouts, by tensor number."""
    tensors = {tensor: _random_tensor(layout, layouts) for tensor, layout in layouts.items()}
    args, kwargs = call_arguments(call, tensors)
    target = call.target._op if isinstance(call.target, OpOverload) else call.target
    return time_call(lambda: target(*args, **kwargs))


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
    them (a copy into a slot, then a flag; the consumer reads in place)."""

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
        for size in HOP_BYTES:
            slot = torch.from_numpy(self.block.view(_FLAG_BYTES, (size,), np.uint8))
            data = torch.ones(size, dtype=torch.uint8)
            samples = []
            for _ in range(_HOPS):
                round_base += 1
                began = clock()
                if not first:
                    wait(theirs, round_base, abort)
                slot.copy_(data)
                publish(ours, round_base)
                if first:
                    wait(theirs, round_base, abort)
                    samples.append((clock() - began) / 2)
            if first:
                seconds[size] = summarise(samples).median_seconds
        return seconds


def _random_tensor(layout: Layout, layouts: dict[int, Layout]) -> torch.Tensor:
    """Floats lie in [0.1, 1), so that no root or logarithm fails; integers may be indices, so they
    stay below every length of the call's floating-point tensors."""
    shape, strides, dtype_name = layout
    dtype: torch.dtype = getattr(torch, dtype_name)
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    extent = 0 if 0 in shape else 1 + reach
    if dtype.is_floating_point or dtype.is_complex:
        flat = torch.empty(extent).uniform_(0.1, 1.0).to(dtype)
    else:
        lengths = [n for s, _, name in layouts.values() if "float" in name for n in s if n > 0]
        high = 2 if dtype == torch.bool else min(lengths, default=2)
        flat = torch.randint(0, high, (extent,)).to(dtype)
    return flat.as_strided(shape, strides)


_hops = _Hops()
_ANSWERS: dict[str, Callable[..., Any]] = {
    "set up": set_up,
    "time": time_op,
    "rates": measure_rates,
    "block": _hops.map,
    "hops": _hops.play,
}
