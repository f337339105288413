"""Compiling the kernels once, before several workers would each compile all of them.

The first run on a machine compiles for the better part of a minute, or for minutes where several
processes do it at once; what one has compiled is on disk, and the others load it.
"""

from collections.abc import Callable
from contextlib import suppress

from dovetail.bench.methods import METHODS, PLAIN, lay_ground, run_method
from dovetail.graph.synthetic import layered
from dovetail.machine import parse_machine

_OPS, _BUDGET, _MACHINE = 300, "40e", "2 x k80 + haswell"


def compile_kernels(tell: Callable[[str], None], _complain: Callable[[str], None]) -> list[str]:
    """Run every method on a small graph, for what they compile."""
    ground = lay_ground(layered(_OPS, training=True), parse_machine(_MACHINE), PLAIN, seed=0)
    for method in METHODS[PLAIN]:
        tell(f"compiling {method}")
        with suppress(Exception):  # what fails here fails in every row, which tell of it
            run_method(ground, method, _BUDGET)
    return []
