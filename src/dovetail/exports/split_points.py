"""Exports a plan as the split points of `torch.distributed.pipelining`.

    split_spec = {"layers.1": SplitPoint.BEGINNING, "layers.3": SplitPoint.BEGINNING}
    pipeline(module, mb_args, split_spec=split_spec)

Stages are runs of forward ops in the order in which the model calls them, so the plan must give
each device one such run, and every run but the first must begin where a module is called that is
called only once. https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from dovetail.errors import ExportError
from dovetail.exports.modules import check_one_replica, forward_ops, module_tree
from dovetail.graph import LOSS_MODULE, Graph, Phase
from dovetail.graph.units import Units, units_of
from dovetail.plans import Plan, planned_graph

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint

FORMAT = "split points"


def split_points(plan: Plan, graph: Graph) -> "dict[str, SplitPoint]":
    """Path of the module with which each stage but the first begins -> the split point, in order.

    It is empty if all is on one device. A stage's device is that of the ops from there on. In a
    pipeline of micro-batches a device may have several stages.

    Raises `ExportError` for another device with several runs, for a run that begins within a
    module, and for towers.
    """
    graph = planned_graph(plan, graph)
    check_one_replica(graph, FORMAT)
    from torch.distributed.pipelining import SplitPoint

    ops = forward_ops(graph)
    starts = [i for i in range(1, len(ops)) if plan.placement[ops[i]] != plan.placement[ops[i - 1]]]
    devices_begun = {int(plan.placement[ops[0]])} if ops else set()
    begins = _begins(graph)
    points = {}
    for start in starts:
        op, device = ops[start], int(plan.placement[ops[start]])
        name = plan.machine.device_names[device]
        if device in devices_begun and plan.micro_batches is None:
            advice = "plan with objective load and contiguous"
            if plan.contiguous:
                # Such a plan may still split the branches of a module, which the model calls one
                # after the other.
                paths = [graph.modules[o].split(".") for o in (ops[start - 1], op)]
                pairs = zip(*paths, strict=False)
                shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
                where = f"module {'.'.join(shared)!r}" if any(shared) else "its branches"
                advice = f"pin {where} to one device"
            raise ExportError(
                FORMAT,
                f"device {name}",
                f"comes back at op {graph.names[op]!r}: in the order of the forward ops its part "
                f"is not contiguous; {advice}",
            )
        devices_begun.add(device)
        if op not in begins:
            raise ExportError(
                FORMAT,
                f"module {graph.modules[op]!r}" if graph.modules[op] else "the outermost module",
                f"is split: the stage on {name} begins within it, at op {graph.names[op]!r}, and "
                "not where a module begins that is called once; pin modules whole",
            )
        points[begins[op]] = SplitPoint.BEGINNING
    micro_batches = plan.micro_batches
    if micro_batches is not None and len(points) + 1 != len(micro_batches.devices):
        says = "has two stages in a row on one device; plan with --for split-points"
        raise ExportError(FORMAT, "the pipeline", says)
    return points


def _begins(graph: Graph) -> dict[int, str]:
    """First op -> the outermost module that begins there and whose ops stand together.

    A module that is called several times, with something in between, has no single beginning.

    A module without ops of its own may be a list of layers, which nothing calls: torch would find
    no stage to begin there, and say nothing. The first module within it that has some counts.
    """
    place = {op: i for i, op in enumerate(forward_ops(graph))}
    begins: dict[int, str] = {}
    for module in module_tree(graph).walk():
        ops = module.all_ops
        whole = bool(ops) and place[ops[-1]] - place[ops[0]] == len(ops) - 1
        if whole and module.path and module.ops:
            begins.setdefault(ops[0], module.path)
    return begins


def stage_units(
    graph: Graph, whole: Sequence[str], together: Iterable[Sequence[int]] = ()
) -> Units:
    """Units of the ops between two places where a stage may begin, in the order of the calls.

    Stages begin where a module begins that is called once, but not within a module that is kept
    whole. Raises `ExportError` for towers.

    together   sets of forward ops that are in one stage
    """
    check_one_replica(graph, FORMAT)
    ops, begins = forward_ops(graph), _begins(graph)
    cut = np.array([op in begins for op in ops], dtype=bool)
    cut[:1] = False
    if (graph.phases == Phase.BACKWARD).any():
        # The loss is no module of the model, so no stage can begin there.
        cut &= np.array([graph.modules[op] != LOSS_MODULE for op in ops])
    within = units_of(graph, whole).of_op[ops]
    sets = [np.flatnonzero(within == unit) for unit in np.unique(within[within >= 0]).tolist()]
    sets += [np.flatnonzero(np.isin(ops, members)) for members in together]
    for places in sets:
        cut[places[0] + 1 : places[-1] + 1] = False
    units = np.full(len(graph), -1, dtype=np.int32)
    units[ops] = np.cumsum(cut)
    # An op that is no forward op goes with the forward op that it is for: a gradient with its op,
    # a sum of gradients with what it sums, an update with the first reader of what it updates.
    for op in np.flatnonzero((units < 0) & ~graph.is_source).tolist():
        if graph.gradient_of[op] >= 0:
            units[op] = units[graph.gradient_of[op]]
        elif graph.phases[op] == Phase.BACKWARD:
            units[op] = max((units[graph.producers[t]] for t in graph.inputs_of(op)), default=-1)
        else:
            reads = graph.inputs_of(op)
            updated = reads[graph.is_source[graph.producers[reads]]].tolist()
            readers = [r for t in updated for r in graph.consumers_of(t).tolist()]
            forward = [r for r in readers if graph.phases[r] == Phase.FORWARD]
            units[op] = units[min(forward)] if forward else -1
    return Units(units, np.zeros((0, 2), dtype=np.int32))
