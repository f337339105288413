"""Files that earlier versions wrote open, or are refused by one line that says what to do."""

import shutil

import pytest

import dovetail as dt
from tests.contract.shell import Shell
from tests.contract.write_files import CHECKPOINT, FILES, LAUNCHER, TRAIN, plan_for_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("old"))
    shutil.copytree(FILES, shell.folder, dirs_exist_ok=True)
    return shell


def opens_or_says_what_to_do(ended, advice):
    if ended.status == 0:
        return
    assert ended.status == 2
    assert "Traceback" not in ended.err
    assert advice in ended.err.splitlines()[-1]


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("plan-*.json")))
def test_a_plan_opens(name, folder):
    page = folder.dovetail("report", name, "--out", f"{name}.html")
    opens_or_says_what_to_do(page, "plan again")


def test_a_plan_opens_with_its_model_captured_again(folder):
    model = dt.load_plan(FILES / "plan-training.json").source.model
    opens_or_says_what_to_do(folder.dovetail("report", "plan-training.json", model), "plan again")


@pytest.mark.parametrize("name", ["graph.json.gz", "instance.json"])
def test_a_graph_and_an_instance_can_be_planned(name, folder):
    machine = ("--machine", "machine.toml") if name.startswith("graph") else ()
    folder.works("plan", name, *machine, "--placer", "etf", "--budget", "10e")


def test_a_machine_is_shown(folder):
    assert "haswell" in folder.works("machine", "machine.toml").out


def test_a_history_is_reported(folder):
    folder.works("train-report", "history.json.gz", "--out", "history.html")
    assert dt.History.load(FILES / "history.json.gz").rule == "adag-agn"


def test_weights_predict(folder):
    folder.works("predict", "user_models:classifier", "weights.pt", "dataset", "--out", "y.npy")


def test_a_training_goes_on(folder):
    ended = folder.dovetail(*TRAIN, "--epochs", 3, "--resume", "--history", "more.json.gz")
    opens_or_says_what_to_do(ended, "again")
    if ended.status == 0:
        samples = dt.History.load(folder.folder / "more.json.gz").columns["samples"]
        assert int(samples.sum()) == 3 * 120


def test_a_policy_is_shown(folder):
    assert "seq2seq" in folder.works("learn", "show", "policy.safetensors").out


def test_a_run_on_ranks_goes_on_from_a_checkpoint(folder):
    plan_for_ranks(folder)
    ended = folder.python(*LAUNCHER, *CHECKPOINT, "--resume")
    assert ended.status == 0, ended.err
    assert "goes on from step" in ended.err
