"""Accumulated gradient normalization (AGN): a window's updates, divided by their number.

J. Hermans, G. Spanakis, R. Moeckel: Accumulated Gradient Normalization, ACML 2017,
https://arxiv.org/abs/1710.02368, section 3; J. Hermans' thesis,
https://github.com/JoeriHermans/master-thesis, the chapter of that name (3; equation 4.1 of a
draft).

    worker k   v = 1/lambda sum of lambda local updates      theta_k walks along
    server     theta~ += v

lambda = 1 is DOWNPOUR. The class called `ADAG` in the old dist-keras is this rule; what the thesis
calls ADAG, dist-keras' `Experimental`, is `adag` here.
Differences: the last window of an epoch is divided by the steps really made.
"""

from dovetail.training.rules.contract import Rule
from dovetail.training.rules.downpour import add
from dovetail.training.rules.pushing import TOTAL, mean, walk


def agn() -> Rule:
    """AGN."""
    return Rule(name="agn", options={}, step=walk, message=mean, apply=add, worker_slots=(TOTAL,))
