"""What is tracked stays small, and is not chopped into ever more functions."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST_BYTES, ALL_BYTES = 1_500_000, 15_000_000
FUNCTIONS, CALLED_ONCE = 49.0, 9.9
"""Functions in 1,000 lines of the package, and private ones with one caller in 100 functions. Both
may only fall, and whoever lets them fall lowers these limits; the aims are 42 and 13. A helper with
one caller belongs into its caller, so that an algorithm is one body."""
SLACK = 0.5
"""How far below its limit a figure may be before the limit must be lowered."""


@pytest.fixture(scope="module")
def tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return {name: (ROOT / name).stat().st_size for name in listed if (ROOT / name).is_file()}


def test_no_tracked_file_is_large(tracked):
    assert [name for name, size in tracked.items() if size > LARGEST_BYTES] == []


def test_all_tracked_files_together_are_small(tracked):
    assert 0 < sum(tracked.values()) < ALL_BYTES


def test_packages_environments_and_generated_pages_are_ignored():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for name in ("some-1.0-py3-none-any.whl", ".venv", "nested/other.whl", "benchmarks/a/b.html"):
        command = ["git", "check-ignore", "--no-index", "-q", name]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0, name


def test_the_package_is_not_chopped_further():
    lines = functions = called_once = 0
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text("utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        names = [n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        uses = Counter(n.id for n in nodes if isinstance(n, ast.Name))
        uses.update(n.attr for n in nodes if isinstance(n, ast.Attribute))
        lines += len(text.splitlines())
        functions += len(names)
        private = [name for name in names if name.startswith("_") and not name.startswith("__")]
        called_once += sum(uses[name] == 1 for name in private)
    assert FUNCTIONS - SLACK < 1000 * functions / lines <= FUNCTIONS
    assert CALLED_ONCE - SLACK < 100 * called_once / functions <= CALLED_ONCE
