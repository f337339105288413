"""Computes analytic costs by a roofline with a fixed overhead per op, for any machine.

    seconds = op_overhead + max(flops / (efficiency x peak flops per second),
                                accessed bytes / bandwidth)

Williams, Waterman, Patterson: "Roofline: An Insightful Visual Performance Model", CACM 2009.
Differences: an overhead is added, because RL17's own single-device times show that it dominates
small ops. `efficiency` is the share of the peak that a kind of op reaches; it is 1 if the device
does not give one.
"""

import numpy as np

from dovetail.costs.records import Costs
from dovetail.errors import CostError, MachineError
from dovetail.graph import Graph
from dovetail.machine import Machine

_WIDEST_FIRST = (
    "complex128", "complex64", "float64", "float32", "complex32", "bfloat16", "float16"
)  # fmt: skip
EXACT = ("bool", "int", "uint", "bits")


def analytic_costs(graph: Graph, machine: Machine) -> Costs:
    """Return costs [ops, devices] by the roofline.

    An op runs at the rate of its widest floating-point or complex output or input. Integer and
    boolean work runs at the float32 rate. Dtypes that the device has no rate for have one that
    `Device.rate` derives. Raises `CostError` for a device that has none to derive it from.
    """
    # `dtypes`, in alphabetical order, are those whose rate counts for some op, and `dtype_of` [ops]
    # is each op's index into them.
    inexact = {dtype for dtype in set(graph.dtypes) if not dtype.startswith(EXACT)}
    ranked = [dtype for dtype in _WIDEST_FIRST if dtype in inexact]
    ranked += sorted(inexact.difference(_WIDEST_FIRST))
    rank = {dtype: i for i, dtype in enumerate(ranked)}
    of_tensor = np.array([rank.get(dtype, len(rank)) for dtype in graph.dtypes], dtype=np.intp)
    of_op = np.full(len(graph), len(ranked), dtype=np.intp)
    np.minimum.at(of_op, graph.producers, of_tensor)
    np.minimum.at(of_op, graph.readers, of_tensor[graph.input_tensors])
    names, codes = np.unique([*ranked, "float32"], return_inverse=True)
    used, of_used = np.unique(codes.reshape(-1)[of_op], return_inverse=True)
    dtypes, dtype_of = [str(names[i]) for i in used], of_used.reshape(-1)

    seconds = np.zeros((len(graph), len(machine.devices)))
    for d, device in enumerate(machine.devices):
        if device.kind == "host":
            seconds[:, d] = np.inf
            continue
        # Ops without FLOPs need no rate; any value will do.
        rates = np.ones(len(graph))
        for code, dtype in enumerate(dtypes):
            of_dtype = dtype_of == code
            if not graph.flops[of_dtype].any():
                continue
            try:
                rates[of_dtype] = device.rate(dtype)
            except MachineError as error:
                op = int(np.flatnonzero(of_dtype & (graph.flops > 0))[0])
                raise CostError(graph.names[op], str(error)) from error
        if device.efficiencies:
            kinds = {kind: device.efficiency(kind) for kind in set(graph.kinds)}
            rates *= np.array([kinds[kind] for kind in graph.kinds])
        arithmetic = graph.flops / rates
        memory = graph.accessed_bytes / device.bandwidth_bytes_per_second
        seconds[:, d] = device.op_overhead_seconds + np.maximum(arithmetic, memory)
        seconds[~graph.runs_on(device.kind), d] = np.inf
    seconds[graph.is_source] = 0.0
    return Costs(seconds, "analytic")
