"""Records of schedulers: the block of kernels that they are given and the stages that they find.

A *stage* is a set of ops that run together; its *groups* are its connected components: groups run
at the same time, the ops of a group one after another. Sets of ops are bit masks: bit i is op i of
the block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

OpSet = int


@dataclass(frozen=True)
class StageTiming:
    """The seconds of a stage; `merged`: it runs as one op in place of all of its ops."""

    seconds: float
    merged: bool = False


StageTimer = Callable[[Sequence[OpSet]], Sequence[StageTiming]]
"""Stages of a block -> how long each takes, by the faster of its strategies."""


@dataclass(frozen=True)
class KernelBlock:
    """Ops of one device that are scheduled together, in topological order.

    predecessors   [ops] the ops whose outputs each reads, or that it otherwise waits for

    Raises ValueError for an edge that does not go forward.
    """

    predecessors: tuple[OpSet, ...]

    def __post_init__(self) -> None:
        for op, before in enumerate(self.predecessors):
            if before < 0 or before >> op:
                raise ValueError(f"op {op} must wait for ops before it, not for {before:#x}")

    def __len__(self) -> int:
        return len(self.predecessors)

    @property
    def everything(self) -> OpSet:
        return (1 << len(self)) - 1

    @cached_property
    def successors(self) -> tuple[OpSet, ...]:
        """[ops] the ops that wait for each."""
        after = [0] * len(self)
        for op, before in enumerate(self.predecessors):
            for producer in members(before):
                after[producer] |= 1 << op
        return tuple(after)

    @cached_property
    def descendants(self) -> tuple[OpSet, ...]:
        """[ops] all that can only run after each, itself not among them."""
        below = list(self.successors)
        for op in reversed(range(len(self))):
            for consumer in members(self.successors[op]):
                below[op] |= below[consumer]
        return tuple(below)


@dataclass(frozen=True)
class BlockSchedule:
    """Stages of a block in running order, and the effort.

    seconds       the sum over the stages
    states        sets of ops whose best schedule was looked for
    transitions   (state, ending) pairs that were compared
    timed         distinct stages that the timer was asked for
    """

    stages: tuple[OpSet, ...]
    timings: tuple[StageTiming, ...]
    states: int
    transitions: int
    timed: int

    @property
    def seconds(self) -> float:
        return sum(timing.seconds for timing in self.timings)


def members(ops: OpSet) -> Iterator[int]:
    """The ops of a set, ascending."""
    while ops:
        lowest = ops & -ops
        yield lowest.bit_length() - 1
        ops ^= lowest


def subsets_of(ops: OpSet) -> Iterator[OpSet]:
    """Every non-empty subset, the whole set first."""
    subset = ops
    while subset:
        yield subset
        subset = (subset - 1) & ops


def groups_of(block: KernelBlock, stage: OpSet) -> list[OpSet]:
    """The connected components of a stage, by first op."""
    groups = []
    while stage:
        group, fresh = 0, stage & -stage
        while fresh:
            group |= fresh
            around = 0
            for op in members(fresh):
                around |= block.predecessors[op] | block.successors[op]
            fresh = around & stage & ~group
        groups.append(group)
        stage &= ~group
    return groups
