"""Executors: a checked plan, for real. So far on the CPU devices of one machine."""

from dovetail.executors.placed import Measurement, Placed, run
from dovetail.executors.workers import Workers

__all__ = [
    "Measurement",
    "Placed",
    "Workers",
    "run",
]
