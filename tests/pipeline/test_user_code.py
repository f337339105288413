"""Whatever a user's code does, a command ends with one line that names the code and the fault."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import count

import pytest

from tests.support import forked

FAULTS = {
    "raises": 'raise ValueError("mine\\nsecond line")',
    "has_no_text": "raise Textless",
    "is_no_exception": 'raise NoException("mine")',
    "stops": "raise StopIteration",
    "ends": "raise EOFError",
    "exits_with_0": "sys.exit(0)",
    "exits_with_3": "sys.exit(3)",
    "leaves_with_0": "os._exit(0)",
    "calls_itself": "endless()",
}
MODULE = """\
import os, sys, time
import torch
from torch import nn

class Textless(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class NoException(BaseException):
    pass

def endless():
    return endless()

print("imported")
HERE = {here}
calls = 0

def late(after):
    global calls
    calls += 1
    return calls > after

{imported}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
        {init}

    def forward(self, x):
        print("forward")
        {forward}
        return self.inner(x)

def loss(output, target):
    {loss}
    return nn.functional.mse_loss(output, target)

class Data:
    def __len__(self):
        {length}
        return 8

    def __getitem__(self, index):
        {item}
        return torch.zeros(4), torch.zeros(2)

def optimizer(parameters):
    {optimizer}
    return torch.optim.SGD(parameters, lr=0.1)

def metric(output, target):
    {metric}
    return 0.5

def step():
    print("built")
    {build}
    return Net(), torch.zeros(3, 4), loss, torch.zeros(3, 2)

def run():
    print("built")
    {build}
    return Net(), loss, optimizer, Data(), Data()
"""
PLACES = (
    "imported", "init", "forward", "loss", "length", "item", "optimizer", "metric", "build"
)  # fmt: skip
PROGRESS = re.compile(
    r"training |\s*\d+ s  |[\d.]+ \w+: worker \d+ was |wrote |\S+ by \S+, \d+ of \d+ samples "
)
numbers = count()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written(place=code, ...) -> the name of a module in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**code):
        name = f"mine_{next(numbers)}"
        filled = dict.fromkeys(PLACES, "pass") | code
        (tmp_path / f"{name}.py").write_text(MODULE.format(here=os.getpid(), **filled))
        return name

    return write


def told(err):
    """The lines of standard error beside those that tell of progress, and beside warnings of
    Python, such as of what an earlier test has left open, with the lines of code below them."""
    lines = [line for line in err.splitlines() if not PROGRESS.match(line)]
    return [line for line in lines if "Warning: " not in line and not line.startswith("  ")]


def check(result, module, status=1):
    """The result of a command that failed in the user's module, by one line."""
    found, out, err = result
    assert found == status, err
    lines = [line for line in told(err) if line not in ("imported", "forward", "built")]
    assert len(lines) == 1, err
    (line,) = lines
    assert line.startswith("error: "), err
    assert re.search(rf"{module}\.py:\d+: ", line), err
    assert "Traceback" not in err
    if out:
        json.loads(out)
    return line


STEP = {
    "capture": ("capture", "{}:step", "--out", "graph.json"),
    "plan": ("plan", "{}:step", "--machine", "2 x p100 + haswell", "--train", "sgd", "--json"),
}
RUN = {
    "train": ("train", "{}:run", "--backend", "simulated", "--json"),
    "threads": ("train", "{}:run", "--backend", "threads", "--json"),
}


def words(template, module):
    return [word.format(module) for word in template]


# Every fault where most code runs; at the other places, what raises and what ends the program.
@pytest.mark.parametrize(
    ("command", "place", "fault"),
    [
        *((STEP["capture"], place, "leaves_with_0") for place in ("imported", "build", "init")),
        (STEP["plan"], "loss", "raises"),
        (STEP["plan"], "loss", "exits_with_3"),
        *((STEP["capture"], "forward", fault) for fault in FAULTS),
        *((RUN["train"], "item", fault) for fault in FAULTS),
        *(
            (RUN["train"], place, fault)
            for place in PLACES
            for fault in ("raises", "exits_with_0")
            if place not in ("metric", "item")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_fault_is_one_line_that_names_the_users_line(dovetail, written, command, place, fault):
    module = written(**{place: FAULTS[fault]})
    line = check(dovetail(*words(command, module)), module)
    expected = {
        "raises": "ValueError: mine (at",
        "has_no_text": "Textless: its text cannot be shown",
        "is_no_exception": "NoException: mine",
        "stops": "StopIteration",
        "ends": "EOFError",
        "exits_with_0": "ends the program (SystemExit 0)",
        "exits_with_3": "ends the program (SystemExit 3)",
        "leaves_with_0": "ends the program (os._exit(0))",
        "calls_itself": "RecursionError: maximum recursion depth exceeded",
    }
    assert expected[fault] in line
    assert FAULTS[fault].partition("(")[0] in line or "return endless()" in line


LATE = "if late(9): "
"""The fault comes after the checks before a run, which read three batches of two items each."""


@pytest.mark.parametrize(
    ("backend", "fault"),
    [("simulated", "raises"), *(("threads", fault) for fault in ("stops", "exits_with_0", "ends"))],
)
def test_a_fault_in_the_middle_of_a_run_names_the_worker_too(dovetail, written, backend, fault):
    module = written(item=LATE + FAULTS[fault])
    run = ("train", f"{module}:run", "--backend", backend, "--batch", 2, "--workers", 1, "--json")
    line = check(dovetail(*run), module)
    assert re.search(r"process worker 0 failed: item \d of the data set failed: ", line)


@pytest.mark.parametrize(
    ("place", "fault", "said"),
    [
        ("item", "raises", " of the data set failed: ValueError: mine (at"),
        ("loss", "exits_with_0", "the loss failed: it ends the program (SystemExit 0)"),
        ("forward", "leaves_with_0", "the last of them: exit status 0 at"),
    ],
)
def test_a_fault_in_a_workers_process_is_one_line(dovetail, written, place, fault, said):
    # Each process counts its own calls, and makes three steps of two samples.
    after = {"item": 4, "loss": 2, "forward": 2}[place]
    begins = "if os.getpid() != HERE and late({}): "
    module = written(**{place: begins.format(after) + FAULTS[fault]})
    run = ("train", f"{module}:run", "--batch", 2, "--workers", 1, "--restarts", 0, "--json")
    assert said in check(dovetail(*run), module)


def test_a_hung_worker_is_ended_by_its_lease(dovetail, written):
    module = written(item="if os.getpid() != HERE and late(4): time.sleep(1000)")
    run = ("train", f"{module}:run", "--batch", 2, "--workers", 1, "--restarts", 0, "--lease", "1s")
    status, _, err = dovetail(*run)
    assert status == 1
    assert "1 workers were lost" in err
    assert err.splitlines()[-1].endswith("the last of them: killed by SIGKILL")


# What is no exception, but of no use


RUBBISH = [
    ("capture", "build", "return None", "must return (module, inputs)", 2),
    ("capture", "build", "return Net, torch.zeros(3, 4)", "not (type, Tensor)", 2),
    ("capture", "build", "return (Net(),)", "not (Net)", 2),
    ("capture", "forward", "return None", "returns None, which holds no tensor", 2),
    ("capture", "forward", "return object()", "returns a object, which holds no tensor", 2),
    ("plan", "loss", "return None", "the loss must be one number, but is of NoneType", 2),
    ("plan", "loss", "return output", "the loss must be one number, but is of shape (3, 2)", 2),
    ("plan", "loss", "return (output > 0).sum()", "does not depend on any trainable", 2),
    ("train", "build", "return 3", "must return (model, loss, optimizer, dataset)", 2),
    ("train", "build", "return Net, loss, optimizer, Data()", "is no torch.nn.Module", 2),
    ("train", "forward", "return None", "the loss failed: AttributeError", 1),
    ("train", "loss", "return None", "loss: returns NoneType, not a tensor", 2),
    ("train", "loss", "return output", "loss: is of shape", 2),
    ("train", "loss", "return (output > 0).sum()", "does not depend on any parameter", 2),
    ("train", "length", "return 0", "dataset: is empty", 2),
    ("train", "length", "return -1", "__len__() should return >= 0", 1),
    ("train", "length", "return 'many'", "cannot be interpreted as an integer", 1),
    ("train", "item", "return object()", "default_collate: batch must contain tensors", 1),
    ("train", "item", "return torch.zeros(4 + index), 0", "stack expects each tensor", 1),
    ("train", "item", "if index > 6: raise IndexError", "item 7 of the data set failed", 1),
    ("train", "optimizer", "return None", "optimizer: made NoneType", 2),
]


@pytest.mark.parametrize(("command", "place", "code", "said", "status"), RUBBISH)
def test_rubbish_is_refused_by_name(dovetail, written, command, place, code, said, status):
    module = written(**{place: code})
    line = check(dovetail(*words((STEP | RUN)[command], module)), module, status)
    assert said in line


def test_a_loss_that_turns_into_rubbish_ends_the_run(dovetail, written):
    module = written(loss="if late(3): return output")
    run = ("train", f"{module}:run", "--backend", "simulated", "--batch", 2, "--workers", 1)
    assert "failed: loss: is of shape (2, 2); it must be one number" in check(
        dovetail(*run), module
    )


def test_a_loss_that_is_not_finite_is_told(dovetail, written):
    module = written(loss="return output.sum() * float('nan')")
    status, out, err = dovetail(*words(RUN["train"], module))
    assert status == 1
    assert "diverged: 101 commits were refused, the last one as not finite" in err
    assert "not finite" in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("self.inner = nn.LazyLinear(2)", "inner.weight has no shape yet"),
        ("self.norm = nn.LazyBatchNorm1d(affine=False)", "norm.running_mean has no shape yet"),
        ("self.inner.weight = nn.Parameter(torch.zeros(2, 4).to_sparse())", "inner.weight is"),
    ],
)
def test_lazy_and_sparse_parameters_are_refused_by_name(dovetail, written, code, said):
    module = written(init=code)
    for command in ("capture", "train"):
        status, _, err = dovetail(*words((STEP | RUN)[command], module))
        assert status == 2
        assert said in err


# What is printed


def test_what_the_users_code_prints_is_no_part_of_the_results(dovetail, written, tmp_path):
    module = written()
    plan, weights = tmp_path / "plan.json", tmp_path / "weights.pt"
    machine = ("--machine", "2 x p100 + haswell", "--out", plan, "--placer", "single")
    commands = [
        ("train", f"{module}:run", "--backend", "threads", "--out", weights, "--json"),
        ("predict", f"{module}:run", weights, "dataset", "--evaluate", "--backend", "threads",
         "--json"),
        ("plan", f"{module}:step", *machine, "--json"),
        ("export", plan, f"{module}:step"),
    ]  # fmt: skip
    for command in commands:
        status, out, err = dovetail(*command)
        assert status == 0, err
        assert json.loads(out)
        assert "imported" not in out
        assert "built" in err


@pytest.mark.parametrize("place", ["imported", "build", "forward"])
def test_a_plans_model_that_fails_later_is_named(dovetail, written, tmp_path, place):
    plan, flag = tmp_path / "plan.json", tmp_path / "flag"
    module = written(**{place: f"if os.path.exists({str(flag)!r}): sys.exit(0)"})
    assert dovetail(*words(STEP["plan"], module), "--out", plan)[0] == 0
    flag.touch()
    sys.modules.pop(module)
    for command in (("report", plan), ("export", plan), ("run", plan)):
        check(dovetail(*command, f"{module}:step"), module)
        sys.modules.pop(module, None)


@pytest.mark.parametrize("place", ["build", "forward", "item", "metric"])
def test_predictions_name_the_users_line(dovetail, written, tmp_path, place):
    module, weights = written(**{place: FAULTS["exits_with_0"]}), tmp_path / "weights.pt"
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.ModuleDict({"inner": torch.nn.Linear(4, 2)}).state_dict(), weights)
    code = (tmp_path / f"{module}.py").read_text()
    trainer = "dovetail.Trainer(Net(), loss, optimizer, metrics=[metric]), Data()"
    code = code.replace("return Net(), loss, optimizer, Data(), Data()", f"return {trainer}")
    (tmp_path / f"{module}.py").write_text("import dovetail\n" + code)
    run = ("predict", f"{module}:run", weights, "dataset", "--evaluate", "--backend", "threads")
    check(dovetail(*run), module)


# --debug, Ctrl-C and links


@pytest.mark.parametrize("where", ["before", "behind"])
def test_debug_shows_the_traceback(dovetail, written, where):
    command = words(RUN["train"], written(item=FAULTS["raises"]))
    status, _, err = dovetail(*(("--debug", *command) if where == "before" else command), *(
        ("--debug",) if where == "behind" else ()
    ))  # fmt: skip
    assert status == 1
    assert "Traceback" in err
    assert "second line" in err
    assert err.splitlines()[-1].startswith("error: item 0 of the data set failed: ValueError: mine")


def test_debug_shows_a_workers_traceback(dovetail, written):
    module = written(item=LATE + FAULTS["raises"])
    status, _, err = dovetail(*words(RUN["threads"], module), "--batch", 2, "--debug")
    assert status == 1
    assert f'{module}.py", line' in err
    assert "in __getitem__" in err


@pytest.mark.parametrize("place", ["imported", "build", "item"])
def test_ctrl_c_in_the_users_code_is_one_line(written, tmp_path, place):
    module = written(**{place: "open('reached', 'w').close(); time.sleep(1000)"})
    command = ("-m", "dovetail", "train", f"{module}:run", "--backend", "simulated")
    process = forked.start(command, cwd=tmp_path, env=dict(os.environ))
    while not (tmp_path / "reached").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert [line for line in told(err) if line not in ("imported", "built")] == ["interrupted"]


def test_os_exit_ends_a_real_process_with_a_line(written, tmp_path):
    module = written(imported="os._exit(0)")
    command = (sys.executable, "-m", "dovetail", "capture", f"{module}:step", "--out", "g.json")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    check((done.returncode, done.stdout, done.stderr), module)


@pytest.fixture(scope="module")
def computing_on(tmp_path_factory):
    """What comes of a command that is done while a thread of the user's code computes on, and what
    it leaves in TMPDIR. The user's code has torch import dynamo, which makes a folder there."""
    folder = tmp_path_factory.mktemp("computing_on")
    (temporary := folder / "temporary").mkdir()
    on = "[torch.ones(2**20).add_(1) for _ in range(10**9)]"
    start = f"import threading; threading.Thread(target=lambda: {on}, daemon=True).start()"
    filled = dict.fromkeys(PLACES, "pass") | {"imported": f"import torch._dynamo; {start}"}
    (folder / "computing_on.py").write_text(MODULE.format(here=os.getpid(), **filled))
    command = (sys.executable, "-m", "dovetail", "capture", "computing_on:step", "--out", "g.json")
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False,
        env=environment | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    return done, (folder / "g.json").exists(), os.listdir(temporary)


def test_a_thread_that_computes_on_does_not_abort_a_command_that_is_done(computing_on):
    done, is_written, _ = computing_on
    assert done.returncode == 0, done.stderr
    assert is_written


def test_torch_leaves_no_folder_in_the_temporary_one(computing_on):
    assert computing_on[2] == []


def test_an_output_that_is_a_link_to_itself_is_refused(dovetail, written, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    module = written()
    for options in (("--out", link), ("--folder", link / "run"), ("--report", link / "a.html")):
        status, _, err = dovetail("train", f"{module}:run", "--backend", "simulated", *options)
        assert status == 2
        (line,) = told(err)
        assert "leads back to itself" in line


def test_a_process_that_the_users_code_forks_may_end_by_os_exit(dovetail, written):
    fork = "pid = os.fork(); os._exit(0) if not pid else os.waitpid(pid, 0)"
    status, _, err = dovetail(*words(STEP["capture"], written(build=fork)))
    assert status == 0, err
