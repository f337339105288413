"""All that is ready, at once: what parallel executors of common frameworks do.

The baseline "greedy" of Y. Ding et al., "IOS: Inter-Operator Scheduler for CNN Acceleration", MLSys
2021, https://arxiv.org/abs/2011.01302, section 6.2.
"""

from dovetail.schedulers.records import Block, Found, OpSet, StageTimer


def greedy(block: Block, timer: StageTimer) -> Found:
    """Stages of all ops whose predecessors ran in earlier ones. O(ops x stages)."""
    stages: list[OpSet] = []
    done = 0
    while done != block.everything:
        stage = sum(
            1 << op
            for op, before in enumerate(block.predecessors)
            if not done >> op & 1 and not before & ~done
        )
        stages.append(stage)
        done |= stage
    return Found(tuple(stages), tuple(timer(stages)), 0, 0, len(stages))
