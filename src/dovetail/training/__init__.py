"""Asynchronous data-parallel training: update rules, a parameter server, workers, backends.

Knows arrays and a callable that computes a gradient, never graphs. Imports no torch by itself.
"""
