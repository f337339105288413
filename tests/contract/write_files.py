"""Writes the files that later versions must open: `python -m tests.contract.write_files`.

What stands in `files/` was written by an earlier version and is not written again. For a new kind
of file add its command here, run this in a copy of the checkout, and keep the new file alone.
"""

import shutil
import tempfile
from pathlib import Path

from tests.contract.shell import DOVETAIL, Shell

FILES = Path(__file__).with_name("files")
RNN = "zoo:rnnlm?layers=2&hidden=16&steps=4&batch=4&vocabulary=30"
GPT = "zoo:gpt2?layers=2&hidden=32&heads=2&context=8&vocabulary=40&batch=2"
BUDGET = ("--budget", "40e", "--seed", "1")
TWO = ("--machine", "2 x p100 + haswell", *BUDGET)
FOUR = ("--machine", "4 x a100", *BUDGET)
PLANS = {
    "inference": (GPT, *TWO),
    "training": (RNN, "--train", "adam", *TWO),
    "pinned": (RNN, "--train", "sgd", *TWO, "--pin", "lstm.0=p100:0", "--cap", "p100:1=2GiB"),
    "pipeline": (GPT, "--train", "adam", *FOUR, "--micro-batches", "4"),
    "towers": (RNN, "--train", "rmsprop", *FOUR, "--replicas", "2"),
    "asynchronous": (RNN, "--train", "sgd", *FOUR, "--replicas", "2", "--asynchronous"),
    "shared": (
        "zoo:squeezenet_1_1?batch=4&size=32", "--train", "sgd", *FOUR, "--replicas", "auto",
    ),
    "map": (GPT, *FOUR, "--for", "device-map", "--objective", "load", "--min-gain", "0"),
    "stages": ("zoo:squeezenet_1_1?batch=1&size=32", "--machine", "2 x v100", "--stages", *BUDGET),
}  # fmt: skip
TRAIN = (
    "train", "user_models:classifier", "--rule", "adag-agn", "--workers", "2", "--epochs", "2",
    "--batch", "10", "--window", "2", "--seed", "4", "--folder", "train_run",
)  # fmt: skip
LEARN = (
    "learn", "one", "zoo:rnnlm?layers=1&hidden=16&steps=3&batch=2&vocabulary=20", "--train", "sgd",
    "--machine", "2 x p100", "--method", "seq2seq", "--trials", "16", "--seed", "2",
)  # fmt: skip
LAUNCHER = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *DOVETAIL)
CHECKPOINT = ("run", "on_ranks.json", "--steps", "4", "--every", "2", "--checkpoint", "checkpoint")


def plan_for_ranks(shell):
    """Writes on_ranks.json, a plan for two ranks of the machine that this is."""
    shell.works("machine", "here/2", "--out", "two.toml")
    words = ("--train", "adam", "--machine", "two.toml", "--placer", "balanced", "--budget", "10e")
    shell.works("plan", RNN, *words, "--out", "on_ranks.json")


def write(shell):
    for name, words in PLANS.items():
        shell.works("plan", *words, "--out", f"plan-{name}.json")
    phases = ("--phases", "prefill=1,decode=16", *FOUR)
    shell.works("plan", "transformers:llama?tokens=8", *phases, "--out", "plan-phases.json")
    shell.works("capture", RNN, "--train", "adam", "--out", "graph.json.gz")
    shell.works("machine", "2 x k80 + haswell", "--out", "machine.toml")
    shell.works("export", "plan-inference.json", "--to", "instance", "--out", "instance.json")
    outputs = ("--history", "history.json.gz", "--out", "weights.pt")
    shell.works(*TRAIN, *outputs)
    shell.works(*LEARN, "--policy-out", "policy.safetensors")
    plan_for_ranks(shell)
    ended = shell.python(*LAUNCHER, *CHECKPOINT)
    assert ended.status == 0, ended.err


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(folder)
        write(shell)
        for path in (*shell.folder.glob("plan-*.json"), *(shell.folder / name for name in (
            "graph.json.gz", "machine.toml", "instance.json", "history.json.gz", "weights.pt",
            "policy.safetensors", "train_run", "checkpoint",
        ))):  # fmt: skip
            copy = shutil.copytree if path.is_dir() else shutil.copy
            if not (FILES / path.name).exists():
                copy(path, FILES / path.name)
