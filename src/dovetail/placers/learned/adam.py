"""Adam over one flat vector.

D. Kingma and J. Ba: Adam: A Method for Stochastic Optimization, ICLR 2015,
https://arxiv.org/abs/1412.6980, algorithm 1:

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    change = -rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)

Differences: none. By hand, because its state is kept on disk at every step, whole, and because
policies have hundreds of small parameters that one vector holds. Neither torch's functions nor
`training.optimizers` can stand in its place: they keep the mean as m + (1 - b1) (g - m), whose last
bits differ, so that a run with the same seed would draw other placements.
"""

import math

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class VectorAdam:
    """State of the optimizer of a vector [size].

    mean, square   [size] moving averages of the gradient, and of its square
    steps          taken
    """

    def __init__(self, like: Tensor) -> None:
        self.mean, self.square = torch.zeros_like(like), torch.zeros_like(like)
        self.steps = 0

    def step(self, gradient: Tensor, rate: float) -> Tensor:
        """[size] what is to be added to the parameters: a tensor of its own."""
        self.steps += 1
        self.mean.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        self.square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        scale = math.sqrt(1 - BETA2**self.steps)
        change = self.square.sqrt().div_(scale).add_(EPSILON)
        torch.div(self.mean, change, out=change)
        return change.mul_(-rate / (1 - BETA1**self.steps))
