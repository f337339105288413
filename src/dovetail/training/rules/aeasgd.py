"""Asynchronous elastic averaging: each worker has its own parameters, and once a window these and
the center move towards each other.

S. Zhang, A. Choromanska, Y. LeCun: Deep learning with Elastic Averaging SGD, NIPS 2015,
https://arxiv.org/abs/1412.6651, section 3, algorithms 1 and 2.

    worker k   every lambda steps, with a fresh theta~:
               E = alpha (theta_k - theta~);   commit E;   otherwise E = 0
               AEASGD   theta_k += U(g(theta_k)) - E
               EAMSGD   v = delta v + U(g(theta_k + delta v));   theta_k += v - E
    server     theta~ += E

The gradient beside an elastic step is taken where theta_k was before that step. So both algorithms
have it, as does the authors' program (mpiT, `optim.eamsgd`). theta~ never replaces theta_k. In the
paper alpha = eta rho. Here v is the worker's velocity, not a commit. delta = .9 is dist-keras'
default; the paper's own, which others cite as .99, could not be checked.
Differences: E is computed at the end of a window, where the paper computes it at the beginning of
the next one, which is the same moment. U may be any optimizer, where the paper has -eta g.
"""

import numpy as np

from dovetail.training import kernels
from dovetail.training.options import fraction, positive
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Arrival, Local, Rule, Slice, Update

FORCE, VELOCITY, AHEAD = "force", "velocity", "ahead"
"""The rules' vectors on a worker: E, v and theta_k + delta v."""


def aeasgd(alpha: float = 0.05, rho: float | None = None) -> Rule:
    """AEASGD: both move by `alpha` times their distance, or by eta `rho` times it with `rho`.

    eta is the worker's learning rate at that moment. The default of .05 is the setting of J.
    Hermans' thesis (see `adag`): rho = 5 at a learning rate of .01.
    """

    def step(local: Local, gradient: Vector, update: Update) -> None:
        kernels.add(local.theta, update(local.theta, gradient))
        _let_force_act(local)

    return Rule(
        name="aeasgd",
        options={"alpha": alpha, "rho": rho},
        step=step,
        message=_Elastic(alpha, rho),
        apply=_apply,
        pulls_first=True,
        keeps_theta=True,
        worker_slots=(FORCE,),
    )


def eamsgd(alpha: float = 0.05, rho: float | None = None, delta: float = 0.9) -> Rule:
    """EAMSGD: AEASGD with Nesterov's momentum `delta` on each worker."""
    fraction("delta", delta)

    def look(local: Local) -> Vector:
        ahead = local.slots[AHEAD]
        np.multiply(local.slots[VELOCITY], ahead.dtype.type(delta), out=ahead)
        kernels.add(ahead, local.theta)
        return ahead

    def step(local: Local, gradient: Vector, update: Update) -> None:
        velocity = local.slots[VELOCITY]
        change = update(local.slots[AHEAD], gradient)
        np.multiply(velocity, velocity.dtype.type(delta), out=velocity)
        kernels.add(velocity, change)
        kernels.add(local.theta, velocity)
        _let_force_act(local)

    return Rule(
        name="eamsgd",
        options={"alpha": alpha, "rho": rho, "delta": delta},
        look=look,
        step=step,
        message=_Elastic(alpha, rho),
        apply=_apply,
        pulls_first=True,
        keeps_theta=True,
        worker_slots=(FORCE, VELOCITY, AHEAD),
    )


class _Elastic:
    """Returns E = alpha (theta_k - theta~), which the next window's first step subtracts."""

    def __init__(self, alpha: float, rho: float | None) -> None:
        fraction("alpha", alpha)
        if rho is not None:
            positive("rho", rho)
        self._alpha = alpha
        self._rho = rho

    def __call__(self, local: Local) -> Vector:
        alpha = self._alpha if self._rho is None else self._rho * local.rate
        force = local.slots[FORCE]
        np.subtract(local.theta, local.center, out=force)
        np.multiply(force, force.dtype.type(alpha), out=force)
        return force


def _let_force_act(local: Local) -> None:
    """At the first step of a window, subtracts the force that the window before it ended with."""
    if not local.steps:
        np.subtract(local.theta, local.slots[FORCE], out=local.theta)


def _apply(part: Slice, arrival: Arrival) -> None:
    kernels.add(part.theta, arrival.vector)
