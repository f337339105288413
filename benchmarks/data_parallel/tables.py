"""Markdown tables of what `run.py` found, beside the reference's figures."""

import statistics
from collections.abc import Sequence

from cells import Cell, Result, grouped
from experiments import (
    BASE,
    RATES,
    RULES,
    SENSITIVE_RULES,
    SLOW,
    STRAGGLERS,
    TABLE,
    VARIED,
    sensitivity,
    stragglers,
)
from experiments import table as cells_of_table
from harness import table
from momentum import implicit_momentum

from dovetail.training import StepTimes

NAMES = {
    "downpour": "DOWNPOUR",
    "dynsgd": "DynSGD",
    "agn": "AGN",
    "adag": "ADAG",
    "adag-agn": "ADAG-AGN",
    "aeasgd": "AEASGD",
    "averaging": "averaging",
    "sync": "sync",
}
MOMENTA = {
    "exponential": (0.493, 0.742, 0.874, 0.935),
    "jitter": (0.03, 0.59, 0.82, 0.91),
}
"""kind of step times -> implicit momentum of 2, 4, 8, 16 workers in the reference."""
WORKERS = (2, 4, 8, 16)
Rows = dict[Cell, Result]


def percent(results: Sequence[Result]) -> str:
    """Mean over the seeds, and half the way from the lowest to the highest; one seed has none."""
    if not results:
        return ""
    values = [100 * result.accuracy for result in results]
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.fmean(values):.1f} ± {(max(values) - min(values)) / 2:.1f}"


def grid(rows: Rows, cells: Sequence[Cell], reference: bool) -> str:
    """Accuracy of each rule (columns) at each (window, workers), the reference's in brackets."""
    found = {(c.rule, c.window, c.workers): r for c, r in grouped(rows, cells).items()}
    lines = []
    for window, workers in dict.fromkeys((cell.window, cell.workers) for cell in cells):
        line = [str(window), str(workers)]
        for column, rule in enumerate(RULES):
            results = found.get((rule, window, workers), [])
            beside = TABLE[window, workers][column] if reference else None
            text = percent(results) + (f" ({beside})" if beside is not None else "")
            line.append("=" if window == 1 and rule == "agn" else text)
        lines.append(line)
    return table(["lambda", "n", *(NAMES[rule] for rule in RULES)], lines)


def table_of_rules(rows: Rows) -> str:
    return grid(rows, cells_of_table(), True)


def table_of_staleness(rows: Rows) -> str:
    """Measured beside n - 1, for rules whose commits are applied as they come."""
    rules = ("downpour", "dynsgd", "agn", "adag-agn", "aeasgd")
    found = {(c.rule, c.window, c.workers): r for c, r in grouped(rows, cells_of_table()).items()}
    lines = []
    for window, workers in TABLE:
        line = [str(window), str(workers), str(workers - 1)]
        for rule in rules:
            values = [r.staleness_mean for r in found.get((rule, window, workers), [])]
            line.append(f"{statistics.fmean(values):.2f}" if values else "=")
        lines.append(line)
    return table(["lambda", "n", "n - 1", *(NAMES[rule] for rule in rules)], lines)


def table_of_stragglers(rows: Rows) -> str:
    """The best rate's mean time to the target, its spread and the rate; then the reference's."""
    found = grouped(rows, stragglers())
    lines = []
    for (rule, window), reference in STRAGGLERS.items():
        line = [NAMES[rule] + (f" lambda {window}" if rule != "sync" else "")]
        for slow, beside in zip(SLOW, reference, strict=True):
            of_rate = {
                cell.rate: [result.target_seconds for result in results]
                for cell, results in found.items()
                if (cell.rule, cell.window, cell.slow) == (rule, window, slow) and results
            }
            line.append(best_time(of_rate) + f" ({beside})")
        lines.append(line)
    return table(["rule", *(_slow(slow) for slow in SLOW)], lines)


def best_time(of_rate: dict[float, list[float]]) -> str:
    """Of the rates at which every seed reached the target, the one with the lowest mean."""
    means = {
        rate: statistics.fmean(times)
        for rate, times in of_rate.items()
        if all(time == time for time in times)
    }
    if not means:
        return "not reached"
    rate = min(means, key=lambda rate: means[rate])
    spread = (max(of_rate[rate]) - min(of_rate[rate])) / 2
    return f"{means[rate]:.0f} ± {spread:.0f} at {rate:g}"


def _slow(slow: float) -> str:
    return "none" if slow == 1 else f"one worker {slow:g}x slow"


def table_of_rates(rows: Rows) -> str:
    """Mean time to the target at each learning rate."""
    found = grouped(rows, stragglers())
    lines = []
    for (rule, window), _ in STRAGGLERS.items():
        for slow in SLOW:
            line = [NAMES[rule], str(window), f"{slow:g}x"]
            for rate in RATES:
                times = [
                    result.target_seconds
                    for cell, results in found.items()
                    if (cell.rule, cell.window, cell.slow, cell.rate) == (rule, window, slow, rate)
                    for result in results
                ]
                reached = [time for time in times if time == time]
                text = f"{statistics.fmean(reached):.0f}" if reached else "-"
                missing = len(times) - len(reached)
                line.append(text + (f" ({missing} of {len(times)} never)" if missing else ""))
            lines.append(line)
    return table(["rule", "lambda", "slow", *(f"{rate:g}" for rate in RATES)], lines)


def table_of_sensitivity(rows: Rows) -> str:
    found = grouped(rows, sensitivity())
    lines = []
    for name, values in VARIED.items():
        for value in values:
            line = [name, f"{value:g}"]
            for rule in SENSITIVE_RULES:
                results = [
                    result
                    for cell, of_cell in found.items()
                    if cell.rule == rule and _differs_in(cell, name, value)
                    for result in of_cell
                ]
                line.append(percent(results) or "=")
            lines.append(line)
    return table(["varied", "", *(NAMES[rule] for rule in SENSITIVE_RULES)], lines)


def _differs_in(cell: Cell, name: str, value: float) -> bool:
    """Whether it is the base with this one setting."""
    expected = {setting: getattr(BASE, setting) for setting in VARIED} | {name: value}
    return all(getattr(cell, setting) == wanted for setting, wanted in expected.items())


def table_of_momentum(replicas: int = 4000, steps: int = 80) -> str:
    found = {
        kind: [
            implicit_momentum(n, StepTimes(kind), replicas=replicas, steps=steps) for n in WORKERS
        ]
        for kind in ("exponential", "jitter", "lognormal")
    }
    lines = []
    for kind, measured in found.items():
        texts = [f"{one.momentum:.3f}" for one in measured]
        if kind in MOMENTA:
            texts = [f"{text} ({b:g})" for text, b in zip(texts, MOMENTA[kind], strict=True)]
        lines.append([kind, *texts])
    lines.append(["1 - 1/n", *(f"{1 - 1 / n:.4g}" for n in WORKERS)])
    memoryless = found["exponential"]
    lines.append(["c, exponential", *(f"{each.rate:.5f}" for each in memoryless)])
    lines.append(["eta / n", *(f"{each.theory_rate:.5f}" for each in memoryless)])
    stale = [f"{each.mean_staleness:.2f}" for each in memoryless]
    lines.append(["mean staleness, exponential", *stale])
    return table(["step times", *(f"n = {n}" for n in WORKERS)], lines)
