"""Synchronous SGD: the workers share one large batch, and the server steps by its mean gradient.

J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz: Revisiting Distributed Synchronous SGD, 2016,
https://arxiv.org/abs/1604.00981, section 2 (without its backup workers).

    worker k   g_k = mean gradient of its window, at theta~
    server     theta~ += U(sum_k s_k g_k / sum_k s_k)

s_k is the number of samples of worker k. U is the server's optimizer. For SGD that is -eta g, where
eta is the workers' learning rate, schedule included. With n workers of batch b the rule does what
one process does with batch n b.

Differences: the server's optimizer may be any of `training.optimizers`. In a window of several
steps a worker stays at theta~ and averages its minibatches. Each minibatch counts the same. If an
epoch's windows are no multiple of n, the round at its end takes the rest from the next epoch, where
one process would cut its batch short. Workers of one round are at different places of a schedule:
eta is that of the worker with the lowest number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.training import kernels
from dovetail.training.optimizers import COUNT, make_optimizer
from dovetail.training.options import positive
from dovetail.training.rules.contract import Arrival, Rule, Slice
from dovetail.training.rules.pushing import TOTAL, add_gradient, mean, mean_of_samples


def sync(optimizer: str = "sgd", lr: float | None = None, **settings: Any) -> Rule:
    """The server's optimizer is `optimizer`, by default SGD.

    lr         the server's learning rate; None: that of the workers
    settings   those of the optimizer's record, such as `momentum`, `betas` or `weight_decay`
    """
    if lr is not None:
        positive("lr", lr)
    server = make_optimizer(optimizer, **settings)
    # A resumed run compares its options with those of a JSON file, in which tuples are lists.
    options = {
        name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
    }

    def combine(part: Slice, arrivals: Sequence[Arrival]) -> None:
        gradient = np.empty_like(part.theta)
        mean_of_samples(gradient, arrivals)
        rate = arrivals[0].rate if lr is None else lr
        kernels.add(part.theta, server.update(part.theta, gradient, part.slots, part.counts, rate))

    return Rule(
        name="sync",
        options={"optimizer": optimizer, "lr": lr, **options},
        step=add_gradient,
        message=mean,
        combine=combine,
        gathers=True,
        worker_slots=(TOTAL,),
        server_slots=server.slots,
        server_counts=(COUNT,),
    )
