"""Stale synchronous parallel (SSP): asynchronous, but no worker runs far ahead of the slowest.

Q. Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
NIPS 2013,
https://papers.nips.cc/paper/2013/hash/b7bb35b9c6ca2aee2df08cf09d7016c2-Abstract.html, section 2.

    worker k   as DOWNPOUR; may begin clock c only if c - min clock <= s
    server     theta~ += v

A worker's clock is the number of windows it has committed. s = 0 keeps all in step, s = infinity
is DOWNPOUR.
Differences: a worker pulls once a window, so that it sees all that was committed by then, where
the paper lets it read a cached copy up to s clocks old.
"""

from dovetail.training.options import count
from dovetail.training.rules.contract import Rule
from dovetail.training.rules.downpour import add
from dovetail.training.rules.pushing import TOTAL, total, walk


def ssp(slack: int = 3) -> Rule:
    """SSP with `slack` s windows."""
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
