"""What workers are given to do: in a file of its own, so that they import nothing else."""

import os
import signal


def says(words, tell, complain):
    tell(f"saying {words}")
    complain(f"heard {words}")
    return []


def raises(words, tell, complain):
    raise ValueError(words)


def dies(words, tell, complain):
    os.kill(os.getpid(), signal.SIGKILL)


def threads(path, tell, complain):
    with open(path, "a") as file:
        cores = sorted(os.sched_getaffinity(0))
        file.write(f"{os.environ['OMP_NUM_THREADS']} {len(cores)} {os.getpid()}\n")
    return []
