"""Random draws in kernels: xorshift64* (Marsaglia, "Xorshift RNGs", 2003,
https://doi.org/10.18637/jss.v008.i14), its state in an array of one."""

import numpy as np
from numpy.typing import NDArray

from dovetail.simulator.compiling import inlined

UInt64 = NDArray[np.uint64]


@inlined
def below(random: UInt64, count: int) -> int:
    """0 to count - 1."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    top = np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33))
    return int((top * count) >> 31)


@inlined
def exponential(random: UInt64) -> float:
    """Exp(1)."""
    return float(-np.log((below(random, 2**31 - 1) + 1) / 2.0**31))
