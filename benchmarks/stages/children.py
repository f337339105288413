"""Networks one after another, each in a process of its own, and their records in one JSON file.

A network that the file holds with the same settings is not measured again: a run that was stopped
goes on where it was.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import keep_json, parser_of, say

from dovetail.machine.local import local_machine
from dovetail.runtime.setup import spin_briefly

NETWORKS = {
    "SqueezeNet 1.1": "zoo:squeezenet_1_1?batch=1",
    "InceptionV3": "zoo:inception_v3?batch=1",
    "RandWire": "zoo:randwire?batch=1",
    "NASNet-A large": "zoo:nasnet_a_large?batch=1",
    "RandWire, small ops": "zoo:randwire?batch=1&size=112",
    "LSTM, unfused": "zoo:rnnlm?layers=4&hidden=128&steps=40&batch=16&vocabulary=100",
}
"""The two RandWire have 78 channels, of images of 224 and 112 pixels; NASNet's are of 331."""
Record = dict[str, Any]


def parser_of_networks(script: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options of a script that measures networks; --out is read, too."""

    def network(text: str) -> str:
        if text not in NETWORKS and not text.startswith("zoo:"):
            known = "; ".join(NETWORKS)
            raise argparse.ArgumentTypeError(f"no {text!r}; there are {known}, and zoo:...")
        return text

    parser = parser_of(script, rounds=rounds, seed=0, again=False, write=False, out=...)
    said = f"zoo:NAME?OPTIONS, or of {'; '.join(NETWORKS)}"
    parser.add_argument(
        "--networks", nargs="+", type=network, default=list(NETWORKS), metavar="NETWORK", help=said
    )
    # A child: this network alone.
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser


def records(
    script: str,
    arguments: argparse.Namespace,
    settings: Record,
    options: Sequence[str],
    one: Callable[[str, argparse.Namespace], Record],
) -> dict[str, Record]:
    """network -> its record, for those asked for that could be measured; all are kept in the file.

    settings   that a record is of
    options    that give them to a child
    one        (model, arguments) -> record, in the child
    """
    settings = {**settings, "threads": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    if arguments.one:
        measured = one(NETWORKS.get(arguments.one, arguments.one), arguments)
        machine = {"machine": local_machine().devices[0].model, "load": os.getloadavg()[0]}
        keep_json(arguments.out, measured | machine)
        sys.exit()
    known: dict[str, Record] = {}
    if arguments.out.exists():
        known = json.loads(arguments.out.read_text("utf-8"))
    for network in arguments.networks:
        model = NETWORKS.get(network, network)
        if not arguments.again and _is_of(known.get(network), model, settings):
            continue
        began = time.perf_counter()
        measured = _in_child([script, "--one", network, *options])
        say(f"{network}: {time.perf_counter() - began:.0f} s")
        if measured is not None:
            known[network] = {"model": model, "settings": settings, **measured}
            keep_json(arguments.out, known)
    return {
        network: known[network]
        for network in arguments.networks
        if _is_of(known.get(network), NETWORKS.get(network, network), settings)
    }


def _is_of(record: Record | None, model: str, settings: Record) -> bool:
    return record is not None and (record["model"], record["settings"]) == (model, settings)


def _in_child(command: Sequence[str]) -> Record | None:
    """The record that a process wrote; what it says goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        spin_briefly()  # as `dovetail schedule` does; the child inherits it
        ran = subprocess.run(  # the tables alone are for stdout
            [sys.executable, *command, "--out", str(path)], stdout=2, check=False
        )
        if ran.returncode:
            say(f"failed with {ran.returncode}; going on")
            return None
        return dict(json.loads(path.read_text("utf-8")))


def said(doing: str, _fraction: float, _best: float | None = None) -> None:
    """A `Progress` that says on stderr what is begun."""
    if doing not in _SAID[-1:]:
        say(f"  {time.strftime('%H:%M:%S')} {doing}")
        _SAID.append(doing)


_SAID: list[str] = []
