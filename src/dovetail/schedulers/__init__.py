"""Stages of one device: which ops run together, one stage after another."""
