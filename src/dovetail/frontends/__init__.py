"""Frontends: networks -> Captured (graph + program + source)."""
