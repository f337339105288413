"""The page and the CSV of hand-made rows: complete, well-formed, nothing foreign as markup."""

import base64
import csv
import hashlib
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dovetail.errors import UnwritableError
from dovetail.reports.kit import save_page
from reproductions.cases import CASES, LEARNED
from reproductions.page import drawing, render
from reproductions.records import (
    CaseResult,
    Column,
    LossCurve,
    MethodResult,
    Published,
    TowerResult,
)
from reproductions.results import ResultTable
from reproductions.tables import FIELDS, lines_of
from tests.support.bench_samples import (
    CURVES,
    EVIL,
    METHODS,
    TOWERS,
    fits,
    make_case,
    make_column,
    make_row,
    oom,
    work,
)

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Tags with their attributes, balance, and the text of every cell by row."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.rows, self.cell = [], [], [], None
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def page(name="rl17", cases=None, rows=None, towers=TOWERS, curves=CURVES, **more):
    cases = [make_case()] if cases is None else cases
    rows = [make_row()] if rows is None else rows
    return render(name, cases, rows, towers, curves, **more)


def rows_of(text, first):
    return [row for row in Page(text).rows if row and row[0] == first]


BOTH = {"plain": make_column(), "hypothesis": make_column(expert=fits(2.9))}


@pytest.mark.parametrize("name", ["rl17", "gdp"])
def test_a_page_of_nothing_shows_every_row_of_the_paper_as_not_yet_run(name):
    text = page(name, CASES[name], [], [], [])
    for case in CASES[name]:
        assert rows_of(text, case.title)
    assert len(rows_of(text, "not yet run")) == len(CASES[name])
    assert "0 of " in text


def test_a_page_is_one_file_without_scripts_or_requests_and_its_style_is_the_one_allowed():
    text = page(rows=[make_row(**BOTH)])
    found = Page(text)
    assert not [tag for tag, _ in found.tags if tag in ("script", "link", "img", "iframe", "form")]
    for _, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert not {"src", "href", "srcset"} & set(attributes)
    policy = next(a["content"] for _, a in found.tags if "http-equiv" in a)
    style = re.search("<style>(.*?)</style>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'"
    assert "url(" not in style
    assert "@import" not in style


def test_the_papers_seconds_stand_above_ours_with_their_ratio():
    text = page(rows=[make_row(**BOTH)])
    assert rows_of(text, "RNNLM, 2 GPUs")[0][1:7] == [
        "6.89 s", "1.57 s", "13.43 s", "11.94 s", "3.81 s", "1.57 s",
    ]  # fmt: skip
    plain, hypothesis = rows_of(text, "ours, plain costs")[0], rows_of(text, "ours, hypothesis")[0]
    assert plain[1:] == [
        "6.90 s 1.00 x", "1.57 s 1.00 x", "1.10 s 0.08 x", "1.00 s 0.08 x", "0.920 s 0.24 x",
        "not yet run", "0.720 s auto", "0.700 s +3 %", "1.28 x",
    ]  # fmt: skip
    assert hypothesis[5] == "2.90 s 0.76 x"
    assert hypothesis[-1] == "4.03 x"


def test_out_of_memory_a_refusal_and_a_method_that_did_not_run_are_told_apart():
    methods = {"1 GPU": oom(), "scotch": MethodResult(None, "the library Scotch is not installed")}
    column = make_column(**methods)
    column = replace(column, methods={k: v for k, v in column.methods.items() if k != "mincut"})
    text = page(rows=[make_row(plain=column)])
    assert rows_of(text, "ours, plain costs")[0][2:5] == ["OOM", "none", "not yet run"]
    assert "k80:0 needs 13 GiB of 11.2 GiB" in text
    assert "the library Scotch is not installed" in text


def test_a_row_in_which_nothing_fits_is_shown():
    column = Column({"expert": oom(), "1 GPU": oom()}, "", 0.7, "load", {})
    text = page(rows=[make_row(plain=column)])
    assert rows_of(text, "ours, plain costs")[0][-3:] == ["nothing fits", "0.700 s", ""]
    assert "No plan fits" in text


def test_ops_and_groups_stand_beside_the_papers():
    sizes = [row for row in rows_of(page(), "RNNLM")]
    assert sizes[0][1:5] == ["8,943", "3,000", "188", "165"]


def test_the_hypothesis_is_marked_wherever_it_stands():
    text = page(rows=[make_row(**BOTH)])
    assert text.count('class="hypothesis-box"') == 3  # orderings, plans, methods
    assert "Hypothesis, not stated by the paper" in text
    alone = page()
    assert 'class="hypothesis-box"' not in alone
    assert "Hypothesis, not stated" not in alone


def test_learned_methods_are_shown_as_open():
    methods = [row for row in Page(page()).rows if len(row) > 1 and row[1] == "not yet run"]
    assert [row[0] for row in methods] == list(LEARNED["rl17"])


@pytest.mark.parametrize(("changes", "columns"), [({}, 2), ({"published": None}, 1)])
def test_what_is_never_trained_is_not_shown_as_open(changes, columns):
    text = page(cases=[make_case(**changes)], rows=[make_row(**BOTH)])
    shown = [row[0] for row in Page(text).rows if len(row) == 6 and row[1] == "not yet run"]
    assert shown == list(LEARNED["rl17"]) * columns


def test_orderings_stand_with_their_reasons():
    (row,) = rows_of(page(), "expert is slower than 1 GPU")
    assert row[1] == "3.81 s against 1.57 s"
    assert row[3] == "no"
    assert "of the time of one GPU" in row[4]
    assert "1 of 4" in page()  # RL, which was not run, is open


def test_towers_curves_fit_and_what_is_ours_are_there():
    text = page(
        facts=[("command", "python -m reproductions rl17 --seed 3"), ("machine", "two cores")]
    )
    tower = [row for row in rows_of(text, "Inception-V3, 4 GPUs")]
    assert tower[0][1:] == ["synchronous", "4 x 32", "6.4 s", "20.0"]
    assert tower[1][1:] == ["asynchronous", "4 x 32", "OOM: k80:0", ""]
    assert rows_of(text, "planned")[0][1:4] == ["1 s", "4", "1.625"]
    assert "vocabulary 10,000" in text
    assert rows_of(text, "command")[0][1] == "python -m reproductions rl17 --seed 3"
    assert rows_of(text, "machine")[0][1] == "two cores"
    assert "<code>" in text


def test_towers_and_curves_of_rl17_are_not_yet_run_and_gdp_has_none():
    assert page(towers=[], curves=[]).count("Not yet run.") == 2
    text = page("gdp", CASES["gdp"], [], [], [])
    assert "Data-parallel towers" not in text
    assert "Loss against" not in text


def test_the_residuals_are_those_of_the_fit(tmp_path, monkeypatch):
    figure = {"model": EVIL, "machine": "rl17/2", "column": "1 GPU", "published_seconds": 2.0,
              "simulated_seconds": 3.0}  # fmt: skip
    file = tmp_path / "fitted.json"
    file.write_text(json.dumps({"rl17": {"parameters": 2, "figures": [figure] * 3}}))
    monkeypatch.setattr("reproductions.page.FITTED", file)
    text = page()
    assert "3 figures met 2 parameters" in text
    assert rows_of(text, EVIL)[0][3:] == ["2 s", "3 s", "1.500 x"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"rl17": 3}', '{"rl17": {}}'])
def test_without_a_fit_the_page_still_is(tmp_path, monkeypatch, content):
    file = tmp_path / "fitted.json"
    file.write_text(content)
    monkeypatch.setattr("reproductions.page.FITTED", file)
    assert "how it was fitted" in page()
    file.unlink()
    assert "how it was fitted" in page()


def named_page(name):
    """A page that has the name wherever a foreign one may stand."""
    case = make_case(
        title=name,
        model=f"zoo:{name}",
        train=name,
        ours=name,
        published=Published({"1 CPU": 1.0, "RL": 1.0}, hours={"RL": name}),
    )
    shown = replace(
        work(), forward_seconds={name: 1.0}, transfer_seconds={name: 1.0}, picture=f"<svg>{name}"
    )
    bad = MethodResult(None, name, {name: 5}, 1.0)
    column = Column({name: fits(1.0), "1 CPU": bad}, name, 0.5, name, {name: shown})
    row = CaseResult(case.key, 1, 1, 1, 1, {"plain": column, name: column}, 1.0)
    towers = [TowerResult(name, name, name, 4, 32, None, name)]
    curves = [LossCurve(name, name, 1.0, [1.0])]
    return page(cases=[case], rows=[row], towers=towers, curves=curves, facts=[(name, name)])


def test_hostile_names_are_text_everywhere():
    text = named_page(EVIL)
    tags = {tag for tag, _ in Page(text).tags}
    assert not tags & {"script", "img"}
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 15


@pytest.mark.parametrize(
    "picture",
    [
        '<svg onload="alert(1)"></svg>',
        "<svg><script>alert(1)</script></svg>",
        '<svg><path style="fill:red"/></svg>',
        '<svg><a href="x">y</a></svg>',
        "<svg><",
        '<svg><path d=">" onload="alert(1)"/></svg>',
        '<img src="x">',
    ],
)
def test_a_kept_picture_that_does_more_than_draw_is_not_shown(picture):
    assert "svg" not in drawing(picture)
    assert "img" not in drawing(picture)


def test_a_picture_that_draws_is_shown_as_it_is():
    assert work().picture in page()


def test_a_page_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(UnwritableError):
        save_page(page(rows=[]), tmp_path / "none" / "index.html")
    save_page(page(cases=[make_case(title="lone \ud800")], rows=[]), tmp_path / "index.html")
    assert "lone ?" in (tmp_path / "index.html").read_text()


def lines(cases, rows):
    """The lines of rows.csv, read back."""
    text = ResultTable.of_records(FIELDS, lines_of("rl17", cases, rows)).csv_text().decode()
    return list(csv.DictReader(io.StringIO(text)))


def test_a_line_of_the_csv_has_the_papers_figure_and_ours():
    found = {line["method"]: line for line in lines([make_case()], [make_row()])}
    assert list(found) == [*METHODS, "seq2seq", "seq2seq-paper"]
    assert found["expert"] == {
        "table": "rl17",
        "row": "rnnlm-2gpu",
        "title": "RNNLM, 2 GPUs",
        "model": "zoo:rnnlm?layers=2",
        "optimizer": "adam",
        "machine": "rl17/2",
        "gpus": "2",
        "gpu_memory_bytes": "",
        "column": "plain",
        "method": "expert",
        "paper_column": "expert",
        "paper_seconds": "3.81",
        "seconds": "0.92",
        "ratio_to_paper": str(0.92 / 3.81),
        "reason": "",
        "bound_seconds": "0.7",
        "bound_proof": "busiest device",
        "peak_memory_bytes": str(2**30),
        "peak_memory_by_device_bytes": f"k80:0={2**30};haswell=5",
        "search_seconds": "0.25",
        "ops": "3000",
        "paper_ops": "8943",
        "groups": "165",
        "paper_groups": "188",
        "flops": str(10**12),
        "parameter_bytes": str(10**8),
        "sizes_of_ours": "vocabulary 10,000",
    }
    assert tuple(found["expert"]) == FIELDS
    assert found["metis"]["paper_column"] == found["metis"]["paper_seconds"] == ""
    assert found["seq2seq"]["paper_seconds"] == "1.57"
    assert found["seq2seq"]["reason"] == "not yet run"


def test_a_row_that_is_lacking_and_memory_that_is_lacking_are_told_in_the_csv():
    case = make_case(published=Published({"1 GPU": None}))
    found = lines([case, make_case("other")], [make_row(plain=make_column(expert=oom()))])
    of = {line["method"]: line for line in found}
    assert of["1 GPU"]["paper_seconds"] == "OOM"
    assert of["1 GPU"]["ratio_to_paper"] == ""
    assert of["expert"]["seconds"] == ""
    assert of["expert"]["reason"].startswith("OOM: k80:0")
    assert found[-1]["row"] == "other"
    assert found[-1]["reason"] == "not yet run"


def test_both_columns_are_in_the_csv():
    found = lines([make_case()], [make_row(**BOTH)])
    assert [line["column"] for line in found if line["method"] == "expert"] == [
        "plain",
        "hypothesis",
    ]


@pytest.mark.parametrize(
    ("last", "said"), [(0.9, "slower, as in the paper"), (0.2, "no slower here, other than")]
)
def test_whether_asynchronous_towers_converge_slower_is_read_off_the_curves(last, said):
    losses = {"synchronous towers": [2.0] * 5 + [0.5] * 20, "asynchronous towers": [last] * 25}
    text = page(curves=[LossCurve("Inception-V3", name, 1.0, of) for name, of in losses.items()])
    assert said in text
    assert "converge" not in page(curves=CURVES).split("Loss against simulated time")[1]


def test_a_planned_step_is_compared_with_synchronous_towers():
    seconds = {"planned": 9.0, "synchronous towers": 10.0, "asynchronous towers": 12.5}
    text = page(curves=[LossCurve("Inception-V3", name, of, [1.0]) for name, of in seconds.items()])
    assert "all examples, planned, takes 9 s, 10.0 % less than synchronous towers" in text
    assert "a step of asynchronous towers, takes 12.5 s, 25.0 % more than" in text
    assert "than synchronous towers." not in page(curves=CURVES)


def test_a_fit_with_as_many_parameters_as_figures_is_called_exact():
    assert "the fit is exact" in page()
