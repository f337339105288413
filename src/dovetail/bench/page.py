"""One self-contained page: a paper's table with ours beside it, row by row, and how it came about.

    head        who, what, and the figures that matter
    results     seconds, bounds, sizes; orderings, placements, methods     page_results.py
    learned     what learned methods reached, and with how much effort     learned_page.py
    notes       towers, curves, fit, what is ours, how it was made         page_notes.py

There is no script in it and nothing is fetched: style is allowed by its hash in a
Content-Security-Policy. Every name is foreign text and is escaped (`markup`).
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from dovetail.bench import learned_page, page_notes, page_results
from dovetail.bench.orderings import Ordering, orderings_of
from dovetail.bench.page_results import Results
from dovetail.bench.records import Case, Curve, Row, Tower
from dovetail.machine import parse_machine
from dovetail.reports.markup import Markup, cards, policy
from dovetail.runtime.files import write_atomically


@dataclass(frozen=True)
class _Paper:
    title: str
    citation: str


PAPERS = {
    "rl17": _Paper(
        "RL17's table of device placement, and ours",
        "A. Mirhoseini, H. Pham, Q. V. Le, B. Steiner, R. Larsen, Y. Zhou, N. Kumar, M. Norouzi, "
        "S. Bengio, J. Dean: Device Placement Optimization with Reinforcement Learning. ICML 2017, "
        "https://arxiv.org/abs/1706.04972, tables 1 and 2, figures 4 to 9.",
    ),
    "gdp": _Paper(
        "GDP's table of device placement, and ours",
        "Y. Zhou, S. Roy, A. Abdolrashidi, D. Wong, P. C. Ma, Q. Xu, M. Zhong, H. Liu, A. Goldie, "
        "A. Mirhoseini, J. Laudon: GDP: Generalized Device Placement for Dataflow Graphs. 2019, "
        "https://arxiv.org/abs/1910.01578, table 1.",
    ),
}


def write_page(
    name: str,
    cases: Sequence[Case],
    rows: Sequence[Row],
    towers: Sequence[Tower],
    curves: Sequence[Curve],
    path: str | os.PathLike[str],
    *,
    made: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page of table `name` to `path`, whole or not at all. Cases without a row are shown
    as not yet run.

    made   (what, text) of how it was made: the command, the machine that ran it

    Raises `UnwritableError`.
    """
    text = render(name, cases, rows, towers, curves, made=made)
    # A name may hold a lone surrogate, which UTF-8 cannot: it is shown as "?".
    write_atomically(path, text.encode("utf-8", "replace"))


def render(
    name: str,
    cases: Sequence[Case],
    rows: Sequence[Row],
    towers: Sequence[Tower],
    curves: Sequence[Curve],
    *,
    made: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text."""
    paper = PAPERS[name]
    results = Results(name, tuple(cases), {row.key: row for row in rows})
    orderings = _orderings(results)
    style = "\n".join(
        resources.files(package).joinpath("assets", file).read_text("utf-8")
        for package, file in (("dovetail.reports", "page.css"), ("dovetail.bench", "bench.css"))
    )
    parts = {
        "policy": policy(style),
        "title": escape(paper.title),
        "paper": escape(paper.citation),
        "style": style,
        "cards": _cards(results, orderings),
        "reading": page_results.reading(results),
        "seconds": page_results.seconds(results),
        "learned": learned_page.learned(results),
        "bounds": page_results.bounds(results),
        "sizes": page_results.sizes(results),
        "orderings": page_results.orderings(results, orderings),
        "plans": page_results.plans(results),
        "methods": page_results.methods(results),
        "towers": page_notes.towers(name, towers, curves),
        "curves": page_notes.curves(name, curves),
        "fit": page_notes.fit(name, cases),
        "ours": page_notes.ours(cases),
        "made": page_notes.made(name, rows, made),
    }
    template = resources.files("dovetail.bench").joinpath("assets", "bench.html").read_text("utf-8")
    # One pass over the template: what is filled in is not searched again.
    pieces = template.split("@@")
    return "".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces))


def _orderings(results: Results) -> dict[tuple[str, str], tuple[Ordering, ...]]:
    """(row, column) -> its orderings."""
    return {
        (case.key, column): orderings_of(case, row, column, parse_machine(case.machine))
        for case, row in results.done
        for column in row.columns
    }


def _cards(results: Results, orderings: dict[tuple[str, str], tuple[Ordering, ...]]) -> Markup:
    items = [("rows", f"{len(results.done)} of {len(results.cases)}", "those that are done")]
    for column in results.columns:
        known = [
            ordering.holds
            for (_, of), found in orderings.items()
            for ordering in found
            if of == column and ordering.holds is not None
        ]
        if known:
            of_whom = "plain costs" if column == "plain" else column
            items.append((f"orderings that hold, {of_whom}", f"{sum(known)} of {len(known)}",
                          "the paper's, in our figures"))  # fmt: skip
    plain = [row.columns["plain"] for _, row in results.done if "plain" in row.columns]
    gains = [gain for gain in map(page_results.over_expert, plain) if gain is not None]
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        items.append(("best over expert", f"{mean:.2f} x",
                      f"geometric mean of {len(gains)} rows, {min(gains):.2f} to "
                      f"{max(gains):.2f}"))  # fmt: skip
    gaps = [gap for gap in map(page_results.gap, plain) if gap is not None]
    if gaps:
        near = sum(gap <= 0.15 for gap in gaps)
        items.append(("within 15 % of the bound", f"{near} of {len(gaps)}",
                      f"rows; {100 * min(gaps):.1f} % to {100 * max(gaps):.1f} %"))  # fmt: skip
    return cards([*items, *learned_page.cards_of(results)])
