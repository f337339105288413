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

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dovetail.errors import ExportError
from dovetail.exports.modules import HELD, check_one_replica, module_tree
from dovetail.graph import Graph, Phase
from dovetail.plans import Plan, planned_graph

TORCHTITAN, MEGATRON, VLLM = "torchtitan", "Megatron-LM", "vLLM"


def torch_schedule(plan: Plan, _graph: Graph) -> str:
    """The tasks of a pipeline as torch.distributed.pipelining reads them: CSV with a row for each
    rank, for `_PipelineScheduleRuntime._load_csv(name, "compute_only")` of torch 2.13.

    Ranks are the devices that have stages, in the machine's order. Raises `ExportError` for a plan
    of no pipeline.
    """
    pipelining = plan.source.pipelining
    if pipelining is None or not pipelining.tasks:
        raise ExportError(
            "torch-schedule",
            "the plan",
            "is no pipeline of micro-batches; make one with --micro-batches",
        )
    return "".join(f"{','.join(tasks)}\n" for tasks in pipelining.tasks if tasks)


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
    return {"module_fqns_per_model_part": named}


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
    parts = _parts(plan, graph, format)
    stages = [list(stage) for _, stage in groupby(parts, key=lambda part: part.device)]
    seen: set[int] = set()
    for stage in stages:
        if stage[0].device in seen:
            raise ExportError(
                format,
                f"device {plan.machine.device_names[stage[0].device]}",
                f"comes back at module {stage[0].path!r}; plan with --for split-points",
            )
        seen.add(stage[0].device)
    return stages


def _parts(plan: Plan, graph: Graph, format: str) -> list[_KeptModule]:
    found: list[tuple[int, _KeptModule]] = []
    for child in module_tree(graph).children.values():
        is_list = bool(child.children) and not child.ops and not child.held
        for module in child.children.values() if is_list else (child,):
            ops = module.all_ops
            if not ops:
                continue
            devices = {int(plan.placement[op]) for op in ops}
            if len(devices) > 1:
                names = " and ".join(plan.machine.device_names[d] for d in sorted(devices))
                raise ExportError(
                    format,
                    f"module {module.path!r}",
                    f"is split over {names}; keep it whole with --whole {module.path!r}",
                )
            within = child.path if is_list else ""
            found.append((ops[0], _KeptModule(module.path, within, devices.pop())))
    return [part for _, part in sorted(found, key=lambda pair: pair[0])]


def _check_tied(plan: Plan, graph: Graph, within: str, format: str) -> None:
    """Raise for a parameter or buffer that modules below `within` read in two stages, as each would
    have its own."""
    graph = planned_graph(plan, graph)
    for op in np.flatnonzero(graph.is_source).tolist():
        if graph.kinds[op] not in HELD:
            continue
        readers = {
            int(plan.placement[reader])
            for tensor in graph.outputs_of(op)
            for reader in graph.consumers_of(tensor).tolist()
            if graph.phases[reader] == Phase.FORWARD and graph.modules[reader].startswith(within)
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
