"""Small networks, ready to run on streams of this process's cores."""

import torch
from torch import nn

from dovetail.executors.stages.cpu import CpuStep, Functions
from dovetail.executors.stages.phases import SchedulePhase
from dovetail.executors.stages.targets import example_of
from dovetail.schedulers.dataflow import dataflow
from dovetail.schedulers.timing import block_of
from tests.support.stages_by_hand import Step


class Ready:
    """A module's kernels as functions, and steps of them."""

    def __init__(self, module, inputs, **options):
        torch.manual_seed(0)
        self.module, self.inputs = module.eval(), inputs
        self.by_hand = Step(module, inputs, **options)
        self.prepared = self.by_hand.prepared
        self.block = block_of(self.by_hand.captured.graph, self.by_hand.kernels)
        self.functions = Functions(self.prepared, example_of(self.prepared, inputs))

    def streams(self, count):
        return dataflow(self.block, [1.0] * len(self.block), count)[0]

    def phase(self, streams):
        return SchedulePhase(tuple(range(len(self.block))), streams)

    def step(self, *phases, threads=1):
        return CpuStep(self.prepared, self.block, phases, self.functions, threads)

    def streamed(self, count):
        return self.step(self.phase(self.streams(count)))

    def plain(self, *inputs):
        with torch.no_grad():
            return self.module(*inputs)


class Branches(nn.Module):
    """Some chains of layers of one input, added up; the chains' ends are outputs too."""

    def __init__(self, count=3, depth=2, width=4):
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
            )
            for _ in range(count)
        )

    def forward(self, rows):
        ends = [branch(rows) for branch in self.branches]
        return {"sum": sum(ends), "ends": ends}


class Lookups(nn.Module):
    """Two branches, each of which fails for an index of 5 or more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.left, self.right = nn.Embedding(5, 4), nn.Embedding(5, 4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, left, right):
        return self.one(self.left(left)).tanh() + self.two(self.right(right)).sigmoid()
