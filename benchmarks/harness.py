"""What the scripts measure by: contestants in turns, and the figures of their rounds."""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

Name = TypeVar("Name", bound=Hashable)


def in_turns(
    contestants: Mapping[Name, Callable[[], float]], rounds: int
) -> dict[Name, list[float]]:
    """name -> [rounds] what its calls return. All are called in each round, the next one first."""
    names, found = list(contestants), {name: list[float]() for name in contestants}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contestants[name]())
    return found


def with_range(values: Sequence[float], form: str = ".2f", unit: str = "", to: str = " to ") -> str:
    """ "1.02 (0.97 to 1.10)": the median, the least and the most."""
    ends = f"{min(values):{form}}{to}{max(values):{form}}"
    return f"{statistics.median(values):{form}}{unit} ({ends})"


def ratio_and_spread(seconds: Sequence[float], others: Sequence[float]) -> tuple[str, str]:
    """Of the ratios within rounds the median, and their interquartile range over it."""
    low, ratio, high = np.percentile(np.array(seconds) / np.array(others), [25, 50, 75])
    return f"{ratio:.2f}", f"{(high - low) / ratio:.2f}"
