"""DOWNPOUR: each worker commits the sum of a window, and the server applies it at once.

J. Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012,
https://papers.nips.cc/paper/2012/hash/6aca97005c68f1206823815f66102863-Abstract.html, section 4.1
and the appendix's algorithms (n_fetch = n_push = lambda).

    plain      worker k   lambda steps: theta_k += U(g);  v += U(g)
               server     theta~ += v
    Adagrad    worker k   lambda steps: theta_k += U(g);  v += g
               server     s += v^2;  theta~ -= eta v / (sqrt(s) + epsilon)

s is the sum of squares that Adagrad keeps on the server. epsilon keeps the first division finite.
Differences: the plain rule is that of J. Hermans, On Scalable Deep Learning and Parallelizing
Gradient Descent, 2017, https://github.com/JoeriHermans/master-thesis, chapter 2, where U may be any
optimizer on the worker. The paper's server runs Adagrad, and its lambda is 1.
"""

from dovetail.training import kernels
from dovetail.training.optimizers import COUNT, FlatAdagrad
from dovetail.training.options import not_negative, positive
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Arrival, Local, Rule, Slice, Update
from dovetail.training.rules.pushing import TOTAL, add_gradient, total, walk, walk_alone


def downpour() -> Rule:
    """The commit is a sum of updates, which the server adds to the center."""
    return Rule(
        name="downpour", options={}, step=walk, message=total, apply=add, worker_slots=(TOTAL,)
    )


def downpour_adagrad(lr: float | None = None, epsilon: float = 1e-10) -> Rule:
    """The commit is a sum of gradients, with which the server makes a step of Adagrad.

    lr        the server's learning rate; None: that of the worker
    epsilon   is added to the root of the sum of squares
    """
    if lr is not None:
        positive("lr", lr)
    not_negative("epsilon", epsilon)
    server = FlatAdagrad(eps=epsilon)

    def apply(part: Slice, arrival: Arrival) -> None:
        rate = arrival.rate if lr is None else lr
        change = server.update(part.theta, arrival.vector, part.slots, part.counts, rate)
        kernels.add(part.theta, change)

    return Rule(
        name="downpour-adagrad",
        options={"lr": lr, "epsilon": epsilon},
        step=_walk_by_gradients,
        message=total,
        apply=apply,
        worker_slots=(TOTAL,),
        server_slots=server.slots,
        server_counts=(COUNT,),
    )


def add(part: Slice, arrival: Arrival) -> None:
    """Adds the commit to the center: theta~ += v."""
    kernels.add(part.theta, arrival.vector)


def _walk_by_gradients(local: Local, gradient: Vector, update: Update) -> None:
    walk_alone(local, gradient, update)
    add_gradient(local, gradient, update)
