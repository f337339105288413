"""Random modules: captured and placed training steps beside plain PyTorch's.

    python benchmarks/random_modules/run.py [--cases 1000] [--seed 0] [--placed 5] [--write]
    python benchmarks/random_modules/run.py --case "sgd float64 train 1: seq(linear, tanh)"

Cases that are neither right nor refused are made smaller until nothing can go, and printed as
texts that `--case` takes. Exit status 1 if there are any. A case follows from the seed and its
number; `--first` is the number of the first.
"""

import argparse
import logging
import re
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import parser_of, show, table

from benchmarks.random_modules import parts, wrappers
from benchmarks.random_modules.cases import Case, draw, parse
from benchmarks.random_modules.outcomes import (
    FAULTS,
    KINDS,
    Outcome,
    minimised,
    outcome_of,
    placing,
)
from dovetail.executors import Workers
from tests.support.placing import plan_for, random_order, random_placement, two_devices

HERE = Path(__file__).parent
FAMILY_OF = {
    name: family
    for families in (parts.FAMILIES, wrappers.FAMILIES)
    for family, names in families.items()
    for name in names
}


@dataclass(frozen=True)
class Found:
    """A case's outcome; `minimal` is the smallest case with one of the same kind, where that is
    a fault."""

    case: Case
    outcome: Outcome
    placed: bool
    minimal: Case | None = None


def found_of(index: int, options: argparse.Namespace, workers: Workers) -> Found:
    """Case `index`: the first attempt that plain PyTorch can run."""
    place = None
    if options.placed and index % options.placed == 0:
        place = placing(lambda captured: _plan(captured, index), workers)
    attempt = 0
    while True:
        case = draw(options.seed, index, attempt)
        attempt += 1
        if set(case.root.names()) & set(options.without):
            continue
        outcome = outcome_of(case, place)
        if outcome.kind != "impossible":
            break
    minimal = None
    if outcome.kind in FAULTS and options.minimise:
        only_placed = outcome_of(case).kind != outcome.kind
        minimal = minimised(
            case, outcome.kind, lambda less: outcome_of(less, place if only_placed else None)
        )
    return Found(case, outcome, place is not None, minimal)


def _plan(captured, seed):
    """A random placement; half of them with a random order."""
    placement = random_placement(captured.graph, seed)
    orders = random_order(captured.graph, placement, seed) if seed % 2 else "by index"
    return plan_for(captured, placement, orders)


def families_table(found: list[Found]) -> str:
    """Cases with a part of each family, by outcome."""
    counts: dict[str, Counter[str]] = {family: Counter() for family in FAMILY_OF.values()}
    for one in found:
        for family in {FAMILY_OF[name] for name in one.case.root.names()} - {"plain"}:
            counts[family][one.outcome.kind] += 1
    rows = [
        (family, str(sum(of.values())), *(str(of[kind]) for kind in KINDS))
        for family, of in counts.items()
        if family != "plain"
    ]
    return table(("cases with", "all", *KINDS), rows)


def settings_table(found: list[Found]) -> str:
    """Cases by optimizer, dtype, mode, and whether they were placed, by outcome."""
    counts: dict[str, Counter[str]] = {}
    for one in found:
        case = one.case
        said = (case.mode, case.dtype, "placed too" if one.placed else "run_step only")
        for text in (*said, case.optimizer) if case.trains else said:
            counts.setdefault(text, Counter())[one.outcome.kind] += 1
    rows = [
        (text, str(sum(of.values())), *(str(of[kind]) for kind in KINDS))
        for text, of in sorted(counts.items())
    ]
    return table(("cases", "all", *KINDS), rows)


def refusals(found: list[Found]) -> str:
    """What was refused, by what the error says but for names."""
    said = Counter(_nameless(one.outcome.detail) for one in found if one.outcome.kind == "refused")
    return "\n".join(f"* {count} x {text}" for text, count in said.most_common()) or "None."


def _nameless(text: str) -> str:
    """The text without the place in the code and with "..." for names of parameters."""
    said = text.partition(": ")[2].partition(" (at ")[0].partition(" [")[0]
    return re.sub(r"\d+(\.\w+)+", "...", said)


def report(one: Found) -> None:
    print(f"{one.outcome.kind}: {one.case}", flush=True)
    print(f"    {one.outcome.detail[:300]}", flush=True)
    if one.minimal is not None:
        print(f"    minimal: {one.minimal}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, first=0, seed=0, write=False)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--placed", type=int, default=5, help="every how many cases; 0: none")
    parser.add_argument("--without", nargs="*", default=[], metavar="PART", help="not drawn")
    parser.add_argument("--no-minimise", dest="minimise", action="store_false")
    parser.add_argument("--case", metavar="TEXT", help="this one only")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    with Workers(two_devices()) as workers:
        if options.case:
            place = placing(lambda captured: _plan(captured, 0), workers)
            outcome = outcome_of(parse(options.case), place)
            print(f"{outcome.kind}: {outcome.detail}")
            sys.exit(outcome.kind in FAULTS)
        found = []
        for index in range(options.first, options.first + options.cases):
            found.append(found_of(index, options, workers))
            if found[-1].outcome.kind in FAULTS:
                report(found[-1])
    seconds = time.perf_counter() - began
    counts = Counter(one.outcome.kind for one in found)
    summary = (
        f"{len(found):,} cases of seed {options.seed}, "
        f"{sum(one.placed for one in found)} of them placed too: "
        + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
        + f". {seconds:.0f} s."
    )
    texts = {
        "summary": summary,
        "families": families_table(found),
        "settings": settings_table(found),
        "refusals": refusals(found),
    }
    for name, text in texts.items():
        print()
        show(text, HERE / "README.md" if options.write else None, name)
    sys.exit(any(counts[kind] for kind in FAULTS))


if __name__ == "__main__":
    main()
