"""Random modules from a grammar, and whether their captured steps are plain PyTorch's.

Shared by `run.py` and the suite.
"""
