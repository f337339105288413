"""The rules of an export format for plans: a search under them finds only exportable plans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import UsageError
from dovetail.exports.device_map import device_map, module_units
from dovetail.exports.pipelines import torchtitan, torchtitan_units
from dovetail.exports.split_points import split_points, stage_units
from dovetail.graph import Graph
from dovetail.graph.units import Units
from dovetail.machine import Machine
from dovetail.plans import Plan


@dataclass(frozen=True, eq=False)
class FormatRules:
    """What a format asks of a plan.

    units    ops that stay together
    main     [ops] True for ops that run where the model's own inputs are: on the main device, which
             is the first GPU, or the first CPU of a machine without GPUs
    chain    [ops] place of each op's unit in the order of the calls, -1 if it has none. Each device
             has one run of this order, or nothing. None: the format asks for no order
    devices  [devices] True for devices that the format has a name for
    """

    units: Units
    main: NDArray[np.bool_]
    chain: NDArray[np.int32] | None
    devices: NDArray[np.bool_]


def rules_for(
    format: str,
    graph: Graph,
    machine: Machine,
    whole: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> FormatRules:
    """What `format` asks of a plan of this graph. Modules in `whole` are kept whole besides.

    aliases   other name of a parameter or buffer -> its name

    Raises `UsageError` for an unknown format, and `ExportError` for a graph of towers.
    """
    check_format(format)
    return FORMATS[format].rules(graph, machine, whole, aliases or {})


def check_format(format: str) -> None:
    """Raise `UsageError` for a format that is unknown or not built yet. "" is no format, and
    right."""
    if format in LATER:
        raise UsageError("for", f"{format} is not there yet; use {' or '.join(FORMATS)}")
    if format and format not in FORMATS:
        raise UsageError("for", f"{format!r} is not one of {', '.join(FORMATS)}")


def _device_map_rules(
    graph: Graph, machine: Machine, whole: Sequence[str], aliases: Mapping[str, str]
) -> FormatRules:
    units, main = module_units(graph, whole, aliases)
    kinds = [device.kind for device in machine.devices]
    named = np.array([kind == "gpu" for kind in kinds], dtype=bool)
    # A map calls one CPU "cpu", and a module there takes the model's inputs there. Ops on the main
    # device that read inputs beside what a GPU made would then have no device that holds both.
    if "cpu" in kinds and not (named.any() and main.any()):
        named[kinds.index("cpu")] = True
    return FormatRules(units, main, None, named)


def _chain_rules(
    find_units: Callable[[Graph, Sequence[str]], Units],
    graph: Graph,
    machine: Machine,
    whole: Sequence[str],
    _aliases: Mapping[str, str],
) -> FormatRules:
    units = find_units(graph, whole)
    no_op = np.zeros(len(graph), dtype=bool)
    all_devices = np.ones(len(machine.devices), dtype=bool)
    return FormatRules(units, no_op, units.of_op, all_devices)


@dataclass(frozen=True)
class Format:
    """A format that a plan can be made for.

    rules    (graph, machine, modules to keep whole, aliases) -> its rules
    export   (plan, graph) -> the plan in that format. It raises an error if the format cannot say
             the plan
    staged   it has stages: its rules have a `chain`
    """

    rules: Callable[[Graph, Machine, Sequence[str], Mapping[str, str]], FormatRules]
    export: Callable[[Plan, Graph], object]
    staged: bool


FORMATS = {
    "device-map": Format(_device_map_rules, device_map, staged=False),
    "split-points": Format(partial(_chain_rules, stage_units), split_points, staged=True),
    "torchtitan": Format(partial(_chain_rules, torchtitan_units), torchtitan, staged=True),
}
LATER = ("megatron", "vllm")
"""Formats that are not built yet: they are refused by name."""
