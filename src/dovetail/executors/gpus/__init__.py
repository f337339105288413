"""Runs the GPUs of this machine, all of them from one process."""
