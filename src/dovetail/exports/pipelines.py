"""Exports a plan as the stages of tools that train and serve pipelines of layers, or as their order
of work.

    torchtitan  [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["norm", "output"]]
    Megatron    Et|t*2|L         E: embedding, t: a layer, L: head and loss, |: the next stage
    vLLM        1,2,0            layers of each stage
    torch       0F0,0F1,0B0,0B1  a row of tasks for each rank

All of them keep what the model calls whole: a child of the model, or, where the child is a list,
each module in it. So every such module must be on one device, and the devices must follow each
other in the order of the calls. A tensor that two stages read would be two tensors; Megatron and
vLLM allow it for embeddings and head. They know models of one list of layers; what comes before it
is in their first stage and what comes after in the last. What the model computes itself, between
the calls of these modules, is in the code of each tool's models, and no stage says where.

Read in torchtitan 0.3 (`distributed/pipeline_parallel.py`: `_split_module`, and
`module_fqns_per_model_part` in `config/configs.py`), in Megatron-LM's
`core/transformer/pipeline_parallel_layer_layout.py`, and in vLLM's
`distributed/utils.py`: `get_pp_indices`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dovetail.errors import ExportError
from dovetail.exports.modules import (
    HELD,
    Module,
    check_one_replica,
    forward_ops,
    forward_readers,
    module_tree,
)
from dovetail.exports.split_points import stage_units
from dovetail.graph import Graph
from dovetail.graph.units import Units
from dovetail.plans import Plan, planned_graph

TORCHTITAN, MEGATRON, VLLM = "torchtitan", "Megatron-LM", "vLLM"
TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}
"""Our schedule -> torch's name of the one that is nearest, as `get_schedule_class` takes it. The
very order of a plan's tasks is in its torch-schedule."""


def torch_refuses(schedule: str, devices: Sequence[int], micro_batches: int) -> str:
    """Why torch.distributed.pipelining has no such pipeline; "": it has.

    devices   [stages] the device of each

    Read in torch 2.13, `distributed/pipelining/schedules.py`.
    """
    used = list(dict.fromkeys(devices))
    ranks = len(used)
    if list(devices) != used * (len(devices) // ranks) or (ranks == 1 and len(devices) > 1):
        return "its stages do not go round the devices in turn, as they do on torch's ranks"
    if schedule == "1f1b" and micro_batches < len(devices):
        return f"torch's 1F1B takes at least as many micro-batches as stages, {len(devices)}"
    rounds = max(1, micro_batches // ranks)
    if schedule in ("interleaved", "zero-bubble") and micro_batches % rounds:
        return (
            f"torch's {TORCH_SCHEDULES[schedule]} on {ranks} ranks takes a multiple of {rounds} "
            f"micro-batches, which {micro_batches} is not"
        )
    return ""


def torchtitan_units(graph: Graph, whole: Sequence[str]) -> Units:
    """Units of the ops between two modules with which a stage of torchtitan may begin, in the order
    of the calls; modules in `whole` stay whole besides.

    Raises `ExportError` for towers, and for a tensor that ties all such modules to one stage.
    """
    paths = dict.fromkeys([*(module.path for module, _ in _kept_modules(graph)), *whole])
    outermost = [p for p in paths if not any(p.startswith(f"{other}.") for other in paths)]
    tied = {
        op: readers
        for op in np.flatnonzero(graph.is_source).tolist()
        if graph.kinds[op] in HELD and len(readers := forward_readers(graph, op)) > 1
    }
    # A stage of what the model computes before its first module would have none.
    modules = [module.all_ops[0] for module, _ in _kept_modules(graph)]
    first = forward_ops(graph)[0]
    beginning = (first, min(modules, default=first))
    units = stage_units(graph, outermost, [*tied.values(), beginning])
    if tied and units.count == 1 and stage_units(graph, outermost, [beginning]).count > 1:
        op, readers = max(tied.items(), key=lambda entry: entry[1][-1] - entry[1][0])
        raise ExportError(
            TORCHTITAN,
            f"{graph.kinds[op]} {graph.names[op]!r}",
            f"is read by {graph.modules[readers[0]]!r} and by {graph.modules[readers[-1]]!r}, each "
            "stage would have its own, and no stage can begin outside of them; untie them",
        )
    return units


def torch_schedule(plan: Plan, _graph: Graph) -> str:
    """The tasks of a pipeline as torch.distributed.pipelining reads them: CSV with a row for each
    rank, for `_PipelineScheduleRuntime._load_csv(name, "compute_only")` of torch 2.13.

    Ranks are the devices that have stages, in the machine's order. Raises `ExportError` for a plan
    of no pipeline.
    """
    micro_batches = plan.micro_batches
    if micro_batches is None or not micro_batches.tasks:
        raise ExportError(
            "torch-schedule",
            "the plan",
            "is no pipeline of micro-batches; make one with --micro-batches",
        )
    return "".join(f"{','.join(tasks)}\n" for tasks in micro_batches.tasks if tasks)


@dataclass(frozen=True)
class _KeptModule:
    """A module that is kept whole.

    within  the list that it is in; "": it is a child of the model
    """

    path: str
    within: str
    device: int


def torchtitan(plan: Plan, graph: Graph) -> dict[str, object]:
    """The stages for torchtitan's option `parallelism.module_fqns_per_model_part`.

    A list that is all on one stage is named beside what is in it, as it may be a Sequential, which
    torchtitan keeps by its own name. One that is split must be a ModuleList or a ModuleDict.

    Of a pipeline of micro-batches there are the other options of `parallelism` that belong to it,
    and those of other sections by their full names. torchtitan recomputes in all stages or in none.

    Raises `ExportError` where torchtitan has no such stages.
    """
    stages = _stages(plan, graph, TORCHTITAN)
    _check_tied(plan, graph, "", TORCHTITAN)
    parts = [part for stage in stages for part in stage]
    devices = {
        path: {part.device for part in of_list} for path, of_list in _by_list(parts).items() if path
    }
    named: list[list[str]] = []
    for stage in stages:
        paths: dict[str, None] = {}
        for part in stage:
            if part.within and len(devices[part.within]) == 1:
                paths[part.within] = None
            paths[part.path] = None
        named.append(list(paths))
    options: dict[str, object] = {"module_fqns_per_model_part": named}
    micro_batches = plan.micro_batches
    if micro_batches is None:
        return options
    samples = plan.source.shapes[0][0] if plan.source.shapes and plan.source.shapes[0] else 1
    return options | {
        "pipeline_parallel_degree": len(set(micro_batches.devices)),
        "pipeline_parallel_schedule": TORCH_SCHEDULES[micro_batches.schedule],
        "pipeline_parallel_microbatch_size": samples,
        "training.local_batch_size": samples * micro_batches.count,
        "activation_checkpoint.mode": "full" if any(micro_batches.recompute) else "none",
    }


def megatron(plan: Plan, graph: Graph) -> dict[str, object]:
    """The stages for Megatron-LM's `--pipeline-model-parallel-layout`, and their number.

    Raises `ExportError` where Megatron-LM has no such stages.
    """
    counts = _layers(plan, graph, MEGATRON)
    texts = ["" if not count else "t" if count == 1 else f"t*{count}" for count in counts]
    return {
        "pipeline-model-parallel-layout": f"E{'|'.join(texts)}L",
        "pipeline-model-parallel-size": len(counts),
    }


def vllm(plan: Plan, graph: Graph) -> dict[str, object]:
    """The stages for vLLM's variable `VLLM_PP_LAYER_PARTITION`, and their number.

    Raises `ExportError` where vLLM has no such stages.
    """
    counts = _layers(plan, graph, VLLM)
    return {
        "VLLM_PP_LAYER_PARTITION": ",".join(map(str, counts)),
        "pipeline-parallel-size": len(counts),
    }


def _stages(plan: Plan, graph: Graph, format: str) -> list[list[_KeptModule]]:
    """The parts of each stage, in the order of the calls."""
    graph = planned_graph(plan, graph)
    check_one_replica(graph, format)
    found: list[tuple[int, _KeptModule]] = []
    for module, within in _kept_modules(graph):
        places = {int(plan.placement[op]) for op in module.all_ops}
        if len(places) > 1:
            names = " and ".join(plan.machine.device_names[d] for d in sorted(places))
            raise ExportError(
                format,
                f"module {module.path!r}",
                f"is split over {names}; plan with --for torchtitan, or keep it whole with --whole "
                f"{module.path!r}",
            )
        found.append((module.all_ops[0], _KeptModule(module.path, within, places.pop())))
    parts = [part for _, part in sorted(found, key=lambda pair: pair[0])]
    stages = [list(stage) for _, stage in groupby(parts, key=lambda part: part.device)]
    micro_batches = plan.micro_batches
    if micro_batches is not None and format == TORCHTITAN:
        devices = [stage[0].device for stage in stages]
        refused = torch_refuses(micro_batches.schedule, devices, micro_batches.count)
        if not refused and len(stages) != len(micro_batches.devices):
            refused = "some of its stages have no module of their own"
        if refused:
            raise ExportError(format, "the pipeline", f"{refused}; plan with --for torchtitan")
        return stages
    seen: set[int] = set()
    for stage in stages:
        if stage[0].device in seen:
            raise ExportError(
                format,
                f"device {plan.machine.device_names[stage[0].device]}",
                f"comes back at module {stage[0].path!r}; plan with --for torchtitan",
            )
        seen.add(stage[0].device)
    return stages


def _kept_modules(graph: Graph) -> Iterator[tuple[Module, str]]:
    """(a module that is kept whole, the list that it is in or "") of each that runs ops."""
    for child in module_tree(graph).children.values():
        is_list = bool(child.children) and not child.ops and not child.held
        for module in child.children.values() if is_list else (child,):
            if module.all_ops:
                yield module, child.path if is_list else ""


def _check_tied(plan: Plan, graph: Graph, within: str, format: str) -> None:
    """Raise for a parameter or buffer that modules below `within` read in two stages, as each would
    have its own."""
    graph = planned_graph(plan, graph)
    for op in np.flatnonzero(graph.is_source).tolist():
        if graph.kinds[op] not in HELD:
            continue
        readers = {
            int(plan.placement[reader])
            for reader in forward_readers(graph, op)
            if graph.modules[reader].startswith(within)
        }
        if len(readers) > 1:
            names = " and ".join(plan.machine.device_names[d] for d in sorted(readers))
            raise ExportError(
                format,
                f"{graph.kinds[op]} {graph.names[op]!r}",
                f"is read on {names}, and each stage would have its own; pin both readers to one "
                "device",
            )


def _by_list(parts: list[_KeptModule]) -> dict[str, list[_KeptModule]]:
    lists: dict[str, list[_KeptModule]] = {}
    for part in parts:
        lists.setdefault(part.within, []).append(part)
    return lists


def _layers(plan: Plan, graph: Graph, format: str) -> list[int]:
    """Layers of each stage, of a model of one list of layers."""
    stages = _stages(plan, graph, format)
    parts = [part for stage in stages for part in stage]
    lists = [path for path, of_list in _by_list(parts).items() if path and len(of_list) > 1]
    if len(lists) != 1:
        held = " and ".join(map(repr, lists)) or "none"
        raise ExportError(format, "the model", f"has not one list of layers, but {held}")
    # They know embeddings that the head reads too, and no tied layers.
    _check_tied(plan, graph, f"{lists[0]}.", format)
    places = [place for place, part in enumerate(parts) if part.within == lists[0]]
    first, last = stages[0][0].device, stages[-1][0].device
    for place, part in enumerate(parts):
        is_before = place < places[0]
        if part.within == lists[0] or part.device == (first if is_before else last):
            continue
        if places[0] < place < places[-1]:
            detail = "is called between two layers"
        else:
            where = plan.machine.device_names[first if is_before else last]
            detail = (
                f"is on {plan.machine.device_names[part.device]}; there it is in the "
                f"{'first' if is_before else 'last'} stage, on {where}: pin it to that"
            )
        raise ExportError(format, f"module {part.path!r}", detail)
    return [sum(part.within == lists[0] for part in stage) for stage in stages]
