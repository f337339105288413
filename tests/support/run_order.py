"""The samples of a leased job, as `positions` gives them out."""

from dovetail.training.positions import Positions, Stretch


def order(job, epoch):
    """The order [samples] of an epoch; None for a stream."""
    return Positions(job).order(Stretch(0, epoch, 0, None))


def batches(job, lease):
    """The positions [start, stop) of a lease's steps."""
    return Positions(job).batches(lease.start, lease.stop)
