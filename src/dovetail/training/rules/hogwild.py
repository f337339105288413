"""Hogwild!: workers write to the shared parameters, without a lock.

F. Niu, B. Recht, C. Re, S. J. Wright: HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic
Gradient Descent, NIPS 2011, https://arxiv.org/abs/1106.5730, section 2, algorithm 1.

    worker     g at theta~ as it finds it;  theta~ += U(g) on the coordinates where U(g) is not 0

Differences: the paper adds atomically. Here one of two workers that add to a coordinate at the same
moment may lose its update, as with the plain stores of the paper's own experiments. U may be any
optimizer; each worker has its own state.
"""

from dovetail.training import kernels
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Local, Rule, Update


def hogwild() -> Rule:
    """Hogwild!: `Local.theta` is the shared center itself, and commits have no vector."""
    return Rule(name="hogwild", options={}, step=_step, message=_message, lock_free=True)


def _step(local: Local, gradient: Vector, update: Update) -> None:
    kernels.add_touched(local.theta, update(local.theta, gradient))


def _message(local: Local) -> Vector:
    return local.theta[:0]
