"""Parts that several rules share: a worker's sum over a window, and means over workers.

    sum of updates     v = sum of U(g), and theta_k moves with each    (DOWNPOUR and its kin)
    sum of gradients   v = sum of g, and theta_k stays at its base     (sync, DC-ASGD)

A sum adds the updates themselves, never a difference of parameters, and starts as a copy of the
first. So with one worker and one step per commit, theta~ += v adds exactly U(g), bit for bit.
Workers are summed in order of their numbers, so that the same round gives the same bits.
"""

from collections.abc import Sequence

import numpy as np

from dovetail.training import kernels
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Arrival, Local, Update

TOTAL = "total"
"""The vector v on a worker."""


def walk(local: Local, gradient: Vector, update: Update) -> None:
    """Makes a local step, and adds its update to the sum: theta_k += U(g); v += U(g)."""
    change = update(local.theta, gradient)
    kernels.add(local.theta, change)
    _accumulate(local, change)


def walk_alone(local: Local, gradient: Vector, update: Update) -> None:
    """Makes a local step that nothing accumulates: theta_k += U(g)."""
    kernels.add(local.theta, update(local.theta, gradient))


def add_gradient(local: Local, gradient: Vector, _update: Update) -> None:
    """Adds the gradient to the sum, and leaves theta_k where it is: v += g.

    The steps of a window are then like one larger batch at the base.
    """
    _accumulate(local, gradient)


def total(local: Local) -> Vector:
    """Returns v, the sum over the window [size]."""
    return local.slots[TOTAL]


def mean(local: Local) -> Vector:
    """Returns v [size], divided by the number of steps that were made.

    At the end of an epoch these may be fewer than the window.
    """
    vector = local.slots[TOTAL]
    if local.steps > 1:
        np.divide(vector, vector.dtype.type(local.steps), out=vector)
    return vector


def mean_of_workers(out: Vector, arrivals: Sequence[Arrival]) -> None:
    """Writes the mean [size] of the arrivals' vectors to `out`. All workers weigh the same."""
    kernels.mean(out, [arrival.vector for arrival in arrivals])


def mean_of_samples(out: Vector, arrivals: Sequence[Arrival]) -> None:
    """Writes the mean [size] of the arrivals' vectors to `out`, weighted by their samples."""
    samples = sum(arrival.samples for arrival in arrivals)
    weights = [arrival.samples / samples for arrival in arrivals]
    kernels.weighted_sum(out, [arrival.vector for arrival in arrivals], weights)


def _accumulate(local: Local, vector: Vector) -> None:
    # The first step copies, which also drops the sum of the window before. Adding to zeros instead
    # would turn -0 into 0.
    if local.steps:
        kernels.add(local.slots[TOTAL], vector)
    else:
        local.slots[TOTAL][:] = vector
