"""Costs of ops on devices: analytic for machines that are not here, measured for those that are."""

from dovetail.costs.records import Costs

__all__ = ["Costs"]
