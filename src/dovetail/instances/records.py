"""Instance: what a published file holds, as records, and the constants of that reading."""

from dataclasses import dataclass

from dovetail.costs import Costs
from dovetail.graph import Graph
from dovetail.machine import Machine

MILLISECOND = 1e-3
LINK_BYTES_PER_SECOND = 1e9
"""Of an accelerator's links. Any figure would do: bytes to send are derived from it."""
FREE_BYTES_PER_SECOND = 1e300
"""Of a CPU's links: host memory is its own."""
MOST_DEVICES = 1024
"""Of a kind. A file that names more means to say: any number."""


@dataclass(frozen=True, eq=False)
class Instance:
    """What a file holds. `name` is the file's, without folder and ending."""

    name: str
    graph: Graph
    machine: Machine
    costs: Costs
