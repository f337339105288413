"""`dovetail learn`, and `plan` by learned placers, in process; wrong input has its own message."""

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from dovetail.pipeline import LearnRequest, learn, open_plan, resolve_model
from dovetail.placers.learned import files
from dovetail.placers.learned.catalog import settings_of
from dovetail.simulator import Simulator
from tests.support import small_models

TWO_GPUS = ("--machine", "2 x p100 + haswell")
MODEL = ("tests.support.small_models:trained", "--train", "adam", *TWO_GPUS)
SHORT = ("--trials", 32, "--setting", "trials=8")
KEYS = {
    "method", "reward", "seed", "controllers", "trials", "updates", "seconds", "interrupted",
    "failures", "tasks", "policy", "curves", "report", "tensorboard",
}  # fmt: skip
TASK_KEYS = {
    "task", "machine", "feasible", "value", "lower_bound", "baselines", "groups", "found",
    "measured_seconds", "measured_spread", "plan",
}  # fmt: skip


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """method -> a policy file that learned `small_models:trained` a little."""
    folder = tmp_path_factory.mktemp("policies")
    step = resolve_model("tests.support.small_models:trained", "adam")
    found = {}
    for method in ("seq2seq", "gdp"):
        result = learn(step, "2 x p100 + haswell", method=method, trials=16, settings={"trials": 8})
        found[method] = folder / f"{method}.safetensors"
        result.save_policy(found[method])
    return found


def test_help_needs_no_torch():
    code = (
        "import sys; sys.argv = ['dovetail', 'learn', 'one', '--help']\n"
        "import dovetail.cli\n"
        "try: dovetail.cli.main()\n"
        "except SystemExit: print('torch' in sys.modules, 'numba' in sys.modules)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip().endswith("False False")
    assert "--policy-out" in printed


def test_one_prints_one_object_and_writes_what_was_asked_for(dovetail, tmp_path):
    paths = {name: tmp_path / file for name, file in (
        ("out", "plan.json"), ("policy-out", "p.safetensors"), ("curves", "c.csv"),
        ("report", "page.html"), ("tensorboard", "logs"))}  # fmt: skip
    given = [word for name, path in paths.items() for word in (f"--{name}", path)]
    status, out, err = dovetail("learn", "one", *MODEL, *SHORT, *given, "--json")
    assert status == 0, err
    printed = json.loads(out)
    assert set(printed) == KEYS
    task = printed["tasks"][0]
    assert set(task) == TASK_KEYS
    assert (printed["method"], printed["trials"], printed["updates"]) == ("seq2seq", 32, 4)
    assert task["task"] == "tests.support.small_models:trained"
    assert task["lower_bound"] <= task["value"] == task["baselines"]["seq2seq"]
    assert 1 <= task["found"] <= 32
    plan, _ = open_plan(paths["out"], "tests.support.small_models:trained")
    assert (plan.placer, plan.value) == ("seq2seq", task["value"])
    _policy, card = files.load_policy(paths["policy-out"], "seq2seq")
    assert card["trained_on"] == ["tests.support.small_models:trained"]
    assert (card["trials"], card["seed"], card["reward"]) == (32, 0, "simulated")
    lines = paths["curves"].read_text().splitlines()
    assert lines[0].startswith("controller,update,task,trials,seconds,best,mean,invalid")
    assert [line.split(",")[1] for line in lines[1:]] == ["0", "1", "2", "3"]
    assert "Entropy of a decision" in paths["report"].read_text()
    assert len(list((paths["tensorboard"] / "controller-0").iterdir())) == 1
    assert all(f"wrote {path}" in err for path in paths.values())


def test_the_same_seed_gives_the_same_plan_and_curves(dovetail, tmp_path):
    runs = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        path = tmp_path / f"{name}.csv"
        _, out, _ = dovetail(
            "learn", "one", *MODEL, *SHORT, "--seed", seed, "--curves", path, "--json"
        )
        rows = [line.split(",") for line in path.read_text().splitlines()]
        runs.append((json.loads(out)["tasks"], [row[:4] + row[5:] for row in rows]))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_without_json_tables_and_lines_are_printed(dovetail):
    status, out, err = dovetail("learn", "one", *MODEL, *SHORT, "--method", "gdp")
    assert status == 0, err
    assert "gdp (chosen)" in out
    assert "32 trials in" in out
    assert "learning tests.support.small_models:trained by gdp, simulated trials" in err


def test_a_batch_writes_no_plan_through_a_link(dovetail, tmp_path):
    (tmp_path / "1-tests.support.small-models-other-on-2-x-k80-haswell.json").symlink_to("/nowhere")
    model = "tests.support.small_models:other"
    machines = [word for n in (4, 2) for word in ("--machine", f"{n} x k80 + haswell")]
    status, _, err = dovetail("learn", "batch", model, model, *machines, "--out", tmp_path)
    assert (status, err.count("a link")) == (2, 1), err


def test_a_batch_learns_one_policy_and_writes_a_plan_each(dovetail, tmp_path):
    status, out, err = dovetail(
        "learn", "batch", "tests.support.small_models:branches", "tests.support.small_models:other",
        "tests.support.small_models:branches",
        "--machine", "2 x p100 + haswell",
        "--machine", "2 x k80 + haswell", "--machine",
        "4 x k80 + haswell", "--trials", 48, "--setting", "trials=8",
        "--out", tmp_path / "plans", "--policy-out", tmp_path / "p.safetensors", "--json",
    )  # fmt: skip
    assert status == 0, err
    printed = json.loads(out)
    names = [task["task"] for task in printed["tasks"]]
    assert names == [
        "tests.support.small_models:branches on 2 x p100 + haswell",
        "tests.support.small_models:other on 2 x k80 + haswell",
        "tests.support.small_models:branches on 4 x k80 + haswell",
    ]
    for task in printed["tasks"]:
        plan, _ = open_plan(task["plan"], task["task"].partition(" on ")[0])
        assert plan.machine.name == task["machine"]
        assert plan.value == task["value"]
    assert len(list((tmp_path / "plans").iterdir())) == 3
    status, out, err = dovetail("learn", "show", tmp_path / "p.safetensors", "--json")
    assert status == 0, err
    assert json.loads(out)["trained_on"] == names


def test_a_card_is_shown_whole_as_json_and_in_short_as_a_table(dovetail, policies, tmp_path):
    status, out, _ = dovetail("learn", "show")  # the shipped one
    assert status == 0
    assert "gnmt" in out
    assert "random" in out
    assert len(out) < 20_000
    status, out, _ = dovetail("learn", "show", policies["seq2seq"], "--json")
    assert (status, json.loads(out)["method"]) == (0, "seq2seq")
    (tmp_path / "other").write_text("no policy")
    status, out, err = dovetail("learn", "show", tmp_path / "other")
    assert (status, out) == (2, "")
    assert "cannot read" in err


def test_a_policy_is_tuned_on_another_network_and_plans_for_it(dovetail, policies, tmp_path):
    tuned = tmp_path / "tuned.safetensors"
    status, out, err = dovetail(
        "learn", "finetune", policies["gdp"], "tests.support.small_models:branches", *TWO_GPUS,
        "--updates", 2, "--policy-out", tuned, "--json",
    )  # fmt: skip
    assert status == 0, err
    assert json.loads(out)["trials"] == 2 * settings_of("gdp", finetuned=True).trials
    for policy in (policies["gdp"], tuned):
        status, out, err = dovetail(
            "plan", "tests.support.small_models:branches", *TWO_GPUS, "--placer", "gdp",
            "--policy", policy, "--budget", "100e", "--json",
        )  # fmt: skip
        assert status == 0, err
        assert json.loads(out)["placer"] == "gdp"


@pytest.mark.parametrize("placer", ["gdp", "gdp+search"])
def test_a_plan_by_a_policy_may_be_tuned_and_may_place_every_op(dovetail, policies, placer):
    found = []
    for options in ((), ("--per-op",), ("--finetune", 2)):
        status, out, err = dovetail(
            "plan", "tests.support.small_models:trained", "--train", "adam", *TWO_GPUS, "--placer",
            placer, "--policy", policies["gdp"], *options, "--budget", "60e", "--json",
        )  # fmt: skip
        assert status == 0, err
        found.append(json.loads(out))
    assert all(one["placer"] == placer for one in found)
    assert found[1]["groups"] > found[0]["groups"]
    if placer == "gdp+search":
        assert found[0]["value"] <= min(found[0]["baselines"].values())
        assert "gdp" in found[0]["baselines"]


def test_a_run_is_resumed_only_as_what_it_was(dovetail, tmp_path):
    folder = ("--folder", tmp_path / "run")
    assert dovetail("learn", "one", *MODEL, *SHORT, *folder)[0] == 0
    status, _, err = dovetail("learn", "one", *MODEL, *SHORT, *folder)
    assert status == 2
    assert "holds a run" in err
    status, _, err = dovetail("learn", "one", *MODEL, *SHORT, *folder, "--resume", "--seed", 5)
    assert status == 2
    assert "seed" in err
    for other in (("--pin", "left=haswell"), ("--cap", "haswell=1GiB"), ("--machine", "rl17/2")):
        status, _, err = dovetail("learn", "one", *MODEL, *SHORT, *folder, "--resume", *other)
        assert status == 2, other
        assert "tasks" in err
    status, out, err = dovetail("learn", "one", *MODEL, *SHORT, *folder, "--resume", "--json")
    assert status == 0, err
    assert json.loads(out)["trials"] == 32
    status, _, err = dovetail("learn", "one", *MODEL, "--folder", tmp_path / "none", "--resume")
    assert status == 2
    assert "holds no run" in err


def interrupting(monkeypatch, after):
    """Send Ctrl-C once the simulator has been asked so often."""
    evaluate, asked, enough = Simulator.evaluate, [], threading.Event()

    def counted(self, *arguments, **options):
        asked.append(1)
        if len(asked) == after:
            enough.set()
        return evaluate(self, *arguments, **options)

    def interrupt():
        enough.wait()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Simulator, "evaluate", counted)
    threading.Thread(target=interrupt, daemon=True).start()


def test_ctrl_c_keeps_the_best_so_far_and_writes_it(dovetail, monkeypatch, tmp_path):
    interrupting(monkeypatch, after=6)
    paths = (tmp_path / "plan.json", tmp_path / "p.safetensors")
    status, out, err = dovetail(
        "learn", "one", *MODEL, "--trials", 100_000, "--setting", "trials=8",
        "--out", paths[0], "--policy-out", paths[1], "--json",
    )  # fmt: skip
    assert status == 0, err
    printed = json.loads(out)
    assert printed["interrupted"] is True
    assert 0 < printed["trials"] < 100_000
    assert "best so far" in err
    assert open_plan(paths[0], "tests.support.small_models:trained")[0].interrupted is True
    assert files.read_card(paths[1])["interrupted"] is True


def test_a_budget_of_seconds_ends_a_run_that_is_not_interrupted(dovetail):
    status, out, err = dovetail(
        "learn", "one", *MODEL, "--budget", "0.5s", "--setting", "trials=4", "--json"
    )
    assert status == 0, err
    printed = json.loads(out)
    assert printed["interrupted"] is False
    assert printed["trials"] >= 4


def test_where_nothing_fits_the_status_is_3_and_the_policy_is_kept(dovetail, tmp_path):
    caps = [word for d in ("p100:0", "p100:1", "haswell") for word in ("--cap", f"{d}=1KiB")]
    path = tmp_path / "p.safetensors"
    status, out, err = dovetail(
        "learn", "one", *MODEL, *SHORT, *caps, "--policy-out", path, "--json"
    )
    assert status == 3
    assert "no placement that was tried fits" in err
    task = json.loads(out)["tasks"][0]
    assert task["feasible"] is False
    assert task["value"] is None
    assert path.exists()


@pytest.fixture
def no_capture(monkeypatch):
    """The long work fails the test."""
    for name in ("trained", "branches"):
        monkeypatch.setattr(small_models, name, lambda: pytest.fail("it captured"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--method", "magic"), "seq2seq, seq2seq-paper, hdp, hdp-paper, gdp, gdp-paper"),
        (("--trials", 7), "one update of 1 controllers takes 16"),
        (("--trials", 20, "--controllers", 2), "takes 32"),
        (("--trials", 100, "--budget", "5m"), "not both"),
        (("--budget", "soon"), "soon"),
        (("--controllers", 0), "controllers"),
        (("--evaluators", 0), "evaluators"),
        (("--backend", "magic"), "simulated, threads, processes, ranks, ray"),
        (("--setting", "speed=3"), "speed"),
        (("--setting", "rate=fast"), "rate"),
        (("--setting", "rate=0"), "rate above 0"),
        (("--setting", "rate"), "NAME=VALUE"),
        (("--setting", "objective=sac"), "reinforce, ppo"),
        (("--setting", "baseline=magic"), "moving, mean, batch"),
        (("--setting", "ratio=magic"), "decision, placement"),
        (("--setting", "decay_every=0"), "decay_every"),
        (("--setting", "passes=0"), "passes"),
        (("--setting", "valid_only_from=soon"), "valid_only_from"),
        (("--per-op",), "per_op: is for gdp"),
        (("--resume",), "needs the folder"),
        (("--seed", -1), "seed"),
        (("--machine", "3 x k81"), "k80"),
        (("--measured",), "here/2"),
        (("--measured", "--machine", "here"), "here/2"),
        (("--measured", "--controllers", 2), "one controller"),
        (("--measured", "--folder", "run"), "cannot be repeated"),
        (("--simulated-first", 100), "simulated_first"),
        (("--pin", "left"), "NAME=VALUE"),
        (("--cap", "haswell=lots"), "not a size"),
        (("--out", "/nowhere/plan.json"), "/nowhere/plan.json"),
        (("--policy-out", "/nowhere/p"), "/nowhere/p"),
        (("--curves", "/nowhere/c.csv"), "/nowhere/c.csv"),
        (("--report", "/nowhere/r.html"), "/nowhere/r.html"),
        (("--tensorboard", "/proc/logs"), "/proc/logs"),
        (("--folder", "/proc/run"), "/proc/run"),
        (("--curves", "same", "--report", "same"), "two outputs"),
        (("--surprise",), "surprise"),
    ],
)
def test_wrong_options_exit_with_2_before_anything_runs(
    dovetail, no_capture, monkeypatch, tmp_path, arguments, complaint
):
    monkeypatch.chdir(tmp_path)
    machine = TWO_GPUS if "--machine" not in arguments else ()
    status, out, err = dovetail(
        "learn", "one", "tests.support.small_models:trained", *machine, *arguments
    )
    assert status == 2
    assert complaint in err
    assert out == ""


def test_wrong_batches_and_policies_exit_with_2(dovetail, no_capture, policies, tmp_path):
    batch = (
        "learn",
        "batch",
        "tests.support.small_models:trained",
        "tests.support.small_models:branches",
    )
    tune = ("learn", "finetune")
    broken, cut = tmp_path / "broken", tmp_path / "cut"
    broken.write_text("no policy")
    cut.write_bytes(policies["gdp"].read_bytes()[:-100])
    for arguments, complaint in (
        ((*batch, *TWO_GPUS, *TWO_GPUS, *TWO_GPUS), "3 times for 2 models"),
        ((*batch, *TWO_GPUS, "--policy", policies["seq2seq"]), "method"),
        ((*tune, tmp_path / "none", "tests.support.small_models:trained"), "no such file"),
        ((*tune, broken, "tests.support.small_models:trained", *TWO_GPUS), "broken"),
        ((*tune, cut, "tests.support.small_models:trained", *TWO_GPUS), str(cut)),
        (
            (
                *tune,
                policies["gdp"],
                "tests.support.small_models:trained",
                "--policy-out",
                policies["gdp"],
            ),
            "read",
        ),
    ):
        status, out, err = dovetail(*arguments)
        assert status == 2, arguments
        assert complaint in err
        assert out == ""


def test_a_policy_of_another_graph_is_refused_but_gdp_serves_all(dovetail, policies):
    status, _, err = dovetail(
        "learn", "finetune", policies["seq2seq"], "tests.support.small_models:branches", *TWO_GPUS,
        "--updates", 1, "--setting", "trials=8",
    )  # fmt: skip
    assert status == 2
    assert "tests.support.small_models:trained" in err
    assert "seq2seq serves one graph" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--policy", "p"), "policy: is for gdp and gdp+search, not for auto"),
        (("--placer", "etf", "--finetune", 3), "finetune: is for gdp"),
        (("--placer", "seq2seq", "--per-op"), "per_op: is for gdp"),
        (("--placer", "gdp", "--finetune", -1), "finetune"),
        (("--placer", "gdp", "--policy", "nothing"), "no such file"),
    ],
)
def test_policies_are_for_gdp_alone(dovetail, no_capture, arguments, complaint):
    status, out, err = dovetail("plan", "tests.support.small_models:trained", *TWO_GPUS, *arguments)
    assert status == 2
    assert complaint in err
    assert out == ""


def test_without_a_shipped_policy_the_error_says_what_to_do(dovetail, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "gdp.safetensors")
    status, _, err = dovetail(
        "plan", "tests.support.small_models:trained", *TWO_GPUS, "--placer", "gdp"
    )
    assert status == 2
    assert "install the package again, or name a policy file of yours, --policy FILE" in err


def test_learning_in_python_gives_a_plan_a_policy_and_its_curves():
    step = resolve_model("tests.support.small_models:branches")
    points = []
    result = learn(
        step, "2 x p100 + haswell", method="gdp", trials=16, settings={"trials": 8}, per_op=True,
        progress=points.append,
    )  # fmt: skip
    assert result.plan.value == result.learned.values["tests.support.small_models:branches"]
    assert [point.update for point in points] == [0, 1]
    assert result.learned.points == tuple(points)
    assert result.policy.name == "gdp"
    assert np.isfinite(result.learned.theta).all()
    assert LearnRequest().trials is None
