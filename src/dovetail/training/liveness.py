"""Signs of life: a worker that gives none for too long is thought hung, and loses its samples.

Every local step is one. A learner whose steps take longer than the policy's `lease_seconds` calls
`alive()` now and then within them; how many commits it makes is nobody's business.
"""

from collections.abc import Callable
from contextvars import ContextVar

_beat: ContextVar[Callable[[], None] | None] = ContextVar("beat", default=None)


def alive() -> None:
    """Say that this worker is alive; nothing happens outside of one."""
    beat = _beat.get()
    if beat is not None:
        beat()


def on_alive(beat: Callable[[], None] | None) -> None:
    """What `alive()` calls from here on, in this thread: a backend's business."""
    _beat.set(beat)
