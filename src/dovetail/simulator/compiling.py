"""How kernels are compiled: see `dovetail.runtime.compiling`."""

from dovetail.runtime.compiling import inlined, kernel

__all__ = ["inlined", "kernel"]
