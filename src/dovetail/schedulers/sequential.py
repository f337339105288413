"""One op a stage, in the order of the block: what runs without a scheduler."""

from dovetail.schedulers.records import Block, Found, StageTimer


def sequential(block: Block, timer: StageTimer) -> Found:
    """Every op by itself. O(ops)."""
    stages = tuple(1 << op for op in range(len(block)))
    return Found(stages, tuple(timer(stages)), 0, 0, len(stages))
