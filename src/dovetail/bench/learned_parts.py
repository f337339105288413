"""The trainings of learned methods: which of them are kept, and what each is kept as.

    OUT/rows/CASE.plain.METHOD.seed-N.json      one training: a row, a method, a seed

They are tasks of their own, so that a killed table loses no more than the training that ran.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from dovetail.bench import graphs
from dovetail.bench.cases import LEARNED
from dovetail.bench.effort import middle
from dovetail.bench.methods import PLAIN
from dovetail.bench.records import Best, Case, Found, LearnedRun, Row
from dovetail.bench.running import Settings, Tell
from dovetail.bench.store import LEARNED as KIND
from dovetail.bench.store import Store, fingerprint
from dovetail.machine import parse_machine
from dovetail.machine.files import machine_to_dict
from dovetail.units import format_seconds


def trainings(settings: Settings) -> Iterator[tuple[str, int]]:
    """(method, seed) of every training of a row, seed by seed."""
    methods = [method for method in LEARNED[settings.name] if settings.trials_of(method)]
    for seed in range(settings.seed, settings.seed + settings.seeds):
        for method in methods:
            yield method, seed


def untrained(settings: Settings, store: Store, case: Case) -> list[tuple[str, int]]:
    """Those that are yet to be run."""
    return [
        (method, seed)
        for method, seed in trainings(settings)
        if training_of(settings, store, case, method, seed) is None
    ]


def run_training(
    settings: Settings, case: Case, method: str, seed: int, tell: Tell, complain: Tell
) -> list[str]:
    """Train and keep. Raises what a capture or a training raises."""
    from dovetail.bench.learned import run_learned, task_of

    store = settings.store(complain, KIND)
    graph = graphs.graph_for(store, case)
    task, grouping = task_of(case.key, graph, parse_machine(case.machine), method)
    name = f"{case.title}, {method}, seed {seed}"
    tell(name)
    wanted, told = settings.trials_of(method), 0

    def heard(trials: int, seconds: float) -> None:
        nonlocal told
        if 10 * trials // wanted > told:
            told = 10 * trials // wanted
            tell(f"{name}: {trials:,} trials, {format_seconds(seconds)}")

    run, placement = run_learned(task, grouping, method, trials=wanted, seed=seed, tell=heard)
    kept = {"run": asdict(run), "placement": None if placement is None else placement.tolist()}
    store.put(
        _name(case, method, seed), _key(settings, case, graph.fingerprint, method, seed), kept
    )
    return []


def with_trainings(settings: Settings, store: Store, case: Case, row: Row) -> Row:
    """The row with what is kept of its trainings, in the plain column: of each method the run of
    the median stands among the methods."""
    column, seconds = row.columns[PLAIN], 0.0
    runs: dict[str, list[LearnedRun]] = {}
    for method, seed in trainings(settings):
        run = training_of(settings, store, case, method, seed)
        if run is not None:
            runs.setdefault(method, []).append(run)
            seconds += run.found.search_seconds
    found = {method: middle(of).found for method, of in runs.items()}
    learned = {method: tuple(of) for method, of in runs.items()}
    column = replace(column, methods={**column.methods, **found}, learned=learned)
    return replace(row, columns={**row.columns, PLAIN: column}, seconds=row.seconds + seconds)


def training_of(
    settings: Settings, store: Store, case: Case, method: str, seed: int
) -> LearnedRun | None:
    """One training, if it is kept."""
    graph = graphs.known(store, case)
    kept = None if graph is None else _get(settings, store, case, graph.graph, method, seed)
    return None if kept is None else _run(kept["run"])


def forget_trainings(settings: Settings, store: Store, case: Case) -> None:
    """Drop those that these settings ask for."""
    for method, seed in trainings(settings):
        store.drop(_name(case, method, seed))


def _get(settings: Settings, store: Store, case: Case, graph: str, method: str, seed: int) -> Any:
    key = _key(settings, case, graph, method, seed)
    return store.get(_name(case, method, seed), key)


def _name(case: Case, method: str, seed: int) -> str:
    return f"{case.key}.{PLAIN}.{method}.seed-{seed}"


def _key(settings: Settings, case: Case, graph: str, method: str, seed: int) -> str:
    machine = machine_to_dict(parse_machine(case.machine))
    trials = settings.trials_of(method)
    return fingerprint(KIND, graph=graph, machine=machine, method=method, trials=trials, seed=seed)


def _run(raw: dict[str, Any]) -> LearnedRun:
    bests = tuple(Best(**best) for best in raw["bests"])
    return LearnedRun(**{**raw, "found": Found(**raw["found"]), "bests": bests})
