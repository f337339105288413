"""Backends, by name: where server and workers live, and what time means."""
