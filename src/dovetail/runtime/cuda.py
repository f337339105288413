"""How this process reaches GPUs: by `torch.cuda`, or by what a program hands in for it.

Whatever reaches GPUs asks `cuda_here`, or takes what it returns as an argument. A program that
hands in another CUDA calls `reach_gpus_by`, and the processes that this one starts for GPUs are
told of it with their first message. Only the program that runs can do so: no plan, machine or
other file names a CUDA.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dovetail.runtime.ranks import RankPlace
from dovetail.runtime.torch_versions import (
    GENERATED_CODE_ALIGNS,
    has_nccl,
    nccl_errors,
    nccl_group,
    sleep_on_gpu,
)

_ALIGNMENT_BYTES = 16
"""Inductor's kernels take inputs to begin at multiples of this, as `torch._inductor` has it."""


class TorchCuda:
    """`torch.cuda`, whose names it has, and what else is asked of GPUs.

    matrix_size    a product of so many rows and columns fills a GPU
    copied_bytes   a copy of 64 MiB takes some 3 ms over PCIe 4.0, so the microseconds of its start
                   do not count
    """

    matrix_size, copied_bytes = 4096, 2**26
    # Steps ask for these all the time, so they are looked up once.
    Stream, Event, CUDAGraph, graph = (
        torch.cuda.Stream,
        torch.cuda.Event,
        torch.cuda.CUDAGraph,
        torch.cuda.graph,
    )
    stream, set_stream = staticmethod(torch.cuda.stream), staticmethod(torch.cuda.set_stream)
    synchronize, sleep = staticmethod(torch.cuda.synchronize), staticmethod(sleep_on_gpu)
    can_reach_ranks, peer_errors = staticmethod(has_nccl), staticmethod(nccl_errors)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def device(self, name: str) -> torch.device:
        """The torch device that has the tensors of the GPU of this name."""
        return torch.device(name)

    def pinned(self, size_bytes: int) -> Tensor:
        """[bytes] of the host's memory that the GPU reads and writes without the host."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        """Pin memory of the host, so that copies to and from GPUs run beside the host; return what
        undoes it."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, size_bytes, 0)) != 0:
            # Copies are slower then, and as right. The next kernel reports the error that is set.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            return lambda: None
        return lambda: runtime.cudaHostUnregister(address)

    def limit_memory(self, limits: dict[str, int]) -> None:
        """Have torch's allocator take from each GPU no more than these bytes."""
        for name, size_bytes in limits.items():
            _, total = torch.cuda.mem_get_info(name)
            torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total), name)

    def at_work(self, code: Callable[..., Any]) -> Callable[..., Any]:
        """Compiled code that was just loaded, as it is issued in steps."""
        # Loading has run the code once, on examples.
        torch.cuda.empty_cache()
        if GENERATED_CODE_ALIGNS:
            return code

        def run(*tensors: Tensor) -> Any:
            # Inputs that do not begin where the code's kernels expect them to are copied.
            return code(*(t.clone() if t.data_ptr() % _ALIGNMENT_BYTES else t for t in tensors))

        return run

    def peer_group(
        self,
        store: Any,
        end: int,
        place: RankPlace,
        timeout: timedelta,
        is_aborted: Callable[[], bool],
    ) -> Any:
        """A group of two ranks that send to each other's GPUs, whose errors are `peer_errors`.

        end          0 for the rank that sends, 1 for the other one
        place        of this process among the ranks
        is_aborted   True once a device of this rank has failed; NCCL's waits hold up no host
        """
        return nccl_group(store, end, timeout)


MakeCuda = Callable[[], Any]
"""Makes a `TorchCuda`, or what has the same names. Processes get it by pickle, so it is a function
or class of a module."""
_make_cuda: MakeCuda = TorchCuda


def cuda_here() -> Any:
    """Return the CUDA by which this process reaches GPUs."""
    return _make_cuda()


def cuda_maker() -> MakeCuda:
    """What has made it, for a process that reaches GPUs likewise."""
    return _make_cuda


def reach_gpus_by(make_cuda: MakeCuda) -> None:
    """Reach GPUs by what this makes from now on, also from processes that are started."""
    global _make_cuda
    _make_cuda = make_cuda
