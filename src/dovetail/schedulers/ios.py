"""Optimal stages of concurrent groups, by dynamic programming over sets of ops.

An ending E of a state S is a non-empty subset that no edge leaves within S. Its connected
components are its *groups*: they run at the same time, the ops of a group one after another.
Pruned to at most s groups of at most r ops:

    seconds(S) = min over endings E of S of   seconds(S - E) + stage seconds(E)

Paper: Y. Ding et al., "IOS: Inter-Operator Scheduler for CNN Acceleration", MLSys 2021,
https://arxiv.org/abs/2011.01302, algorithm 1 and section 4.3.
Differences: iterative, smaller sets first. Endings are built from their groups instead of op by op:
a group is a union of overlapping *closures* (an op of S and all of S that waits for it), and any
disjoint groups make an ending, for no edge can join two sets that no edge leaves. So every ending
comes once and none is missed, which the authors' program gets wrong. An ending may be a stage of
many states, and is timed once.

`ios` with r = 1 and no limit on s is `dos`. Exact for what the pruning leaves.
"""

from collections.abc import Iterator

from dovetail.schedulers.records import BlockSchedule, KernelBlock, OpSet, StageTimer, members
from dovetail.schedulers.states import MOST_STATES, BlockState, states_of, trace

GROUP_OPS = 3
"""Most ops of a group, unless told: the paper's r."""
GROUPS = 8
"""Most groups of a stage, unless told: the paper's s."""


def ios(
    block: KernelBlock,
    timer: StageTimer,
    *,
    group_ops: int = GROUP_OPS,
    groups: int = GROUPS,
    window: int = 0,
    most: int = MOST_STATES,
) -> BlockSchedule:
    """The best stages of at most `groups` groups (the paper's s) of at most `group_ops` ops (its
    r). Raises `TooManyStatesError`."""
    states = states_of(block, window, most)
    state_sets = {0, *(state.ops for state in states)}
    endings = [
        [
            ending
            for ending in endings_of(block, state, group_ops, groups)
            if not window or state.ops ^ ending in state_sets
        ]
        for state in states
    ]
    stages = list(dict.fromkeys(stage for of_state in endings for stage in of_state))
    timings = dict(zip(stages, timer(stages), strict=True))
    seconds = {stage: timing.seconds for stage, timing in timings.items()}
    best: dict[OpSet, float] = {0: 0.0}
    last: dict[OpSet, OpSet] = {}
    for state, of_state in zip(states, endings, strict=True):
        ops = state.ops
        least, chosen = float("inf"), 0
        for ending in of_state:
            total = best[ops ^ ending] + seconds[ending]
            if total < least:
                least, chosen = total, ending
        best[ops], last[ops] = least, chosen
    return trace(block, last, timings, (len(states), sum(map(len, endings))))


def endings_of(
    block: KernelBlock, state: BlockState, group_ops: int, groups: int
) -> Iterator[OpSet]:
    """Every ending of a state of at most `groups` groups of at most `group_ops` ops, once."""
    groups_found = _groups(block, state, group_ops)
    # By the lowest sink that a group holds: an ending's groups are taken in that order.
    groups_found.sort(key=lambda group: ((group & state.sinks) & -(group & state.sinks), group))
    stack = [(0, 0, 0)]
    while stack:
        ending, taken, start = stack.pop()
        for place in range(start, len(groups_found)):
            if groups_found[place] & ending:
                continue
            yield ending | groups_found[place]
            if taken + 1 < groups:
                stack.append((ending | groups_found[place], taken + 1, place + 1))


def _groups(block: KernelBlock, state: BlockState, group_ops: int) -> list[OpSet]:
    """The connected subsets of at most `group_ops` ops that no edge leaves within the state."""
    closures = _closures(block, state, group_ops)
    groups = dict.fromkeys(closures)
    fresh = closures
    while fresh:
        grown: dict[OpSet, None] = {}
        for group in fresh:
            for closure in closures:
                union = group | closure
                overlaps = group & closure and union != group
                if overlaps and union not in groups and union.bit_count() <= group_ops:
                    grown[union] = None
        groups |= grown
        fresh = list(grown)
    return list(groups)


def _closures(block: KernelBlock, state: BlockState, group_ops: int) -> list[OpSet]:
    """Each op of the state with all that waits for it there, where that is `group_ops` at most."""
    ops, closures, fresh = state.ops, [], state.sinks
    visited = fresh
    while fresh:
        around = 0
        for op in members(fresh):
            closure = block.descendants[op] & ops | 1 << op
            if closure.bit_count() <= group_ops:
                closures.append(closure)
                around |= block.predecessors[op]
        fresh = around & ~visited
        visited |= fresh
    return closures
