"""Model averaging: workers train alone, then the mean of their parameters is the model.

M. Zinkevich, M. Weimer, L. Li, A. Smola: Parallelized Stochastic Gradient Descent, NIPS 2010,
https://papers.nips.cc/paper/2010/hash/abea47ba24142ed16b7d8fbf2c740e0d-Abstract.html, algorithm 3
(one-shot: once, at the end); periodic: J. Hermans, On Scalable Deep Learning and Parallelizing
Gradient Descent, 2017, https://github.com/JoeriHermans/master-thesis, chapter 2.

    worker k   lambda steps: theta_k += U(g_k)
    server     theta~ = 1/n sum_k theta_k;   every worker goes on from theta~

Differences: one-shot is the same rule in a run whose window is None. Each worker then commits once,
at the end of its equal share of all epochs.
"""

from collections.abc import Sequence

from dovetail.training.rules.contract import Arrival, Rule, Slice, at_theta
from dovetail.training.rules.pushing import mean_of_workers, walk_alone


def averaging() -> Rule:
    """The server averages once in each window."""
    return _averaging("averaging")


def one_shot() -> Rule:
    """The server averages once, at the end of a run whose `window` is None."""
    return _averaging("one-shot")


def _averaging(name: str) -> Rule:
    return Rule(
        name=name, options={}, step=walk_alone, message=at_theta, combine=_combine, gathers=True
    )


def _combine(part: Slice, arrivals: Sequence[Arrival]) -> None:
    mean_of_workers(part.theta, arrivals)
