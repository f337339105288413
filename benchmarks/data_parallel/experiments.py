"""Which runs there are, and the figures they stand beside.

table         the whole grid of seven rules on scikit-learn's digits
stragglers    time to 97 % with no worker, one 4 times and one 10 times slower
sensitivity   digits: batch, learning rate, window and workers, one at a time
cancer        a binary tabular task
mnist, higgs  the same rules on a user's files
"""

from dataclasses import replace

from cells import Cell

RULES = ("downpour", "dynsgd", "agn", "adag-agn", "aeasgd", "averaging", "sync")
TABLE = {
    (1, 10): (98.2, 94.6, None, 98.2, 94.1, 94.2, 97.6),
    (1, 40): (97.4, 87.1, None, 96.8, 86.9, 86.0, 92.2),
    (10, 2): (98.0, 98.2, 94.6, 94.6, 98.0, 98.1, 98.2),
    (10, 10): (89.4, 94.5, 94.5, 94.0, 93.6, 94.1, 97.6),
    (10, 20): (35.0, 92.3, 92.6, 92.9, 90.9, 91.9, 95.6),
    (10, 40): (13.3, 88.9, 60.8, 88.6, 84.3, 87.8, 92.2),
}
"""(window, workers) -> validation % of RULES as in the project's reference; None: as DOWNPOUR."""
STRAGGLERS = {
    ("sync", 1): (110, 339, 990),
    ("averaging", 10): (175, 644, 1609),
    ("downpour", 1): (93, 97, 94),
    ("adag", 1): (115, 116, 94),
    ("agn", 4): (249, 268, 323),
}
"""(rule, window) -> virtual time to 97 %, one worker SLOW times slower, as in the reference."""
SLOW = (1.0, 4.0, 10.0)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""The same grid for every rule and every straggler."""
STRAGGLING_WORKERS, TARGET = 8, 0.97
SENSITIVE_RULES = ("downpour", "dynsgd", "agn", "adag-agn", "aeasgd", "averaging", "sync")
BASE = Cell("sensitivity", "digits", "agn", window=10, workers=10)
VARIED: dict[str, tuple[float, ...]] = {
    "batch": (4, 16, 64),
    "rate": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "window": (1, 2, 5, 10, 20, 40),
    "workers": (1, 2, 5, 10, 20, 40),
}
TABULAR_GRID = ((1, 10), (10, 2), (10, 10), (10, 20))


def table(task: str = "digits") -> list[Cell]:
    return [
        Cell("table", task, rule, window, workers)
        for window, workers in TABLE
        for rule in RULES
        if not (window == 1 and rule == "agn")  # it is DOWNPOUR there
    ]


def stragglers() -> list[Cell]:
    return [
        Cell(
            "stragglers", "digits", rule, window, STRAGGLING_WORKERS, rate=rate, slow=slow,
            target=TARGET,
        )
        for rule, window in STRAGGLERS
        for slow in SLOW
        for rate in RATES
    ]  # fmt: skip


def sensitivity() -> list[Cell]:
    return list(
        dict.fromkeys(
            replace(BASE, rule=rule, **{name: value})
            for name, values in VARIED.items()
            for value in values
            for rule in SENSITIVE_RULES
            if not (name == "window" and rule == "sync")
        )
    )


def on_task(task: str, batch: int = 16, epochs: int = 60) -> list[Cell]:
    """The table's rules on another task, on a smaller grid."""
    return [
        Cell(task, task, rule, window, workers, batch=batch, epochs=epochs)
        for window, workers in TABULAR_GRID
        for rule in RULES
        if not (window == 1 and rule == "agn")
    ]
