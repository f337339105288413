"""What the documents show works as shown."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


# The demo runs plans on this machine, and what it prints depends on that.
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.name != "demo.py")


def test_there_are_examples_to_run():
    assert EXAMPLES


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_prints_what_stands_beside_it(script):
    printed = subprocess.check_output([sys.executable, str(script)], text=True)
    assert printed == script.with_suffix(".txt").read_text()


def test_the_readmes_python_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
    assert (tmp_path / "plan.json").exists()
    assert (tmp_path / "plan.html").exists()


def test_every_term_of_an_error_is_in_the_tree_on_top():
    from dovetail import errors

    classes = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.DovetailError)
    ]
    for name in classes:
        assert name in (errors.__doc__ or ""), f"{name} is not in the tree of errors"
