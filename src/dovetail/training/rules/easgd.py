"""Synchronous elastic averaging: a spring ties each worker's own parameters to the center.

S. Zhang, A. Choromanska, Y. LeCun: Deep learning with Elastic Averaging SGD, NIPS 2015,
https://arxiv.org/abs/1412.6651, section 2, equations 3 and 4.

    worker k   E_k = alpha (theta_k - theta~)       where its window begins
               theta_k += U(g_k) - E_k              g_k at theta_k as it was before
    server     theta~ += sum_k E_k

theta~ does not replace theta_k. In the paper alpha = eta rho and beta = n alpha = .9, so choose
alpha near .9 / n. If n alpha is above 1, the center overshoots; above 2, it diverges.
Differences: in a window of several steps the spring acts once, at the first step.
"""

from collections.abc import Sequence

import numpy as np

from dovetail.training import kernels
from dovetail.training.options import fraction
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Arrival, Local, Rule, Slice, Update

FORCE = "force"
"""The rule's vector on a worker, E_k."""


def easgd(alpha: float = 0.05) -> Rule:
    """The spring moves both ends by `alpha` times their distance."""
    fraction("alpha", alpha)

    def begin(local: Local) -> None:
        force = local.slots[FORCE]
        np.subtract(local.theta, local.center, out=force)
        np.multiply(force, force.dtype.type(alpha), out=force)

    return Rule(
        name="easgd",
        options={"alpha": alpha},
        begin=begin,
        step=_step,
        message=_message,
        combine=_combine,
        gathers=True,
        keeps_theta=True,
        worker_slots=(FORCE,),
    )


def _step(local: Local, gradient: Vector, update: Update) -> None:
    kernels.add(local.theta, update(local.theta, gradient))
    if not local.steps:
        np.subtract(local.theta, local.slots[FORCE], out=local.theta)


def _message(local: Local) -> Vector:
    return local.slots[FORCE]


def _combine(part: Slice, arrivals: Sequence[Arrival]) -> None:
    for arrival in arrivals:
        kernels.add(part.theta, arrival.vector)
