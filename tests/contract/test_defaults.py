"""What a user gets who sets nothing: plans for `here`, compared with what runs without them.

One flow has a process that imports by itself, and the threads of OpenMP as they come; these spin on
cores that other tests need, so that all takes long.
"""

from tests.contract.shell import Shell

MODEL = "user_models:mlp"


def test_python_s_default_flow_equals_plain_pytorch(tmp_path):
    shell = Shell(tmp_path, by_default=True)
    ended = shell.python("as_a_user.py")
    assert ended.status == 0, ended.err
    assert ended.out == "done\n"
    assert "<html" in (shell.folder / "here.html").read_text()
    assert shell.works("report", "here.json", "--out", "again.html").err


def test_the_command_line_s_default_flow(shell):
    budgets = ("--budget", "100s", "--compile-budget", "6s")
    found = shell.works("plan", MODEL, "--train", "adam", *budgets, "--out", "p.json", "--json")
    plan = found.json
    assert plan["machine"] == "here"
    assert plan["way"] in ("placed", "eager", "torch.compile")
    assert set(plan["measured"]) >= {"eager", plan["way"]}
    ran = shell.works("run", "p.json", MODEL, "--steps", 5, "--json").json
    assert ran["median_seconds"] > 0
    shell.works("report", "p.json", MODEL, "--out", "p.html", "--trace", "p.trace.json")
    assert "<html" in (shell.folder / "p.html").read_text()


def test_training_and_predicting_by_default(shell):
    words = ("--epochs", 2, "--metric", "accuracy", "--out", "w.pt", "--report", "run.html")
    shell.works("train", "user_models:classifier", *words)
    said = shell.works("predict", "user_models:classifier", "w.pt", "dataset", "--evaluate")
    assert "loss" in said.out
    assert "<html" in (shell.folder / "run.html").read_text()


def test_a_schedule_by_default_gives_the_outputs_of_sequential(shell):
    model = "zoo:squeezenet_1_1?batch=1&size=64"
    found = shell.works("schedule", model, "--rounds", 3, "--scheduler", "greedy,ios", "--json")
    assert found.json
