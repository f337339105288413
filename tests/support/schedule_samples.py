"""Schedules of a made-up network: blocks of branches that end in a concatenation.

0 ──► 1 ──► 2 ─┐            of a block of two branches of two kernels: kernels 1 to 5,
  └─► 3 ──► 4 ─┴► 5 ──►     after kernel 0, which is the block before
"""

from dovetail.schedulers.dataflow import dataflow
from dovetail.schedulers.records import KernelBlock
from dovetail.schedulers.results import (
    KernelStage,
    KernelWork,
    ScheduleCandidate,
    Scheduled,
    Schedules,
    SearchEffort,
)

MS = 1e-3


def network(blocks=3, branches=2, depth=2):
    """(block, kernels of each part, branches of each part)"""
    before, parts, sides = [0], [(0,)], [((0,),)]
    for _ in range(blocks):
        last, first = len(before) - 1, len(before)
        groups = []
        for _ in range(branches):
            group = tuple(range(len(before), len(before) + depth))
            before += [1 << last] + [1 << kernel for kernel in group[:-1]]
            groups.append(group)
        before.append(sum(1 << group[-1] for group in groups))
        parts.append(tuple(range(first, len(before))))
        sides.append(tuple(groups))
    return KernelBlock(tuple(before)), tuple(parts), sides


def staged(parts, sides, together, merged=()):
    """Stages of all blocks and the seconds of each block, 1 ms a kernel; groups that run together
    take `together` ms for all but the last kernel of the block."""
    stages, seconds = [], []
    for part, groups in zip(parts, sides, strict=True):
        if together is None:
            own = [KernelStage(((kernel,),), MS) for kernel in part]
        else:
            own = [KernelStage(groups, together * MS, part in merged)]
            own += [KernelStage(((kernel,),), MS) for kernel in set(part) - set(own[0].kernels)]
        stages += own
        seconds.append(sum(stage.seconds for stage in own))
    return tuple(stages), tuple(seconds)


def make_candidate(name, block, stages=(), seconds=(), measured=None, **rest):
    streams, _ = dataflow(block, [MS] * len(block), 1 if stages else 2)
    predicted = sum(stage.seconds for stage in stages) or 0.01
    steps = () if measured is None else tuple(measured * (1 + 0.001 * i) for i in range(9))
    return ScheduleCandidate(name, stages, streams, predicted, seconds, steps, **rest)


def make_scheduled(batch=1, name="kernel", measured=(0.016, 0.012, 0.013), chosen="ios", **sizes):
    """Sequential, stages and streams; `measured` seconds of each, None: not measured."""
    block, parts, sides = network(**sizes)
    works = tuple(
        KernelWork(f"{name}.{i}", (f"{name}.{i}.conv", f"{name}.{i}.relu"), 2e6, 4096.0)
        for i in range(len(block))
    )
    merged = (parts[-1],) if sizes.get("depth") == 1 else ()
    effort = SearchEffort(1206, 9504, 659, 321, 4.5, 3.25)
    candidates = (
        make_candidate("sequential", block, *staged(parts, sides, None), measured[0]),
        make_candidate(
            "ios", block, *staged(parts, sides, 2, merged), measured[1],
            effort=effort, pruning="a window of 8 ops",
        ),
        make_candidate("dataflow", block, (), (), measured[2]),
    )  # fmt: skip
    return Scheduled(batch, works, block, parts, candidates, chosen, peak_bytes=3 * 2**20)


def make_schedules(*results, model="zoo:sample", costs="measured"):
    return Schedules(model, "cuda:0", costs, results or (make_scheduled(),))
