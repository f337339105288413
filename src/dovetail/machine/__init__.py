"""Machines: records, TOML files, presets, and `here`, the machine that the program runs on."""

from dovetail.machine.files import load_machine, save_machine
from dovetail.machine.local import check_local, local_machine, names_here
from dovetail.machine.presets import (
    PAPER_MACHINES,
    PRESETS,
    chip_of_driver,
    emulated_dtypes,
    on_host,
    parse_machine,
)
from dovetail.machine.records import Chip, Device, Link, Machine

__all__ = [
    "PAPER_MACHINES",
    "PRESETS",
    "Chip",
    "Device",
    "Link",
    "Machine",
    "check_local",
    "chip_of_driver",
    "emulated_dtypes",
    "load_machine",
    "local_machine",
    "names_here",
    "on_host",
    "parse_machine",
    "save_machine",
]
