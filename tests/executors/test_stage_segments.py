import random
from itertools import pairwise

import pytest

from dovetail.executors.stages.cpu import segments_within
from dovetail.executors.stages.segments import Segment, segments_of
from dovetail.schedulers.dataflow import Streams, dataflow, with_waits
from dovetail.schedulers.races import happens_before
from dovetail.schedulers.records import KernelBlock, members
from tests.support.dags import random_block

#      0
#    / | \
#   1  2  3      streams: 0 1 4 6 | 2 5 | 3
#   |  |  |
#   4  5  |      waits: 0 -> 2, 0 -> 3, 5 -> 6, 3 -> 6
#    \ | /
#      6
FORK = KernelBlock((0, 0b1, 0b1, 0b1, 0b10, 0b100, 0b111000))
STREAMS = Streams(((0, 1, 4, 6), (2, 5), (3,)), ((0, 2), (0, 3), (3, 6), (5, 6)))
READERS = {op: [op, *members(FORK.successors[op])] for op in range(6)}


def test_segments_of_the_fork():
    assert segments_of(FORK, STREAMS, READERS) == [
        [
            Segment((0,), (), True),
            Segment((1, 4), frees=(1,)),
            Segment((6,), (3, 5), frees=(0, 3, 4, 5)),
        ],
        [Segment((2, 5), (0,), True, frees=(2,))],
        [Segment((3,), (0,), True)],
    ]


def test_a_tensor_that_no_segment_comes_after_all_readers_of_is_left():
    apart = Streams(((0, 1), (2,)), ((0, 2),))
    found = segments_of(KernelBlock((0, 1, 1)), apart, {0: [0, 1, 2], 1: [1]})
    assert [segment.frees for stream in found for segment in stream] == [(), (1,), ()]


def random_streams(rng, block):
    """By list scheduling, or any orders that keep the edges."""
    if rng.random() < 0.3:
        return dataflow(block, [rng.random() for _ in range(len(block))], rng.randrange(1, 6))[0]
    orders = [[] for _ in range(rng.randrange(1, 6))]
    for op in range(len(block)):
        rng.choice(orders).append(op)
    return with_waits(block, orders)


@pytest.mark.parametrize("seed", range(60))
def test_every_kernel_once_after_its_waits_and_tensors_given_up_when_all_have_read(seed):
    rng = random.Random(seed)
    block = random_block(rng, rng.randrange(1, 25), rng.choice([0.05, 0.15, 0.4]))
    streams = random_streams(rng, block)
    readers = {100 + op: [op, *members(block.successors[op])] for op in range(len(block))}
    found = segments_of(block, streams, readers)

    assert [[k for s in own for k in s.kernels] for own in found] == list(map(list, streams.orders))
    segments = [segment for own in found for segment in own]
    # Waits come before a segment's first kernel, events after its last.
    assert {(e, s.kernels[0]) for s in segments for e in s.waits} == set(streams.waits)
    events = {s.kernels[-1] for s in segments if s.event}
    assert events == {event for event, _ in streams.waits}
    for own in found:
        for before, after in pairwise(own):  # no longer than they must be
            assert before.event or after.waits

    ended = happens_before(block, streams)
    freed = {}
    for segment in segments:
        done = ended[segment.kernels[-1]] | sum(1 << k for k in segment.kernels)
        for tensor in segment.frees:
            assert tensor not in freed
            freed[tensor] = segment
            assert all(done >> kernel & 1 for kernel in readers[tensor])
    for tensor in readers.keys() - freed.keys():
        users = sum(1 << kernel for kernel in readers[tensor])
        for segment in segments:
            done = ended[segment.kernels[-1]] | sum(1 << k for k in segment.kernels)
            assert users & ~done


def test_streams_of_some_kernels_name_those_of_the_whole():
    streams = Streams(((1, 4), (2, 5)), ())
    assert segments_within(FORK, streams, {7: [2, 5]}) == [
        [Segment((1, 4))],
        [Segment((2, 5), frees=(7,))],
    ]
