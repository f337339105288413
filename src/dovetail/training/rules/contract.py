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
    rate     the learning rate at this moment, schedule included
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
    rate        the worker's learning rate, schedule included
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


def _nothing(local: Local) -> None: ...


def at_theta(local: Local) -> Vector:
    """Returns theta_k, where most rules take their gradient."""
    return local.theta


@dataclass(frozen=True)
class Rule:
    """One update rule with its options bound. `make_rule(name, **options)` makes it.

    options       the values of all options, so that another process can make the same rule
    step          a function (local, gradient, update) that makes one local step
    message       a function that returns the vector of the commit at the end of a window
    begin         a function that is called after a pull, before the first step of the window
    look          a function that returns where `step` wants its gradient, such as theta_k
    apply         a function that applies one commit to a shard; None for rules that gather
    combine       a function that applies a round to a shard, for rules that gather
    gathers       the server waits for every worker that holds a lease, then calls `combine`
    pulls_first   a window ends with a pull, so that `message` sees the fresh center (elastic rules)
    keeps_theta   a pull does not replace theta_k
    slack         how many windows a worker may be ahead of the slowest (SSP); None: any number
    needs_base    the server remembers the center that each worker pulled
    lock_free     workers write to the shared center themselves (Hogwild!), and commits have no
                  vector
    worker_slots, server_slots   names of the rule's vectors, which are zero at first
    server_counts                names of the rule's numbers, which are zero at first
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
    worker_slots: tuple[str, ...] = ()
    server_slots: tuple[str, ...] = ()
    server_counts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
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
