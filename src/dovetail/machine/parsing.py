"""The machine that a MACHINE text names."""

import re
from pathlib import Path

from dovetail.machine.files import load_machine
from dovetail.machine.local import local_machine
from dovetail.machine.papers import PAPER_MACHINES, paper_machine
from dovetail.machine.presets import combine
from dovetail.machine.records import Machine


def parse_machine(text: str) -> Machine:
    """The machine that `text` names: "here", "here/1", "here/2", "FILE.toml", a paper's
    ("rl17/2"), or presets with counts.

    The rates of `here` are typical ones until `costs.probe` measures them. Raises
    `UnknownPresetError`, or what loading the file raises.
    """
    if names_here(text):
        return local_machine(int(text[5:]) if text[5:] else None)
    if text.endswith(".toml"):
        return load_machine(Path(text))
    if text in PAPER_MACHINES:
        return paper_machine(text)
    return combine(text)


def names_here(text: str) -> bool:
    """Is this the text of the machine we stand on, "here" or "here/2"?"""
    return re.fullmatch(r"here(/[0-9]{1,9})?", text) is not None
