"""Asynchronous data-parallel training: update rules, a parameter server, workers, backends.

This package knows arrays and a callable that computes a gradient, and no graphs. Importing it does
not import torch.
"""
