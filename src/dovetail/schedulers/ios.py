"""Optimal stages of concurrent groups, by dynamic programming over sets of ops.

An ending E of a state S is a non-empty subset that no edge leaves within S. Its connected
components are its *groups*: they run at the same time, the ops of a group one after another.
Pruned to at most s groups of at most r ops:

    seconds(S) = min over endings E of S of   seconds(S - E) + stage seconds(E)

Paper: Y. Ding et al., "IOS: Inter-Operator Scheduler for CNN Acceleration", MLSys 2021,
https://arxiv.org/abs/2011.01302, algorithm 1 and section 4.3.
Differences: iterative, smaller sets first. Endings are built from their groups instead of op by op:
a group is a union of overlapping *closures* (an op of S and all ops of S that wait for it), and any
disjoint groups make an ending, because no edge can join two sets that no edge leaves. So every
ending comes once and none is missed; the authors' program does not achieve this. The same ending
may occur in many states, and is timed once.

`ios` with r = 1 and no limit on s is `dos`. The result is exact among the endings that the pruning
leaves.
"""

from collections.abc import Iterator

from dovetail.schedulers.records import BlockSchedule, KernelBlock, OpSet, StageTimer, members
from dovetail.schedulers.states import MOST_STATES, BlockState, best_schedule, states_of

GROUP_OPS = 3
"""Default of the most ops in a group, the paper's r."""
GROUPS = 8
"""Default of the most groups in a stage, the paper's s."""


def ios(
    block: KernelBlock,
    timer: StageTimer,
    *,
    group_ops: int = GROUP_OPS,
    groups: int = GROUPS,
    window: int = 0,
    most: int = MOST_STATES,
) -> BlockSchedule:
    """Return the stages with the least sum of seconds.

    A stage has at most `groups` groups (the paper's s), of at most `group_ops` ops each (its r).
    Raises `TooManyStatesError`.
    """
    states = states_of(block, window, most)
    state_sets = {0, *(state.ops for state in states)}
    endings = {
        state: [
            ending
            for ending in endings_of(block, state, group_ops, groups)
            if not window or state.ops ^ ending in state_sets
        ]
        for state in states
    }
    return best_schedule(block, timer, states, endings.__getitem__)


def endings_of(
    block: KernelBlock, state: BlockState, group_ops: int, groups: int
) -> Iterator[OpSet]:
    """Yield once each ending of a state with at most `groups` groups of at most `group_ops` ops."""
    groups_found = _groups(block, state, group_ops)
    # An ending is built by adding groups in the order of this list only, so that the same groups in
    # another order do not give it again. The key is the lowest sink of a group, then the group.
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
    """Return the groups of a state: connected subsets that no edge leaves within the state.

    Only groups of at most `group_ops` ops are returned.
    """
    closures = _closures(block, state, group_ops)
    groups = dict.fromkeys(closures)
    fresh = closures
    while fresh:
        grown: dict[OpSet, None] = {}
        # Unions only grow, so only the groups that the last round added can give new ones.
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
    """Return, for each op of the state, the op with all ops there that wait for it.

    Only closures of at most `group_ops` ops are returned. The search goes up from the sinks and
    stops at a closure that is too large, because the closures of its predecessors are larger still.
    """
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
