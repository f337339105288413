"""Pieces of a page without scripts: tables of escaped cells, and the policy that allows no request.

Whatever is not `Markup` is foreign text and is escaped.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape

_TAG = re.compile(r"</?([a-zA-Z]*)([^<>]*)>")
_DRAWN = {"svg", "text", "path", "title", "rect", "ul", "li", "i"}
_UNSAFE = re.compile(r"\b(on\w+|href|src|style)\s*=", re.IGNORECASE)


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def text_of(value: str) -> str:
    """`value` as markup: escaped, unless it is `Markup`."""
    return value if isinstance(value, Markup) else escape(value)


def table(head: Iterable[str], rows: Iterable[Iterable[str]], style: str = "scroll") -> Markup:
    """A table; the first cell of a row names it. With an empty head there is none."""
    titles = tuple(head)
    top = f"<thead>{row(titles, 'th scope=col')}</thead>" if titles else ""
    body = "".join(row(cells) for cells in rows)
    return Markup(f'<div class="{style}"><table>{top}<tbody>{body}</tbody></table></div>')


def row(cells: Iterable[str], tag: str = "td", style: str = "") -> str:
    """A row of a table; its first cell is its name."""
    first, *rest = cells
    lead = tag if tag.startswith("th") else "th scope=row"
    pieces = [f"<{lead}>{text_of(first)}</th>"]
    pieces += [f"<{tag}>{text_of(cell)}</{tag.split()[0]}>" for cell in rest]
    opening = f'<tr class="{style}">' if style else "<tr>"
    return opening + "".join(pieces) + "</tr>"


def cards(items: Iterable[tuple[str, str, str]]) -> Markup:
    """(what, figure, remark) side by side."""
    return Markup(
        "".join(
            f'<div class="card"><span>{text_of(what)}</span><strong>{text_of(figure)}</strong>'
            f"<small>{text_of(remark)}</small></div>"
            for what, figure, remark in items
        )
    )


def details(summary: str, content: str) -> Markup:
    """What is folded away until it is asked for."""
    return Markup(f"<details><summary>{text_of(summary)}</summary>{content}</details>")


def drawing(picture: str) -> Markup:
    """A picture that was kept in a file: itself if it only draws, else a line that says so."""
    tags = _TAG.findall(picture)
    draws = all(name in _DRAWN and not _UNSAFE.search(rest) for name, rest in tags)
    if draws and "<" not in _TAG.sub("", picture):
        return Markup(picture)
    return Markup("<p>The picture that was kept is not one that this version draws.</p>")


def policy(style: str) -> str:
    """Only this style, no script, and no request at all."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'"
