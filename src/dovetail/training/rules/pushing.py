"""Shared by rules that push: the worker's sums over a window, and means over workers.

    updates      v = sum of U(g) over the window, theta_k walks along      (DOWNPOUR and its kin)
    gradients    v = sum of g over the window, theta_k stays at its base   (synchronous, DC-ASGD)

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


def walk(local: Local, gradient: Vector, update: Update) -> None:
    """theta_k += U(g); v += U(g)"""
    change = update(local.theta, gradient)
    kernels.add(local.theta, change)
    _accumulate(local, change)


def add_gradient(local: Local, gradient: Vector, _update: Update) -> None:
    """v += g, where theta_k does not move: a larger batch at the base."""
    _accumulate(local, gradient)


def total(local: Local) -> Vector:
    """v, the sum over the window [size]."""
    return local.slots[TOTAL]


def mean(local: Local) -> Vector:
    """v [size] divided by the steps that were made: fewer than the window at an epoch's end."""
    vector = local.slots[TOTAL]
    if local.steps > 1:
        np.divide(vector, vector.dtype.type(local.steps), out=vector)
    return vector


def mean_of_workers(out: Vector, arrivals: Sequence[Arrival]) -> None:
    """out = mean [size] of the arrivals' vectors; all workers weigh the same."""
    kernels.mean(out, [arrival.vector for arrival in arrivals])


def mean_of_samples(out: Vector, arrivals: Sequence[Arrival]) -> None:
    """out = mean [size] of the arrivals' vectors, each weighted by its samples."""
    samples = sum(arrival.samples for arrival in arrivals)
    weights = [arrival.samples / samples for arrival in arrivals]
    kernels.weighted_sum(out, [arrival.vector for arrival in arrivals], weights)


def _accumulate(local: Local, vector: Vector) -> None:
    if local.steps:
        kernels.add(local.slots[TOTAL], vector)
    else:
        local.slots[TOTAL][:] = vector
