"""What learned methods reached, on the page."""

from dovetail.bench import learned_tables
from dovetail.bench.page_results import Results
from dovetail.reports.markup import Markup, table, text_of

HOW = {
    "rl17": (
        "Every training begins with nothing but the graph, on the groups of RL17's rule. Its "
        "placements are simulated; the paper's were run, for 12 to 27 hours a row. To reach: the "
        "best baseline less the paper's margin of RL over its own, or less 80 % of the head room "
        "that auto, which does not learn, finds over ours, if that is less."
    ),
    "gdp": (
        "Every training begins with nothing but the graph: GDP-one is not the policy that comes "
        "with the package. GDP and HDP place the same groups; against HDP only as many of GDP's "
        "placements count as HDP had. Search effort is how many placements HDP evaluates up to its "
        "best, over how many GDP evaluates up to one as good, seed by seed; repeats count, for a "
        "real run would cost again. The paper's is of time, with six runs where ours are as many "
        "as stand there."
    ),
}


def learned(results: Results) -> Markup:
    """The section on what was learned; it says so where nothing was."""
    found = learned_tables.tables_of(results.name, results.done)
    parts = [f"<p>{text_of(HOW[results.name])}</p>"]
    for title, (head, rows) in found:
        parts += [f"<h3>{text_of(title)}</h3>", table(head, rows)]
    if not found:
        parts.append("<p>No training was run.</p>")
    return Markup(f"<section><h2>Learned methods</h2>{''.join(parts)}</section>")


def cards_of(results: Results) -> list[tuple[str, str, str]]:
    """(what, figure, remark) of what was learned."""
    return learned_tables.verdicts(results.name, results.done)
