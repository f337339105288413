"""What is killed loses nothing: runs go on where they were, and each sample counts once."""

import pytest
import torch

import dovetail as dt

TRAIN = (
    "train", "user_models:classifier", "--rule", "downpour", "--folder", "kept", "--epochs", "3",
    "--batch", "10", "--window", "2", "--seed", "4", "--history", "run.json.gz", "--out", "w.pt",
)  # fmt: skip
SAMPLES, EPOCHS = 120, 3


def samples(shell):
    history = dt.History.load(shell.folder / "run.json.gz")
    return int(history.columns["samples"].sum())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_that_was_killed_goes_on_and_can_have_more_epochs(workers, shell):
    """Each sample counts once an epoch."""
    mark = shell.folder / "reached"
    words = (*TRAIN, "--workers", workers)
    assert shell.kills(*words, when=mark.exists, MARK=mark, MARK_AFTER=10)
    shell.works(*words, "--resume")
    assert samples(shell) == SAMPLES * EPOCHS
    if workers == 1:
        resumed = torch.load(shell.folder / "w.pt", weights_only=True)
        whole = [word.replace("kept", "whole").replace("w.pt", "whole.pt") for word in TRAIN]
        shell.works(*whole, "--workers", 1)
        once = torch.load(shell.folder / "whole.pt", weights_only=True)
        assert all(torch.equal(resumed[name], once[name]) for name in once)
        more = [word if word != "3" else "5" for word in TRAIN]
        shell.works(*more, "--workers", 1, "--resume")
        assert samples(shell) == SAMPLES * 5


def test_a_learning_that_was_killed_goes_on(shell):
    model = "zoo:rnnlm?layers=1&hidden=16&steps=4&batch=4&vocabulary=40"
    words = (
        "learn", "one", model, "--train", "sgd", "--machine", "2 x p100", "--method", "seq2seq",
        "--trials", "96", "--seed", "2",
    )  # fmt: skip
    shell.works(*words, "--folder", "whole", "--out", "whole.json")
    kept = shell.folder / "kept"

    def has_begun():
        return kept.is_dir() and any(path.stat().st_size > 4096 for path in kept.rglob("*"))

    shell.kills(*words, "--folder", "kept", when=has_begun)
    shell.works(*words, "--folder", "kept", "--resume", "--out", "kept.json")
    # One controller resumes bit for bit.
    whole, resumed = (dt.load_plan(shell.folder / f"{name}.json") for name in ("whole", "kept"))
    assert resumed.value == whole.value
    assert resumed.placement.tolist() == whole.placement.tolist()
