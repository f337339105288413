"""DiLoCo: workers train alone for long windows, and the server steps by their mean change.

A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
https://arxiv.org/abs/2311.08105, algorithm 1.

    worker k   H steps of the inner optimizer: theta_k += U(g);  Delta_k = theta~ - theta_k
    server     Delta = 1/n sum_k Delta_k;  b = mu b + Delta;  theta~ -= eta (Delta + mu b)

H is the run's window, and the inner optimizer U is the learner's own. The outer optimizer is SGD
with Nesterov's momentum, eta is `lr`, mu is `momentum`, and b is the velocity. The paper has
H = 500, AdamW as inner optimizer (lr 4e-4, weight decay .1), eta = .7 and mu = .9.
Differences: a round at the end of an epoch may have shorter windows, or fewer workers. Each worker
still counts the same.
"""

from collections.abc import Sequence

import numpy as np

from dovetail.training import kernels
from dovetail.training.optimizers import COUNT, FlatSGD
from dovetail.training.options import fraction, positive
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Arrival, Local, Rule, Slice
from dovetail.training.rules.pushing import mean_of_workers, walk_alone

DELTA = "delta"
"""The rule's vector on a worker, Delta_k."""


def diloco(lr: float = 0.7, momentum: float = 0.9) -> Rule:
    """The server steps with the learning rate `lr` and Nesterov's `momentum`."""
    positive("lr", lr)
    fraction("momentum", momentum)
    outer = FlatSGD(lr=lr, momentum=momentum, nesterov=momentum > 0)

    def combine(part: Slice, arrivals: Sequence[Arrival]) -> None:
        delta = np.empty_like(part.theta)
        mean_of_workers(delta, arrivals)
        kernels.add(part.theta, outer.update(part.theta, delta, part.slots, part.counts))

    return Rule(
        name="diloco",
        options={"lr": lr, "momentum": momentum},
        step=walk_alone,
        message=distance,
        combine=combine,
        gathers=True,
        worker_slots=(DELTA,),
        server_slots=outer.slots,
        server_counts=(COUNT,),
    )


def distance(local: Local) -> Vector:
    """Returns theta~ - theta_k [size], the outer gradient."""
    delta = local.slots[DELTA]
    np.subtract(local.center, local.theta, out=delta)
    return delta
