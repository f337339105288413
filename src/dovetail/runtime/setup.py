"""How a process that runs ops is set up: alike where they are timed and where they are run."""

import gc
import os


def set_up(threads: int) -> None:
    """Set this process's threads; count denormals as zero; keep the garbage collector out.

    An elementwise product of denormals took 20 times as long; a collector's pause in one device
    stalls all that wait for it. Call `gc.collect` where a pause does no harm.
    """
    set_up_thread(threads)
    gc.disable()
    gc.freeze()  # what torch imported need not be looked through by a later `gc.collect`


def set_up_thread(threads: int) -> None:
    """Set how many threads an op uses that the calling thread runs; count denormals as zero."""
    import torch  # here: the rest of the package runs without it

    torch.get_num_threads()  # at its first use a thread takes over what another one has set
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def spin_briefly() -> None:
    """Have OpenMP's threads (GNU's, of torch's Linux builds) wait for work for some 30 to 100 us
    before they give up their cores, not for some 10 ms: between ops on all threads, streams of
    kernels run on those cores. Before torch is imported; what the user has set stands."""
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "3000"
