"""Makes one machine of the hosts that ranks are on, with the links between them measured.

rank of host a ── here ──┐
rank of host b ── here ──┴─► devices a/cpu0, b/cpu0 ── pings between all ranks ──► machine
"""

from dataclasses import replace
from itertools import permutations

from dovetail.costs.measured import fit_link
from dovetail.errors import UsageError
from dovetail.executors.hosts import deal, measure_links
from dovetail.machine import Link, Machine, names_here, on_host
from dovetail.machine.files import machine_from_dict, machine_to_dict
from dovetail.machine.local import GPU_SEND_SECONDS
from dovetail.pipeline.sources import Notes, TellProgress, resolve_machine, silent
from dovetail.runtime.ranks import Ranks
from dovetail.units import HERE


def machine_of_hosts(
    name: str,
    ranks: Ranks,
    progress: TellProgress = silent,
    *,
    fresh: bool = False,
    notes: Notes | None = None,
) -> Machine:
    """The machine of all ranks, which call this together.

    name   what each host's part is, as `here`. If a host has several ranks, its cores are split
           evenly, and each rank has one part as its device

    All devices of two ranks share a channel each way. A link is measured while nothing else is
    sent, so what several hosts send at once over one cable is not known. Raises `UsageError` for a
    name of another machine, and `RankLostError`.
    """
    if not names_here(name):
        raise UsageError("MACHINE", f"--hosts joins what is on each host, as here, not {name!r}")
    beside = [rank for rank, host in enumerate(ranks.hosts) if host == ranks.host]
    if len(beside) > 1 and name != HERE:
        says = f"host {ranks.host!r} has {len(beside)} ranks, which share its cores evenly"
        raise UsageError("MACHINE", f"{says}; use here, not {name!r}, or one rank a host")
    own = None
    if beside[0] == ranks.rank:
        text = name if len(beside) == 1 else f"here/{len(beside)}"
        own = machine_to_dict(resolve_machine(text, progress, fresh=fresh, notes=notes))
    parts: dict[str, Machine] = {}
    for host, raw in zip(ranks.hosts, ranks.gather("machine", own), strict=True):
        if raw is None:
            continue
        parts[host] = on_host(host, machine_from_dict(raw))
    progress("measuring the links between hosts", 0.0, None)
    measured = measure_links(ranks)
    devices = [device for part in parts.values() for device in part.devices]
    first = parts[ranks.hosts[0]]
    # A link between each two devices, whose rates do not count yet.
    every = (Link(a, b, 1.0, 0.0) for a, b in permutations([d.name for d in devices], 2))
    joined = Machine("hosts", tuple(devices), first.host, tuple(every))
    rank_of = dict(zip(joined.device_names, deal(joined, ranks.hosts), strict=True))
    inside = {
        (link.source, link.destination): link
        for part in parts.values()
        for link in part.links
        if rank_of[link.source] == rank_of[link.destination]
    }
    links = []
    for link in joined.links:
        ends = rank_of[link.source], rank_of[link.destination]
        if ends[0] == ends[1]:
            links.append(inside[link.source, link.destination])
        else:
            channel = f"rank {ends[0]} -> rank {ends[1]}"
            times = measured[ends]
            # The threads that issue to GPUs were not measured.
            least_seconds = [
                GPU_SEND_SECONDS if joined.devices[joined.device_index(name)].kind == "gpu" else 0.0
                for name in (link.source, link.destination)
            ]
            links.append(
                Link(
                    link.source,
                    link.destination,
                    **fit_link(times.hop_seconds),
                    channel=channel,
                    send_seconds=max(times.send_seconds, least_seconds[0]),
                    receive_seconds=max(times.receive_seconds, least_seconds[1]),
                )
            )
    return replace(joined, links=tuple(links))
