"""Machines: records, TOML files, presets, and the machine we stand on."""

from dovetail.machine.files import load_machine, save_machine
from dovetail.machine.local import local_machine
from dovetail.machine.presets import PRESETS, parse_machine
from dovetail.machine.records import Device, Link, Machine

__all__ = [
    "PRESETS",
    "Device",
    "Link",
    "Machine",
    "load_machine",
    "local_machine",
    "parse_machine",
    "save_machine",
]
