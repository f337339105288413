"""DiLoCo: long windows of AdamW on the workers, Nesterov's momentum on the server.

A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
https://arxiv.org/abs/2311.08105, algorithm 1.

    worker k   H steps of the inner optimizer: theta_k += U(g);  Delta_k = theta~ - theta_k
    server     Delta = 1/n sum_k Delta_k;  b = mu b + Delta;  theta~ -= eta (Delta + mu b)

The paper: H = 500, inner AdamW (lr 4e-4, weight decay .1), outer eta .7, mu .9. H is the run's
window and the inner optimizer the learner's own.
Differences: a round at the end of an epoch may have shorter windows, or fewer workers, each
counting the same.
"""

from collections.abc import Sequence

import numpy as np

from dovetail.training import kernels
from dovetail.training.optimizers import COUNT, FlatSGD
from dovetail.training.options import fraction, positive
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Arrival, Local, Rule, Slice, Update
from dovetail.training.rules.pushing import mean_of_workers

DELTA = "delta"


def diloco(lr: float = 0.7, momentum: float = 0.9) -> Rule:
    """DiLoCo with the outer learning rate `lr` and `momentum`."""
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


def walk_alone(local: Local, gradient: Vector, update: Update) -> None:
    """theta_k += U(g)"""
    kernels.add(local.theta, update(local.theta, gradient))


def distance(local: Local) -> Vector:
    """theta~ - theta_k [size], the outer gradient."""
    delta = local.slots[DELTA]
    np.subtract(local.center, local.theta, out=delta)
    return delta
