"""The command line, in process; every wrong input ends with its own status and message."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from dovetail import cli
from dovetail.simulator import Simulator

pytestmark = pytest.mark.usefixtures("forked_workers")
TWO_GPUS = ("--machine", "2 x p100 + haswell", "--budget", "200e")
KEYS = {
    "model", "ops", "groups", "machine", "devices", "objective", "value", "lower_bound",
    "bound_proof", "gap", "placer", "feasible", "interrupted", "planning_seconds",
    "peak_memory_bytes", "baselines", "plan", "unit", "contiguous", "found_seconds", "stages",
    "whole", "for", "notes", "min_gain", "way", "measured", "interval",
}  # fmt: skip


def test_help_and_imports_of_the_package_wait_for_no_torch():
    code = "import sys, dovetail, dovetail.cli; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize(
    ("typed", "may"),
    [
        ("train m:f", True),
        ("train m:f --backend processes", True),
        ("train m:f --backend threads", False),
        ("train m:f --backend=simulated", False),
        ("train --rules", False),
        ("run plan.json --help", False),
    ],
)
def test_a_fork_server_is_started_only_where_processes_may_start(typed, may):
    from dovetail.cli import _may_fork

    assert _may_fork(typed.split()) is may


def test_no_command_shows_the_help(dovetail):
    status, out, _ = dovetail()
    assert status in (0, 2)
    assert "plan" in out


def test_plan_prints_one_json_object_with_its_stable_keys(dovetail, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = dovetail(
        "plan", "tests.support.small_models:branches", *TWO_GPUS, "--json", "--out", path
    )
    assert status == 0, err
    printed = json.loads(out)
    assert set(printed) == KEYS
    assert printed["plan"] == str(path)
    assert printed["feasible"] is True
    assert printed["lower_bound"] <= printed["value"]
    least = min(v for v in printed["baselines"].values() if v is not None)
    assert printed["value"] * (1 - printed["min_gain"]) <= least
    assert {"single", "expert", "balanced", "etf"} <= set(printed["baselines"])


def test_the_same_seed_and_evaluations_give_the_same_plan(dovetail, tmp_path):
    plans = []
    for name in ("a.json", "b.json"):
        dovetail(
            "plan",
            "tests.support.small_models:trained",
            "--train",
            "adam",
            *TWO_GPUS,
            "--out",
            tmp_path / name,
        )
        plan = json.loads((tmp_path / name).read_text())
        plan.pop("planning_seconds")
        plan.pop("found_seconds")
        plans.append(plan)
    assert plans[0] == plans[1]


def test_plan_without_json_prints_tables(dovetail):
    status, out, _ = dovetail("plan", "tests.support.small_models:branches", *TWO_GPUS)
    assert status == 0
    assert "single" in out
    assert "p100:0" in out


def test_capture_saves_a_graph_that_can_be_planned(dovetail, tmp_path):
    path = tmp_path / "g.json.gz"
    assert (
        dovetail("capture", "tests.support.small_models:trained", "--train", "sgd", "--out", path)[
            0
        ]
        == 0
    )
    status, out, _ = dovetail("plan", path, *TWO_GPUS, "--json")
    assert status == 0
    assert json.loads(out)["ops"] > 20


def test_a_training_plan_runs_here_and_is_reported(dovetail, here, tmp_path):
    path, page = tmp_path / "plan.json", tmp_path / "page.html"
    status, _, err = dovetail(
        "plan", "tests.support.small_models:trained", "--train", "adam", "--machine", here,
        "--budget", "50e", "--out", path, "--report", tmp_path / "predicted.html",
    )  # fmt: skip
    assert status == 0, err
    status, out, err = dovetail(
        "run", path, "tests.support.small_models:trained", "--steps", 3, "--json", "--report", page,
        "--trace", tmp_path / "trace.json",
    )  # fmt: skip
    assert status == 0, err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {e["pid"] for e in events if e["ph"] == "X"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "predicted", "measured"
    ]  # fmt: skip
    assert spans == {0, 1}
    printed = json.loads(out)
    assert set(printed) == {
        "predicted_seconds", "median_seconds", "mean_seconds", "devices_seconds", "steps", "error",
        "others_cores",
    }  # fmt: skip
    assert printed["median_seconds"] > 0
    assert "measured" in page.read_text()
    plan_page = tmp_path / "plan.html"
    report = ("report", path, "tests.support.small_models:trained")
    assert dovetail(*report, "--out", plan_page)[0] == 0
    assert plan_page.exists()


def test_a_plan_imports_no_function_by_itself(dovetail, tmp_path):
    path = tmp_path / "plan.json"
    dovetail("plan", "tests.support.small_models:branches", *TWO_GPUS, "--out", path)
    status, _, err = dovetail("run", path)
    assert status == 2
    assert "tests.support.small_models:branches" in err
    assert "name MODEL" in err


def test_a_plan_is_reported_and_exported_from_the_graph_that_it_keeps(
    dovetail, tmp_path, monkeypatch
):
    path, pages = tmp_path / "plan.json", [tmp_path / name for name in ("a.html", "b.html")]
    (tmp_path / "gone.py").write_text("from tests.support.small_models import branches\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert dovetail("plan", "gone:branches", *TWO_GPUS, "--out", path)[0] == 0
    assert dovetail("report", path, "gone:branches", "--out", pages[0])[0] == 0
    (tmp_path / "gone.py").unlink()
    sys.modules.pop("gone")
    status, _, err = dovetail("report", path, "--out", pages[1])
    assert status == 0, err
    assert pages[0].read_bytes() == pages[1].read_bytes()
    status, out, err = dovetail("export", path, "--to", "trace")
    assert status == 0, err
    assert json.loads(out)["traceEvents"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept["ops"]["flops"].__setitem__(0, 7), "another graph than the plan's"),
        (lambda kept: kept["ops"].pop("names"), "planned_graph"),
        (lambda kept: kept.clear(), "planned_graph"),
    ],
)
def test_a_plan_with_another_graph_than_its_own_is_refused(dovetail, tmp_path, change, said):
    path = tmp_path / "plan.json"
    dovetail("plan", "tests.support.small_models:branches", *TWO_GPUS, "--out", path)
    file = json.loads(path.read_text())
    change(file["planned_graph"])
    path.write_text(json.dumps(file))
    for command in ("report", "export", "run"):
        status, _, err = dovetail(command, path, *(["zoo:none"] if command == "run" else []))
        assert status == 2
        assert said in err


def test_a_plan_for_another_graph_names_both(dovetail, tmp_path):
    path = tmp_path / "plan.json"
    dovetail("plan", "tests.support.small_models:branches", *TWO_GPUS, "--out", path)
    status, _, err = dovetail("report", path, "tests.support.small_models:other")
    assert status == 2
    assert err.count("graph") >= 2


def test_a_plan_for_another_machine_is_refused(dovetail, here, tmp_path):
    path = tmp_path / "plan.json"
    dovetail(
        "plan",
        "tests.support.small_models:branches",
        "--machine",
        here,
        "--budget",
        "20e",
        "--out",
        path,
    )
    plan = json.loads(path.read_text())
    for device in plan["machine"]["devices"]:
        device["model"] = "another processor"
    path.write_text(json.dumps(plan))
    status, _, err = dovetail("run", path, "tests.support.small_models:branches")
    assert status == 2
    assert "this machine is" in err


def test_a_broken_promise_is_refused(dovetail, tmp_path):
    path = tmp_path / "plan.json"
    dovetail("plan", "tests.support.small_models:branches", *TWO_GPUS, "--out", path)
    plan = json.loads(path.read_text())
    plan["value"] /= 2
    path.write_text(json.dumps(plan))
    status, _, err = dovetail("report", path, "tests.support.small_models:branches")
    assert status == 2
    assert "promises" in err


def test_no_plan_fits_exits_with_3_and_the_bytes_that_lack(dovetail):
    caps = [word for d in ("p100:0", "p100:1", "haswell") for word in ("--cap", f"{d}=1KiB")]
    status, out, err = dovetail(
        "plan", "tests.support.small_models:trained", "--train", "adam", *TWO_GPUS, *caps, "--json",
        "--placer", "etf",
    )  # fmt: skip
    assert status == 3
    printed = json.loads(out)
    assert printed["feasible"] is False
    assert printed["value"] is None
    assert printed["needed_bytes"] > printed["available_bytes"]
    assert "bytes are lacking" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--pin", "nothing.like.it=haswell"), "matches no op"),
        (("--pin", "left=gpu9"), "no device named 'gpu9'"),
        (("--pin", "left"), "NAME=VALUE"),
        (("--cap", "haswell=lots"), "not a size"),
        (("--cap", "gpu9=1GiB"), "no device named 'gpu9'"),
        (("--placer", "magic"), "magic"),
        (("--objective", "joy"), "joy"),
        (("--budget", "soon"), "soon"),
        (("--machine", "3 x k81"), "k80"),
        (("--machine", "nothing.toml"), "nothing.toml"),
        (("--train", "magic"), "magic"),
        (("--out", "/nowhere/plan.json"), "/nowhere/plan.json"),
        (("--report", "/nowhere/plan.html"), "/nowhere/plan.html"),
        (("--surprise",), "surprise"),
    ],
)
def test_wrong_options_exit_with_2_and_say_why(dovetail, arguments, complaint):
    status, out, err = dovetail("plan", "tests.support.small_models:trained", *TWO_GPUS, *arguments)
    assert status == 2
    assert complaint in err
    assert out == ""


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("zoo:nothing", "rnnlm"),
        ("zoo:rnnlm?hiden=3", "hiden"),
        ("zoo:rnnlm?hidden=many", "many"),
        ("no.such.module:build", "no.such.module"),
        ("tests.support.small_models:nothing", "nothing"),
        ("model.txt", "MODEL"),
        ("nothing.json", "no such file"),
    ],
)
def test_wrong_models_exit_with_2_and_say_why(dovetail, model, complaint):
    status, _, err = dovetail("plan", model, *TWO_GPUS)
    assert status == 2
    assert complaint in err


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "dovetail.graph"}'])
def test_malformed_json_exits_with_2(dovetail, tmp_path, text):
    for name, command in (("g.json", "plan"), ("p.json", "run")):
        (tmp_path / name).write_text(text)
        status, _, err = dovetail(command, tmp_path / name)
        assert status == 2
        assert name in err


def test_malformed_toml_exits_with_2(dovetail, tmp_path):
    (tmp_path / "m.toml").write_text("name = ")
    status, _, err = dovetail(
        "plan", "tests.support.small_models:branches", "--machine", tmp_path / "m.toml"
    )
    assert status == 2
    assert "m.toml" in err


def test_a_graph_with_a_cycle_exits_with_2_and_names_it(dovetail, tmp_path):
    path = tmp_path / "g.json"
    dovetail("capture", "tests.support.small_models:branches", "--out", path)
    graph = json.loads(path.read_text())
    inputs, producers = graph["ops"]["inputs"], graph["tensors"]["producers"]
    reader = next(
        i for i in range(len(producers)) if inputs["offsets"][i] < inputs["offsets"][i + 1]
    )
    inputs["tensors"][inputs["offsets"][reader]] = producers.index(reader)
    path.write_text(json.dumps(graph))
    status, _, err = dovetail("plan", path, *TWO_GPUS)
    assert status == 2
    assert "cycle" in err
    assert graph["ops"]["names"][reader] in err


def test_ctrl_c_during_a_search_returns_the_best_so_far(dovetail, monkeypatch):
    searching = threading.Event()
    evaluate = Simulator.evaluate

    def evaluated(self, *arguments, **options):
        evaluation = evaluate(self, *arguments, **options)
        searching.set()
        return evaluation

    monkeypatch.setattr(Simulator, "evaluate", evaluated)

    def interrupt():
        searching.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    status, out, _ = dovetail(
        "plan", "zoo:rnnlm?hidden=8&steps=6&batch=2&vocabulary=50",
        "--machine", "4 x p100 + haswell", "--budget", "600s", "--json",
    )  # fmt: skip
    assert status == 0
    printed = json.loads(out)
    assert printed["interrupted"] is True
    assert printed["value"] > 0


def test_machine_lists_the_devices_that_can_be_named(dovetail):
    status, out, _ = dovetail("machine", "--presets")
    assert status == 0
    assert all(name in out for name in ("rtx3090", "mi300x", "m4max", "epyc", "haswell"))


def test_machine_writes_toml_that_plan_reads(dovetail, tmp_path):
    path = tmp_path / "box.toml"
    assert dovetail("machine", "2 x k80 + haswell", "--out", path)[0] == 0
    assert (
        dovetail(
            "plan", "tests.support.small_models:branches", "--machine", path, "--budget", "50e"
        )[0]
        == 0
    )


def test_networks_lists_the_zoo(dovetail):
    status, out, _ = dovetail("networks")
    assert status == 0
    assert "rnnlm" in out
    assert "inception_v3" in out


def test_networks_describes_one(dovetail):
    status, out, _ = dovetail("networks", "rnnlm")
    assert status == 0
    assert "1602.02410" in out
    assert "vocabulary" in out
    assert dovetail("networks", "nothing")[0] == 2


def test_foreign_names_cannot_style_the_terminal(dovetail):
    status, _, err = dovetail("plan", "zoo:[red]x", *TWO_GPUS)
    assert status == 2
    assert "zoo:[red]x" in err


def test_commands_write_files_only_where_they_are_told_to(dovetail, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = "tests.support.small_models:branches"
    dovetail("plan", model, *TWO_GPUS, "--placer", "single", "--out", "plan.json")
    commands = (
        ("plan", model, *TWO_GPUS, "--placer", "single"),
        ("report", "plan.json", model),
        ("export", "plan.json", model),
        ("schedule", "zoo:squeezenet_1_1?size=64&batch=1", "--device", "v100"),
    )
    for command in commands:
        status, _, err = dovetail(*command)
        assert status == 0, err
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert "--report schedule.html" in err


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "much"])
def test_a_bad_gap_is_refused_in_one_line(dovetail, number):
    status, out, err = dovetail("plan", "tests.support.small_models:branches", "--gap", number)
    assert status == 2
    (line,) = [line for line in err.splitlines() if "importing torch" not in line]
    assert "gap" in line
    assert out == ""


def _as_llvmlite_does():
    try:
        raise OSError("libllvmlite.so: failed to map segment from shared object")
    except OSError:
        raise OSError("Could not find/load shared object file 'libllvmlite.so'\nor so")  # noqa: B904


def _as_torch_does():
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] can't allocate memory: 64 bytes\nor so")


def _as_python_does():
    raise MemoryError


@pytest.mark.parametrize("fails", [_as_llvmlite_does, _as_torch_does, _as_python_does])
def test_too_little_memory_is_one_line_and_exits_with_1(dovetail, monkeypatch, fails):
    monkeypatch.setattr(cli, "make_app", lambda name: lambda *_, **__: fails())
    # These tests are no user's own code.
    monkeypatch.setattr(cli, "location_of", lambda *_, **__: "")
    status, _, said = dovetail("networks")
    assert status == 1
    assert said.count("\n") == 1
    assert said.startswith("error: there is too little memory: ")


def test_the_package_runs_as_a_module():
    printed = subprocess.check_output([sys.executable, "-m", "dovetail", "--help"], text=True)
    assert "schedule" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [(("2 x v100",), "is another machine"), (("here", "--fresh"), "leave --fresh out"),
     (("here", "--hosts"), "one host"), (("here", "--presets"), "leave the rest out")],
)  # fmt: skip
def test_what_cannot_be_calibrated_is_refused(words, says, dovetail):
    status, _, err = dovetail("machine", *words, "--calibrate")
    assert status == 2
    assert says in " ".join(err.split())
