"""Random modules from a grammar, and whether their captured steps are plain PyTorch's.

Shared by the suite and `benchmarks/random_modules`.
"""
