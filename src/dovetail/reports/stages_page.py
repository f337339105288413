"""One self-contained page about schedules of one device, batch size by batch size.

    answer      which schedule, how fast against sequential, and how that is known
    stages      drawn over the graph, the chosen schedule first
    latency     of all schedules, and the speed-up of each block
    work        kernels, FLOPs, memory access, utilisation; what searching and measuring took
    sums        whether sums of stages predict what schedules take
    matrices    what a schedule costs where it was not made for it

There is no script in it and nothing is fetched: style is allowed by its hash in a
Content-Security-Policy. Every name is foreign text and is escaped (`markup`).
"""

import os
from html import escape
from importlib import resources

from dovetail.reports.markup import Markup, cards, policy, table
from dovetail.reports.stages_figures import measured_text, ratio_of
from dovetail.reports.stages_sections import batch, drawable, specialisations
from dovetail.runtime.files import write_atomically
from dovetail.schedulers.results import Schedules
from dovetail.units import format_count, format_seconds


def write_stages_page(
    schedules: Schedules, path: str | os.PathLike[str], *, made: str = ""
) -> None:
    """Write the page to `path`, whole or not at all. made: the command that made it.

    Raises `UnwritableError`.
    """
    text = render_stages(schedules, made=made)
    # A name may hold a lone surrogate, which UTF-8 cannot: it is shown as "?".
    write_atomically(path, text.encode("utf-8", "replace"))


def render_stages(schedules: Schedules, *, made: str = "") -> str:
    """The page as text. O(kernels + edges) for each schedule; what is drawn is bounded."""
    style = "\n".join(_asset(name) for name in ("page.css", "training.css", "stages.css"))
    parts = {
        "policy": policy(style),
        "title": escape(f"{schedules.model} on {schedules.device}"),
        "style": style,
        "cards": _cards(schedules),
        "batches": _summary(schedules) + _batches(schedules),
        "specialisations": specialisations(schedules),
        "made": _made(made),
    }
    # One pass over the template: what is filled in is not searched again.
    pieces = _asset("stages.html").split("@@")
    return "".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files("dovetail.reports").joinpath("assets", name).read_text("utf-8")


def _cards(schedules: Schedules) -> Markup:
    kernels = [len(result.kernels) for result in schedules.results]
    blocks = [len(result.blocks) for result in schedules.results]
    items = [("costs", schedules.costs_source, "of stages, on which the search stands")]
    if kernels:
        items.append(("kernels", f"{max(kernels):,}", f"in {max(blocks):,} blocks"))
    for result in schedules.results[:4]:
        ratio = ratio_of(result, result.best)
        known = "measured" if result.best.seconds else "predicted"
        gain = "" if ratio is None else f"{ratio.value:.3f} x sequential's speed, {known}"
        took = format_seconds(result.best.median_seconds)
        items.append((f"batch {result.batch}: {result.chosen}", took, gain))
    return cards(items)


def _summary(schedules: Schedules) -> Markup:
    """A row for each batch size, where there are several."""
    if not schedules.results:
        return Markup("<section><p>Nothing was scheduled.</p></section>")
    if len(schedules.results) == 1:
        return Markup("")
    rows = []
    for result in schedules.results:
        best, ratio = result.best, ratio_of(result, result.best)
        seconds = best.median_seconds
        rows.append((
            f"{result.batch:,}",
            result.chosen,
            format_seconds(best.predicted_seconds),
            measured_text(best),
            "-" if ratio is None else str(ratio),
            format_count(result.batch / seconds) if seconds > 0 else "-",
        ))  # fmt: skip
    head = ("batch", "chosen", "predicted", "measured (spread)", "speed-up", "samples a second")
    return Markup(f"<section><h2>Batch sizes</h2>{table(head, rows)}</section>")


def _batches(schedules: Schedules) -> Markup:
    parts = []
    found = drawable(schedules)
    for i, (result, drawn) in enumerate(zip(schedules.results, found, strict=True)):
        title = f"Batch {result.batch:,}: {result.chosen}"
        opened = " open" * (i == 0)
        parts.append(
            f'<details class="batch"{opened}><summary>{escape(title)}</summary>'
            f"{batch(schedules, result, drawn)}</details>"
        )
    return Markup("".join(parts))


def _made(made: str) -> Markup:
    if not made:
        return Markup("")
    return Markup(f"<section><h2>How this was made</h2><pre>{escape(made)}</pre></section>")
