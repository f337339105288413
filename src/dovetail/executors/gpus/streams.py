"""What all do with CUDA streams: mark a place in one, fork others from it, join them, capture it.

    main     ── works ── F ─────────────────── wait J ── works
    a side      wait F ──┴── works ── J ────────┘

`cuda` is `torch.cuda`, or what has its names (`runtime.cuda`).
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any


def mark(cuda: Any, stream: Any = None, **options: bool) -> Any:
    """An event after all that the stream was given so far; None stands for the current stream."""
    event = cuda.Event(**options)
    event.record(stream)
    return event


def fork(cuda: Any, main: Any, sides: Iterable[Any]) -> None:
    """Have what is issued to the sides from now on start after what the main stream has."""
    event = mark(cuda, main)
    for side in sides:
        side.wait_event(event)


def join(cuda: Any, main: Any, sides: Iterable[Any]) -> None:
    """Have what is issued to the main stream from now on start after what the sides have."""
    for event in [mark(cuda, side) for side in sides]:
        main.wait_event(event)


def capture(cuda: Any, stream: Any, work: Callable[[], object], pool: Any = None) -> Any:
    """The CUDA graph of what `work` issues to a stream and those forked from it.

    pool   of the memory that it uses; None: one of its own
    """
    graph = cuda.CUDAGraph()
    # "thread_local" lets other threads allocate memory and wait for events meanwhile, which would
    # end a global capture.
    with (
        warnings.catch_warnings(),
        cuda.graph(graph, stream=stream, pool=pool, capture_error_mode="thread_local"),
    ):
        # What is captured may be nothing but views.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        try:
            work()
        finally:
            # A capture ends on the stream that it began on, also from within a lane.
            cuda.set_stream(stream)
    return graph


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds on the device from one event to another, both of which have happened."""
    # CUDA gives milliseconds.
    return 1e-3 * float(begin.elapsed_time(end))
