"""The steps that the ledger decides on, in order: what the center's shards do, and whom to answer.

The ledger decides, and knows neither vectors nor time; the center computes. Every shard executes
the same steps in the same order, so that each pull is of one version.
"""

from dataclasses import dataclass

from dovetail.training.records import Reply


@dataclass(frozen=True)
class Apply:
    """Apply the staged vector of `worker` by the rule's `apply`."""

    worker: int
    staleness: int
    samples: int
    steps: int
    rate: float
    workers: int


@dataclass(frozen=True)
class Combine:
    """Apply the staged vectors of a round, in the order of workers, by the rule's `combine`."""

    arrivals: tuple[Apply, ...]


@dataclass(frozen=True)
class Read:
    """Copy the center for `worker`; for rules with `needs_base`, remember it as its base."""

    worker: int


@dataclass(frozen=True)
class Forget:
    """Drop the staged vector and the base of `worker`."""

    worker: int


@dataclass(frozen=True)
class Answer:
    """Send `reply` to `worker`, with the center that the last `Read` for it copied, if any."""

    worker: int
    reply: Reply


Step = Apply | Combine | Read | Forget | Answer
