"""Hogwild!: workers add their updates to the shared parameters themselves, without a lock.

F. Niu, B. Recht, C. Re, S. J. Wright: HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic
Gradient Descent, NIPS 2011, https://arxiv.org/abs/1106.5730, section 2, algorithm 1.

    worker     theta~ += U(g) on the coordinates where U(g) is not 0

g is computed at theta~ as the worker finds it, while others write to it.
Differences: the paper adds atomically. Here, if two workers add to a coordinate at the same moment,
one of the updates may be lost, as with the plain stores of the paper's own experiments. U may be
any optimizer, and each worker has its own state of it.
"""

from dovetail.training import kernels
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Local, Rule, Update


def hogwild() -> Rule:
    """Commits have no vector, because `Local.theta` of every worker is the shared center itself."""
    return Rule(name="hogwild", options={}, step=_step, message=_message, lock_free=True)


def _step(local: Local, gradient: Vector, update: Update) -> None:
    kernels.add_touched(local.theta, update(local.theta, gradient))


def _message(local: Local) -> Vector:
    return local.theta[:0]
