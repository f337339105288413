"""Data-parallel towers of Inception-V3, and loss against simulated time.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, section 4.4 and figures 6 and 7: Inception-V3 on batches of 128,
as 4 towers of 32 or as one step of 128 placed on the same 4 GPUs; NMT under the expert's placement
and the learned one. Differences: ours stand in the place of the learned ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dovetail.bench import graphs
from dovetail.bench.cases import RL17_CASES
from dovetail.bench.methods import HYPOTHESIS, PLAIN, out_of_memory
from dovetail.bench.records import Case, Column, Curve, Row, Tower
from dovetail.bench.running import EXPERT, Settings, Tell, forget, missing, read_column, run_column
from dovetail.bench.store import PLANNED, Store, fingerprint
from dovetail.costs import analytic_costs
from dovetail.errors import MissingLibraryError
from dovetail.graph import Graph, replicate
from dovetail.machine import Machine, parse_machine
from dovetail.machine.files import machine_to_dict
from dovetail.plans import tower_placement, tower_seconds
from dovetail.simulator import Simulator

REPLICAS, BATCH = 4, 32
TOWER = next(case for case in RL17_CASES if case.key == "inception-v3-4gpu")
"""Of one replica: its batch is `BATCH`."""
WHOLE = replace(
    TOWER,
    key="inception-v3-128-4gpu",
    title=f"Inception-V3, batch {REPLICAS * BATCH}, 4 GPUs",
    model=f"zoo:inception_v3?batch={REPLICAS * BATCH}",
    published=None,
)
"""What the towers are compared with: one step of all their examples."""
TRANSLATION = "nmt-4gpu"
KINDS = {True: "synchronous", False: "asynchronous"}
_METHODS = {PLAIN: (EXPERT, "local_search", "auto"), HYPOTHESIS: ()}


def run_towers(settings: Settings, tell: Tell, complain: Tell) -> list[str]:
    """Simulate and keep the towers of both kinds."""
    store = settings.store(complain)
    graph = graphs.graph_for(store, TOWER)
    machine = parse_machine(TOWER.machine)
    for synchronous, kind in KINDS.items():
        name, key = _tower(kind, graph.fingerprint)
        if store.get(name, key) is None:
            tell(f"{kind} towers")
            store.put(name, key, simulate_towers(graph, machine, synchronous=synchronous))
    return []


def simulate_towers(graph: Graph, machine: Machine, *, synchronous: bool) -> dict[str, Any]:
    """`seconds` of a step of `REPLICAS` towers of `graph`, None with a `reason` where they do not
    fit. Of asynchronous towers, each of which goes on by itself, their mean."""
    towers = replicate(graph, REPLICAS, synchronous=synchronous).graph
    simulator = Simulator(towers, machine, analytic_costs(towers, machine), ranked=True)
    timeline = simulator.timeline(tower_placement(towers, machine))
    seconds = float(tower_seconds(timeline, towers, REPLICAS).mean())
    reason = out_of_memory(machine, timeline.peak_memory_bytes, simulator.capacities)
    return {"seconds": None if reason else seconds, "reason": reason}


def run_whole(settings: Settings, tell: Tell, complain: Tell) -> list[str]:
    """Place and keep the step of all the towers' examples."""
    return run_column(_of_whole(settings), WHOLE, PLAIN, tell, complain)


def run_learning(settings: Settings, tell: Tell, complain: Tell) -> list[str]:
    """Train the small networks and keep their losses. Without scikit-learn there are none, which is
    no failure."""
    from dovetail.bench import learning  # torch

    tell("training for the curves")
    try:
        losses = learning.train(seed=settings.seed)
    except MissingLibraryError as error:
        complain(f"no curves of loss against time: {error}")
        return []
    settings.store(complain).put(*_losses(settings), losses)
    return []


def lacking(settings: Settings, store: Store) -> dict[str, tuple[Case | None, str]]:
    """What is yet to be computed of all this: name -> (the case whose graph it needs, function)."""
    kept = {
        "towers": (TOWER, "run_towers", bool(read_towers(store))),
        "whole batch": (WHOLE, "run_whole", _whole_is_kept(settings, store)),
        "curves": (None, "run_learning", _kept_losses(settings, store) is not None),
    }
    return {
        name: (case, f"{__name__}:{function}")
        for name, (case, function, is_kept) in kept.items()
        if not is_kept
    }


def read_towers(store: Store) -> list[Tower]:
    """Both kinds, or none if one of them is not kept."""
    captured = graphs.known(store, TOWER)
    if captured is None:
        return []
    found = {kind: store.get(*_tower(kind, captured.graph)) for kind in KINDS.values()}
    if None in found.values():
        return []
    return [
        Tower(
            key=f"{TOWER.key}.{kind}",
            title="Inception-V3",
            kind=kind,
            replicas=REPLICAS,
            batch=BATCH,
            **value,
        )
        for kind, value in found.items()
    ]


def read_curves(settings: Settings, store: Store, rows: Sequence[Row]) -> list[Curve]:
    """Loss against time of each way whose seconds of a step are kept; none without the losses."""
    losses = _kept_losses(settings, store)
    if losses is None:
        return []
    from dovetail.bench import learning

    translation = next((row.columns[PLAIN] for row in rows if row.key == TRANSLATION), None)
    whole = read_column(_of_whole(settings), store, WHOLE, PLAIN)
    of_towers = {f"{tower.kind} towers": tower.seconds for tower in read_towers(store)}
    seconds = {
        learning.INCEPTION: _planned(whole) | of_towers,
        learning.NMT: _planned(translation),
    }
    known = {
        title: {name: value for name, value in of.items() if value is not None}
        for title, of in seconds.items()
    }
    return learning.curves(known, losses)


def forget_towers(settings: Settings, store: Store) -> None:
    """Drop all that is kept here."""
    forget(_of_whole(settings), store, WHOLE)
    for kind in KINDS.values():
        store.drop(_tower(kind, "")[0])
    store.drop(_losses(settings)[0])


def _planned(column: Column | None) -> dict[str, float | None]:
    """Seconds of the expert's step and of the best one."""
    if column is None or not column.best:
        return {}
    expert = column.methods.get(EXPERT)
    return {
        "expert": None if expert is None else expert.seconds,
        "planned": column.methods[column.best].seconds,
    }


def _of_whole(settings: Settings) -> Settings:
    return replace(settings, methods=_METHODS)


def _whole_is_kept(settings: Settings, store: Store) -> bool:
    return PLAIN not in missing(_of_whole(settings), store, WHOLE)


def _kept_losses(settings: Settings, store: Store) -> Any:
    return store.get(*_losses(settings))


def _losses(settings: Settings) -> tuple[str, str]:
    """(name, fingerprint) of the losses in the store."""
    return "learning", fingerprint(PLANNED, learning=settings.seed)


def _tower(kind: str, graph: str) -> tuple[str, str]:
    """(name, fingerprint) of a kind of towers in the store."""
    machine = machine_to_dict(parse_machine(TOWER.machine))
    key = fingerprint(PLANNED, graph=graph, machine=machine, kind=kind, replicas=REPLICAS)
    return f"{TOWER.key}.{kind}-towers", key
