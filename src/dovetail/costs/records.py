"""The record of costs: how long each op takes on each device, and what each send moves."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import CostError
from dovetail.graph import Graph

SOURCES = ("analytic", "measured", "given")


@dataclass(frozen=True, eq=False)
class Costs:
    """The seconds of ops on devices, and the bytes of sends.

    compute_seconds   [ops, devices] inf if the device cannot run the op, 0 for source ops
    source            "analytic", "measured" or "given"
    sent_bytes        [tensors] the bytes that a send of each tensor moves, if they differ from the
                      bytes that it occupies; None: its own bytes
    """

    compute_seconds: NDArray[np.float64]
    source: str
    sent_bytes: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        for name in ("compute_seconds", "sent_bytes"):
            if getattr(self, name) is not None:
                values = np.array(getattr(self, name), dtype=np.float64)
                values.flags.writeable = False
                object.__setattr__(self, name, values)
        assert self.source in SOURCES, self.source

    def check(self, graph: Graph) -> None:
        """Raise `CostError` for an op with a negative or missing (NaN) cost, or with no row."""
        if self.compute_seconds.ndim != 2 or len(self.compute_seconds) != len(graph):
            raise CostError(graph.names[0], f"costs have shape {self.compute_seconds.shape}")
        # NaN fails this comparison too.
        bad = ~(self.compute_seconds >= 0)
        if bad.any():
            op = int(np.flatnonzero(bad.any(axis=1))[0])
            raise CostError(graph.names[op], f"seconds are {self.compute_seconds[op].tolist()}")
        sent = self.sends_of(graph)
        bad = ~((sent >= 0) & (sent < np.inf))
        if len(sent) != graph.tensors or bad.any():
            tensor = int(np.flatnonzero(bad)[0]) if bad.any() else -1
            name = graph.names[int(graph.producers[tensor])]
            raise CostError(name, f"bytes sent are {sent[tensor] if bad.any() else sent.shape}")

    def sends_of(self, graph: Graph) -> NDArray[np.float64]:
        """Return [tensors] the bytes that a send of each tensor moves."""
        if self.sent_bytes is not None:
            return self.sent_bytes
        return graph.tensor_bytes.astype(np.float64)
