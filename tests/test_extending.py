"""The examples of `docs/extending.md` run as they stand, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
EXAMPLES = re.findall(r"^## (A .*?)\n.*?```python\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)


def test_there_is_an_example_of_each():
    kinds = ["placer", "rule of training", "scheduler", "network", "machine"]
    assert [title for title, _ in EXAMPLES] == [f"A {kind}" for kind in kinds]


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_an_example_runs(title, code, tmp_path):
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
