"""Gives the rules of export formats. A search that keeps them finds only exportable plans."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.exports.device_map import module_units
from dovetail.exports.split_points import stage_units
from dovetail.graph import Graph
from dovetail.graph.units import Units
from dovetail.machine import Machine


@dataclass(frozen=True, eq=False)
class FormatRules:
    """What a format asks of a plan.

    units    ops that stay together
    main     [ops] True for ops that run where the model's own inputs are: on the first device
    chain    [ops] place of each op's unit in the order of the calls, -1 if it has none. Each device
             has one run of this order, or nothing. None: the format asks for no order
    devices  [devices] True for devices that the format has a name for
    """

    units: Units
    main: NDArray[np.bool_]
    chain: NDArray[np.int32] | None
    devices: NDArray[np.bool_]


def _device_map_rules(graph: Graph, machine: Machine, whole: Sequence[str]) -> FormatRules:
    units, main = module_units(graph, whole)
    kinds = [device.kind for device in machine.devices]
    cpus = [d for d, kind in enumerate(kinds) if kind == "cpu"]
    # With a module on "cpu" the model's inputs are there too; ops that read inputs beside what was
    # made on an accelerator then have no device that holds both.
    cpu_too = "gpu" not in kinds or not main.any()
    named = [kind == "gpu" or (cpu_too and d in cpus[:1]) for d, kind in enumerate(kinds)]
    return FormatRules(units, main, None, np.array(named, dtype=bool))


def _split_points_rules(graph: Graph, machine: Machine, whole: Sequence[str]) -> FormatRules:
    units = stage_units(graph, whole)
    nowhere = np.zeros(len(graph), dtype=bool)
    every = np.ones(len(machine.devices), dtype=bool)
    return FormatRules(units, nowhere, units.of_op, every)


FORMATS: dict[str, Callable[[Graph, Machine, Sequence[str]], FormatRules]] = {
    "device-map": _device_map_rules,
    "split-points": _split_points_rules,
}
LATER = ("torchtitan", "megatron", "vllm")


def check_format(format: str) -> None:
    """Raise `UsageError` for a format that is unknown or not built yet."""
    if format in LATER:
        raise UsageError("for", f"{format} is not there yet; use {' or '.join(FORMATS)}")
    if format and format not in FORMATS:
        raise UsageError("for", f"{format!r} is not one of {', '.join(FORMATS)}")


def rules_for(
    format: str, graph: Graph, machine: Machine, whole: Sequence[str] = ()
) -> FormatRules:
    """What `format` asks of a plan of this graph. Modules in `whole` are kept whole besides.

    Raises `UsageError` for an unknown format, and `ExportError` for a graph of towers.
    """
    check_format(format)
    return FORMATS[format](graph, machine, whole)
