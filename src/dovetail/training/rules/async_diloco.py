"""Asynchronous DiLoCo: the server applies each commit at once, and updates its momentum after every
N commits.

B. Liu, R. Chhaparia, A. Douillard, S. Kale, A. A. Rusu, J. Shen, A. Szlam, M. Ranzato:
Asynchronous Local-SGD Training for Language Modeling, 2024, https://arxiv.org/abs/2401.09135,
algorithm 3 (delayed Nesterov) and section 5 (dynamic local updates).

    worker k   H_k steps of the inner optimizer: theta_k += U(g);  g = theta~_base - theta_k
    server     Delta += g
               every N-th arrival   m = beta m + Delta / N;  Delta = 0
                                    theta~ -= epsilon ((1 - c N + c) beta m + g / N)
               else                 theta~ -= epsilon (c beta m + g / N)
    steps      H_k = H speed_k / max speed

m is the momentum, Delta the sum of the commits since it was last updated. H is the run's window.
speed_k is the steps per second of worker k in its last window; its first window has H steps.

The formulas agree with a public implementation of algorithm 3 (HALoS' `DelayedNesterovOptimizer`),
which also has c = 0 by default. The paper tunes N and the outer learning rate for each setting. The
defaults here, 4 and DiLoCo's .7, are ours, and the paper promises nothing for them.
Differences: H_k is rounded to the nearest whole step, because the paper's choice could not be
checked. The schedule of the inner learning rate is the learner's own, by samples seen.
"""

from dovetail.errors import UsageError
from dovetail.training import kernels
from dovetail.training.options import count, fraction, not_negative, positive
from dovetail.training.records import Vector
from dovetail.training.rules.contract import Arrival, Rule, Slice
from dovetail.training.rules.diloco import DELTA, distance
from dovetail.training.rules.pushing import walk_alone

MOMENTUM, BUFFER, ARRIVALS = "momentum", "buffer", "arrivals"
"""The rule's vectors on the server, m and Delta, and the number of commits that it has applied."""


def async_diloco(
    lr: float = 0.7,
    momentum: float = 0.9,
    delay: int = 4,
    spread: float = 0.0,
    dynamic: bool = True,
) -> Rule:
    """The momentum is Nesterov's, delayed.

    lr         outer learning rate, epsilon
    momentum   beta
    delay      N
    spread     c, from 0 to 1 / N: how much of the momentum each commit in between applies
    dynamic    slower workers make fewer local steps in a window, so that all windows take equally
               long
    """
    positive("lr", lr)
    fraction("momentum", momentum)
    count("delay", delay)
    not_negative("spread", spread)
    if spread * delay > 1:
        raise UsageError("spread", f"must be at most 1 / delay, {1 / delay:g}, not {spread!r}")
    if not isinstance(dynamic, bool):
        raise UsageError("dynamic", f"must be true or false, not {dynamic!r}")

    def apply(part: Slice, arrival: Arrival) -> None:
        part.counts[ARRIVALS] += 1
        folds = part.counts[ARRIVALS] % delay == 0
        weight = 1.0 - spread * delay + spread if folds else spread
        kernels.run(
            _fold if folds else _hold,
            part.theta,
            (arrival.vector, part.slots[MOMENTUM], part.slots[BUFFER]),
            (lr, momentum, weight * momentum, delay),
        )

    return Rule(
        name="async-diloco",
        options={
            "lr": lr,
            "momentum": momentum,
            "delay": delay,
            "spread": spread,
            "dynamic": dynamic,
        },
        step=walk_alone,
        message=distance,
        apply=apply,
        dynamic_windows=dynamic,
        worker_slots=(DELTA,),
        server_slots=(MOMENTUM, BUFFER),
        server_counts=(ARRIVALS,),
    )


def _fold(  # noqa: PLR0917  compiled: flat arguments
    theta: Vector,
    gradient: Vector,
    momentum: Vector,
    buffer: Vector,
    lr: float,
    beta: float,
    weight: float,
    delay: float,
) -> None:
    """Applies every N-th commit: updates m, then theta. `weight` is (1 - c N + c) beta."""
    for i in range(theta.size):
        g = gradient[i]
        momentum[i] = beta * momentum[i] + (buffer[i] + g) / delay
        buffer[i] = 0
        theta[i] -= lr * (weight * momentum[i] + g / delay)


def _hold(
    theta: Vector,
    gradient: Vector,
    momentum: Vector,
    buffer: Vector,
    lr: float,
    _beta: float,
    weight: float,
    delay: float,
) -> None:
    """Applies a commit in between: adds it to Delta, then updates theta. `weight` is c beta."""
    for i in range(theta.size):
        g = gradient[i]
        buffer[i] += g
        theta[i] -= lr * (weight * momentum[i] + g / delay)
