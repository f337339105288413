"""`python -m tests.support.on_played_gpus COMMAND ...`: a command whose GPUs the CPU plays."""

from dovetail.__main__ import run
from tests.support.played_cuda import played

if __name__ == "__main__":
    with played():
        run()
