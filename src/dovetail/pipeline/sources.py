"""Where a plan starts: what MODEL and MACHINE texts name, and what it costs.

MODEL ──► step: a captured network, a saved graph or one of an ONNX file, or a published instance;
          towers of all but the last
MACHINE ──► machine; an instance brings its own
(step, machine) ──► costs: measured here, analytic elsewhere, an instance's own
"""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version

import numpy as np

from dovetail.costs import CostCache, Costs, analytic_costs, measured_costs, probed_machine
from dovetail.errors import FileFormatError, GraphError, ModelError, UsageError
from dovetail.frontends import Captured, parse_optimizer, towers
from dovetail.frontends import resolve as resolve_network
from dovetail.frontends.onnx import Shapes, is_from_onnx, load_onnx
from dovetail.graph import Graph, Groups, colocate, group, replicate
from dovetail.graph.files import graph_from
from dovetail.graph.replicate import towers_of
from dovetail.graph.units import Units, module_paths
from dovetail.instances import Instance, instance_from, is_instance
from dovetail.machine import Machine, names_here, parse_machine
from dovetail.pipeline.threads import choose_threads, with_threads
from dovetail.plans import Source
from dovetail.runtime.files import read_json
from dovetail.runtime.neighbours import disturbs

HERE = "here"
Step = Captured | Graph | Instance
"""What can be planned. Only what was captured can run."""
Progress = Callable[[str, float, float | None], None]
"""progress(what is being done, fraction of it, best value so far or None)."""


def silent(_doing: str, _fraction: float, _best: float | None) -> None:
    """A `Progress` that shows nothing."""


def resolve_model(text: str, train: str = "", shapes: Shapes | None = None) -> Step:
    """What MODEL names: an ONNX file, a saved graph or a published instance, the last two told
    apart by what the file holds, or a network to capture.

    shapes   of an ONNX file's inputs, by name or all in order; of anything else `UsageError`
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
    """The step in `replicas` data-parallel towers, each of which is `step`; 1: the step itself.

    Raises what `check_replicas` and `replicate` raise, and `UsageError` for an instance.
    """
    check_replicas(replicas, asynchronous)
    if replicas == 1:
        return step
    if isinstance(step, Instance):
        raise UsageError("replicas", "an instance is planned for as it is; leave it out")
    if isinstance(step, Graph):
        return replicate(step, replicas, synchronous=not asynchronous).graph
    return towers(step, replicas, synchronous=not asynchronous)


def check_replicas(replicas: int, asynchronous: bool) -> None:
    """Raise `UsageError` for less than one replica, and for asynchronous updates by one alone."""
    if replicas < 1:
        raise UsageError("replicas", f"is {replicas}; use 2 or more, or 1 for the step itself")
    if asynchronous and replicas == 1:
        raise UsageError("asynchronous", "is for towers; give replicas as well, 2 or more")


def names_file(text: str) -> bool:
    """Is this MODEL text the name of a saved graph, of an instance or of an ONNX file?"""
    return text.endswith((".json", ".json.gz", ".onnx")) and ":" not in text


def names_onnx(text: str) -> bool:
    """Is this MODEL text the name of an ONNX file?"""
    return names_file(text) and text.endswith(".onnx")


def graph_of(step: Step) -> Graph:
    """The graph to plan for. Raises `GraphError` for one without ops."""
    graph = step if isinstance(step, Graph) else step.graph
    if not len(graph):
        raise GraphError("the graph has no ops: there is nothing to place")
    return graph


def groups_of(step: Step, units: Units | None = None, *, per_op: bool = False) -> Groups:
    """What placers place as one: of an instance its colour classes and no more, since its bounds
    and published values are for those; `per_op`: of any graph only what must stay together."""
    graph = graph_of(step)
    fine = per_op or isinstance(step, Instance)
    return colocate(graph, units) if fine else group(graph, units)


def unsplit_modules(step: Step) -> dict[str, str]:
    """Pattern of modules -> their class, of those that the model says not to split: the classes in
    the `_no_split_modules` of transformers' models."""
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
            glob = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
            alike = {type(m).__name__ for p, m in modules.items() if _same_depth(p, glob)}
            found[glob if alike == {name} else path] = name
    return found


def _same_depth(path: str, glob: str) -> bool:
    return path.count(".") == glob.count(".") and fnmatchcase(path, glob)


def default_objective(step: Step) -> str:
    """What is planned for where nobody says: an instance for throughput, the rest for one step."""
    return "load" if isinstance(step, Instance) else "step"


def machine_of(
    step: Step,
    machine: str | Machine,
    progress: Progress = silent,
    notes: "Notes | None" = None,
) -> Machine:
    """The machine to plan for; "" is an instance's own, and else `here`, with the number of threads
    with which this step was measured to be fastest. notes: takes what the user should know of that.

    Raises `UsageError` for an instance on another machine: its costs are for its own.
    """
    notes = notes or Notes()
    if not isinstance(step, Instance):
        machine = machine or HERE
        if machine == HERE and isinstance(step, Captured):
            return _with_best_threads(step, progress, notes)
        return resolve_machine(machine, progress, notes=notes)
    if machine:
        raise UsageError("machine", "an instance brings its own machine and costs; leave it out")
    return step.machine


def _with_best_threads(step: Captured, progress: Progress, notes: "Notes") -> Machine:
    """`here`, probed with as many threads as are best for this step."""
    machine, cache = parse_machine(HERE), CostCache()
    progress("measuring threads", 0.0, None)
    choice = choose_threads(
        step, machine, cache, lambda fraction: progress("measuring threads", fraction, None)
    )
    if choice is not None:
        machine = with_threads(machine, choice.threads)
        notes.say(str(choice))
        if disturbs(choice.others_cores):
            notes.disturbed("threads", choice.others_cores)
    progress("measuring the machine", 0.0, None)
    return probed_machine(machine, cache, beside=partial(notes.disturbed, "the machine"))


class Notes:
    """What a user should know of how something was measured."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._disturbed: dict[str, float] = {}

    def say(self, text: str) -> None:
        self._said.append(text)

    def disturbed(self, what: str, others_cores: float) -> None:
        """Other programs used so many cores while `what` was measured."""
        self._disturbed[what] = max(others_cores, self._disturbed.get(what, 0.0))

    @property
    def texts(self) -> tuple[str, ...]:
        """A sentence each."""
        if not self._disturbed:
            return tuple(self._said)
        what = " and ".join(self._disturbed)
        most = max(self._disturbed.values())
        return (
            *self._said,
            f"other programs used up to {most:.1f} cores while {what} were measured, so what was "
            "measured may be too slow and was not kept; plan again when the machine is quiet",
        )


def resolve_machine(
    machine: str | Machine,
    progress: Progress = silent,
    *,
    fresh: bool = False,
    notes: "Notes | None" = None,
) -> Machine:
    """The machine that a text names; `here` and `here/n` with the rates the probe measured, where
    `fresh` without a look at the cache. notes: takes whether other programs disturbed the probe."""
    if not isinstance(machine, str):
        return machine
    where = parse_machine(machine)
    if not names_here(machine):
        return where
    progress("measuring the machine", 0.0, None)
    return probed_machine(
        where,
        CostCache(),
        fresh=fresh,
        beside=partial((notes or Notes()).disturbed, "the machine"),
    )


def costs_of(
    step: Step,
    machine: Machine,
    progress: Progress = silent,
    notes: "Notes | None" = None,
) -> Costs:
    """An instance's own costs; measured ones where the machine is this one, else analytic ones. A
    graph from ONNX has no calls to measure: its costs are analytic on this machine too.

    notes: takes whether other programs disturbed the measuring."""
    notes = notes or Notes()
    if isinstance(step, Instance):
        return step.costs
    graph, program = (step, None) if isinstance(step, Graph) else (step.graph, step.program)
    if not machine.local or is_from_onnx(graph):
        return analytic_costs(graph, machine)
    distinct = len({graph.signatures[op] for op in np.flatnonzero(~graph.is_source).tolist()})
    meanwhile = ""

    def disturbed(cores: float) -> None:
        nonlocal meanwhile
        meanwhile = f"; other programs use {cores:.1f} cores"
        notes.disturbed("ops", cores)

    def tell(fraction: float) -> None:
        done = f"{round(fraction * distinct):,} of {distinct:,}"
        progress(f"measuring ops: {done} kinds on {machine.name}{meanwhile}", fraction, None)

    return measured_costs(graph, program, machine, CostCache(), progress=tell, beside=disturbed)


def source_of(step: Step, model: str) -> Source:
    """Where the step came from; `model` is the name of the file that held it, if one did."""
    if isinstance(step, Captured):
        return step.source
    if isinstance(step, Instance):
        return Source(model, "", (), version("torch"))
    shapes = [
        step.shapes[tensor]
        for op in np.flatnonzero(step.is_source & (towers_of(step) <= 0)).tolist()
        if step.kinds[op] == "input"
        for tensor in step.outputs_of(op)
    ]
    return Source(model, "", tuple(shapes), version("torch"))
