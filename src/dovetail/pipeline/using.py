"""Runs a plan, writes its report and trace, and exports it for other tools."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.errors import UnwritableError, UsageError
from dovetail.executors import MODES, LoadedStep, Measurement, PlainNetwork
from dovetail.executors import run as execute
from dovetail.executors.compiling import CompileTarget, has_code
from dovetail.executors.shares import compiled_stages
from dovetail.exports import device_map, model_explorer, split_points
from dovetail.exports.pipelines import megatron, torch_schedule, torchtitan, vllm
from dovetail.frontends import Captured
from dovetail.frontends.fused import FusedCall
from dovetail.graph import Graph
from dovetail.instances import instance_to_dict
from dovetail.pipeline.opening import check_machine, costs_in, planned, timeline_of
from dovetail.pipeline.requests import check_seed
from dovetail.pipeline.sources import Step, graph_of
from dovetail.plans import PLACED, Plan, check
from dovetail.reports import PlanReport, chrome_trace, device_colours, write_html
from dovetail.runtime.files import refuse_links, write_atomically
from dovetail.runtime.neighbours import disturbs
from dovetail.runtime.ranks import Ranks, host_name
from dovetail.timeline import Timeline


def run(
    plan: Plan, step: Captured, *, seed: int = 0, ranks: Ranks | None = None, in_place: bool = False
) -> LoadedStep:
    """The step at work as the plan has it: a context manager with `step`, `measure`, `state_dict`.

    ranks      those that a launcher started, which run the plan together
    in_place   the step reads and writes the captured module's own parameters and buffers in this
               process, takes inputs as they are and returns results as they are made. Tensors that
               the module is given later count from the next step on. For a plan on all cores as one
               device; raises `UsageError` for another, and for tensors of other shapes or dtypes
    """
    for name, value, fits in (
        ("plan", plan, isinstance(plan, Plan)),
        ("step", step, hasattr(step, "graph")),
    ):
        if not fits:
            says = f"is a {type(value).__name__}; give dt.run a plan, then the step it is of"
            raise UsageError(name, says)
    check_seed(seed)
    step = planned(plan, step)
    check(plan, step.graph)
    check_machine(plan.machine)
    if ranks is not None:
        if plan.way != PLACED:
            says = "it runs the module as it is, in one process; start it without torchrun"
            raise UsageError("plan", says)
        return execute(plan, step, seed=seed, ranks=ranks)
    hosts = dict.fromkeys(device.host for device in plan.machine.devices)
    if not hosts.keys() <= {"", host_name()}:
        says = f"it is for the hosts {', '.join(filter(None, hosts))}; start ranks by torchrun"
        raise UsageError("plan", says)
    if plan.way != PLACED:
        mode = MODES[plan.way]
        return PlainNetwork(step, plan.machine, mode=mode, seed=seed, in_place=in_place)
    return execute(plan, step, seed=seed, in_place=in_place)


def uncompiled(plan: Plan, step: Captured) -> str:
    """A sentence for the user if code of the plan's segments is not kept here, else ""."""
    segments = compiled_stages(plan)
    if not segments:
        return ""
    step = planned(plan, step)
    missing = 0
    for device, ops in segments:
        target = CompileTarget.of(plan.machine.devices[device])
        fused = FusedCall.of(step.graph, step.program, ops)[0]
        missing += not (fused.is_update or has_code(fused.key, target))
    if not missing:
        return ""
    return (
        f"of {len(segments)} compiled segments {missing} have no code here, and run call by call; "
        "plan again to compile them"
    )


FAR_OFF = 0.25
"""If measured and predicted seconds differ by more than this share, the user is told so."""
LEAST_FAR_OFF_SECONDS = 2e-4
"""A smaller difference is told to nobody: a call may take so much beside its ops."""


def disturbance_of(plan: Plan, predicted_seconds: float, measurement: Measurement) -> str:
    """A sentence for the user if other programs disturbed the measurement, else "".

    It is said in two cases: other programs used the plan's cores while it was measured, or they
    used them while its costs were measured and the measured step is far off.
    """
    beyond = abs(measurement.median_seconds - predicted_seconds)
    difference = beyond / predicted_seconds if predicted_seconds > 0 else 0.0
    is_far_off = difference > FAR_OFF and beyond > LEAST_FAR_OFF_SECONDS
    differ = f"; measured and predicted differ by {100 * difference:.0f} %" if is_far_off else ""
    if disturbs(measurement.others_cores):
        return (
            f"other programs used {measurement.others_cores:.1f} cores of this plan's while it was "
            f"measured{differ}: run it again when the machine is quiet"
        )
    # `Notes` of the measuring of costs say so in these words, and the plan keeps them.
    if is_far_off and any("other programs" in note for note in plan.notes):
        return f"this plan was made while other programs used its cores{differ}: plan again"
    return ""


def report(
    plan: Plan,
    step: Step,
    path: str | Path,
    *,
    measurement: Measurement | None = None,
    file: str | Path = "",
) -> None:
    """Write the page of a plan: its predicted step, and beside it the measured one if a measurement
    is given. Raises `UnwritableError`.

    file   the plan's own file, which the page's commands name
    """
    graph = graph_of(planned(plan, step))
    write_html(
        PlanReport(
            plan,
            graph,
            predicted=timeline_of(plan, graph),
            measured=_timeline_of(plan, measurement),
            measured_seconds=None if measurement is None else measurement.step_seconds,
            file=str(file),
        ),
        path,
    )


def write_trace(
    plan: Plan, step: Step, path: str | Path, *, measurement: Measurement | None = None
) -> None:
    """Write the predicted step as a Chrome trace, for Perfetto, and the measured step below it if a
    measurement is given. Raises `UnwritableError`."""
    graph = graph_of(planned(plan, step))
    measured = _timeline_of(plan, measurement)
    trace = chrome_trace(timeline_of(plan, graph), graph, measured)
    write_atomically(path, json.dumps(trace, allow_nan=False))


def _timeline_of(plan: Plan, measurement: Measurement | None) -> Timeline | None:
    """The measured timeline. A step that runs as it is says nothing of its ops."""
    return None if measurement is None or plan.way != PLACED else measurement.timeline


EXPORTS: dict[str, Callable[[Plan, Graph], dict[str, Any] | str]] = {
    "device-map": lambda plan, graph: device_map(plan, graph).to_json(),
    "split-points": lambda plan, graph: {
        path: point.name for path, point in split_points(plan, graph).items()
    },
    "torchtitan": torchtitan,
    "megatron": megatron,
    "vllm": vllm,
    "torch-schedule": torch_schedule,
    "model-explorer": lambda plan, graph: model_explorer(
        plan, graph, device_colours(len(plan.machine.devices))
    ),
    "trace": lambda plan, graph: chrome_trace(timeline_of(plan, graph), graph),
    "instance": lambda plan, graph: instance_to_dict(graph, plan.machine, costs_in(plan)),
}
"""Maps each format that a plan is exported to, to the function that makes its JSON or its text."""

FOLDERS = {"model-explorer": "graph.json"}
"""Maps each export that is a folder of several files to the name of the first."""


def check_export(to: str) -> None:
    """Raise `UsageError` for a format that we do not write."""
    if to not in EXPORTS:
        raise UsageError("to", f"{to!r} is not one of {', '.join(EXPORTS)}")


def export(plan: Plan, step: Step, to: str, path: str | Path | None = None) -> dict[str, Any] | str:
    """The plan as another tool reads it. If `path` is given, it is also written there, as JSON or
    as the text that it is.

    device-map      the arguments of accelerate's `dispatch_model`: {"device_map": {module path:
                    accelerator's number or "cpu"}, "main_device": one of these}
    split-points    of torch.distributed.pipelining: {module path: "BEGINNING"}
    torchtitan      {"module_fqns_per_model_part": [stages] modules of each}, and of a pipeline of
                    micro-batches its schedule, their number and what else torchtitan asks for
    megatron        {"pipeline-model-parallel-layout": "Et*3|t*4|t*3L", and their number}
    vllm            {"VLLM_PP_LAYER_PARTITION": "3,4,3", and their number}
    torch-schedule  CSV of a pipeline's tasks, a row for each rank: "0F0,0F1,0B0,0B1"
    model-explorer  {file name: document} of its graph and node data; `path` is a folder then
    trace           the predicted step, for Perfetto or chrome://tracing
    instance        graph, machine and costs as a published placement instance

    Raises `ExportError` where the format cannot say what the plan does, `UnwritableError`, and
    `FileFormatError` for a link among the files of a folder.
    """
    check_export(to)
    exported = EXPORTS[to](plan, graph_of(planned(plan, step)))
    if path is not None and isinstance(exported, str):
        write_atomically(path, exported)
    elif path is not None and to in FOLDERS:
        assert isinstance(exported, dict)
        folder = make_folder(path)
        for name, document in exported.items():
            refuse_links(folder / name)
            write_atomically(folder / name, json.dumps(document, allow_nan=False))
    elif path is not None:
        write_atomically(path, json.dumps(exported, allow_nan=False))
    return exported


def make_folder(path: str | Path) -> Path:
    """Make the folder, unless it exists, and return its path. Raises `UnwritableError`."""
    try:
        Path(path).mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise UnwritableError(str(path), getattr(error, "strerror", None) or str(error)) from error
    return Path(path)
