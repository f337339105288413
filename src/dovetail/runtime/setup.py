"""Sets up a process that runs ops, in the same way for timing and for running a plan."""

import gc
import os


def set_up(threads: int) -> None:
    """Set this process's threads; count denormals as zero; keep the garbage collector out.

    An elementwise product of denormals took 20 times as long. A pause of the collector in one
    device's process stalls all that wait for it. Call `gc.collect` where a pause does no harm.
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
