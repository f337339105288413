"""The results on the page: seconds beside the paper's, bounds, sizes, orderings, plans, methods."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.bench.cases import LEARNED, METHOD_OF
from dovetail.bench.charts import load_chart
from dovetail.bench.effort import span
from dovetail.bench.methods import HYPOTHESIS, PLAIN
from dovetail.bench.orderings import Ordering, format_step, is_oom
from dovetail.bench.records import Case, Column, Found, LearnedRun, Row
from dovetail.reports.markup import Markup, details, drawing, row, table, text_of
from dovetail.units import format_bytes, format_count, format_seconds

HYPOTHESIS_TEXT = (
    "Hypothesis, not stated by the paper: variables and gradient sums pinned to the CPU, links at "
    "3.5 GB/s. Nothing is fitted to it."
)
NAMES = {PLAIN: "ours, plain costs", HYPOTHESIS: "ours, hypothesis"}
NOT_RUN = "not yet run"
EXPERT = "expert"
OUTCOMES = {
    True: Markup('<span class="yes">yes</span>'),
    False: Markup('<span class="no">no</span>'),
    None: Markup('<span class="open">open</span>'),
}


@dataclass(frozen=True)
class Results:
    """A table's cases, and the rows that are done by key."""

    name: str
    cases: tuple[Case, ...]
    rows: Mapping[str, Row]

    @property
    def done(self) -> list[tuple[Case, Row]]:
        return [(case, self.rows[case.key]) for case in self.cases if case.key in self.rows]

    @property
    def columns(self) -> list[str]:
        """Our columns, in the order in which rows have them."""
        return list(dict.fromkeys(name for _, row in self.done for name in row.columns))

    @property
    def paper_columns(self) -> list[str]:
        """The paper's columns that any case has, learned ones last."""
        named = [name for case in self.cases if case.published for name in case.published.seconds]
        learned = LEARNED[self.name]
        return sorted(dict.fromkeys(named), key=lambda name: METHOD_OF[name] in learned)


def gap(column: Column) -> float | None:
    """How far the best is above the bound, as a share of the bound."""
    best = _seconds_of(column, column.best)
    return best / column.bound - 1 if best is not None and column.bound > 0 else None


def over_expert(column: Column) -> float | None:
    """How many times as long the expert's step takes as the best; None where either is lacking."""
    best, expert = _seconds_of(column, column.best), _seconds_of(column, EXPERT)
    return expert / best if best and expert else None


def reading(results: Results) -> Markup:
    """What the table's lines are."""
    text = (
        "<p>First line of a row: the paper's seconds. Below it ours, simulated, and how many times "
        "the paper's they are. OOM: out of memory. Of a method that learns: the training of the "
        "median, and from the best to the worst; best of ours is of those that do not learn.</p>"
    )
    if HYPOTHESIS in results.columns:
        text += f"<p><em>{text_of(HYPOTHESIS_TEXT)}</em></p>"
    return Markup(text)


def seconds(results: Results) -> Markup:
    """The paper's table, ours below each of its rows."""
    columns = results.paper_columns
    head = ["", *columns, "best of ours", "bound", "expert over best"]
    bodies = []
    for case in results.cases:
        lines = [row([case.title, *(_theirs(case, name) for name in columns), "", "", ""],
                     style="paper")]  # fmt: skip
        found = results.rows.get(case.key)
        if found is None:
            lines.append(row([NOT_RUN, *[""] * (len(columns) + 3)], style="ours"))
        for name, column in found.columns.items() if found else ():
            style = f"ours {name}" if name == HYPOTHESIS else "ours"
            ours = [_ours(case, column, of) for of in columns]
            lines.append(row([NAMES.get(name, name), *ours, *_ends(column)], style=style))
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return Markup(
        f'<div class="scroll seconds"><table><thead>{row(head, "th scope=col")}</thead>'
        f"{''.join(bodies)}</table></div>"
    )


def _theirs(case: Case, name: str) -> str:
    if case.published is None or name not in case.published.seconds:
        return "-"
    found = case.published.seconds[name]
    hours = case.published.hours.get(name)
    text = text_of(format_step(found))
    return Markup(f"{text} <small>search: {text_of(hours)}</small>") if hours else Markup(text)


def _ours(case: Case, column: Column, name: str) -> str:
    found = column.methods.get(METHOD_OF[name])
    if found is None or found.seconds is None:
        return _lack(found)
    published = case.published.seconds.get(name) if case.published else None
    text = format_step(found.seconds)
    if published:
        text += f" <small>{found.seconds / published:.2f} x</small>"
    runs = column.learned.get(METHOD_OF[name], ())
    if len(runs) > 1:
        text += f" <small>{format_span(runs)}</small>"
    return Markup(text)


def format_span(runs: Sequence[LearnedRun]) -> str:
    """From the best run to the worst: "0.298 s to 0.305 s"."""
    ends = [format_step(seconds if math.isfinite(seconds) else None) for seconds in span(runs)]
    return " to ".join(ends)


def _lack(found: Found | None) -> str:
    if found is None:
        return NOT_RUN
    return "OOM" if is_oom(found) else "none"


def _ends(column: Column) -> list[str]:
    best = _seconds_of(column, column.best)
    if best is None:
        return ["nothing fits", format_step(column.bound), ""]
    gain, above = over_expert(column), gap(column)
    distance = "" if above is None else f" <small>{100 * above:+.0f} %</small>"
    return [
        Markup(f"{format_step(best)} <small>{text_of(column.best)}</small>"),
        Markup(format_step(column.bound) + distance),
        "" if gain is None else f"{gain:.2f} x",
    ]


def bounds(results: Results) -> Markup:
    """Best, bound and expert of every row and column, with what proves the bound."""
    rows = []
    for case, found in results.done:
        for name, column in found.columns.items():
            best, expert = _seconds_of(column, column.best), _seconds_of(column, EXPERT)
            above, gain = gap(column), over_expert(column)
            rows.append((
                f"{case.title}, {NAMES.get(name, name).removeprefix('ours, ')}",
                column.best or "nothing fits",
                _or(best, "-"),
                format_step(column.bound),
                "" if above is None else f"{100 * above:.1f} %",
                _or(expert, _lack(column.methods.get(EXPERT))),
                "" if gain is None else f"{gain:.2f} x",
                column.proof,
            ))  # fmt: skip
    if not rows:
        return Markup(f"<p>{NOT_RUN.capitalize()}.</p>")
    head = ("row", "best method", "best", "bound", "above the bound", "expert", "expert over best",
            "the bound is proven by")  # fmt: skip
    return table(head, rows)


def sizes(results: Results) -> Markup:
    """Ops and groups beside the paper's; each network once."""
    rows, seen = [], set()
    for case in results.cases:
        if (case.model, case.train) in seen:
            continue
        seen.add((case.model, case.train))
        published, found = case.published, results.rows.get(case.key)
        theirs = (published.ops, published.groups) if published else (None, None)
        mine = (
            (f"{found.ops:,}", f"{found.groups:,}", format_count(found.flops, "FLOP"),
             format_bytes(found.parameter_bytes))
            if found
            else (NOT_RUN, "", "", "")
        )  # fmt: skip
        title = case.title.removesuffix(f", {case.gpus} GPUs")
        given = [f"{n:,}" if n is not None else "not given" for n in theirs]
        rows.append((title, given[0], mine[0], given[1], mine[1], mine[2], mine[3],
                     f"{case.model} --train {case.train}"))  # fmt: skip
    head = ("network", "ops, paper", "ops, ours", "groups, paper", "groups, ours", "of a step",
            "parameters", "MODEL")  # fmt: skip
    return table(head, rows)


def orderings(results: Results, found: Mapping[tuple[str, str], Sequence[Ordering]]) -> Markup:
    """Per row each ordering of the paper, whether it is ours, and why not."""
    parts = []
    for case, row_of in results.done:
        parts.append(f"<h3>{text_of(case.title)}</h3>")
        for name in row_of.columns:
            shown = _ordering_table(found.get((case.key, name), ()))
            parts.append(_marked(name, shown))
    return Markup("".join(parts) + _missing(results))


def _missing(results: Results) -> str:
    titles = [case.title for case in results.cases if case.key not in results.rows]
    return f"<p>{text_of(NOT_RUN.capitalize() + ': ' + '; '.join(titles))}.</p>" if titles else ""


def _ordering_table(found: Sequence[Ordering]) -> str:
    if not found:
        return "<p>The paper has no figures to order.</p>"
    head = ("the paper's ordering", "its seconds", "ours", "holds", "why, or a remark")
    rows = [
        (one.statement, one.published, one.found, OUTCOMES[one.holds], one.why) for one in found
    ]
    return table(head, rows, "scroll why")


def plans(results: Results) -> Markup:
    """Pictures and loads of the expert's and the best plan."""
    parts = []
    for case, found in results.done:
        columns = []
        for name, column in found.columns.items():
            figures = [
                _figure(case, column, method) for method in column.shown
            ] or ["<p>No plan fits.</p>"]  # fmt: skip
            columns.append(_marked(name, "".join(figures)))
        parts.append(details(case.title, "".join(columns)))
    return Markup("".join(parts) + _missing(results))


def _figure(case: Case, column: Column, method: str) -> str:
    work = column.shown[method]
    role = "expert" if method == EXPERT else f"best: {method}"
    if method == column.best == EXPERT:
        role = "expert, which is the best"
    seconds = _or(_seconds_of(column, method), "OOM")
    chart = load_chart(work, f"{case.title}, {role}: seconds by device and channel")
    return (
        f"<figure><figcaption><b>{text_of(role)}</b>, {seconds} a step</figcaption>"
        f"{drawing(work.picture)}{chart}</figure>"
    )


def methods(results: Results) -> Markup:
    """Every method of every row: seconds, memory, how long it searched."""
    parts = []
    for case, found in results.done:
        tables = "".join(
            _marked(name, _method_table(column, LEARNED[results.name] if name == PLAIN else ()))
            for name, column in found.columns.items()
        )
        parts.append(details(case.title, tables))
    return Markup("".join(parts) + _missing(results))


def _method_table(column: Column, learned: Sequence[str]) -> str:
    best = _seconds_of(column, column.best)
    rows = []
    for method, found in column.methods.items():
        peaks = found.peak_memory_bytes
        fullest = max(peaks, key=lambda name: peaks[name], default="")
        ratio = f"{found.seconds / best:.3f} x" if best and found.seconds is not None else ""
        rows.append((
            method + (" (best)" if method == column.best else ""),
            _or(found.seconds, _lack(found)),
            ratio,
            f"{format_bytes(peaks[fullest])} on {fullest}" if fullest else "",
            format_seconds(found.search_seconds),
            found.reason,
        ))  # fmt: skip
    rows += [(name, NOT_RUN, "", "", "", "") for name in learned if name not in column.methods]
    head = ("method", "seconds of a step", "to the best", "fullest device", "search took", "")
    return table(head, rows)


def _marked(name: str, content: str) -> str:
    """A column's content, the hypothesis's set apart."""
    title = f"<h4>{text_of(NAMES.get(name, name).removeprefix('ours, ').capitalize())}</h4>"
    if name == HYPOTHESIS:
        return f'<div class="hypothesis-box">{title}{content}</div>'
    return title + content


def _seconds_of(column: Column, method: str) -> float | None:
    found = column.methods.get(method)
    return None if found is None else found.seconds


def _or(seconds: float | None, text: str) -> str:
    return text if seconds is None else format_step(seconds)
