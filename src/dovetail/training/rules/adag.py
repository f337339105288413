"""Asynchronous distributed adaptive gradients (ADAG): the further a weight of the center has moved
since the worker's pull, the less of the commit it takes.

J. Hermans: On Scalable Deep Learning and Parallelizing Gradient Descent, master's thesis, 2017,
https://github.com/JoeriHermans/master-thesis, the chapter of that name (4; 5 in a draft), its
algorithm 2.

    worker k   adag        v = sum of lambda local updates          (as DOWNPOUR)
               adag-agn    v = 1/lambda sum of lambda local updates (as AGN)
    server     per weight: theta~ += v / (1 + (theta~ - theta~_base)^2 / gamma)

theta~_base is the center as the worker pulled it. gamma is 1e-4 in all experiments of the thesis.
One version of the text, and dist-keras, have 1 / eta in place of 1 / gamma, where eta is a learning
rate. dist-keras calls this rule `Experimental`; its class `ADAG` is `agn` here.

The server remembers theta~_base for each worker, which takes n times the memory of the center. In
the thesis' algorithm 1 the worker sends it with each commit, which doubles the traffic. In its
algorithm 3 the worker scales v itself, by an older center.
Differences: the thesis writes a norm. What it describes, and what dist-keras did, is per weight, as
here.
"""

from dovetail.training import kernels
from dovetail.training.options import positive
from dovetail.training.rules.contract import Arrival, Rule, Slice
from dovetail.training.rules.pushing import TOTAL, mean, total, walk


def adag(gamma: float = 1e-4) -> Rule:
    """ADAG whose commits are sums of local updates."""
    return _adag("adag", gamma)


def adag_agn(gamma: float = 1e-4) -> Rule:
    """ADAG whose commits are means of local updates."""
    return _adag("adag-agn", gamma)


def _adag(name: str, gamma: float) -> Rule:
    positive("gamma", gamma)

    def apply(part: Slice, arrival: Arrival) -> None:
        assert arrival.base is not None
        kernels.add_damped(part.theta, arrival.vector, arrival.base, gamma)

    return Rule(
        name=name,
        options={"gamma": gamma},
        step=walk,
        message=mean if name == "adag-agn" else total,
        apply=apply,
        needs_base=True,
        worker_slots=(TOTAL,),
    )
