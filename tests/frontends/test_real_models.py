"""A part of benchmarks/models: networks of other libraries, trained beside plain torch.

The whole table has more of them, more ways to run each, and what exports make of their plans.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for library in ("transformers", "peft", "torch_geometric"):
    pytest.importorskip(library)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "models" / "run.py"
RIGHT = ("llama", "mixtral", "t5", "lora_llama", "pyg_graphsage", "checkpointed_loop")
REFUSED = ("sparse_embedding", "data_branch")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--only", ",".join(RIGHT + REFUSED)]
    command += ["--parts", "inference,adamw", "--rows", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in map(json.loads, path.read_text("utf-8").splitlines())}


@pytest.mark.parametrize("name", RIGHT)
def test_a_real_model_computes_and_trains_for_three_steps_as_plain_torch_does(rows, name):
    for part in ("inference", "adamw"):
        assert rows[name][part].get("equal"), rows[name]
        assert len(rows[name][part]["differences"]) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_placed_is_refused_in_one_line(rows, name):
    assert rows[name]["adamw"]["refused"].count("\n") == 0
