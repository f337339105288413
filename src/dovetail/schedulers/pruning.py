"""What is left out where a block is too wide to be searched whole, by name.

First blocks are cut where nothing is lost. One that still has too many states is cut where few of
its ops are read later, after as long a part as can be searched; where no such cut helps, states are
kept within a window, the widest that can be searched.
"""

from dataclasses import dataclass
from functools import lru_cache

from dovetail.errors import TooManyStatesError
from dovetail.schedulers.blocks import Part, cut, part_of, prefixes
from dovetail.schedulers.records import Block
from dovetail.schedulers.states import states_of

MOST_CROSSING = 4


@dataclass(frozen=True)
class Narrowed:
    """Parts in running order; windows: of each part's states, 0: none; pruning: "" where nothing is
    left out."""

    parts: tuple[Part, ...]
    windows: tuple[int, ...]
    pruning: str = ""


def narrowed(block: Block, most: int) -> Narrowed:
    """Parts of at most `most` states each. O(parts x most x ready ops)."""
    parts: list[Part] = []
    crossings, windows = [0], []
    for part in cut(block):
        if _fits(part.block, most):
            parts.append(part)
            windows.append(0)
            continue
        for crossing in range(1, MOST_CROSSING + 1):
            finer = _longest(part.block, crossing, most)
            if finer:
                crossings.append(crossing)
                parts += [_within(part, inner) for inner in finer]
                windows += [0] * len(finer)
                break
        else:
            windows.append(_window(part.block, most))
            parts.append(part)
    said = []
    if max(crossings):
        said.append(f"cut where {max(crossings)} ops are read later")
    if any(windows):
        said.append(f"a window of {min(filter(None, windows))} ops")
    return Narrowed(tuple(parts), tuple(windows), " and ".join(said))


def _longest(block: Block, crossing: int, most: int) -> list[Part]:
    """Parts that end at such cuts, each as long as fits; empty where one does not fit."""
    ends = [*prefixes(block, crossing), block.everything]
    parts: list[Part] = []
    done, first = 0, 0
    while done != block.everything:
        # More ops never have fewer states: the last end that fits is found by bisection.
        fits, beyond = first - 1, len(ends)
        step = 1
        while beyond - fits > 1:
            tried = min(fits + step, (fits + beyond) // 2 if beyond < len(ends) else beyond - 1)
            if _fits(part_of(block, ends[tried] & ~done).block, most):
                fits, step = tried, 2 * step
            else:
                beyond = tried
        if fits < first:
            return []
        parts.append(part_of(block, ends[fits] & ~done))
        done, first = ends[fits], fits + 1
    return [part for part in parts if part.ops]


def _within(outer: Part, inner: Part) -> Part:
    return Part(tuple(outer.ops[op] for op in inner.ops), inner.block)


def _window(block: Block, most: int) -> int:
    """The widest window that leaves no more than `most` states."""
    window = 1
    while _fits(block, most, window + 1):
        window += 1
    return window


@lru_cache(maxsize=4096)  # networks repeat their cells
def _fits(block: Block, most: int, window: int = 0) -> bool:
    try:
        states_of(block, window, most)
    except TooManyStatesError:
        return False
    return True
