"""Runs the server and the workers as actors of Ray, on the machines where Ray places them.

    caller ─ supervisor ─┬─► server     imports no torch; its state is in the storage's log
                         ├─► worker 0   ╗ turns and vectors go straight to the server,
                         └─► worker 1   ╝ large ones through the object store

Ray finds nodes, starts processes and notices deaths. Only our own log and the workers' numbers keep
commits safe: Ray never repeats a call of ours, and an actor that it starts again begins by reading
the log. docs/train.md says which ports Ray opens, and what it trusts. In this package `import ray`
is the library, because imports are absolute.
"""

from dovetail.training.backends.ray.transport import run

__all__ = ["run"]
