"""Runs workers on the ranks that a launcher such as `torchrun` started, on one machine or several.

    rank 0 ─ supervisor ─┬─► server
                         ├─► workers of rank 0        as those of the backend `processes`
                         └─► stand-ins ══ TCP ══ workers of rank 1, 2, ...
                control ─────────────── TCP ── rank 1, 2, ...: start, end, life, the result

Each rank makes the assignment itself, by the same command or script. Nothing that comes through the
network is code or a pickle. Rank 0 listens on one address, where only who knows the run's token is
let in (`connections`); the ranks get the token by torch's store.
"""

from typing import Any

from dovetail.runtime.ranks import end_with_launcher
from dovetail.training.backends.contract import Assignment, Watcher
from dovetail.training.backends.ranks.following import follow
from dovetail.training.backends.ranks.leading import lead
from dovetail.training.backends.ranks.meeting import RanksOptions, launched_place
from dovetail.training.records import Outcome

__all__ = ["run"]


def run(assignment: Assignment, watcher: Watcher, **options: Any) -> Outcome:
    """Runs the assignment on all ranks, each of which calls this with its own; see `RanksOptions`.

    On rank 0 it does what the backend `processes` does: its storage, watcher and Ctrl-C are those
    that count. Of the others, the initial center and the watcher are not used. They return an
    outcome with rank 0's result and no rows, whose `meta` has their `rank`.
    Raises `UsageError` on all ranks if they do not agree, `RankLostError` on the others if rank 0
    is lost or fails, and otherwise what the backend `processes` raises.
    """
    chosen = RanksOptions.of(options)
    place = launched_place()
    end_with_launcher()
    if place.rank:
        return follow(place, assignment, chosen)
    return lead(assignment, watcher, chosen)
