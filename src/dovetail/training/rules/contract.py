"""Defines what an update rule is: pure functions on flat vectors, for a worker and for the server.

    worker, in a window      begin ─► steps x [look ─► gradient ─► step] ─► message
    server, at a commit      apply(slice, arrival)
    server, at a round       combine(slice, arrivals)

A rule has `apply` or, if it gathers, `combine`. A round is complete when every worker with a lease
has committed. Both functions work element by element, so that the shards of the center are
independent. They change the arrays that they are given, in place, and nothing else.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.training.records import Vector

Update = Callable[[Vector, Vector], Vector]
"""A function (theta, gradient) -> U(g) [size]: one step of the worker's optimizer. It advances the
optimizer's state."""


@dataclass
class Local:
    """The state of a rule on a worker. All vectors are [size].

    theta    theta_k. Each pull replaces it by the center, unless the rule has `keeps_theta`
    center   theta~ as it was last pulled. A rule must not write to it
    slots    the rule's own vectors, zero at first
    steps    local steps since the last commit
    rate     learning rate of the last local step, schedule included
    """

    theta: Vector
    center: Vector
    slots: dict[str, Vector] = field(default_factory=dict)
    steps: int = 0
    rate: float = 0.0


@dataclass
class Slice:
    """A shard of the center.

    theta    this shard of theta~ [size of the shard]
    slots    the rule's vectors on the server [size of the shard], zero at first
    counts   the rule's numbers on the server, zero at first and equal in all shards
    """

    theta: Vector
    slots: dict[str, Vector] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrival:
    """The part of a commit that goes to one shard. The vectors are [size of the shard].

    vector      v, what the worker's `message` returned
    staleness   of the commit, tau
    samples     samples that the commit was computed from
    steps       local steps that the commit was computed from
    rate        the learning rate of its last local step, schedule included
    workers     n, the number of workers that hold a lease now
    base        theta~ as this worker pulled it, for rules with `needs_base`; otherwise None
    """

    vector: Vector
    worker: int
    staleness: int
    samples: int
    steps: int
    rate: float
    workers: int
    base: Vector | None = None


# What a rule does at the two points where most rules do nothing of their own.


def _nothing(local: Local) -> None: ...


def at_theta(local: Local) -> Vector:
    """Returns theta_k, where most rules take their gradient."""
    return local.theta


@dataclass(frozen=True)
class Rule:
    """One update rule with its options bound. `make_rule(name, **options)` makes it.

    options       as bound, all of them, so that another process can make the same rule

    The worker's side:
    begin         called after a pull, before the window's first step
    look          where the next gradient is taken
    step          one local step with that gradient
    message       the commit's vector, after the window's last step
    pulls_first   a window ends with a pull, and the message is made from the fresh center (elastic)
    keeps_theta   a pull does not replace theta_k
    worker_slots  names of the rule's vectors on a worker, zero at first

    The server's side:
    apply         applies one commit to a shard
    combine       applies the commits of a round to a shard, for rules that gather
    gathers       the server waits until every worker that holds a lease has committed
    slack         a worker waits while it is more windows than this ahead of the slowest (SSP);
                  None: no worker waits
    needs_base    the server remembers each worker's pull
    lock_free     workers write to the shared center themselves (Hogwild!), so the server applies
                  nothing, and commits have no vector
    dynamic_windows   slower workers get windows of fewer steps, so that all take the same time
    server_slots, server_counts   names of the rule's vectors and numbers in each shard, zero at
                                  first
    """

    name: str
    options: dict[str, Any]
    step: Callable[[Local, Vector, Update], None]
    message: Callable[[Local], Vector]
    begin: Callable[[Local], None] = _nothing
    look: Callable[[Local], Vector] = at_theta
    apply: Callable[[Slice, Arrival], None] | None = None
    combine: Callable[[Slice, Sequence[Arrival]], None] | None = None
    gathers: bool = False
    pulls_first: bool = False
    keeps_theta: bool = False
    slack: int | None = None
    needs_base: bool = False
    lock_free: bool = False
    dynamic_windows: bool = False
    worker_slots: tuple[str, ...] = ()
    server_slots: tuple[str, ...] = ()
    server_counts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # The server does exactly one of three things: it applies commits, combines rounds, or
        # leaves the center to the workers.
        assert self.gathers == (self.combine is not None) or self.lock_free
        assert (self.apply is None) == (self.gathers or self.lock_free)


@dataclass(frozen=True)
class RuleEntry:
    """A rule in the table `RULES`: its name, what makes it, and what a run must know of it.

    make               a function of the rule's options that returns the bound `Rule`. Its signature
                       has the defaults
    window             local steps between commits if the run leaves the number to the rule; None:
                       one commit, at the end
    adds_sums          commits are sums, and nothing divides them by the window or the staleness.
                       Many workers with long windows then diverge
    server_steps       the server itself steps by -lr g, so the optimizer must be plain SGD
    sends_parameters   commits are parameters, not updates. So the wire may not leave out elements:
                       they would be read as 0
    """

    name: str
    make: Callable[..., Rule]
    window: int | None = 1
    adds_sums: bool = False
    server_steps: bool = False
    sends_parameters: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options and their defaults, by name. If `takes_any`, others are allowed, too."""
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.make).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }

    @property
    def takes_any(self) -> bool:
        """True if `make` takes options beyond the named ones, and checks them itself."""
        parameters = inspect.signature(self.make).parameters.values()
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    @property
    def help(self) -> str:
        """What the rule does: the first paragraph of its file, and the first line of its maker."""
        return f"{_paragraphs(self.make)[0]} {(inspect.getdoc(self.make) or '').splitlines()[0]}"

    @property
    def paper(self) -> str:
        """Authors, title, year and URL: the second paragraph of the rule's file."""
        return _paragraphs(self.make)[1]


def _paragraphs(make: Callable[..., Rule]) -> list[str]:
    """Returns the paragraphs of the docstring of the file that defines `make`, each as one line."""
    text = inspect.getdoc(inspect.getmodule(make)) or ""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def new_slots(names: tuple[str, ...], like: Vector) -> dict[str, Vector]:
    """Returns a zero vector for each name, of the size and type of `like`."""
    return {name: np.zeros_like(like) for name in names}
