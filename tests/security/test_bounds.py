"""No file asks for more memory or time than the bounds that SECURITY.md names."""

import json
import os
import socket
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dovetail.cli.predicting import _read_arrays, _read_csv
from dovetail.cli.weights import load_weights
from dovetail.errors import (
    DovetailError,
    FileFormatError,
    MachineError,
    PolicyFileError,
    UsageError,
)
from dovetail.frontends.models import load_exported
from dovetail.frontends.onnx import load_onnx
from dovetail.graph.files import load_graph
from dovetail.instances import load_instance
from dovetail.machine import files as machine_files
from dovetail.machine import load_machine, parse_machine
from dovetail.machine.records import MOST_DEVICES
from dovetail.pipeline.prices import read_place
from dovetail.placers.learned import files as policy_files
from dovetail.placers.learned.files import load_policy
from dovetail.plans import load_plan, save_plan
from dovetail.training.backends.contract import Assignment
from dovetail.training.history import History
from dovetail.training.step_times import read_trace
from dovetail.training.supervisor import temporary_storage
from dovetail.transforms import replicate
from dovetail.transforms.copying import MOST_OPS
from tests.reports.test_page import small_report
from tests.support.histories import make_history
from tests.support.report_samples import training_chain


def test_a_machine_file_is_bounded_in_bytes_and_in_parts_of_a_key(tmp_path, monkeypatch):
    path = tmp_path / "m.toml"
    path.write_text(".".join(["a"] * 17) + " = 1\n")
    with pytest.raises(FileFormatError, match="a key of more than 16 parts"):
        load_machine(path)
    monkeypatch.setattr(machine_files, "MOST_FILE_BYTES", 2**10)
    path.write_text("#" * 2**11)
    with pytest.raises(FileFormatError, match="it is larger than 1 KiB"):
        load_machine(path)


READERS = {
    "graph.json": load_graph,
    "graph.json.gz": load_graph,
    "plan.json": load_plan,
    "map.json": read_place,
    "instance.json": load_instance,
    "run.json": History.load,
    "run.csv": History.load,
    "steps.csv": read_trace,
    "machine.toml": load_machine,
    "policy.safetensors": load_policy,
    "model.pt2": load_exported,
    "model.onnx": load_onnx,
    "weights.pt": partial(load_weights, None),
    "weights.safetensors": partial(load_weights, None),
    "data.npy": _read_arrays,
    "data.csv": _read_csv,
}


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_not_waited_for(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path has 107 bytes at most
    path = Path(name)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        socket.socket(socket.AF_UNIX).bind(name)
    # Who opens a pipe that nobody writes waits, until it is interrupted.
    monkeypatch.setattr("builtins.open", refusing(open))
    with pytest.raises(FileFormatError, match=r"name a file|no such file") as raised:
        READERS[name](path)
    assert "\n" not in raised.value.line


def refusing(opens):
    """`open`, which fails where it would wait."""

    def tried(name, *args, opener=None, **options):
        assert opener is not None, f"{name} is opened whatever it is"
        return opens(name, *args, opener=opener, **options)

    return tried


def test_a_machine_has_no_more_devices_than_can_be_planned_for():
    machine = parse_machine("1 x k80 + haswell")
    devices = [replace(machine.devices[0], name=f"d{i}") for i in range(MOST_DEVICES + 1)]
    with pytest.raises(MachineError, match=f"{MOST_DEVICES}"):
        replace(machine, devices=tuple(devices), links=(), host=devices[0].name)


def test_a_policy_is_bounded_in_bytes_and_in_what_its_header_says(tmp_path, monkeypatch):
    path = tmp_path / "p.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(PolicyFileError, match="cut off"):
        load_policy(path)
    monkeypatch.setattr(policy_files, "MOST_BYTES", 2**10)
    path.write_bytes(bytes(2**11))
    with pytest.raises(PolicyFileError, match="it is larger than 1 KiB"):
        load_policy(path)


def test_bytes_of_a_plan_are_bounded(tmp_path):
    path = tmp_path / "p.json"
    save_plan(small_report().plan, path)
    saved = json.loads(path.read_text())
    load_plan(path)
    for promised in (2**62 + 1, -1, 10**30):
        saved["peak_memory_bytes"][0] = promised
        path.write_text(json.dumps(saved))
        with pytest.raises(DovetailError, match="peak_memory_bytes"):
            load_plan(path)


def test_replicas_make_no_more_ops_than_can_be_planned_for():
    graph = training_chain(4)
    with pytest.raises(UsageError, match=f"are more than {MOST_OPS} ops"):
        replicate(graph, MOST_OPS // len(graph) + 1)


def test_a_history_is_bounded_in_depth(tmp_path):
    path, deep = tmp_path / "h.json", {}
    make_history().save(path)
    History.load(path)
    for _ in range(101):
        deep = {"a": deep}
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"meta": saved["meta"] | {"a": deep}}))
    with pytest.raises(FileFormatError, match="nested more than 100 times"):
        History.load(path)


def test_temporary_folders_are_for_the_user_alone_and_have_names_of_their_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assignment = Assignment.__new__(Assignment)
    object.__setattr__(assignment, "theta", np.zeros(4))
    with temporary_storage(assignment) as one, temporary_storage(assignment) as other:
        assert one.folder != other.folder
        for storage in (one, other):
            assert stat.S_IMODE(storage.folder.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []
