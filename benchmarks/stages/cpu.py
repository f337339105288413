"""Schedules of stages on this machine's cores, against what else runs a network there.

    python benchmarks/stages/cpu.py --out cpu.json
    python benchmarks/stages/cpu.py --networks InceptionV3 --peers eager onnxruntime --out cpu.json

Every network has a process of its own, which searches with all our schedulers, chooses as
`dovetail` does, in rounds of its own, and then measures all schedules and peers side by side: in
each round all take turns, in an order drawn for it. Ratios are to our sequential
schedule of the same round: their median, and a 95 % interval of it. Peers:

    eager                    the module as it is, in inference mode
    torch.compile            Inductor with freezing
    onnxruntime              of torch.onnx's export, one op after another on all cores
    onnxruntime, parallel    the same, ops side by side on one thread each (ORT_PARALLEL)
    openvino                 of the same file, its hint for latency, float32

Stage costs come from the cost cache and are kept there; DOVETAIL_CACHE names another folder.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from children import Record, parser_of_networks, records, said
from cpu_peers import PEERS, Given, module_of, prepared
from harness import count, show, table

from dovetail.executors.stages.targets import ONE_THREAD, CpuTarget
from dovetail.frontends import Captured
from dovetail.methods import SCHEDULERS
from dovetail.pipeline import resolve_model
from dovetail.pipeline.scheduling import check_equal, search, target_of
from dovetail.runtime.timers import Repeats, in_turns, race, ratios_of, seconds_of
from dovetail.schedulers.results import SEQUENTIAL, ScheduleCandidate

README = Path(__file__).parent / "README.md"
OURS = (*SCHEDULERS, ONE_THREAD)


def one(model: str, arguments: argparse.Namespace) -> Record:
    """What is measured of a network."""
    step = resolve_model(model, "")
    assert isinstance(step, Captured)
    network = target_of(step, seed=arguments.seed, progress=said)
    assert isinstance(network, CpuTarget)
    candidates = found_by(network, arguments.schedulers)
    steps = {name: network.step(candidate) for name, candidate in candidates.items()}
    check_equal(network, steps)
    # Schedules that run alike are measured as one, sequential before all.
    first = {network.program(candidates[name]): name for name in reversed(steps)}
    runs: dict[str, Any] = {name: network.timed(steps[name]) for name in reversed(first.values())}
    said("choosing", 0)
    chosen, _ = race(SEQUENTIAL, runs, arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        given = Given(module_of(step), network.inputs, network.streams_at_once, Path(folder))
        wanted = steps[SEQUENTIAL](*network.inputs)
        peers = {}
        for name in arguments.peers:
            said(f"{name}: preparing", 0)
            peers[name] = prepared(name, given, wanted, arguments.limit)
        runs |= {
            n: partial(seconds_of, peer.run) for n, peer in peers.items() if peer.run is not None
        }
        torch.set_num_threads(network.streams_at_once)
        said("measuring", 0)
        seconds = in_turns(runs, Repeats(arguments.rounds))
    for name in steps:
        seconds.setdefault(name, seconds[first[network.program(candidates[name])]])
    return {
        "kernels": network.kernels.count,
        "chosen": chosen,
        "seconds": seconds,
        "schedules": {name: _summary(candidate) for name, candidate in candidates.items()},
        "absent": {name: peer.reason for name, peer in peers.items() if peer.run is None},
        "peers": {
            name: {"seconds": peer.seconds, "difference": peer.difference}
            for name, peer in peers.items()
        },
    }


def found_by(network: CpuTarget, schedulers: Sequence[str]) -> dict[str, ScheduleCandidate]:
    """Our schedules by name; sequential is among them."""
    candidates = {}
    for name in dict.fromkeys([SEQUENTIAL, *schedulers]):
        said(f"{name}: searching", 0)
        candidates[name] = search(network, name)
    return candidates | {extra.scheduler: extra for extra in network.extras()}


def _summary(candidate: ScheduleCandidate) -> Record:
    return {
        "predicted_seconds": candidate.predicted_seconds,
        "stages": len(candidate.stages),
        "wide_stages": sum(len(stage.groups) > 1 for stage in candidate.stages),
        "merged_stages": sum(stage.merged for stage in candidate.stages),
        "pruning": candidate.pruning,
        "effort": asdict(candidate.effort),
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, with 95 % confidence whatever the distribution: a pair of order statistics by
    the binomial distribution. Of fewer than six values the least and the largest."""
    ordered, size = sorted(values), len(values)
    place, below = 0, 1 / 2**size
    while 2 * (below + comb(size, place + 1) / 2**size) <= 0.05:
        place += 1
        below += comb(size, place) / 2**size
    return ordered[place], ordered[size - 1 - place]


def ratio(record: Record, name: str, to: str = SEQUENTIAL) -> str:
    """The median of the rounds' ratios, and its interval."""
    ratios = ratios_of(record["seconds"][name], record["seconds"][to])
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def best_plain(record: Record) -> str:
    """The better of sequential and one thread."""
    plain = [name for name in (SEQUENTIAL, ONE_THREAD) if name in record["seconds"]]
    return min(plain, key=lambda name: statistics.median(record["seconds"][name]))


def tables(found: dict[str, Record], peers: Sequence[str]) -> str:
    """What was chosen, all schedules and all peers."""
    chosen = [
        (
            network,
            f"{record['kernels']:,}",
            record["chosen"],
            _milliseconds(record, record["chosen"]),
            ratio(record, record["chosen"]),
            best_plain(record),
            ratio(record, record["chosen"], best_plain(record)),
        )
        for network, record in found.items()
    ]
    head = ("network", "kernels", "chosen", "ms", "of sequential", "better plain", "of that")
    parts = ["Chosen:", table(head, chosen)]
    for title, names in (("Our schedules", OURS), ("Peers", (SEQUENTIAL, *peers))):
        lines = [(network, *(_cell(record, n) for n in names)) for network, record in found.items()]
        parts += [f"{title}, ms, and the ratio to sequential:", table(("network", *names), lines)]
    parts += [
        f"* absent: {network}: {peer}: {reason}"
        for network, record in found.items()
        for peer, reason in record["absent"].items()
    ]
    return "\n\n".join(parts)


def _milliseconds(record: Record, name: str) -> str:
    return f"{1e3 * statistics.median(record['seconds'][name]):.3g}"


def _cell(record: Record, name: str) -> str:
    if name not in record["seconds"]:
        return "-"
    milliseconds = _milliseconds(record, name)
    return milliseconds if name == SEQUENTIAL else f"{milliseconds}; {ratio(record, name)}"


def main(given: Sequence[str]) -> None:
    parser = parser_of_networks(__doc__, rounds=25)
    add, ours, peers = parser.add_argument, list(SCHEDULERS), list(PEERS)
    add("--peers", nargs="*", choices=peers, default=peers, metavar="PEER")
    add("--schedulers", nargs="*", choices=ours, default=ours)
    add("--limit", type=count, default=300, help="seconds until a peer is ready")
    arguments = parser.parse_args(given)
    names = ("rounds", "seed", "peers", "schedulers", "limit")
    settings = {name: getattr(arguments, name) for name in names}
    options = ["--rounds", str(arguments.rounds), "--seed", str(arguments.seed)]
    options += ["--limit", str(arguments.limit), "--peers", *arguments.peers]
    options += ["--schedulers", *arguments.schedulers]
    found = records(__file__, arguments, settings, options, one)
    readme = README if arguments.write else None
    show(tables(found, arguments.peers), readme, "table of cpu.py")
    if len(found) < len(arguments.networks):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
