"""Schedulers decide which kernels of one device run together, stage by stage or on streams."""
