"""What the scripts share: options, turns, figures of rounds, tables, and what is kept.

Importing it makes `reproductions` and `tests.support` importable, too. It begins with the standard
library alone, because some scripts measure how long imports take.
"""

import argparse
import csv
import io
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))

Name = TypeVar("Name", bound=Hashable)
Found = TypeVar("Found")

# --- Options ---


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def among(known: Collection[str]) -> Callable[[str], list[str]]:
    """A type of options: some of the known names, with commas between them."""

    def names(text: str) -> list[str]:
        found = [name for part in text.split(",") if (name := part.strip())]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(known)}")
        return found

    return names


OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "rounds": (count, "in which all take turns"),
    "repeats": (count, "of each measurement"),
    "runs": (count, "of each case"),
    "steps": (count, "of each measurement"),
    "trials": (count, "in all"),
    "seeds": (count, "how many"),
    "seed": (int, ""),
    "first": (int, "the first seed"),
    "seconds": (float, "begin nothing new after so many"),
    "budget": (str, "of each search: seconds (10s) or evaluations (5000e)"),
    "machine": (str, "as MACHINE of `dovetail plan`"),
    "device": (str, "as torch names it"),
    "only": (str, "the cases that it names"),
    "packages": (str, "folder that other packages are in"),
    "table": (Path, "folder of `python -m reproductions gdp`, where graphs are"),
    "out": (Path, "write the results to this file"),
    "csv": (Path, "write the rows to this file"),
    "readme": (Path, "fill the tables into this file's marks"),
}
FLAGS = {
    "again": "measure anew what is kept",
    "write": "put the tables into README.md",
}


def parser_of(script: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of those shared options that `defaults` names.

    script     its docstring, which also says what is particular of an option
    defaults   of each option; ... where it must be given. Of a flag: what it does, or False for
               what it does in most scripts
    """
    parser = argparse.ArgumentParser(
        description=script, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        if name in FLAGS:
            said = default or FLAGS[name]
            parser.add_argument(f"--{name}", action="store_true", help=said)
            continue
        kind, said = OPTIONS[name]
        if default is ...:
            parser.add_argument(f"--{name}", type=kind, required=True, help=said)
        else:
            shown = "" if default in (None, "") else "; default %(default)s"
            parser.add_argument(f"--{name}", type=kind, default=default, help=said + shown)
    return parser


# --- Turns, and the figures of their rounds ---


def in_turns(
    contestants: Mapping[Name, Callable[[], Found]], rounds: int
) -> dict[Name, list[Found]]:
    """name -> [rounds] what its calls return. All are called in each round, the next one first."""
    names, found = list(contestants), {name: list[Found]() for name in contestants}
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            found[name].append(contestants[name]())
    return found


def ratios_of(seconds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of the one's seconds over the other's, round by round."""
    return [own / other for own, other in zip(seconds, others, strict=True)]


def with_range(values: Sequence[float], form: str = ".2f", unit: str = "", to: str = " to ") -> str:
    """ "1.02 (0.97 to 1.10)": the median, the least and the most."""
    ends = f"{min(values):{form}}{to}{max(values):{form}}"
    return f"{statistics.median(values):{form}}{unit} ({ends})"


def quartiles(values: Sequence[float]) -> list[float]:
    """The first, the median and the third; of a single value itself."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3


def ratio_and_spread(seconds: Sequence[float], others: Sequence[float]) -> tuple[str, str]:
    """Of the ratios within rounds the median, and their interquartile range over it."""
    import numpy as np

    low, ratio, high = np.percentile(np.array(seconds) / np.array(others), [25, 50, 75])
    return f"{ratio:.2f}", f"{(high - low) / ratio:.2f}"


# --- Processes, and what they run on ---


def in_child(*command: str, variables: Mapping[str, str] | None = None) -> Any:
    """What a Python process says in its last line, as JSON. Raises `CalledProcessError` where it
    fails."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | (variables or {}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def host(*libraries: Any) -> str:
    """The machine, its load, Python and the versions of imported libraries, in a line."""
    parts = [
        platform.processor() or platform.machine(),
        f"{os.cpu_count()} cores",
        f"load {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
    ]
    return ", ".join([*parts, *(f"{each.__name__} {each.__version__}" for each in libraries)])


def status_bytes(field: str) -> int:
    """Of this process: "VmRSS", its memory, or "VmHWM", the most so far. `getrusage` would count
    what its parent held when it was started."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def error_line(error: BaseException) -> str:
    """An error as a figure: what it is, and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def say(text: str) -> None:
    """Tell how far it is, aside from the results."""
    print(text, file=sys.stderr, flush=True)


# --- Markdown. A script writes anew what stands between two marks of a README:
#     <!-- NAME -->        ...        <!-- end of NAME -->


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table; its first column is text, the others are figures."""
    every = (head, ["---", *["---:"] * (len(head) - 1)], *rows)
    return "\n".join(line(*cells) for cells in every)


def rows_of(readme: Path, name: str) -> list[list[str]]:
    """The cells of the table that stands between the marks of that name, without its head."""
    _, _, rest = readme.read_text("utf-8").partition(f"<!-- {name} -->")
    lines = rest.partition(f"<!-- end of {name} -->")[0].strip().splitlines()
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[2:]]


def fill(readme: Path, name: str, text: str) -> None:
    """Put text between the marks of that name. Raises `ValueError` where they are lacking."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, mark, rest = readme.read_text("utf-8").partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"{readme} lacks {begin} or {end}")
    keep(readme, f"{before}{begin}\n{text.strip()}\n{end}{after}")


def show(text: str, readme: Path | None, name: str) -> None:
    """Print the text, and put it into the README if there is one."""
    print(text, flush=True)
    if readme is not None:
        fill(readme, name, text)


# --- What is kept ---


def keep(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    from dovetail.runtime.files import write_atomically

    write_atomically(path, text.encode())


def keep_json(path: Path | None, content: object) -> None:
    """Write it as JSON, if there is a path."""
    if path is not None:
        keep(path, json.dumps(content, indent=1) + "\n")


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def keep_csv(
    path: Path | None, rows: Sequence[Mapping[str, object]], columns: Sequence[str] = ()
) -> None:
    """Write these columns of the rows, by default those of the first, if there is a path."""
    if path is not None:
        text = io.StringIO()
        names = list(columns or rows[0])
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        keep(path, text.getvalue())
