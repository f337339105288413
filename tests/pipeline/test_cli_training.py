"""`dovetail train`, in process; every wrong input ends with its own status and message."""

import json
import re
import subprocess
import sys
import warnings

import pytest
import torch

from dovetail.training.history import History
from dovetail.training.rules import RULES
from tests.support import trained_models

KEYS = {
    "function", "rule", "options", "backend", "workers", "window", "batch", "epochs", "samples",
    "commits", "seconds", "figures", "best", "staleness", "implicit_momentum",
    "expected_momentum", "lost", "restarted", "server_restarted", "refused", "diverged", "stopped",
    "interrupted", "error", "history", "tensorboard", "report", "out",
}  # fmt: skip
ADVICE_KEYS = {
    "function", "step_seconds", "transfer_seconds", "start_seconds", "measured_steps", "cores",
    "simulated_steps", "rule", "workers", "window", "why", "against", "command", "level",
    "evidence",
}  # fmt: skip
SIMULATED = ("--backend", "simulated", "--batch", 24)
MODEL = "tests.support.trained_models:quadrants"


@pytest.fixture
def train(dovetail):
    """train(*arguments) -> (exit status, standard output, standard error)."""
    return lambda *arguments: dovetail("train", *arguments)


def test_help_and_its_example_need_no_torch():
    code = (
        "import sys; sys.argv = ['dovetail', 'train', '--help']\n"
        "import dovetail.cli\n"
        "try: dovetail.cli.main()\n"
        "except SystemExit: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip().endswith("False False")
    for words in ("dovetail train mymodels:digits", "--rule", "validation", "train-report"):
        assert words in printed


def test_a_run_prints_one_object_and_writes_what_was_asked_for(train, tmp_path):
    paths = {name: tmp_path / file for name, file in (
        ("history", "run.json.gz"), ("report", "page.html"), ("out", "model.pt"),
        ("tensorboard", "logs"))}  # fmt: skip
    given = [word for name, path in paths.items() for word in (f"--{name}", path)]
    status, out, err = train(
        MODEL, *SIMULATED, "--rule", "agn", "--workers", 3, "--window", 2, "--epochs", 4,
        "--lr", 0.02, "--metric", "accuracy", "--json", *given,
    )  # fmt: skip
    assert status == 0, err
    printed = json.loads(out)
    assert set(printed) == KEYS
    assert (printed["rule"], printed["workers"], printed["window"]) == ("agn", 3, 2)
    assert printed["samples"] == 4 * 240
    assert printed["commits"] == 20
    assert set(printed["figures"]) == {"loss", "accuracy"}
    assert printed["best"]["accuracy"] > 0.5
    assert printed["expected_momentum"] == pytest.approx(2 / 3)
    assert printed["error"] is None
    kept = History.load(paths["history"])
    assert len(kept) == 20
    assert kept.best("accuracy").figures["accuracy"] == printed["best"]["accuracy"]
    assert "What each worker did" in paths["report"].read_text()
    assert list(paths["tensorboard"].iterdir())
    weights = torch.load(paths["out"], weights_only=True)
    model = trained_models.network()
    model.load_state_dict(weights)
    inputs, labels = trained_models.arrays(80, 1)
    found = (model(torch.from_numpy(inputs)).argmax(1).numpy() == labels).mean()
    assert found == pytest.approx(printed["figures"]["accuracy"])


def test_weights_are_written_as_safetensors_and_as_a_distributed_checkpoint(train, tmp_path):
    """They hold the same tensors; the tied ones twice."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    tied = ("tests.support.trained_models:tied", *SIMULATED)
    for out in ("model.pt", "model.safetensors", "model/"):
        status, _, err = train(*tied, "--out", f"{tmp_path}/{out}")
        assert status == 0, err
        assert f"wrote {tmp_path}/{out}" in err
    expected = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(expected) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}
    flat = load_file(tmp_path / "model.safetensors")
    folder = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that one process alone loads
        dcp.load(folder, checkpoint_id=tmp_path / "model", no_dist=True)
    for found in (flat, folder):
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model", "model.pt", "model.safetensors"
    ]  # fmt: skip
    before = (tmp_path / "model" / ".metadata").read_bytes()
    status, _, err = train(*tied, "--out", f"{tmp_path}/model/")
    assert status == 2 and "is there already; name a new folder" in err
    assert (tmp_path / "model" / ".metadata").read_bytes() == before


def test_a_checkpoint_goes_to_no_folder_that_is_used_otherwise(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    run = (MODEL, *SIMULATED, "--epochs", 1)
    for out, others, said in (
        ("./", (), "is there already"),
        ("run/", ("--folder", "run"), "is where --folder writes"),
        ("all/", ("--folder", "all/run"), "is where --folder writes"),
        ("events/", ("--tensorboard", "events"), "is where --tensorboard writes"),
    ):
        status, _, err = train(*run, "--out", out, *others)
        assert status == 2 and said in err, out
    status, _, err = train(*run, "--out", "link/")
    assert status == 0, err
    assert (tmp_path / "empty" / ".metadata").exists() and (tmp_path / "link").is_symlink()


def test_a_checkpoint_that_cannot_be_written_is_one_line(train, tmp_path, monkeypatch):
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    def full(*_, **__):
        raise CheckpointException("save", {0: (OSError(28, "No space left on device"), [])})

    monkeypatch.setattr(state_dict_saver, "save", full)
    status, _, err = train(MODEL, *SIMULATED, "--epochs", 1, "--out", f"{tmp_path}/model/")
    assert status == 2
    assert "No space left on device" in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_commits_that_a_server_lost_are_not_counted_twice():
    from dovetail.cli.training_run import TrainingProgress
    from tests.support.histories import make_history

    rows = list(make_history(30).outcome.rows)
    progress = TrainingProgress("a run", 2, None, tell=lambda _: None)
    progress.watcher.rows(rows[:20])
    progress.watcher.forgotten(12)
    progress.watcher.rows(rows[12:])
    assert progress.rows == rows
    assert progress.all.samples == sum(row.samples for row in rows)


def test_what_safetensors_cannot_hold_is_told(train, tmp_path):
    status, _, err = train(
        "tests.support.trained_models:with_state", *SIMULATED, "--out", tmp_path / "a.safetensors"
    )
    assert status == 2
    assert "_extra_state is no tensor, which safetensors cannot hold" in err
    assert "training tests" not in err  # nothing was trained in vain


def test_a_metric_of_the_users_own_is_named_as_functions_are(train):
    own = "tests.support.trained_models:share_of_first_class"
    status, out, err = train(MODEL, *SIMULATED, "--metric", "accuracy", "--metric", own, "--json")
    assert status == 0, err
    assert set(json.loads(out)["figures"]) == {"loss", "accuracy", "share_of_first_class"}
    for text, says in (
        ("tests.support.trained_models:none", "tests.support.trained_models has no function none"),
        ("nowhere:f1", "cannot import nowhere"),
        ("f1", "no 'f1'; there are accuracy"),
    ):
        status, _, err = train(MODEL, *SIMULATED, "--metric", text)
        assert status == 2 and says in err


def test_plans_form_of_a_function_is_refused_with_what_to_return(train):
    status, _, err = train("tests.support.trained_models:as_plan", *SIMULATED)
    assert status == 2
    assert "must return (model, loss, optimizer, dataset), (Trainer, dataset)" in err
    assert "not (Sequential, Tensor, function, Tensor)" in err


def test_the_same_seed_gives_the_same_simulated_run(train):
    runs = [json.loads(train(MODEL, *SIMULATED, "--seed", 7, "--json")[1]) for _ in range(2)]
    other = json.loads(train(MODEL, *SIMULATED, "--seed", 8, "--json")[1])
    assert runs[0] == runs[1]
    assert runs[0]["figures"] != other["figures"]


def test_without_json_a_summary_is_printed(train):
    status, out, _ = train(MODEL, "--backend", "threads", "--workers", 2, "--batch", 60)
    assert status == 0
    assert re.search(r"rule +adag-agn", out)
    assert "staleness" in out


def test_processes_train_a_function_of_the_users_own_module(train, tmp_path):
    csv = tmp_path / "run.csv"
    status, out, err = train(
        MODEL, "--workers", 1, "--batch", 80, "--metric", "accuracy", "--history", csv, "--json"
    )
    assert status == 0, err
    assert json.loads(out)["backend"] == "processes"
    assert [row.samples for row in History.from_csv(csv).outcome.rows] == [80, 80, 80]


def test_a_trainer_keeps_its_own_settings_but_for_those_that_are_given(train):
    first = json.loads(train("tests.support.trained_models:as_trainer", "--json")[1])
    assert (first["rule"], first["batch"], first["window"]) == ("downpour", 24, 2)
    second = json.loads(
        train("tests.support.trained_models:as_trainer", "--batch", 40, "--json")[1]
    )
    assert (second["rule"], second["batch"], second["window"]) == ("downpour", 40, 2)


def test_options_of_the_backend_are_its_own(train):
    given = [("--backend-option", f"latency_seconds={seconds}") for seconds in (0, 5)]
    seconds = [json.loads(train(MODEL, *SIMULATED, *o, "--json")[1])["seconds"] for o in given]
    assert seconds[1] > seconds[0] + 5


def test_rules_are_listed_with_their_papers(train):
    printed = json.loads(train("--rules", "--json")[1])["rules"]
    assert [rule["name"] for rule in printed] == list(RULES)
    for rule in printed:
        assert re.search(r"(19|20)\d\d", rule["paper"]), rule["name"]
    status, out, _ = train("--rules")
    assert status == 0
    assert "downpour" in out
    assert "\u2026" not in out  # addresses are whole


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "package.module:function"),
        (("trained_models",), "package.module:function"),
        (("no.such.module:f",), "no.such.module"),
        (("tests.support.trained_models:nothing",), "no function nothing"),
        (("tests.support.trained_models:nonsense",), "must return"),
        (("tests.support.trained_models:too_short",), "must return"),
        (("tests.support.trained_models:a_trainer_alone",), "must return"),
        ((MODEL, "--rule", "magic"), "downpour-adagrad, dynsgd, agn"),
        ((MODEL, "--option", "gamma"), "NAME=VALUE"),
        ((MODEL, "--option", "gama=1"), "gama"),
        ((MODEL, "--option", "gamma=-1"), "gamma"),
        ((MODEL, "--backend", "magic"), "magic"),
        ((MODEL, "--backend-option", "latency_seconds"), "NAME=VALUE"),
        ((MODEL, "--window", "some"), "some"),
        ((MODEL, "--workers", 0), "workers"),
        ((MODEL, "--batch", -1), "batch"),
        ((MODEL, "--lr", "fast"), "--lr"),
        ((MODEL, "--metric", "luck"), "luck"),
        ((MODEL, "--validate", "soon"), "soon"),
        ((MODEL, "--validate", "0"), "validate"),
        ((MODEL, "--monitor", "luck"), "luck"),
        ((MODEL, "--wire", "int3"), "int3"),
        ((MODEL, "--lease", "soon"), "soon"),
        ((MODEL, "--suggest", "--budget", "lots"), "lots"),
        ((MODEL, "--resume"), "folder"),
        ((MODEL, "--history", "run.txt"), ".json.gz"),
        ((MODEL, "--history", "/nowhere/run.csv"), "/nowhere/run.csv"),
        ((MODEL, "--report", "/nowhere/page.html"), "/nowhere/page.html"),
        ((MODEL, "--out", "/nowhere/model.pt"), "/nowhere/model.pt"),
        ((MODEL, "--tensorboard", "/proc/logs"), "/proc/logs"),
        ((MODEL, "--folder", "/proc/run"), "/proc/run"),
        (("tests.support.trained_models:without_validation", "--metric", "accuracy"), "validation"),
        ((MODEL, "--surprise"), "surprise"),
    ],
)
def test_wrong_input_exits_with_2_before_anything_runs(train, monkeypatch, arguments, complaint):
    from dovetail.training.backends import simulated

    monkeypatch.setattr(simulated, "run", lambda *_, **__: pytest.fail("it ran"))
    status, out, err = train("--backend", "simulated", *arguments)
    assert status == 2
    assert complaint in err
    assert out == ""


@pytest.mark.parametrize(
    ("backend", "option"),
    [
        ("threads", "cores=2"),
        ("processes", "speed=2"),
        ("processes", "threads=many"),
        ("processes", "threads=0"),
        ("processes", "cores=1"),
        ("processes", "late=no"),
        ("simulated", "slow=4"),
        ("simulated", "times=jitter"),
    ],
)
def test_an_option_that_a_backend_cannot_take_is_named(train, backend, option):
    status, out, err = train(MODEL, "--backend", backend, "--backend-option", option)
    assert status == 2
    assert f"error: {option.partition('=')[0]}: " in err
    assert out == ""


def test_a_missing_extra_is_named_before_training(train, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    monkeypatch.setattr(
        "dovetail.training.trainer.Trainer.fit", lambda *_, **__: pytest.fail("ran")
    )
    status, _, err = train(MODEL, *SIMULATED, "--tensorboard", tmp_path / "logs")
    assert status == 2
    assert "dovetail[tensorboard]" in err


def test_a_folder_is_resumed_only_as_the_run_it_holds(train, tmp_path):
    folder = ("--folder", tmp_path / "run")
    assert train(MODEL, *SIMULATED, *folder)[0] == 0
    status, _, err = train(MODEL, *SIMULATED, *folder)
    assert status == 2
    assert "resume" in err
    status, _, err = train(MODEL, *SIMULATED, *folder, "--resume", "--batch", 48)
    assert status == 2
    assert "batch is 24" in err
    status, _, err = train(MODEL, *SIMULATED, "--folder", tmp_path / "other", "--resume")
    assert status == 2
    assert "holds no run" in err


def test_a_run_that_fails_exits_with_1_shows_a_line_and_keeps_what_it_did(train, tmp_path):
    path = tmp_path / "run.json"
    status, out, err = train(
        "tests.support.trained_models:failing",
        *SIMULATED,
        "--history",
        path,
        "--json",
        "--epochs",
        3,
    )
    assert status == 1
    assert "this layer has had enough" in err
    assert "Traceback" not in err
    assert re.search(r"\(at trained_models\.py:\d+: raise ", err)
    printed = json.loads(out)
    assert set(printed) == KEYS
    assert "had enough" in printed["error"]
    assert History.load(path).outcome.meta["failed"] == printed["error"]


def test_ctrl_c_keeps_the_best_so_far_and_says_so(train, tmp_path):
    status, out, err = train(
        "tests.support.trained_models:interrupted", *SIMULATED, "--epochs", 50, "--json",
        "--out", tmp_path / "model.pt",
    )  # fmt: skip
    assert status == 0, err
    printed = json.loads(out)
    assert printed["interrupted"] is True
    assert 0 < printed["samples"] < 50 * 240
    assert "best so far" in err
    assert (tmp_path / "model.pt").exists()


def test_ctrl_c_with_nothing_to_keep_exits_with_130(train):
    status, out, err = train(
        "tests.support.trained_models:interrupted_at_once", *SIMULATED, "--json"
    )
    assert status == 130
    assert out == ""
    assert "interrupted" in err


def test_a_run_that_diverges_is_told_of_a_rule_that_does_not(train):
    many = ("tests.support.trained_models:steep", "--backend", "simulated", "--workers", 8,
            "--window", 5, "--lr", 0.1, "--batch", 4, "--json")  # fmt: skip
    status, out, err = train(*many, "--rule", "downpour")
    assert json.loads(out)["diverged"]
    named = re.search(r"use ([a-z-]+):", err)
    assert named, err
    status, out, _ = train(*many, "--rule", named[1])
    assert status == 0
    assert json.loads(out)["diverged"] is None


def test_advice_is_printed_with_its_evidence(train):
    status, out, err = train(
        MODEL, "--backend", "threads", "--workers", 4, "--batch", 24, "--suggest",
        "--budget", "3s", "--json", "--lr", 0.02,
    )  # fmt: skip
    assert status == 0, err
    printed = json.loads(out)
    assert set(printed) == ADVICE_KEYS
    assert printed["command"] == (
        f"dovetail train {MODEL} --rule {printed['rule']} --workers {printed['workers']} "
        f"--window {printed['window']} --backend threads --batch 24 --lr 0.02"
    )
    assert printed["step_seconds"] > 0
    keys = ("rule", "workers", "window")
    chosen = [e for e in printed["evidence"] if all(e[key] == printed[key] for key in keys)]
    assert len(chosen) == 1
    assert chosen[0]["diverged"] is None


def test_a_page_compares_kept_runs(train, dovetail, tmp_path):
    for rule in ("agn", "downpour"):
        train(MODEL, *SIMULATED, "--rule", rule, "--metric", "accuracy", "--epochs", 2,
              "--history", tmp_path / f"{rule}.json")  # fmt: skip
    train(MODEL, *SIMULATED, "--rule", "sync", "--history", tmp_path / "sync.csv")
    files = [tmp_path / name for name in ("agn.json", "downpour.json", "sync.csv")]
    status, _, err = dovetail("train-report", *files, "--out", tmp_path / "page.html")
    assert status == 0, err
    page = (tmp_path / "page.html").read_text()
    assert "Training by agn, downpour" in page
    assert "Temporal efficiency" in page
    status, _, err = dovetail("train-report", tmp_path / "none.json", "--out", tmp_path / "p.html")
    assert status == 2
    assert "none.json" in err
    status, _, err = dovetail("train-report", files[0], "--out", files[0])
    assert status == 2
    assert "read as well" in err
