"""Draws the page of a comparison: the schedules of one device, beside schedules elsewhere.

    stages      the page of `dovetail schedule`
    sums        whether sums over stages predict the seconds of schedules   (figure 7)
    matrices    the loss of a schedule at a batch size or on a device that it was not made for
                (tables 1 and 2)

Paper: "Accelerate DNN Inference by Inter-Operator Parallelism" (DOS), 2019. The page has no script.
"""

import math
from dataclasses import replace

from dovetail.reports.kit import (
    Part,
    Section,
    StyledCell,
    Table,
    preformatted,
    render_page,
)
from dovetail.reports.stages_page import page_of_stages
from dovetail.units import format_seconds
from reproductions import DOS_STYLE
from reproductions.additivity import noise_of, pairs_ordered_right, scatter_chart
from reproductions.elsewhere import Comparison, Specialisation
from reproductions.results import remarked

HEATS = (0.005, 0.02, 0.05, 0.10)
"""From each of these losses on a cell of a matrix is one step hotter."""


def render_comparison(found: Comparison, *, made: str = "") -> str:
    """The page as text.

    made   the command or program that made it
    """
    page = page_of_stages(found.schedules)
    sums: list[Part] = []
    for result, points in zip(found.schedules.results, found.sampled, strict=True):
        if len(points) < 2:
            continue
        noise = noise_of(result.candidates)
        text = (
            f"{len(points):,} random schedules. Of all pairs {_share(points)} come out in the "
            "order that was predicted (the paper: 93.7 %)."
        )
        if noise > 0:
            text += (
                f" Of pairs further apart than the noise of the measurements, {100 * noise:.1f} %: "
                f"{_share(points, noise)}."
            )
        sums.append(Section(f"Batch {result.batch:,}", [text, scatter_chart(points)]))
    matrices: list[Part] = [
        "Rows: where it ran. Columns: what the schedule was made for. On the diagonal both are the "
        "same; beside it, what is lost against the diagonal of the row (tables 1 and 2, figure 6).",
        *(Section(matrix.title, [_matrix(matrix)]) for matrix in found.specialisations),
    ]
    parts: list[Part] = [
        *page.parts,
        *([Section("Are sums of stages right?", sums)] if sums else []),
        *([Section("Specialisation", matrices)] if found.specialisations else []),
        *([Section("How this was made", [preformatted(made)])] if made else []),
    ]
    style = DOS_STYLE.read_text("utf-8")
    return render_page(
        replace(page, parts=parts, brand="reproductions.elsewhere", more_style=style)
    )


def _share(points: tuple[tuple[float, float], ...], noise: float = 0.0) -> str:
    right, pairs = pairs_ordered_right(points, noise)
    return f"{right:,} of {pairs:,} ({100 * right / pairs:.1f} %)" if pairs else "none of 0"


def _matrix(matrix: Specialisation) -> Table:
    """The matrix in seconds, each cell with its loss against the diagonal of its row."""
    # The diagonal of a row is the column with the row's name. If rows and columns share no name at
    # all, it is the column with the row's number in a square matrix.
    columns, share_names = list(matrix.columns), bool(set(matrix.rows) & set(matrix.columns))
    lines = []
    for i, (name, row) in enumerate(zip(matrix.rows, matrix.seconds, strict=True)):
        diagonal = i if len(matrix.rows) == len(columns) else None
        if share_names:
            diagonal = columns.index(name) if name in columns else None
        base = row[diagonal] if diagonal is not None else 0.0
        cells: list[str | StyledCell] = [f"on {name}"]
        for j, value in enumerate(row):
            loss = value / base - 1 if base > 0 else math.nan
            text = format_seconds(value) if math.isfinite(value) else "-"
            if math.isfinite(loss) and j != diagonal:
                text = remarked(text, f"{100 * loss:+.1f} %")
            style = "own" if j == diagonal else f"heat{sum(loss >= heat for heat in HEATS)}"
            cells.append(StyledCell(text, style))
        lines.append(cells)
    return Table(("", *(f"for {column}" for column in columns)), lines, "scroll heat")
