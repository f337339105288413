"""`docs/extending.md` has one example of each kind; `test_documents` runs them."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()


def test_there_is_an_example_of_each_kind():
    sections = re.findall(r"^## A (.*?)\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE)
    kinds = ["placer", "candidate", "rule of training", "scheduler", "network", "machine"]
    assert [kind for kind, text in sections if "```python" in text] == kinds
