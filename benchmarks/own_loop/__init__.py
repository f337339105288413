"""Loops of a user's own through `dt.training_step`, beside the same loops in plain PyTorch.

`loops.py` is shared by the scripts and the suite.
"""
