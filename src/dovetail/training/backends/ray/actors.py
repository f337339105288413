"""What the actors share: how they begin again, call each other, and read a commit's vector."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.training.checks import checksum
from dovetail.training.records import Vector
from dovetail.training.wire import Wire

LOCK_SECONDS = 30.0
"""The longest that a restarted actor waits for its former process to release the folder's lock."""
AGAIN_SECONDS = 0.1
"""The time between two tries to reach an actor that is being restarted."""
NOTHING: Vector = np.zeros(0)
"""It has no center's shape: a commit that carries it is refused."""
_WRONG = -1
"""No vector has this checksum: a commit that carries it is refused."""
Opened = TypeVar("Opened")


def open_again(make: Callable[[], Opened], again: bool) -> Opened:
    """What `make` opens. With `again`, an actor's former process may still hold the folder's lock:
    it is waited for."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return make()
        except UsageError as error:
            if not again or error.option != "storage" or time.monotonic() > until:
                raise
            time.sleep(0.1)


def result_of(call: Callable[[], Any]) -> Any:
    """The result of calls of actors; None, after a pause, if an actor was lost meanwhile. It may
    have done the call or not.

    call   makes the calls and returns their references. Making a call may fail like its result

    Raises `ActorDiedError` if Ray does not restart the actor, and `RayTaskError` if its method
    raised.
    """
    import ray
    from ray.exceptions import ActorDiedError, RayError, RayTaskError

    try:
        return ray.get(call())
    except (ActorDiedError, RayTaskError):
        raise
    except RayError:
        time.sleep(AGAIN_SECONDS)
        return None


def start_of(theta: Vector | list[Any]) -> Vector:
    """The vector itself, which Ray passes as it is or as a reference in a list."""
    if isinstance(theta, np.ndarray):
        return theta
    import ray

    vector: Vector = ray.get(theta[0])
    return vector


def cuts(size: int, shards: int) -> list[tuple[int, int]]:
    """[start, stop) of each shard's elements; of all elements if there is no shard."""
    count = max(shards, 1)
    return list(pairwise(size * i // count for i in range(count + 1)))


def decoded(
    wire: Wire | None, sent: NDArray[Any], expected: int, vector: Vector
) -> tuple[Vector, int | None]:
    """A commit's vector and the checksum that it should have, None if that was compared here.

    sent       the vector itself if there is no `wire`, else its encoding
    expected   the checksum of `sent`
    vector     [size] an encoding is decoded into it
    """
    if wire is None:
        return sent, expected
    if checksum(sent) != expected:
        return vector, _WRONG
    return vector if wire.decode(sent, vector) else NOTHING, None
