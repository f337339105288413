"""Executors run a checked plan for real, on the CPU devices and GPUs of one machine."""

from dovetail.executors.loaded import LoadedStep, Measurement
from dovetail.executors.placed import PlacedNetwork, run
from dovetail.executors.plain import MODES, PlainNetwork
from dovetail.executors.workers import Workers

__all__ = ["MODES", "LoadedStep", "Measurement", "PlacedNetwork", "PlainNetwork", "Workers", "run"]
