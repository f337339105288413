"""How kernels are compiled: no GIL, cached on disk, and no memory manager.

numba counts references to every array on every call, atomically; with dozens of arrays that costs
twenty times the work itself. The kernels allocate nothing, so the manager is off (`_nrt`, which
numba's type stubs do not know). Helpers are inlined, so that their arrays are not passed at all.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

_options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}


def kernel(function: Function) -> Function:
    """Compile what Python calls."""
    compiled: Function = numba.njit(**_options)(function)
    return compiled


def inlined(function: Function) -> Function:
    """Compile what only kernels call."""
    compiled: Function = numba.njit(forceinline=True, **_options)(function)
    return compiled
