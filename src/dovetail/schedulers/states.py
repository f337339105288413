"""The states of the dynamic programme: sets of ops that hold all predecessors of their members.

A state with last op l comes from the one without l, so each is made once and none is looked up:

    states(S) = S + x   for every x > last(S) whose predecessors are all in S

A *window* of w ops leaves out the states that hold an op w or more places after one that they lack.
There are at most ops x 2^(w - 1) of the rest, however wide the block is.
"""

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dovetail.errors import TooManyStatesError
from dovetail.schedulers.records import BlockSchedule, KernelBlock, OpSet, StageTiming, members

MOST_STATES = 1_000_000
"""States of a block, unless told: more would not fit into memory."""
_PROBES = 2_000
"""Random probes of `estimate`."""


class BlockState(NamedTuple):
    """A set of ops that holds all predecessors of its members; `sinks` are those of its ops that
    no other of them waits for."""

    ops: OpSet
    sinks: OpSet


def states_of(block: KernelBlock, window: int = 0, most: int = MOST_STATES) -> list[BlockState]:
    """Every state but the empty one, smaller sets first; `window` 0: no window.

    Raises `TooManyStatesError` as soon as there are more than `most`. O(states x ready ops).
    """
    states_found: list[BlockState] = []
    first_ready = sum(1 << op for op, before in enumerate(block.predecessors) if not before)
    level: list[_Grown] = [(0, 0, first_ready)]
    while level:
        grown: list[_Grown] = []
        for state in level:
            grown.extend(_grown(block, state, window))
            if len(states_found) + len(grown) > most:
                states = max(estimate(block, window), most)
                raise TooManyStatesError(len(block), states, most)
        states_found.extend(BlockState(ops, sinks) for ops, sinks, _ in grown)
        level = grown
    return states_found


def estimate(block: KernelBlock, window: int = 0, seed: int = 0) -> float:
    """About how many states there are: the mean of unbiased random probes (D. E. Knuth, "Estimating
    the Efficiency of Backtrack Programs", Mathematics of Computation 29, 1975).

    A probe decides of one op after the other whether the state holds it, and counts as many states
    as its decisions were unlikely. An op above a chain of d more is held with (d + 1) : 1, which
    makes every probe exact on chains and on ops that stand alone.
    """
    depths = [0] * len(block)
    for op in reversed(range(len(block))):
        depths[op] = max((depths[after] + 1 for after in members(block.successors[op])), default=0)
    rng = random.Random(seed)
    total = 0.0
    for _ in range(_PROBES):
        ops, weight, end = 0, 1.0, len(block)
        for op, before in enumerate(block.predecessors):
            if op >= end or before & ~ops:
                continue
            held = (depths[op] + 1) / (depths[op] + 2)
            if rng.random() < held:
                ops |= 1 << op
                weight /= held
            else:
                weight /= 1 - held
                end = min(end, op + window) if window else end
        total += weight
    return total / _PROBES


_Grown = tuple[OpSet, OpSet, OpSet]


def _grown(block: KernelBlock, state: _Grown, window: int) -> Iterator[_Grown]:
    """(ops, sinks, ready ops) of each state that has one op more, after the last of this one."""
    ops, sinks, ready = state
    later = ready >> ops.bit_length() << ops.bit_length()
    if window:
        lacking = (~ops & -~ops).bit_length() - 1
        later &= (1 << (lacking + window)) - 1
    for op in members(later):
        with_op = ops | 1 << op
        freed = 0
        for consumer in members(block.successors[op]):
            if not block.predecessors[consumer] & ~with_op:
                freed |= 1 << consumer
        yield with_op, sinks & ~block.predecessors[op] | 1 << op, ready & ~(1 << op) | freed


def trace(
    block: KernelBlock,
    last: Mapping[OpSet, OpSet],
    timings: Mapping[OpSet, StageTiming],
    effort: tuple[int, int],
) -> BlockSchedule:
    """The schedule that the dynamic programmes found, read backwards from the last stages.

    last     state -> the last stage of its best schedule
    effort   (states, transitions)
    """
    stages = []
    ops = block.everything
    while ops:
        stages.append(last[ops])
        ops ^= last[ops]
    stages.reverse()
    return BlockSchedule(tuple(stages), tuple(timings[s] for s in stages), *effort, len(timings))
