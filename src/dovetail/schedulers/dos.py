"""Optimal stages of independent ops, by dynamic programming over sets of ops.

With S a set of ops that holds all predecessors of its members, and an *ending* E of S any non-empty
subset of its sinks (the ops that no other of S waits for):

    seconds(S) = min over endings E of S of   seconds(S - E) + stage seconds(E)

Paper: "Accelerate DNN Inference by Inter-Operator Parallelism" (DOS), 2019, algorithm 1, whose
line 7 prints "not in S'" where "not in S" is meant.
Differences: iterative, smaller sets first; all stages are timed in one go beforehand, so that equal
ones can be measured once.

Sets of independent ops and states are in bijection (the sinks of a state determine it), so there
are as many distinct stages as states. With a window, the search skips an ending if the remaining
ops are not themselves a state. Exact without a window. O(sum over states of 2^sinks).
"""

from collections.abc import Iterator
from functools import partial

from dovetail.schedulers.records import (
    BlockSchedule,
    KernelBlock,
    OpSet,
    StageTimer,
    members,
    subsets_of,
)
from dovetail.schedulers.states import MOST_STATES, BlockState, best_schedule, states_of


def dos(
    block: KernelBlock, timer: StageTimer, *, window: int = 0, most: int = MOST_STATES
) -> BlockSchedule:
    """Return the stages of independent ops with the least sum of seconds.

    Ties: the first ending that `endings_of` yields. Raises `TooManyStatesError`.
    """
    states = states_of(block, window, most)
    return best_schedule(block, timer, states, partial(endings_of, window=window))


def endings_of(state: BlockState, window: int = 0) -> Iterator[OpSet]:
    """Yield every non-empty set of sinks; with a window, only those that leave a state behind.

    An ending whose lowest op is m must hold all ops `window` or more places after m: otherwise the
    remaining ops would hold such an op and lack m, which the window rules out.
    """
    if not window:
        yield from subsets_of(state.sinks)
        return
    for lowest in members(state.sinks):
        far = state.ops >> lowest + window << lowest + window
        if far & ~state.sinks:
            continue
        near = state.sinks & ~far & ~((2 << lowest) - 1)
        for nearer in subsets_of(near):
            yield 1 << lowest | far | nearer
        yield 1 << lowest | far
