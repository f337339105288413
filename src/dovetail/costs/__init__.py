"""Costs of ops on devices: analytic for machines that are not here, measured for those that are."""

from dovetail.costs.analytic import analytic_costs
from dovetail.costs.cache import CostCache
from dovetail.costs.measured import measured_costs
from dovetail.costs.probe import probed_machine
from dovetail.costs.records import Costs

__all__ = ["CostCache", "Costs", "analytic_costs", "measured_costs", "probed_machine"]
