"""Accumulated gradient normalization (AGN): a worker commits the mean of the updates of a window.

J. Hermans, G. Spanakis, R. Moeckel: Accumulated Gradient Normalization, ACML 2017,
https://arxiv.org/abs/1710.02368, section 3; J. Hermans' thesis,
https://github.com/JoeriHermans/master-thesis, the chapter of that name (3; equation 4.1 of a
draft).

    worker k   lambda steps: theta_k += U(g);  v = 1/lambda sum of U(g)
    server     theta~ += v

With lambda = 1 this is DOWNPOUR. The class `ADAG` of the old dist-keras is this rule. What the
thesis calls ADAG, and dist-keras `Experimental`, is `adag` here.
Differences: a window that is cut short at the end of an epoch is divided by the number of its own
steps.
"""

from dovetail.training.rules.contract import Rule
from dovetail.training.rules.downpour import add
from dovetail.training.rules.pushing import TOTAL, mean, walk


def agn() -> Rule:
    """The server adds the mean to the center."""
    return Rule(name="agn", options={}, step=walk, message=mean, apply=add, worker_slots=(TOTAL,))
