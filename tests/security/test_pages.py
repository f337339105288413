"""Pages with hostile names everywhere are, tag by tag, those with harmless ones."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dovetail.placers.learned.records import Learned
from dovetail.reports.kit import save_page
from dovetail.reports.learning_page import render_learning
from dovetail.reports.page import render
from dovetail.reports.stages_page import render_stages
from dovetail.reports.training_page import render_training
from reproductions.elsewhere_page import render_comparison
from tests.pipeline.test_learning_progress import point
from tests.reports.test_page import named_report
from tests.reports.test_stages_page import named_schedules
from tests.reports.test_training_page import named_history
from tests.reproductions.test_elsewhere import named_comparison
from tests.reproductions.test_page import named_page

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "</style></title></textarea><script>alert(1)</script>",
    "<!--<script>",
    "--!><svg/onload=alert(1)>",
    '" onmouseover="alert(1)" x=\'',
    "' autofocus onfocus='alert(1)",
    "`${alert(1)}\u2028\u2029\\",
    "{{ 7 * 7 }}{% include 'x' %}",
    "]]><![CDATA[",
    "&lt;script&gt;&#60;b>",
    "x\ud800\0y",
)


def learning(name):
    learned = Learned(
        theta=np.zeros(1, np.float32), placements={}, values={name: 1.0}, found={name: 1},
        trials=8, updates=1, seconds=1.0, points=(point(0, task=name), point(1, task=name)),
    )  # fmt: skip
    card = {"method": name, name: name, "trained_on": [name]}
    return render_learning(learned, card, plans={name: None}, made=name)


PAGES = {
    "plan": lambda name: render(named_report(name)),
    "stages": lambda name: render_stages(named_schedules(name), made=name),
    "training": lambda name: render_training([named_history(name)] * 2, made=name),
    "learning": learning,
    "elsewhere": lambda name: render_comparison(named_comparison(name), made=name),
    "papers": named_page,
}


class Parsed(HTMLParser):
    """Tags with the names of their attributes, all that is no tag and no text, and scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.others, self.scripts = [], [], []
        self._script = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, sorted(name for name, _ in attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", []))
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data

    def handle_comment(self, data):
        self.others.append(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


def page_of(kind, name, folder):
    save_page(PAGES[kind](name), folder / "page.html")
    return (folder / "page.html").read_text()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", PAGES)
def test_no_name_makes_a_tag_an_attribute_or_a_script(kind, name, tmp_path):
    plain, page = Parsed(page_of(kind, "plain", tmp_path)), page_of(kind, name, tmp_path)
    hostile = Parsed(page)
    # Colours and names that are alike may fold otherwise, but nothing new appears.
    assert {(tag, *names) for tag, names in hostile.tags} <= {
        (tag, *names) for tag, names in plain.tags
    }
    assert hostile.others == plain.others == ["doctype html"]
    used = {name for _, names in hostile.tags for name in names}
    assert not [each for each in used if each in ("src", "href", "style") or each[:2] == "on"]
    assert len(hostile.scripts) == len(plain.scripts)
    assert hostile.scripts[1:] == plain.scripts[1:]
    for data in hostile.scripts[:1]:
        json.loads(data)
        assert not re.search("[<>&\u2028\u2029]", data)
    assert re.search("Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha", page)
    assert not re.search(r"url\(|@import", page)


def test_every_kind_of_page_is_among_them():
    makers = {
        file.stem
        for folder in ("src/dovetail/reports", "reproductions")
        for file in (ROOT / folder).glob("*.py")
        if "render_page(" in file.read_text("utf-8") and file.stem != "kit"
    }
    names = {"page" if kind in ("plan", "papers") else f"{kind}_page" for kind in PAGES}
    # The tables of the other papers hold our own names, and have tests beside their code.
    assert makers - {"dos_page", "thesis_page"} == names


def test_templates_mark_nothing_as_safe():
    folder = ROOT / "src/dovetail/reports/templates"
    for template in folder.iterdir():
        assert not re.search(r"\|\s*safe|autoescape", template.read_text("utf-8")), template.name
