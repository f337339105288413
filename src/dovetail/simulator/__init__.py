"""Simulates plans event by event, and proves bounds that no plan can beat."""

from dovetail.simulator.bounds import LowerBound, lower_bound
from dovetail.simulator.loads import LoadModel, device_loads, group_loads, load_model
from dovetail.simulator.simulate import BatchEvaluation, Simulator

__all__ = [
    "BatchEvaluation",
    "LoadModel",
    "LowerBound",
    "Simulator",
    "device_loads",
    "group_loads",
    "load_model",
    "lower_bound",
]
