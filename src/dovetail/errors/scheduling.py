"""What goes wrong where stages of one device are looked for."""

from dovetail.errors.base import InvalidError, RunError


class TooManyStatesError(InvalidError):
    """A block is too wide for a programme over its sets of ops."""

    def __init__(self, ops: int, states: float, limit: int) -> None:
        super().__init__(
            f"a block of {ops:,} ops has more than {limit:,} states, about {states:.1g}: use a "
            "window, which leaves out stages that run far ahead"
        )
        self.ops = ops
        self.states = states
        self.limit = limit


class UnequalError(RunError):
    """A schedule at work whose outputs are not those of its kernels one by one."""

    def __init__(self, scheduler: str, error: float) -> None:
        super().__init__(
            f"the outputs of {scheduler!r} are off by {error:.1e} of their largest value"
        )
        self.scheduler = scheduler
        self.error = error


class RaceError(InvalidError):
    """Streams, events or buffers by which two ops can collide; `rule` as in `schedulers.races`."""

    def __init__(self, rule: int, first: int, second: int, detail: str) -> None:
        ops = f"op {first}" if first == second else f"ops {first} and {second}"
        super().__init__(f"rule {rule}: {ops}: {detail}")
        self.rule = rule
        self.first = first
        self.second = second
