"""Tables in READMEs that a script writes: what stands between two marks is written anew.

<!-- NAME -->        ...        <!-- end of NAME -->
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from dovetail.runtime.files import write_atomically


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its first column is text, the others are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


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
    whole = f"{before}{begin}\n{text.strip()}\n{end}{after}"
    write_atomically(readme, whole.encode())
