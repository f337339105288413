"""One machine: a server process and worker processes over shared memory.

    caller ─ supervisor ─┬─► server    imports no torch; its state is in the storage's log
                         ├─► worker 0  ╗ each linked to the server by a pair of sockets,
                         └─► worker 1  ╝ vectors in memory that both map

Nothing listens anywhere: the supervisor makes each link and hands out its ends. Processes die with
the caller's; links and memory have no names, so nothing is left behind.
"""

from dovetail.training.backends.processes.transport import run

__all__ = ["run"]
