"""What every process that runs ops must be like, as a call that stands in for an op."""

import gc

import torch


def check_set_up(*_args):
    """A tensor, or an error if this process is not set up for one thread."""
    assert torch.get_num_threads() == 1
    assert (torch.full((4,), 1e-38) * 0.01 == 0).all(), "denormals count"
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    return torch.ones(4)
