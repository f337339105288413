"""Costs of ops on devices: analytic for any machine, measured for the one the program runs on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dovetail.costs.analytic import analytic_costs
from dovetail.costs.cache import CostCache
from dovetail.costs.records import Costs
from dovetail.costs.stages import AnalyticStages, StageWork, kernel_works, stage_rates

if TYPE_CHECKING:
    from dovetail.costs.measured import measured_costs, probed_machine

__all__ = [
    "AnalyticStages",
    "CostCache",
    "Costs",
    "StageWork",
    "analytic_costs",
    "kernel_works",
    "measured_costs",
    "probed_machine",
    "stage_rates",
]


def __getattr__(name: str) -> Any:
    """Import the measuring module when it is first used, because it imports torch, which takes
    seconds."""
    if name not in ("measured_costs", "probed_machine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("dovetail.costs.measured"), name)
