"""Runs a server process and worker processes on one machine, over shared memory.

    caller ─ supervisor ─┬─► server    imports no torch; its state is in the storage's log
                         ├─► worker 0  ╗ each linked to the server by a pair of sockets,
                         └─► worker 1  ╝ vectors in memory that both map

No process listens on a port: the supervisor makes each link and hands out its ends. The processes
die with the caller's process. Links and memory have no names, so nothing is left behind.
"""

from dovetail.training.backends.processes.transport import run

__all__ = ["run"]
