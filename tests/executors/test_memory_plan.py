import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import RaceError
from dovetail.executors.stages.issuing import steps_of
from dovetail.executors.stages.memory import plan_memory
from dovetail.frontends.instructions import FreeTensors, RunKernels
from dovetail.schedulers.dataflow import Streams, dataflow
from dovetail.schedulers.races import Buffer, check_races
from dovetail.schedulers.records import KernelBlock, members

#      0
#    / | \
#   1  2  3      streams: 0 1 4 6 | 2 5 | 3
#   |  |  |
#   4  5  |      waits: 0 -> 2, 0 -> 3, 5 -> 6, 3 -> 6
#    \ | /
#      6
FORK = KernelBlock((0, 0b1, 0b1, 0b1, 0b10, 0b100, 0b111000))
STREAMS = Streams(((0, 1, 4, 6), (2, 5), (3,)), ((0, 2), (0, 3), (3, 6), (5, 6)))


@st.composite
def cases(draw):
    """(block, streams, bytes per tensor, outputs)"""
    rng = random.Random(draw(st.integers(0, 10**6)))
    ops = draw(st.integers(1, 20))
    share = draw(st.sampled_from([0.1, 0.3, 0.6]))
    block = KernelBlock(
        tuple(sum(1 << j for j in range(i) if rng.random() < share) for i in range(ops))
    )
    streams, _ = dataflow(block, [rng.random() for _ in range(ops)], draw(st.integers(1, 4)))
    sizes = [[rng.randrange(3000) for _ in range(rng.randrange(3))] for _ in range(ops)]
    sinks = sum(1 << op for op in range(ops) if not block.successors[op])
    return block, streams, sizes, sinks | (rng.getrandbits(ops) & rng.getrandbits(ops))


def padded(sizes):
    return [sum(-(-size // 512) * 512 for size in of_kernel) for of_kernel in sizes]


@settings(max_examples=80, deadline=None)
@given(cases())
def test_a_plan_has_no_races_and_is_no_larger_than_all_together(case):
    block, streams, sizes, outputs = case
    plan = plan_memory(block, streams, sizes, outputs)
    check_races(block, streams, plan.buffers, outputs)
    assert plan.total_bytes <= sum(padded(sizes))
    for own, of_kernel in zip(plan.buffers, sizes, strict=True):
        assert [b.end - b.start for b in own] == of_kernel
        assert all(b.start % 512 == 0 and b.end <= plan.total_bytes for b in own)
        # Of one kernel, one after another: no two share bytes.
        assert all(b.start >= a.end for a, b in pairwise(own))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_in_one_stream_a_plan_holds_all_that_is_live_at_once(case):
    block, _, sizes, outputs = case
    count = len(block)
    plan = plan_memory(block, Streams((tuple(range(count)),), ()), sizes, outputs)
    last = [
        count if outputs >> op & 1 else max([op, *members(block.successors[op])])
        for op in range(count)
    ]
    needed = padded(sizes)
    live = [sum(needed[i] for i in range(op + 1) if last[i] >= op) for op in range(count)]
    assert plan.total_bytes >= max(live)


def test_a_chain_needs_two_buffers():
    chain = KernelBlock(tuple(1 << i >> 1 for i in range(10)))
    plan = plan_memory(chain, Streams((tuple(range(10)),), ()), [[512]] * 10, 1 << 9)
    assert plan.total_bytes == 1024


#   0: 4096   1: 3072   2: 2048   3: 1536     all live at once, stacked in this order;
#   4 reads 0 and 2, so that 5: 1024, beside 1 and 3, fits where 0 was and where 2 was
def test_the_smallest_gap_that_fits_is_taken():
    block = KernelBlock((0, 0, 0, 0, 0b101, 0b1010, 0b101010))
    sizes = [[4096], [3072], [2048], [1536], [0], [1024], [0]]
    plan = plan_memory(block, Streams((tuple(range(7)),), ()), sizes, 1 << 6)
    assert plan.buffers[5] == (Buffer(7168, 8192),)
    assert plan.total_bytes == 10752


def test_streams_need_more_than_an_order():
    sizes = [[512]] * 7
    alone = plan_memory(FORK, Streams((tuple(range(7)),), ()), sizes, 1 << 6)
    beside = plan_memory(FORK, STREAMS, sizes, 1 << 6)
    assert (alone.total_bytes, beside.total_bytes) == (4 * 512, 6 * 512)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_that_was_tampered_with_is_caught(seed):
    rng = random.Random(seed)
    plan = plan_memory(FORK, STREAMS, [[1000, 24]] * 7, 1 << 6)
    # 1 and 2, and 3 and 4, and 5 and 1 run beside each other.
    first, second = rng.choice([(1, 2), (3, 4), (5, 1), (2, 1), (0, 1), (4, 6)])
    buffers = list(plan.buffers)
    start = buffers[first][0].start + rng.randrange(-23, 900)
    buffers[second] = (buffers[second][0], Buffer(start, start + 24))
    with pytest.raises(RaceError) as raised:
        check_races(FORK, STREAMS, buffers, 1 << 6)
    assert raised.value.rule == 4
    assert first in (raised.value.first, raised.value.second)


class PerStreamAllocator:
    """Hands what was freed on a stream to the next that asks on that stream, at once."""

    def __init__(self):
        self.free, self.end = {}, 0

    def take(self, stream):
        own = self.free.setdefault(stream, [])
        if own:
            return own.pop()
        self.end += 512
        return Buffer(self.end - 512, self.end)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_what_is_given_back_to_an_allocator_is_never_reused_too_early(case):
    block, streams, _, outputs = case
    allocator, buffers, stream_of = PerStreamAllocator(), [None] * len(block), {}
    for step in steps_of(block, streams, (), outputs):
        for instruction in step.instructions:
            match instruction:
                case FreeTensors(tensors=dead):
                    for kernel in dead:
                        assert stream_of[kernel] == step.lane
                        allocator.free[step.lane].append(buffers[kernel])
                case RunKernels(kernels=(kernel,)):
                    stream_of[kernel] = step.lane
                    buffers[kernel] = allocator.take(step.lane)
    check_races(block, streams, buffers, outputs)
