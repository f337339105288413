"""The result table that all papers fill, and what its writers make of it."""

import csv
import io

from markupsafe import Markup

from reproductions.results import ResultColumn, ResultTable, remarked

TABLE = ResultTable.of(
    ("row", ResultColumn("search", "s", "{:.3g}".format), "found", "why"),
    [("a", 1 / 3, True, None), (Markup("<b>b</b>"), None, False, "x <y>")],
    title="Title",
    note="A note.",
)


def test_people_read_units_formats_and_a_dash_where_there_is_no_value():
    assert TABLE.head == ("row", "search, s", "found", "why")
    assert TABLE.cells == [("a", "0.333", "True", "-"), ("<b>b</b>", "-", "False", "x <y>")]
    assert isinstance(TABLE.cells[1][0], Markup)  # a page takes it as it is
    shown = TABLE.shown()
    assert (shown.head, shown.rows, shown.title) == (TABLE.head, TABLE.cells, "Title")
    assert TABLE.section().parts == ["A note.", shown]


def test_the_file_has_names_and_full_precision_and_nothing_where_there_is_no_value():
    lines = list(csv.DictReader(io.StringIO(TABLE.csv_text().decode())))
    assert lines[0] == {"row": "a", "search": str(1 / 3), "found": "True", "why": ""}
    assert lines[1]["search"] == ""


def test_records_may_lack_columns_and_have_more():
    table = ResultTable.of_records(("a", "b"), [{"a": 1, "c": 3}, {"b": "\ud800"}])
    assert table.rows == [(1, None), (None, "\ud800")]
    assert table.csv_text() == b"a,b\n1,\n,?\n"


def test_remarks_stand_in_small_print_beside_a_text_and_both_are_escaped():
    assert remarked("<y>", "small", "&") == "&lt;y&gt; <small>small</small> <small>&amp;</small>"
    assert isinstance(remarked("y"), Markup)
