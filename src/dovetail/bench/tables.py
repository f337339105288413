"""The table as CSV: one line a row, column and method, the paper's figure beside ours."""

import csv
import io
import os
from collections.abc import Iterator, Sequence

from dovetail.bench.cases import LEARNED, METHOD_OF
from dovetail.bench.methods import PLAIN
from dovetail.bench.records import Case, Column, Found, Published, Row
from dovetail.runtime.files import write_atomically

OOM = "OOM"
NOT_RUN = "not yet run"
FIELDS = (
    "table", "row", "title", "model", "optimizer", "machine", "gpus", "column", "method",
    "paper_column", "paper_seconds", "seconds", "ratio_to_paper", "reason", "bound_seconds",
    "bound_proof", "peak_memory_bytes", "peak_memory_by_device_bytes", "search_seconds", "ops",
    "paper_ops", "groups", "paper_groups", "flops", "parameter_bytes", "sizes_of_ours",
)  # fmt: skip
Line = dict[str, str | int | float]


def write_csv(
    name: str, cases: Sequence[Case], rows: Sequence[Row], path: str | os.PathLike[str]
) -> None:
    """Write the lines of table `name`, whole or not at all. Raises `UnwritableError`.

    A method that stands beside no column of the paper has an empty `paper_column`; one that stands
    beside two has a line for each. A case without a row has one line that says so, and so has a
    learned method that was not run. Of one that was stands the training of the median. Seconds are
    in full precision.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines_of(name, cases, rows))
    write_atomically(path, text.getvalue().encode("utf-8", "replace"))


def lines_of(name: str, cases: Sequence[Case], rows: Sequence[Row]) -> Iterator[Line]:
    """Every line of the file, in the order of cases, columns and methods."""
    of_case = {row.key: row for row in rows}
    for case in cases:
        head = _head(name, case)
        row = of_case.get(case.key)
        if row is None:
            yield head | {"reason": NOT_RUN}
            continue
        head |= {
            "ops": row.ops,
            "groups": row.groups,
            "flops": row.flops,
            "parameter_bytes": row.parameter_bytes,
        }
        for column_name, column in row.columns.items():
            of = head | {"column": column_name}
            yield from _lines(of, case.published, column)
            if column_name == PLAIN:
                yield from _not_run(of, case.published, column, LEARNED[name])


def _head(name: str, case: Case) -> Line:
    published = case.published
    return {
        "table": name,
        "row": case.key,
        "title": case.title,
        "model": case.model,
        "optimizer": case.train,
        "machine": case.machine,
        "gpus": case.gpus,
        "paper_ops": _or_empty(published.ops if published else None),
        "paper_groups": _or_empty(published.groups if published else None),
        "sizes_of_ours": case.ours,
    }


def _lines(head: Line, published: Published | None, column: Column) -> Iterator[Line]:
    given = published.seconds if published else {}
    head = head | {"bound_seconds": column.bound, "bound_proof": column.proof}
    for method, found in column.methods.items():
        beside = [paper for paper in given if METHOD_OF.get(paper) == method] or [""]
        for paper in beside:
            yield head | {"method": method} | _ours(found) | _theirs(given, paper, found)


def _not_run(
    head: Line, published: Published | None, column: Column, learned: Sequence[str]
) -> Iterator[Line]:
    given = published.seconds if published else {}
    for paper in given:
        method = METHOD_OF[paper]
        if method in learned and method not in column.methods:
            yield head | {"method": method, "reason": NOT_RUN} | _theirs(given, paper, None)


def _ours(found: Found) -> Line:
    peaks = found.peak_memory_bytes
    return {
        "seconds": _or_empty(found.seconds),
        "reason": found.reason,
        "peak_memory_bytes": max(peaks.values(), default=""),
        "peak_memory_by_device_bytes": ";".join(f"{device}={n}" for device, n in peaks.items()),
        "search_seconds": found.search_seconds,
    }


def _theirs(given: dict[str, float | None], paper: str, found: Found | None) -> Line:
    seconds = given.get(paper)
    line: Line = {"paper_column": paper}
    line["paper_seconds"] = (OOM if seconds is None else seconds) if paper in given else ""
    if seconds and found is not None and found.seconds is not None:
        line["ratio_to_paper"] = found.seconds / seconds
    return line


def _or_empty(value: float | int | None) -> str | int | float:
    return "" if value is None else value
