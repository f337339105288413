"""The kit that all pages and tables are made of.

A page is a title, cards, and parts one below the other. A part is one of these:

    text      a paragraph; markup, such as a chart, is taken as it is
    Table     rows of cells; a terminal prints it, too
    Figures   pictures side by side, each with a caption
    Section   a heading with parts below it, or a fold that opens them

`templates/page.html` draws every page. A part of a form of its own is a template, which `piece`
makes markup of. Jinja2 escapes whatever is not `Markup`, so that a foreign name stays text. A page
fetches nothing: its Content-Security-Policy allows its own style and script by their hashes, and
nothing else.
"""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.markup import escape as escape_markup
from rich.table import Table as RichTable

from dovetail.runtime.files import write_atomically
from dovetail.units import printable

TERMINAL_STYLES = {"chosen": "bold green", "none": "dim", "over": "bold red", "total": "bold"}
"""Maps the marks of a table's rows, which are classes of the style sheet, to styles of rich."""

Card = tuple[str, str, str]
"""A card at the top of a page: its label, its figure, and a remark."""


class StyledCell(NamedTuple):
    """A cell of a page's table, with a class of the style sheet."""

    text: str
    style: str


@dataclass(frozen=True)
class Table:
    """A table of a page or of the terminal. The first cell of a row is its heading.

    head    an empty one draws none; its rows are then facts, each a label and a text
    style   classes of the style sheet
    title   stands above it on a terminal; on a page a section's title does
    marks   row -> how it is marked: a key of `TERMINAL_STYLES`, or another class
    left    columns that a terminal aligns left, beside the first
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | StyledCell]]
    style: str = "scroll"
    title: str = ""
    marks: Mapping[int, str] = field(default_factory=dict)
    left: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, str]],
        *,
        style: str = "scroll",
        title: str = "",
        marks: Mapping[int, str] | None = None,
    ) -> "Table":
        """The table of rows that map each column's heading to a cell; all have the same columns.

        A cell stands beside its heading in the code, so that none can slip into another column.
        """
        head = tuple(rows[0]) if rows else ()
        cells = [[row[heading] for heading in head] for row in rows]
        return cls(head, cells, style, title, marks or {})

    def __rich__(self) -> RichTable:
        """The table as rich prints it, without borders."""
        if self.head:
            table = RichTable(
                title=terminal_text(self.title) if self.title else None,
                title_justify="left",
                title_style="bold",
                box=None,
                pad_edge=False,
            )
        else:
            table = RichTable.grid("", "", padding=(0, 2))
            table.columns[0].style, table.columns[1].overflow = "bold", "fold"
        for i, heading in enumerate(self.head):
            table.add_column(
                terminal_text(heading),
                justify="left" if i == 0 or i in self.left else "right",
                overflow="fold",
            )
        for i, row in enumerate(self.rows):
            texts = (cell if isinstance(cell, str) else cell.text for cell in row)
            style = TERMINAL_STYLES.get(self.marks.get(i, ""))
            table.add_row(*map(terminal_text, texts), style=style)
        return table


class Figure(NamedTuple):
    """A picture with its caption, and classes of the style sheet."""

    caption: str
    picture: Markup
    style: str = ""


@dataclass(frozen=True)
class Figures:
    """Pictures that stand side by side where there is room."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Section:
    """Parts below a heading; "" draws none.

    fold    "open" or "closed": the parts fold away behind the title; "": they do not
    style   classes of the style sheet
    """

    title: str
    parts: "Sequence[Part]"
    fold: str = ""
    style: str = ""


Part = str | Table | Figures | Section


@dataclass(frozen=True)
class Page:
    """All that a page is made of.

    brand        the command that the page belongs to, above the title
    lead         what stands between the title and the cards, such as a warning
    more_style   style sheets behind `assets/page.css`
    scripts      files of `assets/`, in order; they read `data`, JSON
    """

    title: str
    cards: Sequence[Card]
    parts: Sequence[Part]
    brand: str = "dovetail"
    lead: Sequence[str] = ()
    more_style: str = ""
    scripts: Sequence[str] = ()
    data: Markup = field(default_factory=Markup)


def render_page(page: Page) -> str:
    """The page as text."""

    def asset(name: str) -> str:
        return resources.files("dovetail.reports").joinpath("assets", name).read_text("utf-8")

    def digest(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style = asset("page.css") + page.more_style
    script = "\n".join(map(asset, page.scripts))
    policy = f"default-src 'none'; style-src '{digest(style)}'; "
    if script:
        policy += f"script-src '{digest(script)}'; "
    return _environment().get_template("page.html").render(
        page=page,
        policy=Markup(policy + "base-uri 'none'"),
        style=Markup(style),
        script=Markup(script),
    )  # fmt: skip


def save_page(text: str, path: str | os.PathLike[str]) -> None:
    """Write a page whole or not at all. Raises `UnwritableError`."""
    # A name may hold a lone surrogate, which UTF-8 cannot encode: it is shown as "?".
    write_atomically(path, text.encode("utf-8", "replace"))


def piece(template: str, **values: object) -> Markup:
    """What one of `templates/` makes of the values that it names."""
    return Markup(_environment().get_template(template).render(**values))


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("dovetail.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def terminal_text(text: str) -> str:
    """The text, escaped so that rich and the terminal show it character by character."""
    return escape_markup(printable(text))


def strong(text: str) -> Markup:
    """A paragraph that is the most important one of its section."""
    return Markup("<p><strong>{}</strong></p>").format(text)


def hint(text: str) -> Markup:
    """A paragraph that says how to read what stands beside it; "" if there is no text."""
    return Markup('<p class="hint">{}</p>').format(text) if text else Markup("")


def coloured(style: str, name: str) -> Markup:
    """A name behind its colour, the class of which is `style`."""
    return Markup('<i class="{}"></i>{}').format(style, name)


def preformatted(text: str) -> Markup:
    """Lines of a command or a program; "" if there is no text."""
    return Markup("<pre>{}</pre>").format(text) if text else Markup("")


def scrolled(picture: Markup) -> Markup:
    """A picture wider than the page may be, which then scrolls in its own frame."""
    return Markup('<div class="scroll">{}</div>').format(picture)


def in_figures(table: Table) -> Section:
    """A chart's figures, folded below it."""
    return Section("in figures", [table], fold="closed")
