"""Computes analytic costs, for any machine.

GPUs whose `Device.chip` says what they physically are have the costs of `costs.kernels`. All other
devices have a roofline with a fixed overhead per op:

    seconds = op_overhead + max(flops / (efficiency x peak flops per second),
                                accessed bytes / bandwidth)

Williams, Waterman, Patterson: "Roofline: An Insightful Visual Performance Model", CACM 2009.
Differences: an overhead is added, because RL17's own single-device times show that it dominates
small ops. `efficiency` is the share of the peak that a kind of op reaches; it is 1 if the device
does not give one.
"""

import numpy as np

from dovetail.costs.kernels import KernelModel, kernel_seconds, kernels_of
from dovetail.costs.records import Costs
from dovetail.errors import CostError, MachineError
from dovetail.graph import Graph
from dovetail.machine import Machine


def analytic_costs(graph: Graph, machine: Machine, model: KernelModel | None = None) -> Costs:
    """Return costs [ops, devices] by the cost model of kernels or the roofline.

    model   of kernels; by default the one that dovetail comes with

    An op runs at the rate of `rate_dtypes`. Dtypes that the device has no rate for have one that
    `Device.rate` derives. Raises `CostError` for a device that has none to derive it from.
    """
    kernels = kernels_of(graph)
    seconds = np.zeros((len(graph), len(machine.devices)))
    for d, device in enumerate(machine.devices):
        if device.kind == "host":
            seconds[:, d] = np.inf
            continue
        try:
            seconds[:, d] = kernel_seconds(kernels, device, model)[kernels.of_op]
        except MachineError as error:
            needs = kernels.flops > 0
            for dtype in sorted(set(kernels.dtypes[needs].tolist())):
                if device.rate_source(dtype)[0] not in device.flops_per_second:
                    kernel = np.flatnonzero(needs & (kernels.dtypes == dtype))
                    op = int(np.flatnonzero(np.isin(kernels.of_op, kernel))[0])
                    raise CostError(graph.names[op], str(error)) from error
            raise
        seconds[~graph.runs_on(device.kind), d] = np.inf
    seconds[graph.is_source] = 0.0
    return Costs(seconds, "analytic")
