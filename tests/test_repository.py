"""What is tracked stays small: a clone is what everybody begins with."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST_BYTES, ALL_BYTES = 1_500_000, 15_000_000


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
