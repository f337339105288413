"""Every placer and every scheduler by name, in one table each.

The command line and its help, `auto`, `learn`, error messages and `docs/methods.md` read these
tables. To add a method, write its file and add one entry here; `docs/extending.md` shows how.

A function is named as text, "module:function", and imported when it first runs. So a help text
waits for none of the libraries that the methods need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

PLACED_OBJECTIVES = ("step", "load", "latency")
"""What placers of groups search for. The stages of a pipeline are sought by `placers/pipelines.py`,
and `--placer` is refused there."""
OBJECTIVES = (*PLACED_OBJECTIVES, "pipeline")
"""What a plan may be made for."""
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
"""The orders of work in a pipeline of micro-batches: `placers.pipeline_schedules`."""
KEEP_ORDER = ("single", "auto")
"""The placers that can keep an order of stages, which some formats ask for: each device has one run
of it."""
NO_ORDER = "{placer!r} keeps no order of stages; leave it out, or use single"
"""What is said of any other placer."""
Grouping = Literal["rule", "ops", "cells"]


@dataclass(frozen=True)
class Method:
    """One method: an entry of `PLACERS` or `SCHEDULERS`. Calling it runs its function.

    run          "module:function", or the function itself. Every placer takes a `PlacementProblem`
                 and a `Budget`, and returns a device for each group; every scheduler takes a
                 `StageProblem`, and returns a `SchedulerResult`
    objectives   those that the method searches for. Another objective is allowed where the method
                 is named; `auto` does not try it there
    help         one sentence for the command line and the documents
    role         when `auto` runs it: "baseline" (always, first), "constructive" (then, once each)
                 or "improving" (then, in slices of time). "": only where it is named
    first_for    objectives for which `auto` tries it before the other constructive methods
    slices       how many times longer than usual its first slice is: for a method that builds a
                 model before it finds anything
    large        `auto` also tries it on graphs of more than `auto.LARGE_OPS` ops
    learns       `dovetail learn` can train its policy
    carries      a policy that was trained on one graph, or several, serves others
    grouping     the groups that it places: "rule", those of RL17's rule; "ops", only what must stay
                 together; "cells", those of RL17's experiments (`graph.cells`)
    with_policy  a function that takes (policy file or None, updates) and returns a placer; "" where
                 the method takes no policy file
    """

    name: str
    run: str | Callable[..., Any]
    objectives: tuple[str, ...]
    help: str
    role: str = ""
    first_for: tuple[str, ...] = ()
    slices: int = 1
    large: bool = True
    learns: bool = False
    carries: bool = False
    grouping: Grouping = "rule"
    with_policy: str = ""

    def load(self) -> Callable[..., Any]:
        """The function, imported if it was not yet."""
        return imported(self.run) if isinstance(self.run, str) else self.run

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function."""
        return self.load()(*arguments)


def imported(text: str) -> Callable[..., Any]:
    """The function that "module:function" names, where module is one of this package."""
    module, _, name = text.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"dovetail.{module}"), name)
    return function


def table(*methods: Method) -> dict[str, Method]:
    """The methods by name."""
    return {method.name: method for method in methods}


# The order counts: `auto` tries the methods of a role in it, and of equally good plans the first
# found is kept.
PLACERS: dict[str, Method] = table(
    Method("single", "placers.baselines:single", PLACED_OBJECTIVES,
           "everything on the one device where that is best", role="baseline"),
    Method("expert", "placers.expert:expert", PLACED_OBJECTIVES,
           "layers of an RNN on devices of their own, other networks in runs of layers",
           role="baseline"),
    Method("balanced", "placers.baselines:balanced", PLACED_OBJECTIVES,
           "contiguous runs of equal work", role="baseline"),
    Method("etf", "placers.etf:etf", PLACED_OBJECTIVES,
           "list scheduling: the op that can start earliest goes first", role="baseline"),
    Method("m_topo", "placers.m_topo:m_topo", PLACED_OBJECTIVES,
           "contiguous runs that share memory evenly", role="constructive"),
    Method("heft", "placers.heft:heft", ("step",),
           "list scheduling by upward rank, each op where it ends earliest", role="constructive"),
    Method("linear_dp", "placers.linear_dp:linear_dp", PLACED_OBJECTIVES,
           "the best contiguous stages along each of several orders", role="constructive",
           first_for=("load", "latency")),
    Method("ideal_dp", "placers.ideal_dp:ideal_dp", ("load",),
           "the best contiguous stages of all orders, where there are few enough",
           role="constructive", first_for=("load",)),
    Method("metis", "placers.metis:metis", ("step", "load"),
           "balanced parts with the least bytes between them, by METIS", role="constructive"),
    Method("families", "placers.families:families", ("step",),
           "coordinate descent that moves weights with all that reads them", role="constructive"),
    Method("scotch", "placers.scotch:scotch", ("step", "load"),
           "the graph mapped onto the machine's graph by Scotch", role="constructive"),
    Method("mincut", "placers.scotch:mincut", ("step",),
           "balanced parts with the least bytes between them, by Scotch", role="constructive"),
    Method("sct", "placers.sct:sct", ("step",),
           "list scheduling that keeps an op beside its favourite successor", role="constructive",
           large=False),
    Method("multilevel", "placers.multilevel:multilevel", ("step",),
           "plans a small merged graph, then refines on ever larger ones", role="improving",
           slices=2),
    Method("local_search", "placers.local_search:local_search", ("step", "load"),
           "moves of groups, accepted by simulated annealing", role="improving"),
    Method("latency_search", "placers.latency_search:latency_search", ("latency",),
           "fills accelerators greedily, then anneals", role="improving"),
    Method("exact", "placers.exact:exact", PLACED_OBJECTIVES,
           "CP-SAT: the best plan with its proof, where the budget is enough", role="improving",
           slices=4),
    Method("seq2seq", "placers.learned.placing:seq2seq", PLACED_OBJECTIVES,
           "RL17's policy, trained on this graph", learns=True),
    Method("seq2seq-paper", "placers.learned.placing:seq2seq_paper", PLACED_OBJECTIVES,
           "RL17's policy as published, trained on this graph", learns=True, grouping="cells"),
    Method("hdp", "placers.learned.placing:hdp", PLACED_OBJECTIVES,
           "HDP's hierarchical policy, trained on this graph", learns=True),
    Method("hdp-paper", "placers.learned.placing:hdp_paper", PLACED_OBJECTIVES,
           "HDP's policy as published, trained on this graph op by op", learns=True,
           grouping="ops"),
    Method("gdp", "placers.learned.placing:gdp", PLACED_OBJECTIVES,
           "proposals of a GDP policy that was trained on other graphs", learns=True, carries=True,
           with_policy="placers.learned.placing:make_gdp"),
    Method("gdp-paper", "placers.learned.placing:gdp_paper", PLACED_OBJECTIVES,
           "GDP's policy as published, trained on this graph op by op", learns=True, carries=True,
           grouping="ops"),
    Method("gdp+search", "placers.learned.placing:gdp_search", PLACED_OBJECTIVES,
           "the same proposals, improved by local search",
           with_policy="placers.learned.placing:make_gdp_search"),
    Method("auto", "placers.auto:auto", PLACED_OBJECTIVES, "all that suit, within one budget"),
)  # fmt: skip

SCHEDULERS: dict[str, Method] = table(
    Method("sequential", "schedulers.scheduling:schedule_sequential", ("step",),
           "one op after another, as without a scheduler"),
    Method("greedy", "schedulers.scheduling:schedule_greedy", ("step",),
           "all ops that are ready, at once"),
    Method("merge", "schedulers.scheduling:schedule_merge", ("step",),
           "like ops merged into one, where that is faster"),
    Method("dos", "schedulers.scheduling:schedule_dos", ("step",),
           "the best stages, by DOS's dynamic programme"),
    Method("ios", "schedulers.scheduling:schedule_ios", ("step",),
           "the best stages of few groups, by IOS's dynamic programme"),
    Method("dataflow", "schedulers.scheduling:schedule_dataflow", ("step",),
           "streams without stages: an op starts when its inputs are there"),
)  # fmt: skip


def listing(title: str, methods: dict[str, Method]) -> str:
    """The methods for the end of a help page, a paragraph each."""
    return "\n\n".join([title, *(f"{m.name}: {m.help}" for m in methods.values())])
