"""Schedules of a network over batch sizes and devices: each found on its own, then each run where
it was not made for."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from dovetail.costs import CostCache
from dovetail.errors import UsageError
from dovetail.executors.stages.choosing import measure
from dovetail.executors.stages.targets import Target
from dovetail.frontends import Captured
from dovetail.pipeline.scheduling import (
    CPU,
    ROUNDS,
    batch_of,
    check_schedulers,
    find,
    reseen,
    runs_here,
    sample,
    target_of,
)
from dovetail.pipeline.sources import Progress, resolve_model, silent
from dovetail.schedulers.results import Scheduled, Schedules, Specialisation

_ZOO = "zoo:"


@dataclass(frozen=True)
class Wanted:
    """What is looked for.

    schedulers   names of `SCHEDULERS`; () for all
    batches      of a network of the zoo; () for the one that MODEL says
    rounds       in which all schedules are measured, one after another
    sampled      random schedules whose predicted and measured seconds are compared
    """

    schedulers: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    rounds: int = ROUNDS
    sampled: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_schedulers(self.schedulers)
        if any(batch < 1 for batch in self.batches):
            raise UsageError("batch", "batch sizes are 1 or more")
        if self.rounds < 1:
            raise UsageError("rounds", "there must be 1 or more")


def schedules(
    model: str,
    devices: Sequence[str] = (CPU,),
    wanted: Wanted | None = None,
    *,
    cache: CostCache | None = None,
    progress: Progress = silent,
) -> list[Schedules]:
    """Find the fastest stages of the network that MODEL names: per device, at each batch size.

    devices   "cpu": this machine's cores; "cuda:0"; or presets such as "v100", by analytic costs
    """
    wanted = wanted or Wanted()
    if wanted.sampled and not any(map(runs_here, devices)):
        names = ", ".join(devices)
        raise UsageError("sampled", f"random schedules are measured, which {names} cannot be")
    steps = [_step(with_batch(model, batch), progress) for batch in wanted.batches or (0,)]
    found, targets = [], []
    for device in devices:
        own = [
            target_of(step, device, seed=wanted.seed, cache=cache, progress=progress)
            for step in steps
        ]
        results = [_found(target, wanted, progress) for target in own]
        targets.append(own)
        matrix = _over_batches(own, results, wanted.rounds)
        found.append(Schedules(model, own[0].device, own[0].source, tuple(results), tuple(matrix)))
    across = _over_devices(targets, found)
    return [replace(one, specialisations=(*one.specialisations, *across)) for one in found]


def with_batch(model: str, batch: int) -> str:
    """MODEL at another batch size; 0: as it is. Raises `UsageError` for one not of the zoo."""
    if not batch:
        return model
    if not model.startswith(_ZOO):
        raise UsageError("batch", f"only networks of the zoo change their batch, not {model!r}")
    name, _, options = model.partition("?")
    kept = [o for o in options.split("&") if o and not o.startswith("batch=")]
    return f"{name}?{'&'.join([*kept, f'batch={batch}'])}"


def _step(model: str, progress: Progress) -> Captured:
    progress(f"capturing {model}", 0.0, None)
    step = resolve_model(model)
    if not isinstance(step, Captured):
        raise UsageError(
            "MODEL", "stages are of a network that is captured: zoo:NAME or package.module:function"
        )
    return step


def _found(target: Target, wanted: Wanted, progress: Progress) -> Scheduled:
    found, step = find(target, wanted.schedulers, rounds=wanted.rounds, progress=progress)
    if wanted.sampled and step is not None:
        rng = random.Random(wanted.seed)
        drawn = sample(target, wanted.sampled, rng, wanted.rounds, progress)
        found = replace(found, sampled=tuple(drawn))
    return found


def _over_batches(
    targets: Sequence[Target], results: Sequence[Scheduled], rounds: int
) -> list[Specialisation]:
    """Each batch size by the schedules made for each; measured where the device is here."""
    if len(targets) < 2 or len({target.block for target in targets}) > 1:
        return []
    names = tuple(f"batch {batch_of(target.captured)}" for target in targets)
    rows = [_row(target, results, rounds) for target in targets]
    return [Specialisation("batch sizes", names, names, tuple(rows))]


def _row(target: Target, results: Sequence[Scheduled], rounds: int) -> tuple[float, ...]:
    steps = [target.step(reseen(target, result.best)) for result in results]
    running = [step for step in steps if step is not None]
    if len(running) < len(steps):
        return tuple(reseen(target, result.best).predicted_seconds for result in results)
    timers = {str(i): target.timed(step) for i, step in enumerate(running)}
    seconds = measure(timers, rounds)
    return tuple(statistics.median(seconds[str(i)]) for i in range(len(running)))


def _over_devices(
    targets: Sequence[Sequence[Target]], found: Sequence[Schedules]
) -> list[Specialisation]:
    """Per batch size each device by the schedules made for each, as predicted."""
    if len(found) < 2:
        return []
    names = tuple(one.device for one in found)
    made = []
    for place in range(len(found[0].results)):
        seconds: dict[tuple[int, int], float] = {}
        for row, column in product(range(len(found)), repeat=2):
            best = found[column].results[place].best
            seconds[row, column] = reseen(targets[row][place], best).predicted_seconds
        table = tuple(tuple(seconds[r, c] for c in range(len(found))) for r in range(len(found)))
        title = f"devices at batch {found[0].results[place].batch}, predicted"
        made.append(Specialisation(title, names, names, table))
    return made
