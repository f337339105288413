"""Measures GPUs: matrix products, copies from and to the host's memory, and peer access.

Everything is timed by events on the GPU, warm, on a stream of its own, and the median of several
counts. The GPU sleeps first while the host issues the work and its events, so that what is timed
never waits for the host:

    stream   sleep ── event ── work ── event ── work ── event
                        └─ seconds of work ┘

`dovetail machine` shows what `measure_gpus` returns. The probe of costs (`costs/gpus.py`) uses the
same timer.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dovetail.errors import MachineError
from dovetail.machine.gpus import GpuMeasurement, check_gpu
from dovetail.machine.records import Device, Machine
from dovetail.runtime.cuda import cuda_here
from dovetail.runtime.timers import Repeats, clock, time_steps

SHOWN_DTYPES = ("float32", "bfloat16", "float64")
"""The dtypes of the products that `measure_gpus` measures."""
_WARM_UPS, _SAMPLES, _LEAST_SAMPLES, _SAMPLES_SECONDS = 3, 20, 3, 1.0
"""A work runs `_WARM_UPS` times before it counts, and then `_SAMPLES` times. After so many seconds
`_LEAST_SAMPLES` are enough: products in float64 take half a second on a GPU without such units."""
_ISSUED, _SLEEP_CYCLES = 200, 10_000_000
"""The works that are issued while the GPU sleeps for some 5 ms. One takes the host 5 to 20 us."""


class GpuTimer:
    """Times works on one GPU.

    cuda     as `runtime.cuda.cuda_here` returns it
    device   the torch device that has the GPU's tensors
    """

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self.cuda, self.device = cuda, device
        self.stream = cuda.Stream(device=device)

    def median_seconds(self, work: Callable[[], Any]) -> float:
        """The median seconds of a work on the GPU, from when it begins to its end."""
        repeats = Repeats(_SAMPLES, _LEAST_SAMPLES, _SAMPLES_SECONDS)
        of_work = partial(self.seconds_of, work)
        return statistics.median(time_steps(of_work, repeats, warm_ups=_WARM_UPS, clock=clock))

    def seconds_of(self, work: Callable[[], Any]) -> float:
        """The seconds of a work that runs once."""
        (seconds,) = self.seconds_between(lambda _: work(), [None])
        return seconds

    def seconds_between(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[float]:
        """[items] seconds from the end of the work before each one to the end of its own."""
        spans = []
        with self.cuda.stream(self.stream):
            for first in range(0, len(items), _ISSUED):
                self.cuda.sleep(_SLEEP_CYCLES)
                begin = self._recorded()
                for item in items[first : first + _ISSUED]:
                    work(item)
                    end = self._recorded()
                    spans.append((begin, end))
                    begin = end
        self.cuda.synchronize(self.device)
        # CUDA gives milliseconds.
        return [1e-3 * begin.elapsed_time(end) for begin, end in spans]

    def _recorded(self) -> Any:
        event = self.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event


def matrix_rates(timer: GpuTimer, dtypes: Sequence[str]) -> dict[str, float]:
    """dtype -> FLOP/s of a product of two square matrices. A dtype is absent if the GPU has no such
    arithmetic. float32 is computed in float32 unless the user has allowed torch to use TF32."""
    size = timer.cuda.matrix_size
    rates = {}
    for name in dtypes:
        try:
            a = torch.rand(size, size, device=timer.device).to(getattr(torch, name))
            timer.cuda.synchronize(timer.device)
            seconds = timer.median_seconds(lambda a=a: a @ a)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # no such arithmetic there
            continue
        rates[name] = 2 * size**3 / seconds
    return rates


def copy_rates(timer: GpuTimer) -> dict[tuple[str, str], float]:
    """(way, memory) -> bytes/s of a copy "to" or "from" the GPU, whose other end is "pinned" or
    "pageable" memory of the host.

    The driver copies pageable memory through pinned memory of its own, so the host works as well
    and such a copy takes longer.
    """
    size = timer.cuda.copied_bytes
    on_gpu = torch.zeros(size, dtype=torch.uint8, device=timer.device)
    rates = {}
    for memory in ("pinned", "pageable"):
        is_pinned = memory == "pinned"
        host = timer.cuda.pinned(size) if is_pinned else torch.empty(size, dtype=torch.uint8)
        # The system gives pages at the first write, which must not be timed.
        host.fill_(1)
        timer.cuda.synchronize(timer.device)
        for way, target, source in (("to", on_gpu, host), ("from", host, on_gpu)):
            seconds = timer.median_seconds(
                lambda t=target, s=source: t.copy_(s, non_blocking=True)  # type: ignore[misc]
            )
            rates[way, memory] = size / seconds
    return rates


def reached_peers(cuda: Any, name: str, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the GPUs `names` whose memory the GPU `name` reads and writes without the host."""
    return tuple(
        other
        for other in names
        if other != name and cuda.can_device_access_peer(cuda.device(name), cuda.device(other))
    )


def measure_gpus(machine: Machine, cuda: Any = None) -> tuple[GpuMeasurement, ...]:
    """What each GPU of the machine reaches now, one after the other. Several devices of one GPU
    are measured as one.

    cuda   as `runtime.cuda.cuda_here` returns it; None: that

    Raises `MachineError` for a GPU that is not here, that is another one than the machine says, or
    that cannot be measured, for example because its memory is full.
    """
    sharing: dict[str, list[Device]] = {}
    for device in machine.devices:
        if device.torch_device:
            sharing.setdefault(device.torch_device, []).append(device)
    cuda = cuda or cuda_here()
    for name, devices in sharing.items():
        check_gpu(devices[0], cuda)
        here = cuda.get_device_name(cuda.device(name))
        if here != devices[0].model:
            raise MachineError(
                f"device {devices[0].name!r} is {devices[0].model!r}, but {name} here is {here!r}"
            )
    rates = []
    for name, devices in sharing.items():
        try:
            timer = GpuTimer(cuda, cuda.device(name))
            # All of its memory, free or not.
            _, memory_bytes = cuda.mem_get_info(timer.device)
            with torch.inference_mode():
                measured = GpuMeasurement(
                    torch_device=name,
                    devices=tuple(device.name for device in devices),
                    model=cuda.get_device_name(timer.device),
                    memory_bytes=memory_bytes,
                    flops_per_second=matrix_rates(timer, SHOWN_DTYPES),
                    copies=copy_rates(timer),
                    peers=reached_peers(cuda, name, list(sharing)),
                )
            rates.append(measured)
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0]
            raise MachineError(f"device {devices[0].name!r} cannot be measured: {cause}") from error
    return tuple(rates)
