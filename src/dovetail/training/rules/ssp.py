"""Stale synchronous parallel (SSP): asynchronous, but no worker runs far ahead of the slowest.

Q. Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
NIPS 2013,
https://papers.nips.cc/paper/2013/hash/b7bb35b9c6ca2aee2df08cf09d7016c2-Abstract.html, section 2.

    worker k   as DOWNPOUR, but may begin its window c only if c - min over workers of c <= s
    server     theta~ += v

The paper's clock c of a worker is the number of windows that it has committed. With s = 0 all
workers stay in step; with s = infinity this is DOWNPOUR.
Differences: a worker pulls once in each window, so it sees all that was committed by then. The
paper lets it read a cached copy that is up to s clocks old.
"""

from dovetail.training.options import count
from dovetail.training.rules.contract import Rule
from dovetail.training.rules.downpour import add
from dovetail.training.rules.pushing import TOTAL, total, walk


def ssp(slack: int = 3) -> Rule:
    """A worker may be at most `slack` windows ahead of the slowest; the paper's s."""
    count("slack", slack, least=0)
    return Rule(
        name="ssp",
        options={"slack": slack},
        step=walk,
        message=total,
        apply=add,
        slack=slack,
        worker_slots=(TOTAL,),
    )
