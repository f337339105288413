"""How many threads the ops of `here` use: measured for each step, the fastest kept.

Ops of a small network take less time on one thread than OpenMP takes to hand parts of them to
several, and one thread leaves the other cores to other programs. So the step itself runs with each
number of threads, in turn, in one process.

    captured step ──► one plan on one device ──► rounds: 1, 2, 4, ... n threads ──► the fastest
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.costs import CostCache, analytic_costs
from dovetail.costs.measured import device_key
from dovetail.errors import InfeasibleError, RunError
from dovetail.executors import Placed, Workers
from dovetail.executors import run as execute
from dovetail.frontends import Captured
from dovetail.graph import Graph
from dovetail.machine import Machine
from dovetail.plans import Plan, Source, normalise
from dovetail.runtime.neighbours import Neighbours, disturbs
from dovetail.runtime.timers import clock
from dovetail.units import format_seconds

ALL_TRIED = 4
"""Up to this many cores every number of threads is tried, beyond only its halves: 16, 8, 4, ..."""
LONG_SECONDS = 1.0
"""A step that takes so long by data sheet is not tried: its ops are long enough for all cores."""
WARM_SECONDS, MEASURED_SECONDS = 0.6, 2.0
"""Of steps that do not count, in which OpenMP's threads find out whether they may spin, and of
those that do."""
_ROUND_SECONDS, _MOST_STEPS, _LEAST_ROUNDS = 0.02, 20, 3
_HOPELESS = 1.5
"""What takes this many times the best after one round is not tried again."""
_EQUAL = 1.03
"""Of what takes at most this many times the best, the least threads are taken: they leave more
cores to others, and the machine is not that quiet."""

Rounds = Callable[[int], float]
"""Runs some steps with so many threads, and says the median seconds of one."""


@dataclass(frozen=True)
class ThreadChoice:
    """seconds    of a step by number of threads, of all that were tried
    others_cores    that other programs used meanwhile
    """

    threads: int
    seconds: dict[int, float]
    others_cores: float = 0.0

    def __str__(self) -> str:
        """ "ops use 1 thread; a step was measured: 1 thread 410 us, with 2 threads 1.1 ms"."""
        parts = [
            f"{'with ' * (count != self.threads)}{_counted(count)} {format_seconds(seconds)}"
            for count, seconds in sorted(self.seconds.items())
        ]
        return f"ops use {_counted(self.threads)}; a step was measured: {', '.join(parts)}"


def _counted(threads: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)}"


def choose_threads(
    captured: Captured,
    machine: Machine,
    cache: CostCache,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> ThreadChoice | None:
    """The number of threads with which a step is fastest on the machine's one device.

    From the cache where the step was tried before and nobody disturbed it. None where that cannot
    be tried, or not in reasonable time: one core, a step that does not fit into memory or takes
    longer than `LONG_SECONDS`.
    """
    (device,) = machine.devices
    graph = captured.graph
    if len(device.cores) == 1:
        return None
    if analytic_costs(graph, machine).compute_seconds.sum() > LONG_SECONDS:
        return None
    key = f"threads | {graph.fingerprint} | {device_key(device, machine)}"
    row = cache.probe(key)
    if row is not None:
        seconds = {int(count): value for count, value in row["seconds"].items()}
        return ThreadChoice(row["threads"], seconds)
    try:
        choice = _try_threads(captured, machine, progress)
    except (InfeasibleError, RunError):  # whoever runs the plan is told
        return None
    if not disturbs(choice.others_cores):
        cache.add_probe(key, {"threads": choice.threads, "seconds": choice.seconds})
    return choice


def _try_threads(
    captured: Captured, machine: Machine, progress: Callable[[float], None]
) -> ThreadChoice:
    (device,) = machine.devices
    with (
        Workers(machine) as workers,
        execute(in_order(captured.graph, machine), captured, workers=workers) as placed,
    ):
        placed.feed()
        neighbours = Neighbours(device.cores, workers.pids)
        began = clock()
        while clock() - began < WARM_SECONDS:
            placed.step_seconds(2)
        seconds = race(candidates_of(len(device.cores)), _rounds_of(placed, workers), progress)
        return ThreadChoice(fewest_of_the_best(seconds), seconds, neighbours.settled() or 0.0)


def candidates_of(cores: int) -> list[int]:
    """Numbers of threads to try, the most first."""
    if cores <= ALL_TRIED:
        return list(range(cores, 0, -1))
    halves = [cores]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    return halves


def race(
    candidates: Sequence[int],
    rounds: Rounds,
    progress: Callable[[float], None],
    clock: Callable[[], float] = clock,
) -> dict[int, float]:
    """threads -> median seconds of each candidate, over rounds in turn; one that is `_HOPELESS`
    after the first round has that round alone."""
    began = clock()
    seconds: dict[int, list[float]] = {count: [rounds(count)] for count in candidates}
    best = min(first[0] for first in seconds.values())
    left = [count for count in candidates if seconds[count][0] <= _HOPELESS * best]
    done = 1
    while done < _LEAST_ROUNDS or clock() - began < MEASURED_SECONDS:
        if len(left) == 1:
            break
        for count in left:
            seconds[count].append(rounds(count))
        done += 1
        progress(min(1.0, (clock() - began) / MEASURED_SECONDS))
    return {count: statistics.median(of) for count, of in seconds.items()}


def fewest_of_the_best(seconds: dict[int, float]) -> int:
    """The least number of threads that is about as fast as the fastest."""
    best = min(seconds.values())
    return min(count for count, value in seconds.items() if value <= _EQUAL * best)


def _rounds_of(placed: Placed, workers: Workers) -> Rounds:
    def rounds(threads: int) -> float:
        workers.set_threads(threads)
        first = float(placed.step_seconds(2)[0])  # the first with other threads starts them
        steps = max(2, min(_MOST_STEPS, round(_ROUND_SECONDS / max(first, 1e-9))))
        return float(np.median(placed.step_seconds(steps)))

    return rounds


def in_order(graph: Graph, machine: Machine) -> Plan:
    """All ops on the machine's one device, in the graph's order; it promises nothing."""
    placement = np.zeros(len(graph), dtype=np.int32)
    return Plan(
        source=Source("", "", (), ""),
        graph_fingerprint=graph.fingerprint,
        machine=machine,
        placement=normalise(placement, graph, machine),
        orders=(tuple(np.flatnonzero(~graph.is_source).tolist()),),
        compute_seconds=np.zeros((len(graph), 1)),
        costs_source="measured",
        placer="single",
        seed=0,
        objective="step",
        value=0.0,
        lower_bound=0.0,
        bound_proof="",
        peak_memory_bytes=(0,),
        groups=0,
        planning_seconds=0.0,
    )


def with_threads(machine: Machine, threads: int) -> Machine:
    """The machine, whose devices use so many threads an op."""
    devices = tuple(replace(device, threads=threads) for device in machine.devices)
    return replace(machine, devices=devices)
