"""Renders the pages' templates, and makes pieces of HTML that a template cannot make.

    templates/shell.html    head, policy, style, title, cards, scripts: once for all pages
        plan.html           a plan: timelines, graph, memory, methods, what bounds it
        stages.html         schedules of one device
        learning.html       a policy that learned
        training.html       training runs side by side
    templates/parts.html    tables and folds that several pages have

Jinja2 escapes whatever is not `Markup`, so that a foreign name stays text. A page fetches nothing:
its Content-Security-Policy allows its own style and script by their hashes, and nothing else.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup

from dovetail.runtime.files import write_atomically

_TAG = re.compile(r"</?([a-zA-Z]*)([^<>]*)>")
_DRAWN = {"svg", "text", "path", "title", "rect", "ul", "li", "i"}
_UNSAFE = re.compile(r"\b(on\w+|href|src|style)\s*=", re.IGNORECASE)

Card = tuple[str, str, str]
"""A card at the top of a page: its label, its figure, and a remark."""


class PageTable(NamedTuple):
    """A table of a page. The first cell of a row is its heading; an empty `head` draws none."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    style: str = "scroll"


def render_page(
    template: str,
    title: str,
    cards: Sequence[Card],
    *,
    styles: Sequence[str],
    more_style: str = "",
    scripts: Sequence[str] = (),
    folder: Path | None = None,
    **values: object,
) -> str:
    """The page as text.

    styles, scripts   files of `assets/`, in order; `more_style` follows the styles
    folder            of the template, if it is none of `templates/`
    values            what the template names
    """
    style = "\n".join(map(_asset, styles)) + more_style
    script = "\n".join(map(_asset, scripts))
    return _environment(folder).get_template(template).render(
        policy=_policy(style, script),
        title=title,
        cards=cards,
        style=Markup(style),
        script=Markup(script),
        **values,
    )  # fmt: skip


def save_page(text: str, path: str | os.PathLike[str]) -> None:
    """Write a page whole or not at all. Raises `UnwritableError`."""
    # A name may hold a lone surrogate, which UTF-8 cannot encode: it is shown as "?".
    write_atomically(path, text.encode("utf-8", "replace"))


def remarked(text: str, *remarks: str) -> Markup:
    """A cell's text, and remarks in small print beside it."""
    return Markup("").join([text, *(Markup(" <small>{}</small>").format(r) for r in remarks)])


def joined(pieces: Iterable[str]) -> Markup:
    """Pieces of markup, one after the other. The caller must have escaped foreign text in them."""
    return Markup("".join(pieces))


def drawing(picture: str) -> Markup:
    """A picture that was kept in a file, as markup if it is harmless, else a sentence instead.

    The file may come from anywhere. A picture is harmless if it has only elements that draw, and no
    attribute that could run a script, load a resource or set a style.
    """
    tags = _TAG.findall(picture)
    # After all tags are taken out, no "<" may be left: it would begin a tag that was not checked.
    # Nor may a ">": the tag before it would go on, behind an attribute that has one in its value.
    draws = all(name in _DRAWN and not _UNSAFE.search(rest) for name, rest in tags)
    if draws and not {"<", ">"} & set(_TAG.sub("", picture)):
        return Markup(picture)
    return Markup("<p>The picture that was kept is not one that this version draws.</p>")


@cache
def _environment(folder: Path | None) -> Environment:
    loader = PackageLoader("dovetail.reports")
    return Environment(
        loader=ChoiceLoader([loader, FileSystemLoader(folder)]) if folder else loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _asset(name: str) -> str:
    return resources.files("dovetail.reports").joinpath("assets", name).read_text("utf-8")


def _policy(style: str, script: str) -> Markup:
    """The Content-Security-Policy that permits this style and this script alone, and no request."""
    allowed = f"default-src 'none'; style-src '{_digest(style)}'; "
    if script:
        allowed += f"script-src '{_digest(script)}'; "
    return Markup(allowed + "base-uri 'none'")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()
