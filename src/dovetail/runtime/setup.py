"""Sets up a process that runs ops, in the same way for timing and for running a plan."""

import ctypes
import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from dovetail.runtime.child import keep_memory


def set_up(threads: int) -> None:
    """Set this process's threads; count denormals as zero; keep the garbage collector out.

    An elementwise product of denormals took 20 times as long. A pause of the collector in one
    device's process stalls all that wait for it. Call `gc.collect` where a pause does no harm. A
    step in the caller's own process leaves how denormals count as the caller has it.
    """
    set_up_thread(threads)
    gc.disable()
    # A later `gc.collect` then need not look through what torch imported.
    gc.freeze()


def set_up_thread(threads: int) -> None:
    """Set how many threads the calling thread's ops use, and count denormals as zero."""
    # Imported here, because the rest of the package runs without torch.
    import torch

    # At its first use of torch a thread takes over the number that another thread set. That use
    # comes first here, so that it does not undo the next line.
    torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def spin_briefly() -> None:
    """Have OpenMP's threads wait for work for 30 to 100 us, and not for 10 ms, before they sleep.

    Streams of kernels run on their cores between ops on all threads. Call this before torch is
    imported. It concerns GNU's OpenMP, as in torch's Linux builds; what the user has set stands.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "3000"


def keep_freed_memory() -> None:
    """From now on this process keeps the memory that it frees, as the processes of devices do, so
    that the steps that it runs itself find it mapped. What the user has set for malloc stands."""
    if not _sets_malloc():
        keep_memory()


def trim_memory() -> None:
    """Give the system back what is free, if it was kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not _sets_malloc():
        trim(0)


def _sets_malloc() -> bool:
    """True if the user has set a policy of malloc for this process."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc" in tunables or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in os.environ
    )


@contextmanager
def op_threads(threads: int) -> Iterator[None]:
    """The calling thread's ops use so many threads within."""
    import torch

    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if before != threads:
            torch.set_num_threads(before)


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Torch's default dtype is float32 within, as in the processes of devices."""
    import torch

    before = torch.get_default_dtype()
    if before != torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        if before != torch.float32:
            torch.set_default_dtype(before)


def rest_openmp() -> None:
    """End the threads that OpenMP keeps for the calling thread, if it has any.

    After an op they wait for the next one by spinning, for some 8 ms with GNU's OpenMP, on cores
    that other processes of ours need now. OpenMP starts others with the next op. Ending two takes
    50 us, and finding that there are none half a microsecond.
    """
    for pause in _pauses():
        pause(_SOFT)


_SOFT = 1
"""`omp_pause_soft`: what a program has set, such as its number of threads, stays as it is."""


@cache
def _pauses() -> list[Callable[[int], Any]]:
    """`omp_pause_resource_all` of each OpenMP library in this process (OpenMP 5.0, section
    3.2.44), as far as it was loaded before the first call."""
    with open("/proc/self/maps") as lines:
        paths = set(re.findall(r"/\S*lib[gi]?omp\d?[-.]\S*", lines.read()))
    found: list[Callable[[int], Any]] = []
    for path in sorted(paths):
        # A file that was replaced since is another library, and is not loaded.
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            found.append(library.omp_pause_resource_all)
    return found
