import random
from dataclasses import replace

import pytest

from dovetail.errors import RaceError
from dovetail.schedulers.blocks import cut, joined, narrowed, whole
from dovetail.schedulers.dataflow import Streams, dataflow, with_waits
from dovetail.schedulers.dos import dos
from dovetail.schedulers.races import Buffer, check_races, happens_before
from dovetail.schedulers.records import KernelBlock, StageTiming, members
from dovetail.schedulers.states import states_of
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
BUFFERS = [
    Buffer(0, 8),
    Buffer(8, 16),
    Buffer(16, 24),
    Buffer(24, 32),
    Buffer(32, 40),
    Buffer(40, 48),
    Buffer(0, 8),
]


def test_dataflow_of_the_fork():
    assert dataflow(FORK, [1.0] * 7, 3) == (STREAMS, 4.0)
    check_races(FORK, STREAMS, BUFFERS, outputs=1 << 6)


@pytest.mark.parametrize("seed", range(30))
def test_dataflow_keeps_every_edge_with_no_wait_to_spare(seed):
    rng = random.Random(seed)
    block = random_block(rng, 30, 0.12)
    found, _ = dataflow(block, [rng.random() for _ in range(30)], rng.randrange(1, 6))
    check_races(block, found)
    for wait in found.waits:
        fewer = replace(found, waits=tuple(w for w in found.waits if w != wait))
        with pytest.raises(RaceError) as raised:
            check_races(block, fewer)
        assert raised.value.rule == 3


@pytest.mark.parametrize("seed", range(20))
def test_list_schedules_keep_grahams_bound(seed):
    rng = random.Random(seed)
    block = random_block(rng, 25, 0.15)
    seconds = [rng.random() for _ in range(25)]
    streams = rng.randrange(1, 5)
    ended = [0.0] * 25
    found, predicted = dataflow(block, seconds, streams)
    earlier = happens_before(block, found)
    for op in sorted(range(25), key=lambda op: earlier[op].bit_count()):
        ended[op] = seconds[op] + max((ended[p] for p in members(earlier[op])), default=0.0)
    assert max(ended) == pytest.approx(predicted)
    longest = [0.0] * 25
    for op in range(25):
        longest[op] = seconds[op] + max(
            (longest[p] for p in members(block.predecessors[op])), default=0.0
        )
    assert max(ended) <= sum(seconds) / streams + (1 - 1 / streams) * max(longest) + 1e-9


FAULTS = {
    "a wait is missing": (3, {"waits": ((0, 3), (3, 6), (5, 6))}),
    "a wait at the join is missing": (3, {"waits": ((0, 2), (0, 3), (3, 6))}),
    "all waits are missing": (3, {"waits": ()}),
    "a wait is the wrong way round": (3, {"waits": ((0, 3), (2, 0), (3, 6), (5, 6))}),
    "a stream runs the reader first": (3, {"orders": ((0, 1, 4, 6), (5, 2), (3,))}),
    "streams wait for each other": (2, {"waits": ((0, 2), (0, 3), (3, 6), (5, 6), (6, 2))}),
    "an op is left out": (1, {"orders": ((0, 1, 4, 6), (2, 5))}),
    "an op runs twice": (1, {"orders": ((0, 1, 4, 6), (2, 5), (3, 1))}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_streams_is_caught(fault):
    rule, change = FAULTS[fault]
    with pytest.raises(RaceError) as raised:
        check_races(FORK, replace(STREAMS, **change), BUFFERS, outputs=1 << 6)
    assert raised.value.rule == rule


@pytest.mark.parametrize(
    ("op", "buffer", "collides"),
    [
        (4, BUFFERS[2], {2, 4}),  # of another branch that still runs
        (3, BUFFERS[1], {1, 3}),
        (4, Buffer(12, 20), {1, 4}),  # overlaps only in part
        (5, BUFFERS[6], {0, 5}),  # 3 may still read it
        (1, BUFFERS[6], {0, 1}),  # its own input, which others read
    ],
)
def test_a_buffer_that_is_reused_too_early_is_caught(op, buffer, collides):
    buffers = list(BUFFERS)
    buffers[op] = buffer
    with pytest.raises(RaceError) as raised:
        check_races(FORK, STREAMS, buffers, outputs=1 << 6)
    assert raised.value.rule == 4
    assert {raised.value.first, raised.value.second} == collides


def test_nothing_writes_over_an_output():
    with pytest.raises(RaceError) as raised:
        check_races(FORK, STREAMS, BUFFERS, outputs=1)
    assert (raised.value.rule, raised.value.first, raised.value.second) == (4, 0, 6)


def test_orders_that_deadlock_are_refused():
    with pytest.raises(ValueError, match="op 6"):
        with_waits(FORK, [(0, 1, 6, 4), (2, 5), (3,)])
    with pytest.raises(ValueError, match="every op once"):
        with_waits(FORK, [(0, 1, 4), (2, 5), (3,)])


def test_blocks_end_at_ops_that_all_paths_pass():
    chained = KernelBlock((*FORK.predecessors, 1 << 6, 1 << 7, 1 << 7, 0b11 << 8))
    parts = cut(chained)
    assert [part.ops for part in parts] == [(0,), (1, 2, 3, 4, 5, 6), (7,), (8, 9, 10)]
    assert parts[1].block.predecessors == (0, 0, 0, 0b1, 0b10, 0b11100)


def test_two_ends_are_one_block():
    assert [part.ops for part in cut(KernelBlock((0, 0b1, 0b1)))] == [(0,), (1, 2)]
    assert [part.ops for part in cut(KernelBlock((0, 0)))] == [(0, 1)]


def test_cells_that_read_two_cells_before_are_cut_between_cells():
    # 0 | 1 2 3 | 4 5 6 | 7 8 9: each cell reads the last op of the two before.
    cells = KernelBlock((0, 0b1, 0b1, 0b110, 0b1000, 0b1, 0b110000, 1 << 6, 1 << 3, 0b110000000))
    assert [part.ops for part in cut(cells)] == [(0,), (1, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert [part.ops for part in cut(cells, crossing=2)] == [
        (0,), (1,), (2, 3), (4, 5, 6), (7,), (8, 9)
    ]  # fmt: skip


def test_a_wide_block_is_cut_no_finer_than_it_must_be():
    cells = KernelBlock((0, 0b1, 0b1, 0b110, 0b1000, 0b1, 0b110000, 1 << 6, 1 << 3, 0b110000000))
    assert [part.ops for part in narrowed(cells, most=100).parts] == [(0,), tuple(range(1, 10))]
    found = narrowed(cells, most=6)
    assert found.pruning == "cut where 2 ops are read later"
    assert all(len(states_of(part.block)) <= 6 for part in found.parts)
    assert sorted(op for part in found.parts for op in part.ops) == list(range(10))
    wide = narrowed(KernelBlock((0,) * 24), most=1000)
    assert wide.pruning == "a window of 6 ops"
    assert len(states_of(wide.parts[0].block, wide.windows[0])) <= 1000


@pytest.mark.parametrize("seed", range(20))
def test_stages_of_independent_ops_lose_nothing_by_cutting(seed):
    rng = random.Random(seed)
    block = random_block(rng, 12, 0.5)

    def timer(stages):
        return [StageTiming(random.Random(f"{seed} {stage}").random() + 0.1) for stage in stages]

    found = []
    for part in cut(block):
        of_part = dos(part.block, lambda stages, part=part: timer([whole(part, s) for s in stages]))
        found.append((part, of_part.stages))
    total = sum(timing.seconds for timing in timer(joined(found)))
    assert total == pytest.approx(dos(block, timer).seconds)


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_keeps_every_edge(seed):
    rng = random.Random(seed)
    block = random_block(rng, 40, 0.08)
    for crossing in range(5):
        parts, done = cut(block, crossing), 0
        for part in parts:
            for op in part.ops:
                assert not done >> op & 1
                assert not block.predecessors[op] & ~(done | sum(1 << o for o in part.ops))
            done |= sum(1 << op for op in part.ops)
        assert done == block.everything
