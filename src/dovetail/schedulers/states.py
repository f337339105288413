"""Enumerates the states of the dynamic programmes: sets of ops that hold all predecessors of their
members.

Each state is generated once, from the state without its last op, so none has to be looked up:

    states(S) = S + x   for every x > last(S) whose predecessors are all in S

With a *window* of w ops, a state is left out if it lacks some op and holds another that stands w or
more places after it. At most ops x 2^(w - 1) states remain, however wide the block is.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from dovetail.errors import TooManyStatesError
from dovetail.schedulers.records import BlockSchedule, KernelBlock, OpSet, StageTimer, members

MOST_STATES = 1_000_000
"""Default of the most states of a block; more would not fit into memory."""
_PROBES = 2_000
"""Number of random probes over which `estimate` takes the mean."""


class BlockState(NamedTuple):
    """A set of ops that holds all predecessors of its members.

    sinks   the members that no other member waits for
    """

    ops: OpSet
    sinks: OpSet


def states_of(block: KernelBlock, window: int = 0, most: int = MOST_STATES) -> list[BlockState]:
    """Return every state but the empty one, smaller sets first; `window` 0: no window.

    Raises `TooManyStatesError` as soon as there are more than `most`. O(states x ready ops).
    """
    states = states_within(block, window, most)
    if states is None:
        raise TooManyStatesError(len(block), max(estimate(block, window), most), most)
    return states


def states_within(block: KernelBlock, window: int, most: int) -> list[BlockState] | None:
    """Return what `states_of` returns; None as soon as there are more than `most` states."""
    states_found: list[BlockState] = []
    first_ready = sum(1 << op for op, before in enumerate(block.predecessors) if not before)
    level: list[_Grown] = [(0, 0, first_ready)]
    while level:
        grown: list[_Grown] = []
        for state in level:
            grown.extend(_grow(block, state, window))
            if len(states_found) + len(grown) > most:
                return None
        states_found.extend(BlockState(ops, sinks) for ops, sinks, _ in grown)
        level = grown
    return states_found


def estimate(block: KernelBlock, window: int = 0, seed: int = 0) -> float:
    """Estimate how many states there are, as the mean of unbiased random probes.

    Source: D. E. Knuth, "Estimating the Efficiency of Backtrack Programs", Mathematics of
    Computation 29, 1975. A probe draws one state, deciding op by op whether the state holds it. Its
    estimate is 1 / the probability of its decisions. An op with a longest path of d more ops after
    it is held with probability (d + 1) / (d + 2). With these odds every probe is exact for chains
    and for ops that stand alone.
    """
    depths = [0] * len(block)
    for op in reversed(range(len(block))):
        depths[op] = max((depths[after] + 1 for after in members(block.successors[op])), default=0)
    rng = random.Random(seed)
    total = 0.0
    for _ in range(_PROBES):
        ops, weight, end = 0, 1.0, len(block)
        for op, before in enumerate(block.predecessors):
            # Here the state cannot hold the op: there is nothing to decide, and the weight stays.
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


def _grow(block: KernelBlock, state: _Grown, window: int) -> Iterator[_Grown]:
    """Yield (ops, sinks, ready ops) of each state with one more op, later than this one's last."""
    ops, sinks, ready = state
    # Adding only ops after the last one is what makes every state come up once.
    later = ready >> ops.bit_length() << ops.bit_length()
    if window:
        # The first op that the state lacks is the lowest 0 bit of `ops`.
        lacking = (~ops & -~ops).bit_length() - 1
        later &= (1 << (lacking + window)) - 1
    for op in members(later):
        with_op = ops | 1 << op
        freed = 0
        for consumer in members(block.successors[op]):
            if not block.predecessors[consumer] & ~with_op:
                freed |= 1 << consumer
        yield with_op, sinks & ~block.predecessors[op] | 1 << op, ready & ~(1 << op) | freed


def best_schedule(
    block: KernelBlock,
    timer: StageTimer,
    states: Sequence[BlockState],
    endings_of: Callable[[BlockState], Iterable[OpSet]],
) -> BlockSchedule:
    """Return the stages with the least sum of seconds, by the dynamic programme

        seconds(S) = min over endings E of S of   seconds(S - E) + stage seconds(E)

    `endings_of` is called twice for each state. Ties: the first ending that it yields.
    """
    stages = list(dict.fromkeys(ending for state in states for ending in endings_of(state)))
    timings = dict(zip(stages, timer(stages), strict=True))
    seconds = {stage: timing.seconds for stage, timing in timings.items()}
    best: dict[OpSet, float] = {0: 0.0}
    last: dict[OpSet, OpSet] = {}
    transitions = 0
    # States come smaller sets first, so the rest of a state after any ending has its best by now.
    for state in states:
        least, chosen = float("inf"), 0
        for ending in endings_of(state):
            transitions += 1
            total = best[state.ops ^ ending] + seconds[ending]
            if total < least:
                least, chosen = total, ending
        best[state.ops], last[state.ops] = least, chosen
    # The best schedule is read backwards from its last stage.
    chain, ops = [], block.everything
    while ops:
        chain.append(last[ops])
        ops ^= last[ops]
    chain.reverse()
    of_chain = tuple(timings[stage] for stage in chain)
    return BlockSchedule(tuple(chain), of_chain, len(states), transitions, len(timings))
