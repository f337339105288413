"""Resolves MODEL and MACHINE texts to steps and machines, and computes their costs.

MODEL ──► step                  a captured network, a graph (saved, or of an ONNX file), or a
                                published instance; a network or graph may be repeated in
                                data-parallel towers
MACHINE ──► machine             an instance brings its own
(step, machine) ──► costs       measured on this machine, analytic for another, an instance's own
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import numpy as np

from dovetail.costs import CostCache, Costs, analytic_costs, measured_costs, probed_machine
from dovetail.costs.measured import check_measurable, costs_in_step, device_key
from dovetail.errors import (
    FileFormatError,
    GraphError,
    InfeasibleError,
    ModelError,
    RunError,
    UsageError,
)
from dovetail.executors import Workers
from dovetail.executors import run as execute
from dovetail.frontends import Captured, parse_optimizer
from dovetail.frontends import resolve as resolve_network
from dovetail.frontends.onnx import Shapes, is_from_onnx, load_onnx
from dovetail.graph import Graph, Groups, colocate, group
from dovetail.graph.cells import group_cells
from dovetail.graph.copies import towers_of
from dovetail.graph.files import graph_from
from dovetail.graph.source import Source, Transform
from dovetail.graph.units import Units, module_paths
from dovetail.instances import Instance, instance_from, is_instance
from dovetail.machine import Machine, names_here, parse_machine
from dovetail.methods import Grouping
from dovetail.plans import Plan, normalise
from dovetail.runtime.files import read_json
from dovetail.runtime.native import build_beside, build_native
from dovetail.runtime.neighbours import Neighbours, disturbs, is_calm
from dovetail.runtime.timers import Deadline, Repeats, Timer, clock, in_turns, times_within
from dovetail.transforms import AnyTransform, Towers
from dovetail.units import HERE, HERE_CPU, format_seconds

# --- The number of threads that ops of `here` use ---

ALL_TRIED = 4
"""With up to this many cores every number of threads is tried. With more cores only the number of
cores and its halves are tried: 16, 8, 4, ..."""
LONG_SECONDS = 1.0
"""A step whose ops take longer than this by data sheet is not tried, because they are long enough
for all cores."""
WARM_SECONDS, MEASURED_SECONDS = 0.6, 2.0
"""Steps run for `WARM_SECONDS` before they count. In that time OpenMP's threads find out whether
they may spin. Then steps are measured for `MEASURED_SECONDS`."""
_ROUND_SECONDS, _MOST_STEPS, _LEAST_ROUNDS = 0.02, 20, 3
"""A round has 2 to `_MOST_STEPS` steps, and takes about `_ROUND_SECONDS`. If two or more numbers of
threads are not `_HOPELESS`, each of them runs at least `_LEAST_ROUNDS` rounds."""
_HOPELESS = 1.5
"""A number of threads that takes more than this many times the best in the first round is not tried
again."""
_EQUAL = 1.05
"""Numbers of threads that take at most this many times the best count as equal, because the machine
is not quiet enough to tell them apart. The least of them leaves most cores to other programs, and
suffers least from them."""


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads with which a step is fastest.

    seconds        threads -> seconds of a step, for each number that was tried
    others_cores   how many cores other programs used meanwhile
    """

    threads: int
    seconds: dict[int, float]
    others_cores: float = 0.0

    def __str__(self) -> str:
        """ "ops use 1 thread; a step was measured: 1 thread 410 us, with 2 threads 1.1 ms"."""
        parts = [
            f"{'with ' * (count != self.threads)}{counted_threads(count)} {format_seconds(seconds)}"
            for count, seconds in sorted(self.seconds.items())
        ]
        return f"ops use {counted_threads(self.threads)}; a step was measured: {', '.join(parts)}"


def counted_threads(threads: int) -> str:
    """The number of threads as text, such as "2 threads"."""
    return f"{threads} thread{'s' * (threads != 1)}"


def choose_threads(
    captured: Captured,
    machine: Machine,
    cache: CostCache,
    progress: Callable[[float], None] = lambda _fraction: None,
    deadline: Deadline | None = None,
) -> ThreadChoice | None:
    """The fewest threads with which a step is about as fast as it can be on the one device.

        captured step ──► one plan on one device ──► rounds: 1, 2, 4, ... n threads ──► the fastest

    An op of a small network takes less time on one thread than OpenMP takes to hand parts of it to
    several. One thread also leaves the other cores to other programs. So the step itself is run
    with each number of threads, in turn, in one process.

    The number comes from the cache if the step was tried before. If other programs disturbed that,
    it is tried again as soon as they leave the cores alone. None is returned if there is one core,
    if the step takes longer than `LONG_SECONDS` by data sheet, or a twentieth of the time that is
    left, or if it cannot run, for example because it does not fit into memory.
    """
    (device,) = machine.devices
    graph, deadline = captured.graph, deadline or Deadline()
    if len(device.cores) == 1:
        return None
    key = f"threads | {graph.fingerprint} | {device_key(device, machine)}"
    row, before = cache.probe(key), None
    if row is not None:
        busy = row.get("others_cores")
        seconds = {int(count): value for count, value in row["seconds"].items()}
        before = ThreadChoice(row["threads"], seconds, busy or 0.0)
        if busy is None or deadline.is_over or not is_calm(device.cores):
            return before
    if analytic_costs(graph, machine).compute_seconds.sum() > deadline.within(LONG_SECONDS, 0.05):
        if np.isfinite(deadline.seconds):
            deadline.missed.append("the best number of threads")
        return before
    try:
        choice = _try_threads(captured, machine, progress, deadline)
    # A step that cannot run can still be planned. The user is told when the plan runs.
    except (InfeasibleError, RunError):
        return before
    measured: dict[str, Any] = {"threads": choice.threads, "seconds": choice.seconds}
    if disturbs(choice.others_cores):
        measured["others_cores"] = choice.others_cores
    cache.add_probe(key, measured)
    return choice


def _try_threads(
    captured: Captured, machine: Machine, progress: Callable[[float], None], deadline: Deadline
) -> ThreadChoice:
    """Measures the choice: one process runs the step with each number of threads in turn."""
    (device,) = machine.devices
    with (
        Workers(machine) as workers,
        execute(in_order(captured.graph, machine), captured, workers=workers) as placed,
    ):
        placed.feed()
        neighbours = Neighbours(device.cores, workers.pids)

        def rounds(threads: int) -> float:
            workers.set_threads(threads)
            # These steps do not count: the first step with another number of threads starts them.
            first = float(placed.step_seconds(2)[0])
            steps = times_within(_ROUND_SECONDS, first, 2, _MOST_STEPS)
            return float(np.median(placed.step_seconds(steps)))

        began, warm_seconds = clock(), deadline.within(WARM_SECONDS, 0.1)
        while clock() - began < warm_seconds:
            placed.step_seconds(2)
        counts = candidates_of(len(device.cores))
        timers = {threads: partial(rounds, threads) for threads in counts}
        seconds = time_threads(timers, progress, limit_seconds=deadline.within(math.inf, 0.4))
        return ThreadChoice(fewest_of_the_best(seconds), seconds, neighbours.settled() or 0.0)


def candidates_of(cores: int) -> list[int]:
    """The numbers of threads to try, the most first."""
    if cores <= ALL_TRIED:
        return list(range(cores, 0, -1))
    halves = [cores]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    return halves


def time_threads(
    timers: Mapping[int, Timer],
    progress: Callable[[float], None],
    clock: Callable[[], float] = clock,
    *,
    limit_seconds: float = math.inf,
) -> dict[int, float]:
    """threads -> median seconds of a step, for each number of threads.

    timers          threads -> a function that runs some steps with so many, and returns the median
                    seconds of one step; what it takes to change over is no part of that
    limit_seconds   after them there is no further round, however few there were
    """
    measured_seconds = min(MEASURED_SECONDS, limit_seconds)
    repeats = Repeats(math.inf, _LEAST_ROUNDS, measured_seconds, limit_seconds)
    seconds = in_turns(
        timers, repeats, progress, calls=1, warm_ups=0, hopeless=_HOPELESS, clock=clock
    )
    return {count: statistics.median(of) for count, of in seconds.items()}


def fewest_of_the_best(seconds: dict[int, float]) -> int:
    """The least number of threads that is about as fast as the fastest."""
    best = min(seconds.values())
    return min(count for count, value in seconds.items() if value <= _EQUAL * best)


def in_order(graph: Graph, machine: Machine) -> Plan:
    """A plan of all ops on the machine's one device, in the graph's order. It promises nothing."""
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
    """The machine with `threads` threads an op on every device of cores."""
    devices = tuple(
        replace(device, threads=threads) if device.cores else device for device in machine.devices
    )
    return replace(machine, devices=devices)


# --- MODEL and MACHINE texts, and the costs of a step on a machine ---

Step = Captured | Graph | Instance
"""A step that can be planned. Only a captured one can run."""
TellProgress = Callable[[str, float, float | None], None]
"""A function that hears of progress: (what is being done, share that is done, best value so far or
None)."""
SENTENCE = -1.0
"""The share of what is no work but a sentence for the user, which stays on show."""


def silent(_doing: str, _fraction: float, _best: float | None) -> None:
    """A `TellProgress` that shows nothing."""


def resolve_model(text: str, train: str = "", shapes: Shapes | None = None) -> Step:
    """The step that a MODEL text names: an ONNX file, a saved graph, a published instance, or a
    network to capture. What a JSON file holds says whether it is a graph or an instance.

    shapes   the shapes of an ONNX file's inputs, by name or all in order; `UsageError` for any
             other model

    Raises `ModelError` and `FileFormatError`.
    """
    if names_onnx(text):
        if train:
            raise ModelError(
                text, "an ONNX file holds no training step; name the network itself with --train"
            )
        return load_onnx(text, shapes)
    if shapes:
        raise UsageError("--shape", f"{text or 'this MODEL'} is no .onnx file and has its shapes")
    if not names_file(text):
        return resolve_network(text, train=parse_optimizer(train) if train else None)
    raw = read_json(text)
    if is_instance(raw):
        if train:
            raise ModelError(text, "an instance holds its backward nodes; leave --train out")
        return instance_from(raw, text)
    if not isinstance(raw, dict) or "format" not in raw:
        raise FileFormatError(text, "neither a saved graph nor a placement instance")
    if raw["format"] == "dovetail.plan":
        raise FileFormatError(text, "it is a plan; name the network or file that it was made for")
    if train:
        raise ModelError(text, "a saved graph cannot be trained anew; capture with --train")
    return graph_from(raw, text)


def replicated(step: Step, replicas: int, asynchronous: bool = False) -> Step:
    """A step of `replicas` data-parallel towers, each of which is `step`; for 1 the step itself.

    Raises what `check_replicas` and `replicate` raise, and `UsageError` for an instance.
    """
    check_replicas(replicas, asynchronous)
    if replicas == 1:
        return step
    if isinstance(step, Instance):
        raise UsageError("replicas", "an instance is planned for as it is; leave it out")
    towers: Transform = Towers(replicas, asynchronous)
    replicated: Step = towers.apply(step)
    return replicated


def check_replicas(replicas: int, asynchronous: bool) -> None:
    """Raise `UsageError` for less than one replica, and for asynchronous updates of one replica."""
    if replicas < 1:
        raise UsageError("replicas", f"is {replicas}; use 2 or more, or 1 for the step itself")
    if asynchronous and replicas == 1:
        raise UsageError("asynchronous", "is for towers; give replicas as well, 2 or more")


def names_file(text: str) -> bool:
    """True if this MODEL text names a file: a saved graph, an instance or an ONNX file."""
    return text.endswith((".json", ".json.gz", ".onnx")) and ":" not in text


def names_onnx(text: str) -> bool:
    """True if this MODEL text names an ONNX file."""
    return names_file(text) and text.endswith(".onnx")


def graph_of(step: Step) -> Graph:
    """The graph to plan for. Raises `GraphError` for one without ops."""
    graph = step if isinstance(step, Graph) else step.graph
    if not len(graph):
        raise GraphError("the graph has no ops: there is nothing to place")
    return graph


def groups_of(step: Step, units: Units | None = None, *, grouping: Grouping = "rule") -> Groups:
    """The groups of ops that placers place as one. `grouping` as in `methods.Method`.

    The groups of an instance are its colour classes and no larger ones, because its bounds and
    published values are for those. Units of modules that must stay whole are no cells: with them,
    "cells" is "rule".
    """
    graph = graph_of(step)
    if grouping == "ops" or isinstance(step, Instance):
        return colocate(graph, units)
    if grouping == "cells" and units is None:
        return group_cells(graph)
    return group(graph, units)


def unsplit_modules(step: Step) -> dict[str, str]:
    """Maps a pattern of modules that the model says not to split to the name of their class.

    The models of transformers name such classes in `_no_split_modules`.
    """
    if not isinstance(step, Captured):
        return {}
    modules = dict(step.module.named_modules())
    classes = {
        name
        for module in modules.values()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    found: dict[str, str] = {}
    seen = set(module_paths(step.graph))
    for path, module in modules.items():
        name = type(module).__name__
        if name in classes and path in seen:
            # Numbers become "*" ("layers.*"), unless a module of another class would match, too.
            glob = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
            # The glob is matched part by part: the "*" of fnmatch matches dots as well.
            matching = (
                module
                for other, module in modules.items()
                if other.count(".") == glob.count(".") and fnmatchcase(other, glob)
            )
            alike = {type(module).__name__ for module in matching}
            found[glob if alike == {name} else path] = name
    return found


def machine_of(
    step: Step,
    machine: str | Machine,
    progress: TellProgress = silent,
    notes: "Notes | None" = None,
    deadline: Deadline | None = None,
) -> Machine:
    """The machine to plan for.

    machine   a machine or a MACHINE text. "" names an instance's own machine, and `here` for any
              other step. For a captured step, `here` gets the number of threads with which the
              step is measured to be fastest
    notes     collects what the user should know of the measuring
    deadline  of the measuring; what was measured before takes no time

    Raises `UsageError` for an instance on another machine, because its costs are for its own.
    """
    notes = notes or Notes()
    if isinstance(step, Instance):
        if machine:
            says = "an instance brings its own machine and costs; leave it out"
            raise UsageError("machine", says)
        return step.machine
    machine = machine or HERE
    if machine not in (HERE, HERE_CPU) or not isinstance(step, Captured):
        return resolve_machine(machine, progress, notes=notes, deadline=deadline)
    # The cores of `here` have the number of threads that is best for this step, and are probed with
    # it.
    where, cores, cache = parse_machine(str(machine)), parse_machine(HERE_CPU), CostCache()
    deadline = deadline or Deadline()
    prepare_runner(progress, notes)
    progress("measuring threads", 0.0, None)
    choice = choose_threads(
        step, cores, cache, lambda done: progress("measuring threads", done, None), deadline
    )
    if choice is not None:
        where = with_threads(where, choice.threads)
        notes.say(str(choice))
        if disturbs(choice.others_cores):
            notes.disturbed("threads", choice.others_cores)
    progress("measuring the machine", 0.0, None)
    beside = partial(notes.disturbed, THE_MACHINE)
    return probed_machine(where, cache, beside=beside, deadline=deadline)


FROM_PYTHON = "calls are made from Python, which is slower"
BESIDE_OTHERS = "other programs used"
THE_MACHINE = "the machine"


def notes_of_machine(notes: Sequence[str]) -> tuple[str, ...]:
    """Those of a plan's notes that say how its machine was measured."""
    return tuple(
        note
        for note in notes
        if note.startswith(FROM_PYTHON)
        or (note.startswith(BESIDE_OTHERS) and THE_MACHINE in note.split(" were measured")[0])
    )


class Notes:
    """Collects what the user should know of how something was measured."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._disturbed: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Note a sentence for the user."""
        self._said.append(text)

    def disturbed(self, what: str, others_cores: float) -> None:
        """Note that other programs used so many cores while `what` was measured."""
        self._disturbed[what] = max(others_cores, self._disturbed.get(what, 0.0))

    @property
    def texts(self) -> tuple[str, ...]:
        """The notes, each a sentence."""
        if not self._disturbed:
            return tuple(self._said)
        what = " and ".join(self._disturbed)
        most = max(self._disturbed.values())
        return (
            *self._said,
            f"{BESIDE_OTHERS} up to {most:.1f} cores while {what} were measured, so what was "
            "measured may be too slow; it is measured anew when the machine is quiet: plan --again",
        )


def resolve_machine(
    machine: str | Machine,
    progress: TellProgress = silent,
    *,
    fresh: bool = False,
    notes: "Notes | None" = None,
    deadline: Deadline | None = None,
) -> Machine:
    """The machine that a text names. `here` and `here/n` have the rates that the probe measures.

    fresh      probe again, even if the cache has the rates
    notes      collects whether other programs disturbed the probe
    deadline   of the probe
    """
    if not isinstance(machine, str):
        return machine
    where = parse_machine(machine)
    if not names_here(machine):
        return where
    notes, deadline = notes or Notes(), deadline or Deadline()
    prepare_runner(progress, notes)
    progress("measuring the machine", 0.0, None)
    beside = partial(notes.disturbed, THE_MACHINE)
    return probed_machine(where, CostCache(), fresh=fresh, beside=beside, deadline=deadline)


def prepare_runner(
    progress: TellProgress,
    notes: "Notes",
    *,
    meanwhile: Callable[[], None] = lambda: None,
    left_seconds: float = math.inf,
) -> None:
    """Build the C++ runner where it is missing. What is measured afterwards is measured with it.

    It is done once for a version of torch. With too little time to wait for it another process
    builds it, and this one has the runner in Python.

    meanwhile     is called while the compiler is at work
    left_seconds  of the budget
    """
    has_time = left_seconds >= LEAST_TO_BUILD_SECONDS
    if not has_time:
        build_beside()
    reason = build_native(lambda doing: progress(doing, 0.0, None), meanwhile, anew=has_time)
    if reason:
        notes.say(f"{FROM_PYTHON}: {reason}")


LEAST_TO_BUILD_SECONDS = 40.0
"""With fewer seconds left a plan does not wait for the C++ runner, which takes some 25."""


def costs_of(
    step: Step,
    machine: Machine,
    progress: TellProgress = silent,
    notes: "Notes | None" = None,
    deadline: Deadline | None = None,
) -> Costs:
    """The costs of a step on a machine.

    An instance has costs of its own. On this machine costs are measured: within the step where it
    can run on all devices at once, else op by op. On any other machine they are analytic. A graph
    from ONNX has no calls to measure, so its costs are always analytic.

    notes      collects whether other programs disturbed the measuring
    deadline   of the measuring. Ops that it does not reach have costs by data sheet, in proportion
               to those that were measured
    """
    notes = notes or Notes()
    if isinstance(step, Instance):
        return step.costs
    graph, program = (step, None) if isinstance(step, Graph) else (step.graph, step.program)
    if not machine.local or is_from_onnx(graph):
        return analytic_costs(graph, machine)
    check_measurable(machine)
    distinct = len({graph.signatures[op] for op in np.flatnonzero(~graph.is_source).tolist()})
    meanwhile = ""

    def disturbed(cores: float) -> None:
        nonlocal meanwhile
        meanwhile = f"; other programs use {cores:.1f} cores"
        notes.disturbed("ops", cores)

    def tell(fraction: float) -> None:
        done = f"{round(fraction * distinct):,} of {distinct:,}"
        progress(f"measuring ops: {done} kinds on {machine.name}{meanwhile}", fraction, None)

    in_step = costs_in_step(
        step,
        machine,
        CostCache(),
        progress=lambda done: progress(f"measuring a step on {machine.name}", done, None),
        beside=disturbed,
        deadline=deadline,
    )
    if in_step is not None:
        return in_step
    return measured_costs(
        graph, program, machine, CostCache(), progress=tell, beside=disturbed, deadline=deadline
    )


def calibrate_machine(machine: Machine, progress: TellProgress, notes: "Notes") -> Machine:
    """`costs.calibration.calibrated`, with the cache of this machine. Raises `UsageError` for a
    machine that is not here."""
    from dovetail.costs.calibration import calibrated

    if not machine.local:
        what = f"measures devices that are here, and {machine.name} is another machine"
        raise UsageError("--calibrate", what)
    check_measurable(machine)
    return calibrated(
        machine,
        CostCache(),
        progress=lambda done: progress(f"calibrating {machine.name}", done, None),
        beside=partial(notes.disturbed, "ops"),
    )


def source_of(step: Step, model: str) -> Source:
    """The source of the step, which its plan keeps.

    model   the name of the file that held the step; "" if none did
    """
    if isinstance(step, Captured):
        return step.source
    if isinstance(step, Instance):
        return Source(model, "", (), version("torch"))
    # The shapes are those of one tower's inputs, as the user gave them.
    shapes = [
        step.shapes[tensor]
        for op in np.flatnonzero(step.is_source & (towers_of(step) <= 0)).tolist()
        if step.kinds[op] == "input"
        for tensor in step.outputs_of(op)
    ]
    return Source(model, "", tuple(shapes), version("torch"))


def transforms_of(step: Step) -> tuple[AnyTransform, ...]:
    """The transforms that made the step of the captured one, which its plan keeps."""
    return cast("tuple[AnyTransform, ...]", step.transforms) if isinstance(step, Captured) else ()
