"""The command line where things go wrong late, or would without a look ahead."""

import json
import subprocess
import sys

import pytest

from dovetail.cli import arguments, showing
from dovetail.graph import save_graph
from dovetail.pipeline import sources
from tests.pipeline.test_cli import KEYS, TWO_GPUS
from tests.support.builders import graph_of

EVIL = "\x1b]0;x\x07"


@pytest.fixture
def no_capture(monkeypatch):
    """Fails where a command captures a network or measures the machine: long work."""

    def long_work(*_arguments, **_options):
        raise AssertionError("long work began")

    monkeypatch.setattr(arguments, "resolve", long_work)
    monkeypatch.setattr(showing, "resolve", long_work)
    monkeypatch.setattr(sources, "probed_machine", long_work)


def test_no_feasible_plan_prints_every_stable_key(dovetail):
    caps = [word for d in ("p100:0", "p100:1", "haswell") for word in ("--cap", f"{d}=1KiB")]
    etf = ("--placer", "etf")
    status, out, _ = dovetail(
        "plan", "tests.support.small_models:branches", *TWO_GPUS, *caps, *etf, "--json"
    )
    assert status == 3
    printed = json.loads(out)
    assert set(printed) == KEYS | {"error", "device", "needed_bytes", "available_bytes"}
    assert (printed["feasible"], printed["value"], printed["baselines"]) == (False, None, None)
    assert (printed["placer"], printed["objective"]) == ("etf", "step")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--budget", "soon"), "soon"),
        (("--seed", -1), "seed"),
        (("--pin", "left=gpu9"), "gpu9"),
        (("--cap", "gpu9=1GiB"), "gpu9"),
        (("--cap", "haswell=1e400"), "1e400"),
        (("--placer", "magic"), "magic"),
        (("--objective", "joy"), "joy"),
        (("--machine", "3 x k81"), "k81"),
    ],
)
def test_wrong_options_are_refused_before_the_long_work(dovetail, no_capture, arguments, complaint):
    status, _, err = dovetail("plan", "tests.support.small_models:trained", *TWO_GPUS, *arguments)
    assert status == 2
    assert complaint in err


@pytest.mark.parametrize(
    "command", [("capture", "tests.support.small_models:trained"), ("machine", "here")]
)
def test_an_unwritable_output_is_refused_before_the_long_work(dovetail, no_capture, command):
    status, _, err = dovetail(*command, "--out", "/nowhere/out")
    assert status == 2
    assert "/nowhere/out" in err


BOX = """
name = "box"
host = "a"
[[devices]]
name = "a"
kind = "cpu"
model = "other"
bandwidth_bytes_per_second = 1e10
"""


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [
        ("memory_bytes = 1000000000\ncores = [0]", "'other'"),
        (f"memory_bytes = {2**63}", "memory_bytes"),
    ],
)
def test_a_file_of_an_impossible_machine_is_refused_before_the_long_work(
    dovetail, no_capture, tmp_path, rest, complaint
):
    path = tmp_path / "box.toml"
    path.write_text(BOX + rest)
    status, _, err = dovetail("plan", "tests.support.small_models:branches", "--machine", path)
    assert status == 2
    assert complaint in err


def test_a_graph_without_ops_exits_with_2(dovetail, tmp_path):
    save_graph(graph_of(), tmp_path / "g.json")
    status, _, err = dovetail("plan", tmp_path / "g.json", *TWO_GPUS)
    assert status == 2
    assert "no ops" in err


def test_a_plan_of_a_saved_graph_is_reported_by_itself(dovetail, tmp_path):
    graph, path, trace = (tmp_path / name for name in ("g.json.gz", "plan.json", "trace.json"))
    dovetail("capture", "tests.support.small_models:branches", "--out", graph)
    assert dovetail("plan", graph, *TWO_GPUS, "--out", path)[0] == 0
    source = json.loads(path.read_text())["source"]
    assert source["model"] == str(graph)
    assert source["torch_version"].startswith("2.")
    page = tmp_path / "plan.html"
    status, _, err = dovetail("report", path, "--out", page, "--trace", trace)
    assert status == 0, err
    assert page.exists()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}


def test_plan_and_run_say_what_bounds_the_plan(dovetail, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = dovetail(
        "plan",
        "tests.support.small_models:branches",
        "--machine",
        "here",
        "--budget",
        "5e",
        "--out",
        path,
    )
    assert status == 0, err
    assert "critical chain" in out
    status, out, err = dovetail("run", path, "tests.support.small_models:branches", "--steps", 2)
    assert status == 0, err
    assert "critical chain" in out


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_killed_in_a_run_exits_with_1_and_names_device_and_op(
    dovetail, monkeypatch, tmp_path
):
    from tests.support import faults

    path, victims = tmp_path / "plan.json", []
    status, _, err = dovetail(
        "plan",
        "tests.support.small_models:branches",
        "--machine",
        "here/1",
        "--budget",
        "5e",
        "--out",
        path,
    )
    assert status == 0, err
    resolve = sources.resolve_network

    def with_a_fault(*arguments, **options):
        captured = resolve(*arguments, **options)
        op = max(op for op, call in enumerate(captured.program.calls) if call is not None)
        victims.append(captured.graph.names[op])
        return faults.with_fault(captured, op, faults.kill_self)

    monkeypatch.setattr(sources, "resolve_network", with_a_fault)
    status, out, err = dovetail("run", path, "tests.support.small_models:branches")
    assert status == 1
    assert "device cpu0 died (killed by SIGKILL)" in err
    assert victims[0] in err
    assert out == ""


@pytest.mark.parametrize("argument", [f"zoo:{EVIL}", f"{EVIL}.json"])
def test_control_characters_never_reach_the_terminal(dovetail, argument):
    status, _, err = dovetail("plan", argument, *TWO_GPUS)
    assert status == 2
    assert "\x1b" not in err
    assert "\x07" not in err
    assert r"\x1b]0;x\x07" in err


def test_a_function_in_the_current_folder_is_found_by_an_installed_script(tmp_path):
    (tmp_path / "my_models.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2, 3), (torch.ones(1, 2),)\n"
    )
    # -P: like an installed script, with nothing of the current folder on sys.path.
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "dovetail",
            "capture",
            "my_models:build",
            "--out",
            "g.json",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "g.json").exists()


def test_what_a_function_cannot_import_is_named(dovetail, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wishful_models.py").write_text("def build():\n    import no_such_backend\n")
    status, _, err = dovetail("plan", "wishful_models:build", *TWO_GPUS)
    assert status == 2
    assert "No module named 'no_such_backend' (at wishful_models.py:2: import no_such" in err


def test_a_ctrl_c_before_the_search_exits_with_130(dovetail, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dovetail.pipeline.sources.resolve_model", interrupted)
    status, out, err = dovetail("plan", "tests.support.small_models:branches", *TWO_GPUS)
    assert (status, out) == (130, "")
    assert "interrupted" in err
