"""What the dynamic programmes share: reading the schedule off the last stages."""

from collections.abc import Mapping

from dovetail.schedulers.records import Block, Found, OpSet, Timing


def trace(
    block: Block,
    last: Mapping[OpSet, OpSet],
    timings: Mapping[OpSet, Timing],
    effort: tuple[int, int],
) -> Found:
    """The schedule whose last stage is `last` [state] at every state; effort: (states,
    transitions)."""
    stages = []
    ops = block.everything
    while ops:
        stages.append(last[ops])
        ops ^= last[ops]
    stages.reverse()
    return Found(tuple(stages), tuple(timings[s] for s in stages), *effort, len(timings))
