"""Records of schedulers: the block of kernels that they are given and the stages that they find.

A *stage* is a set of ops that run together. Its *groups* are its connected components. Groups run
at the same time; the ops of one group run one after another. A set of ops is a bit mask, in which
bit i stands for op i of the block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

OpSet = int


@dataclass(frozen=True)
class StageTiming:
    """The seconds of a stage. If `merged`, the stage runs as one op that replaces all its ops."""

    seconds: float
    merged: bool = False


StageTimer = Callable[[Sequence[OpSet]], Sequence[StageTiming]]
"""A function from stages of a block to the timing of each: groups at once or merged, whichever is
faster."""


@dataclass(frozen=True)
class KernelBlock:
    """Ops of one device that are scheduled together, in topological order.

    predecessors   [ops] the ops that each op waits for, because it reads them or for other reasons

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
        """[ops] the ops that directly wait for each op."""
        after = [0] * len(self)
        for op, before in enumerate(self.predecessors):
            for producer in members(before):
                after[producer] |= 1 << op
        return tuple(after)

    @cached_property
    def descendants(self) -> tuple[OpSet, ...]:
        """[ops] all ops that can run only after each op, without the op itself."""
        below = list(self.successors)
        for op in reversed(range(len(self))):
            for consumer in members(self.successors[op]):
                below[op] |= below[consumer]
        return tuple(below)


@dataclass(frozen=True)
class BlockSchedule:
    """The stages of a block in running order, and what the search took.

    seconds       the sum over the stages
    states        sets of ops whose best schedule was searched
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
    """Yield the ops of a set, ascending."""
    while ops:
        # `ops & -ops` is the lowest bit that is set.
        lowest = ops & -ops
        yield lowest.bit_length() - 1
        ops ^= lowest


def subsets_of(ops: OpSet) -> Iterator[OpSet]:
    """Yield every non-empty subset, the whole set first and larger numbers before smaller ones."""
    subset = ops
    while subset:
        yield subset
        # Subtracting 1 borrows through the bits outside `ops`; the mask removes them again, which
        # gives the next smaller subset.
        subset = (subset - 1) & ops


def groups_of(block: KernelBlock, stage: OpSet) -> list[OpSet]:
    """Return the connected components of a stage, in the order of their first ops."""
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
