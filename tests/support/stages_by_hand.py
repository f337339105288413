"""Kernels of a captured step, run one after another or merged, without a schedule."""

import torch
import torch.utils._pytree as pytree

from dovetail.executors.stages.merging import can_merge, merge_keys, merged_function
from dovetail.executors.stages.preparing import prepare
from dovetail.frontends import capture
from dovetail.frontends.program import Ref
from dovetail.graph.kernels import fuse
from dovetail.schedulers.merge import merge
from dovetail.schedulers.records import StageTiming, members
from dovetail.schedulers.timing import block_of


class Step:
    """A module's inference step, prepared."""

    def __init__(self, module, inputs, *, channels_last=False, captured=None):
        self.captured = captured or capture(module.eval(), *inputs)
        self.kernels = fuse(self.captured.graph)
        self.prepared = prepare(self.captured, self.kernels, channels_last=channels_last)
        self.keys = merge_keys(self.captured.graph, self.kernels, self.prepared)

    @property
    def alone(self):
        return [(number,) for number in range(self.kernels.count)]

    @property
    def merged(self):
        """Stages of as few kernels as can be."""
        block = block_of(self.captured.graph, self.kernels)

        def timer(stages):
            return [StageTiming(1.0, merged=stage & stage - 1 != 0) for stage in stages]

        return [tuple(members(stage)) for stage in merge(block, timer, self.keys).stages]

    def values(self, inputs, stages):
        """Tensor -> value, once the stages have run in order; those of several kernels merged."""
        prepared = self.prepared
        if prepared.channels_last:
            inputs = [_channels_last(value) for value in inputs]
        found = prepared.constants | dict(zip(prepared.inputs, inputs, strict=True))
        with torch.inference_mode():
            for stage in stages:
                assert len(stage) == 1 or can_merge(self.keys, stage)
                run, takes, returns = (
                    merged_function(prepared, stage) if stage[1:] else prepared.function(stage)
                )
                found.update(zip(returns, run(*(found[t] for t in takes)), strict=True))
        return found

    def outputs(self, inputs, stages):
        values = self.values(inputs, stages)
        return pytree.tree_map_only(Ref, lambda ref: values[ref.tensor], self.prepared.outputs)


def _channels_last(value):
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def randomised(module):
    """The module, with batch normalisations that do something."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                part.running_mean.normal_(0, 0.5)
                part.running_var.uniform_(0.5, 2)
                if part.affine:
                    part.weight.uniform_(0.5, 1.5)
                    part.bias.normal_(0, 0.5)
    return module


def assert_equal_values(found, expected, tolerance):
    """Relative to the largest expected value; integers and truths exactly."""
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if b.is_floating_point():
            assert bool(torch.isfinite(b).all())
            assert float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())
        else:
            assert torch.equal(a, b)
