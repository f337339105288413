"""The kit of pages: every part in its form, foreign text escaped, a table also for the terminal."""

import re

from markupsafe import Markup
from rich.console import Console

from dovetail.reports.kit import (
    Figure,
    Figures,
    Page,
    Section,
    StyledCell,
    Table,
    coloured,
    hint,
    in_figures,
    preformatted,
    render_page,
    strong,
)
from tests.support.report_samples import EVIL

SHOWN = Markup("<svg></svg>")


def main_of(*parts, **fields):
    """What a page shows below its cards, without the ends of lines."""
    page = render_page(Page("title", [], parts, **fields))
    return re.sub(r"\n\s*", "", page.partition("<main>")[2].partition("</main>")[0])


def printed(table):
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_a_section_stands_in_a_frame_and_sections_within_it_have_headings_alone():
    inner = Section("Inner", [Section("Innermost", ["text"], style="why")])
    assert main_of(Section("Outer", ["words", inner, SHOWN])) == (
        "<section><h2>Outer</h2><p>words</p><div><h3>Inner</h3>"
        '<div class="why"><h4>Innermost</h4><p>text</p></div></div><svg></svg></section>'
    )


def test_a_fold_is_open_or_closed_and_sections_within_a_fold_of_the_page_have_frames():
    assert main_of(Section("Batch", [Section("One", ["a"])], fold="open", style="batch")) == (
        '<details class="batch" open><summary>Batch</summary>'
        "<section><h3>One</h3><p>a</p></section></details>"
    )
    assert main_of(in_figures(Table(("a",), [("b",)]))).startswith(
        "<details><summary>in figures</summary>"
    )


def test_a_table_names_its_rows_marks_them_and_styles_cells():
    cells = [("x", "1", StyledCell(SHOWN, "bar")), ("y", "2", "")]
    assert main_of(Table(("", "n", ""), cells, "scroll why", marks={1: "chosen"})) == (
        '<div class="scroll why"><table><thead><tr><th scope=col></th><th scope=col>n</th>'
        "<th scope=col></th></tr></thead><tbody><tr><th scope=row>x</th><td>1</td>"
        '<td class="bar"><svg></svg></td></tr><tr class="chosen"><th scope=row>y</th><td>2</td>'
        "<td></td></tr></tbody></table></div>"
    )
    assert "thead" not in main_of(Table((), [("label", "text")]))


def test_figures_stand_side_by_side_with_their_captions():
    assert main_of(Figures([Figure("one", SHOWN, "m0"), Figure("", SHOWN)])) == (
        '<div class="figures"><figure class="m0"><figcaption>one</figcaption><svg></svg></figure>'
        "<figure><svg></svg></figure></div>"
    )


def test_foreign_text_is_escaped_wherever_it_stands():
    table = Table((EVIL,), [(EVIL, EVIL, StyledCell(EVIL, "own"))], EVIL, marks={0: EVIL})
    parts = [
        EVIL,
        table,
        Figures([Figure(EVIL, SHOWN, EVIL)]),
        Section(EVIL, [Section(EVIL, [preformatted(EVIL), strong(EVIL)])], style=EVIL),
        Section(EVIL, [hint(EVIL), coloured(EVIL, EVIL)], fold="closed", style=EVIL),
    ]
    page = render_page(
        Page(EVIL, [(EVIL, EVIL, EVIL)], parts, brand=EVIL, lead=[EVIL, strong(EVIL)])
    )
    assert "<img" not in page
    assert "<script" not in page
    assert page.count("&lt;img") == 27


def test_the_same_table_is_printed_on_a_terminal_character_by_character():
    table = Table(
        ("name", "[red]n"), [("a\x1b[2J", "1"), ("[bold]b", "22")], title="T[/x]", marks={1: "over"}
    )
    lines = [line.rstrip() for line in printed(table).splitlines()]
    assert lines == ["T[/x]", "name      [red]n", r"a\x1b[2J       1", "[bold]b       22"]
    facts = [line.split() for line in printed(Table((), [("model", "[x]")])).splitlines()]
    assert facts == [["model", "[x]"]]


def test_what_leads_a_page_stands_above_its_cards():
    page = render_page(Page("title", [("a", "b", "c")], [], lead=[strong("not finished")]))
    assert page.index("not finished") < page.index('class="cards"')
    assert '<div class="card"><span>a</span><strong>b</strong><small>c</small></div>' in page
    assert "<script" not in page
