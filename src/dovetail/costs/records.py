"""Costs: how long every op takes on every device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import CostError
from dovetail.graph import Graph

SOURCES = ("analytic", "measured", "given")


@dataclass(frozen=True, eq=False)
class Costs:
    """compute_seconds [ops, devices]: inf where the device cannot run the op, 0 for source ops.

    source   "analytic", "measured" or "given"
    """

    compute_seconds: NDArray[np.float64]
    source: str

    def __post_init__(self) -> None:
        seconds = np.array(self.compute_seconds, dtype=np.float64)
        seconds.flags.writeable = False
        object.__setattr__(self, "compute_seconds", seconds)
        assert self.source in SOURCES, self.source

    def check(self, graph: Graph) -> None:
        """Raise `CostError` for an op with a negative or missing (NaN) cost, or with no row."""
        if self.compute_seconds.ndim != 2 or len(self.compute_seconds) != len(graph):
            raise CostError(graph.names[0], f"costs have shape {self.compute_seconds.shape}")
        bad = ~(self.compute_seconds >= 0)
        if bad.any():
            op = int(np.flatnonzero(bad.any(axis=1))[0])
            raise CostError(graph.names[op], f"seconds are {self.compute_seconds[op].tolist()}")
