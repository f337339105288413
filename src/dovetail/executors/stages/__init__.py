"""Stages of one device, for real."""
