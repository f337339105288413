"""Analytic costs: a roofline with a fixed overhead per op, for machines that are not here.

    seconds = op_overhead + max(flops / peak flops per second, accessed bytes / bandwidth)

Williams, Waterman, Patterson: "Roofline: An Insightful Visual Performance Model", CACM 2009.
Differences: the overhead, which RL17's own single-device times show to dominate small ops.
"""

import numpy as np
from numpy.typing import NDArray

from dovetail.costs.records import Costs
from dovetail.errors import CostError
from dovetail.graph import Graph
from dovetail.machine import Device, Machine

_WIDEST_FIRST = ("complex128", "complex64", "float64", "float32", "bfloat16", "float16")
_EXACT = ("bool", "int", "uint")


def analytic_costs(graph: Graph, machine: Machine) -> Costs:
    """[ops, devices] seconds by the roofline.

    An op's rate is that of its widest floating-point or complex output or input; integer and
    boolean work counts at the float32 rate. Raises `CostError` for a dtype the device has no rate
    for.
    """
    dtypes = np.array([_rate_dtype(graph, op) for op in range(len(graph))])
    seconds = np.zeros((len(graph), len(machine.devices)))
    for d, device in enumerate(machine.devices):
        seconds[:, d] = np.inf if device.kind == "host" else _roofline(graph, dtypes, device)
        seconds[~graph.runs_on(device.kind), d] = np.inf
    seconds[graph.is_source] = 0.0
    return Costs(seconds, "analytic")


def _roofline(graph: Graph, dtypes: NDArray[np.str_], device: Device) -> NDArray[np.float64]:
    rates = np.empty(len(graph))
    for dtype in np.unique(dtypes):
        of_dtype = dtypes == dtype
        if dtype not in device.flops_per_second:
            if not graph.flops[of_dtype].any():
                rates[of_dtype] = 1.0
                continue
            op = int(np.flatnonzero(of_dtype & (graph.flops > 0))[0])
            raise CostError(
                graph.names[op],
                f"device {device.name} has no flops_per_second for {dtype}; add it to the machine",
            )
        rates[of_dtype] = device.flops_per_second[str(dtype)]
    arithmetic = graph.flops / rates
    memory = graph.accessed_bytes / device.bandwidth_bytes_per_second
    roofline: NDArray[np.float64] = device.op_overhead_seconds + np.maximum(arithmetic, memory)
    return roofline


def _rate_dtype(graph: Graph, op: int) -> str:
    tensors = (*graph.outputs_of(op), *graph.inputs_of(op).tolist())
    used = {graph.dtypes[tensor] for tensor in tensors}
    inexact = {dtype for dtype in used if not dtype.startswith(_EXACT)}
    known = (dtype for dtype in _WIDEST_FIRST if dtype in inexact)
    return next(known, min(inexact, default="float32"))
