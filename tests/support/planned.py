"""Plans of small modules with a placement by hand."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

import dovetail as dt
from dovetail.plans import normalise


class Blocks(nn.Module):
    """Four blocks with a skip connection around the third, which the top module adds itself."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embedding(x)
        for i, block in enumerate(self.blocks):
            x = x + block(x) if i == 2 else block(x)
        return self.head(x)


def captured(module, *inputs):
    return dt.capture(module, *inputs)


def plan_of(step, device_of, machine="2 x p100 + haswell"):
    """A plan with each op on `device_of(module path, op name)`: a device index."""
    found = dt.plan(step, machine, placer="single", budget="1e")
    graph = step.graph
    placement = np.array(
        [device_of(m, n) for m, n in zip(graph.modules, graph.names, strict=True)], np.int32
    )
    return replace(found, placement=normalise(placement, graph, found.machine), orders=None)


def blocks_step():
    torch.manual_seed(0)
    module, inputs = Blocks(), torch.randn(4, 8)
    return module, inputs, captured(module, inputs)
