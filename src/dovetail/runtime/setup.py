"""How a process that runs ops is set up: alike where they are timed and where they are run."""

import gc


def set_up(threads: int) -> None:
    """Set this process's threads; count denormals as zero; keep the garbage collector out.

    An elementwise product of denormals took 20 times as long; a collector's pause in one device
    stalls all that wait for it. Call `gc.collect` where a pause does no harm.
    """
    import torch  # here: the rest of the package runs without it

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    gc.disable()
    gc.freeze()  # what torch imported need not be looked through by a later `gc.collect`
