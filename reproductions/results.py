"""A result table, which every paper's command fills, and its three writers.

    computing ──► ResultTable ──┬─► csv_text    values in full precision
                  columns, rows ├─► shown       the terminal's table, and a page's
                                └─► section     the page's, below its title and note

A column has a name, a unit and a format. A row holds a value for each column; None is no value.
`PaperTable` is a whole table as the command line asks for it, and `Outcome` what came out.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from dovetail.reports.kit import Section, Table

NOTHING = "-"
"""What is shown where there is no value."""
Facts = Sequence[tuple[str, str]]
"""(label, text) of how a table was made: the command, the machine that ran it."""


def as_text(value: Any) -> str:
    """The value as text; a text, which may be markup, is left as it is."""
    return value if isinstance(value, str) else str(value)


def remarked(text: str, *remarks: str) -> Markup:
    """A cell's text, and remarks in small print beside it."""
    return Markup("").join([text, *(Markup(" <small>{}</small>").format(r) for r in remarks)])


@dataclass(frozen=True)
class ResultColumn:
    """A column: its heading, and the unit that stands behind it; `write` makes a value text."""

    name: str
    unit: str = ""
    write: Callable[[Any], str] = as_text

    @property
    def heading(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True)
class ResultTable:
    """A table of a paper's results.

    key       the name under which a README has the table; "" if none does
    note      what to know of it, above it on a page
    style     classes of the style sheet
    marks     row -> how a page marks it
    """

    columns: Sequence[ResultColumn]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    note: str = ""
    key: str = ""
    style: str = "scroll"
    marks: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Iterable[str | ResultColumn], rows: Any, **more: Any) -> "ResultTable":
        """A table of these columns; a text stands for a column of that name and no more."""
        made = tuple(ResultColumn(c) if isinstance(c, str) else c for c in columns)
        return cls(made, [tuple(row) for row in rows], **more)

    @classmethod
    def of_records(
        cls, names: Sequence[str], records: Iterable[Mapping[str, Any]]
    ) -> "ResultTable":
        """A table of records, which may lack some of these columns."""
        return cls.of(names, ([record.get(name) for name in names] for record in records))

    @property
    def head(self) -> tuple[str, ...]:
        return tuple(column.heading for column in self.columns)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as people read them."""
        return [
            tuple(
                NOTHING if value is None else column.write(value)
                for column, value in zip(self.columns, row, strict=True)
            )
            for row in self.rows
        ]

    def csv_text(self) -> bytes:
        """The file: a head of the columns' names, and a line for each row."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows(self.rows)
        # A name may hold a lone surrogate, which UTF-8 cannot encode.
        return text.getvalue().encode("utf-8", "replace")

    def shown(self) -> Table:
        """The table as a terminal prints it, and as a page has it."""
        return Table(self.head, self.cells, self.style, self.title, self.marks)

    def section(self) -> Section:
        """The table on a page, below its title and its note."""
        return Section(self.title, [*([self.note] if self.note else []), self.shown()])


@dataclass(frozen=True)
class Outcome:
    """What a paper's command writes and prints.

    page       (facts) -> the page's text
    files      name of a CSV file -> its table
    printed    the terminal's tables, and `said` below them
    summary    the object that `--json` prints, without the files' names
    failures   task -> what failed in it: errors and tracebacks
    """

    page: Callable[[Facts], str]
    files: Mapping[str, ResultTable]
    printed: Sequence[Table]
    summary: Mapping[str, Any]
    failures: Mapping[str, str]
    said: str = ""


@dataclass(frozen=True)
class PaperTable:
    """A paper's table as it is asked for.

    command   the command line that computes it again
    files     names of its CSV files
    compute   (tell(what is being done, share that is done), complain(text)) -> the outcome
    warning   what is to be known of it before all else
    """

    out: Path
    command: str
    files: Sequence[str]
    compute: Callable[[Callable[[str, float], None], Callable[[str], None]], Outcome]
    warning: str = ""
