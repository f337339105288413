"""Runs and times schedules of one device."""
