import random
from itertools import pairwise

import pytest

from dovetail.executors.stages.issuing import segments_of
from dovetail.frontends.instructions import AwaitFlag, RunKernels, SendTensor
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
            RunKernels((0,)),
            SendTensor(flag=0),
            RunKernels((1, 4), frees=(1,)),
            AwaitFlag(flag=3),
            AwaitFlag(flag=5),
            RunKernels((6,), frees=(0, 3, 4, 5)),
        ],
        [AwaitFlag(flag=0), RunKernels((2, 5), frees=(2,)), SendTensor(flag=5)],
        [AwaitFlag(flag=0), RunKernels((3,)), SendTensor(flag=3)],
    ]


def runs_of(stream):
    return [each for each in stream if isinstance(each, RunKernels)]


def test_a_tensor_that_no_segment_comes_after_all_readers_of_is_left():
    apart = Streams(((0, 1), (2,)), ((0, 2),))
    found = segments_of(KernelBlock((0, 1, 1)), apart, {0: [0, 1, 2], 1: [1]})
    assert [run.frees for stream in found for run in runs_of(stream)] == [(), (1,), ()]


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

    kernels = [[k for run in runs_of(own) for k in run.kernels] for own in found]
    assert kernels == list(map(list, streams.orders))
    segments = [run for own in found for run in runs_of(own)]
    waits, sent = [], []
    for own in found:
        before = []  # the flags that the next run waits for
        for each, then in pairwise([*own, None]):
            match each:
                case AwaitFlag(flag=flag):
                    assert isinstance(then, AwaitFlag | RunKernels)
                    before.append(flag)
                case RunKernels(kernels=(first, *_)):
                    # Segments are no longer than they must be.
                    assert not isinstance(then, RunKernels)
                    waits += [(flag, first) for flag in before]
                    before = []
                case SendTensor(flag=flag):
                    sent.append(flag)
        for each, then in pairwise(own):
            if isinstance(then, SendTensor):
                assert then.flag == each.kernels[-1]
    assert sorted(waits) == sorted(streams.waits)
    assert sorted(sent) == sorted({event for event, _ in streams.waits})

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
    assert segments_of(FORK, streams, {7: [2, 5]}) == [
        [RunKernels((1, 4))],
        [RunKernels((2, 5), frees=(7,))],
    ]
