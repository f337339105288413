"""Every claim of SECURITY.md names a test, and that test is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


def test_every_row_of_a_table_names_a_test():
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    claims = [row for row in rows if not re.match(r"\|[-|]+\|$|\| (claim|file) ", row)]
    assert len(claims) > 30
    assert [row for row in claims if not re.search(r"`tests/[\w/]+\.py::\w+`", row)] == []


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_test_that_a_claim_names_is_there(file, name):
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
