"""DC-ASGD: the server corrects a stale gradient to first order, with the gradient's square as a
cheap estimate of the Hessian.

S. Zheng, Q. Meng, T. Wang, W. Chen, N. Yu, Z.-M. Ma, T.-Y. Liu: Asynchronous Stochastic Gradient
Descent with Delay Compensation, ICML 2017, https://arxiv.org/abs/1609.08326, algorithms 1 and 2.

    worker k   g at theta~_base
    server     theta~ -= eta (g + lam_t g g (theta~ - theta~_base))

    constant   lam_t = lam_0
    adaptive   MS = m MS + (1 - m) g g;  lam_t = lam_0 / sqrt(MS + epsilon)

All products are per weight. eta is the workers' learning rate, schedule included. lam_0 is `lam`, m
is `decay`, and MS is the running mean square of the gradients. The paper's own text was not at
hand. lam_0 = .04 (constant) is also the default of MXNet's `DCASGD`; lam_0 = 2, m = .95 and
epsilon = 1e-7 (adaptive) are also those of a public implementation, torch_scala's.
Differences: in a window of several steps a worker stays at its base, and commits the mean of its
minibatches' gradients. Each minibatch counts the same.
"""

from dovetail.training import kernels
from dovetail.training.options import fraction, not_negative, positive
from dovetail.training.rules.contract import Arrival, Rule, Slice
from dovetail.training.rules.pushing import TOTAL, add_gradient, mean

SQUARE = "square"
"""The rule's vector on the server, MS."""


def dc_asgd(lam: float = 0.04) -> Rule:
    """The strength of the correction, `lam`, is constant."""
    not_negative("lam", lam)

    def apply(part: Slice, arrival: Arrival) -> None:
        assert arrival.base is not None
        kernels.add_compensated(part.theta, arrival.vector, arrival.base, arrival.rate, lam)

    return Rule(
        name="dc-asgd",
        options={"lam": lam},
        step=add_gradient,
        message=mean,
        apply=apply,
        needs_base=True,
        worker_slots=(TOTAL,),
    )


def dc_asgd_adaptive(lam: float = 2.0, decay: float = 0.95, epsilon: float = 1e-7) -> Rule:
    """The strength of the correction is `lam` over the root mean square of the gradients."""
    not_negative("lam", lam)
    fraction("decay", decay)
    positive("epsilon", epsilon)

    def apply(part: Slice, arrival: Arrival) -> None:
        assert arrival.base is not None
        vectors = (arrival.vector, arrival.base, part.slots[SQUARE])
        kernels.add_compensated_adaptive(part.theta, vectors, arrival.rate, lam, decay, epsilon)

    return Rule(
        name="dc-asgd-adaptive",
        options={"lam": lam, "decay": decay, "epsilon": epsilon},
        step=add_gradient,
        message=mean,
        apply=apply,
        needs_base=True,
        worker_slots=(TOTAL,),
        server_slots=(SQUARE,),
    )
