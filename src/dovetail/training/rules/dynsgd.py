"""DynSGD: the staler a commit is, the less of it the server applies.

J. Jiang, B. Cui, C. Zhang, L. Yu: Heterogeneity-aware Distributed Parameter Servers, SIGMOD 2017,
https://doi.org/10.1145/3035918.3035933; in the form of J. Hermans, On Scalable Deep Learning and
Parallelizing Gradient Descent, 2017, https://github.com/JoeriHermans/master-thesis, chapter 2.

    worker k   as DOWNPOUR: v = sum of lambda local updates
    server     theta~ += v / (tau + 1)

tau is the staleness of the commit.
Differences: the paper's server keeps versions of the parameters, and divides by the staleness that
it finds in them. The thesis' form, used here, needs only the clock. The thesis claims that DynSGD
cannot handle accumulated gradients. That does not hold in every setting: see the benchmarks.
"""

from dovetail.training import kernels
from dovetail.training.rules.contract import Arrival, Rule, Slice
from dovetail.training.rules.pushing import TOTAL, total, walk


def dynsgd() -> Rule:
    """The server divides the commit, a sum of updates, by the staleness plus one."""
    return Rule(
        name="dynsgd", options={}, step=walk, message=total, apply=_apply, worker_slots=(TOTAL,)
    )


def _apply(part: Slice, arrival: Arrival) -> None:
    kernels.add_divided(part.theta, arrival.vector, arrival.staleness + 1)
