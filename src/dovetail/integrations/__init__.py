"""Lets other trainers train by an update rule: one file for each, which needs its library."""
