"""What cannot be done ends with one line that says why, and with its own exit status."""

import pytest
import torch

import dovetail as dt

MODEL = "zoo:rnnlm?layers=1&hidden=16&steps=3&batch=2&vocabulary=20"
GPUS = ("--machine", "2 x p100", "--budget", "20e")

INVALID = {
    "no such network": (("plan", "zoo:rnnml"), "rnnml"),
    "no such option of a network": (("plan", "zoo:rnnlm?layer=2"), "layer"),
    "no such module": (("plan", "nowhere:mlp"), "nowhere"),
    "no such function": (("plan", "user_models:mpl"), "mpl"),
    "no such file": (("run", "nothing.json"), "nothing.json"),
    "no such machine": (("plan", MODEL, "--machine", "3 x k81"), "k81"),
    "no such placer": (("plan", MODEL, *GPUS, "--placer", "magic"), "magic"),
    "no such device": (("plan", MODEL, *GPUS, "--pin", "lstm=gpu9"), "gpu9"),
    "a budget in words": (("plan", MODEL, "--machine", "2 x p100", "--budget", "soon"), "soon"),
    "no such optimizer": (("plan", MODEL, *GPUS, "--train", "adagram"), "adagram"),
    "no such format": (("plan", MODEL, *GPUS, "--for", "powerpoint"), "powerpoint"),
    "options that exclude each other": (
        ("plan", MODEL, *GPUS, "--train", "sgd", "--micro-batches", "2", "--stages"), "stages",
    ),
    "a plan of another machine": (("run", "plan.json"), "p100"),
    "an export that cannot say the plan": (("export", "plan.json", "--to", "vllm"), "--whole"),
    "a folder that is none": (("plan", MODEL, *GPUS, "--out", "nowhere/plan.json"), "nowhere"),
    "branches on data": (("plan", "user_models:branching", *GPUS), "if on a tensor"),
    "no such rule": (("train", "user_models:classifier", "--rule", "best"), "best"),
    "no such option of a rule": (
        ("train", "user_models:classifier", "--rule", "easgd", "--option", "rho=2"), "rho",
    ),
    "a run that is not there": (
        ("train", "user_models:classifier", "--folder", "nothing", "--resume"), "nothing",
    ),
    "no such weights": (
        ("predict", "user_models:classifier", "no.pt", "dataset", "--out", "y.npy"), "no.pt",
    ),
    "no such method": (("learn", "one", MODEL, *GPUS[:2], "--method", "magic"), "magic"),
    "a step that cannot be scheduled": (("schedule", "user_models:branching"), "if on a tensor"),
    "no such file of costs": (("machine", "box.toml"), "box.toml"),
}  # fmt: skip
FAILED = {
    "a model that raises": (("plan", "user_models:raising", *GPUS), "not my day"),
    "a function that exits": (("plan", "user_models:exiting", *GPUS), "user_models"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.contract.shell import Shell

    shell = Shell(tmp_path_factory.mktemp("refusals"))
    shell.works("plan", MODEL, *GPUS, "--out", "plan.json")
    return shell


def one_line(ended):
    lines = [line for line in ended.err.splitlines() if line.strip()]
    assert "Traceback" not in ended.err
    assert lines[-1].startswith("error: "), ended.err
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    return lines[-1]


@pytest.mark.parametrize("case", INVALID)
def test_invalid_input_is_one_line_and_status_2(case, folder):
    words, said = INVALID[case]
    ended = folder.dovetail(*words)
    assert said in one_line(ended)
    assert ended.status == 2


@pytest.mark.parametrize("case", FAILED)
def test_code_of_the_user_s_that_fails_is_one_line_and_status_1(case, folder):
    words, said = FAILED[case]
    ended = folder.dovetail(*words)
    assert said in one_line(ended)
    assert ended.status == 1


def test_what_no_plan_fits_is_status_3(folder):
    caps = ("--cap", "p100:0=1KiB", "--cap", "p100:1=1KiB", "--cap", "host=1KiB")
    ended = folder.dovetail("plan", MODEL, *GPUS, *caps, "--json")
    assert ended.status == 3
    assert ended.json["feasible"] is False
    assert ended.json["value"] is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"version":1', '"version":9'),
        lambda text: text.replace('"placement":[', '"placement":[99,', 1),
        lambda text: "[]",
    ],
    ids=["cut", "of another version", "of another graph", "of another kind"],
)
def test_a_damaged_plan_is_refused(damage, folder):
    good = (folder.folder / "plan.json").read_text()
    assert damage(good) != good
    (folder.folder / "bad.json").write_text(damage(good))
    ended = folder.dovetail("report", "bad.json")
    assert "bad.json" in one_line(ended)
    assert ended.status == 2


def test_a_promise_that_does_not_hold_is_refused(folder):
    import json

    plan = json.loads((folder.folder / "plan.json").read_text())
    plan["value"] /= 2
    plan["measured"] = {}
    (folder.folder / "false.json").write_text(json.dumps(plan))
    ended = folder.dovetail("report", "false.json")
    one_line(ended)
    assert ended.status == 2


def test_a_plan_imports_no_code_by_itself(folder):
    folder.works("plan", "user_models:mlp", *GPUS, "--out", "mine.json")
    ended = folder.dovetail("run", "mine.json")
    assert "MODEL" in one_line(ended)
    assert ended.status == 2


def test_every_command_explains_itself(folder):
    commands = (
        "machine", "networks", "capture", "plan", "run", "report", "export", "schedule", "train",
        "predict", "train-report", "learn",
    )  # fmt: skip
    for command in commands:
        said = folder.works(command, "--help").out
        assert "Usage" in said
        assert command in said


def test_a_step_in_the_place_of_its_plan_is_named():
    step = dt.capture(torch.nn.Linear(2, 2), torch.ones(1, 2))
    plan = dt.plan(step, "2 x p100", budget="5e")
    with pytest.raises(dt.errors.UsageError, match="plan: is a Captured"):
        dt.run(step, plan)
    with pytest.raises(dt.errors.UsageError, match="step: is a Linear"):
        dt.run(plan, torch.nn.Linear(2, 2))
