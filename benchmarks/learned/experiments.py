"""GDP's experiments beyond its first table, in ours: batches, held-out graphs, and the ablation.

    python benchmarks/learned/experiments.py --parts table2,figure2 --trials 1000 --seeds 1
    python benchmarks/learned/experiments.py --method gdp-paper --parts table3 --trials 1000

Paper: Y. Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", 2019,
https://arxiv.org/abs/1910.01578, tables 2 and 3, figures 2 and 4, section 4.

    table2     one policy for eleven graphs against one for each
    table3     one policy for related graphs, for unlike ones, for variants of one
    figure2    one of six graphs held out: the others' policy on it, as it is and fine-tuned
    figure4    the same with the graph among those that the policy was trained on
    ablation   without attention, superposition, or classical advice: one policy for all graphs,
               and one for those graphs that the paper says fail without superposition
    ablation-one   the same by a policy for each graph, without the table of one graph's own
    shipped    the policy that comes with the package on families that it never saw
    hdp        HDP until it converges, at the rates of its authors' open version and at ours

Differences: sizes of the networks are ours (`reproductions/cases.py`), and so are the six graphs of
figures 2 and 4, those of table 3's first batch, and in what three variants of a network differ: the
batch. All graphs are placed as groups (`reproductions/learned.py`), the expert's placement as well,
and every seed's figure is of the best placement of its training; of several seeds the median is
shown, with the best and the worst. Fine-tuning and GDP-one get the same number of placements
(`--trials` for each graph), and those that the policy proposes before it is tuned count among them.
What a policy was trained with before does not count.

`--method gdp-paper` does all that is of GDP by its method as published, every op by itself, and
beside HDP as published. Its policy proposes its likeliest placement alone, and is tuned as it was
trained.
"""

import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import among, count, parser_of, show, table
from runs import (
    CASES,
    GDP,
    TABLE,
    Effort,
    Trained,
    batch,
    converged,
    fixed,
    one,
    task_for,
    tuned,
    tuned_shipped,
)

from dovetail.placers import PLACERS, Budget
from dovetail.placers.learned.records import PlacementTask
from reproductions.records import BestSoFar, LearnedRun
from reproductions.tables import geometric_mean, reached

HERE = Path(__file__).parent
Text = Iterator[str]
TABLE2 = {
    "rnnlm-2-2gpu": 0.0, "rnnlm-4-4gpu": 5.0, "gnmt-2-2gpu": 0.0, "gnmt-4-4gpu": 0.0,
    "transformer-xl-2-2gpu": 7.6, "transformer-xl-4-4gpu": 3.0, "transformer-xl-8-8gpu": 1.5,
    "inception-2gpu": 0.0, "amoebanet-4gpu": -5.0, "wavenet-2x18-2gpu": 15.0,
    "wavenet-4x36-4gpu": 3.3,
}  # fmt: skip
"""Row -> % that the paper's GDP-batch is faster than its GDP-one."""
SIX = {
    "inception-2gpu": 0.0, "amoebanet-4gpu": -4.5, "rnnlm-2-2gpu": 0.0, "gnmt-2-2gpu": 0.0,
    "transformer-xl-2-2gpu": 6.5, "wavenet-2x18-2gpu": 4.0,
}  # fmt: skip
TABLE3: dict[str, dict[str, float | None]] = {
    "unlike": dict(SIX),
    "recurrent": {
        "rnnlm-2-2gpu": 0.0, "rnnlm-4-4gpu": 0.0, "rnnlm-8-8gpu": 4.5, "gnmt-2-2gpu": 0.0,
        "gnmt-4-4gpu": 0.0, "gnmt-8-8gpu": 8.0,
    },
    "3 x GNMT-8": {"gnmt-8-8gpu": 5.1, "gnmt-8-8gpu-batch64": None, "gnmt-8-8gpu-batch256": None},
    "3 x RNNLM-8": {"rnnlm-8-8gpu": 4.5, "rnnlm-8-8gpu-batch32": None,
                    "rnnlm-8-8gpu-batch128": None},
}  # fmt: skip
"""Batch -> row -> % over the best related method; None: the paper has one figure for all three."""
ABLATIONS = {"attention": 18.0, "superposition": 6.5, "advice": None}
"""Option of the policy -> % that it is worth in the paper; None: it is ours."""
UNSEEN = ("gnmt-2-2gpu", "gnmt-4-4gpu", "gnmt-8-8gpu", "amoebanet-4gpu", "llama-4gpu")
HDP_RATES: dict[str, dict[str, bool]] = {
    "the open version's rates": {"reference": True}, "our rates": {},
}  # fmt: skip
MIXED = ("amoebanet-4gpu", "inception-2gpu", "rnnlm-4-4gpu", "gnmt-4-4gpu")
"""Without superposition batch training of these fails on the first two, by the paper."""


def table2(effort: Effort, rows: Sequence[str]) -> Text:
    yield "### GDP-batch over GDP-one (table 2)\n"
    yield from _batch(effort, {row: paper for row, paper in TABLE2.items() if row in rows})


def table3(effort: Effort, rows: Sequence[str]) -> Text:
    yield "### Batches of related and of unlike graphs (table 3)\n"
    for name, printed in TABLE3.items():
        chosen = {row: value for row, value in printed.items() if row in rows}
        if len(chosen) > 1:
            yield f"\n{name}:\n"
            yield from _batch(effort, chosen)


def _batch(effort: Effort, printed: dict[str, float | None]) -> Text:
    keys, lines, ratios = tuple(printed), [], []
    for row, paper in printed.items():
        alone = _over(effort, lambda seed, row=row: _seconds(one(effort, row, seed)))
        shared = _over(effort, lambda seed, row=row: _seconds(batch(effort, keys, seed)[row].run))
        ratios.append(_ratios(alone, shared))
        theirs = "-" if paper is None else f"{paper:+.1f} %"
        faster = _faster(_middle(alone), _middle(shared))
        lines.append((CASES[row].title, _cell(alone), _cell(shared), faster, theirs))
    yield table(("graph", "GDP-one", "GDP-batch", "batch is faster by", "the paper"), lines)
    yield f"{_means(ratios)}."


def figure2(effort: Effort, rows: Sequence[str]) -> Text:
    yield "### Held-out graphs (figure 2)\n"
    chosen = [row for row in SIX if row in rows]
    yield from _generalisation(effort, chosen, lambda row: [key for key in chosen if key != row])


def figure4(effort: Effort, rows: Sequence[str]) -> Text:
    yield (
        "### The graph among those trained on (figure 4)\n\nThe paper: 5 % less step time and 86 % "
        "less search time than GDP-one.\n"
    )
    chosen = [row for row in SIX if row in rows]
    yield from _generalisation(effort, chosen, lambda _row: chosen)


def _generalisation(
    effort: Effort, rows: Sequence[str], others: Callable[[str], list[str]]
) -> Text:
    lines, steps, searches = [], [], []
    for row in rows:
        alone = [one(effort, row, seed) for seed in _seeds(effort)]
        # On the same groups: as published, both place every op by itself.
        other = "hdp-paper" if effort.method == "gdp-paper" else "hdp"
        hdp = "-"
        if effort.hdp_trials:
            hdp = _cell([_seconds(one(effort, row, seed, other)) for seed in _seeds(effort)])
        found = [tuned(effort, others(row), row, seed) for seed in _seeds(effort)]
        gdp, fine = _middle(map(_seconds, alone)), _middle(_seconds(t.run) for t in found)
        less = [_less_search(a, t.run, effort.trials) for a, t in zip(alone, found, strict=True)]
        if gdp and fine:
            steps.append(fine / gdp)
        searches += less
        lines.append((
            CASES[row].title,
            _cell([_human(effort, row)]),
            hdp,
            *map(_cell, (
                [*map(_seconds, alone)], [t.likeliest for t in found],
                [t.zero_shot for t in found], [_seconds(t.run) for t in found],
            )),
            _faster(gdp, fine),
            ", ".join(map(str, less)),
        ))  # fmt: skip
    head = (
        "graph", "human", "HDP", "GDP-one", "zero-shot, likeliest", "zero-shot, best proposed",
        "fine-tuned", "faster than GDP-one by", "of its placements to one as good",
    )  # fmt: skip
    yield table(head, lines)
    mean, search = geometric_mean(steps), geometric_mean([share.value for share in searches])
    if mean is not None:
        yield f"\nFine-tuned over GDP-one, geometric mean: {mean:.3f} x the step time"
    if search is not None:
        never = sum(share.at_least for share in searches)
        yield (
            f"and {'at least ' if never else ''}{search:.2f} x the placements to one as good as "
            f"GDP-one's best: {never} of {len(searches)} trainings never get there, and count with "
            f"all {effort.trials:,}."
        )
    yield (
        f"\nGDP-one has {effort.trials:,} placements a graph, and so has fine-tuning, with what "
        "the policy proposes first. The placements by which that policy was trained before, "
        f"{effort.trials:,} of each of its graphs, are not counted."
    )


def ablation(effort: Effort, rows: Sequence[str]) -> Text:
    yield (
        "### Without attention, superposition, or classical advice\n\nOne policy for all of these "
        "graphs, which therefore has no table of logits of one graph's own.\n"
    )
    keys = tuple(row for row in TABLE2 if row in rows)
    if len(keys) < 2:
        yield f"No batch: it takes two or more of {', '.join(TABLE2)}."
        return
    yield from _ablated(effort, keys, _options(effort), lambda row, seed, options: batch(
        effort, keys, seed, **options)[row])  # fmt: skip
    mixed = tuple(row for row in MIXED if row in rows)
    if len(mixed) > 1:
        yield (
            "\nOne policy for the graphs of which the paper says that without superposition a "
            f"batch fails on {' and '.join(CASES[row].title for row in MIXED[:2])}:\n"
        )
        yield from _ablated(effort, mixed, ("superposition",), lambda row, seed, options: batch(
            effort, mixed, seed, **options)[row])  # fmt: skip


def ablation_one(effort: Effort, rows: Sequence[str]) -> Text:
    yield (
        "### The same with a policy for each graph\n\nWithout the table of logits that our GDP-one "
        "has for each group and device, in every column: it can hold what attention would find.\n"
    )
    keys = [row for row in SIX if row in rows]
    less = {"table": False} if effort.method == "gdp" else {}
    yield from _ablated(effort, keys, _options(effort), lambda row, seed, options: batch(
        effort, (row,), seed, **less, **options)[row])  # fmt: skip


def _options(effort: Effort) -> list[str]:
    """What an ablation leaves out: the published method has no advice."""
    return [name for name in ABLATIONS if effort.method == "gdp" or name != "advice"]


def _ablated(
    effort: Effort,
    keys: Sequence[str],
    without: Iterable[str],
    train: Callable[[str, int, dict[str, bool]], Trained],
) -> Text:
    """Best placements and likeliest ones, whole and without each option."""
    ways: dict[str, dict[str, bool]] = {"whole": {}} | {
        option: {option: False} for option in without
    }
    columns = [name if not options else f"without {name}" for name, options in ways.items()]
    ratios: dict[str, list[list[float | None]]] = {name: [] for name in ways}
    best, likeliest = [], []
    for row in keys:
        found = {
            name: [train(row, seed, options) for seed in _seeds(effort)]
            for name, options in ways.items()
        }
        seconds = {name: [_seconds(each.run) for each in of] for name, of in found.items()}
        for name, of in seconds.items():
            ratios[name].append(_ratios(of, seconds["whole"]))
        best.append((CASES[row].title, *map(_cell, seconds.values())))
        last = ([each.likeliest for each in of] for of in found.values())
        likeliest.append((CASES[row].title, *map(_cell, last)))
    yield table(("best placement of the training", *columns), best)
    yield ""
    yield table(("likeliest placement after it", *columns), likeliest)
    for name in list(ways)[1:]:
        paper = ABLATIONS[name]
        theirs = "it is ours" if paper is None else f"the paper: {paper} %"
        yield f"{_means(ratios[name], f'{name} is worth')}; {theirs}."


def unseen(effort: Effort, rows: Sequence[str]) -> Text:
    yield "### The shipped policy on families that it never saw\n"
    names = ("likeliest", "best proposed", "fine-tuned", "etf", "human")
    lines, ratios = [], {name: [] for name in names}
    for row in (row for row in UNSEEN if row in rows):
        gdp = _middle(_over(effort, lambda seed, row=row: _seconds(one(effort, row, seed))))
        found = [tuned_shipped(effort, row, seed) for seed in _seeds(effort)]
        task = task_for(effort.table, row, "gdp")[0]
        values = {
            "likeliest": _middle(t.likeliest for t in found),
            "best proposed": _middle(t.zero_shot for t in found),
            "fine-tuned": _middle(_seconds(t.run) for t in found),
            "etf": _classical(task, "etf"),
            "human": _human(effort, row),
        }
        for name, value in values.items():
            if gdp and value:
                ratios[name].append(value / gdp)
        spent = statistics.median(t.run.found.search_seconds for t in found)
        cells = map(_s, (gdp, *values.values()))
        lines.append((CASES[row].title, f"{task.groups.count:,}", *cells, f"{spent:.1f} s"))
    head = ("graph", "groups", "GDP-one", *ratios, "it took, with tuning")
    yield table(head, lines)
    means = {name: geometric_mean(found) for name, found in ratios.items()}
    said = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items() if mean)
    yield (
        f"\nOver GDP-one, geometric means: {said}. Likeliest: the one placement that the policy "
        "takes for best, as it is; best proposed: of all that it proposes, the plain cuts and the "
        "advice of classical planners among them. GDP-one has "
        f"{effort.trials:,} placements a graph, and so has fine-tuning, with those proposals. What "
        "the shipped policy was trained with is not counted."
    )


def _classical(task: PlacementTask, name: str) -> float | None:
    budget = Budget(evaluations=100, threads=1)
    problem = task.problem(threads=1)
    (score,) = budget.score(problem, PLACERS[name](problem, budget)[None], always=True)
    return None if score.lacking_bytes else score.value


def hdp(effort: Effort, rows: Sequence[str]) -> Text:
    yield "### HDP until it converges\n"
    head = ["graph", "groups", "human", "one GPU"]
    for name in HDP_RATES:
        head += [name, "over human", "placements used", "to the best"]
    lines, ended = [], Counter()
    ratios: dict[str, list[list[float | None]]] = {name: [] for name in HDP_RATES}
    for row in (row for row in GDP if row in rows):
        task, _ = task_for(effort.table, row, "hdp")
        human, one_gpu = fixed(effort, row, "hdp")
        cells = [CASES[row].title, f"{task.groups.count:,}", _s(human), _s(one_gpu)]
        for name, options in HDP_RATES.items():
            found = [converged(effort, row, seed, "hdp", **options) for seed in _seeds(effort)]
            seconds = [_seconds(each.run) for each in found]
            middle = _middle(seconds)
            ratios[name].append(_ratios(seconds, [human] * len(seconds)))
            ended.update(each.ended for each in found)
            cells += [
                _cell(seconds), f"{middle / human:.3f}" if middle and human else "-",
                ", ".join(f"{each.run.trials:,}" for each in found),
                ", ".join(f"{each.run.bests[-1].trial:,}" if each.run.bests else "never"
                          for each in found),
            ]  # fmt: skip
        printed = CASES[row].published.seconds if CASES[row].published else {}
        theirs, their_human = printed.get("HDP"), printed.get("human")
        cells.append(f"{theirs / their_human:.3f}" if theirs and their_human else "-")
        lines.append(tuple(cells))
    yield table((*head, "the paper's over human"), lines)
    for name, of in ratios.items():
        yield f"{_means(of, f'{name[0].upper()}{name[1:]}: slower than human by')}."
    yield (
        f"\nA training ends after {effort.patience:,} placements without a better one "
        f"({ended['no better']} of {ended.total()}), once its policy draws nothing new "
        f"({ended['nothing new']}), or after {effort.limit:,} ({ended['limit']})."
    )


PARTS: dict[str, Callable[[Effort, Sequence[str]], Text]] = {
    "table2": table2,
    "table3": table3,
    "figure2": figure2,
    "figure4": figure4,
    "ablation": ablation,
    "ablation-one": ablation_one,
    "shipped": unseen,
    "hdp": hdp,
}


OURS = ("shipped", "hdp")
"""Parts that are not of GDP as published."""


@dataclass(frozen=True)
class Share:
    """Placements of one training over those of another; `at_least`: it is not there after all."""

    value: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'> ' if self.at_least else ''}{self.value:.2f} x"


def _less_search(alone: LearnedRun, run: LearnedRun, trials: int) -> Share:
    """Placements to one as good as GDP-one's best, as a share of GDP-one's own to it; `trials` are
    those that either may use."""
    best = alone.bests[-1] if alone.bests else BestSoFar(trials, trials, math.inf)
    hit = reached(run, best.seconds)
    return Share(trials / best.trial, True) if hit is None else Share(hit.trial / best.trial)


def _human(effort: Effort, row: str) -> float | None:
    """Seconds of the expert's placement of the groups that GDP places."""
    return fixed(effort, row, effort.method)[0]


def _seeds(effort: Effort) -> range:
    return range(effort.seeds)


def _seconds(run: LearnedRun) -> float | None:
    return run.found.seconds


def _over(effort: Effort, seconds: Callable[[int], float | None]) -> list[float | None]:
    """The seconds of each seed."""
    return [seconds(seed) for seed in _seeds(effort)]


def _ratios(before: Sequence[float | None], after: Sequence[float | None]) -> list[float | None]:
    """Seed by seed, how many times as long one takes as the other; None where one does not fit."""
    pairs = zip(before, after, strict=True)
    return [b / a if b and a else None for b, a in pairs]


def _means(ratios: Sequence[Sequence[float | None]], what: str = "Faster by") -> str:
    """Text on the geometric mean over graphs of `ratios` [graphs, seeds]: of each seed alone, and
    the median of those."""
    means = [geometric_mean(r for r in of_seed if r) for of_seed in zip(*ratios, strict=True)]
    each = [mean for mean in means if mean is not None]
    if not each:
        return f"\n{what}: no figure, for nothing fits"
    lacking = sum(ratio is None for of_graph in ratios for ratio in of_graph)
    left_out = f", without {lacking} pairs of which one does not fit" if lacking else ""
    by_seed = ", ".join(f"{100 * (mean - 1):+.1f}" for mean in each)
    return (
        f"\n{what} {100 * (statistics.median(each) - 1):+.1f} % in the geometric mean of "
        f"{len(ratios)} graphs (by seed: {by_seed}{left_out})"
    )


def _cell(values: Sequence[float | None]) -> str:
    """The median of seeds, with the best and the worst."""
    order = sorted(values, key=lambda value: math.inf if value is None else value)
    spread = f" ({_s(order[0])} to {_s(order[-1])})" if len(order) > 1 else ""
    return f"{_s(_middle(order))}{spread}"


def _middle(values: Iterable[float | None]) -> float | None:
    """The median, the better of two; what does not fit is worse than any."""
    found = statistics.median_low(float("inf") if value is None else value for value in values)
    return None if found == float("inf") else found


def _s(seconds: float | None) -> str:
    return "OOM" if seconds is None else f"{seconds:.3f}"


def _faster(before: float | None, after: float | None) -> str:
    return "-" if not before or not after else f"{100 * (before / after - 1):+.1f} %"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, trials=1000, seeds=3, table=TABLE, out=HERE, readme=None)
    add = parser.add_argument
    said = f"of {', '.join(PARTS)}; default: all of the method"
    add("--parts", type=among(PARTS), default=[], help=said)
    add("--rows", type=among(CASES), default=list(CASES), help="only these graphs")
    add("--hdp-trials", type=int, help="of HDP; default: as many as the others; 0: without HDP")
    add("--table-trials", type=count, help="of those in --table; their first --trials count")
    add("--patience", type=count, default=1000, help="of the part hdp: placements")
    add("--limit", type=count, default=20_000, help="likewise, in all")
    methods = ("gdp", "gdp-paper")
    add("--method", choices=methods, default="gdp", help="as we have it, or published")
    arguments = parser.parse_args(argv)
    published = arguments.method == "gdp-paper"
    parts = arguments.parts or [part for part in PARTS if not published or part not in OURS]
    if published and (odd := set(OURS).intersection(parts)):
        parser.error(f"--method gdp-paper: {', '.join(sorted(odd))} is of other methods")
    effort = Effort(
        arguments.trials,
        arguments.trials if arguments.hdp_trials is None else arguments.hdp_trials,
        arguments.seeds,
        arguments.table,
        arguments.out,
        arguments.table_trials,
        arguments.method,
        arguments.patience,
        arguments.limit,
    )
    for name in parts:
        text = "\n".join(PARTS[name](effort, arguments.rows))
        if name != "hdp":
            of_hdp = f" ({effort.hdp_trials:,} of HDP's)" if effort.hdp_trials else ""
            text += (
                f"\n\n`{effort.method}`, {effort.trials:,} placements a graph and training{of_hdp}."
            )
        text += f"\n\nSeeds: {effort.seeds}."
        show(text, arguments.readme, f"{name}-paper" if published else name)


if __name__ == "__main__":
    main()
