"""Cuts streams into segments: runs of kernels with nothing to wait for between them.

A segment begins where a kernel waits for an event of another stream, and it ends with a kernel
whose event another stream awaits. A tensor is freed by a segment after which all readers of the
tensor have surely ended: they are in the segment itself, or they ended before its last kernel.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dovetail.schedulers.dataflow import Streams
from dovetail.schedulers.races import happens_before
from dovetail.schedulers.records import KernelBlock, OpSet


@dataclass(frozen=True)
class Segment:
    """Kernels of one stream that run without waiting in between.

    waits   kernels whose events must have come before the segment begins
    event   True if another stream awaits the event of the last kernel
    frees   tensors that nobody reads after the segment
    """

    kernels: tuple[int, ...]
    waits: tuple[int, ...] = ()
    event: bool = False
    frees: tuple[int, ...] = ()


def segments_of(
    block: KernelBlock, streams: Streams, readers: Mapping[int, Iterable[int]]
) -> list[list[Segment]]:
    """[streams] the segments of each stream, in order.

    readers   tensors that may be freed -> the kernels that use each, including its producer

    A tensor is in no `frees` if after no segment all of its readers have surely ended.
    """
    awaited = {event for event, _ in streams.waits}
    waits: dict[int, list[int]] = defaultdict(list)
    for event, kernel in streams.waits:
        waits[kernel].append(event)
    # [streams] the segments, which free nothing yet.
    found: list[list[Segment]] = [[] for _ in streams.orders]
    for segments, order in zip(found, streams.orders, strict=True):
        is_open = False
        for kernel in order:
            if waits[kernel] or not is_open:
                segments.append(Segment((), tuple(waits[kernel])))
            own = segments[-1]
            segments[-1] = replace(own, kernels=(*own.kernels, kernel), event=kernel in awaited)
            is_open = kernel not in awaited
    ended = happens_before(block, streams)
    last: dict[tuple[int, int], list[int]] = defaultdict(list)
    ends = [
        (stream, place, _mask(segment.kernels) | ended[segment.kernels[-1]])
        for stream, segments in enumerate(found)
        for place, segment in enumerate(segments)
    ]
    of_kernel = {
        kernel: (stream, place)
        for stream, segments in enumerate(found)
        for place, segment in enumerate(segments)
        for kernel in segment.kernels
    }
    ended_by = {(stream, place): done for stream, place, done in ends}
    for tensor, kernels in readers.items():
        needed = _mask(kernels)
        # The stream of the reader that is furthest along its own stream is tried first.
        after = max((of_kernel[kernel] for kernel in kernels), key=lambda at: at[1])
        for stream in (after[0], *range(len(found))):
            # Not before the last reader of this stream.
            first = max((of_kernel[k][1] for k in kernels if of_kernel[k][0] == stream), default=0)
            place = next(
                (
                    place
                    for place in range(first, len(found[stream]))
                    if not needed & ~ended_by[stream, place]
                ),
                None,
            )
            if place is not None:
                last[stream, place].append(tensor)
                break
    return [
        [replace(s, frees=tuple(last[stream, place])) for place, s in enumerate(segments)]
        for stream, segments in enumerate(found)
    ]


def _mask(kernels: Iterable[int]) -> OpSet:
    found = 0
    for kernel in kernels:
        found |= 1 << kernel
    return found
