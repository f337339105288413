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

import torch

from dovetail.machine.local import local_machine
from dovetail.runtime.files import write_atomically
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


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options that the scripts share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--networks",
        nargs="+",
        type=_network,
        default=list(NETWORKS),
        metavar="NETWORK",
        help=f"zoo:NAME?OPTIONS, or of {'; '.join(NETWORKS)}",
    )
    add("--rounds", type=count, default=25, help="in which all take turns; default %(default)s")
    add("--seed", type=int, default=0)
    add("--again", action="store_true", help="measure what the file holds already")
    add("--write", action="store_true", help="put the tables into README.md")
    add("--out", type=Path, required=True, help="the JSON file that is read and written")
    add("--one", default="", help=argparse.SUPPRESS)  # a child: this network alone
    return parser


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _network(text: str) -> str:
    if text not in NETWORKS and not text.startswith("zoo:"):
        known = "; ".join(NETWORKS)
        raise argparse.ArgumentTypeError(f"no {text!r}; there are {known}, and zoo:...")
    return text


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
        record = {**one(NETWORKS.get(arguments.one, arguments.one), arguments), **_machine()}
        write_atomically(arguments.out, json.dumps(record))
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
        print(f"{network}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        if measured is not None:
            known[network] = {"model": model, "settings": settings, **measured}
            write_atomically(arguments.out, json.dumps(known, indent=1))
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
            print(f"failed with {ran.returncode}; going on", file=sys.stderr)
            return None
        return dict(json.loads(path.read_text("utf-8")))


def _machine() -> Record:
    return {"machine": local_machine().devices[0].model, "load": os.getloadavg()[0]}


def said(doing: str, _fraction: float, _best: float | None = None) -> None:
    """A `Progress` that says on stderr what is begun."""
    if doing not in _SAID[-1:]:
        print(f"  {time.strftime('%H:%M:%S')} {doing}", file=sys.stderr)
        _SAID.append(doing)


_SAID: list[str] = []
