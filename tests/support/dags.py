"""Random blocks and stage costs for the tests of schedulers."""

import random

from dovetail.schedulers.records import KernelBlock, StageTiming, groups_of, members


def random_block(rng, ops, share=0.35):
    return KernelBlock(
        tuple(sum(1 << j for j in range(i) if rng.random() < share) for i in range(ops))
    )


def random_seconds(seed):
    """A timer whose seconds depend on the stage alone."""

    def timer(stages):
        return [StageTiming(random.Random(f"{seed} {stage}").random() + 0.1) for stage in stages]

    return timer


def occupancy(block, op_seconds, launch_seconds=0.1, together=3.0):
    """A timer by a rule: groups overlap until `together` of them fill the device."""

    def timer(stages):
        found = []
        for stage in stages:
            totals = [sum(op_seconds[i] for i in members(g)) for g in groups_of(block, stage)]
            found.append(StageTiming(launch_seconds + max(max(totals), sum(totals) / together)))
        return found

    return timer
