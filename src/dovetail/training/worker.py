"""The worker's loop, as a generator: the same on every backend.

    pull ─► window x [theta_k += U(g_k)] ─► commit v ─► pull ...

It yields `Ask` (a turn and its vector; answered with `Told`) and `Stepped` (one local step was
computed; answered with nothing). Who drives it decides what time that takes: a socket, a virtual
clock, a function call.
"""

from collections.abc import Generator
from dataclasses import dataclass

from dovetail.training.records import Reply, Turn, Vector


@dataclass(frozen=True)
class Ask:
    """A turn; `vector` [size] belongs to its commit, and may be written to after the answer."""

    turn: Turn
    vector: Vector | None = None


@dataclass(frozen=True)
class Told:
    """The answer; `center` [size] where it was asked for, valid and constant until the next one."""

    reply: Reply
    center: Vector | None = None


@dataclass(frozen=True)
class Stepped:
    """One local step over `samples` samples."""

    samples: int
    loss: float


Work = Generator[Ask | Stepped, Told | None, None]
